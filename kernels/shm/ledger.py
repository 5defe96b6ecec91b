"""The ledger: a list, in shared memory, of the values that a rank keeps, so that a replacement process can keep them.

An entry has a number, the memory that it refers to, some words, and bytes of its own: small values lie in the entry
itself. Invariants: an entry is valid once its word in the table is written, which happens last; and a successor's new
entries all become valid at once, since a single word switches to the new table.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import dataclasses
import functools
import os
import struct
from collections.abc import Callable, Iterator, Sequence

from .blocks import Extent
from .heap import Heap
from .pages import PAGE

_TABLE = 1 << 20  # entries, a word each; the first word says how many have been used
_FEW = 4  # so many pieces are copied one by one, more of them by one system call
_MOST = 1024  # pieces that one call takes: IOV_MAX
_HEAD = 5  # words: bytes of the entry, its number, how many extents, how many words, bytes of `data`


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """An entry, as read.

    Attributes:
        number: the writer's name for it.
        extents: memory that it refers to.
        words, data: as written.
        pieces: the bytes that were copied, one after another.
    """

    number: int
    extents: tuple[Extent, ...]
    words: tuple[int, ...]
    data: bytes
    pieces: bytes


@functools.lru_cache(maxsize=4096)
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"{count}q")


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


# Instead of `os.pwritev`, which needs a buffer object for each piece.
_pwritev = ctypes.CDLL(None, use_errno=True).pwritev
_pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)
_pwritev.restype = ctypes.c_ssize_t


class Entries:
    """Reads a rank's ledger, which lies in the arena from `start` on; one of its two halves is valid."""

    def __init__(self, shared: memoryview, start: int, nbytes: int) -> None:
        self._bytes, self._start = shared, start
        self._all_words = shared.cast("Q")
        self._half_bytes = (nbytes - PAGE) // 2 // PAGE * PAGE
        self._open(self._all_words[start // 8])

    def _open(self, half: int) -> None:
        self._table = (self._start + PAGE + half * self._half_bytes) // 8
        self._used = self._all_words[self._table]

    def read(self) -> list[Record]:
        """All entries, in no order."""
        found = []
        for entry in range(1, self._used + 1):
            offset = self._all_words[self._table + entry]
            if offset:
                found.append(self._read(offset))
        return found

    def _read(self, offset: int) -> Record:
        total, number, extents, words, data = _words(_HEAD).unpack_from(self._bytes, offset)
        count = 3 * extents + words
        rest = _words(count).unpack_from(self._bytes, offset + 8 * _HEAD)
        body = offset + _padded(8 * (_HEAD + count))
        return Record(
            number,
            tuple(Extent(*rest[3 * each : 3 * each + 3]) for each in range(extents)),
            rest[3 * extents :],
            bytes(self._bytes[body : body + data]),
            bytes(self._bytes[body + _padded(data) : offset + total]),
        )


class Ledger(Entries):
    """A rank's own ledger.

    Args:
        fd, address: the arena's descriptor, and where it begins in this process.
        remove: gives the memory of (offset, bytes) back.
    """

    def __init__(
        self, shared: memoryview, fd: int, address: int, start: int, nbytes: int, remove: Callable[[int, int], None]
    ) -> None:
        self._fd, self._address, self._remove = fd, address, remove
        super().__init__(shared, start, nbytes)

    def _open(self, half: int) -> None:
        super()._open(half)
        first = 8 * self._table
        data = first + 8 * _TABLE
        self._heap = Heap(data, first + self._half_bytes - data, self._give_back, least=64)
        self._free: list[int] = []  # entries of the table
        self._sizes: dict[int, int] = {}  # by entry

    def write(
        self,
        number: int,
        extents: Sequence[Extent],
        words: Sequence[int],
        data: bytes,
        addresses: Sequence[int],
        sizes: Sequence[int],
    ) -> int:
        """Add an entry; returns its index in the table.

        Args:
            addresses, sizes: pieces of memory to copy into the entry.
        """
        flat = [value for extent in extents for value in extent]
        count = _HEAD + len(flat) + len(words)
        at = body = _padded(8 * count)
        at += _padded(len(data))
        total = at + sum(sizes)
        offset = self._heap.allocate(total)
        _words(count).pack_into(self._bytes, offset, total, number, len(extents), len(words), len(data), *flat, *words)
        self._bytes[offset + body : offset + body + len(data)] = data
        self._copy(offset + at, addresses, sizes)
        entry = self._free.pop() if self._free else self._new_entry()
        self._sizes[entry] = total
        self._all_words[self._table + entry] = offset
        return entry

    def _copy(self, target: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy pieces of memory, end to end, to an offset in the arena."""
        if len(sizes) > _FEW:
            pieces = array.array("Q", bytes(16 * len(sizes)))
            pieces[::2], pieces[1::2] = array.array("Q", addresses), array.array("Q", sizes)
            at, _ = pieces.buffer_info()
            for first in range(0, len(sizes), _MOST):
                nbytes = sum(sizes[first : first + _MOST])
                if _pwritev(self._fd, at + 16 * first, min(_MOST, len(sizes) - first), target) != nbytes:
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number))
                target += nbytes
            return
        target += self._address
        for address, nbytes in zip(addresses, sizes, strict=True):
            ctypes.memmove(target, address, nbytes)
            target += nbytes

    def _new_entry(self) -> int:
        self._used += 1
        self._all_words[self._table + self._used] = 0
        self._all_words[self._table] = self._used
        return self._used

    def remove(self, entry: int) -> None:
        at = self._table + entry
        offset = self._all_words[at]
        self._all_words[at] = 0
        self._heap.free(offset, self._sizes.pop(entry))
        self._free.append(entry)

    @contextlib.contextmanager
    def anew(self) -> Iterator[None]:
        """Replace all entries: those written inside this block become valid at its end, instead of the old ones."""
        half = self._all_words[self._start // 8]
        first = self._start + PAGE
        self._remove(first + (1 - half) * self._half_bytes, self._half_bytes)
        self._open(1 - half)
        yield
        self._all_words[self._start // 8] = 1 - half
        self._remove(first + half * self._half_bytes, self._half_bytes)

    def _give_back(self, offset: int, nbytes: int) -> None:
        first, last = -(-offset // PAGE) * PAGE, (offset + nbytes) // PAGE * PAGE
        if first < last:
            self._remove(first, last - first)
