"""Memory for values that outlive their rank: blocks of the rank's heap, which belong to the mesh, not to the process.

The heap's part of the arena is mapped a second time for them. A tensor in this second mapping owns its memory: ranks
don't share or reuse it (`Arena.is_borrowed`). Invariant: a block is freed when no tensor of this rank uses it.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from ..processes import Owned
from .blocks import Extent
from .heap import Heap
from .pages import MAP_NORESERVE, populate


class Lasting(Owned):
    """The blocks for values in one rank's part of the arena.

    Args:
        start, length: where that part begins, and its bytes.
    """

    def __init__(self, fd: int, start: int, length: int, heap: Heap):
        super().__init__()
        self._heap, self._start, self._length = heap, start, length
        self._shared = mmap.mmap(fd, length, flags=mmap.MAP_SHARED | MAP_NORESERVE, offset=start)
        self._bytes = memoryview(self._shared)
        self._base = torch.frombuffer(self._bytes[:8], dtype=torch.uint8).data_ptr()
        self._held: dict[int, tuple[weakref.ref, int, int]] = {}  # kept alive; offset, bytes

    def empty(self, nbytes: int) -> torch.Tensor:
        """A new block's bytes."""
        return self.hold(self._heap.allocate(nbytes), nbytes)

    def hold(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes of a block that is already allocated."""
        view = self._bytes[offset - self._start : offset - self._start + nbytes]
        reference = weakref.ref(view, self._dropped)
        self._held[id(reference)] = (reference, offset, nbytes)
        return torch.frombuffer(view, dtype=torch.uint8)

    def _dropped(self, reference: weakref.ref) -> None:
        _, offset, nbytes = self._held.pop(id(reference))
        self._heap.free(offset, nbytes)

    def extent_of(self, address: int, nbytes: int) -> Extent | None:
        """Where a storage lies, if it is in one of these blocks."""
        offset = address - self._base
        return Extent(offset + self._start, nbytes, 0) if 0 <= offset < self._length else None

    def populate(self, offset: int, nbytes: int) -> None:
        """See `pages.populate`."""
        populate(self._base + offset - self._start, nbytes)

    def adopt(self, heap: Heap) -> None:
        """Take new blocks from this heap."""
        self._heap = heap
