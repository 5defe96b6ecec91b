"""A task on its way: what was sent to which ranks, and their answers as they come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .failure import Failure


class Task:
    """Something sent to ranks.

    Attributes:
        region: the number of the region that it is, 0 for none.
        answers: rank -> (kind, value); kind is "ok", "failed", "skipped" (it came after a failure) or "lost".
        settled: set as soon as its outcome is known, which for a failure may be before all ranks have answered.
        failure: makes the exception of a failed task.
        generation: in which the mesh failed with it; None if the task failed for itself.
        reported: somebody has been told of the failure.
    """

    __slots__ = ("answers", "failure", "future", "generation", "number", "ranks", "region", "reported", "settled")

    def __init__(self, number: int, ranks: tuple[int, ...], region: int = 0, future: Future | None = None):
        self.number, self.ranks, self.region, self.future = number, ranks, region, future
        self.answers: dict[int, tuple[str, Any]] = {}
        self.settled = threading.Event()
        self.failure: Callable[[], BaseException] | None = None
        self.generation: int | None = None
        self.reported = False

    @property
    def complete(self) -> bool:
        return len(self.answers) == len(self.ranks)

    @property
    def fine(self) -> bool:
        return self.complete and all(kind == "ok" for kind, _ in self.answers.values())

    def busy(self) -> set[int]:
        """The ranks that have not answered."""
        return set(self.ranks).difference(self.answers)

    def failures(self) -> dict[int, Failure]:
        return {rank: value for rank, (_, value) in self.answers.items() if isinstance(value, Failure)}

    def values(self) -> list[Any]:
        """The results, in the order of `ranks`."""
        return [self.answers[rank][1] for rank in self.ranks]

    def settle(self, failure: Callable[[], BaseException] | None = None) -> None:
        """Make the outcome known; a future takes a failure over, for others `reported` tells whether it was seen."""
        self.failure = failure
        if self.future is not None:
            self.reported = True
            if failure is not None:
                self.future.set_exception(failure())
            else:
                self.future.set_result(self.values()[0])
        self.settled.set()
