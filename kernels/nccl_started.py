"""What a GPU was given and may not have finished.

Invariant: what an operation works on lives until it is over; Python may be done with it long before.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

import torch

from .errors import PeerLost, message


@dataclasses.dataclass(slots=True)
class Started:
    """An operation, the event after it, when it was started, and what it works on."""

    what: str
    event: Any
    since: float
    kept: Any


class UnderWay:
    """The operations of one communicator, in the order in which they were started; for callers that hold its lock."""

    def __init__(self) -> None:
        self._started: deque[Started] = deque()

    def add(self, what: str, event: Any, kept: Any) -> None:
        self.count()
        self._started.append(Started(what, event, time.monotonic(), kept))

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


class DeviceWork:
    """A started operation: `wait()` lets the current stream wait for it and gives its value; the host goes on."""

    def __init__(self, comm: Any, what: str, event: Any, value: Any):
        self._comm, self._what, self._event, self._value = comm, what, event, value
        self._generation = comm._watch.generation

    def is_completed(self) -> bool:
        self._check()
        return bool(self._event.query())

    def wait(self) -> Any:
        self._check()
        self._comm.streams.wait(self._event)
        if isinstance(self._value, torch.Tensor):
            self._comm.streams.hold(self._value)
        return self._value

    def _check(self) -> None:
        self._comm.check()
        if self._generation != self._comm._watch.generation:
            raise PeerLost(
                message(
                    f"{self._what} was started before a region failed, and may have been ended half done",
                    where=f"group {self._comm.ranks}",
                    remedy="start it again",
                )
            )
