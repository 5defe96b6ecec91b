"""Waiting for a condition that another process makes true: cheap when it is soon, gentle when it is late.

First spin (only where each rank has a core of its own), then give the core away, then sleep a little longer
each time. Every round looks at the abort flag; every few milliseconds at the peers; the timeout ends it all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol

SPINS = 200
YIELD_SECONDS = 2e-3
PEER_CHECK_SECONDS = 5e-3


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


def wait_until(
    ready: Callable[[], bool],
    watch: Watch,
    *,
    timeout: float,
    crowded: bool,
    overdue: Callable[[], BaseException],
    late: Callable[[], None] | None = None,
) -> None:
    """Return once `ready()`; raise what `watch` finds, or `overdue()` after `timeout` seconds.

    Args:
        crowded: more ranks than cores, so that spinning would take the core from the rank waited for.
        late: called now and then while nothing comes, to look for the reason (and to raise it).
    """
    if not crowded:
        for _ in range(SPINS):
            if ready():
                return
    start = time.monotonic()
    pause = 2e-5
    next_look = start + PEER_CHECK_SECONDS
    while not ready():
        watch.check()
        now = time.monotonic()
        if now - start < YIELD_SECONDS:
            os.sched_yield()
            continue
        if now >= next_look:
            watch.check_peers()
            if late is not None:
                late()
            next_look = now + PEER_CHECK_SECONDS
        if now - start > timeout:
            raise overdue()
        time.sleep(pause)
        pause = min(pause * 1.5, 1e-3)
