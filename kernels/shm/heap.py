"""Blocks of one rank's part of the arena: size classes with free lists above a rising top.

Free blocks keep their memory up to a limit; past it they give it back and keep only their address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..errors import MeshError, message
from ..processes import Owned
from .pages import PAGE

_KEPT_FREE_BYTES = 256 << 20


class Heap(Owned):
    """The blocks from `start` on; offsets are those of the arena.

    Args:
        discard: gives the memory of (offset, bytes) back to the system.
        rising: told the new top.
        holes: (offset, bytes) below `start` that are free as well, for when there is nothing above.
        least: the smallest size, of which all sizes are multiples.
    """

    def __init__(
        self,
        start: int,
        size: int,
        discard: Callable[[int, int], None],
        rising: Callable[[int], None] = lambda top: None,
        holes: Sequence[tuple[int, int]] = (),
        least: int = PAGE,
    ):
        super().__init__()
        self._top, self._end = start, start + size
        self._rising, self._holes, self._least = rising, list(holes), least
        self._kept: dict[int, list[int]] = {}
        self._emptied: dict[int, list[int]] = {}
        self._kept_bytes = 0
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
                message(
                    "a process that a rank has forked asked for shared memory of the rank's",
                    remedy="compute with copies there: tensor.clone() before the fork",
                )
            )
        size = self.rounded(nbytes, self._least)
        with self._lock:
            return self._taken(size, nbytes)

    def _taken(self, size: int, nbytes: int) -> int:
        kept, emptied = self._kept.get(size), self._emptied.get(size)
        if kept:
            self._kept_bytes -= size
            return kept.pop()
        if emptied:
            return emptied.pop()
        if self._top + size > self._end:
            for index, (offset, length) in enumerate(self._holes):
                if length >= size:
                    self._holes[index] = offset + size, length - size
                    return offset
            raise MeshError(
                message(
                    "the shared arena is full",
                    got=f"{nbytes} bytes asked for",
                    remedy="drop references to tensors made by comm.empty, or use fewer ranks on this host",
                )
            )
        self._top += size
        self._rising(self._top)
        return self._top - size

    @property
    def untouched(self) -> tuple[int, int]:
        """(offset, bytes) of what has never been handed out."""
        return self._top, self._end - self._top

    def free(self, offset: int, nbytes: int) -> None:
        if self.foreign:  # a child drops its copy of a tensor; the parent's is in use
            return
        size = self.rounded(nbytes, self._least)
        if self._kept_bytes + size > _KEPT_FREE_BYTES:
            self._discard(offset, size)
            self._emptied.setdefault(size, []).append(offset)
        else:
            self._kept_bytes += size
            self._kept.setdefault(size, []).append(offset)
