import concurrent.futures
import copy
import doctest
import functools
import gc
import mmap
import sys
import warnings

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import on_both
from internals import checks_remembered
from torch import nn

from spmd import (
    Array,
    Mesh,
    P,
    Sharded,
    SpecError,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    data_parallel,
    grad,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    put,
    spmd,
    value_and_grad,
)
from spmd.mesh.region import current
from spmd.transforms._plan import Plan
from spmd.transforms._sums import Sums
from spmd.transforms._tokens import in_gradient, started

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def of_rank(values, axis="data"):
    return torch.tensor(values)[axis_index(axis)]


def test_the_examples_in_the_documentation_are_right():
    from spmd.transforms import _grad

    assert doctest.testmod(_grad).failed == 0


# -- the five numbers -------------------------------------------------------------------------------------------------


def five_numbers():
    w, x = torch.tensor(2.0), of_rank([3.0, 5.0])
    return [
        float(grad(lambda w: w * x)(w)),
        float(grad(lambda w: psum(w * x, "data"))(w)),
        float(grad(lambda w: pmean(w * x, "data"))(w)),
        float(pmean(grad(lambda w: w * x)(w), "data")),
        float(grad(lambda w: w * x, axes=())(w)),
    ]


@on_both
def test_the_five_numbers_of_the_calculus(shared_mesh, backend):
    first, second = shared_mesh({"data": 2}, backend).run(five_numbers)
    assert first == [4.0, 8.0, 4.0, 4.0, 3.0]
    assert second == [4.0, 8.0, 4.0, 4.0, 5.0]


def test_the_value_is_the_mean_too(shared_mesh):
    def body():
        w, x = torch.tensor(2.0), of_rank([3.0, 5.0])
        return [
            tuple(float(v) for v in value_and_grad(f, axes=axes)(w))
            for f in (lambda w: w * x, lambda w: psum(w * x, "data"))
            for axes in (None, "data", ("data",), ())
        ]

    first, second = shared_mesh({"data": 2}).run(body)
    assert first == [(8.0, 4.0)] * 3 + [(6.0, 3.0)] + [(16.0, 8.0)] * 3 + [(16.0, 6.0)]
    assert second == [(8.0, 4.0)] * 3 + [(10.0, 5.0)] + [(16.0, 8.0)] * 3 + [(16.0, 10.0)]


# -- transposes, by finite differences of the mean over the mesh ------------------------------------------------------


def slopes(f, arguments, sharded, axes, seed):
    """(the directional derivative of the mean of `f` from its gradient, the same by finite differences)."""
    torch.manual_seed(1000 * seed + axis_index(axes))
    ways = [torch.randn_like(argument) for argument in arguments]
    ways = [way if is_sharded else pbroadcast(way, axes, 0) for way, is_sharded in zip(ways, sharded, strict=True)]
    wrapped = [Sharded(a, P(axes)) if is_sharded else a for a, is_sharded in zip(arguments, sharded, strict=True)]
    gradients = grad(f, tuple(range(len(arguments))))(*wrapped)
    found = torch.zeros((), dtype=torch.float64)
    for gradient, way, is_sharded in zip(gradients, ways, sharded, strict=True):
        found += psum((gradient.local * way).sum(), axes) if is_sharded else (gradient * way).sum()

    def mean_at(step):
        return pmean(f(*(a + step * way for a, way in zip(arguments, ways, strict=True))), axes)

    return float(found), float((mean_at(1e-6) - mean_at(-1e-6)) / 2e-6)


def second(f, sharded, axes):
    """A scalar made of the gradient of `f`: its own gradient is of second order."""

    def value(*arguments):
        torch.manual_seed(5 + axis_index(axes))
        wrapped = [Sharded(a, P(axes)) if is_sharded else a for a, is_sharded in zip(arguments, sharded, strict=True)]
        gradients = grad(f, tuple(range(len(arguments))))(*wrapped)
        locals_ = [g.local if isinstance(g, Sharded) else g for g in gradients]
        return sum((g * torch.randn_like(g)).sum() + (g**2).sum() for g in locals_)

    return value


def one_of_each(axis):
    """Functions of a replicated w (3, 4) and a sharded x (4, 2n), each through one collective or several."""
    n, at = axis_size(axis), axis_index(axis)
    ring = [(i, (i + 1) % n) for i in range(n)]
    tilt = 1.0 + at + torch.arange(6 * n, dtype=torch.float64).view(3, 2 * n) / 5

    def through(collective):
        return lambda w, x: (collective(torch.sin(w @ x)) ** 2).sum() * (1.5 + at) + (w * at).sum()

    def tilted(collective):
        return through(lambda h: collective(h * tilt))

    def softmax(w, x):
        logits = w @ x  # the last dimension is sharded
        highest = pmax(logits.detach().amax(-1), axis)
        weights = torch.exp(logits - highest[:, None])
        return (weights / psum(weights.sum(-1), axis)[:, None] * tilt).sum()

    def several(w, x):
        h = psum(all_gather(torch.tanh(w @ x), axis, dim=1, tiled=True), axis)
        h = psum_scatter(h.cos() * tilt.repeat(1, n), axis, dim=1, tiled=True)
        return (ppermute(h, axis, ring) * pmean(h, axis) * tilt).sum()

    return {
        "psum": tilted(lambda h: psum(h, axis)),
        "pmean": tilted(lambda h: pmean(h, axis)),
        "pmax": tilted(lambda h: pmax(h, axis)),
        "pmin": tilted(lambda h: pmin(h, axis)),
        "gather": through(lambda h: all_gather(h, axis, dim=1)),
        "gather tiled": through(lambda h: all_gather(h, axis, dim=-1, tiled=True) * tilt.repeat(1, n)),
        "scatter": tilted(lambda h: psum_scatter(h[:, :n] * (1 + at), axis, dim=1)),
        "scatter tiled": tilted(lambda h: psum_scatter(h, axis, dim=1, tiled=True)),
        "exchange": tilted(lambda h: all_to_all(h[:, :n], axis, 1, 0)),
        "exchange tiled": tilted(lambda h: all_to_all(h, axis, 1, 0, tiled=True)),
        "ring": tilted(lambda h: ppermute(h, axis, ring)),
        "one pair": tilted(lambda h: ppermute(h, axis, [(0, n - 1)])),
        "no pair": tilted(lambda h: ppermute(h, axis, [])),
        "broadcast": tilted(lambda h: pbroadcast(h, axis, n - 1)),
        "softmax": softmax,
        "several": several,
    }


def compare_slopes(axes, names):
    out = {}
    for name in names:
        f = one_of_each(axes)[name]
        torch.manual_seed(0)
        w = torch.randn(3, 4, dtype=torch.float64)
        torch.manual_seed(1 + axis_index(axes))
        x = torch.randn(4, 2 * axis_size(axes), dtype=torch.float64)
        for order, function in ((1, f), (2, second(f, (False, True), axes))):
            out[name, order] = slopes(function, (w, x), (False, True), axes, seed=order)
    return out


