"""All-reductions made again and again: right every time, mixed with asynchronous ones, and disturbing nothing else."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from oracle import DTYPES, OPS, bits, exact, meaningful, reduced, value
from patience import soon

from spmd import CollectiveMismatch, Mesh, SpecError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LARGE = 180_000  # elements, past the threshold of one phase


@pytest.fixture(params=[1, 2, 3, 4])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh], size: int) -> Mesh:
    return shared_mesh({"data": size})


@pytest.fixture
def pair(shared_mesh: Callable[..., Mesh]) -> Mesh:
    return shared_mesh({"data": 2})


def repeated(mesh: Mesh, cases: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> list[list[bytes]]:
    """Each reduction five times, with other values each time; results are kept to the end."""
    comm = mesh.comm()
    found = []
    for op, dtype, shape in cases:
        resident = comm.empty(shape, dtype=dtype)
        results = []
        for turn in range(5):
            resident.copy_(value(dtype, shape, comm.rank, turn))
            results.append(comm.all_reduced(resident, op))
        found.append([bits(result) for result in results])
    return found


def test_every_turn_is_right(mesh: Mesh, size: int) -> None:
    cases = [(op, d, (3, 5)) for op in OPS for d in DTYPES if meaningful(op, d) and exact(op, d)]
    cases += [("sum", dtype, (LARGE + 7,)) for dtype in (torch.float32, torch.bfloat16, torch.uint16)]
    cases += [("sum", torch.float32, shape) for shape in [(), (1,), (0, 3), (2, 1, 4)]]
    expected = [
        [bits(reduced([value(dtype, shape, rank, turn) for rank in range(size)], op)) for turn in range(5)]
        for op, dtype, shape in cases
    ]
    assert mesh.run(repeated, mesh, cases) == [expected] * size


def other_views(mesh: Mesh) -> list[bool]:
    """Views of one memory, of one shape but in another order or conjugated, are other tensors."""
    comm = mesh.comm()
    found = []
    for rows in (8, 128):  # small, large
        whole = comm.empty((rows, rows), dtype=torch.complex64)
        whole.copy_(value(torch.complex64, (rows, rows), comm.rank))
        for _ in range(3):
            total = comm.all_reduced(whole).clone()
        for view in (lambda t: t.mT, lambda t: t.conj(), lambda t: t.mH, lambda t: t):
            for _ in range(3):
                got = comm.all_reduced(view(whole))
                found.append(bool(torch.equal(got, view(total))))
        real = torch.view_as_real(whole)
        for view in (lambda t: t[..., 0], lambda t: t[..., 1], lambda t: t[..., 0].mT):
            for _ in range(3):
                got = comm.all_reduced(view(real))
                found.append(bool(torch.equal(got, view(torch.view_as_real(total)))))
    return found


def test_other_views_of_one_memory(mesh: Mesh) -> None:
    assert all(all(found) for found in mesh.run(other_views, mesh))


def test_no_gradient_is_recorded(pair: Mesh) -> None:
    def body() -> list[tuple[float, bool]]:
        comm = pair.comm()
        weight = torch.ones(6, requires_grad=True)
        resident = comm.empty(LARGE).fill_(1.0).requires_grad_()
        results = [comm.all_reduced(tensor) for _ in range(4) for tensor in (weight, resident, torch.ones(6))]
        return [(float(result[-1]), result.requires_grad) for result in results]

    assert pair.run(body) == [[(2.0, False)] * 12] * 2


def test_what_is_refused_is_refused_every_time(pair: Mesh) -> None:
    def body() -> int:
        comm = pair.comm()
        count = 0
        for _ in range(4):
            for op, dtype in (("median", torch.float32), ("band", torch.float32), ("sum", torch.float8_e5m2)):
                try:
                    comm.all_reduced(torch.ones(4).to(dtype), op)
                except SpecError:
                    count += 1
        comm.barrier()
        return count

    assert pair.run(body) == [12, 12]


def test_mixed_with_the_general_way(pair: Mesh) -> None:
    """One rank calls asynchronously, the other blocks: one goes through the queue, one does not."""

    def body() -> list[float]:
        comm = pair.comm()
        small, large = torch.ones(3), comm.empty(LARGE).fill_(1.0)
        found = []
        for turn in range(8):
            for tensor in (small, large):
                early = comm.rank == turn % 2
                result: Any = comm.all_reduced(tensor, async_op=early)
                found.append(float((result.wait() if early else result)[-1]))
        return found

    assert pair.run(body) == [[2.0] * 16] * 2


def test_many_shapes_are_not_all_kept(pair: Mesh) -> None:
    def body() -> int:
        comm = pair.comm()
        before = tensors()
        for numel in range(1, 700):
            for _ in range(4):
                comm.all_reduced(torch.ones(numel))
        return tensors() - before

    def tensors() -> int:
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    # Of every kind four slots with a view of each rank's part: 5,592 if all were kept.
    assert all(kept < 2500 for kept in pair.run(body))


# -- while it waits ----------------------------------------------------------------------------------------------------


def amid_messages(mesh: Mesh) -> float:
    """Rank 0 has more messages under way than there is room for; rank 1 wants them all before it reduces."""
    comm = mesh.comm()
    for _ in range(3):
        comm.all_reduced(torch.ones(2))
    message = torch.zeros(())
    if comm.rank == 0:
        works = [comm.isend(torch.tensor(float(i)), 1) for i in range(100)]
        comm.all_reduced(torch.ones(2))
        for work in works:
            work.wait()
    else:
        for _ in range(100):
            comm.recv(message, 0)
        comm.all_reduced(torch.ones(2))
    return float(message)


def test_messages_go_on(pair: Mesh) -> None:
    assert pair.run(amid_messages, pair)[1] == 99.0


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("blocking", ["all_reduce", "barrier", "recv"])
def test_other_communicators_go_on(shared_mesh: Callable[..., Mesh], backend: str, blocking: str) -> None:
    """What was started on one group advances while a rank waits in another."""
    mesh = shared_mesh({"a": 2, "b": 2}, backend=backend)

    def body() -> float:
        everyone, pair = mesh.comm(), mesh.comm("b")
        for _ in range(3):
            everyone.all_reduced(torch.ones(2))

        def block() -> None:
            if blocking == "all_reduce":
                everyone.all_reduced(torch.ones(2))
            elif blocking == "barrier":
                everyone.barrier()
            elif everyone.rank:
                everyone.send(torch.ones(1), 0)
            else:
                for peer in range(1, everyone.size):
                    everyone.recv(torch.empty(1), peer)

        large = torch.full((LARGE,), 1.0)
        if pair.rank == 0:
            work = pair.all_reduce(large, async_op=True)
            block()
            work.wait()
        else:
            pair.all_reduce(large)
            block()
        return float(large[-1])

    assert mesh.run(body) == [2.0] * 4


def test_a_peer_that_lags_behind(pair: Mesh) -> None:
    """It has posted all that there is room for, and takes its time to read."""

    def body() -> float:
        comm = pair.comm()
        for _ in range(3):
            comm.all_reduced(torch.ones(2))
        comm.barrier()
        if comm.rank:
            works = [comm.all_reduced(torch.ones(2), async_op=True) for _ in range(16)]
            time.sleep(0.05)
            for work in works:
                work.wait()
        else:
            for _ in range(16):
                comm.all_reduced(torch.ones(2))
        return float(comm.all_reduced(torch.ones(2))[0])

    assert pair.run(body) == [2.0, 2.0]


# -- what ends the region ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("way", ["other op", "other call", "left"])
def test_disagreement(make_mesh: Callable[..., Mesh], large: bool, way: str) -> None:
    mesh = make_mesh({"data": 3})

    def body() -> None:
        comm = mesh.comm()
        tensor = comm.empty(LARGE if large else 4).fill_(1.0)
        for _ in range(4):
            comm.all_reduced(tensor)
            comm.all_reduced(tensor, "max")
        if comm.rank != 1 or way == "other op":
            comm.all_reduced(tensor, "sum" if comm.rank != 1 else "max")
        elif way == "other call":
            comm.barrier()

    began = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        mesh.run(body)
    assert soon(2.5, began)
    text = str(caught.value)
    call = f"all_reduce float32[{LARGE if large else 4}]"
    if way == "left":
        assert f"rank 1 left the region without its part in {call} (sum)" in text
    else:
        assert f"rank 0: {call} (sum)" in text
        assert f"rank 1: {call} (max)" in text if way == "other op" else "rank 1: barrier" in text
        assert text.count(f"{__file__}:") == 3
    assert mesh.run(lambda: [float(mesh.comm().all_reduced(torch.ones(4))[0]) for _ in range(4)]) == [[3.0] * 4] * 3
