"""Steps over virtual shards: what they compute, at any number of ranks, and what they refuse."""

import random
import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spmd import (
    Loader,
    MeshError,
    P,
    Sharded,
    SpecError,
    data_parallel,
    functional,
    functional_with_buffers,
    grad,
    mean_of,
    psum,
    put,
    random_key,
    spmd,
    value_and_grad,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp():
    torch.manual_seed(0)
    return functional(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))


def bits(tree):
    from oracle import bits as of

    leaves = tree.values() if isinstance(tree, dict) else [tree]
    return b"".join(of(leaf.full() if hasattr(leaf, "full") else leaf) for leaf in leaves)


@pytest.mark.parametrize(
    ("backend", "shards"),
    [  # what is added, and in which order, does not depend on what carries it; of three shards two ranks add as one
        *(("shm", shards) for shards in (1, 3, 4, 8)),
        *(pytest.param("gloo", shards, marks=[pytest.mark.long] * (shards != 8)) for shards in (1, 3, 4, 8)),
    ],
)
def test_gradients_are_those_of_the_whole_batch_and_the_same_bits(shared_mesh, backend, shards):
    """Batches that divide and batches that don't, shards and ranks without samples, an unused parameter."""
    apply, params = mlp()
    params["unused"] = torch.ones(3)

    def loss(params, batch):
        out = apply({name: leaf for name, leaf in params.items() if name != "unused"}, batch["x"])
        return F.mse_loss(out, batch["y"])

    step = data_parallel(lambda params, batch: value_and_grad(loss)(params, batch), shards=shards, bucket_mb=1e-4)
    for length in (0, 1, 2, 5, 8, 11):
        batch = {"x": drawn(length, 5), "y": drawn(length, 3, seed=1)}
        found = {}
        for size in (1, 2, 3, 4):
            value, gradient = spmd(step, mesh=shared_mesh({"data": size}, backend), check="always")(params, batch)
            found[size] = bits(value) + bits(gradient)
            wanted = value_and_grad(loss)(params, batch)[1] if length else {name: 0 * p for name, p in params.items()}
            for name, leaf in gradient.items():
                torch.testing.assert_close(leaf.full(), wanted[name], rtol=1e-5, atol=1e-6)
        assert len(set(found.values())) == 1, f"{length} samples"


def test_leaves_of_every_kind_have_the_same_bits(shared_mesh):
    torch.manual_seed(1)
    params = {
        "bf16": drawn(4).bfloat16(),
        "f64": drawn(4, seed=1).double(),
        "c64": torch.complex(drawn(4, seed=2), drawn(4, seed=3)),
        "scalar": torch.tensor(1.5),
        "strided": drawn(4, 4, seed=4).t(),
        "nothing": torch.ones(0, 4),
        "long": drawn(1089, seed=6),
    }

    def loss(p, x):
        h = (x @ p["strided"]) * p["bf16"].float() * p["scalar"] + p["nothing"].sum()
        h = h + (x.sum(1, keepdim=True) * p["long"]).tanh().mean(1, keepdim=True)
        return ((h * p["c64"]).abs() * p["f64"]).mean()

    for options in ({}, {"wire_dtype": torch.bfloat16}):
        step = data_parallel(lambda p, batch: grad(loss)(p, batch), shards=4, **options)
        for length in (9, 8):
            runs = [spmd(step, mesh=shared_mesh({"data": n}))(params, drawn(length, 4, seed=5)) for n in (1, 2, 3, 4)]
            assert len({bits(run) for run in runs}) == 1, (options, length)
            wanted = grad(loss)(params, drawn(length, 4, seed=5))
            for name, leaf in runs[2].items():
                assert leaf.dtype is params[name].dtype
                tolerance = 2e-2 if name == "bf16" or options else 1e-5
                torch.testing.assert_close(leaf.full(), wanted[name], rtol=tolerance, atol=tolerance)


