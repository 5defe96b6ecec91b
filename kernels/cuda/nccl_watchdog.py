"""A thread that ends NCCL operations whose peers will never come.

A host thread that waits for the GPU waits inside CUDA, where it notices nothing; and if a peer has died, the GPU waits
for ever. So another thread checks communicators that have operations under way, for aborts, deaths, NCCL's own errors
and the timeout. Ending the communicator lets the GPU go on, and so the host; its next use raises the error.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import Protocol

from ..waiting import STOOD_STILL_SECONDS

SECONDS = 0.05


class Watched(Protocol):
    def look_after(self) -> None:
        """Check once; ends the communicator if necessary."""

    def settle(self, *, at_once: bool = False) -> None:
        """Wait for what is under way, or end it by force."""


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None
_cut_short = math.inf
_stops: tuple[tuple[float, float], ...] = ()  # until when this process was stopped, and for how many seconds


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


def seconds_since(moment: float) -> float:
    """The seconds since a moment (`time.monotonic`), without those in which this process was stopped."""
    return time.monotonic() - moment - sum(seconds for until, seconds in _stops if until > moment)


def note_cut_short(since: float) -> None:
    """Note that an operation was ended before it was over, which was started then (`time.monotonic`)."""
    global _cut_short
    with _lock:
        _cut_short = min(_cut_short, since)


def settled(*, at_once: bool) -> float:
    """Have all operations of a failed region ended, and return when the first that was cut short had been started.

    What the GPU has computed since is arbitrary. Infinity: none was, since the last call.

    Args:
        at_once: do not wait for operations under way: a rank has died.
    """
    global _cut_short
    with _lock:
        communicators = list(_watched)
    for communicator in communicators:
        communicator.settle(at_once=at_once)
    with _lock:
        found, _cut_short = _cut_short, math.inf
    return found


def _look() -> None:
    global _thread, _stops
    while True:
        before = time.monotonic()
        time.sleep(SECONDS)
        now = time.monotonic()
        if now - before > STOOD_STILL_SECONDS:
            _stops = (*_stops[-7:], (now, now - before))
        with _lock:
            if not _watched:
                _thread = None
                return
            communicators = list(_watched)
        for communicator in communicators:
            communicator.look_after()