FUNCTIONS = (
    *("psum", "pmean", "pmax", "pmin", "gather", "gather tiled", "scatter", "scatter tiled", "exchange"),
    *("exchange tiled", "ring", "one pair", "no pair", "broadcast", "softmax", "several"),
)


@pytest.mark.parametrize(
    ("axes", "backend"),
    [
        ({"data": 2}, "shm"),
        ({"data": 3}, "shm"),
        ({"data": 4}, "shm"),
        ({"a": 2, "b": 2}, "shm"),
        ({"data": 2}, "gloo"),
    ],
    ids=str,
)
def test_transposes_are_the_derivative_of_the_mean_to_second_order(shared_mesh, axes, backend):
    """Over a tuple the minor axis comes first, so that its order is tested as well."""
    everything = shared_mesh(axes, backend).run(compare_slopes, tuple(reversed(axes)), FUNCTIONS)
    for results in everything:
        for case, (found, wanted) in results.items():
            assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6), case


def test_the_extreme_is_shared_evenly_among_ties(shared_mesh):
    def body():
        x = torch.tensor([[1.0, 7.0], [4.0, 7.0], [4.0, 2.0]])[axis_index("data")]
        return grad(lambda x: 3 * pmax(x, "data").sum())(Sharded(x, P("data"))).local

    results = shared_mesh({"data": 3}).run(body)
    assert torch.allclose(torch.stack(results), torch.tensor([[0, 1.5], [1.5, 1.5], [1.5, 0]]))


def test_third_order(shared_mesh):
    def body():
        w, x = torch.tensor(2.0), of_rank([3.0, 5.0])

        def f(w):
            return psum(w * x, "data") ** 3  # 512 w^3

        return float(grad(f)(w)), float(grad(grad(f))(w)), float(grad(grad(grad(f)))(w))

    assert shared_mesh({"data": 2}).run(body) == [(6144.0, 6144.0, 3072.0)] * 2


# -- whole models against their dense twins ---------------------------------------------------------------------------


def make(*shapes):
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@on_both
def test_a_tensor_parallel_mlp_is_its_dense_twin(shared_mesh, backend):
    x, y, w1, b1, w2, b2 = make((8, 5), (8, 3), (5, 6), (6,), (6, 3), (3,))
    specs = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()}
    params = {"w1": w1, "b1": b1, "w2": w2, "b2": b2}

    def dense(params, x, y):
        return F.mse_loss(torch.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"], y)

    def parallel(params, x, y):
        h = torch.tanh(x @ params["w1"] + params["b1"])
        return F.mse_loss(psum(h @ params["w2"], "model") + params["b2"], y)

    mesh = shared_mesh({"data": 2, "model": 2}, backend)
    step = spmd(
        value_and_grad(parallel),
        mesh=mesh,
        in_specs=(specs, P("data"), P("data")),
        out_specs=(P(), specs),
        check="always",
    )
    value, gradients = step(params, x, y)
    wanted_value, wanted = value_and_grad(dense)(params, x, y)
    close(value.full(), wanted_value)
    for name in params:
        close(gradients[name].full(), wanted[name])
        assert gradients[name].spec == specs[name]

    # And the gradient of a penalty on the gradient.
    def bend(f):
        def penalty(params, x, y):
            chosen = grad(lambda chosen: f({**params, **chosen}, x, y))({"b2": params["b2"]})
            return (chosen["b2"] ** 2).sum()

        return grad(penalty)

    bent = spmd(
        bend(parallel),
        mesh=mesh,
        in_specs=(specs, P("data"), P("data")),
        out_specs=specs,
        check="always",
    )(params, x, y)
    for name, wanted_bend in bend(dense)(params, x, y).items():
        close(bent[name].full(), wanted_bend)


def attention(q, k, v, y):
    return F.mse_loss(torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1) @ v, y)


def ring_attention(q, k, v, y):
    """Keys and values go round; the softmax is put together from its parts."""
    n = axis_size("ring")
    total = torch.zeros_like(q)
    norm = torch.zeros(q.shape[0], 1, dtype=q.dtype)
    highest = torch.full((q.shape[0], 1), -torch.inf, dtype=q.dtype)
    for _ in range(n):
        logits = q @ k.T / q.shape[-1] ** 0.5
        new = torch.maximum(highest, logits.amax(-1, keepdim=True))
        weights = torch.exp(logits - new)
        scale = torch.exp(highest - new)
        total, norm, highest = total * scale + weights @ v, norm * scale + weights.sum(-1, keepdim=True), new
        k, v = ppermute((k, v), "ring", [(i, (i + 1) % n) for i in range(n)])
    return F.mse_loss(total / norm, y)


def test_ring_attention_is_dense_attention(shared_mesh):
    arguments = make((6, 4), (6, 4), (6, 4), (6, 4))
    value, gradients = spmd(
        value_and_grad(ring_attention, (0, 1, 2)),
        mesh=shared_mesh({"ring": 3}),
        in_specs=P("ring"),
        out_specs=(P(), P("ring")),
    )(*arguments)
    wanted_value, wanted = value_and_grad(attention, (0, 1, 2))(*arguments)
    close(value.full(), wanted_value)
    for found, dense in zip(gradients, wanted, strict=True):
        close(found.full(), dense)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_pipeline_whose_stages_run_different_code(shared_mesh, backend):
    """On the first stage the loss is a constant, and what it sends on is needed elsewhere; both are in the gradient."""
    x, y, w = make((3, 4, 5), (3, 4, 5), (2, 5, 5))  # three micro-batches, a weight for each stage

    def pipeline(w, x, y):
        stage, total, arrived = axis_index("stage"), torch.zeros((), dtype=torch.float64), None
        for tick in range(4):
            if stage == 0:
                send = torch.tanh(x[tick] @ w[0]) if tick < 3 else torch.zeros(4, 5, dtype=torch.float64)
            else:
                send = torch.zeros(4, 5, dtype=torch.float64)
                if tick:
                    total = total + F.mse_loss(torch.sin(arrived @ w[0]), y[tick - 1])
            arrived = ppermute(send, "stage", [(0, 1)])
        return 2 * total  # of the mean over two stages, of which one adds nothing

    def dense(w, x, y):
        return sum(F.mse_loss(torch.sin(torch.tanh(x[i] @ w[0]) @ w[1]), y[i]) for i in range(3))

    mesh = shared_mesh({"stage": 2}, backend)
    specs = {"mesh": mesh, "in_specs": (P("stage"), P(), P())}
    value, gradient = spmd(value_and_grad(pipeline), out_specs=(P(), P("stage")), **specs)(w, x, y)
    wanted_value, wanted = value_and_grad(dense)(w, x, y)
    close(value.full(), wanted_value)
    close(gradient.full(), wanted)

    def norm(f, scale):
        return lambda w, x, y: (scale * grad(f)(w, x, y) ** 2).sum()

    bent = spmd(grad(norm(pipeline, 2.0)), out_specs=P("stage"), **specs)(w, x, y)
    close(bent.full(), grad(norm(dense, 1.0))(w, x, y))


# -- what comes with it -----------------------------------------------------------------------------------------------


