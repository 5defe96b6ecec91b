"""What ranks do with their communicator in the tests of every backend; each body returns what a rank found."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from oracle import DTYPES, bits, same, value

from spmd import Mesh, SpecError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LARGE = 90_000  # elements, past what is reduced in one phase


def attempt(function: Callable[[], Any]) -> Any:
    """The result, or the error's type and text: a rank's answer must not end the region."""
    try:
        return function()
    except SpecError as error:
        return f"SpecError: {error}"


# -- collectives -------------------------------------------------------------------------------------------------------


SHAPE = (3, 5)


def reduce_all_ways(mesh: Mesh, cases: list[tuple[str, torch.dtype]]) -> list[Any]:
    comm = mesh.comm()
    last = comm.size - 1

    def one(op: str, dtype: torch.dtype) -> list[torch.Tensor]:
        mine = value(dtype, SHAPE, comm.rank)
        everywhere, at_last, piece = mine.clone(), mine.clone(), torch.empty(SHAPE, dtype=dtype)
        comm.all_reduce(everywhere, op)
        new = comm.all_reduced(mine, op)
        comm.reduce(at_last, last, op)
        comm.reduce_scatter(piece, [value(dtype, SHAPE, comm.rank, seed) for seed in range(comm.size)], op)
        return [everywhere, new.clone(), at_last, piece]

    return [attempt(lambda op=op, dtype=dtype: one(op, dtype)) for op, dtype in cases]  # type: ignore[misc]


def length(sender: int, receiver: int) -> int:
    """Some are empty, some past the threshold of one phase."""
    return (0, 3, 70, LARGE)[(sender + 2 * receiver) % 4]


def unequal_pieces(mesh: Mesh) -> dict[str, list[torch.Tensor]]:
    comm = mesh.comm()
    rank, size = comm.rank, comm.size
    dtype = torch.float64

    def blank(lengths: list[int]) -> list[torch.Tensor]:
        return [torch.full((n,), -1.0, dtype=dtype) for n in lengths]

    mine = value(dtype, (length(rank, 0),), rank)
    gathered = blank([length(r, 0) for r in range(size)])
    comm.gather(mine, gathered if rank == 0 else None, 0)
    everywhere = blank([length(r, 0) for r in range(size)])
    comm.all_gather(everywhere, mine)
    (scattered,) = blank([length(size - 1, rank)])
    comm.scatter(
        scattered,
        [value(dtype, (length(rank, r),), rank, r) for r in range(size)] if rank == size - 1 else None,
        size - 1,
    )
    crossed = blank([length(r, rank) for r in range(size)])
    comm.all_to_all(crossed, [value(dtype, (length(rank, r),), rank, r) for r in range(size)])
    return {"gather": gathered, "all_gather": everywhere, "scatter": [scattered], "all_to_all": crossed}


NUMELS = (1, 63, 64, 65, 8191, 8192, 8193, 32768, 32769, 65536, 65537, 87040, 87041, 65536 * 2 - 1, 65536 * 2 + 65)


def at_sizes(mesh: Mesh) -> list[Any]:
    comm = mesh.comm()
    found = []
    for numel in NUMELS:
        mine = value(torch.float32, (numel,), comm.rank)
        resident = comm.empty(numel, dtype=torch.float32)
        resident.copy_(mine)
        copies = [mine.clone() for _ in range(3)]
        comm.all_reduce(copies[0])
        comm.reduce(copies[1], 0)
        comm.broadcast(copies[2], comm.size - 1)
        scattered = torch.empty(numel)
        comm.reduce_scatter(scattered, [mine + i for i in range(comm.size)])
        results = [*copies, scattered, comm.all_reduced(mine), comm.all_reduced(resident)]
        found.append(([bits(result) for result in results], same(resident, mine)))
    return found


def mixed_outstanding(mesh: Mesh) -> list[bytes]:
    """Large and small ones, of all kinds, waited for from the last to the first."""
    comm = mesh.comm()
    works, outs = [], []
    for turn in range(12):
        numel = (5, 9000, 90_000)[turn % 3]
        mine = value(torch.float32, (numel,), comm.rank, turn)
        everyone = [torch.empty(numel) for _ in range(comm.size)]
        works.append(comm.all_gather(everyone, mine, async_op=True))
        reduced_here = mine.clone()
        works.append(comm.all_reduce(reduced_here, async_op=True))
        sent = mine.clone()
        works.append(comm.broadcast(sent, turn % comm.size, async_op=True))
        works.append(comm.barrier(async_op=True))
        outs.append([*everyone, reduced_here, sent])
    for work in reversed(works):
        work.wait()
    return [bits(tensor) for tensors in outs for tensor in tensors]


# -- messages ---


def around_the_ring(mesh: Mesh) -> list[bytes]:
    """Each dtype goes to the next rank; alone, a rank sends to itself."""
    comm = mesh.comm()
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    found = []
    for dtype in DTYPES:
        target = torch.empty((3, 4), dtype=dtype)
        work = comm.isend(value(dtype, (3, 4), comm.rank), following)
        assert comm.recv(target, previous) == previous
        work.wait()
        found.append(bits(target))
    return found


def everyone_to_everyone(mesh: Mesh) -> dict[tuple[int, int], bytes]:
    """Three tags for each pair; the receives are posted in another order than the sends."""
    comm = mesh.comm()
    pairs = [(peer, tag) for tag in (0, 7, -3) for peer in range(comm.size)]
    targets = {pair: torch.empty(5 + pair[0], dtype=torch.float64) for pair in pairs}
    receives = {pair: comm.irecv(targets[pair], *pair) for pair in reversed(pairs)}
    sends = [
        comm.isend(value(torch.float64, (5 + comm.rank,), comm.rank, peer + 10 * (tag + 3)), peer, tag)
        for peer, tag in pairs
    ]
    for pair in pairs:
        assert receives[pair].wait() == pair[0]
    for work in sends:
        work.wait()
    return {pair: bits(target) for pair, target in targets.items()}


def any_source(mesh: Mesh) -> list[tuple[int, float]]:
    comm = mesh.comm()
    if comm.rank:
        for turn in range(3):
            comm.send(torch.tensor(10.0 * comm.rank + turn), 0, tag=5)
        return []
    found = []
    for _ in range(3 * (comm.size - 1)):
        target = torch.empty(())
        found.append((comm.recv(target, tag=5), float(target)))
    return found


def thousand(mesh: Mesh) -> Any:
    comm = mesh.comm()
    if comm.rank == 0:
        works = [comm.isend(torch.tensor([i]), 1, tag=i % 10) for i in range(1000)]
        for work in reversed(works):
            work.wait()
        return all(work.is_completed() for work in works)
    targets = [torch.empty(1, dtype=torch.int64) for _ in range(1000)]
    works = [comm.irecv(target, 0, tag=9 - i % 10) for i, target in enumerate(targets)]
    for work in reversed(works):
        work.wait()
    return [int(target) for target in targets]


def both_ways(mesh: Mesh) -> list[bool]:
    """Large and empty messages cross: sending first and receiving first must both work."""
    comm = mesh.comm()
    peer = 1 - comm.rank
    found = []
    for numel in (1 << 20, 0, 3):
        sent, target = value(torch.float64, (numel,), comm.rank), torch.empty(numel, dtype=torch.float64)
        work = comm.isend(sent, peer)
        assert comm.recv(target, peer) == peer
        work.wait()
        found.append(same(target, value(torch.float64, (numel,), peer)))
    return found


def to_itself(mesh: Mesh) -> list[float]:
    comm = mesh.comm()
    first, second = torch.empty(()), torch.empty(())
    works = [comm.irecv(second, comm.rank, 2), comm.irecv(first, comm.rank, 1)]
    comm.send(torch.tensor(1.0), comm.rank, 1)
    comm.send(torch.tensor(2.0), comm.rank, 2)
    for work in works:
        work.wait()
    return [float(first), float(second)]


def amid_collectives(mesh: Mesh) -> list[float]:
    """A rank that waits for a message still does its part in what it has started, and the other way round."""
    comm = mesh.comm()
    large = torch.full((90_000,), float(comm.rank))
    message = torch.zeros(())
    if comm.rank == 0:
        work = comm.all_reduce(large, async_op=True)
        comm.recv(message, 1)
        work.wait()
    else:
        comm.all_reduce(large)
        comm.send(torch.tensor(3.0), 0)
    # The sender blocks while the receiver is in a collective; there is no room for all of it.
    if comm.rank == 1:
        for i in range(100):
            comm.send(torch.tensor(float(i)), 0, tag=1)
    comm.barrier()
    if comm.rank == 0:
        for _ in range(100):
            comm.recv(message, 1, tag=1)
    return [float(large[-1]), float(message)]


def never_finish_writing() -> None:
    """Never finish writing a checkpoint, so that this rank can be killed meanwhile."""
    os.fsync = lambda *_: time.sleep(60)  # type: ignore[assignment]
