"""The C allocator in a rank: memory once had is kept, since a training step wants the same again.

By default glibc maps every large block anew and unmaps it when it is freed. Then each gradient of each step costs a
page fault and a zeroed page for every 4 KiB, up to a third of a step's time. Source: mallopt(3).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = (1 << 31) - 1
_PAD_BYTES = 64 << 20


@functools.lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let malloc take large blocks from the heap, too, and give none back. Without glibc nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_TOP_PAD, _PAD_BYTES)


def release_freed_memory(region: int) -> None:
    """Give back what is free, after regions 1, 2, 4, 8, ...: what only the beginning of a program has needed."""
    if region & (region - 1) == 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
