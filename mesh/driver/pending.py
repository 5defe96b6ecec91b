"""Tasks under way: what was sent to which ranks, the answers so far, and failures that nobody has seen."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from ...kernels.errors import MeshError
from .. import protocol, wire
from ..failure import Failure
from ..run_state import RunState

IN_FLIGHT = 2
BRIEF_IN_FLIGHT, BRIEF_SECONDS = 8, 0.02  # more may be under way if they are short: they still end soon after Ctrl-C

Outcome = Callable[[], BaseException] | None  # makes the exception of a failed task; None if it went well
Make = Callable[[int, int, protocol.Spans, tuple[str, ...]], protocol.Task]
"""Makes a message, given the fields that all tasks begin with."""


_Function = TypeVar("_Function", bound=Callable[..., Any])
_thread = threading.local()
_SETTLED = threading.Event()  # of all tasks whose outcome is known
_SETTLED.set()


class Resized(MeshError):
    """A call was not sent, since another thread has given the mesh another size than the call was made for."""

    def __init__(self, where: str):
        super().__init__("the mesh has got another size", where=where, remedy="call again")


class Stopped(MeshError):
    """A call was stopped, since a call of another thread has failed."""


def made_for_its_size(function: _Function) -> _Function:
    """The function, called again if what it sends was made for another size than the mesh has by then."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return function(*args, **kwargs)
            except Resized:
                continue

    return cast("_Function", call)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """In the block, this thread works for the library: failures that nobody has seen are not raised here."""
    _thread.aside = True
    try:
        yield
    finally:
        _thread.aside = False


@dataclasses.dataclass(frozen=True, slots=True)
class Pure:
    """A call without effects, which may run again when a rank dies, and what it needs for that until it is over.

    Attributes:
        name: of the call, for messages.
        needs: gives those of the values named in the message that some rank lacks, as (a call's values, index, what to
            call it). Asked when all ranks are there, since a rank that was replaced may lack values.
        holds: what must live until then: the compiled call (`calls.DriverCall`), or the values that it fetches.
        arguments: its inputs.
        values: its outputs, as `values.CallValues`; one for each batch if it reads several.
        fetches: whether it only fetches values, and so runs again even if the program wants to know of lost calls.
    """

    name: str
    needs: Callable[[], Iterable[Sequence[Any]]] = tuple
    holds: Any = None
    arguments: Sequence[Any] = ()
    values: Sequence[Any] = ()
    fetches: bool = False