def test_floats_of_aux_are_averaged_and_the_rest_must_agree(shared_mesh):
    def body():
        x = of_rank([3.0, 5.0])

        def f(w):
            aux = {
                "tensor": torch.stack([x, w.detach()]),
                "half": x.half(),
                "complex": torch.complex(x, -x),
                "float": float(x),
                "numpy": np.float32(x),
                "array": np.array([float(x)]),
                "count": torch.tensor(7),
                "flag": True,
                "name": "loss",
                "none": None,
                "function": len,
                "mine": Sharded(x, P("data")),
                "whole": Sharded(x.to(torch.int64), P("data")),
            }
            return w * x, aux

        (value, aux), gradient = value_and_grad(f, has_aux=True)(torch.tensor(2.0))
        gradient_too, aux_too = grad(f, has_aux=True)(torch.tensor(2.0))
        nested = grad(lambda w: grad(f, has_aux=True)(w)[1]["tensor"][1] * value_and_grad(f, has_aux=True)(w)[0][0])
        assert aux.keys() == aux_too.keys() and float(gradient_too) == float(gradient) == 4.0 and float(value) == 8.0
        assert not any(leaf.requires_grad for leaf in (aux["tensor"], aux["half"], aux["complex"]))
        return aux, float(nested(torch.tensor(2.0)))

    for rank, (aux, nested) in enumerate(shared_mesh({"data": 2}).run(body)):
        assert aux["tensor"].tolist() == [4.0, 2.0]
        assert aux["half"].dtype is torch.float16 and aux["half"].item() == 4.0
        assert aux["complex"].item() == 4 - 4j
        assert type(aux["float"]) is float and aux["float"] == 4.0 and aux["numpy"] == 4.0
        assert aux["array"].dtype is torch.float64 and aux["array"].tolist() == [4.0]
        assert aux["count"].item() == 7
        assert (aux["flag"], aux["name"], aux["none"], aux["function"]) == (True, "loss", None, len)
        assert aux["mine"].local.item() == aux["whole"].local.item() == (3, 5)[rank]
        assert nested == 8.0  # 2 * 4: the value's slope by w, with the auxiliary w detached


@pytest.mark.parametrize(
    ("aux", "parts"),
    [
        (lambda rank: {"n": torch.tensor(rank)}, ("aux['n']", "rank 0: 0", "rank 1: 1", "float")),
        (lambda rank: (1.0, "a" if rank else "b"), ("aux[1]", "rank 0: 'b'", "rank 1: 'a'")),
        (lambda rank: [torch.zeros(2 + rank)], ("aux[0]", "float32[2]", "float32[3]", "Sharded")),
        (lambda rank: [1] * (1 + rank), ("aux has another structure",)),
        (lambda rank: {"ab"[rank]: 1.0}, ("aux has another structure",)),
    ],
)
def test_aux_that_cannot_be_averaged_is_named(shared_mesh, aux, parts):
    def body():
        return grad(lambda w: (w * 1, aux(axis_index("data"))), has_aux=True)(torch.ones(()))

    mesh = shared_mesh({"data": 2})
    with pytest.raises(SpecError) as caught:
        mesh.run(body)
    assert all(part in str(caught.value) for part in parts), caught.value


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [None, 2])
def test_aux_of_parameters_that_are_cut_is_not_averaged_with_other_elements(shared_mesh, shards):
    """Running statistics of channels that "model" cuts: those of "data" are averaged, those of "model" put together."""
    mesh = shared_mesh({"data": 2, "model": 2})
    w, running = torch.arange(1.0, 5.0), torch.zeros(4)
    x = torch.tensor([[1.0], [2.0], [3.0], [6.0]])

    def step_with(declared):
        def loss_fn(w, running, batch):
            h = batch * w
            new = declared(running.lerp(h.detach().mean(0), 0.5))
            return psum(h.sum(1).mean(), "model"), {"mean": new, "size": h.detach().mean()}

        @spmd(mesh=mesh, in_specs=(P("model"), P("model"), None), out_specs={"mean": P("model"), "size": P()})
        @data_parallel(shards=shards)
        def step(w, running, batch):
            return value_and_grad(loss_fn, has_aux=True)(w, running, batch)[0][1]

        return step

    with pytest.raises(SpecError, match=r"aux\['mean'\] would be averaged over 'model'.*Sharded.*, or pmean"):
        step_with(lambda new: new)(w, running, x)
    found = step_with(lambda new: Sharded(new, P("model")))(w, running, x)
    assert found["mean"].full().tolist() == [1.5, 3.0, 4.5, 6.0] and float(found["size"]) == 7.5
    assert step_with(lambda new: pmean(new, "model"))(w, running, x)["mean"].full().tolist() == [3.0, 4.5, 3.0, 4.5]


def test_several_arguments_and_negative_numbers(shared_mesh):
    def f(a, b, *, c=1.0):
        return (a * b["x"]).sum() * c

    def body():
        a, b = torch.tensor([1.0, 2.0]), {"x": torch.tensor([3.0, 4.0])}
        return (
            grad(f)(a, b),
            grad(f, 1)(a, b, c=2.0),
            grad(f, -1)(a, b),
            grad(f, (1, 0))(a, b),
            grad(f, (-2,))(a, b),
            grad(f, [0, 1])(a, b),
        )

    for inside in (*shared_mesh({"data": 2}).run(body), body()):
        first, second, last, both, single, listed = inside
        assert first.tolist() == [3.0, 4.0]
        assert second["x"].tolist() == [2.0, 4.0]
        assert last["x"].tolist() == [1.0, 2.0]
        assert both[0]["x"].tolist() == [1.0, 2.0] and both[1].tolist() == [3.0, 4.0]
        assert isinstance(single, tuple) and single[0].tolist() == [3.0, 4.0]
        assert listed[0].tolist() == [3.0, 4.0] and listed[1]["x"].tolist() == [1.0, 2.0]
    for bad in (2, -3, (0, 2), (0, 0), [1, -1], "a", 1.0):
        with pytest.raises(SpecError, match="bad argnums for f"):
            grad(f, bad)(torch.ones(2), {"x": torch.ones(2)})
    with pytest.raises(SpecError, match="by position"):
        grad(f)(a=torch.ones(2), b={"x": torch.ones(2)})


def test_sparse_gradients_come_back_dense(shared_mesh):
    def body():
        index = torch.tensor([axis_index("data"), 1])
        return grad(lambda w: F.embedding(index, w, sparse=True).sum())(torch.ones(3, 2))

    assert shared_mesh({"data": 2}).run(body)[1].tolist() == [[0.5, 0.5], [1.5, 1.5], [0.0, 0.0]]


def test_sparse_gradients_within_another_are_refused(shared_mesh):
    @spmd(mesh=shared_mesh({"data": 2}), in_specs=(P(), P("data")))
    def outer(w, index):
        inner = grad(lambda w: F.embedding(index, w, sparse=True).square().sum())
        return grad(lambda w: inner(w).square().sum())(w)

    with pytest.raises(SpecError, match=r"a sparse gradient .* within another .*sparse=False"):
        outer(torch.ones(3, 2), torch.tensor([0, 1]))


