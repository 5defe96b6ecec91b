"""Parity: a data-parallel step means what it says on one device with the whole batch."""

import sys

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from cases import cases, on_both
from torch import nn

from spmd import (
    CollectiveMismatch,
    Loader,
    MeshError,
    P,
    Sampler,
    SpecError,
    axis_index,
    data_parallel,
    functional,
    functional_with_buffers,
    grad,
    mean_of,
    optimizer,
    pmean,
    psum,
    put,
    spmd,
    value_and_grad,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

over_gloo = pytest.mark.parametrize("backend", [pytest.param("shm", marks=pytest.mark.long), "gloo"])  # slower
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mlp(dtype):
    torch.manual_seed(0)
    return functional(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype))


def regression(apply):
    def loss(params, batch):
        x, y = batch
        return F.mse_loss(apply(params, x), y)

    return loss


def assert_close(found, wanted, tolerance):
    for name, value in wanted.items():
        got = found[name].full() if hasattr(found[name], "full") else found[name]
        assert got.dtype is value.dtype and got.shape == value.shape, name
        torch.testing.assert_close(
            got, value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "backend"),
    cases(
        lambda dtype, backend: (dtype is torch.float32) == (backend == "gloo"),
        (torch.float32, torch.float64),
        ("shm", "gloo"),
    ),
    ids=str,
)
def test_uneven_and_empty_shards_are_exact(shared_mesh, backend, dtype):
    mesh = shared_mesh({"data": 4}, backend)
    apply, params = mlp(dtype)
    loss = regression(apply)
    step = spmd(data_parallel(lambda params, batch: value_and_grad(loss)(params, batch)), mesh=mesh, check="always")
    for size in (1, 2, 3, 4, 5, 7, 8):
        batch = drawn(size, 5, dtype=dtype), drawn(size, 3, dtype=dtype, seed=1)
        value, found = step(params, batch)
        wanted_value, wanted = value_and_grad(loss)(params, batch)
        assert_close({"value": value, **found}, {"value": wanted_value, **wanted}, TOLERANCE[dtype])


def test_a_batch_of_nothing_gives_zeros(shared_mesh):
    apply, params = mlp(torch.float32)
    loss = regression(apply)
    step = spmd(data_parallel(lambda params, batch: value_and_grad(loss)(params, batch)), mesh=shared_mesh({"data": 2}))
    value, found = step(params, (torch.ones(0, 5), torch.ones(0, 3)))
    assert value.item() == 0 and not any(leaf.full().any() for leaf in found.values())


@on_both
def test_batches_of_every_kind(shared_mesh, backend):
    """A tensor, a tree, Arrays however they are cut, a Loader's batch; by position, by name, inside a region."""
    mesh = shared_mesh({"data": 2}, backend)
    w, x, y = drawn(4), drawn(6, 4), drawn(6, seed=1)

    def loss(w, batch):
        return ((batch["x"] @ w - batch["y"][0]) ** 2).mean()

    def step(w, batch, scale=1.0):
        return grad(loss)(w, batch) * scale

    wanted = grad(loss)(w, {"x": x, "y": [y]})
    run = spmd(data_parallel(step), mesh=mesh, check="always")
    trees = [
        {"x": x, "y": [y]},
        {"x": x.numpy(), "y": [y.numpy()]},
        put({"x": x, "y": [y]}, mesh=mesh),
        put({"x": x, "y": [y]}, P("data"), mesh=mesh),
        {"x": put(x, P("data"), mesh=mesh), "y": [y]},
        next(iter(Loader({"x": x, "y": (y,)}, 6, mesh=mesh, seed=3))),
    ]
    for tree in trees:
        torch.testing.assert_close(run(w, tree).full(), wanted)
        torch.testing.assert_close(run(w, batch=tree, scale=2.0).full(), 2 * wanted)
    single = spmd(data_parallel(lambda w, xs: grad(lambda w: (xs @ w).mean())(w), batch="xs"), mesh=mesh)
    torch.testing.assert_close(single(w, x).full(), x.mean(0))

    def body():
        return data_parallel(step)(w, {"x": x, "y": [y]}), data_parallel(step)(w, batch={"x": x[:5], "y": [y[:5]]})

    shorter = grad(loss)(w, {"x": x[:5], "y": [y[:5]]})
    for found, odd in mesh.run(body):
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(odd, shorter)


