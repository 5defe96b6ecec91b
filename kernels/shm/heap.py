"""Blocks of one rank's part of the arena: size classes with free lists, and a top that rises when these are empty.

Free blocks keep their memory: each step needs about as much for new values as it frees, and mapping a page costs more
than writing it. The memory is given back to the system if nobody has taken it for a while, if there is more of it than
was lately in use at once, or if the host runs short of memory; then a block keeps only its address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..errors import MeshError
from ..processes import Owned, available_bytes
from .pages import PAGE

_KEPT_FREE_BYTES = 256 << 20  # so much free memory is kept for any length of time


class Heap(Owned):
    """The blocks from `start` on; offsets are those of the arena.

    Args:
        discard: gives the memory of (offset, bytes) back to the system.
        rising: is called with each new top.
        holes: (offset, bytes) below `start` that are free as well, used when nothing is left above.
        least: the smallest size; all sizes are multiples of it.
        used: bytes of the blocks below `start` that are in use.
    """

    def __init__(
        self,
        start: int,
        size: int,
        discard: Callable[[int, int], None],
        rising: Callable[[int], None] = lambda top: None,
        holes: Sequence[tuple[int, int]] = (),
        least: int = PAGE,
        used: int = 0,
    ):
        super().__init__()
        self._top, self._end = start, start + size
        self._rising, self._holes, self._least = rising, list(holes), least
        self._kept: dict[int, list[int]] = {}
        self._emptied: dict[int, list[int]] = {}
        self._kept_bytes, self._used_bytes = 0, used
        # The most bytes in use at once: between the last two calls of `trim`, and since the last one.
        self._peaks = 0, used
        self._untaken: dict[int, int] = {}  # by size, the fewest blocks kept at once since the last `trim`
        self._discard = discard
        self._lock = threading.Lock()

    @staticmethod
    def rounded(nbytes: int, least: int = PAGE) -> int:
        """The size class: whole pages, and at most an eighth more than asked for."""
        step = max(least, 1 << max(0, nbytes.bit_length() - 4))
        return max(least, -(-nbytes // step) * step)

    def allocate(self, nbytes: int) -> int:
        if self.foreign:
            raise MeshError(
                "a process that a rank has forked asked for shared memory of the rank's",
                remedy="compute with copies there: tensor.clone() before the fork",
            )
        size = self.rounded(nbytes, self._least)
        with self._lock:
            offset = self._taken(size, nbytes)
            self._used_bytes += size
            if self._used_bytes > self._peaks[1]:
                self._peaks = self._peaks[0], self._used_bytes
        return offset

    def _taken(self, size: int, nbytes: int) -> int:
        kept = self._kept.get(size)
        if kept:
            self._kept_bytes -= size
            if len(kept) <= self._untaken.get(size, 0):
                self._untaken[size] = len(kept) - 1
            return kept.pop()
        if self._kept_bytes > _KEPT_FREE_BYTES and available_bytes() < self._kept_bytes:
            for other, blocks in list(self._kept.items()):
                self._discard_first(len(blocks), other)
            self._untaken.clear()
        emptied = self._emptied.get(size)
        if emptied:
            return emptied.pop()
        if self._top + size > self._end:
            for index, (offset, length) in enumerate(self._holes):
                if length >= size:
                    self._holes[index] = offset + size, length - size
                    return offset
            raise MeshError(
                "the shared arena is full",
                got=f"{nbytes} bytes asked for",
                remedy="drop references to tensors made by comm.empty, or use fewer ranks on this host",
            )
        self._top += size
        self._rising(self._top)
        return self._top - size

    @property
    def untouched(self) -> tuple[int, int]:
        """(offset, bytes) of the part that was never allocated."""
        return self._top, self._end - self._top

    def free(self, offset: int, nbytes: int) -> None:
        if self.foreign:  # a forked child drops its copy of a tensor, while the parent still uses it
            return
        size = self.rounded(nbytes, self._least)
        self._used_bytes -= size
        if self._kept_bytes + size > max(_KEPT_FREE_BYTES, *self._peaks):
            self._discard(offset, size)
            self._emptied.setdefault(size, []).append(offset)
        else:
            self._kept_bytes += size
            self._kept.setdefault(size, []).append(offset)

    def trim(self) -> None:
        """Give back memory of blocks that nobody has taken since the last call; to be called now and then."""
        with self._lock:
            for size, blocks in list(self._kept.items()):  # finalizers may free some meanwhile
                surplus = max(0, self._kept_bytes - _KEPT_FREE_BYTES)
                self._discard_first(min(self._untaken.get(size, 0), -(-surplus // size)), size)
                self._untaken[size] = len(blocks)
            self._peaks = self._peaks[1], self._used_bytes

    def _discard_first(self, count: int, size: int) -> None:
        """Give back the memory of the kept blocks of a size that have been free for longest."""
        for _ in range(count):
            offset = self._kept[size].pop(0)
            self._kept_bytes -= size
            self._discard(offset, size)
            self._emptied.setdefault(size, []).append(offset)