def test_a_sparse_argument():
    assert grad(lambda w: (w.to_dense() ** 2).sum())(torch.eye(2).to_sparse()).to_dense().tolist() == [[2, 0], [0, 2]]


def test_what_can_be_called_can_be_differentiated(shared_mesh):
    class Loss:
        def __call__(self, w, scale):
            return (w * scale).sum()

        def method(self, w):
            return self(w, 3.0)

    w = torch.ones(2)
    for f in (functools.partial(Loss(), scale=3.0), Loss().method, lambda w: Loss()(w, 3.0)):
        assert grad(f)(w).tolist() == [3.0, 3.0]
    assert grad(Loss())(w, 3.0).tolist() == [3.0, 3.0]


def all_kinds():
    return {
        "used": torch.ones(2, 3),
        "unused": torch.ones(4),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "integer": torch.arange(3),
        "flag": torch.tensor([True]),
        "scalar": torch.tensor(2.0),
        "empty": torch.ones(0, 3),
        "complex": torch.tensor([1 + 2j, 3 - 1j]),
        "double": torch.tensor([0.5], dtype=torch.float64),
        "half": torch.tensor([0.5], dtype=torch.bfloat16),
        "strided": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.ones(1).expand(3),
        "sliced": torch.arange(10.0)[::3],
        "last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "name": "linear",
        "number": 3,
        "nothing": None,
    }


def of_all_kinds(p, x):
    total = (p["used"] * x).sum() + p["frozen"].sum() + p["integer"].sum() + p["scalar"] * x + p["empty"].sum() * 5
    total = total + (p["complex"].abs() ** 2).sum() * x + (p["double"] ** 2).sum().float() + p["half"].float().sum() * x
    total = total + (p["strided"] * torch.arange(6.0).view(3, 2)).sum() * x + (p["expanded"] ** 2).sum() * x
    return total + p["sliced"].sum() + (p["last"] ** 3).sum() * x + (p["conjugate"] ** 2).real.sum() + p["number"]


@on_both
def test_leaves_of_all_kinds(shared_mesh, backend):
    def body():
        return grad(of_all_kinds)(all_kinds(), of_rank([3.0, 5.0]))

    wanted = grad(of_all_kinds)(all_kinds(), torch.tensor(4.0))
    for found in shared_mesh({"data": 2}, backend).run(body):
        assert list(found) == list(wanted)
        for name, like in all_kinds().items():
            if not isinstance(like, torch.Tensor):
                assert found[name] is None and wanted[name] is None
                continue
            assert found[name].dtype is like.dtype and found[name].shape == like.shape, name
            torch.testing.assert_close(found[name], wanted[name].resolve_conj(), msg=name)
            assert not found[name].requires_grad
        assert found["last"].is_contiguous(memory_format=torch.channels_last)
    for name in ("unused", "frozen", "integer", "flag"):
        assert not wanted[name].any()
    assert wanted["conjugate"].resolve_conj().tolist() == [2 + 4j]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_zeros_of_large_frozen_leaves_take_no_memory_until_they_are_written():
    """As they are by a program that clips all gradients in place."""
    params = {"frozen": nn.Parameter(torch.empty(1 << 12, 1 << 13), requires_grad=False), "trained": torch.ones(2)}
    before = resident_bytes()
    found = grad(lambda p: p["trained"].sum() + p["frozen"][0, :2].detach().isnan().sum())(params)
    assert resident_bytes() - before < params["frozen"].nbytes / 4
    assert found["frozen"].shape == (1 << 12, 1 << 13) and not found["frozen"].any()
    for gradient in found.values():
        gradient.sub_(0.5).clamp_(-0.25, 0.25)
    assert bool((found["frozen"] == -0.25).all()) and found["trained"].tolist() == [0.25, 0.25]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128, torch.int64, torch.bool])
def test_zeros_of_large_leaves_that_are_not_trained(dtype):
    like = torch.ones(512, 256, dtype=dtype).t()
    found = grad(lambda p: p["w"].sum())({"w": torch.ones(2), "large": nn.Parameter(like, requires_grad=False)})
    assert found["large"].dtype is dtype and found["large"].shape == (256, 512) and not found["large"].any()


def test_gradients_on_another_device_than_the_mesh_s_are_refused(shared_mesh):
    """As those on a GPU of a mesh of CPUs would be."""
    mesh = shared_mesh({"data": 2})

    def body():
        sums = Sums(current(), Plan())
        sums.add(torch.empty(3, device="meta"), ("data",))
        sums.open()

    with pytest.raises(SpecError, match=r"on 'meta' cannot be summed over a mesh of device 'cpu'.*device='meta'"):
        mesh.run(body)


def test_sharded_arguments_keep_a_gradient_of_their_own(shared_mesh):
    def body():
        x = of_rank([3.0, 5.0])

        def f(w):
            return w * w * x

        declared = grad(f)(Sharded(x, P("data")))
        differing = grad(f)(x.clone())  # its bits differ, so it is no replica
        tree = grad(lambda t: t["a"] * t["b"][0] * x)({"a": torch.tensor(2.0), "b": Sharded([x], P("data"))})
        return declared, float(differing), float(tree["a"]), tree["b"]

    for rank, (declared, differing, a, b) in enumerate(shared_mesh({"data": 2}).run(body)):
        x = (3.0, 5.0)[rank]
        assert isinstance(declared, Sharded) and declared.spec == P("data")
        assert float(declared.local) == differing == x * x  # half of 2 w x
        assert a == 17.0  # the mean of x squared
        assert isinstance(b, Sharded) and float(b.local[0]) == x


def test_leaves_computed_in_the_region_are_replicas_if_their_bits_agree(shared_mesh):
    def body():
        x = of_rank([3.0, 5.0])
        whole = torch.tensor([1.0, 2.0])
        same = whole * 2
        mine = whole[axis_index("data")]  # a view of a replica that differs
        both = grad(lambda a, b, c: (a.sum() + b + c.sum()) * x, (0, 1, 2))(same, mine, psum(x[None], "data"))
        return [g.sum().item() for g in both]

    assert shared_mesh({"data": 2}).run(body) == [[8.0, 1.5, 4.0], [8.0, 2.5, 4.0]]


def test_leaves_whose_bits_agree_on_some_ranks_are_parts_on_all(shared_mesh):
    mesh = shared_mesh({"data": 2, "model": 2})

    @spmd(mesh=mesh, in_specs=P(("data", "model")), out_specs=P(("data", "model")))
    def step(x):
        w = torch.full((1,), float(mesh.rank == 3))  # the same on ranks 0, 1 and 2
        return grad(lambda w: (w * x).sum())(w)

    assert step(torch.arange(4.0)).full().tolist() == [0.0, 0.25, 0.5, 0.75]