def test_a_batch_that_was_split_already_is_not_split_again(shared_mesh):
    mesh = shared_mesh({"data": 2})

    def outer(w, batch):
        inner = data_parallel(lambda w, batch: grad(lambda w: (batch * w).mean())(w))
        return inner(w, batch), inner(w, batch[:, None]), inner(w, batch=batch.view(-1, 1).flatten())

    for found in spmd(data_parallel(outer), mesh=mesh)(torch.tensor(1.0), torch.tensor([1.0, 2.0, 6.0])):
        assert found.item() == pytest.approx(3.0)


def test_mistakes_with_batches(shared_mesh):
    mesh = shared_mesh({"data": 2})
    with pytest.raises(SpecError, match=r"no argument named 'batch' to split.*params, x.*batch="):
        data_parallel(lambda params, x: x)
    with pytest.raises(SpecError, match="no argument named 'batch'"):
        data_parallel(lambda *batch: batch)
    with pytest.raises(SpecError, match="bad bucket_mb"):
        data_parallel(lambda batch: batch, bucket_mb=0)
    with pytest.raises(MeshError, match="outside a region"):
        data_parallel(lambda batch: batch)(torch.ones(2))
    optional = data_parallel(lambda w, batch=None: w)
    for call in (spmd(optional, mesh=mesh), spmd(lambda w: optional(w), mesh=mesh)):
        with pytest.raises(SpecError, match=r"called without its batch .*an argument named 'batch'"):
            call(torch.ones(2)).full()

    @data_parallel
    def step(batch, scale=None):
        return psum(sum(leaf.sum() for leaf in batch), "data")

    run = spmd(step, mesh=mesh)
    with pytest.raises(SpecError, match="differ in dimension 0"):
        run((torch.ones(4), torch.ones(3)))
    with pytest.raises(SpecError, match="differ in dimension 0"):
        mesh.run(lambda: step((torch.ones(4), torch.ones(3))))
    with pytest.raises(SpecError, match="no dimension to split"):
        run((torch.ones(4), torch.tensor(1.0)))
    with pytest.raises(SpecError, match="no dimension to split"):
        mesh.run(lambda: step((torch.ones(4), torch.tensor(1.0))))
    with pytest.raises(SpecError, match="unknown"):
        mesh.run(lambda: data_parallel(lambda batch: batch, axis="model")(torch.ones(2)))
    with pytest.raises(TypeError, match="step"):
        run()
    assert run((torch.ones(4), torch.ones(4))).item() == 8


@on_both
def test_a_batch_over_two_axes(shared_mesh, backend):
    """As one data_parallel within the other; parts have to be equal."""
    mesh, over = shared_mesh({"data": 2, "model": 2}, backend), ("data", "model")

    def step(w, batch):
        found = value_and_grad(lambda w, batch: (batch @ w).square().mean())(w, batch)
        return *found, pmean(batch.mean(0), over), psum(torch.tensor(len(batch)), over)

    def alone(w, batch):
        found = value_and_grad(lambda w, batch: (batch @ w).square().mean())(w, batch)
        return *found, batch.mean(0), torch.tensor(len(batch))

    w, x = drawn(3), drawn(8, 3, seed=1)
    nested = data_parallel(data_parallel(step, axis="model"), axis="data")
    for split in (data_parallel(step, axis=over), data_parallel(axis=[*over])(step), nested):
        run = spmd(split, mesh=mesh)
        cut = [put(x, spec, mesh=mesh) for spec in (P("data"), P(over), P(("model", "data")))]
        for given in (x, *cut, next(iter(Loader(x, 8, mesh=mesh)))):
            for found, expected in zip(run(w, given), alone(w, x), strict=True):
                torch.testing.assert_close(found.full(), expected)
        for length in (7, 6, 10, 1):
            with pytest.raises(
                SpecError, match=rf"into parts that are not equal \(got {length} .*2 \* 2.*multiple of 4"
            ):
                run(w, drawn(length, 3))
    with pytest.raises(SpecError, match=r"shards=4\) cuts a batch over one axis only"):
        data_parallel(step, axis=over, shards=4)
    with pytest.raises(SpecError, match="an axis twice"):
        data_parallel(step, axis=("data", "data"))
    only = spmd(data_parallel(lambda batch: psum(batch.sum(), "data"), axis=("data",)), mesh=mesh)
    assert only(torch.arange(5.0)).item() == 10  # of one axis parts may be unequal


