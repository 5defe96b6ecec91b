"""A value in pieces: shards of ranks that are about to leave, of which each new rank makes its own.

They stay where they are, in the arena of those ranks, and are copied once, into memory that the new rank's value keeps.
Invariant: that arena is there, and as it was, until all new ranks have answered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels.flat import extent_bytes
from ...kernels.shm.arena import bytes_of
from .. import strides
from ..spec import Layout, P
from ..strides import frozen_as

Box = list[tuple[int, int]]
"""A part of a whole: of each dimension where it begins, and where it ends."""
Allocate = Callable[[int, torch.Tensor], torch.Tensor]
"""Gives memory for so many elements of a tensor's kind."""


def box_of(layout: Layout, shape: Sequence[int], spec: P, rank: int) -> Box:
    """Where a rank's shard lies in the whole."""
    slices = layout.slices(tuple(shape), spec, rank)
    return [(part.start, part.stop) for part in slices] + [(0, size) for size in shape[len(slices) :]]


def sizes_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def shared(one: Box, other: Box) -> Box | None:
    """What two parts have in common, if anything; a number's are the same.

    >>> shared([(0, 3), (0, 9)], [(2, 4), (0, 9)]), shared([(0, 2)], [(2, 4)]), shared([], [])
    ([(2, 3), (0, 9)], None, [])
    """
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return both if all(start < stop for start, stop in both) else None


def within(box: Box, part: Box) -> tuple[slice, ...]:
    """Where a part of the whole lies in one that it is a part of."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, box, strict=True))


def room_for(
    like: torch.Tensor,
    whole: Sequence[int],
    part: Sequence[int],
    stride: Sequence[int],
    sizes: Sequence[int],
    allocate: Allocate,
) -> torch.Tensor:
    """Memory for so much of a whole, of which another part lies so."""
    order = strides.joined(whole, part, strides.dense(part, stride))
    return allocate(math.prod(sizes), like).as_strided(tuple(sizes), strides.dense(sizes, order))


class Source:
    """An arena of ranks that another process started; mapped when something is read from it.

    Args:
        pid, number, size: as in `arena.open_of`.
    """

    def __init__(self, pid: int, number: int, size: int):
        self._arena = pid, number, size
        self._bytes: torch.Tensor | None = None

    def __reduce__(self) -> Any:
        return Source, self._arena

    @property
    def bytes(self) -> torch.Tensor:
        if self._bytes is None:
            self._bytes = bytes_of(*self._arena)
        return self._bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A shard: where in the whole it begins, how it lies in memory, and where in the arena; or itself."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: int | torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """A value that is cut, as ranks have it that are about to leave.

    Attributes:
        like: an empty tensor of its kind.
    """

    source: Source
    shape: tuple[int, ...]
    like: torch.Tensor
    pieces: tuple[Piece, ...]

    def take(self, layout: Layout, spec: P, rank: int, allocate: Allocate) -> torch.Tensor:
        """A rank's shard, as `Layout.take` has it of the whole."""
        box, first = box_of(layout, self.shape, spec, rank), self.pieces[0]
        shard = room_for(self.like.detach(), self.shape, first.shape, first.stride, sizes_of(box), allocate)
        for piece in self.pieces:
            its = [(begin, begin + size) for begin, size in zip(piece.begin, piece.shape, strict=True)]
            if (both := shared(box, its)) is not None:
                shard[within(box, both)].copy_(self._tensor(piece)[within(its, both)])
        return frozen_as(self.like, shard)

    def _tensor(self, piece: Piece) -> torch.Tensor:
        if isinstance(piece.data, torch.Tensor):
            return piece.data
        nbytes = extent_bytes(piece.shape, piece.stride, self.like.itemsize)
        found = self.source.bytes[piece.data : piece.data + nbytes]
        return found.view(self.like.dtype).as_strided(piece.shape, piece.stride)
