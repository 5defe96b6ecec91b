"""Values that the driver gives to all ranks to read: one copy, in the driver's part of the arena.

Invariant: a block is reused only when the driver has dropped it and every rank has dropped as many views as it took.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .blocks import Register, Result, head_bytes
from .heap import Heap


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
        self._written: set[int] = set()  # blocks that have memory
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
            self._written.add(block)
            self._give_back()
        return Result(block + self._head, block // 8)

    def memory(self, result: Result, nbytes: int) -> memoryview:
        """A block's bytes, to be written before any rank learns of the block."""
        return self._bytes[result.block : result.block + nbytes]

    def drop(self, result: Result) -> None:
        """Note that the driver needs a block no more."""
        self._needed.discard(8 * result.release)

    def _give_back(self) -> None:
        """Give back the memory of blocks that are free."""
        for size, blocks in self._blocks.items():
            for block in blocks:
                if block in self._written and self._is_free(block):
                    self._remove(block + self._head, size - self._head)
                    self._written.discard(block)

    def _is_free(self, block: int) -> bool:
        if block in self._needed:
            return False
        first, users = block // 8, len(self._members)
        return self._words[first : first + users].tolist() == self._words[first + users : first + 2 * users].tolist()