def test_a_batch_that_is_cut_along_features(shared_mesh):
    """The parts that ranks have of it are of no samples: their mean is another number than that of the batch."""
    mesh = shared_mesh({"data": 2})
    batch, features = torch.arange(24.0).reshape(6, 4), P(None, "data")

    @data_parallel
    def step(w, batch):
        return value_and_grad(lambda w, x: (x.sum(1) ** 2).mean() * w)(w, batch)

    cut = put(batch.T, P("data"), mesh=mesh).T
    words = r"batch of step.* cut over 'data' along another dimension .*got P\(None, 'data'\).*put\(array.full\(\)"
    for run, given in ((spmd(step, mesh=mesh), cut), (spmd(step, mesh=mesh, in_specs=(P(), features)), batch)):
        with pytest.raises(SpecError, match=words):
            run(torch.tensor(1.0), given)
    value, _ = spmd(step, mesh=mesh)(torch.tensor(1.0), put(cut.full(), P("data"), mesh=mesh))
    assert value.item() == pytest.approx(float((batch.sum(1) ** 2).mean()))


# -- parameters of all kinds ------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """Tied, unused, frozen, 0-dim, empty, strided, channels-last, double, half and complex parameters in one model."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.ones(0, 4))
        self.strided = nn.Parameter(torch.randn(4, 4).t())
        self.f64 = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.bf16 = nn.Parameter(torch.randn(4).bfloat16())
        self.c64 = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        h = torch.tanh(self.conv(x)).mean((2, 3))
        h = self.second(torch.tanh(self.first(h))) * self.scale + self.frozen + self.nothing.sum()
        h = h @ self.strided + (torch.fft.fft(h) * self.c64).abs() + h * self.bf16.float()
        return h.double() * self.f64


@on_both
def test_parameters_of_all_kinds(shared_mesh, backend):
    torch.manual_seed(0)
    apply, params = functional(Zoo())
    x, y = drawn(7, 3, 4, 4), drawn(7, 4, dtype=torch.float64, seed=1)

    def loss(params, batch):
        return F.mse_loss(apply(params, batch["x"]), batch["y"])

    batch = {"x": x, "y": y}
    wanted_value, wanted = value_and_grad(loss)(params, batch)
    for options in ({}, {"bucket_mb": 1e-5}):
        step = spmd(
            data_parallel(value_and_grad(loss), **options), mesh=shared_mesh({"data": 3}, backend), check="always"
        )
        value, found = step(params, batch)
        torch.testing.assert_close(value.full(), wanted_value)
        for name, like in params.items():
            got = found[name].full()
            assert got.dtype is like.dtype and got.shape == like.shape
            assert got.is_contiguous(memory_format=torch.channels_last) or name != "conv.weight"
            tolerance = 2e-2 if like.dtype is torch.bfloat16 else 2e-5
            torch.testing.assert_close(
                got, wanted[name], rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}"
            )
    assert not wanted["frozen"].any() and not wanted["unused.weight"].any() and "second.weight" not in params


def test_wire_dtype_rounds_gradients_and_nothing_else(shared_mesh):
    mesh = shared_mesh({"data": 4})
    w, x = drawn(1000), drawn(8, 1000)

    def loss(p, batch):
        aux = {"mean": batch["x"].mean(0)}
        return (torch.tanh(batch["x"] * p["w"])).mean() * 1000 + (p["d"] * batch["x"].double()).mean().float(), aux

    def step(p, batch):
        return value_and_grad(loss, has_aux=True)(p, batch)

    params = {"w": w, "d": drawn(1000, dtype=torch.float64)}
    plain = spmd(data_parallel(step), mesh=mesh)(params, {"x": x})
    for wire in (torch.bfloat16, torch.float16):
        (value, aux), found = spmd(data_parallel(step, wire_dtype=wire), mesh=mesh, check="always")(params, {"x": x})
        assert value.item() == plain[0][0].item()
        assert torch.equal(aux["mean"].full(), plain[0][1]["mean"].full())
        for name, leaf in found.items():
            exact = plain[1][name].full()
            assert leaf.dtype is exact.dtype
            assert not torch.equal(leaf.full(), exact)
            assert torch.equal(leaf.full().to(wire).to(leaf.dtype), leaf.full())  # it is a number of that kind
            error = (leaf.full() - exact).abs() / exact.abs().max()
            assert error.max() < 8 * torch.finfo(wire).eps


