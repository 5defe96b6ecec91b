"""The C allocator in a rank: freed memory is kept, since the next training step needs the same again.

By default glibc maps every large block anew and unmaps it when it is freed. Then each gradient of each step costs a
page fault and a zeroed page for every 4 KiB, up to a third of a step's time. Source: mallopt(3), malloc_trim(3).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_NEVER = (1 << 31) - 1
_PAD_BYTES = 64 << 20


@functools.lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Make malloc take large blocks from the heap, too, and give nothing back. Without glibc nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_TOP_PAD, _PAD_BYTES)


def keep_some_freed_memory() -> None:
    """Make malloc keep some memory for what is made and freed all the time, as samples are, and give back the rest."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _PAD_BYTES // 2)  # the most that the C library takes
        mallopt(_M_TRIM_THRESHOLD, _PAD_BYTES)


def release_freed_memory(region: int) -> None:
    """After regions 1, 2, 4, 8, ..., give freed memory back: the beginning, or a rare call, may have needed more.

    Args:
        region: the number of the region that has ended.
    """
    if region & (region - 1) == 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def populate(nbytes: int) -> None:
    """Get this much memory from the kernel now, so that the first region need not."""
    torch.ones(nbytes, dtype=torch.uint8, device="cpu")