def test_a_mesh_with_another_axis(shared_mesh):
    w, x = drawn(4), drawn(7, 4, seed=1)

    def loss(w, batch):
        return psum((batch @ w).square().mean(), "model") / 2

    step = data_parallel(lambda w, batch: value_and_grad(loss)(w, batch), shards=3)
    found = []
    for axes in ({"data": 1, "model": 2}, {"data": 2, "model": 2}):
        value, gradient = spmd(step, mesh=shared_mesh(axes), check="always")(w, x)
        torch.testing.assert_close(value.full(), (x @ w).square().mean())
        found.append(bits(gradient))
    assert found[0] == found[1]


def test_dropout_and_the_key_follow_the_shard(shared_mesh):
    def loss(w, batch):
        noise = torch.rand(3, generator=torch.Generator().manual_seed(random_key("noise")))
        return (F.dropout(batch, 0.5) * w).mean(), (noise, torch.rand(2))

    def step(w, batch):
        (value, first), gradient = value_and_grad(loss, has_aux=True)(w, batch)
        (again, second), _ = value_and_grad(loss, has_aux=True)(w, batch)
        return gradient, value, again, first, second, torch.rand(2), torch.tensor(random_key())

    found = {}
    for size in (1, 2, 3):
        mesh = shared_mesh({"data": size})
        batch = next(iter(Loader(torch.ones(12, 2), 12, mesh=mesh, shards=4)))
        found[size] = [
            leaf.full().tolist() if not isinstance(leaf, tuple) else [one.full().tolist() for one in leaf]
            for leaf in spmd(data_parallel(step, shards=4), mesh=mesh, check="always")(torch.tensor(1.0), batch)
        ]
    assert found[1] == found[2] == found[3]
    _, value, again, first, second, outside, _ = found[1]
    assert value != again and first != second and outside not in (first[1], second[1])
    with pytest.raises(MeshError, match="random_key was called outside a region"):
        random_key()


def test_generators_of_numpy_and_python_follow_the_shard(shared_mesh):
    def loss(w, batch):
        return (batch * w).mean(), (torch.tensor(np.random.rand()), torch.tensor(random.random()))

    def step(w, batch):
        before = torch.tensor([np.random.rand(), random.random()])
        (_, first), _ = value_and_grad(loss, has_aux=True)(w, batch)
        between = torch.tensor([np.random.rand(), random.random()])
        (_, second), _ = value_and_grad(loss, has_aux=True)(w, batch)
        return before, *first, between, *second, torch.tensor([np.random.rand(), random.random()])

    def of_the_rank():
        return np.random.get_state()[1].tolist(), random.getstate()

    found = {}
    for size in (1, 2, 3):
        mesh = shared_mesh({"data": size})
        batch = next(iter(Loader(torch.ones(12, 2), 12, mesh=mesh, shards=4)))
        own = mesh.run(of_the_rank)
        drawn = spmd(data_parallel(step, shards=4), mesh=mesh, check="always")(torch.tensor(1.0), batch)
        found[size] = torch.cat([leaf.full().double().reshape(-1) for leaf in drawn]).tolist()
        assert mesh.run(of_the_rank) == own  # outside of the step a rank draws on as if there had been none
    assert found[1] == found[2] == found[3]
    assert len(set(found[1])) == len(found[1])