def test_wire_dtype_of_complex_parameters(shared_mesh):
    z = torch.complex(drawn(10), drawn(10, seed=1))

    def step(z, batch):
        return grad(lambda z: (torch.abs(z * batch) ** 2).mean())(z)

    mesh, x = shared_mesh({"data": 2}), drawn(4, 10)
    exact = spmd(data_parallel(step), mesh=mesh)(z, x).full()
    found = spmd(data_parallel(step, wire_dtype=torch.bfloat16), mesh=mesh)(z, x).full()
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=1e-2)


@over_gloo
def test_many_buckets_and_collectives_in_between(shared_mesh, backend):
    """Buckets fill while the backward communicates, also on a rank without samples."""
    mesh = shared_mesh({"data": 2, "model": 2}, backend)
    params = {f"w{i}": drawn(40, 40, seed=i) / 10 for i in range(24)}
    x = drawn(5, 40)

    def loss(params, batch):
        for w in params.values():
            batch = torch.tanh(batch @ w)
        return (batch**2).mean()

    def parallel(params, batch):
        for w in params.values():
            batch = pmean(torch.tanh(batch @ w), "model")
        return (batch**2).mean()

    for size in (1, 5):
        step = spmd(data_parallel(grad(parallel), bucket_mb=1e-4), mesh=mesh, check="always")
        assert_close(step(params, batch=x[:size]), grad(loss)(params, x[:size]), 1e-6)


# -- empty shards -----------------------------------------------------------------------------------------------------


class Refuses(nn.Module):
    """Batch norm in train mode, or anything else that has no answer for no samples."""

    def forward(self, x):
        if len(x) == 0:
            raise ValueError("no samples")
        return x


@over_gloo
def test_a_model_that_fails_on_no_samples_contributes_nothing(shared_mesh, backend):
    mesh = shared_mesh({"data": 4}, backend)
    torch.manual_seed(0)
    apply, params = functional(nn.Sequential(nn.Linear(5, 4), Refuses(), nn.Linear(4, 3)))

    def loss(params, batch):
        out = apply(params, batch)
        return out.pow(2).mean(), {"mean": out.mean(0), "n": torch.tensor(7), "name": "x", "float": out.mean().item()}

    step = spmd(data_parallel(lambda params, batch: value_and_grad(loss, has_aux=True)(params, batch)), mesh=mesh)
    for size in (1, 2, 3, 4):
        (value, aux), found = step(params, drawn(size, 5))
        (wanted_value, wanted_aux), wanted = value_and_grad(loss, has_aux=True)(params, drawn(size, 5))
        assert_close({"value": value, **found}, {"value": wanted_value, **wanted}, 1e-6)
        torch.testing.assert_close(aux["mean"].full(), wanted_aux["mean"])
        assert aux["n"].item() == 7 and aux["name"] == "x" and aux["float"] == pytest.approx(wanted_aux["float"])


def test_a_rank_without_samples_has_on_the_host_what_others_have_there(shared_mesh):
    """On GPUs, too: counts and aux made on the host are summed by the hosts."""
    mesh = shared_mesh({"data": 2})
    refuses = Refuses()

    def loss(w, batch):
        return mean_of((refuses(batch) * w).sum(), len(batch)), torch.tensor([1.0, len(batch)])

    @spmd(mesh=mesh)
    @data_parallel
    def step(w, batch):
        session, own = mesh.session, mesh.session.device
        session.device = torch.device("meta")  # nothing is on it
        try:
            return value_and_grad(loss, has_aux=True)(w, batch)
        finally:
            session.device = own

    (value, aux), gradient = step(torch.tensor(2.0), torch.tensor([3.0]))
    assert (value.item(), aux.tolist(), gradient.item()) == (6.0, [1.0, 1.0], 3.0)