def test_a_part_that_agrees_by_chance_is_refused(shared_mesh):
    """Each rank's columns of a weight, and its part of a bias that is zero: whose gradient must not be summed."""
    x, weights = torch.ones(2, 3), {"w": torch.arange(12.0).view(3, 4), "b": torch.zeros(4)}

    def loss(params):
        return psum((x @ params["w"] + params["b"]).square().mean(), "data") / 2

    def body(weights, declare):
        columns = slice(2 * axis_index("data"), 2 * axis_index("data") + 2)
        mine = {"w": weights["w"][:, columns], "b": weights["b"][columns]}
        return grad(loss)({**mine, "b": Sharded(mine["b"], P("data"))} if declare else mine)["b"]

    step = spmd(body, mesh=shared_mesh({"data": 2}))
    with pytest.raises(
        SpecError, match=r"the same on all along 'data'.*comes of axis_index.*\['b'\], \[2\].*Sharded\("
    ):
        step(weights, False)
    expected = grad(lambda p: (x @ p["w"] + p["b"]).square().mean())(weights)["b"]
    assert step(weights, True).full().tolist() == expected.tolist()


@pytest.mark.parametrize("check", ["first", "never"])
def test_a_part_that_agrees_by_chance_on_a_later_call_is_refused(shared_mesh, check):
    """What differed on the first call, as a part of the data does, may be the same later."""
    cut, mesh = P("data", "model"), shared_mesh({"data": 2, "model": 2})

    def step_that(declares):
        def step(w, x):
            part = Sharded(x * 2, cut) if declares else x * 2
            part, whole = grad(lambda part, whole: (part * whole).square().sum(), (0, 1))(part, w * 2)
            first, _ = [grad(lambda h: (h * w).sum())(h) for h in (w + 1, w * x)]  # of which one differs
            return Sharded(part.local if declares else part, cut), whole, first

        return spmd(step, mesh=mesh, in_specs=(P(), cut), check=check)

    def compare(step, x):
        part, whole, first = step(torch.tensor(3.0), x)
        assert torch.equal(part.full(), 2 * 2 * x * 6**2 / 4)
        assert whole.item() == 2 * 6 * (2 * x).square().sum() / 4 and first.item() == 3.0

    different, alike = torch.arange(4.0).view(2, 2), torch.tensor([[1.0, 1.0], [5.0, 5.0]])
    step = step_that(declares=True)
    for x in (different, alike, torch.ones(2, 2), different):
        compare(step, x)
    step = step_that(declares=False)
    compare(step, different)
    text = r"along 'model': its values agree, and it differed on the first.*argument \[0\], \[1, 1\].*Sharded"
    with pytest.raises(SpecError, match=text):
        compare(step, alike)
    compare(step, different)
    del step
    gc.collect()
    mesh.run(bool)  # the ranks forget the dropped function, but not that a part of it differed
    with pytest.raises(SpecError, match=text):
        compare(step_that(declares=False), alike)


@pytest.fixture(scope="module")
def with_compiler():
    """A mesh whose ranks have imported torch's compiler, as those of other tests need not."""

    def imports():
        import torch._dynamo  # noqa: F401

    with Mesh({"data": 2}) as mesh:
        mesh.run(imports)
        yield mesh


def test_a_part_that_agrees_by_chance_is_refused_where_the_compiler_was_imported(with_compiler):
    """There the first call of a function made anew is not looked at again."""
    for check in ("first", "never"):

        @spmd(mesh=with_compiler, in_specs=P("data"), check=check)
        def step(x):
            return Sharded(grad(lambda x: x.square().sum())(x * 2), P("data"))

        assert step(torch.tensor([1.0, 2.0])).full().tolist() == [2.0, 4.0]
        with pytest.raises(SpecError, match="its values agree, and it differed on the first"):
            step(torch.ones(2)).full()
        del step
        gc.collect()
        with_compiler.run(bool)


def test_a_replica_changed_in_place_is_none_any_more(shared_mesh):
    def body():
        total = psum(torch.ones(()), "data")
        gradient = grad(lambda w: w * w)(total)
        alike = float(grad(lambda w: w * w)(total))
        total += axis_index("data")
        gradient *= 1 + axis_index("data")
        return alike, float(grad(lambda w: w * w)(total)), float(grad(lambda w: w * w)(gradient))

    def known(w, _):
        mark = grad(lambda w: w * w)(w)
        mark *= 1 + axis_index("data")
        return Sharded(grad(lambda w: w * w)(mark)[None], P("data"))

    assert shared_mesh({"data": 2}).run(body) == [(4.0, 2.0, 4.0), (4.0, 3.0, 8.0)]
    assert spmd(known, mesh=shared_mesh({"data": 2}))(torch.tensor(1.0), 0).full().tolist() == [2.0, 4.0]


def test_views_of_arguments_are_told_apart(shared_mesh):
    """A view of a replicated argument may differ between ranks, and of a sharded one may agree."""

    def body(w, x):
        mine = w[axis_index("data")]
        return Sharded(grad(lambda w: w * 2)(mine)[None], P("data")), grad(lambda x: x.sum())(x[:, :0]).shape[1]

    found, width = spmd(body, mesh=shared_mesh({"data": 2}), in_specs=(P(), P("data")))(
        torch.tensor([1.0, 2.0]), torch.ones(2, 3)
    )
    assert found.full().tolist() == [1.0, 1.0] and width == 0


def test_axes_choose_the_mean(shared_mesh):
    def body():
        x = 1.0 + axis_index(("data", "model"))  # 1 2 / 3 4
        w = torch.tensor(2.0)

        def f(w):
            return w * x

        return [float(grad(f, axes=axes)(w)) for axes in (None, "data", "model", ("data", "model"), ())]

    assert shared_mesh({"data": 2, "model": 2}).run(body) == [
        [2.5, 2.0, 1.5, 2.5, 1.0],
        [2.5, 3.0, 1.5, 2.5, 2.0],
        [2.5, 2.0, 3.5, 2.5, 3.0],
        [2.5, 3.0, 3.5, 2.5, 4.0],
    ]
    with pytest.raises(SpecError, match="grad got an unknown"):
        shared_mesh({"data": 2}).run(lambda: grad(lambda w: w * 1, axes="model")(torch.ones(())))


@pytest.mark.parametrize("axes", [None, "data", ()], ids=str)
def test_a_mean_that_leaves_out_an_axis_that_is_communicated_over(shared_mesh, axes):
    """A tensor-parallel weight gets the gradient of the sum over "model", what is added behind the psum does not."""

    def loss_fn(params, x):
        return (psum(x * params["cut"], "model") + params["whole"]).sum()

    def body(params, x):
        found = grad(loss_fn, axes=axes)(params, x)
        return {"cut": Sharded(found["cut"], P("model")), "whole": pmean(found["whole"], ("data", "model"))}

    params, x = {"cut": torch.tensor([2.0, 3.0]), "whole": torch.tensor(0.0)}, torch.tensor([5.0, 7.0])
    step = spmd(
        body, mesh=shared_mesh({"data": 2, "model": 2}), in_specs=({"cut": P("model"), "whole": P()}, P("model"))
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = step(params, x)
    texts = [str(one.message) for one in caught if "leaves out: the gradient is" in str(one.message)]
    if axes is None:
        assert not texts and found["cut"].full().tolist() == [5.0, 7.0] and float(found["whole"]) == 1.0
    else:
        assert len(texts) == 1 and "loss_fn communicates over 'model'" in texts[0]
        assert found["cut"].full().tolist() == [10.0, 14.0] and float(found["whole"]) == 1.0


def test_a_gradient_over_one_axis_is_not_the_same_along_the_other(shared_mesh):
    """What comes of it is treated as what it is when it is differentiated in turn: the local step of local SGD."""

    def body():
        x = 1.0 + axis_index(("data", "model"))
        w = torch.tensor(0.0)
        w = w - grad(lambda w: w * x, axes="data")(w)  # -2 or -3, by model
        g = grad(lambda w: w * w / 2, axes="data")(w)  # each column's own w
        local = grad(lambda w: w * x, axes=())(torch.tensor(0.0))
        return float(g), float(grad(lambda v: v * v)(local))

    assert shared_mesh({"data": 2, "model": 2}).run(body) == [(-2.0, 0.5), (-3.0, 1.0), (-2.0, 1.5), (-3.0, 2.0)]


def test_a_region_as_long_as_a_run_remembers_few_checks(with_compiler):
    """A loop within one `mesh.run` takes gradients with aux, many more than are remembered, also beside graphs."""

    def loss_fn(w):
        return w.square().mean(), w.detach()

    def body():
        assert torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2)).sum() == 4
        return checks_remembered(lambda: grad(loss_fn, has_aux=True)(torch.ones(3)), 16)

    assert max(with_compiler.run(body)) <= 16


