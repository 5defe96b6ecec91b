"""Ranks' debuggers at the driver's terminal: a rank asks for a line, and the thread that waits for its call reads it.

Only a thread of the program may read: in a notebook, `input()` works in the main thread alone. Invariant: one rank has
the terminal at a time, until it runs for longer than a moment without asking.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from .. import protocol
from .pending import Task

LOOK_SECONDS = 0.05  # how often to look for a question while waiting for a call
MOMENT_SECONDS = 0.3  # for the rank that was answered to ask again, before it is another's turn
REMIND_SECONDS = 1.0


class Debugging:
    """The questions of one mesh's ranks.

    Args:
        answer: sends a rank its line.
        settled: waits so many seconds for a task to be settled; whether it is.
    """

    def __init__(self, answer: Callable[[int, protocol.DebuggerLine], None], settled: Callable[[Task, float], bool]):
        self._answer, self._settled = answer, settled
        self._changed = threading.Condition()
        self._asked: dict[int, protocol.DebuggerPrompt] = {}  # by rank
        self._talking: int | None = None
        self._waiting = 0  # how many threads are waiting for a task, and could read a line
        self._reading = threading.Lock()

    def ask(self, rank: int, prompt: protocol.DebuggerPrompt) -> None:
        """Take a rank's question; called by the thread that listens."""
        with self._changed:
            self._asked[rank] = prompt
            self._changed.notify_all()
            if not self._waiting:
                reminder = threading.Timer(REMIND_SECONDS, self._remind, (rank, prompt))
                reminder.daemon = True
                reminder.start()

    def forget(self) -> None:
        """Forget all questions, since the region has failed."""
        with self._changed:
            self._asked.clear()
            self._talking = None

    def wait(self, task: Task, timeout: float | None = None) -> bool:
        """Wait until a task is settled, reading lines for ranks that ask meanwhile; whether it is settled."""
        end = None if timeout is None else time.monotonic() + timeout
        self._waiting += 1
        try:
            while not self._settled(task, LOOK_SECONDS):
                if self._asked and self._reading.acquire(blocking=False):
                    try:
                        self._talk(task)
                    finally:
                        self._reading.release()
                    end = None if timeout is None else time.monotonic() + timeout
                elif end is not None and time.monotonic() > end:
                    return False
            return True
        finally:
            self._waiting -= 1

    def _talk(self, task: Task) -> None:
        while (asked := self._next(task)) is not None:
            rank, prompt = asked
            before, newline, last = prompt.text.rpartition("\n")
            sys.stdout.write(before + newline)
            sys.stdout.flush()
            line: str | None = None
            try:
                line = input(last) + "\n"
            except EOFError:
                print()
            except Exception as error:  # there is no one to ask: a kernel without a front end, a test's own stdin
                print(f"{type(error).__name__}: {error}")
            self._answer(rank, protocol.DebuggerLine(prompt.number, line))

    def _next(self, task: Task) -> tuple[int, protocol.DebuggerPrompt] | None:
        """Whose turn it is: the rank that has the terminal, if it asks again soon, else the lowest rank that asks."""
        with self._changed:
            end = time.monotonic() + MOMENT_SECONDS
            while self._talking is not None and self._talking not in self._asked:
                if task.settled.is_set() or time.monotonic() > end:
                    self._talking = None
                    break
                self._changed.wait(0.01)
            if not self._asked:
                return None
            if self._talking is None:
                self._talking = min(self._asked)
            return self._talking, self._asked.pop(self._talking)

    def _remind(self, rank: int, prompt: protocol.DebuggerPrompt) -> None:
        if self._asked.get(rank) is prompt and not self._waiting:
            print(
                f"[rank {rank}] is at a breakpoint; its debugger opens here as soon as the program waits for the call, "
                "as in float(result)",
                file=sys.stderr,
            )