@pytest.mark.parametrize(
    ("refuses", "backend"),
    cases(lambda refuses, backend: refuses == (backend == "gloo"), (True, False), ("shm", "gloo")),
)
def test_a_rank_without_samples_reduces_in_the_order_of_the_others(shared_mesh, backend, refuses):
    """Value and aux travel as they are, gradients as another dtype: buckets of two kinds, one after another."""
    mesh = shared_mesh({"data": 4}, backend)
    check = Refuses() if refuses else nn.Identity()
    params = {f"w{i}": drawn(6, 6, seed=i) / 3 for i in range(5)}
    params.update(half=drawn(6, seed=7).bfloat16(), double=drawn(6, seed=8, dtype=torch.float64), unused=drawn(70))
    params.update(tied=params["w0"], z=torch.complex(drawn(6, seed=9), drawn(6, seed=10)), nothing=torch.ones(0))

    def loss(params, batch):
        out = check(batch)
        for i in (0, 1, 2, 3, 4, 1):
            out = torch.tanh(out @ params[f"w{i}"])
        out = out @ params["tied"] * params["half"].float() * params["double"].float() * params["z"].abs()
        return (out**2).mean(), {"mean": out.mean(0), "double": out.double().mean(), "half": out.mean().bfloat16()}

    def step(params, batch):
        return value_and_grad(loss, has_aux=True)(params, batch)

    for size in (2, 3):
        (wanted, wanted_aux), gradients = step(params, drawn(size, 6))
        for options in ({"wire_dtype": torch.bfloat16}, {"wire_dtype": torch.float16}, {}):
            run = spmd(data_parallel(step, bucket_mb=1e-4, **options), mesh=mesh, check="always")
            (value, aux), found = run(params, drawn(size, 6))
            torch.testing.assert_close(value.full(), wanted)
            torch.testing.assert_close(aux["mean"].full(), wanted_aux["mean"])
            torch.testing.assert_close(aux["double"].full(), wanted_aux["double"], rtol=1e-5, atol=1e-7)
            for name, gradient in gradients.items():
                tolerance = 2e-2 if options or name == "half" else 1e-5
                torch.testing.assert_close(found[name].full(), gradient, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_failure_that_is_no_empty_shards_fault_is_raised(shared_mesh, backend):
    mesh = shared_mesh({"data": 4}, backend)
    refuses = Refuses()

    def after_a_collective(w, batch):
        psum(w, "data")
        return (refuses(batch) * w).mean()

    def before_a_collective(w, batch):
        return (psum(refuses(batch).sum(0), "data") * w).mean()

    def everywhere(w, batch):
        raise ValueError("no samples")

    def outside(w, batch):
        return (w * batch).mean()

    for loss in (after_a_collective, before_a_collective, everywhere):
        # Over Gloo its peers may meet it in another collective before it knows: then all see where each stands.
        met = backend == "gloo" and loss is before_a_collective
        told = ((ValueError, CollectiveMismatch), "no samples|ranks disagree") if met else (ValueError, "^no samples")
        with pytest.raises(told[0], match=told[1]):
            spmd(data_parallel(grad(loss)), mesh=mesh)(torch.ones(()), batch=torch.ones(3))
    assert spmd(data_parallel(grad(outside)), mesh=mesh)(torch.ones(()), batch=torch.ones(3)).item() == 1


def test_undefined_values_of_empty_shards_go_nowhere(shared_mesh):
    """0/0 on the ranks without samples: in the value, in the gradient, and through collectives."""
    mesh = shared_mesh({"data": 4})
    w, x = torch.tensor([2.0, 3.0]), torch.tensor([[3.0, 1.0], [5.0, 2.0]])

    def loss(w, batch):
        return batch.mean() * w.sum() + (batch * w).mean()

    def through(w, batch):
        shared = psum(w, "data") / 4  # its transpose sums the ranks' gradients
        return loss(shared, batch)

    def over_all(w, batch):  # a mean over samples written out
        total = psum((batch * w).sum(), "data")
        return total / psum(torch.tensor(batch.numel()), "data") + psum(w.pow(2).sum(), "data") / 4

    def dense(w, batch):
        return (batch * w).mean() + w.pow(2).sum()

    def averaged(w, batch):
        return pmean((batch * w).mean(), "data") + w.pow(2).sum()

    cases = [(loss, loss), (through, loss), (over_all, dense), (averaged, dense)]
    for parallel, plain in cases:
        value, found = spmd(data_parallel(value_and_grad(parallel)), mesh=mesh, check="always")(w, batch=x)
        wanted_value, wanted = value_and_grad(plain)(w, x)
        assert_close({"value": value, "w": found}, {"value": wanted_value, "w": wanted}, 1e-6)

    def bend(f):
        return grad(lambda w, batch: (grad(f)(w**2, batch) ** 2).sum() * w.sum())

    for parallel, plain in cases:
        found = spmd(data_parallel(bend(parallel)), mesh=mesh, check="always")(w, batch=x)
        assert_close({"w": found}, {"w": bend(plain)(w, x)}, 1e-5)


def test_torchs_transforms_of_a_mean_that_some_ranks_have_no_samples_for(shared_mesh):
    """There the mean's argument was replaced by zeros without a tangent, which the other ranks waited for."""
    w, x = torch.tensor([2.0, 3.0]), torch.tensor([[3.0, 1.0], [5.0, 2.0]])

    @spmd(mesh=shared_mesh({"data": 4}), check="always")
    @data_parallel
    def step(w, batch):
        def mean(w):
            return pmean((batch * w).tanh().mean(), "data")  # the mean of nothing is NaN

        def total(w):
            return pmean((batch * w).tanh().sum(), "data")

        tangent = torch.func.jvp(mean, (w,), (w,))[1]
        return tangent, torch.func.jacfwd(mean)(w), psum(torch.func.grad(total)(w), "data")

    def alone(w):
        return (x * w).tanh().mean()

    slope = torch.func.grad(alone)(w)
    for found, wanted in zip(step(w, x), (slope @ w, slope, slope * 4 * 2), strict=True):
        # torch gives a number times 0.5 a tangent of float64.
        torch.testing.assert_close(found.full(), wanted, check_dtype=False)


# -- buffers and random numbers ---------------------------------------------------------------------------------------


@on_both
def test_running_statistics_are_the_weighted_mean_and_the_same_everywhere(shared_mesh, backend):
    apply, params, buffers = functional_with_buffers(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    x = drawn(7, 3)

    def loss(params, buffers, batch):
        out, new = apply(params, buffers, batch)
        return out.pow(2).mean(), new

    def step(params, buffers, batch):
        (value, new), grads = value_and_grad(loss, has_aux=True)(params, buffers, batch)
        return value, new, grads

    value, new, _ = spmd(data_parallel(step), mesh=shared_mesh({"data": 3}, backend), check="always")(
        params, buffers, x
    )
    parts = [loss(params, buffers, part) for part in (x[:3], x[3:5], x[5:])]
    weights = (3 / 7, 2 / 7, 2 / 7)
    torch.testing.assert_close(value.full(), sum(w * part[0] for w, part in zip(weights, parts, strict=True)))
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(
            new[name].full(), sum(w * part[1][name] for w, part in zip(weights, parts, strict=True))
        )
    assert new["1.num_batches_tracked"].item() == 1 and new["1.num_batches_tracked"].dtype is torch.int64
    # With fewer samples than ranks, and than batch norm wants on a rank, it says so.
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        spmd(data_parallel(step), mesh=shared_mesh({"data": 3}, backend))(params, buffers, x[:2])


def test_batch_norm_on_empty_shards(shared_mesh):
    apply, params, buffers = functional_with_buffers(nn.BatchNorm2d(2))
    x = drawn(2, 2, 3, 3)

    def step(params, buffers, batch):
        def loss(params):
            out, new = apply(params, buffers, batch)
            return (out**3).mean(), new

        return value_and_grad(loss, has_aux=True)(params)

    (value, new), grads = spmd(data_parallel(step), mesh=shared_mesh({"data": 4}), check="always")(params, buffers, x)
    parts = [apply(params, buffers, x[i : i + 1])[1]["running_var"] for i in range(2)]
    torch.testing.assert_close(new["running_var"].full(), (parts[0] + parts[1]) / 2)
    assert value.full().isfinite() and grads["weight"].full().isfinite().all()


def test_dropout_differs_between_ranks_and_repeats_between_runs(make_mesh):
    apply, params = functional(nn.Dropout(0.5))

    def draws():
        with make_mesh({"data": 2}, seed=3) as mesh:
            step = spmd(data_parallel(lambda batch: apply({}, batch)), mesh=mesh, out_specs=P("data"))
            first, second = step(torch.ones(40)).full(), step(torch.ones(40)).full()
            loader = Loader(torch.ones(80), 40, mesh=mesh, shuffle=False)
            batches = list(loader)
            dealt = [step(batch).full() for batch in (*batches, batches[0])]
        return first, second, *dealt

    once, again = draws(), draws()
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    first, second, one, two, repeated = once
    assert not torch.equal(first, second) and not torch.equal(one, two)
    assert not torch.equal(first[:20], first[20:])
    assert torch.equal(one, repeated)  # of a Loader's batch: by its epoch and step, whenever it is run
    assert not params


# -- steps of training ------------------------------------------------------------------------------------------------


def test_two_gradients_in_one_step(shared_mesh):
    """A GAN: the generator is trained against the discriminator of this step, both by one batch."""
    torch.manual_seed(0)
    make_fake, g = functional(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    judge, d = functional(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double())

    def judge_loss(d, g, batch):
        real, fake = judge(d, batch["x"]), judge(d, make_fake(g, batch["z"]))
        return F.softplus(-real).mean() + F.softplus(fake).mean()

    def fake_loss(g, d, batch):
        return F.softplus(-judge(d, make_fake(g, batch["z"]))).mean()

    def step(g, d, batch):
        first, d_grads = value_and_grad(judge_loss)(d, g, batch)
        d = {name: value - 0.1 * d_grads[name] for name, value in d.items()}
        second, g_grads = value_and_grad(fake_loss)(g, d, batch)
        return {name: value - 0.1 * g_grads[name] for name, value in g.items()}, d, first, second

    run = spmd(data_parallel(step), mesh=shared_mesh({"data": 3}), check="always")
    ours, theirs = (g, d), (g, d)
    for i in range(3):
        batch = {"x": drawn(7, 3, dtype=torch.float64, seed=i), "z": drawn(7, 2, dtype=torch.float64, seed=10 + i)}
        *ours, first, second = run(*ours, batch)
        *theirs, wanted_first, wanted_second = step(*theirs, batch)
        assert first.item() == pytest.approx(wanted_first.item()) and second.item() == pytest.approx(
            wanted_second.item()
        )
    for found, wanted in zip(ours, theirs, strict=True):
        assert_close(found, wanted, 1e-12)


def test_gradients_accumulated_within_a_step(shared_mesh):
    apply, params = mlp(torch.float64)
    loss = regression(apply)

    def step(params, batch):
        total = {name: torch.zeros_like(value) for name, value in params.items()}
        for part in range(2):
            micro = tuple(leaf[part::2] for leaf in batch)
            for name, value in grad(loss)(params, micro).items():
                total[name] += value / 2
        return total

    batch = drawn(12, 5, dtype=torch.float64), drawn(12, 3, dtype=torch.float64, seed=1)
    found = spmd(data_parallel(step), mesh=shared_mesh({"data": 3}))(params, batch)
    assert_close(found, grad(loss)(params, batch), 1e-12)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 16, 3)

    def forward(self, x):
        return self.out(torch.relu(self.conv(x.view(-1, 1, 4, 4))).flatten(1))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3)),
    "cnn": Small,
}


