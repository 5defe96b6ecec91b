"""Which core a rank runs on as it begins."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch

# It gives -1 where the C library lacks the function.
_current_core: Callable[[], int] = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)
_CORES = os.cpu_count() or 1


def spread(index: int, ranks: int) -> None:
    """Move this process to a core of its own, the `index`-th of `ranks` on this host, if it isn't on one.

    A kernel that wakes several ranks at once tends to put them on the core that woke them, and takes its time to spread
    them: two ranks on one of two cores make a step twice as long. A rank isn't bound to its core: if that is busy, the
    kernel may move it.
    """
    threads = torch.get_num_threads()
    if ranks < 2 or ranks * threads > _CORES:  # known without asking which cores are allowed
        return
    allowed = sorted(os.sched_getaffinity(0))
    if ranks * threads > len(allowed):
        return
    own = allowed[index * threads : (index + 1) * threads]
    if _current_core() in (*own, -1):
        return
    os.sched_setaffinity(0, own[:1])
    os.sched_setaffinity(0, allowed)
