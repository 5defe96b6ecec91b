"""A checksum of a file that costs a fraction of a cryptographic one: it is taken beside steps that need the processor.

The bytes are 64-bit little-endian numbers in rows of 4096 bytes, zeros behind the last; the checksum is the SHA-256 of
the sums of all rows, one after another, of the sums of all columns, and of the length, all modulo 2**64. Damage goes
unnoticed only if it leaves the sums of all rows and of all columns as they were: no lost, moved or exchanged block
does, nor a change within one word or one row. It guards against damage, not against an attacker: whoever can write a
file of a checkpoint can write its manifest as well.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

_COLUMNS = 512
_ROW = 8 * _COLUMNS  # bytes


class Sums:
    """The checksum, used like those of hashlib.

    >>> whole, parts = Sums(), Sums()
    >>> whole.update(bytes(range(256)) * 40)
    >>> for _ in range(40):
    ...     parts.update(bytes(range(256)))
    >>> whole.hexdigest() == parts.hexdigest()
    True
    """

    def __init__(self) -> None:
        self._rows = hashlib.sha256()
        self._columns = np.zeros(_COLUMNS, "<u8")
        self._left = b""  # of the last row, if it is not whole
        self._length = 0

    def update(self, data: Any) -> None:
        """Append these bytes."""
        data = memoryview(data).cast("B")
        self._length += len(data)
        if self._left:
            missing = _ROW - len(self._left)
            self._left += data[:missing]
            data = data[missing:]
            if len(self._left) < _ROW:
                return
            self._add(self._left)
        whole = len(data) // _ROW * _ROW
        if whole:
            self._add(data[:whole])
        self._left = bytes(data[whole:])

    def hexdigest(self) -> str:
        """The checksum of all bytes so far."""
        end = Sums()
        end._rows, end._columns = self._rows.copy(), self._columns.copy()
        if self._left:
            end._add(self._left.ljust(_ROW, b"\0"))
        end._rows.update(end._columns.tobytes() + self._length.to_bytes(8, "little"))
        return end._rows.hexdigest()

    def _add(self, rows: Any) -> None:
        table = np.frombuffer(rows, "<u8").reshape(-1, _COLUMNS)
        self._rows.update(np.add.reduce(table, axis=1).astype("<u8", copy=False).tobytes())
        self._columns += np.add.reduce(table, axis=0)
