"""The net by type: a replicated result that may differ between ranks is refused, though its values agree by chance."""

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint

from spmd import (
    Mesh,
    P,
    Sharded,
    SpecError,
    all_gather,
    all_to_all,
    axis_index,
    data_parallel,
    fetch,
    functional,
    functional_with_buffers,
    grad,
    optimizer,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    spmd,
    value_and_grad,
)

ONES = torch.ones(4, 4)  # whose parts are alike, so that no comparison of values finds a forgotten psum


CUT = P("data")


@pytest.fixture(scope="module")
def mesh(shared_mesh):
    return shared_mesh({"data": 2})


@pytest.fixture(scope="module")
def square(shared_mesh):
    return shared_mesh({"data": 2, "model": 2})


def refused(mesh: Mesh, body, *args, in_specs=CUT, **options) -> str:
    with pytest.raises(SpecError, match="may differ between ranks") as caught:
        spmd(body, mesh=mesh, in_specs=in_specs, **options)(*args)
    return str(caught.value)


def accepted(mesh: Mesh, body, *args, in_specs=CUT, **options):
    return spmd(body, mesh=mesh, in_specs=in_specs, **options)(*args)


def test_a_forgotten_psum_behind_a_flag_is_refused(mesh):
    """With a driver only the first value of a flag was followed."""
    step = spmd(lambda x, how: psum(x.sum(), "data") if how == "sum" else x.sum(), mesh=mesh, in_specs=(CUT, None))
    assert float(step(ONES, "sum")) == 16.0
    with pytest.raises(SpecError, match="may differ between ranks"):
        step(ONES, "mean")


def test_no_line_is_named_where_the_program_has_none(mesh):
    text = refused(mesh, grad(lambda x: x.square().sum(), axes=()), ONES)
    assert "it comes of argument 0 [Mesh" in text


def test_a_forgotten_psum_is_refused_where_values_agree(mesh):
    def step(x):
        half = x.sum() / 2
        return {"loss": half + 1}

    text = refused(mesh, step, ONES)
    assert "result ['loss'] of step may differ between ranks along data, though it does not this time" in text
    assert re.search(r"comes of argument 0, computed at test_replication.py:\d+", text)
    line = int(re.search(r"test_replication.py:(\d+)", text)[1])
    assert line == step.__code__.co_firstlineno + 2
    assert "psum or pmean it over 'data', or return x[None], and give that a spec such as out_specs=P(\"data\")" in text
    assert accepted(mesh, lambda x: psum(x.sum(), "data"), ONES).item() == 16


def test_where_values_differ_both_are_said(mesh):
    with pytest.raises(SpecError) as caught:
        spmd(lambda x: {"loss": x.sum()}, mesh=mesh, in_specs=P("data"))(torch.arange(4.0))
    assert "should be the same on all ranks along data, and is not; it comes of argument 0" in str(caught.value)
    assert "rank 0: 1.0; rank 1: 5.0" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "found"), [(lambda x: x, 'P("data", "model")'), (lambda x: x.sum(1), 'P(("data", "model"))')]
)
def test_the_spec_that_is_named_keeps_the_axes_that_are_cut(square, body, found):
    """And is one that works."""
    options = {"in_specs": P("data", "model"), "check": "always"}
    with pytest.raises(SpecError, match=f"out_specs={re.escape(found)}"):
        spmd(body, mesh=square, out_specs=P("data"), **options)(ONES)
    spmd(body, mesh=square, out_specs=eval(found), **options)(ONES)


def test_only_axes_that_values_differ_along_are_named(square):
    x = torch.arange(4.0)
    with pytest.raises(SpecError, match=r"on all ranks along model, and is not.*psum or pmean it over 'model'"):
        spmd(lambda x: x.sum(), mesh=square, in_specs=P("model"))(x)
    with pytest.raises(SpecError, match=r"on all ranks along data, model, and is not.*ranks 0, 3: 0.0; ranks 1-2: 1.0"):
        spmd(lambda: (axis_index("data") + axis_index("model")) % 2 * torch.ones(()), mesh=square)()


def test_never_checks_nothing(mesh):
    assert accepted(mesh, lambda x: x.sum(), ONES, check="never").item() == 8


