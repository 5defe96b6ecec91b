"""A new file that is written in large pieces, past the page cache where its file system can, while a program goes on.

Nobody reads the file soon, and copying it into the page cache would take more processor time than all the rest of a
checkpoint. Invariant: when `finish` returns, the bytes are on the disk, and the checksum is that of the bytes given.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .sums import Sums

PIECE = 4 << 20  # bytes a write
_BLOCK = 4096  # on any disk, a write past the page cache may begin and end at its multiples
_spare: list[mmap.mmap] = []  # pieces that no file uses now: making one anew takes as long as filling it


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Errors of system calls on an open file, which don't know its name, get it."""
    try:
        yield
    except OSError as error:
        error.filename = str(file)
        raise


class DirectFile:
    """A file that is being written.

    Raises:
        OSError: what the file system says, with the file's name; so do the methods.
    """

    def __init__(self, file: Path):
        self._file, self._sums = file, Sums()
        self._length = self._filled = 0
        try:
            self._memory = _spare.pop()
        except IndexError:
            self._memory = mmap.mmap(-1, PIECE)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._number = os.open(file, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._number = os.open(file, flags & ~os.O_EXCL, 0o666)  # the failed call has made it
        self._bytes = memoryview(self._memory)
        self._piece = torch.frombuffer(self._memory, dtype=torch.uint8)

    def write(self, data: torch.Tensor) -> None:
        """Append these bytes."""
        while data.numel():
            count = min(data.numel(), PIECE - self._filled)
            self._piece[self._filled : self._filled + count].copy_(data[:count])
            self._filled, self._length, data = self._filled + count, self._length + count, data[count:]
            if self._filled == PIECE:
                self._flush()

    def finish(self) -> dict[str, Any]:
        """Force it to disk, and return what a manifest says of it."""
        self._flush()
        with naming(self._file):
            os.ftruncate(self._number, self._length)
            os.fsync(self._number)
        return {"bytes": self._length, "sums": self._sums.hexdigest()}

    def close(self) -> None:
        os.close(self._number)
        del self._piece
        self._bytes.release()
        if not _spare:
            _spare.append(self._memory)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> None:
        self._sums.update(self._bytes[: self._filled])
        end = -(-self._filled // _BLOCK) * _BLOCK  # `finish` cuts off what is too much
        at, self._filled = 0, 0
        with naming(self._file):
            while at < end:
                at += self._written(self._bytes[at:end])

    def _written(self, data: memoryview) -> int:
        try:
            return os.write(self._number, data)
        except OSError as error:
            flags = fcntl.fcntl(self._number, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(self._number, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # this file system can't, or not here
            return os.write(self._number, data)
