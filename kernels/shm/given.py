"""Values that the driver gives to all ranks to read: one copy, in the driver's part of the arena.

Invariant: a block is reused only when the driver has dropped it and every rank has dropped as many views as it took.
A block that is not reused soon gives its memory back, since a program may put all its data once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .blocks import Register, Result, head_bytes
from .heap import Heap

_KEPT_FREE_TASKS = 16  # a loop that gives its next batch uses the block of an earlier one again


class GivenBlocks:
    """Blocks of the driver's heap, with counters of all ranks."""

    def __init__(
        self,
        words: memoryview,
        shared: memoryview,
        heap: Heap,
        size: int,
        register: Register,
        remove: Callable[[int, int], None],
    ):
        self._words, self._bytes, self._heap, self._register = words, shared, heap, register
        self._remove = remove
        self._members = tuple(range(size))
        self._head = head_bytes(size)
        self._blocks: dict[int, list[int]] = {}  # by size class
        self._needed: set[int] = set()  # blocks that the driver has not dropped
        self.dropped: dict[int, int] = {}  # dropped blocks that still have memory: how often each was found free
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Result:
        """A block of `nbytes`, which stays until the driver and all ranks have dropped it."""
        size = Heap.rounded(nbytes + self._head)
        with self._lock:
            blocks = self._blocks.setdefault(size, [])
            block = next((block for block in blocks if self._is_free(block)), None)
            if block is None:
                block = self._heap.allocate(size)
                self._register.add(block, size, self._members)
                blocks.append(block)
            self._needed.add(block)
            self.dropped.pop(block, None)
        return Result(block + self._head, block // 8)

    def memory(self, result: Result, nbytes: int) -> memoryview:
        """A block's bytes, to be written before any rank learns of the block."""
        return self._bytes[result.block : result.block + nbytes]

    def drop(self, result: Result) -> None:
        """Note that the driver needs a block no more; the garbage collector calls this, too."""
        block = 8 * result.release
        self._needed.discard(block)
        self.dropped[block] = 0

    def trim(self) -> None:
        """Give back the memory of blocks that have been free for long; to be called after each task."""
        with self._lock:
            for block, times in self.dropped.copy().items():
                if self._is_free(block):
                    self.dropped[block] = times + 1
                    if times == _KEPT_FREE_TASKS:
                        size = next(size for size, blocks in self._blocks.items() if block in blocks)
                        self._remove(block + self._head, size - self._head)
                        del self.dropped[block]

    def _is_free(self, block: int) -> bool:
        if block in self._needed:
            return False
        first, users = block // 8, len(self._members)
        return self._words[first : first + users].tolist() == self._words[first + users : first + 2 * users].tolist()