def test_a_spec_covers(mesh, square):
    assert accepted(mesh, lambda x: x * 2, ONES, out_specs=P("data")).shape == (4, 4)
    assert accepted(mesh, lambda x: {"x": Sharded(x * 2, P("data"))}, ONES)["x"].shape == (4, 4)
    text = refused(square, lambda x: x * 2, ONES, in_specs=P("data", "model"), out_specs=P("data"))
    assert "along model, " in text
    again = accepted(mesh, lambda x: x, ONES, out_specs=P("data"))
    assert "argument 0" in refused(mesh, lambda x: x.sum(), again, in_specs=None)  # an Array's own spec


def test_an_axis_of_one_rank_has_nothing_to_differ(shared_mesh):
    assert accepted(shared_mesh({"data": 1}), lambda x: x.sum(), ONES).item() == 16


CLEARS = {
    "psum": lambda x, axis: psum(x, axis),
    "pmean": lambda x, axis: pmean(x, axis),
    "pmax": lambda x, axis: pmax(x, axis),
    "pmin": lambda x, axis: pmin(x, axis),
    "all_gather": lambda x, axis: all_gather(x, axis),
    "pbroadcast": lambda x, axis: pbroadcast(x, axis, 0),
}
ADDS = {
    "psum_scatter": lambda x, axis: psum_scatter(x, axis, tiled=True),
    "ppermute": lambda x, axis: ppermute(x, axis, [(0, 1), (1, 0)]),
    "all_to_all": lambda x, axis: all_to_all(x, axis, 0, 1, tiled=True),
}


@pytest.mark.parametrize("name", CLEARS)
def test_collectives_that_clear(square, name):
    collective = CLEARS[name]
    accepted(square, lambda x: collective(x, "data"), ONES)
    accepted(square, lambda x: collective(collective(x, "data"), "model"), ONES, in_specs=P("data", "model"))
    accepted(square, lambda x: collective(x, ("data", "model")), ONES, in_specs=P("data", "model"))
    text = refused(square, lambda x: collective(x, "data"), ONES, in_specs=P("data", "model"))
    assert "along model," in text
    text = refused(square, lambda x: collective(x, "model"), ONES)
    assert "along data," in text


@pytest.mark.parametrize("name", ADDS)
def test_collectives_that_add(square, name):
    collective = ADDS[name]
    assert f"along data, though it does not this time; it comes of {name}, computed at" in refused(
        square, lambda x: collective(x, "data"), ONES, in_specs=None
    )
    assert "along data, model," in refused(square, lambda x: collective(x, "data"), ONES, in_specs=P("model"))


def test_where_the_axes_come_from(mesh):
    assert "axis_index" in refused(mesh, lambda: torch.tensor(axis_index("data")) * 0, in_specs=None)
    assert "axis_index" in refused(mesh, lambda x: x * (0 * axis_index("data") + 1.5), ONES, in_specs=None)
    assert "axis_index" in refused(mesh, lambda x: x[2 * axis_index("data")], ONES, in_specs=None)
    assert "axis_index" in refused(mesh, lambda: torch.full((2,), 0 * axis_index("data")), in_specs=None)
    assert "random numbers" in refused(mesh, lambda x: F.dropout(x) * 0, ONES, in_specs=None)
    assert "random numbers" in refused(mesh, lambda: torch.empty(2).bernoulli_(torch.ones(2)), in_specs=None)
    text = refused(mesh, lambda: torch.rand(2) > 2, in_specs=None)
    assert "random numbers" in text and "pbroadcast(noise, 'data', 0) is the same on all ranks; or psum" in text

    def message():
        comm, got = mesh.comm("data"), torch.empty(2)
        sending = comm.isend(torch.ones(2), 1 - comm.rank)
        comm.recv(got, 1 - comm.rank)
        sending.wait()
        return got

    assert "a message (recv)" in refused(mesh, message, in_specs=None)


def test_what_does_not_differ(mesh):
    def own_generator():
        return torch.rand(2, generator=torch.Generator().manual_seed(3))

    def seeded():
        torch.manual_seed(3)
        return torch.rand(2)

    accepted(mesh, own_generator, in_specs=None)
    accepted(mesh, seeded, in_specs=None)
    accepted(mesh, lambda x: F.dropout(x, 0.5, training=False), ONES, in_specs=None)
    accepted(mesh, lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), ONES, in_specs=None)
    accepted(mesh, lambda x: torch.zeros_like(x), ONES)
    accepted(mesh, lambda x: x.new_full((2,), 3), ONES)
    accepted(mesh, lambda x, y: (x[2 * axis_index("data")].sum() * 0 + 1, x)[1], ONES, ONES, in_specs=None)