def test_arrays_as_arguments(shared_mesh):
    mesh = shared_mesh({"data": 2})
    w, x = put(torch.tensor(2.0), mesh=mesh), put(torch.tensor([3.0, 5.0]), P("data"), mesh=mesh)

    def f(w, x):
        return (w * x).sum()

    with pytest.raises(SpecError, match=r"grad got an Array outside a region.*array.full\(\)"):
        grad(f)(w, x)

    def body():  # captured: each rank's own view
        return tuple(float(g.sum()) for g in grad(f, (0, 1))(w, x))

    assert mesh.run(lambda: isinstance(w, Array)) == [True, True]
    assert mesh.run(body) == [(4.0, 1.0)] * 2
    assert mesh.run(lambda: float(grad(lambda w: w * x.local.sum())(w))) == [4.0, 4.0]
    assert mesh.run(lambda: float(grad(lambda x: (w.local * x).sum())(x))) == [1.0, 1.0]


# -- ways to call it --------------------------------------------------------------------------------------------------


def test_outside_a_region_it_is_torchs_gradient():
    w, x = torch.randn(3, 4), torch.randn(4)

    def f(w, x):
        return torch.tanh(w @ x).sum()

    leaf = w.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(f(leaf, x), leaf)
    value, found = value_and_grad(f)(w, x)
    assert torch.equal(found, wanted) and torch.equal(value, f(w, x))
    (value, aux), found = value_and_grad(lambda w: (f(w, x), {"n": 3, "x": x, "f": 0.5}), has_aux=True)(w)
    assert torch.equal(found, wanted) and aux["n"] == 3 and torch.equal(aux["x"], x) and aux["f"] == 0.5
    with torch.no_grad():
        assert torch.equal(grad(f)(w, x), wanted)
        assert torch.equal(grad(f)(leaf * 1, x), wanted)  # a leaf that torch has a graph of
    hessian = torch.func.jacrev(torch.func.grad(f))(w, x)
    ours = torch.stack([grad(lambda w, i=i: grad(f)(w, x).flatten()[i])(w).flatten() for i in range(12)])
    torch.testing.assert_close(ours, hessian.reshape(12, 12))


def test_the_name_and_signature_of_the_function_stay():
    def loss(params, x):
        """How far off."""
        return params.sum() * x

    assert grad(loss).__name__ == value_and_grad(loss).__name__ == "loss" and grad(loss).__doc__ == "How far off."


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda w: w, r"float32\[3\]"),
        (lambda w: 1.0, "float"),
        (lambda w: (w.sum(), 1), "tuple"),
        (lambda w: w.sum().to(torch.int64), "int64"),
        (lambda w: w.sum() + 0j, "complex64"),
        (lambda w: None, "NoneType"),
    ],
)
def test_what_is_no_scalar_is_refused(f, text):
    with pytest.raises(SpecError, match=f"must return a scalar to be differentiated.*{text}"):
        grad(f)(torch.ones(3))


def test_argnums_of_other_integers(shared_mesh):
    mesh = shared_mesh({"data": 2})

    def f(a, b):
        return (a * a * b).sum()

    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    for number in (np.int64(1), torch.tensor(1), np.int32(-1)):
        assert grad(f, number)(a, b).tolist() == [1.0, 4.0]
        assert grad(spmd(f, mesh=mesh), number)(a, b).full().tolist() == [1.0, 4.0]
    for numbers in (range(2), (np.int64(0), 1)):
        assert [g.tolist() for g in grad(f, numbers)(a, b)] == [[6.0, 16.0], [1.0, 4.0]]
        assert [g.full().tolist() for g in grad(spmd(f, mesh=mesh), numbers)(a, b)] == [[6.0, 16.0], [1.0, 4.0]]
    with pytest.raises(SpecError, match=r"bad argnums for f.*a position"):
        grad(spmd(f, mesh=mesh), 1.0)


def test_whole_numbers_alone_are_refused():
    def f(p):
        return p["w"] * 2.0

    with pytest.raises(SpecError, match=r"whole numbers alone.*got torch.int64\).*torch.tensor\(3.0\)"):
        grad(f)({"w": torch.tensor(3), "note": None})
    assert grad(f)({"w": torch.tensor(3.0), "steps": torch.tensor(3)})["steps"].item() == 0


def test_argnums_of_true_is_not_the_second_argument():
    for transform in (grad, value_and_grad):
        with pytest.raises(SpecError, match=r"got a bad argnums.*got True.*write has_aux=True"):
            transform(lambda a, b: (a * b).sum(), True)(torch.ones(2), torch.ones(2))


def test_a_value_with_one_element_will_do():
    assert value_and_grad(lambda w: w.sum()[None, None])(torch.ones(3))[0].shape == ()
    for bad in (lambda w: w.sum(), lambda w: (w.sum(), 1, 2)):
        with pytest.raises(SpecError, match=r"must return \(value, aux\)"):
            grad(bad, has_aux=True)(torch.ones(3))


