"""Ranks begin a region on cores of their own.

A kernel that wakes several ranks at once likes to put them on the core that woke them, and takes its time to part them:
two ranks on one of two cores make a step twice as long. Where there is a core for every thread of every rank, a rank
that finds itself on another's core moves to its own as a region begins. It isn't bound there: if that core is busy
with something else, the kernel may move it on.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch

# -1 from a C library that doesn't tell.
_current_core: Callable[[], int] = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)
_CORES = os.cpu_count() or 1


def spread(index: int, ranks: int) -> None:
    """Move this process to a core of its own, the `index`-th of `ranks` on this host, if it isn't on one."""
    threads = torch.get_num_threads()
    if ranks < 2 or ranks * threads > _CORES:  # known without a look at those that are allowed
        return
    allowed = sorted(os.sched_getaffinity(0))
    if ranks * threads > len(allowed):
        return
    own = allowed[index * threads : (index + 1) * threads]
    if _current_core() in (*own, -1):
        return
    os.sched_setaffinity(0, own[:1])
    os.sched_setaffinity(0, allowed)
