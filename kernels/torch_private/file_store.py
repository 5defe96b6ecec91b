"""The file behind torch's `FileStore`, of which a process may be killed in the middle of a record.

Whoever reads the beginning of a record waits for the rest in a loop that nothing ends, and later records are read from
the wrong place. torch has no way to mend a file, nor one to write a record at once.
"""

from __future__ import annotations

import fcntl
import os
import time

_LENGTH = 4  # bytes of the length before each key and each value
_SECONDS = 1.0  # for others to end what they do with the file; a reader that is stuck in it does not


def drop_unfinished_record(fd: int) -> None:
    """Cut a file of records, each a key and a value, where its last whole one ends; its writers are idle or dead."""
    end = time.monotonic() + _SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as `FileStore` does
            break
        except BlockingIOError:
            if time.monotonic() > end:
                return
            time.sleep(0.001)
    try:
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        whole = at = 0
        while at < len(data):
            for _ in range(2):
                at += _LENGTH + int.from_bytes(data[at : at + _LENGTH], "little")
            whole = at if at <= len(data) else whole
        if whole < len(data):
            os.ftruncate(fd, whole)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
