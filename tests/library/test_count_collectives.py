"""`count_collectives`: what a step communicates, around a driver's calls, within a step, and on launched ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scripts import launched, script

import spmd
from spmd import Mesh, P, all_gather, axis_index, count_collectives, data_parallel, grad, ppermute, psum, value_and_grad

W = {"w": torch.ones(3, 5), "b": torch.zeros(5)}
X = torch.ones(8, 3)
GRADIENTS = 4 * (15 + 5 + 1)  # bytes; the loss is in the bucket


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    return (batch @ params["w"] + params["b"]).square().mean()


def training(mesh: Mesh) -> Callable[..., Any]:
    @spmd.spmd(mesh=mesh)
    @data_parallel
    def step(params, batch):
        return value_and_grad(loss_fn)(params, batch)

    return step


def test_a_training_step(shared_mesh: Callable[..., Mesh]) -> None:
    step = training(shared_mesh({"data": 2}))
    step(W, X)
    for _ in range(2):  # each block counts its own calls
        with count_collectives() as counts:
            step(W, X)
            step(W, X)
        assert counts.operations == {"all_reduce": 2} and counts.axes == {"data": 2}
        assert len(counts) == len(counts.backward) == 2 and len(counts.forward) == 0
        assert counts.bytes == counts.backward.bytes >= 2 * GRADIENTS
    step(W, X)
    assert len(counts) == 2


def test_one_rank_communicates_with_nobody(shared_mesh: Callable[..., Mesh]) -> None:
    with count_collectives() as counts:
        training(shared_mesh({"data": 1}))(W, X)
    assert counts.operations == {} and counts.bytes == 0 and "no collectives" in repr(counts)


def parallel(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Forward: an all_reduce over the model's axis, and an all_gather; backward: their transposes."""
    part = psum(x * w, "model")
    return all_gather(part, "data", tiled=True).sum()


def expected_of_parallel(counts: Any) -> None:
    assert counts.forward.operations == {"all_reduce": 1, "all_gather": 1}
    assert counts.forward.axes == {"model": 1, "data": 1} and counts.forward.bytes == 2 * 16
    assert counts.backward.operations["reduce_scatter"] == 1
    assert counts.backward.axes["model"] >= 1 and counts.backward.axes["data"] >= 1


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_both_directions(shared_mesh: Callable[..., Mesh], compiled: bool) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    f = torch.compile(parallel, backend="aot_eager") if compiled else parallel
    step = spmd.spmd(
        lambda w, x: grad(lambda w, x: f(w, x))(w, x), in_specs=(P("model"), P()), mesh=mesh, check="never"
    )
    for _ in range(2):
        with count_collectives() as counts:
            step(torch.ones(8), torch.ones(4))
        expected_of_parallel(counts)


def test_within_a_step(shared_mesh: Callable[..., Mesh]) -> None:
    @spmd.spmd(mesh=shared_mesh({"data": 2}))
    def step(x):
        psum(x, "data")
        with count_collectives() as outer:
            x = ppermute(x, "data", [(0, 1), (1, 0)])
            with count_collectives() as inner:
                x = psum(x, "data")
            seen = len(inner), len(outer)
        psum(x, "data")
        return seen, len(outer), outer.operations, outer.bytes

    seen, total, operations, nbytes = step(torch.ones(3))
    assert seen == (1, 2) and total == 2
    assert operations == {"all_to_all": 1, "all_reduce": 1} and nbytes == 24


def test_functions_given_to_run(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})

    def talk():
        comm = mesh.comm()
        comm.barrier()
        comm.broadcast(torch.ones(4))
        x = torch.ones(2)
        if comm.rank:
            comm.recv(x)
        else:
            comm.send(x, 1)
        return comm.all_gather_bytes(b"four")

    key = mesh.run_state.position
    with count_collectives() as counts:
        mesh.run(talk)
    assert counts.operations == {"barrier": 1, "broadcast": 1, "send": 1, "all_gather": 1}
    assert counts.bytes == 16 + 8 + 4
    assert mesh.run_state.position == (key[0], key[1] + 1)  # counting draws no random numbers of the program's


