"""Waiting for a condition that another process makes true: cheap when it is soon, gentle when it is late.

First spin (only where each rank has a core of its own), then give the core away; where others keep taking it, or
nothing comes, sleep: until woken, if who is waited for can do that, else a little longer each time. Every round looks
at the abort flag; every few milliseconds at the peers; the timeout ends it all.

A program may communicate from several threads (a checkpoint that is written while training goes on, gradients that are
reduced while they are computed). They take turns at what belongs to communicators. Invariant: who waits for another
process lets the other threads go on meanwhile, since that process may wait for what one of them has still to do.
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
TAKEN_SECONDS = 2e-4  # who is given a core and keeps it for longer does not wait, too
SAVED_SECONDS = 1e-4  # by a wait that needs no sleep, since ranks that share a core are woken so much later
LOST_SECONDS = 2e-2  # more than was saved, and the cores are wanted by others
WANTED_SECONDS = 5e-2, 1.0  # how long that is taken to stay so, at first and at most

turn: Any = threading.RLock()  # Any: what a Condition uses of it has no public type


def _in_child() -> None:
    turn._at_fork_reinit()  # the thread that has it does not exist in a fork


os.register_at_fork(after_in_child=_in_child)


class others:
    """Within, the other threads of this process may take their turn.

    >>> with turn, others():
    ...     print(turn._is_owned())
    False
    """

    __slots__ = ("_kept",)

    def __enter__(self) -> None:
        # As a Condition does: all of it, however often this thread has taken it.
        self._kept = turn._release_save() if turn._is_owned() else None

    def __exit__(self, *error: object) -> None:
        if self._kept is not None:
            turn._acquire_restore(self._kept)


class Cores:
    """Whether other processes want the cores: known from how long giving one away takes.

    Ranks that wait on one core for each other have it back in microseconds. Another process keeps it, for far longer
    than it takes to be woken by a rank. Where more is lost so than saved, waits leave the cores to the scheduler, for
    longer each time.

    Attributes:
        lost: seconds, by giving cores away instead of sleeping; who ends a wait without has saved `SAVED_SECONDS`.
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
        """Note that a core that was given away was kept for long."""
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
    """Give the core away until `ready()`, a few times at most, and while no other process wants it; whether it is.

    For who waits for ranks on its own core, which are microseconds from what it waits for. Nothing else is looked at,
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
    """What a waiting rank keeps an eye on.

    Attributes:
        generation: goes up with every recovery from a failure; what was begun before is void.
    """

    generation: int

    def abort(self, text: str) -> None:
        """Make every rank that waits in this mesh give up; `text` says why."""

    def check(self) -> None:
        """Raise if the region was aborted; called often, so cheap."""

    def check_peers(self) -> None:
        """Raise if a peer died; called every few milliseconds."""

    def in_debugger(self) -> bool:
        """Whether a peer is at the prompt of a debugger: its silence then means nothing."""


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

    Args:
        oversubscribed: more ranks than cores, so that spinning would take the core from the rank waited for.
        sleep: sleeps for a moment, and not much longer than until `ready()`, which the waited for rank sees to.
        gently: sleep from the first moment on, since another thread of this process has better use for the core.
        on_stall: called now and then while nothing comes, to look for the reason (and to raise it).
    """
    if not oversubscribed and not gently:
        for _ in range(SPINS):
            if ready():
                return
    start = silent_since = time.monotonic()
    pause = 2e-5
    next_look = start + PEER_CHECK_SECONDS
    while not ready():
        watch.check()
        now = time.monotonic()
        if now - start < YIELD_SECONDS and not gently and not (sleep is not None and cores.wanted(now)):
            with others():
                cores.yield_core(now)
            continue
        if now >= next_look:
            try:
                watch.check_peers()
            except PeerLost:
                if ready():  # it had done its part before it went
                    return
                raise
            if on_stall is not None:
                on_stall()
            next_look = now + PEER_CHECK_SECONDS
            if watch.in_debugger():
                silent_since = now
        if now - silent_since > timeout:
            raise on_timeout()
        if sleep is not None:
            sleep(ready)
            continue
        with others():
            time.sleep(pause)
        pause = min(pause * 1.5, 1e-3)
