"""Finds out which pages of a copy-on-write mapping were written, and so no longer show the mapped file."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import struct

import numpy as np

PAGE = 4096
MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE exists from Python 3.13 on
# Linux's include/uapi/linux/fs.h: struct pm_scan_arg (twelve 64-bit words), PAGE_IS_FILE, PAGE_IS_PRESENT, _SWAPPED.
_PAGEMAP_SCAN = 0xC0606610
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
_region = (ctypes.c_uint64 * 3)()
_START, _RANGE = 16, struct.Struct("2Q")
# Asks for pages that are present or swapped, and are not the file's.
_request = bytearray(
    struct.pack(
        "12Q",
        *(96, 0, 0, 0, 0, ctypes.addressof(_region), 1, 1),
        *(_FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT),
    )
)


@functools.lru_cache(maxsize=1)
def _pagemap() -> int:
    """This process's page map."""
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


os.register_at_fork(after_in_child=_pagemap.cache_clear)


def any_copied(address: int, nbytes: int) -> bool:
    """Whether some page in the range is private memory by now; True if that can't be found out.

    Source: Documentation/admin-guide/mm/pagemap.rst of the Linux kernel (PAGEMAP_SCAN since 6.7).
    """
    try:
        pagemap = _pagemap()
    except OSError:
        return True
    _RANGE.pack_into(_request, _START, address, address + -(-nbytes // PAGE) * PAGE)
    try:
        return fcntl.ioctl(pagemap, _PAGEMAP_SCAN, _request, True) > 0
    except OSError:
        return _any_copied_by_entry(pagemap, address, nbytes)


def _any_copied_by_entry(pagemap: int, address: int, nbytes: int) -> bool:
    """The same for older kernels, from one 64-bit entry per page: bit 63 present, 62 swapped, 61 file-backed."""
    try:
        data = os.pread(pagemap, -(-nbytes // PAGE) * 8, address // PAGE * 8)
    except OSError:
        return True
    entries = np.frombuffer(data, np.uint64)
    mapped = (entries >> np.uint64(62)) != 0
    return bool(np.any(mapped & ((entries >> np.uint64(61)) & np.uint64(1) == 0)))


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_madvise = ctypes.CDLL(None).madvise  # lets other threads run, which `mmap.madvise` does not
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(address: int, nbytes: int) -> None:
    """Map the pages of a range in advance, as far as possible: first touching a page costs more than a copy to it."""
    _madvise(address, nbytes, _POPULATE_WRITE)
