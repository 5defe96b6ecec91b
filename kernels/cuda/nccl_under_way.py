"""The operations that NCCL was given and the GPU may not have done: each lives, with its tensors, until it is over."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """A started operation: the event after it, the tensors that it works on, and when it was started."""

    what: str
    event: Any
    keepalive: Any
    since: float = dataclasses.field(default_factory=time.monotonic)


class UnderWay:
    """The operations of one communicator, in the order in which they were started; callers must hold its lock."""

    def __init__(self) -> None:
        self._started: deque[Started] = deque()

    def add(self, started: Started) -> None:
        self.count()
        self._started.append(started)

    def count(self) -> int:
        """How many operations may not be over; forgets the others."""
        while self._started and self._started[0].event.query():
            self._started.popleft()
        return len(self._started)

    def oldest(self) -> Started | None:
        """The first operation that is not known to be over; does not query the GPU."""
        return self._started[0] if self._started else None

    def clear(self) -> None:
        self._started.clear()
