"""The thread that listens to a mesh's ranks: their answers, what they print, and their deaths.

It reads and reports; what to do about it is decided by its listener (`Recovery`, `Answers`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from .. import wire
from ..display.bars import Bars, BarState
from ..display.output import Collator, coordinates_label
from ..hosts.hearing import Inbox
from ..spec import Layout
from .pending import Task
from .ranks import Rank, Ranks
from .sockets import RankSockets
from .stuck import Stuck

TICK_SECONDS = 0.1  # between two calls of `carry_on` while a recovery is under way


class Answers(Protocol):
    """What messages are passed to."""

    def take(self, ranks: Sequence[Rank], packet: wire.Packet) -> None: ...
    def collect(self) -> None: ...


class Listener(Protocol):
    """What deaths and errors are reported to."""

    under_way: bool

    @property
    def stuck(self) -> Stuck: ...
    @property
    def closed(self) -> str | None: ...
    @property
    def answers(self) -> Answers: ...
    def died(self, rank: Rank) -> None: ...
    def flush(self, rank: Rank) -> bool: ...
    def carry_on(self) -> None: ...
    def broke(self, error: BaseException) -> None: ...


class Receiving(threading.Thread):
    """Listens from `start` until the session is closed."""

    def __init__(self, listener: Listener, layout: Layout):
        super().__init__(name="spmd-receiver", daemon=True)
        self._listener = listener
        self._showing = threading.RLock()  # any thread that settles a task shows what was printed
        self._show_for(layout)
        self._sockets = RankSockets(self._take, lambda rank: self.show_printed([rank]), self._bury, listener.flush)
        self.add, self.wake, self.when_writable = self._sockets.add, self._sockets.wake, self._sockets.when_writable
        self._soon: deque[Callable[[], None]] = deque()
        self._inbox: Inbox | None = None  # of the current ranks, if they are on other hosts

    # -- for other threads -------------------------------------------------------------------------------------------

    def soon(self, do: Callable[[], None]) -> None:
        """Have this thread do something, between two events."""
        self._soon.append(do)
        self.wake()

    def hear(self, inbox: Inbox) -> None:
        """Have this thread take what ranks on other hosts send."""
        self._inbox = inbox
        inbox.heard_by(functools.partial(self.soon, functools.partial(self._take_from, inbox)))

    # -- for this thread (or any, before it starts and after it ends) ------------------------------------------------

    def remove(self, rank: Rank) -> None:
        """Stop listening to a rank, after reading the last of its output."""
        self.read_output(rank)
        self._sockets.remove(rank)

    def exchange(self, gone: Iterable[Rank], ranks: Ranks, layout: Layout) -> None:
        """Listen to other ranks instead, of another layout."""
        for rank in gone:
            self.remove(rank)
        if self._inbox is not None:
            self._take_from(self._inbox)
        with self._showing:
            self._collator.flush()
            self._show_for(layout)
        ranks.listened_to(self.add, self.hear)

    # -- what ranks show: for any thread -----------------------------------------------------------------------------

    def _show_for(self, layout: Layout) -> None:
        label = coordinates_label(layout)
        self._collator, self._bars = Collator(self._print, layout.size, label=label), Bars(label=label)

    def read_output(self, rank: Rank) -> None:
        with self._showing:
            for stream, data in self._sockets.output_of(rank):
                self._collator.feed(rank.rank, stream, data)

    def show_printed(self, ranks: Iterable[Rank]) -> None:
        """Read what these ranks have printed so far."""
        with self._showing:
            for rank in ranks:
                if rank.has_printed():
                    self.read_output(rank)

    def show(self, printed: Iterable[tuple[Rank, str, bytes]], layout: Layout) -> None:
        """Show what ranks of another layout, which are not listened to, have printed."""
        with self._showing:
            collator = Collator(self._print, layout.size, label=coordinates_label(layout))
            for rank, stream, data in printed:
                collator.feed(rank.rank, stream, data)
            collator.flush()

    def show_output(self) -> None:
        """Show the lines that were held back to see which other ranks print them."""
        with self._showing:
            self._collator.flush()

    def report_bar(self, rank: int, task: Task, state: BarState) -> None:
        """Show the state of a rank's progress bar."""
        with self._showing:
            self._bars.report(rank, task, state)

    def end_of_task(self, task: Task) -> None:
        """End a task's progress bars and output; lines of the next region are matched only with each other."""
        with self._showing:
            if self._bars.latest:
                with contextlib.suppress(Exception):  # a notebook's front end may fail: no reason to stop
                    self._bars.end(task)
            if task.region and self._collator.streams:
                self._collator.begin()

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, ranks: list[Rank]) -> None:
        if self is not threading.current_thread() and self.is_alive():
            self.wake()
            self.join(1.0)
        for rank in ranks:
            with contextlib.suppress(OSError, ValueError):
                self.read_output(rank)
        if self._inbox is not None:
            self._take_from(self._inbox)
            self._inbox.heard_by(lambda: None)  # the pipe that wakes this thread is about to be closed
        self.show_output()
        self._sockets.close()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while self._listener.closed is None:
                self._turn()
        except BaseException as error:
            if self._listener.closed is None:
                traceback.print_exc()
                self._listener.broke(error)

    def _turn(self) -> None:
        dues = [due for due in self._tick() if due is not None]
        due = min(dues, default=self._listener.stuck.pause)
        due = min(due, TICK_SECONDS if self._listener.under_way else self._listener.stuck.pause)
        found = self._sockets.select(due)
        while self._soon:  # these came first, and may change what there is to listen to
            while self._soon:
                self._soon.popleft()()
            found = self._sockets.select(0)
        for heard in found:
            if self._listener.closed is not None:
                return
            heard()
        self._listener.answers.collect()
        self._listener.stuck.look()
        if self._listener.under_way:
            self._listener.carry_on()

    def _take(self, rank: Rank, packets: Iterable[wire.Packet]) -> None:
        for packet in packets:
            self._listener.answers.take([rank], packet)

    def _take_from(self, inbox: Inbox) -> None:
        for kind, ranks, what in inbox.take() if inbox is self._inbox else ():
            if kind in ("stdout", "stderr"):
                with self._showing:
                    self._collator.feed(ranks[0].rank, kind, what)
            elif self._listener.closed is not None:
                continue
            elif kind == "death":
                self._bury(ranks[0])
            else:
                self._listener.answers.take(ranks, what)

    def _bury(self, rank: Rank) -> None:
        if not rank.alive:
            return
        self._take(rank, rank.last_answers())
        self._listener.died(rank)

    def _tick(self) -> list[float | None]:
        """Show what is due; gives the seconds until more is."""
        with self._showing:
            found = [self._collator.tick()]
            with contextlib.suppress(Exception):
                found.append(self._bars.tick())
        return found

    def _print(self, stream: str, text: str) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        with contextlib.suppress(Exception), self._bars.aside(target):  # a closed stream must not stop the thread
            try:
                target.write(text)
            except UnicodeEncodeError:  # the stream's encoding lacks a character
                target.write(text.encode(target.encoding, "backslashreplace").decode(target.encoding))
            target.flush()
