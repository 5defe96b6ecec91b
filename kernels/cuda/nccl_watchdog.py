"""A thread that ends NCCL operations whose peers will never come.

A host thread that waits for the GPU waits inside CUDA, where it notices nothing; and if a peer has died, the GPU waits
for ever. So another thread checks communicators that have operations under way, for aborts, deaths, NCCL's own errors
and the timeout. Ending the communicator lets the GPU go on, and so the host; its next use raises the error.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

SECONDS = 0.05


class Watched(Protocol):
    def look_after(self) -> None:
        """Check once; ends the communicator if necessary."""


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(communicator: Watched) -> None:
    """Check a communicator from now on, as long as it exists."""
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
