"""The directory: each rank publishes where its blocks lie, under keys that other ranks look up.

Invariant: a rank writes only its own part; an entry's key is written last and removed first, so a reader that finds the
key both before and after it reads the offset has read the right offset.
"""

from __future__ import annotations

from ..errors import MeshError
from .pages import PAGE

_BYTES = 16 * PAGE  # of each rank
_ENTRIES = _BYTES // 16 - 1  # the first pair of words holds how many entries have been used


def directory_bytes(size: int) -> int:
    """How much of the arena the directory of `size` ranks takes."""
    return size * _BYTES


class Directory:
    """The directory as rank `rank` sees it; it lies in the arena from the byte `start` on."""

    def __init__(self, words: memoryview, start: int, size: int, rank: int):
        self._words, self._rank = words, rank
        self._parts = [(start + each * _BYTES) // 8 for each in range(size)]

    def publish(self, key: int, offset: int) -> None:
        """Publish the offset of a block of this rank."""
        words, part = self._words, self._parts[self._rank]
        count = words[part]
        entry = next((index for index in range(1, count + 1) if not words[part + 2 * index]), count + 1)
        if entry > _ENTRIES:
            raise MeshError("too many communicators on this mesh", remedy="keep, reuse or close communicators")
        words[part + 2 * entry + 1] = offset
        words[part + 2 * entry] = key
        words[part] = max(count, entry)

    def forget(self, key: int) -> None:
        """Remove an entry of this rank."""
        words, part = self._words, self._parts[self._rank]
        for index in range(1, words[part] + 1):
            if words[part + 2 * index] == key:
                words[part + 2 * index] = 0

    def lookup(self, owner: int, key: int) -> int | None:
        """The offset that a rank has published under a key, if it has."""
        words, part = self._words, self._parts[owner]
        for index in range(1, words[part] + 1):
            at = part + 2 * index
            if words[at] == key:
                offset = words[at + 1]
                return offset if words[at] == key else None
        return None

    def clear(self) -> None:
        """Forget all entries of all ranks; only when no rank is in a region."""
        for part in self._parts:
            self._words[part] = 0
