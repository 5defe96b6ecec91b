"""Sums of matrices that ranks give whole or as factors: the sum, whoever gives what, and the same bits each time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from spmd import Mesh

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, COLUMNS = 900, 150
LENGTHS = {"factors": 5, "few": 1, "none": 0, "matrix": 7}  # of what each kind of rank gives, the rows of the factors


def factors(rank: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Small whole numbers: their products and sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randint(-4, 5, (length, width), generator=generator) for width in (ROWS, COLUMNS))
    return left.to(dtype), right.to(dtype)


def summed(mesh: Mesh, kinds: list[str], dtype: torch.dtype) -> list[Tensor]:
    """Three sums of three each, in flight together."""
    comm: Any = mesh.comm()
    kind = kinds[comm.rank]
    found = []
    for _ in range(3):
        works = []
        for turn in range(3):
            left, right = factors(10 * turn + comm.rank, LENGTHS[kind], dtype)
            if kind == "matrix":
                given: Any = comm.scratch(ROWS * COLUMNS, dtype=dtype)
                torch.mm(left.t(), right, out=given.view(ROWS, COLUMNS))
            else:
                given = left.t().contiguous().t(), right
            works.append(comm.sum_of_products(ROWS, COLUMNS, dtype, given, async_op=True))
        found += [work.wait().view(ROWS, COLUMNS).clone() for work in works]
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shift", range(len(LENGTHS)))
@pytest.mark.parametrize("alike", [True, False])
def test_the_sum(shared_mesh: Callable[..., Mesh], size: int, shift: int, alike: bool) -> None:
    mesh = shared_mesh({"data": size})
    names = [*LENGTHS] * 2
    kinds = [names[shift]] * size if alike else names[shift : shift + size]
    for dtype in (torch.float32, torch.float64):
        for found in mesh.run(summed, mesh, kinds, dtype):
            for number, total in enumerate(found):
                wanted = torch.zeros(ROWS, COLUMNS, dtype=dtype)
                for rank, kind in enumerate(kinds):
                    left, right = factors(10 * (number % 3) + rank, LENGTHS[kind], dtype)
                    wanted += left.t() @ right
                assert torch.equal(total, wanted)


def test_ranks_that_disagree_are_told(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})

    def body() -> None:
        comm: Any = mesh.comm()
        comm.sum_of_products(ROWS, COLUMNS + comm.rank, torch.float32, (torch.ones(1, ROWS), torch.ones(1, COLUMNS)))

    with pytest.raises(Exception, match=r"sum_of_products float32\[900, 151\]"):
        mesh.run(body)