def test_views_of_what_came_in(mesh, square):
    """Torch takes views of them as other objects; so it does of gradients."""
    cut = P("data", "model")
    for view in (lambda y: y[0], lambda y: y.view(-1)[:2], lambda y: y.t()[0], lambda y: y[0].expand(3, 2), torch.diag):
        assert "argument 0" in refused(square, lambda y, view=view: view(y).sum() + 1, ONES, in_specs=cut)
        assert "argument 0" in refused(square, lambda y, view=view: F.linear(view(y), ONES[:2, :2]), ONES, in_specs=cut)
    slope = grad(lambda w, x: (w * x).sum(), axes=())
    assert "argument 1" in refused(mesh, lambda w, x: slope(w, x)[0], ONES[:2], ONES, in_specs=(P(), CUT))
    assert "along model" in refused(square, lambda w, x: slope(w, x)[0], ONES, ONES, in_specs=(P("model"), P("model")))
    whole = accepted(mesh, lambda w, x: grad(lambda w, x: (w * x).sum())(w, x)[0], ONES[:2], ONES, in_specs=(P(), CUT))
    assert whole.tolist() == [1.0] * 4


def test_views_and_writes(mesh):
    def into_rows(x):
        out = torch.zeros(2, 4)
        out[0] = x.sum()
        return out

    def by_out(x):
        out = torch.zeros(4)
        torch.sum(x, 0, out=out)
        return out

    def by_a_view(x):
        out = torch.zeros(4)
        out.view(2, 2)[0].add_(x.sum())
        return out.detach()

    def written_at_a_place():
        out = torch.ones(2)
        out[axis_index("data")] = 1
        return out

    for body in (into_rows, by_out, by_a_view):
        assert "argument 0" in refused(mesh, body, ONES)
    assert "axis_index" in refused(mesh, written_at_a_place, in_specs=None)

    def overwritten(x):
        out = x.clone()
        out.copy_(torch.zeros(()))
        return out, torch.zeros(2, 4).copy_(x).zero_()

    accepted(mesh, overwritten, ONES)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


BODIES = {
    "function": lambda x: Double.apply(x),
    "vmap": lambda x: torch.func.vmap(lambda row: row * 2)(x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    "jvp beside a constant": lambda x: torch.func.jvp(lambda y: torch.add(y, torch.ones(4), alpha=2), (x,), (x,))[1],
    "func.grad": lambda x: torch.func.grad(lambda y: (y**2).sum())(x),
    "backward": lambda x: torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0],
    "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "module": lambda x: functional(nn.Linear(4, 4))[0]({"weight": torch.ones(4, 4), "bias": torch.zeros(4)}, x),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "foreach": lambda x: torch._foreach_add([x, x], 1.0)[1],
    "where": lambda x: torch.where(x > 0, torch.ones(()), torch.zeros(())),
    "index": lambda x: torch.arange(8)[x[0].long()],
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, torch.ones(3, 4)),
    "no grad": lambda x: torch.no_grad()(torch.sin)(x),
    "in place": lambda x: torch.ones(2, 4).mul_(x),
    "cat": lambda x: torch.cat([torch.ones(2, 4), x])[2:],
}


@pytest.mark.parametrize("name", BODIES)
def test_axes_pass_through(mesh, name):
    body = BODIES[name]
    assert "argument 0" in refused(mesh, lambda x: body(x.clone()).sum() * 0, ONES)
    accepted(mesh, lambda x: body(psum(x, "data")), ONES)
    accepted(mesh, lambda x: psum(body(x.clone()).sum(), "data"), ONES)


def test_lists_are_joined_entry_by_entry(mesh):
    def body(x):
        whole = torch.zeros(3)
        torch._foreach_add_([whole, x.clone()], 1.0)
        return whole, torch._foreach_mul([whole, x], [whole, x])[0]

    accepted(mesh, body, ONES)


# -- gradients ---------------------------------------------------------------------------------------------------------


def loss(w, x):
    return (x @ w).sin().mean()