def test_the_gradient_of_an_spmd_function_is_the_spmd_function_of_the_gradient(shared_mesh):
    mesh = shared_mesh({"data": 2})

    def f(w, x):
        return torch.tanh(w["a"] * x).mean() * w["b"]

    def with_aux(w, x):
        return f(w, x), {"mean": x.mean()}

    w, x = {"a": torch.tensor([0.5, 0.25]), "b": torch.tensor(2.0)}, torch.randn(4, 2)
    specs = {"mesh": mesh, "in_specs": (P(), P("data"))}
    inner = spmd(value_and_grad(f, (0, 1)), out_specs=(P(), (P(), P("data"))), **specs)(w, x)
    outer = value_and_grad(spmd(f, **specs), (0, 1))(w, x)
    assert torch.equal(inner[0].full(), outer[0].full())
    mine, others = ((w["a"], w["b"], x) for _, (w, x) in (inner, outer))
    for one, other, spec in zip(mine, others, (P(), P(), P("data")), strict=True):
        assert one.spec == other.spec == spec and torch.equal(one.full(), other.full())
    single = grad(spmd(f, **specs))(w, x)
    assert torch.equal(single["a"].full(), outer[1][0]["a"].full())
    last = grad(spmd(f, **specs), argnums=-1)(w, x)
    assert last.spec == P("data") and torch.equal(last.full(), outer[1][1].full())
    gradient, aux = grad(spmd(with_aux, **specs), has_aux=True)(w, x)
    assert torch.equal(gradient["a"].full(), single["a"].full())
    torch.testing.assert_close(aux["mean"].full(), x.mean())
    (value, aux), gradient = value_and_grad(spmd(with_aux, **specs), has_aux=True)(w, x)
    assert torch.equal(value.full(), outer[0].full()) and torch.equal(gradient["b"].full(), single["b"].full())
    specs_of_aux = (P(), {"rows": P("data"), "mean": P()})
    with_rows = spmd(lambda w, x: (f(w, x), {"rows": x * 2, "mean": x.mean()}), **specs, out_specs=specs_of_aux)
    for _, aux in (grad(with_rows, has_aux=True)(w, x), value_and_grad(with_rows, has_aux=True)(w, x)[0]):
        assert aux["rows"].spec == P("data") and torch.equal(aux["rows"].full(), x * 2)
        torch.testing.assert_close(aux["mean"].full(), x.mean())
    # With the batch of data_parallel, and to second order.
    parallel = spmd(data_parallel(lambda w, batch: f(w, batch)), mesh=mesh)
    swapped = spmd(data_parallel(grad(lambda w, batch: f(w, batch))), mesh=mesh)
    odd = torch.randn(5, 2)
    assert torch.equal(grad(parallel)(w, odd)["a"].full(), swapped(w, odd)["a"].full())
    lifted = spmd(grad(data_parallel(lambda w, batch: f(w, batch))), mesh=mesh)
    assert torch.equal(lifted(w, batch=odd)["a"].full(), swapped(w, odd)["a"].full())

    def norm(w, batch):
        return (grad(f)(w, batch)["a"] ** 2).sum()

    bent = [
        grad(spmd(norm, **specs))(w, x)["a"],
        spmd(grad(norm), **specs)(w, x)["a"],
        spmd(data_parallel(grad(norm)), mesh=mesh)(w, x)["a"],
    ]
    for found in bent:
        assert torch.equal(found.full(), bent[0].full())
    torch.testing.assert_close(bent[0].full(), grad(lambda w: (grad(lambda w: f(w, x))(w)["a"] ** 2).sum())(w)["a"])


def test_nested_gradients_of_one_function_in_another(shared_mesh):
    """One step of gradient descent inside the loss: the derivative goes through the averaged inner gradient."""

    def body():
        x = of_rank([3.0, 5.0])

        def inner(w, k):
            return (w - x) ** 2 * k

        def outer(w, k):
            value, g = value_and_grad(inner)(w, k)  # mean 2 k (w - x) = 2 k (w - 4)
            return (w - 0.1 * g) ** 2 * x + value

        w, k = torch.tensor(1.0), torch.tensor(2.0)
        gw, gk = grad(outer, (0, 1))(w, k)
        again = grad(lambda w: grad(outer)(w, k) ** 2)(w)
        return float(gw), float(gk), float(again)

    def plain(w, k):
        g = 2 * k * (w - 4)
        return (w - 0.1 * g) ** 2 * 4 + k * ((w - 3) ** 2 + (w - 5) ** 2) / 2

    w, k = torch.tensor(1.0), torch.tensor(2.0)
    gw, gk = torch.func.grad(plain, (0, 1))(w, k)
    again = torch.func.grad(lambda w: torch.func.grad(plain)(w, k) ** 2)(w)
    for found in shared_mesh({"data": 2}).run(body):
        assert found == pytest.approx((float(gw), float(gk), float(again)), rel=1e-5)


def test_our_gradient_within_torchs_own_graph(shared_mesh):
    def body():
        x = of_rank([3.0, 5.0])
        w = torch.tensor(2.0, requires_grad=True)
        inner = grad(lambda v: v**2 * x)(w * 1)  # 8 w, averaged, and still a function of w
        (slope,) = torch.autograd.grad(inner, w)
        return float(inner), float(psum(slope, "data"))

    assert shared_mesh({"data": 2}).run(body) == [(16.0, 16.0)] * 2


# -- purity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("size", [3, 70_000])
def test_gradients_changed_in_place_are_the_ranks_own(shared_mesh, backend, size):
    def step(w, x):
        grads = grad(lambda w: (w["w"] * x).sum() + (w["v"] * x).sum())(w)
        grads["w"].mul_(2)
        psum(grads["v"], "data")  # goes on to use the transport
        again = grad(lambda w: (w["w"] * x).sum())(w)
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads.values()]))
        for g in grads.values():
            g.mul_(10 / norm)
        return grads, again["w"], norm

    w = {"w": torch.ones(size), "v": torch.ones(size)}
    grads, again, norm = spmd(step, mesh=shared_mesh({"data": 2}, backend), in_specs=(P(), P("data")), check="always")(
        w, torch.tensor([3.0, 5.0])
    )
    assert torch.equal(again.full(), torch.full((size,), 4.0))
    expected = (80.0 * size) ** 0.5
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(grads["w"].full(), torch.full((size,), 80 / expected))
    torch.testing.assert_close(grads["v"].full(), torch.full((size,), 40 / expected))


def test_gradients_of_one_call_do_not_share_memory():
    a, b = torch.ones(3), torch.ones(3)
    first, second = grad(lambda a, b: (a + b).sum(), (0, 1))(a, b)
    first.mul_(2)
    assert second.tolist() == [1.0] * 3

    def outer(a):
        first, second = grad(lambda a, b: (a + b).sum(), (0, 1))(a, b)
        first.mul_(2)
        return (first * a).sum() + (second * a).sum()

    assert grad(outer)(a).tolist() == [3.0] * 3


def test_parameters_that_are_captured_keep_their_grad(shared_mesh):
    def body():
        layer = nn.Linear(2, 2)
        layer.weight.grad = torch.full((2, 2), 7.0)
        x = torch.ones(1, 2, requires_grad=True)
        grad(lambda w: (layer(w) + x).sum())(torch.ones(1, 2))
        grad(lambda p: p.sum())(layer.bias)
        return layer.weight.grad.unique().tolist(), layer.bias.grad, x.grad, layer.weight.requires_grad

    for result in (*shared_mesh({"data": 2}).run(body), body()):
        assert result == ([7.0], None, None, True)


def test_a_function_that_changes_its_argument_in_place_is_told_so():
    with pytest.raises(RuntimeError, match="in-place"):
        grad(lambda w: w.mul_(2).sum())(torch.ones(3))


def test_the_mode_of_the_caller_does_not_matter(shared_mesh):
    def body():
        x = of_rank([3.0, 5.0])

        def f(w):
            return psum(w * x, "data") * w

        with torch.no_grad():
            return float(grad(f)(torch.tensor(2.0))), torch.is_grad_enabled()

    assert shared_mesh({"data": 2}).run(body) == [(32.0, False)] * 2