def test_running_statistics_are_folded_as_one_process_does_it(shared_mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.3), nn.BatchNorm1d(3, momentum=None))
    apply, params, buffers = functional_with_buffers(model)
    x = drawn(11, 4)

    def loss(params, buffers, batch):
        out, new = apply(params, buffers, batch)
        return out.square().mean(), new

    step = data_parallel(lambda p, b, batch: value_and_grad(loss, has_aux=True)(p, b, batch)[0], shards=4)
    results = [spmd(step, mesh=shared_mesh({"data": n}), check="always")(params, buffers, x)[1] for n in (1, 2, 3, 4)]
    assert len({bits(result) for result in results}) == 1
    for shard in range(4):
        model(x[shard::4])
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        torch.testing.assert_close(results[2][name].full(), model.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert results[0]["2.num_batches_tracked"].item() == 1  # averaged, as one batch


def test_aux_of_every_kind(shared_mesh):
    def loss(w, batch):
        each = batch["x"] * w
        return each.mean(), {
            "float": each.mean().item(),
            "each": Sharded(each, P("data")),
            "ids": batch["id"],
            "name": "x",
            "count": torch.tensor(3),
        }

    def step(w, batch):
        (_, aux), _ = value_and_grad(loss, has_aux=True)(w, batch)
        return {**aux, "ids": Sharded(aux["ids"], P("data"))}

    batch = {"x": torch.arange(7.0), "id": torch.arange(7)}
    order = [0, 4, 1, 5, 2, 6, 3]
    for size in (1, 2, 3, 4):
        found = spmd(data_parallel(step, shards=4), mesh=shared_mesh({"data": size}))(torch.tensor(2.0), batch)
        assert found["ids"].full().tolist() == order and found["each"].full().tolist() == [2 * i for i in order]
        assert found["float"] == pytest.approx(6.0) and found["name"] == "x" and found["count"].item() == 3
    for size in (1, 2):  # a single rank could return its rows as they are
        whole = data_parallel(lambda w, batch: value_and_grad(loss, has_aux=True)(w, batch)[0][1]["ids"], shards=4)
        with pytest.raises(SpecError, match=r"the same on all ranks along data|differ between ranks along data"):
            spmd(whole, mesh=shared_mesh({"data": size}))(torch.tensor(2.0), batch)
    few = {name: leaf[:2] for name, leaf in batch.items()}
    found = spmd(data_parallel(step, shards=4), mesh=shared_mesh({"data": 4}))(torch.tensor(2.0), few)
    assert found["ids"].full().tolist() == [0, 1] and found["count"].item() == 3


def test_the_gradient_by_the_batch(shared_mesh):
    x = drawn(7, 3)

    def step(w, batch):
        gradients = grad(lambda w, x, y: (w * x * y).sum(1).square().mean(), argnums=(0, 1))(w, batch["x"], batch["x"])
        return gradients[0], Sharded(gradients[1], P("data"))

    def plain(w, x, y):
        return (w * x * y).sum(1).square().mean()

    wanted = grad(plain, argnums=(0, 1))(torch.ones(3), x, x)
    for size in (1, 3):
        by_w, by_x = spmd(data_parallel(step, shards=3), mesh=shared_mesh({"data": size}))(torch.ones(3), {"x": x})
        torch.testing.assert_close(by_w.full(), wanted[0])
        dealt = torch.cat([wanted[1][shard::3] for shard in range(3)])
        torch.testing.assert_close(by_x.full(), dealt)


def test_threads_are_pinned_in_the_step(make_mesh):
    seen = {}
    for size, threads in ((1, None), (2, None), (1, 2)):
        mesh = make_mesh({"data": size}, threads=threads)
        step = data_parallel(lambda batch: torch.tensor(torch.get_num_threads()), shards=2)
        seen[size, threads] = spmd(step, mesh=mesh)(torch.ones(4)).item()
        assert mesh.run(torch.get_num_threads)[0] == mesh.threads
    assert seen == {(1, None): 1, (2, None): 1, (1, 2): 2}


# -- refused ----------------------------------------------------------------------------------------------------------


def mean(w, x):
    return (w * x).mean()


REFUSED = {
    "closes over the batch": (lambda w, batch: grad(lambda w: mean(w, batch))(w), "take the batch as an argument"),
    "closes over what came of it": (
        lambda w, batch: (lambda x: grad(lambda w: mean(w, x))(w))(batch * 2),
        "take the batch as an argument",
    ),
    "computed before": (lambda w, batch: grad(mean)(w, batch * 2), "was computed from the batch before"),
    "returned": (lambda w, batch: batch.sum(), "returns what it computed from the batch outside value_and_grad"),
    "summed": (lambda w, batch: psum(batch.sum(), "data"), "return it as aux"),
    "communicates": (lambda w, batch: grad(lambda w, x: psum(mean(w, x), "data"))(w, batch), "psum over 'data'.*leave"),
    "its own samples": (lambda w, batch: grad(mean, axes=())(w, batch), "leaves out the axis"),
    "inner mean": (lambda w, batch: grad(lambda w, x: grad(mean)(w, x))(w, batch), r"give the inner grad axes=\(\)"),
    "integers that differ": (
        lambda w, batch: value_and_grad(lambda w, x: (mean(w, x), int(x[0])), has_aux=True)(w, batch)[0][1],
        "aux differs between",
    ),
    "objects that differ": (
        lambda w, batch: value_and_grad(lambda w, x: (mean(w, x), range(len(x))), has_aux=True)(w, batch)[0][1],
        "aux differs between|should be the same on all ranks",
    ),
    "a pair that is not the value": (
        lambda w, batch: value_and_grad(lambda w, x: (mean(w, x), mean_of(x.sum(), len(x))), has_aux=True)(w, batch)[0],
        "aux has a mean_of",
    ),
    "integers that agree by chance": (
        lambda w, batch: value_and_grad(lambda w, x: (mean(w, x), x.argmin()), has_aux=True)(w, batch)[0][1],
        "aux may differ between virtual shards",
    ),
    "rows that agree by chance": (
        lambda w, batch: value_and_grad(lambda w, x: (mean(w, x), (0 * x[:1]).long()), has_aux=True)(w, batch)[0][1],
        "aux may differ between virtual shards",
    ),
    "aux of other shapes": (
        lambda w, batch: value_and_grad(lambda w, x: (mean(w, x), x * w), has_aux=True)(w, batch)[0][1],
        "has a row for each sample|differs",
    ),
    "other shards inside": (
        lambda w, batch: data_parallel(lambda batch: w, shards=3)(batch),
        "a data_parallel step runs in another with other virtual shards",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("size", [1, 2])
def test_refused(shared_mesh, name, size):
    step, text = REFUSED[name]
    with pytest.raises(SpecError, match=text):
        spmd(data_parallel(step, shards=2), mesh=shared_mesh({"data": size}))(torch.tensor(1.0), torch.arange(5.0))


def sometimes(one, other):
    """What the function returns besides its value for a shard of small samples, and for another."""
    return lambda w, x: (mean(w, x), one(x) if (x < 4).all() else other(x))


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (lambda w, x: mean_of((w * x).sum(), len(x)) if (x < 4).all() else mean(w, x), "value is of another kind"),
        (lambda w, x: mean(w, x) if (x < 4).all() else mean_of((w * x).sum(), len(x)), "value is of another kind"),
        (sometimes(lambda x: 0.5, lambda x: 0), "aux differs in kind.*averaged"),
        (sometimes(torch.mean, lambda x: None), "aux differs in kind.*averaged"),
        (
            sometimes(lambda x: Sharded(x, P("data")), lambda x: Sharded(torch.stack([x, x], 1), P("data"))),
            r"aux.* differs in kind.*end to end \(got float32\[2\] and float32\[2, 2\]",
        ),
    ],
)
def test_what_one_shard_returns_otherwise_is_refused(shared_mesh, loss_fn, text):
    """With one rank there is no other rank to disagree with: a plain loss was added to those of `mean_of`."""
    batch = torch.tensor([0.0, 4.0, 1.0, 5.0])

    def step(w, batch):
        return value_and_grad(loss_fn, has_aux="aux" in text)(w, batch)

    with pytest.raises(SpecError, match=text):
        spmd(data_parallel(step, shards=2), mesh=shared_mesh({"data": 1}))(torch.tensor(1.0), batch)


READS = {
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x.any()),
    "if": lambda x: 1 if x.sum() > 3 else 2,
    "complex": lambda x: complex(x.sum()),
    "index": lambda x: range(x.sum().long()),
    "item": lambda x: x.max().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "a sum of NumPy's": lambda x: np.array(x * 2).sum(),
    "dlpack": lambda x: np.from_dlpack(x),
    "in": lambda x: 1.0 in x,
    "equal": lambda x: torch.equal(x, torch.arange(5.0)),
    "allclose": lambda x: torch.allclose(x, x),
}


