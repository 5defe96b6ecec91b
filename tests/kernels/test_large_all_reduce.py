"""Large all-reductions in shared memory: the bits of rank order, wherever tensors lie and whatever becomes of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from oracle import bits, reduced, value

from spmd import Mesh

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUMEL = 280_001  # of floats a MiB, which ranks may sum in place; with a tail, and slices past the block of such sums
KINDS = ("kept", "any", "given up", "overwritten", "overwritten anywhere")


def reductions(mesh: Mesh, kinds: list[str], dtype: torch.dtype, op: str) -> list[list[bytes]]:
    """(the result, what the tensor holds then) of three reductions; `kinds` says what each rank makes of its own."""
    comm = mesh.comm()
    kind = kinds[comm.rank]
    found = []
    for turn in range(3):
        mine = value(dtype, (NUMEL,), comm.rank, turn)
        if kind == "given up":
            tensor = comm.scratch(NUMEL, dtype=dtype)
        elif kind in ("kept", "overwritten"):
            tensor = comm.empty(NUMEL, dtype=dtype)
        else:
            tensor = mine.clone()
        tensor.copy_(mine)
        if kind.startswith("overwritten"):
            comm.all_reduce(tensor, op)
            found.append([bits(tensor), bits(tensor)])
        else:
            result = comm.all_reduced(tensor, op).clone()
            found.append([bits(result), b"" if kind == "given up" else bits(tensor)])
    return found


@functools.cache
def total(size: int, dtype: torch.dtype, op: str, turn: int) -> bytes:
    return bits(reduced([value(dtype, (NUMEL,), rank, turn) for rank in range(size)], op))


def expected(size: int, kinds: list[str], dtype: torch.dtype, op: str) -> list[list[list[bytes]]]:
    every = []
    for rank, kind in enumerate(kinds):
        rows = []
        for turn in range(3):
            result = total(size, dtype, op, turn)
            after = bits(value(dtype, (NUMEL,), rank, turn)) if kind in ("kept", "any") else result
            rows.append([result, b"" if kind == "given up" else after])
        every.append(rows)
    return every


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_alike(shared_mesh: Callable[..., Mesh], size: int, kind: str) -> None:
    mesh = shared_mesh({"data": size})
    for dtype, op in ((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.uint16, "max")):
        kinds = [kind] * size
        assert mesh.run(reductions, mesh, kinds, dtype, op) == expected(size, kinds, dtype, op)


@pytest.mark.parametrize("shift", range(len(KINDS)))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_another(shared_mesh: Callable[..., Mesh], size: int, shift: int) -> None:
    mesh = shared_mesh({"data": size})
    kinds = [KINDS[(rank + shift) % len(KINDS)] for rank in range(size)]
    assert mesh.run(reductions, mesh, kinds, torch.float32, "sum") == expected(size, kinds, torch.float32, "sum")


def test_what_all_have_read_is_free_when_the_region_ends(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})

    def give_up() -> int:
        comm = mesh.comm()
        mine = comm.scratch(NUMEL, dtype=torch.float32)
        place = comm.arena.offset_of(mine)
        comm.all_reduced(mine.fill_(1.0))
        token = torch.zeros(1)  # a message, which frees nothing: both have read when it has arrived
        sending = comm.isend(token, 1 - comm.rank)
        comm.recv(token, 1 - comm.rank)
        sending.wait()
        return place

    def next_place() -> int:
        comm = mesh.comm()
        return comm.arena.offset_of(comm.arena.empty((NUMEL,), torch.float32))

    places = mesh.run(give_up)
    assert mesh.run(next_place)[1] == places[1]  # the first rank's holds the result