def test_a_gradient_under_no_grad_is_a_constant_of_the_outer_one(shared_mesh):
    """As torch.func.grad has it."""

    def nested(gradient, total):
        def f(w):
            with torch.no_grad():
                slope = gradient(lambda w: total(w**3 * 8.0))(w)  # 96, held constant
            return slope * w

        return float(gradient(f)(torch.tensor(2.0)))

    assert nested(torch.func.grad, torch.sum) == nested(grad, torch.sum) == 96.0
    assert shared_mesh({"data": 2}).run(lambda: nested(grad, lambda x: psum(x, "data"))) == [192.0] * 2


def test_collectives_under_no_grad_stay_out_of_the_gradient(shared_mesh):
    def body():
        x = of_rank([3.0, 5.0])

        def f(w):
            with torch.no_grad():
                scale = psum(w * x, "data")  # 16, held constant
            metric = psum(x.detach(), "data")
            return psum(w * x, "data") * scale + metric * 0

        return float(grad(f)(torch.tensor(2.0)))

    assert shared_mesh({"data": 2}).run(body) == [128.0] * 2


def test_rank_dependent_use_of_a_collective_does_not_hang(shared_mesh):
    """The result of a collective is used on one rank only; a second one comes before it on the other."""

    def body():
        x = of_rank([3.0, 5.0])

        def f(w):
            total = psum(w * x, "data")
            unused = pmax(w * x, "data")
            if axis_index("data") == 0:
                return total * 1.0
            return unused.detach() * 0 + w * 0

        def constant(w):
            psum(w * x, "data")
            return torch.ones(()) if axis_index("data") else w * x

        return float(grad(f)(torch.tensor(2.0))), float(grad(constant)(torch.tensor(2.0)))

    assert shared_mesh({"data": 2}).run(body) == [(4.0, 1.5)] * 2


def in_another_thread(run):
    """Torch does it so with the backward passes of GPUs: in a thread that is in no region."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def test_a_backward_pass_in_another_thread_belongs_to_the_region_that_it_serves(shared_mesh):
    """What it communicates is part of an outer gradient on all ranks, also where the value does not depend on it."""

    def body():
        x, w = of_rank([3.0, 5.0]), torch.tensor(2.0)

        def values(run):
            seen = []

            def f(w):
                total = psum(torch.sin(w * x), "data")
                before = started()
                (slope,) = run(lambda: torch.autograd.grad(total, w, create_graph=True))
                seen.append(started() - before)
                mean = pmean(slope, "data")
                return slope * mean if axis_index("data") == 0 else w * 0

            return float(grad(f)(w)), seen

        def twice(run):
            """The transpose of the transpose, as well there."""

            def f(w):
                total = psum(torch.sin(w * x), "data")
                (slope,) = run(lambda: torch.autograd.grad(total, w, create_graph=True))
                (bend,) = run(lambda: torch.autograd.grad(slope, w, create_graph=True))
                return bend if axis_index("data") else w * 0

            return float(grad(f)(w))

        def here(run):
            return run()

        assert in_another_thread(lambda: (current(), in_gradient(), started())) == (None, False, 0)
        return values(here), values(in_another_thread), twice(here), twice(in_another_thread)

    for here, there, here_twice, there_twice in shared_mesh({"data": 2}).run(body):
        assert here == there and here[1] == [1]
        assert here_twice == there_twice != 0


def test_a_region_keeps_backward_passes_on_its_thread(shared_mesh):
    """So that a layer which is computed again communicates, on GPUs as well."""

    def body():
        return torch._C._is_multithreading_enabled()

    mesh = shared_mesh({"data": 2})
    assert mesh.run(body) == [False] * 2
    outside = mesh.submit(lambda: in_another_thread(torch._C._is_multithreading_enabled)).result()
    assert outside and torch._C._is_multithreading_enabled()


def test_an_error_in_the_function_leaves_the_next_gradient_whole(shared_mesh):
    def body():
        def broken(w):
            psum(w, "data")
            raise KeyError("mine")

        for _ in range(3):
            with pytest.raises(KeyError):
                grad(lambda w: grad(broken)(w) * 1)(torch.ones(()))
        return five_numbers()

    assert shared_mesh({"data": 2}).run(body)[0] == [4.0, 8.0, 4.0, 4.0, 3.0]


def test_copies_of_gradients_made_in_a_step(shared_mesh):
    """As a program makes with copy.deepcopy; that of what a step notes on them ended the ranks by SIGSEGV."""
    params = {"w": torch.ones(3), "frozen": nn.Parameter(torch.ones(256, 256), requires_grad=False)}

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel
    def step(params, batch):
        grads = grad(lambda params, batch: (batch @ params["w"]).mean())(params, batch)
        return grads, copy.deepcopy(grads)

    for _ in range(3):
        grads, copies = step(params, torch.arange(12.0).view(4, 3))
        for name in params:
            assert torch.equal(copies[name].full(), grads[name].full())


def test_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(SpecError, match="inference_mode, where nothing can be differentiated"):
        grad(lambda w: (w * w).sum())(torch.ones(2))
    with torch.no_grad():
        assert grad(lambda w: (w * w).sum())(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # by torch itself, for the first tangent of a process
def test_a_gradient_in_forward_mode_is_refused(shared_mesh) -> None:
    """Its result had no tangent: that of `w * grad` was 3, and not 9."""

    def tangent(w):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
            slope = dual * grad(lambda w: (w**3).sum())(dual)
            return torch.autograd.forward_ad.unpack_dual(slope).tangent

    for run in (tangent, spmd(tangent, mesh=shared_mesh({"data": 2}))):
        with pytest.raises(SpecError, match=r"inside torch.autograd.forward_ad.dual_level.*use torch.func.grad there"):
            run(torch.ones(2))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_gradient_beside_tangents_of_others() -> None:
    """Forward mode is one for all threads. What a loss captures may have a tangent, too."""
    w = torch.ones(2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, w)
        assert grad(lambda w: (w * w).sum())(w).tolist() == [2, 2]
        with pytest.raises(SpecError, match=r"met a tensor with a tangent"):
            grad(lambda w: (w * dual).sum())(w)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_tangents_do_not_leave_the_program(shared_mesh) -> None:
    """Tensors went to the ranks without them, and what came back had none."""
    mesh, x = shared_mesh({"data": 2}), torch.ones(3)
    array, square = put(x, mesh=mesh), spmd(lambda x: x * x, mesh=mesh)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        for send in (lambda: square(dual), lambda: dual * array):
            with pytest.raises(SpecError, match=r"a tensor with a tangent.*make it dual in the @spmd function"):
                send()
        assert square(x).full().tolist() == (x * array).full().tolist() == [1, 1, 1]


def test_sharded_without_leaves_is_taken_off() -> None:
    found = grad(lambda tree: tree["w"] * (2 if tree["none"] == {} else 1))(
        {"w": torch.tensor(3.0), "none": Sharded({}, P("data"))}
    )
    assert float(found["w"]) == 2