def test_gradients_are_means_over_the_mesh(square):
    w = torch.ones(4, 2)
    value, gradient = accepted(square, value_and_grad(loss), w, ONES, in_specs=(None, P("data")))
    assert value.spec == P() and gradient.spec == P()
    accepted(square, grad(loss), w, ONES, in_specs=(None, P("data", None)))
    text = refused(square, grad(loss, axes="model"), w, ONES, in_specs=(None, P("data")))
    assert "along data," in text
    accepted(square, grad(loss, axes="data"), w, ONES, in_specs=(None, P("data")))
    assert "along data," in refused(square, grad(loss, axes=()), w, ONES, in_specs=(None, P("data")))
    accepted(square, lambda w, x: pmean(grad(loss, axes=())(w, x), "data"), w, ONES, in_specs=(None, P("data")))


def test_gradients_of_what_is_cut_keep_its_axes(square):
    def partial(w, x):
        return psum(x @ w, "model").sum()

    def step(w, x):
        return grad(partial)(w, x)

    specs = (P("model"), P("data", "model"))
    accepted(square, step, torch.ones(4, 2), ONES, in_specs=specs, out_specs=P("model"))
    assert "along model," in refused(square, step, torch.ones(4, 2), ONES, in_specs=specs)


def test_nested_gradients(mesh):
    def inner(w, x):
        return grad(lambda w: loss(w, x))(w).pow(2).sum()

    accepted(mesh, lambda w, x: grad(inner)(w, x), torch.ones(4, 2), ONES, in_specs=(None, P("data")))
    accepted(mesh, lambda w, x: grad(lambda w: inner(w, x))(w), torch.ones(4, 2), ONES, in_specs=(None, P("data")))


def test_auxiliary_values(mesh):
    def with_aux(w, x):
        out = x @ w
        count = (out > 0).sum()
        return out.mean(), {"mean": out.mean(), "count": psum(count, "data") if summed else count}

    summed = True
    accepted(mesh, value_and_grad(with_aux, has_aux=True), torch.ones(4, 2), ONES, in_specs=(None, P("data")))
    summed = False  # 4 on both ranks by chance, and 8 on one device
    refused(mesh, value_and_grad(with_aux, has_aux=True), torch.ones(4, 2), ONES, in_specs=(None, P("data")))


@pytest.mark.parametrize("shards", [None, 2, 4])
@pytest.mark.parametrize("shard", [None, "data"])
def test_training_with_dropout(mesh, shards, shard):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    apply, params, buffers = functional_with_buffers(model)
    opt = optimizer(torch.optim.AdamW, lr=0.1, shard=shard)

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params, buffers, opt_state, batch):
        def f(params, batch):
            out, new = apply(params, buffers, batch)
            return out.pow(2).mean(), new

        (value, buffers), grads = value_and_grad(f, has_aux=True)(params, batch)
        params, opt_state = opt.step(params, grads, opt_state)
        return params, buffers, opt_state, value

    opt_state = opt.init(params)
    for size in (16, 16, 13):
        params, buffers, opt_state, value = step(params, buffers, opt_state, torch.ones(size, 4))
    assert value.item() >= 0


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("way", ["foreach", "fused", None])
def test_optimizers_of_parameters_cut_in_part(square, optimizer_class, way):
    options = {} if way is None else {way: True}
    opt = optimizer(optimizer_class, lr=0.1, **options)
    specs = {"w": P("model"), "b": P()}

    @spmd(mesh=square, in_specs=({**specs}, P("data", "model")), out_specs=(specs, P()))
    def step(params, x):
        def f(params):
            return (psum(x @ params["w"], "model") + params["b"]).sin().mean()

        value, grads = value_and_grad(f)(params)
        new, _ = opt.step(params, grads, opt.init(params))
        return new, value

    params = {"w": torch.ones(4, 2), "b": torch.ones(2)}
    for _ in range(2):
        params, _ = step(params, ONES)


def test_gradients_changed_in_place(mesh):
    def step(params, x):
        grads = grad(lambda params: (x @ params["a"] @ params["b"]).mean())(params)
        for gradient in grads.values():
            gradient.mul_(0.5)
        return grads

    params = {"a": torch.ones(4, 3), "b": torch.ones(3, 2)}
    accepted(mesh, step, params, ONES, in_specs=(None, P("data")))


def test_one_step_within_another(mesh):
    @spmd(in_specs=P("data"), out_specs=P("data"))
    def inner(x):
        return x * 2

    accepted(mesh, lambda x: (inner(x), x), ONES, in_specs=None)
    accepted(mesh, lambda x: data_parallel(lambda batch: pmean(batch.sum(), "data"))(x), ONES, in_specs=None)
    assert "the batch" in refused(mesh, lambda x: data_parallel(lambda batch: batch.sum())(x), ONES, in_specs=None)