def test_a_block_that_fails(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})
    step = spmd.spmd(lambda x: psum(x, "data"), mesh=mesh)
    with pytest.raises(KeyError), count_collectives() as counts:
        step(torch.ones(2))
        raise KeyError
    assert len(counts) == 1
    with count_collectives() as counts:
        step(torch.ones(2))
    assert len(counts) == 1


def test_blocks_within_each_other(shared_mesh: Callable[..., Mesh]) -> None:
    step = spmd.spmd(lambda x: psum(x, "data"), mesh=shared_mesh({"data": 2}))
    with count_collectives() as outer:
        step(torch.ones(2))
        with count_collectives() as inner:
            step(torch.ones(2))
        step(torch.ones(2))
    assert len(outer) == 3 and len(inner) == 1


def test_not_those_of_other_calls(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})
    step = spmd.spmd(lambda x: psum(x, "data") + axis_index("data") * 0, mesh=mesh, check="never")
    for _ in range(3):
        x = step(torch.ones(2))
    with count_collectives() as counts:
        pass
    assert len(counts) == 0 and x.shape == (2,)


def test_threads_count_their_own_calls(shared_mesh: Callable[..., Mesh]) -> None:
    @spmd.spmd(mesh=shared_mesh({"data": 2}))
    def step(x):
        return psum(x, "data")

    found = []

    def count() -> None:
        with count_collectives() as counts:
            step(torch.ones(3))
            step(torch.ones(3))
        found.append(counts.bytes)

    thread = threading.Thread(target=count)
    with count_collectives() as counts:
        step(torch.ones(()))
        thread.start()
        thread.join(60)
    assert (counts.bytes, found) == (4, [24])


def test_collectives_of_torch(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})

    def train():
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 5), process_group=group("data"))
        model(X).sum().backward()

    def talk():
        x, both = torch.ones(2), torch.ones(4)
        dist.all_gather_into_tensor(both, x, group=group("data"))
        dist.reduce_scatter_tensor(x, both, group=group("data"))
        dist.scatter(x, list(both.split(2)) if mesh.rank == 0 else None, group=group("data"))
        dist.recv(x, 1, group=group("data")) if mesh.rank == 0 else dist.send(x, 0, group=group("data"))

    def group(name):
        return mesh.device_mesh.get_group(name)

    mesh.run(train)
    with count_collectives() as counts:
        mesh.run(train)
    assert counts.backward.operations == {"all_reduce": 1} and counts.backward.bytes == 4 * (15 + 5)
    with count_collectives() as counts:
        mesh.run(talk)
    assert counts.operations == {"all_gather": 1, "reduce_scatter": 1, "scatter": 1, "recv": 1}
    assert counts.axes == {"data": 4} and counts.bytes == 8 + 16 + 16


LAUNCHED = """
import torch
from spmd import Mesh, P, count_collectives, data_parallel, spmd, value_and_grad

mesh = Mesh()

@spmd(mesh=mesh)
@data_parallel
def step(params, batch):
    return value_and_grad(lambda p, b: (b @ p).square().mean())(params, batch)

with count_collectives() as counts:
    step(torch.ones(3), torch.ones(4, 3))
print(counts.operations, counts.axes, len(counts.backward))
group = mesh.device_mesh.get_group()
with count_collectives() as counts:
    torch.distributed.all_reduce(torch.ones(3), group=group)
print(counts)
"""


def test_launched_ranks(tmp_path: Path) -> None:
    code, out, err = launched(2, script(tmp_path, LAUNCHED))
    of_torch = "Counts(all_reduce x1; 12 bytes; along data x1; 1 forward, 0 backward)"
    expected = ["{'all_reduce': 1} {'data': 1} 1", of_torch]
    assert code == 0 and sorted(out.splitlines()) == sorted(expected * 2), out + err