@pytest.mark.parametrize("size", [1, 2])
def test_numbers_taken_from_the_batch_are_refused(shared_mesh, size):
    def step(w, batch):
        for name, read in READS.items():
            try:
                read(batch["x"])
            except SpecError as error:
                assert "outside value_and_grad" in str(error) and "(has_aux=True)" in str(error), name
                leaf = "batch['x']" if name in ("tolist", "numpy", "asarray", "dlpack", "in", "equal") else None
                assert leaf is None or f"takes numbers from {leaf} outside" in str(error), str(error)
            else:
                raise AssertionError(f"{name} was not refused")
        assert repr(batch["x"]).startswith("Tracked([")  # it may be looked at
        return w, psum(torch.tensor(len(batch["x"])), "data"), value_and_grad(counted)(w, batch["x"])[0]

    def counted(w, x):
        assert float(x.sum()) == sum(x.tolist())  # within it the shard is an ordinary tensor
        return (w * x).mean()

    run = spmd(data_parallel(step, shards=2), mesh=shared_mesh({"data": size}))
    w, count, value = run(torch.tensor(1.0), {"x": torch.arange(5.0)})
    assert (w.item(), count.item(), value.item()) == (1.0, 5, pytest.approx(2.0))


def test_an_inner_gradient_of_the_shard_itself(shared_mesh):
    def penalty(w, x):
        return grad(lambda w: (w * x).square().mean(), axes=())(w).square()

    for size in (1, 2):
        step = data_parallel(lambda w, batch: value_and_grad(penalty)(w, batch), shards=2)
        value, gradient = spmd(step, mesh=shared_mesh({"data": size}))(torch.tensor(1.0), torch.tensor([1.0, 2.0]))
        assert value.item() == pytest.approx((4 + 64) / 2) and gradient.item() == pytest.approx(4 + 64)