def test_the_bits_are_those_of_later_calls(mesh):
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.LayerNorm(65), nn.Linear(65, 7))
    apply, params = functional(model)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, batch):
        return value_and_grad(lambda params, batch: apply(params, batch).pow(2).mean())(params, batch)

    x = torch.randn(30, 33)
    first, second = step(params, x), step(params, x)
    assert first[0].item() == second[0].item()
    assert all(torch.equal(first[1][name].full(), second[1][name].full()) for name in params)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_transformer_that_evaluates_is_as_in_later_calls(mesh):
    """torch has another way for it, with zeros at padding, which it leaves where functions are overridden."""
    tokens = torch.tensor([[1, 2, 0, 0], [3, 1, 2, 0], [2, 0, 0, 0], [1, 1, 3, 0]])
    table, layer = torch.randn(4, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    apply, params = functional(nn.TransformerEncoder(layer, 2).eval())

    @torch.no_grad()
    def predict(params, batch):
        return apply(params, table[batch], src_key_padding_mask=batch == 0)

    expected = predict(params, tokens)
    assert not expected[tokens == 0].any() and expected[tokens != 0].any()
    asked = torch.overrides.has_torch_function
    step = spmd(data_parallel(predict), mesh=mesh, out_specs=CUT)
    first, second = step(params, tokens).full(), step(params, tokens).full()
    assert torch.equal(first, second) and torch.allclose(first, expected, atol=1e-5)
    assert all(mesh.run(lambda: torch.overrides.has_torch_function is asked))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(mesh, layout):
    apply, params = functional(nn.Linear(3, 2))
    batch = {"x": torch.randn(6, 4, 3), "length": torch.tensor([1, 4, 2, 3, 4, 1])}

    def loss(params, batch):
        rows = [row[:length] for row, length in zip(batch["x"], batch["length"], strict=True)]
        out = apply(params, torch.nested.nested_tensor(rows, layout=layout)).relu_()
        return out.to_padded_tensor(0.0).sum((1, 2)).square().mean()

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, batch):
        return value_and_grad(loss)(params, batch)

    (value, grads), (whole, expected) = step(params, batch), value_and_grad(loss)(params, batch)
    assert torch.allclose(value.full(), whole)
    assert all(torch.allclose(grads[name].full(), expected[name], atol=1e-6) for name in params)


def test_operators_that_take_functions(mesh):
    """Control flow of torch's own: one operation, whose result differs along what its arguments differ along."""

    def grown(x):
        return torch.cond(psum(x.sum(), "data") > 3, lambda x: x + 1, lambda x: x - 1, (x,))

    step = spmd(grown, mesh=mesh, in_specs=CUT, out_specs=CUT)
    assert step(ONES).full().unique().item() == 2 and step(ONES / 16).full().unique().item() == 1 / 16 - 1
    assert "psum or pmean it over 'data'" in refused(mesh, grown, ONES)


@pytest.mark.parametrize("check", ["first", "never"])
def test_collectives_in_functions_that_torch_compiles(mesh, check):
    """Only the first call runs them as they are; torch's own errors would follow at the next."""

    def chosen(x):
        return torch.cond(x.sum() > 0, lambda x: psum(x.sum(), "data"), lambda x: x.sum(), (x,))

    def scanned(x):
        return scan(lambda carry, row: (carry + psum(row, "data"), row * 1), x[0] * 0, x)[0].sum()

    def differentiated(x):
        return torch.cond(x.sum() > 0, lambda x: grad(lambda x: x.sum())(x).sum(), lambda x: x.sum(), (x,))

    for step, words in (
        (chosen, "psum was called in a function given to torch.cond, .*Python's if and for"),
        (scanned, "psum was called in a function given to scan"),
        (differentiated, "grad of <lambda> was called in a function given to torch.cond"),
    ):
        for _ in range(2):
            with pytest.raises(SpecError, match=words):
                spmd(step, mesh=mesh, in_specs=P("data"), check=check)(ONES)
    outside = spmd(
        lambda x: psum(torch.cond(x.sum() > 0, torch.sum, torch.mean, (x,)), "data"), mesh=mesh, in_specs=CUT
    )
    assert outside(ONES).item() == ONES.sum().item()


