"""What a GPU was given and may not have finished.

Invariant: what an operation works on lives until it is over; Python may be done with it long before.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """An operation, the event after it, what it works on, and when it was started."""

    what: str
    event: Any
    keepalive: Any
    since: float = dataclasses.field(default_factory=time.monotonic)


class UnderWay:
    """The operations of one communicator, in the order in which they were started; for callers that hold its lock."""

    def __init__(self) -> None:
        self._started: deque[Started] = deque()

    def add(self, started: Started) -> None:
        self.count()
        self._started.append(started)

    def count(self) -> int:
        """How many may not be over; forgets the others."""
        while self._started and self._started[0].event.query():
            self._started.popleft()
        return len(self._started)

    def oldest(self) -> Started | None:
        """The first of those not known to be over; does not ask the GPU."""
        return self._started[0] if self._started else None

    def clear(self) -> None:
        self._started.clear()
