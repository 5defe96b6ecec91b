"""A value in pieces: shards of ranks that are about to leave, of which each new rank makes its own.

They stay where they are, in the arena of those ranks, and are copied once, into memory that the new rank's value keeps.
Invariant: that arena is there, and as it was, until all new ranks have answered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ...kernels.shm.arena import bytes_of
from .. import strides
from ..spec import Layout, P
from ..strides import frozen_as


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
    place: int | torch.Tensor


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

    def take(
        self, layout: Layout, spec: P, rank: int, room: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """A rank's shard, as `Layout.take` has it of the whole.

        Args:
            room: gives memory for so many elements of a tensor's kind.
        """
        slices = layout.slices(self.shape, spec, rank)
        box = [(part.start, part.stop) for part in slices] + [(0, size) for size in self.shape[len(slices) :]]
        sizes = tuple(stop - start for start, stop in box)
        first = self.pieces[0]
        order = strides.joined(self.shape, first.shape, strides.dense(first.shape, first.stride))
        plain = self.like.detach()
        shard = room(torch.Size(sizes).numel(), plain).as_strided(sizes, strides.dense(sizes, order))
        for piece in self.pieces:
            # What is here of the piece: from where to where, in the whole.
            both = [
                (max(start, begin), min(stop, begin + size))
                for (start, stop), begin, size in zip(box, piece.begin, piece.shape, strict=True)
            ]
            if all(start < stop for start, stop in both):
                here = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(both, box, strict=True))
                there = tuple(slice(a - begin, b - begin) for (a, b), begin in zip(both, piece.begin, strict=True))
                shard[here].copy_(self._tensor(piece)[there])
        return frozen_as(self.like, shard)

    def _tensor(self, piece: Piece) -> torch.Tensor:
        if isinstance(piece.place, torch.Tensor):
            return piece.place
        steps = zip(piece.shape, piece.stride, strict=True)
        nbytes = (1 + sum((size - 1) * step for size, step in steps)) * self.like.itemsize
        found = self.source.bytes[piece.place : piece.place + nbytes]
        return found.view(self.like.dtype).as_strided(piece.shape, piece.stride)