@dataclasses.dataclass(slots=True)
class Again:
    """What it takes to send a task again: the call, its message and content; `losses`: how often ranks died in it."""

    call: Pure
    make: Make
    packet: wire.Packet
    losses: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """Something sent to ranks.

    Attributes:
        region: its number as a region, 0 if it is none.
        future: takes the first rank's result, or the failure.
        last_results: rank -> what "unchanged" stands for: the last description of the results of such calls.
        compare: if prints differ, says what has failed.
        again: what it takes to send it again, if it may run again when a rank dies.
        reported: the failure was raised somewhere, or will be where the task is waited for; else where the mesh is used
            next.
        answers: rank -> (kind, value); kind is "ok", "failed", "skipped" (it came after a failure) or "lost".
        prints: rank -> what is to be compared of its results.
        settled: set as soon as its outcome is known, which for a failure may be before all ranks have answered.
        failure: makes the exception of a failed task.
        generation: the generation in which the mesh failed with it; None if only the task failed.
        context: the caller's; a notebook keeps in it which cell that is.
        caller: the thread that made it.
        began, seconds: when it was made (`time.time`), and how long it took until its outcome was known.
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
    caller: threading.Thread = dataclasses.field(default_factory=threading.current_thread)
    _since: float = dataclasses.field(default_factory=time.monotonic)
    began: float = dataclasses.field(default_factory=time.time)  # read later: else a pause between would be lost
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        return len(self.answers) == len(self.ranks)

    @property
    def fine(self) -> bool:
        return self.complete and all(kind == "ok" for kind, _ in self.answers.values())

    @property
    def raised(self) -> bool:
        """Whether a rank has raised an exception of its own in it."""
        return any(failure.kind == "error" for failure in self.failures().values())

    def busy(self) -> set[int]:
        """The ranks that have not answered."""
        return set(self.ranks).difference(self.answers)

    def failures(self) -> dict[int, Failure]:
        return {rank: value for rank, (_, value) in self.answers.items() if isinstance(value, Failure)}

    def values(self) -> list[Any]:
        """The results, in the order of `ranks`."""
        return [self.answers[rank][1] for rank in self.ranks]

    def settle(self, failure: Outcome = None) -> None:
        """Make the outcome known. A future takes a failure over; for other tasks `reported` says if it was seen."""
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
        # A program may keep many results that it does not read, and with each its task.
        settled, self.settled, self.compare = self.settled, _SETTLED, None
        settled.set()


class Pending:
    """The tasks of one mesh that some rank has not answered, and the failures that their callers have not seen.

    The session's lock guards it.

    Args:
        run_state: takes note of failures that are raised.

    Attributes:
        done: the last region that all ranks have finished.
    """

    def __init__(self, run_state: RunState) -> None:
        self._run_state, self.done = run_state, 0
        self.tasks: dict[int, Task] = {}
        self.traced: Callable[[Task], None] | None = None  # called with each task whose outcome is known
        self._unseen: deque[Task] = deque()

    def busy(self) -> dict[int, int]:
        """The ranks that have something to do, each with the number of its current task."""
        found: dict[int, int] = {}
        for task in list(self.tasks.values()):  # a copy: for a message this is asked without the lock
            for rank in task.busy():
                found[rank] = min(found.get(rank, task.number), task.number)
        return found

    def awaited(self) -> dict[int, tuple[int, bool]]:
        """The ranks that have something to do: each one's current task, and whether the program waits for that.

        It does not wait for what `mesh.submit` has started: that may serve for as long as it likes.
        """
        return {rank: (number, self.tasks[number].future is None) for rank, number in self.busy().items()}

    def failures(self, *, unsettled: bool = False) -> dict[int, Failure]:
        """The failures of all tasks, or of those that are not settled."""
        tasks = [task for task in self.tasks.values() if not (unsettled and task.settled.is_set())]
        return {rank: failure for task in tasks for rank, failure in task.failures().items()}

    def lose(self, rank: int) -> None:
        """Note that a rank died: it will not answer any more."""
        for task in self.tasks.values():
            if rank in task.ranks:
                task.answers.setdefault(rank, ("lost", None))

    def settle(
        self,
        task: Task,
        failure: Outcome = None,
        *,
        generation: int | None = None,
        seen: bool = False,
        keeps: bool = False,
    ) -> None:
        """Make a task's outcome known; ranks that have not answered stay busy with it.

        Args:
            generation: the generation that failed with it.
            seen: the user knows of the failure already.
            keeps: the task stays among `tasks` until the mesh has recovered: it may be why others are stopped.
        """
        if task.complete and not keeps:
            self.tasks.pop(task.number, None)
        task.generation = generation
        task.settle(failure)
        if self.traced is not None:
            self.traced(task)
        if failure is None:
            self.done = max(self.done, task.region)
        elif not seen:
            self._unseen.append(task)

    def raise_unseen(self, *, closing: bool = False) -> None:
        """Raise the failure of a task that this thread made, and has not seen, unless it works for the library.

        Those of threads that have ended are raised, too, and at the end of the mesh all others.
        """
        this = threading.current_thread()
        for task in [] if getattr(_thread, "aside", False) else [*self._unseen]:
            if closing or task.reported or task.caller is this or not task.caller.is_alive():
                self._unseen.remove(task)
                if not task.reported:
                    self.report(task)

    def report(self, task: Task) -> None:
        """Raise the failure of a task."""
        self._run_state.note_failure(task)
        task.reported = True
        for other in self._unseen:
            # All failures of one generation have one cause; a thread is told of it once.
            alike = other.generation == task.generation is not None and other.caller is task.caller
            other.reported = other.reported or alike
        assert task.failure is not None
        raise task.failure()


class Flight:
    """The asynchronous regions under way: a few, or some more if they are short."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._most = IN_FLIGHT
        self._lock = threading.RLock()  # several threads may make calls, and handlers of signals

    def add(self, task: Task) -> Iterator[Task]:
        """Note a region; yields those to wait for, so that there are not too many."""
        with self._lock:
            if self._tasks and self._tasks[-1].settled.is_set():
                self._tasks.clear()
                self._most = IN_FLIGHT
            self._tasks.append(task)
        while (oldest := self._surplus()) is not None:
            if not oldest.settled.is_set():
                yield oldest
            self._most = min(self._most + 1, BRIEF_IN_FLIGHT) if oldest.seconds < BRIEF_SECONDS else IN_FLIGHT

    def _surplus(self) -> Task | None:
        """The oldest region, taken out, if there are too many."""
        with self._lock:
            return self._tasks.popleft() if len(self._tasks) > self._most else None
