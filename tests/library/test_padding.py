"""Batches that are padded to the longest sample of a rank: of other lengths on other ranks, and right all the same."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
from scripts import launched, run, script

from spmd import Array, Loader, P, SpecError, data_parallel, spmd, value_and_grad

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SENTENCES = [list(range(1, 2 + (7 * i) % 11)) for i in range(11)]


def pad(samples):
    longest = max(map(len, samples))
    return {
        "ids": torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples]),
        "n": torch.tensor([len(sample) for sample in samples]),
    }


def loss_fn(table, batch):
    """The mean over samples of the mean over their words."""
    found = table[batch["ids"]] * (batch["ids"] > 0)
    return (found.sum(1) / batch["n"]).square().mean()


def in_torch(batches):
    """Losses and the table after as many steps, on batches that are padded whole."""
    table, losses = torch.arange(12.0), []
    for ids in batches:
        given = pad([SENTENCES[i] for i in ids])
        table.requires_grad_()
        loss = loss_fn(table, given)
        (grad,) = torch.autograd.grad(loss, table)
        table = (table - 0.1 * grad).detach()
        losses.append(float(loss.detach()))
    return losses, table


def trained(mesh, loader):
    @spmd(mesh=mesh)
    @data_parallel
    def step(table, batch):
        loss, grad = value_and_grad(loss_fn)(table, batch)
        return loss, table - 0.1 * grad

    table, losses = torch.arange(12.0), []
    for _ in range(2):
        for batch in loader:
            loss, table = step(table, batch)
            losses.append(float(loss))
    return losses, table.full()


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2}, {"data": 3}, {"data": 2, "model": 2}], ids=str)
def test_a_rank_has_a_length_of_its_own(shared_mesh, axes):
    mesh = shared_mesh(axes)
    loader = Loader(SENTENCES, 4, mesh=mesh, shuffle=False, collate_fn=pad)
    losses, table = trained(mesh, loader)
    ids = [*torch.arange(11).split(4)]
    expected, whole = in_torch(ids * 2)
    assert np.allclose(losses, expected, rtol=1e-5) and torch.allclose(table, whole, rtol=1e-5)


def test_what_is_known_of_a_padded_batch(shared_mesh):
    mesh = shared_mesh({"data": 2})
    ids = next(iter(Loader([[1], [2, 3], [4], [5, 6, 7]], 4, mesh=mesh, shuffle=False, collate_fn=pad)))["ids"]
    assert isinstance(ids, Array) and ids.shape == (4, -1) and len(ids) == 4 and ids.spec == P("data")
    assert repr(ids).startswith("Array(int64[4, ?], P('data'), ") and "0:?" in str(ids)
    assert [shard.tolist() for shard in ids.shards()] == [[[1], [4]], [[2, 3, 0], [5, 6, 7]]]
    whole = spmd(lambda x: x.sum(), in_specs=P(), mesh=mesh)
    for way in (ids.full, lambda: np.asarray(ids), lambda: whole(ids)):
        with pytest.raises(SpecError, match=r"sizes of dimension 1 on other ranks.*pad to one length, or use .shards"):
            way()
    even = next(iter(Loader([[1, 2], [3, 4]], 2, mesh=mesh, shuffle=False, collate_fn=pad)))["ids"]
    assert even.shape == (2, 2) and even.full().tolist() == [[1, 2], [3, 4]]


def test_only_batches_may_differ_so(shared_mesh):
    mesh = shared_mesh({"data": 2})
    ids = next(iter(Loader([[1], [2, 3]], 2, mesh=mesh, shuffle=False, collate_fn=pad)))["ids"]
    with pytest.raises(SpecError, match="do not fit together"):
        spmd(lambda x: x + 1, out_specs=P("data"), mesh=mesh)(ids).shape  # noqa: B018


PROGRAM = """
import numpy as np, torch, sys
sys.path.insert(0, sys.argv[1])
from test_padding import SENTENCES, in_torch, pad, trained
import spmd
if __name__ == "__main__":
    mesh = spmd.Mesh({"data": 2})
    loader = spmd.Loader(SENTENCES, 4, mesh=mesh, shuffle=False, collate_fn=pad)
    losses, table = trained(mesh, loader)
    expected, whole = in_torch([*torch.arange(11).split(4)] * 2)
    assert np.allclose(losses, expected, rtol=1e-5) and torch.allclose(table, whole, rtol=1e-5), losses
    ids = next(iter(spmd.Loader([[1], [2, 3]], 2, mesh=mesh, shuffle=False, collate_fn=pad)))["ids"]
    assert [shard.tolist() for shard in ids.shards()] == [[[1]], [[2, 3]]]
    try:
        ids.full()
    except spmd.SpecError as error:
        assert "use .shards()" in str(error)
    else:
        raise AssertionError("joined")
    whole = spmd.spmd(lambda x: x.sum(), in_specs=spmd.P(), mesh=mesh)
    even = next(iter(spmd.Loader([[1, 2], [3, 4]], 2, mesh=mesh, shuffle=False, collate_fn=pad)))["ids"]
    assert even.full().tolist() == [[1, 2], [3, 4]] and int(whole(even)) == 10 and even.shape == (2, 2)
    w, x = torch.tensor([1.0, -2.0, 0.5]), torch.arange(33.0).view(11, 3)
    views = lambda samples: torch.cat([torch.stack(samples), -3 * torch.stack(samples)])
    step = spmd.spmd(spmd.data_parallel(spmd.value_and_grad(lambda w, batch: (batch @ w).square().mean())), mesh=mesh)
    for ids, batch in zip(torch.arange(11).split(4), spmd.Loader([*x], 4, mesh=mesh, shuffle=False, collate_fn=views)):
        loss, gradient = step(w, batch)
        given = views([*x[ids]]) @ w.requires_grad_()
        expected = given.square().mean()
        expected.backward()
        assert np.isclose(float(loss), float(expected)) and torch.allclose(gradient.full(), w.grad), (loss, expected)
        assert batch.full().shape == (2 * len(ids), 3) and batch.shape[0] in (2 * len(ids), -1)
        w = w.detach()
    batches = [*spmd.Loader(torch.arange(8), 4, mesh=mesh)]
    try:
        batches[mesh.rank or 0].full()  # each launched rank another one, as after an error that one of them caught
    except spmd.CollectiveMismatch as error:
        assert "batch 0 of epoch 0" in str(error) and "batch 1 of epoch 0" in str(error), error
    else:
        assert mesh.is_driver
    try:
        next(iter(spmd.Loader(torch.arange(8), 4, mesh=mesh, seed=mesh.rank or 0))).full()
    except spmd.CollectiveMismatch as error:
        assert "seed=0" in str(error) and "seed=1" in str(error), error
    else:
        assert mesh.is_driver
    if mesh.rank in (0, None):
        print("right")
"""


@pytest.mark.parametrize("way", ["driver", "launched"])
def test_the_same_as_a_script_and_on_launched_ranks(tmp_path, way):
    program = script(tmp_path, PROGRAM)
    here = __file__.rpartition("/")[0]
    code, out, err = run(program, here) if way == "driver" else launched(2, program, here)
    assert code == 0 and "right" in out, out + err
