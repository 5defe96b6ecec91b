"""A thread that ends NCCL operations for which nobody will come.

A host thread that waits for the GPU waits inside CUDA, where it notices nothing; if a peer has died, the GPU waits for
ever. So another thread looks at the communicators that have operations under way: at aborts, deaths, NCCL's own errors
and the timeout. Ending the communicator lets the GPU go on, and so the host; the error is raised at its next use.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

SECONDS = 0.05


class Watched(Protocol):
    def look_after(self) -> None:
        """Look once; ends the communicator if it has to."""


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(communicator: Watched) -> None:
    """Look after a communicator from now on, as long as it lives."""
    global _thread
    with _lock:
        _watched.add(communicator)
        if _thread is None:
            _thread = threading.Thread(target=_look, name="spmd-nccl-watchdog", daemon=True)
            _thread.start()


def unwatch(communicator: Watched) -> None:
    with _lock:
        _watched.discard(communicator)


def _look() -> None:
    global _thread
    while True:
        time.sleep(SECONDS)
        with _lock:
            if not _watched:
                _thread = None
                return
            communicators = list(_watched)
        for communicator in communicators:
            communicator.look_after()