@pytest.mark.parametrize("check", ["first", "never"])
def test_gradients_through_a_condition(mesh, check):
    """By what its functions capture, too: on the first call torch runs them as they are, which has no such gradient."""

    def loss(params, x):
        scaled = torch.cond(x.sum() > 0, lambda x: (x * params["w"]).mean(), lambda x: x.mean(), (x * params["u"],))
        return scaled + params["v"].sum()

    params = {name: torch.ones(()) for name in "uvw"}
    step = spmd(lambda params, x: grad(loss)(params, x), mesh=mesh, in_specs=(None, CUT), check=check)
    for _ in range(3):
        assert all(gradient.item() == 1 for gradient in step(params, ONES).values())


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_gradients_through_a_scan(mesh):
    """By what its function captures, too, and with trees, which torch's own has in compiled code only."""

    def loss(params, x):
        def combined(carry, row):
            total = carry["total"] * params["w"] + row
            return {"total": total, "count": carry["count"] + 1}, {"out": total * params["v"]}

        start = {"total": x[0] * 0, "count": torch.zeros(())}
        last, outs = scan(combined, start, x, dim=0, reverse=True)
        return (last["total"] + outs["out"].sum(0)).mean() + last["count"] * params["v"]

    params = {name: torch.full((), 2.0) for name in "wv"}
    step = spmd(lambda params, x: grad(loss)(params, x), mesh=mesh, in_specs=(None, P("data")))
    first, *later = [fetch(step(params, torch.arange(12.0).view(4, 3))) for _ in range(3)]
    assert first["w"] > 0 and first["v"] > 2 and first == later[0] == later[1]


# -- whatever the program --------------------------------------------------------------------------------------------

OPERATIONS = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "mean": lambda x, y: x.mean().expand_as(x).clone(),
    "row": lambda x, y: y * x[0],
    "in place": lambda x, y: x.clone().add_(y),
    "zeros": lambda x, y: torch.zeros_like(x),
    "place": lambda x, y: x + axis_index("model"),
    "slice": lambda x, y: y + x[axis_index("data")],
    "psum data": lambda x, y: psum(x, "data"),
    "psum model": lambda x, y: psum(x, "model"),
    "pmean both": lambda x, y: pmean(x, ("data", "model")),
    "pmax": lambda x, y: pmax(x, "data"),
    "gather": lambda x, y: all_gather(x, "model").sum(0),
    "permute": lambda x, y: ppermute(x, "data", [(0, 1)]),
    "scatter": lambda x, y: psum_scatter(x, "data", tiled=True).repeat(2, 1),
    "broadcast": lambda x, y: pbroadcast(x, "model", 1),
    "grad": lambda x, y: grad(lambda v: (v * y).sum())(x),
    "local grad": lambda x, y: grad(lambda v: (v * y).sum(), axes="data")(x),
}


def program(steps, x, y):
    for name, swap in steps:
        x, y = (y, OPERATIONS[name](x, y)) if swap else (OPERATIONS[name](x, y), y)
    return x


def test_what_is_accepted_agrees(square):
    """Programs by hypothesis: run with the net; if it accepts, all ranks have computed the same bits."""
    kinds = {"accepted": 0, "refused": 0}
    step = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.booleans())
    specs = st.sampled_from([P(), P("data"), P(None, "model"), P("data", "model")])

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(step, min_size=1, max_size=5), specs, specs)
    def check(steps, spec_x, spec_y):
        def whole(spec):  # of which each rank gets (2, 2)
            shape = [4 if "data" in spec.axes else 2, 4 if "model" in spec.axes else 2]
            return torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)

        def body(x, y):
            return program(steps, x, y)

        run = spmd(body, mesh=square, in_specs=(spec_x, spec_y), check="first")
        args = whole(spec_x), whole(spec_y)
        shards = spmd(
            lambda x, y: program(steps, x, y)[None], mesh=square, in_specs=(spec_x, spec_y),
            out_specs=P(("data", "model")), check="never",
        )(*args).full()  # fmt: skip
        agree = all(torch.equal(shards[0], shard) for shard in shards)
        try:
            run(*args)
            kinds["accepted"] += 1
            assert agree, "accepted, and the ranks differ"
        except SpecError as error:
            kinds["refused"] += 1
            # By value alone it would be a hole in the net by type, as numbers from .item() are; here are none.
            assert "it comes of" in str(error), error

    check()
    assert min(kinds.values()) > 5, kinds