def test_a_batch_dealt_otherwise_is_refused(shared_mesh):
    mesh = shared_mesh({"data": 2})
    x = torch.arange(8.0)

    def step(w, batch):
        return grad(mean)(w, batch)

    def given(shards):
        return next(iter(Loader(x, 8, mesh=mesh, shards=shards)))

    w = torch.tensor(1.0)
    exact, fast = spmd(data_parallel(step, shards=4), mesh=mesh), spmd(data_parallel(step), mesh=mesh)
    assert exact(w, given(4)).item() == fast(w, given(None)).item() == 3.5
    for run, batch, text in (
        (exact, given(2), r"not dealt as data_parallel\(shards=4\) runs it.*Loader\(shards=2\)"),
        (exact, given(None), r"Loader\(shards=None\)"),
        (fast, given(4), r"data_parallel\(shards=None\).*Loader\(shards=4\)"),
        (exact, put(x, P("data"), mesh=mesh), "pass the whole batch"),
    ):
        with pytest.raises(SpecError, match=text):
            run(w, batch)
    with pytest.raises(SpecError, match="leave the batch out of in_specs"):
        spmd(data_parallel(step, shards=4), mesh=mesh, in_specs=(None, P("data")))(w, x)

    def outer(w, batch):
        return data_parallel(step, shards=4)(w, batch)

    assert spmd(outer, mesh=mesh)(w, given(4)).item() == 3.5
    with pytest.raises(SpecError, match=r"not over as many virtual shards.*Loader\(shards=2\)"):
        spmd(outer, mesh=mesh)(w, given(2))
    for shards in (0, 1.5, True):
        with pytest.raises(SpecError, match="bad shards"):
            data_parallel(step, shards=shards)


def test_loader_collates_a_shard_at_a_time(shared_mesh):
    data = [(i, torch.tensor(float(i))) for i in range(10)]

    def collate(samples):
        return {"id": torch.tensor([i for i, _ in samples]), "noise": torch.rand(len(samples)), "n": 7}

    found = []
    for size in (1, 2, 3):
        mesh = shared_mesh({"data": size})
        loader = Loader(data, 7, mesh=mesh, shards=4, collate_fn=collate, seed=2)
        found.append([(b["id"].full().tolist(), b["noise"].full().tolist(), b["n"]) for b in loader])
        assert [len(shard) for shard in next(iter(loader))["id"].shards()] == {1: [7], 2: [4, 3], 3: [4, 2, 1]}[size]
    assert found[0] == found[1] == found[2]

    def ragged(samples):
        return torch.zeros(len(samples), len(samples))

    with pytest.raises(SpecError, match="have collate_fn pad to one length"):
        next(iter(Loader(data, 7, mesh=shared_mesh({"data": 1}), shards=4, collate_fn=ragged)))
