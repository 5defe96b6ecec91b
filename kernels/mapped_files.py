"""Arrays that are mapped files travel as the file's name, so that none of their data is read and sent.

Invariant: a rank maps the same file; what it writes into the array stays private to it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from .shm.pages import PAGE, any_copied


def opened_elsewhere(obj: Any) -> tuple[Callable, tuple] | None:
    """How another process opens this `np.memmap`, or a gapless part of one, as for `__reduce__`; None for all else.

    A copy-on-write map (mode "c", as ranks have) travels as its file only while nothing was written to it.
    """
    if not isinstance(obj, np.memmap) or obj.filename is None or not obj.size:
        return None
    order = "C" if obj.flags.c_contiguous else "F" if obj.flags.f_contiguous else None
    base: Any = obj
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if order is None or base is None:
        return None
    if obj.mode == "c":
        first = obj.ctypes.data - obj.ctypes.data % PAGE
        if any_copied(first, obj.ctypes.data + obj.nbytes - first):
            return None
    start = obj.offset - obj.offset % mmap.ALLOCATIONGRANULARITY  # of the whole map, of which `obj` may be a part
    offset = start + obj.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    return _opened, (str(obj.filename), obj.dtype, offset, obj.shape, order)


def _opened(path: str, dtype: np.dtype, offset: int, shape: tuple[int, ...], order: Any) -> np.memmap:
    return np.memmap(path, dtype, "c", offset, shape, order)
