"""How far a program has got on a mesh: what its random numbers are keyed by, what failed, what it resumed from.

It lives as long as the ranks: a mesh that is restarted begins with a new one. Checkpoints record it.
Invariants: it is the same on all launched ranks, which all run the whole script; a call that failed and is made again
gets the same number, and so draws the same random numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

from ..kernels.errors import PeerLost

RECENT_CALLS = 16  # more than are ever under way at once
FAILED_CALLS = 64  # of functions that are never called again, as in a notebook, so many are remembered


class Started(Protocol):
    """What a call has started (a task, say), which may fail later."""

    failure: Any  # None unless it has failed


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One call of an @spmd function; its number, from 1 on, is the key of its random numbers."""

    name: str
    number: int
    started: Started | None = None


class _Uncounted(threading.local):
    """What the calls of one thread are now.

    Attributes:
        operation: not 0 in a block of `aside`: its number.
        draws_nothing: whether they are made in a block of `uncounted`.
    """

    operation = 0
    draws_nothing = False


class RunState:
    """One program's run on one mesh.

    Attributes:
        turns: how many calls of @spmd functions this process has made, on any mesh.
        begun: @spmd functions that were called since a checkpoint was last restored here.
        functions: name of an @spmd function that was called -> whether it is a data_parallel step.
        settings: name of a data_parallel step -> those of its options that change the bits, each variant once.
        resumed: the checkpoint that was restored and that the run goes on from.
        saved: the folder of the newest checkpoint that was written or read, as text.
        failed: when somebody last saw a call fail (`time.monotonic`); None once the run has gone on, or was resumed.
    """

    turns: ClassVar[int] = 0

    def __init__(self) -> None:
        self.begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self.functions: dict[str, bool] = {}
        self.settings: dict[str, list[dict[str, Any]]] = {}
        self.resumed: Any = None
        self.saved: str | None = None
        self.failed: float | None = None
        self._calls = self._runs = self._operations = 0
        self._here = _Uncounted()
        self._last_called = ""  # the @spmd function called last, or the one that failed
        self._seen: Started | None = None  # what was seen to fail then, if a call had started it
        self._recent: deque[Call] = deque(maxlen=RECENT_CALLS)
        self._failed_calls: list[Call] = []  # their numbers are used when they are made again
        self._lock = threading.RLock()  # several threads may make calls, and handlers of signals

    @property
    def position(self) -> tuple[int, int]:
        """How many calls of @spmd functions and of `Mesh.run` there have been; if set, the run goes on from there."""
        return self._calls, self._runs

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        if position != self.position:
            self._recent.clear()
            self._failed_calls.clear()
        self._calls, self._runs = position

    def begin_call(self, name: str, *, counted: bool) -> Call:
        """An @spmd function is called: if it is the one that failed, the run goes on from where it was.

        Args:
            counted: its random numbers are keyed by its number, not by its batch.
        """
        if self._here.operation:
            return Call(name, -self._here.operation)
        with self._lock:
            RunState.turns += 1
            if self.failed is not None:
                self._fail_recent()
            if self.failed is None or name == self._last_called:
                self.failed, self._last_called = None, name
            if not counted:
                return Call(name, 0)
            again = next((call for call in self._failed_calls if call.name == name), None)
            if again is None:
                self._calls += 1
            else:
                self._failed_calls.remove(again)
            call = Call(name, self._calls if again is None else again.number)
            self._recent.append(call)
            return call

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Calls made within are no steps of the program: they do not change the steps' random numbers.

        Those that other threads make meanwhile may be steps.
        """
        with self._lock:
            self._operations += 1
            before, self._here.operation = self._here.operation, self._operations
        try:
            yield
        finally:
            self._here.operation = before

    def fail_call(self, call: Call) -> None:
        """A call has failed: the next one of this function is the same call made again."""
        with self._lock:
            if call in self._recent:
                self._recent.remove(call)
                call.started = None  # it holds what the ranks have answered
                self._failed_calls = sorted([*self._failed_calls, call], key=lambda call: call.number)[-FAILED_CALLS:]

    def _fail_recent(self) -> None:
        """Note as failed the recent call whose failure was seen, and later ones that failed too; not earlier ones."""
        recent = [(call, call.started) for call in self._recent if call.started is not None]
        first = next((index for index, (_, started) in enumerate(recent) if started is self._seen), 0)
        for call, started in recent[first:]:
            if started is self._seen or started.failure is not None:
                self.fail_call(call)

    def next_run(self) -> int:
        """The number of this call of `Mesh.run` or `Mesh.submit`, from 1 on."""
        if self._here.operation:
            return -self._here.operation
        if self._here.draws_nothing:
            return self._runs + 1
        with self._lock:
            self._runs += 1
            return self._runs

    def note_failure(self, started: Started | None = None) -> None:
        """Note that somebody has seen a call fail, or what it `started`."""
        self.failed, self._seen = time.monotonic(), started

    def go_on(self) -> None:
        """The run goes on from where it is, whatever has failed."""
        self.failed = None
        self._failed_calls.clear()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """For calls of `Mesh.run` that draw no random numbers, such as saving: those of other calls do not change.

        If such a call fails, that is no failed step of the program, unless a rank was lost or Ctrl-C was pressed.
        """
        failed, before, self._here.draws_nothing = self.failed, self._here.draws_nothing, True
        try:
            yield
        except BaseException as error:
            if not isinstance(error, PeerLost | KeyboardInterrupt):
                self.failed = failed
            raise
        finally:
            self._here.draws_nothing = before
