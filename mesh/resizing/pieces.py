"""A value in pieces, the old ranks' shards, from which each new rank of a resized mesh makes its own shard.

The pieces stay in the old ranks' arena, and are copied once, into the memory of the new rank's value.
Invariant: that arena exists, unchanged, until all new ranks have answered.
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
"""A part of a whole tensor: where it begins and ends in each dimension."""
Allocate = Callable[[int, torch.Tensor], torch.Tensor]
"""Gives memory for this many elements of a tensor's kind."""


def box_of(layout: Layout, shape: Sequence[int], spec: P, rank: int) -> Box:
    """Where a rank's shard lies in the whole."""
    slices = layout.slices(tuple(shape), spec, rank)
    return [(part.start, part.stop) for part in slices] + [(0, size) for size in shape[len(slices) :]]


def sizes_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def shared(one: Box, other: Box) -> Box | None:
    """The overlap of two parts, if there is one; a scalar's parts are equal.

    >>> shared([(0, 3), (0, 9)], [(2, 4), (0, 9)]), shared([(0, 2)], [(2, 4)]), shared([], [])
    ([(2, 3), (0, 9)], None, [])
    """
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return both if all(start < stop for start, stop in both) else None


def within(box: Box, part: Box) -> tuple[slice, ...]:
    """Where `part` lies in `box`, which contains it."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, box, strict=True))


def room_for(
    like: torch.Tensor,
    whole: Sequence[int],
    part: Sequence[int],
    stride: Sequence[int],
    sizes: Sequence[int],
    allocate: Allocate,
) -> torch.Tensor:
    """Memory for a part with these sizes, in the memory order of another part of the same whole."""
    order = strides.joined(whole, part, strides.dense(part, stride))
    return allocate(math.prod(sizes), like).as_strided(tuple(sizes), strides.dense(sizes, order))


class Source:
    """An arena of another process's ranks; mapped when something is read from it.

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
    """A shard: where in the whole it begins, its layout, and its offset in the arena, or the tensor itself."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: int | torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """A sharded value, as the old ranks have it.

    Attributes:
        like: an empty tensor of its kind.
    """

    source: Source
    shape: tuple[int, ...]
    like: torch.Tensor
    pieces: tuple[Piece, ...]

    def take(self, layout: Layout, spec: P, rank: int, allocate: Allocate) -> torch.Tensor:
        """A rank's shard, as `Layout.take` would make it from the whole."""
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
