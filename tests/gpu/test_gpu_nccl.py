"""NCCL for real: on one rank all operations and dtypes, since a group of one goes through it as well; on two the rest.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import sys
import threading

import cloudpickle
import oracle
import pytest
import torch
from oracle import DTYPES, FLOATS, OPS, exact, meaningful, reduced, value

from spmd import Mesh

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.timeout(300),
]


def reductions(mesh: Mesh) -> list[str]:
    """What goes wrong of all operations on all dtypes."""
    comm, wrong = mesh.comm(), []
    last = comm.size - 1
    for dtype in DTYPES:
        for op in OPS:
            if not meaningful(op, dtype):
                continue
            inputs = [value(dtype, (5, 3), rank) for rank in range(comm.size)]
            right = reduced(inputs, op)
            mine = inputs[comm.rank].cuda()
            found = {"all_reduce": mine.clone(), "reduce": mine.clone(), "reduce_scatter": torch.empty_like(mine)}
            comm.all_reduce(found["all_reduce"], op)
            comm.reduce(found["reduce"], last, op)
            comm.reduce_scatter(found["reduce_scatter"], [mine] * comm.size, op)
            if comm.rank != last:
                del found["reduce"]
            found["all_reduced"] = comm.all_reduced(mine, op)
            for name, result in found.items():
                bits = exact(op, dtype) and (comm.size == 1 or not dtype.is_floating_point)
                if not (oracle.same if bits else torch.allclose)(result.cpu(), right):
                    wrong.append(f"{name} {op} of {dtype}: {result.flatten()[:3]}, not {right.flatten()[:3]}")
    return wrong


def test_reductions_of_all_dtypes(mesh: Mesh) -> None:
    assert mesh.run(reductions, mesh) == [[]] * mesh.size


def movements(mesh: Mesh) -> list[str]:
    comm, wrong = mesh.comm(), []
    rank, size = comm.rank, comm.size
    for dtype in (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2):
        drawn = torch.uint8 if dtype.is_floating_point and dtype.itemsize == 1 else dtype
        inputs = [value(drawn, (5, 3), r).view(dtype) for r in range(size)]

        def see(name: str, outs: list[torch.Tensor], right: list[torch.Tensor], dtype: torch.dtype = dtype) -> None:
            if not all(map(oracle.same, [out.cpu() for out in outs], right)):
                wrong.append(f"{name} of {dtype}")

        mine = inputs[rank].cuda()
        outs = [torch.empty_like(mine) for _ in range(size)]
        comm.all_gather(outs, mine)
        see("all_gather", outs, inputs)
        outs = [torch.empty_like(mine) for _ in range(size)]
        comm.all_to_all(outs, [mine] * size)
        see("all_to_all", outs, inputs)
        outs = [torch.empty_like(mine) for _ in range(size)]
        comm.gather(mine, outs if rank == 0 else None)
        see("gather", outs if rank == 0 else [], inputs if rank == 0 else [])
        out = torch.empty_like(mine)
        comm.scatter(out, [mine] * size if rank == 0 else None)
        see("scatter", [out], inputs[:1])
        out = mine.clone()
        comm.broadcast(out, src=size - 1)
        see("broadcast", [out], inputs[-1:])
        sending = comm.isend(mine, (rank + 1) % size, 7)
        out = torch.empty_like(mine)
        source = comm.recv(out, None, 7)
        sending.wait()
        see("recv", [out], [inputs[source]])
    return wrong


def test_movements_of_all_dtypes(mesh: Mesh) -> None:
    assert mesh.run(movements, mesh) == [[]] * mesh.size


def test_nan_is_the_maximum_and_the_minimum(mesh: Mesh) -> None:
    def body(op: str, dtype: torch.dtype) -> list[torch.Tensor]:
        comm = mesh.comm()
        rows = [[float("nan"), 1.0, -1.0, float("inf"), -2.0], [1.0, float("nan"), -2.5, 3.0, float("-inf")]]
        mine = torch.tensor(rows[comm.rank % 2], dtype=dtype, device="cuda")
        return [comm.all_reduced(mine, op).cpu(), *(torch.tensor(row, dtype=dtype) for row in rows)]

    for dtype in FLOATS:
        for op, combine in (("max", torch.maximum), ("min", torch.minimum)):
            for found, first, second in mesh.run(body, op, dtype):
                right = combine(first, second) if mesh.size > 1 else first
                torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def test_several_communicators_take_turns(mesh: Mesh) -> None:
    """Channels of one group and groups of one rank, on several streams, while their first is at work."""

    def body() -> bool:
        session, size = mesh.session, mesh.size
        x = torch.ones(1 << 22, device="cuda")
        works = [session.comm(channel="main").all_reduced(x, async_op=True)]
        for channel in ("buckets", "more", "main") * 3:  # the first use of a channel splits it off
            works.append(session.comm(channel=channel).all_reduced(x, async_op=True))
            works.append(session.comm_of((session.rank,), channel).all_reduced(x, async_op=True))
        return [float(work.wait()[-1]) for work in works] == [float(size), *[float(size), 1.0] * 9]

    assert mesh.run(body) == [True] * mesh.size


def test_gradients_of_several_streams(mesh: Mesh) -> None:
    """A leaf used on a stream of its own: the bucket waits for that stream, however long it takes."""
    from spmd import spmd as on_mesh
    from spmd import value_and_grad

    def loss(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            slow = x
            for _ in range(20):
                slow = torch.tanh(slow @ w["a"])
        torch.cuda.current_stream().wait_stream(side)
        return slow.mean() + (x * w["b"]).mean()

    w = {"a": torch.eye(1024) * 0.5, "b": torch.ones(1024)}
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    _, found = on_mesh(value_and_grad(loss), mesh=mesh)(w, x)
    for name, right in plain(w, x).items():
        torch.testing.assert_close(found[name].full(), right, rtol=1e-2, atol=1e-6)


def plain(w: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same on the CPU."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
    slow = x
    for _ in range(20):
        slow = torch.tanh(slow @ leaves["a"])
    (slow.mean() + (x * leaves["b"]).mean()).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def test_a_rank_that_never_joins_holds_up_nothing() -> None:
    """NCCL waits for a second rank; the thread that it waits in is left behind, and others go on."""
    from spmd.kernels.cuda import nccl_connection, nccl_library

    library = nccl_library.load()
    entered = threading.Event()

    def enter() -> None:
        torch.cuda.set_device(0)
        entered.set()

    def joined(size: int) -> nccl_connection.Pending:
        unique = library.nccl.get_unique_id()
        return nccl_connection.Pending(lambda _: nccl_connection.joined(library, size, unique, 0, enter), enter)

    waiting = joined(2)
    assert entered.wait(60) and not waiting.done()
    waiting.abandon()
    alone = joined(1)
    while not alone.done():
        pass
    made = alone.result()
    assert made is not None
    made.end(abort=False)
    nccl_connection.await_endings()