@pytest.mark.parametrize(
    ("axes", "backend", "shard", "model"),
    [
        *(({"data": 4}, "shm", None, "cnn"), ({"data": 3}, "gloo", "data", "mlp")),
        ({"data": 2, "model": 2}, "shm", "data", "cnn"),
        pytest.param({"data": 4}, "shm", None, "mlp", marks=pytest.mark.long),
        pytest.param({"data": 3}, "gloo", "data", "cnn", marks=pytest.mark.long),
        pytest.param({"data": 2, "model": 2}, "shm", "data", "mlp", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_training_run_is_the_sequential_torch_program(shared_mesh, axes, backend, shard, model):
    """30 steps of AdamW over epochs with a short last batch, against plain torch with the same sampler."""
    x, y = drawn(70, 16), torch.randint(0, 3, (70,), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    module = MODELS[model]()
    apply, params = functional(module)
    mesh = shared_mesh(axes, backend)
    opt = optimizer(torch.optim.AdamW, lr=1e-2, shard=shard)
    opt_state = opt.init(params)

    def loss(params, batch):
        return F.cross_entropy(apply(params, batch["x"]), batch["y"])

    @spmd(mesh=mesh)
    @data_parallel
    def train_step(params, opt_state, batch):
        value, grads = value_and_grad(loss)(params, batch)
        params, opt_state = opt.step(params, grads, opt_state)
        return params, opt_state, value

    found = []
    loader = Loader({"x": x, "y": y}, batch_size=16, seed=5, mesh=mesh)
    for _ in range(6):
        for batch in loader:
            params, opt_state, value = train_step(params, opt_state, batch)
            found.append(value)

    reference = torch.optim.AdamW(module.parameters(), lr=1e-2)
    sampler = Sampler(70, 16, seed=5)
    wanted = []
    for epoch in range(6):
        for step in range(5):
            ids = sampler.batch(epoch, step)
            value = F.cross_entropy(module(x[ids]), y[ids])
            reference.zero_grad()
            value.backward()
            reference.step()
            wanted.append(value.item())
    assert [float(value) for value in found] == pytest.approx(wanted, abs=1e-5)
    for name, value in module.named_parameters():
        torch.testing.assert_close(params[name].full(), value.detach(), rtol=1e-4, atol=1e-5)


def test_on_a_mesh_of_data_and_model(shared_mesh):
    """The batch is split over one axis, a layer over the other; samples are uneven."""
    mesh = shared_mesh({"data": 2, "model": 2})
    w1, w2, x = (
        drawn(5, 6, dtype=torch.float64),
        drawn(6, 3, dtype=torch.float64, seed=1),
        drawn(7, 5, dtype=torch.float64),
    )
    specs = {"w1": P(None, "model"), "w2": P("model")}

    def loss(params, batch, combine):
        return (combine(torch.tanh(batch @ params["w1"]) @ params["w2"]) ** 2).mean()

    def step(params, batch):
        return value_and_grad(lambda params: loss(params, batch, lambda h: psum(h, "model")))(params)

    run = spmd(
        data_parallel(step),
        mesh=mesh,
        in_specs={"params": specs, "batch": None},
        out_specs=(P(), specs),
        check="always",
    )
    params = {"w1": w1, "w2": w2}
    for size in (1, 2, 7):
        value, found = run(params, x[:size])
        wanted_value, wanted = value_and_grad(loss)(params, x[:size], lambda h: h)
        assert_close({"value": value, **found}, {"value": wanted_value, **wanted}, 1e-12)


def test_a_batch_stays_cut_along_its_other_dimensions(shared_mesh):
    """A sequence over "model", as `put` has cut it, beside targets that come whole."""
    mesh, x, y = shared_mesh({"data": 2, "model": 2}), drawn(4, 6), drawn(4, seed=1)

    def loss_fn(w, batch, add=lambda partial: partial):
        return (add((batch["x"] * w).sum(1)) - batch["y"]).square().mean()

    @spmd(mesh=mesh)
    @data_parallel
    def step(w, batch):
        return value_and_grad(lambda w: loss_fn(w, batch, lambda partial: psum(partial, "model")))(w)

    w, expected = torch.tensor(0.5), value_and_grad(loss_fn)(torch.tensor(0.5), {"x": x, "y": y})
    for given in (put(x, P(None, "model"), mesh=mesh), put(x, P("data", "model"), mesh=mesh)):
        for found, value in zip(step(w, {"x": given, "y": y}), expected, strict=True):
            torch.testing.assert_close(found.full(), value)


def test_results_that_are_local_are_told_apart(shared_mesh):
    mesh = shared_mesh({"data": 2})

    def step(params, batch):
        return (batch * params).mean()

    with pytest.raises(SpecError, match="should be the same on all ranks"):
        spmd(data_parallel(step), mesh=mesh)(torch.ones(()), torch.arange(4.0))
    means = spmd(data_parallel(lambda batch: psum(batch.sum(), "data")), mesh=mesh)(torch.arange(5.0))
    assert means.item() == 10
    cut = spmd(data_parallel(lambda batch: batch + axis_index("data")), mesh=mesh, out_specs=P("data"))(torch.zeros(5))
    assert cut.full().tolist() == [0, 0, 0, 1, 1]


@on_both
@pytest.mark.parametrize("samples", [1, 2, 3, 5, 8])
def test_a_mean_taken_by_hand_is_that_of_the_whole_batch(shared_mesh, backend, samples):
    batch = torch.arange(1.0, samples + 1, dtype=torch.float64) ** 2
    w = torch.tensor(2.0, dtype=torch.float64)

    def step(w, batch):
        value, gradient = value_and_grad(lambda w, batch: pmean((w * batch).mean(), "data"))(w, batch)
        return value, gradient, pmean((batch > 4).double().mean(), "data")

    value, gradient, share = spmd(data_parallel(step), mesh=shared_mesh({"data": 4}, backend))(w, batch)
    torch.testing.assert_close(value.full(), (w * batch).mean())
    torch.testing.assert_close(gradient.full(), batch.mean())
    torch.testing.assert_close(share.full(), (batch > 4).double().mean())


@pytest.mark.parametrize("shards", [None, 2])
def test_gradients_of_keys_in_another_order_on_one_rank(shared_mesh, shards):
    """They would be added to those of other parameters, and nothing else tells."""

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel(shards=shards)
    def step(params, batch):
        keys = sorted(params, reverse=axis_index("data") == 1)
        return grad(lambda p, b: (p["a"] * b - p["b"]).square().mean())({key: params[key] for key in keys}, batch)

    with pytest.raises(CollectiveMismatch, match=r"(?s)rank 0: all_reduce .* of \['a'\], .*rank 1: .* of \['b'\], "):
        step({"a": torch.ones(3), "b": torch.ones(3)}, torch.ones(4, 3))
