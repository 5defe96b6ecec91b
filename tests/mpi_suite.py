"""Run under mpirun by test_mpi.py: the communication layer over backend "mpi", with rank 0 saying how many checks held.

    mpirun -np 3 python tests/mpi_suite.py [cells.pickle [fail]]

Every rank runs the bodies that the other backends' tests run in a region. Given a file, rank 0 writes what each rank
found in the operations table there. Told to fail, the program ends by an error while messages are under way.
"""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "kernels"))

import operations_table as table
import pytest
import torch
from bodies import (
    NUMELS,
    amid_collectives,
    any_source,
    around_the_ring,
    at_sizes,
    both_ways,
    everyone_to_everyone,
    length,
    mixed_outstanding,
    to_itself,
    unequal_pieces,
)
from internals import mpi_chunks
from oracle import DTYPES, bits, reduced, same, value
from patience import soon

from spmd import CollectiveMismatch, Mesh, P, psum, spmd

checks = 0


def check(holds: bool, what: str) -> None:
    global checks
    assert holds, what
    checks += 1


def operations(mesh: Mesh, size: int) -> list[dict[tuple[str, torch.dtype], str]]:
    """The table's cells, which need three ranks; empty on fewer."""
    if size < table.RANKS:
        return []
    found = mesh.run(table.run_all, mesh)
    for rank, cells in enumerate(found):
        for cell, text in cells.items():
            check(text == table.expected(*cell), f"{cell} on rank {rank}: {text}")
    return found


def collectives(mesh: Mesh, size: int) -> None:
    for found, numel in zip(mesh.run(at_sizes, mesh)[0], NUMELS, strict=True):
        total = reduced([value(torch.float32, (numel,), rank) for rank in range(size)], "sum")
        check(found[0][0] == bits(total) == found[0][5], f"all_reduce of {numel} elements")
    for rank, pieces in enumerate(mesh.run(unequal_pieces, mesh)):
        for r in range(size):
            whole = value(torch.float64, (length(r, 0),), r)
            check(same(pieces["all_gather"][r], whole), f"all_gather of unequal pieces on rank {rank}")
            crossed = value(torch.float64, (length(r, rank),), r, rank)
            check(same(pieces["all_to_all"][r], crossed), f"all_to_all of unequal pieces on rank {rank}")
    expected = []
    for turn in range(12):
        inputs = [value(torch.float32, ((5, 9000, 90_000)[turn % 3],), rank, turn) for rank in range(size)]
        expected += [bits(tensor) for tensor in (*inputs, reduced(inputs, "sum"), inputs[turn % size])]
    check(mesh.run(mixed_outstanding, mesh) == [expected] * size, "asynchronous operations")


def messages(mesh: Mesh, size: int) -> None:
    for rank, found in enumerate(mesh.run(around_the_ring, mesh)):
        check(found == [bits(value(t, (3, 4), (rank - 1) % size)) for t in DTYPES], "around the ring")
    for rank, got in enumerate(mesh.run(everyone_to_everyone, mesh)):
        for (peer, tag), data in got.items():
            sent = value(torch.float64, (5 + peer,), peer, rank + 10 * (tag + 3))
            check(data == bits(sent), f"tag {tag} from {peer}")
    at_root = mesh.run(any_source, mesh)[0]
    for rank in range(1, size):
        check([n for source, n in at_root if source == rank] == [10.0 * rank + i for i in range(3)], "any source")
    check(mesh.run(to_itself, mesh) == [[1.0, 2.0]] * size, "to itself")
    check(mesh.run(outstanding, mesh) == [list(range(200))] * size, "200 outstanding messages")
    if size == 2:
        check(mesh.run(both_ways, mesh) == [[True] * 3] * 2, "large and empty messages")
        check(mesh.run(amid_collectives, mesh)[0] == [1.0, 99.0], "messages amid collectives")


def outstanding(mesh: Mesh) -> list[int]:
    """Short and long messages, received in another order than sent."""
    comm = mesh.comm()
    numel = [1 if i % 3 else 2000 for i in range(200)]
    sends = [comm.isend(torch.full((numel[i],), i), (comm.rank + 1) % comm.size, i % 10) for i in range(200)]
    targets = [torch.empty(n, dtype=torch.int64) for n in numel]
    order = sorted(range(200), key=lambda i: (-(i % 10), i))
    receives = [comm.irecv(targets[i], None if i % 2 else (comm.rank - 1) % comm.size, i % 10) for i in order]
    for work in [*reversed(receives), *reversed(sends)]:
        work.wait()
    return [int(target[-1]) for target in targets]


def chunks(mesh: Mesh, size: int) -> None:
    """Pieces past MPI's 32-bit counts travel in chunks; small chunks test that with little memory."""
    with mpi_chunks(1000):
        everyone = (
            mesh.run(around_the_ring, mesh),
            mesh.run(lambda: bits(mesh.comm().all_reduced(torch.arange(20_001)))),
        )
        check(everyone[1] == [bits(size * torch.arange(20_001))] * size, "an all_reduce in chunks")
        if size == 2:
            check(mesh.run(both_ways, mesh) == [[True] * 3] * 2, "messages in chunks")


def failures(mesh: Mesh, size: int) -> None:
    """Every rank raises, soon, and the mesh is usable afterwards."""

    def different() -> None:
        comm = mesh.comm()
        comm.all_reduce(torch.ones(2)) if comm.rank else comm.barrier()

    def wrong_size() -> None:
        comm = mesh.comm()
        if comm.rank == 0:
            comm.send(torch.ones(3), 1, tag=4)
        elif comm.rank == 1:
            comm.recv(torch.empty(4), 0, tag=4)

    def wrong_dtype() -> None:
        comm = mesh.comm()
        if comm.rank == 0:
            comm.send(torch.ones(2), 1)
        elif comm.rank == 1:
            comm.recv(torch.empty(2, dtype=torch.int32), 0)

    cases = (
        (different, r"rank 0: barrier(.|\n)*rank 1: all_reduce float32\[2\]"),
        (wrong_size, r"expected 4 elements of float32 \(16 bytes\), got a message of 3 elements"),
        (wrong_dtype, "dtypes differ.*2 elements of int32.*2 elements of float32"),
    )
    for body, text in cases:
        began = time.monotonic()
        with pytest.raises(CollectiveMismatch, match=text):
            mesh.run(body)
        check(soon(5.0, began), f"{text}: at once")
        total = mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(90_000))[-1]))
        check(total == [float(size)] * size, f"the mesh is usable after: {text}")


def main(path: str | None, *more: str) -> None:
    mesh = Mesh({"data": -1}, backend="mpi", timeout=30.0)
    check(mesh.backend == "mpi" and mesh.run(lambda: mesh.comm().backend) == ["mpi"] * mesh.size, "the backend")
    cells = operations(mesh, mesh.size)
    collectives(mesh, mesh.size)
    messages(mesh, mesh.size)
    chunks(mesh, mesh.size)
    failures(mesh, mesh.size)
    step = spmd(lambda x: psum((x * x).sum(), "data"), mesh=mesh, in_specs=P("data"))
    check(step(torch.ones(6 * mesh.size)).item() == 6.0 * mesh.size, "a decorated step")
    if mesh.rank == 0:
        if path is not None:
            with open(path, "wb") as file:
                pickle.dump(cells, file)
        print(f"ok {checks} checks", flush=True)
    if more == ("fail",):
        mesh.run(lambda: (mesh.comm().isend(torch.ones(10**6), 1 - mesh.rank), 1 / 0))
    mesh.close()


if __name__ == "__main__":
    main(*sys.argv[1:] or [None])
