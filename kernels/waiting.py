"""Waiting for a condition that another process makes true: fast if it comes soon, cheap for the machine if it is late.

First spin (only if each rank has a core of its own), then yield the core. If other processes keep taking it, or nothing
comes, sleep: until woken, if the awaited rank can do that, else a little longer each time. Every round checks the abort
flag, and every few milliseconds the peers; the timeout ends any wait.

A program may communicate from several threads (a checkpoint that is written while training goes on, gradients that are
reduced while they are computed). The threads take turns in using communicators. Invariant: a thread that waits for
another process lets the other threads go on, since that process may wait for what one of them still has to do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from .errors import PeerLost

SPINS = 200
YIELD_SECONDS = 2e-3
PEER_CHECK_SECONDS = 5e-3
YIELDS = 64
TAKEN_SECONDS = 2e-4  # a process that keeps a yielded core for longer is computing, not waiting like us
SAVED_SECONDS = 1e-4  # what a wait without sleep saves: ranks that share a core are woken so much later
LOST_SECONDS = 2e-2  # if more than that is lost beyond what was saved, other processes want the cores
STOOD_STILL_SECONDS = 1.0  # two looks further apart: this process was stopped, and so perhaps was the awaited one
WANTED_SECONDS = 5e-2, 1.0  # how long this is assumed to last, at first and at most

turn: Any = threading.RLock()  # Any: the methods that a Condition uses of it are not typed


def _in_child() -> None:
    turn._at_fork_reinit()  # the thread that holds it does not exist in a fork


os.register_at_fork(after_in_child=_in_child)


class others:
    """Inside this block, other threads of this process may take their turn.

    >>> with turn, others():
    ...     print(turn._is_owned())
    False
    """

    __slots__ = ("_kept",)

    def __enter__(self) -> None:
        # Like a Condition: release it completely, however often this thread has acquired it.
        self._kept = turn._release_save() if turn._is_owned() else None

    def __exit__(self, *error: object) -> None:
        if self._kept is not None:
            turn._acquire_restore(self._kept)


class Cores:
    """Whether other processes want the cores, judged by how long a yield takes.

    Ranks that wait for each other on one core get it back in microseconds. Another process keeps it, for far longer
    than a wake-up by a rank takes. If yielding loses more time than it saves, waits sleep instead, for a period that
    gets longer each time.

    Attributes:
        lost: seconds lost by yielding instead of sleeping; a wait that ends without sleep takes off `SAVED_SECONDS`.
    """

    def __init__(self) -> None:
        self.lost = self._wanted_until = 0.0
        self._seconds = WANTED_SECONDS[0]

    def wanted(self, now: float) -> bool:
        return now < self._wanted_until

    def yield_core(self, now: float) -> None:
        os.sched_yield()
        back = time.monotonic()
        if back - now > TAKEN_SECONDS:
            self.kept(now, back)

    def kept(self, since: float, until: float) -> None:
        """Note that a yielded core was kept for long."""
        if self.lost <= 0.0 or since - self._wanted_until > WANTED_SECONDS[1]:
            self.lost, self._seconds = 0.0, WANTED_SECONDS[0]
        self.lost += until - since
        self._wanted_until = until
        if self.lost > LOST_SECONDS:
            self.lost = 0.75 * LOST_SECONDS
            self._wanted_until += self._seconds
            self._seconds = min(WANTED_SECONDS[1], 2 * self._seconds)


cores = Cores()


def yielded(ready: Callable[[], bool]) -> bool:
    """Yield the core until `ready()`, a few times at most, and only while no other process wants it; returns whether.

    For a rank that shares its core with the ranks that it waits for: they need microseconds. Nothing else is checked,
    and other threads don't get their turn.
    """
    for _ in range(YIELDS):
        if ready():
            cores.lost -= SAVED_SECONDS
            return True
        now = time.monotonic()
        if cores.wanted(now):
            return False
        cores.yield_core(now)
    return ready()


class Watch(Protocol):
    """What a waiting rank checks.

    Attributes:
        generation: goes up with every recovery from a failure; everything that began before is void.
    """

    generation: int

    def abort(self, text: str) -> None:
        """Make every rank that waits in this mesh give up; `text` says why."""

    def check(self) -> None:
        """Raise if the region was aborted; called often, so cheap."""

    def check_peers(self) -> None:
        """Raise if a peer died; called every few milliseconds."""

    def in_debugger(self) -> bool:
        """Whether a peer is at the prompt of a debugger, or traced by one; then its silence means nothing."""


def wait_until(
    ready: Callable[[], bool],
    watch: Watch,
    *,
    timeout: float,
    oversubscribed: bool,
    on_timeout: Callable[[], BaseException],
    on_stall: Callable[[], None] | None = None,
    sleep: Callable[[Callable[[], bool]], None] | None = None,
    gently: bool = False,
) -> None:
    """Return once `ready()`; raise what `watch` finds, or `on_timeout()` after `timeout` seconds.

    Time in which this process was stopped (a suspended job, a paused machine) does not count.

    Args:
        oversubscribed: more ranks than cores, so that spinning would take the core from the rank waited for.
        sleep: sleeps for a moment, or until the rank waited for has made `ready()` true and wakes this one.
        gently: sleep from the first moment on, since another thread of this process has better use for the core.
        on_stall: called now and then while nothing comes, to look for the reason (and to raise it).
    """
    if not oversubscribed and not gently:
        for _ in range(SPINS):
            if ready():
                return
    start = before = time.monotonic()
    silent = 0.0
    pause = 2e-5
    next_look = start + PEER_CHECK_SECONDS
    while not ready():
        watch.check()
        now = time.monotonic()
        if now - start < YIELD_SECONDS and not gently and not (sleep is not None and cores.wanted(now)):
            with others():
                cores.yield_core(now)
            continue
        silent, before = silent + min(now - before, STOOD_STILL_SECONDS), now
        if now >= next_look:
            try:
                watch.check_peers()
            except PeerLost:
                if ready():  # the peer had done its part before it died
                    return
                raise
            if on_stall is not None:
                on_stall()
            next_look = now + PEER_CHECK_SECONDS
            if watch.in_debugger():
                silent = 0.0
        if silent > timeout:
            raise on_timeout()
        if sleep is not None:
            sleep(ready)
            continue
        with others():
            time.sleep(pause)
        pause = min(pause * 1.5, 1e-3)
