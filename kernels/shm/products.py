"""Sums of matrices that ranks give as products: each rank computes some rows of the sum from the factors of all ranks.

A weight's gradient is `left.t() @ right`, where both factors have a row for each row of the layer's input. If these are
few, the factors are much smaller than the matrix. So ranks exchange factors, and each writes its rows of the sum, once,
straight into the block that all read, as one product. Whatever the others give, a rank may give its matrix instead;
then the ranks' pieces are added in rank order. Invariant: the same pieces give the same bits, whoever reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..call import Call
from ..operations import Steps
from ..reduction import reduce_in_order
from .slots import Slots

_ALIGNED = 16  # rows of the sum begin at multiples
Factors = tuple[torch.Tensor, torch.Tensor]  # (length, rows) and (length, columns): the product is `left.t() @ right`
Given = torch.Tensor | Factors


class Piece(NamedTuple):
    """What a rank gives to a sum, in words of its slot.

    Attributes:
        matrix: the offset of its matrix in the arena; 0 if it gives factors.
        left, right: the offsets of its factors.
        length: how many rows the factors have.
    """

    matrix: int = 0
    left: int = 0
    right: int = 0
    length: int = 0


def sum_of_products(slots: Slots, rows: int, columns: int, dtype: torch.dtype, given: Given) -> Steps:
    """The sum as a flat tensor; a given matrix must be a `scratch` of the communicator, which this consumes."""
    arena, size, call = slots.arena, dtype.itemsize, Call("sum_of_products", dtype, (rows, columns))
    sequence = slots.begin(call.text)
    if isinstance(given, torch.Tensor):
        matrix = arena.offset_of(given)
        assert matrix is not None
        piece = Piece(matrix=matrix)
        result = slots.staging.consume(sequence, matrix, rows * columns * size)
    else:
        result = slots.staging.consume(sequence, None, rows * columns * size)
        piece = _staged(slots, sequence, given)
    if result is not None:
        slots.announce(sequence, call, result)
    slots.post_part(sequence, call, piece)
    yield slots.posted(sequence, call)
    result = result or slots.result(sequence)
    view = arena.views.take(result, rows * columns, dtype, user=slots.rank, users=slots.size)
    start, end = (_bound(rows, slots.size, index) for index in (slots.rank, slots.rank + 1))
    if start < end:
        words = slots.parts(sequence)
        pieces = [Piece(*words[4 * peer : 4 * peer + 4]) for peer in range(slots.size)]
        target = arena.tensor(result.block + start * columns * size, (end - start) * columns, dtype)
        _add(slots, pieces, target.view(-1, columns), rows, start)
    slots.reduced(sequence)
    yield slots.all_reduced_by(sequence)
    slots.read(sequence)
    return view


def _bound(rows: int, parts: int, index: int) -> int:
    return min(rows, -(-rows // (_ALIGNED * parts)) * _ALIGNED * index)


def _staged(slots: Slots, sequence: int, factors: Factors) -> Piece:
    left, right = factors
    at = slots.staging.stage(sequence, left.nbytes + right.nbytes)
    for offset, factor in ((at, left), (at + left.nbytes, right)):
        slots.arena.tensor(offset, factor.numel(), factor.dtype).view(factor.shape).copy_(factor)
    return Piece(left=at, right=at + left.nbytes, length=len(left))


def _add(slots: Slots, pieces: list[Piece], target: torch.Tensor, rows: int, start: int) -> None:
    """Write the sum of the pieces' rows from `start` on."""
    dtype, (count, columns) = target.dtype, target.shape

    def part(piece: Piece) -> torch.Tensor:
        at = piece.matrix + start * columns * dtype.itemsize
        return slots.arena.tensor(at, count * columns, dtype).view(count, columns)

    def factors(piece: Piece) -> Factors:
        left = slots.arena.tensor(piece.left, piece.length * rows, dtype).view(piece.length, rows)
        right = slots.arena.tensor(piece.right, piece.length * columns, dtype).view(piece.length, columns)
        return left[:, start : start + count], right

    if not any(piece.matrix for piece in pieces):
        lefts, rights = zip(*map(factors, pieces), strict=True)
        torch.mm(torch.cat(lefts).t(), torch.cat(rights), out=target)
        return
    if all(piece.matrix for piece in pieces):
        reduce_in_order([part(piece).view(-1) for piece in pieces], "sum", target.view(-1))
        return
    for index, piece in enumerate(pieces):
        if not piece.matrix:
            left, right = factors(piece)
            target.addmm_(left.t(), right, beta=int(index > 0))
        elif index:
            target.add_(part(piece))
        elif part(piece).data_ptr() != target.data_ptr():  # the first rank's lies where the result goes
            target.copy_(part(piece))
