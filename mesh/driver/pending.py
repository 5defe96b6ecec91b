"""Tasks on their way: what was sent to which ranks, their answers as they come, and failures that nobody has seen."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from .. import protocol, wire
from ..failure import Failure
from ..run_state import RunState

IN_FLIGHT = 2
BRIEF_IN_FLIGHT, BRIEF_SECONDS = 8, 0.02  # calls that are over soon: more of them, and Ctrl-C still finds them ended

Outcome = Callable[[], BaseException] | None  # what makes the exception of a failed task, None for one that went well
Make = Callable[[int, int, protocol.Spans, tuple[str, ...]], protocol.Task]
"""Makes a message from what all tasks begin with."""


_thread = threading.local()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What this thread does with a mesh is the library's: what has failed and nobody has seen is not raised here."""
    _thread.aside = True
    try:
        yield
    finally:
        _thread.aside = False


@dataclasses.dataclass(slots=True)
class Again:
    """What it takes to send a task again.

    Attributes:
        name: of the call, for messages.
        make, packet: the message and its content.
        holds: what was compiled for the call (`calls.DriverCall`), which must live until the task is over.
        arguments: its inputs.
        values: its outputs, as `values.CallValues`; of several batches those of each.
        losses: how often it has lost ranks.
    """

    name: str
    make: Make
    packet: wire.Packet
    holds: Any
    arguments: Sequence[Any]
    values: Sequence[Any]
    losses: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """Something sent to ranks.

    Attributes:
        region: the number of the region that it is, 0 for none.
        last_results: rank -> what "unchanged" stands for: the last metadata of the results of such calls.
        compare: asked what has failed where prints differ.
        again: what it takes to send it again, if that may be done when a rank dies.
        reported: somebody has been told of the failure.
        answers: rank -> (kind, value); kind is "ok", "failed", "skipped" (it came after a failure) or "lost".
        prints: rank -> what is to be compared of its results.
        settled: set as soon as its outcome is known, which for a failure may be before all ranks have answered.
        failure: makes the exception of a failed task.
        generation: in which the mesh failed with it; None if the task failed for itself.
        context: of the caller; a notebook keeps in it which cell that is.
        began, seconds: when it was made, by the clock on the wall, and the time from then until its outcome was known.
    """

    number: int
    ranks: tuple[int, ...]
    region: int = 0
    future: Future | None = None
    last_results: dict[int, Any] = dataclasses.field(default_factory=dict)
    compare: Callable[[Task], Outcome] | None = None
    again: Any = None
    reported: bool = False
    answers: dict[int, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    prints: dict[int, bytes] = dataclasses.field(default_factory=dict)
    settled: threading.Event = dataclasses.field(default_factory=threading.Event)
    failure: Outcome = None
    generation: int | None = None
    context: contextvars.Context = dataclasses.field(default_factory=contextvars.copy_context)
    began: float = dataclasses.field(default_factory=time.time)
    seconds: float = 0.0
    _since: float = dataclasses.field(default_factory=time.monotonic)

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

    def settle(self, failure: Outcome = None) -> None:
        """Make the outcome known; a future takes a failure over, for others `reported` tells whether it was seen."""
        self.failure = failure
        if self.again is not None:
            self.again.packet.close()
            self.again = None
        self.seconds = time.monotonic() - self._since
        if self.future is not None:
            self.reported = True
            if failure is not None:
                self.future.set_exception(failure())
            else:
                self.future.set_result(self.values()[0])
        self.settled.set()


class Pending:
    """The tasks of one mesh that some rank has not answered, and the failures that their callers have not seen.

    The session's lock guards it.

    Args:
        run_state: hears of the failures that somebody sees.
    """

    def __init__(self, run_state: RunState) -> None:
        self._run_state = run_state
        self.tasks: dict[int, Task] = {}
        self.traced: Callable[[Task], None] | None = None  # told of each whose outcome is known
        self._unseen: deque[Task] = deque()

    def busy(self) -> dict[int, int]:
        """The ranks that have something to do, each with the number of the task that it is at."""
        found: dict[int, int] = {}
        for task in self.tasks.values():
            for rank in task.busy():
                found[rank] = min(found.get(rank, task.number), task.number)
        return found

    def awaited(self) -> dict[int, tuple[int, bool]]:
        """The ranks that have something to do: the task that each is at, and whether the program waits for it.

        For what `submit` has started alone it need not wait: a rank may serve for as long as it likes.
        """
        return {rank: (number, self.tasks[number].future is None) for rank, number in self.busy().items()}

    def failures(self) -> dict[int, Failure]:
        return {rank: failure for task in self.tasks.values() for rank, failure in task.failures().items()}

    def lose(self, rank: int) -> None:
        """A rank died: it will not answer any more."""
        for task in self.tasks.values():
            if rank in task.ranks:
                task.answers.setdefault(rank, ("lost", None))

    def settle(self, task: Task, failure: Outcome = None, *, generation: int | None = None, seen: bool = False) -> None:
        """Make a task's outcome known; it stays busy on the ranks that have not answered.

        Args:
            generation: the one that failed with it.
            seen: whoever waits for it knows already.
        """
        if task.complete:
            self.tasks.pop(task.number, None)
        task.generation = generation
        task.settle(failure)
        if self.traced is not None:
            self.traced(task)
        if failure is not None and not seen:
            self._unseen.append(task)

    def raise_unseen(self) -> None:
        """Raise the failure of a task whose caller has not seen it, unless this is not the program's thread."""
        while self._unseen and not getattr(_thread, "aside", False):
            task = self._unseen.popleft()
            if not task.reported:
                self.report(task)

    def report(self, task: Task) -> None:
        """Raise the failure of a task."""
        self._run_state.note_failure(task)
        task.reported = True
        for other in self._unseen:
            # What failed in one generation failed for one reason.
            other.reported = other.reported or other.generation == task.generation is not None
        assert task.failure is not None
        raise task.failure()


class Flight:
    """The asynchronous regions under way: a few, or more of those that are over soon."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._most = IN_FLIGHT

    def add(self, task: Task) -> Iterator[Task]:
        """Note a region; those to wait for, so that there are not too many."""
        if self._tasks and self._tasks[-1].settled.is_set():
            self._tasks.clear()
            self._most = IN_FLIGHT
        self._tasks.append(task)
        while len(self._tasks) > self._most:
            oldest = self._tasks.popleft()
            if not oldest.settled.is_set():
                yield oldest
            self._most = min(self._most + 1, BRIEF_IN_FLIGHT) if oldest.seconds < BRIEF_SECONDS else IN_FLIGHT
