"""The C allocator in a rank: memory once had is kept, since a training step wants the same again.

By default glibc maps every large block anew and unmaps it when it is freed. Then each gradient of each step costs a
page fault and a zeroed page for every 4 KiB, up to a third of a step's time. What is cheap to map anew, beside the
step that it was wanted in, is given back. Source: mallopt(3), mallinfo(3), the GNU C library's manual, "Memory
Allocation Tunables".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from typing import Any

import torch

from ...kernels import copying

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_NEVER = (1 << 31) - 1
_PAD_BYTES = 64 << 20
_SHARE = 0.01  # of a region's time that mapping memory anew may cost
_LONG_SECONDS = 0.25  # of a region whose end is worth a look
_PROBE_BYTES = 32 << 20


@functools.lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let malloc take large blocks from the heap, too, and give none back. Without glibc nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_TOP_PAD, _PAD_BYTES)


def keep_some_freed_memory() -> None:
    """Let malloc keep so much for what is made and freed over and over, as samples are, and give back the rest."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _PAD_BYTES // 2)  # the most that the C library takes
        mallopt(_M_TRIM_THRESHOLD, _PAD_BYTES)


def tunables(own: str | None) -> str:
    """GLIBC_TUNABLES for the environment of a rank that is about to start, around the user's own, which win.

    Besides those of large copies, pages of 2 MiB where the kernel has them: they are five times as fast to map.
    """
    return ":".join(filter(None, [copying.TUNABLES, "glibc.malloc.hugetlb=1", own]))


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.lru_cache(maxsize=1)
def _mallinfo2() -> Any:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Mallinfo2
    return found


def freed_bytes() -> int:
    """What malloc has and nothing uses; 0 where the C library does not tell."""
    return 0 if _mallinfo2() is None else _mallinfo2()().fordblks


def release_freed_memory(region: int, seconds: float) -> None:
    """Give back what is free, if the next region has it again soon enough.

    Args:
        region: its number; after regions 1, 2, 4, 8, ... all goes back, which only the program's beginning has needed.
        seconds: that it took.
    """
    rarely = region & (region - 1) == 0
    if rarely or (
        seconds > _LONG_SECONDS and (freed := freed_bytes()) > 0 and freed * _seconds_to_map() < seconds * _SHARE
    ):
        _trim()


def _trim() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def populate(nbytes: int) -> None:
    """Have so much at hand for a first region, which measures nothing at its end either."""
    _seconds_to_map()
    torch.ones(nbytes, dtype=torch.uint8, device="cpu")


@functools.lru_cache(maxsize=1)
def _seconds_to_map() -> float:
    """What a byte costs here that has been given back, and is wanted again."""
    _trim()
    taken = []
    for _ in range(2):  # the second time it is there
        began = time.perf_counter()
        torch.ones(_PROBE_BYTES, dtype=torch.uint8, device="cpu")
        taken.append(time.perf_counter() - began)
    return max(0.0, taken[0] - taken[1]) / _PROBE_BYTES
