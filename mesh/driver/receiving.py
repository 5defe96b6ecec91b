"""The thread that listens to a mesh's ranks: their answers, what they print, and their deaths.

It reads and reports, and decides nothing: that is its listener's business (`Recovery`, `Answers`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from .. import wire
from ..display.bars import Bars, BarState
from ..display.output import Collator, coordinates_label
from ..hosts.hearing import Inbox
from ..spec import Layout
from .pending import Task
from .ranks import Rank, Ranks
from .stuck import Stuck

TICK_SECONDS = 0.1  # between two calls of `carry_on` while a recovery is under way


class Answers(Protocol):
    """What is told of messages."""

    def take(self, ranks: Sequence[Rank], packet: wire.Packet) -> None: ...
    def collect(self) -> None: ...


class Listener(Protocol):
    """What is told."""

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
    """Listens from `start` until the session is closed.

    Args:
        listener: is told.
        layout: the axes, which say where on the mesh a rank is.
    """

    def __init__(self, listener: Listener, layout: Layout):
        super().__init__(name="spmd-receiver", daemon=True)
        self._listener = listener
        self._showing = threading.RLock()  # who settles a task shows what is printed, whichever thread that is
        label = coordinates_label(layout)
        self._collator = Collator(self._print, layout.size, label=label)
        self._bars = Bars(label=label)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", None))
        self._blocked: set[Rank] = set()
        self._soon: deque[Callable[[], None]] = deque()
        self._inbox: Inbox | None = None  # of the ranks that there are, if they are on other hosts

    # -- for other threads -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full of wakes, or closed
            os.write(self._wake_write, b"!")

    def when_writable(self, rank: Rank) -> None:
        """Have `flush` called as soon as the rank's socket takes more."""
        self._blocked.add(rank)
        self.wake()

    def soon(self, do: Callable[[], None]) -> None:
        """Have something done by this thread, between two events."""
        self._soon.append(do)
        self.wake()

    def hear(self, inbox: Inbox) -> None:
        """Have what ranks of other hosts say taken by this thread."""
        self._inbox = inbox
        inbox.heard_by(functools.partial(self.soon, functools.partial(self._take_from, inbox)))

    # -- for this thread (or any, before it starts and after it ends) ------------------------------------------------

    def add(self, rank: Rank) -> None:
        for source, kind in rank.sources():
            more = selectors.EVENT_WRITE if kind == "answer" and rank in self._blocked else 0
            self._selector.register(source, selectors.EVENT_READ | more, (kind, rank))

    def remove(self, rank: Rank) -> None:
        """Listen to a rank no more, after a last look at what it printed."""
        self.read_output(rank)
        self._blocked.discard(rank)
        for source, _ in rank.sources():
            self._forget(source)

    def exchange(self, gone: Iterable[Rank], ranks: Ranks, layout: Layout) -> None:
        """Listen to other ranks than so far, of another layout."""
        for rank in gone:
            self.remove(rank)
        if self._inbox is not None:
            self._take_from(self._inbox)
        label = coordinates_label(layout)
        with self._showing:
            self._collator.flush()
            self._collator = Collator(self._print, layout.size, label=label)
            self._bars = Bars(label=label)
        ranks.listened_to(self.add, self.hear)

    # -- what ranks show: for any thread -----------------------------------------------------------------------------

    def read_output(self, rank: Rank) -> None:
        with self._showing:
            for stream, fd in list(rank.pipes.items()):
                while data := rank.read(stream):
                    self._collator.feed(rank.rank, stream, data)
                if data is None:
                    self._forget(fd)

    def show_printed(self, ranks: Iterable[Rank]) -> None:
        """Read what these have printed so far, if they have."""
        with self._showing:
            for rank in ranks:
                if rank.has_printed():
                    self.read_output(rank)

    def show_output(self) -> None:
        """Show all that ranks have printed, and was held to see who else prints it."""
        with self._showing:
            self._collator.flush()

    def report_bar(self, rank: int, task: Task, state: BarState) -> None:
        """Show what a rank says of a progress bar."""
        with self._showing:
            self._bars.report(rank, task, state)

    def end_of_task(self, task: Task) -> None:
        """Show what a task has shown to the end; lines of the next region are matched with each other only."""
        with self._showing:
            with contextlib.suppress(Exception):  # of a front end that draws bars: no reason to stop listening
                self._bars.end(task)
            if task.region:
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
            self._inbox.heard_by(lambda: None)  # what wakes this thread is about to be closed
        self.show_output()
        self._selector.close()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

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
        found = self._selector.select(due)
        while self._soon:  # what has come before them, and may change what there is to listen to
            while self._soon:
                self._soon.popleft()()
            found = self._selector.select(0)
        for key, events in found:
            kind, rank = key.data
            if self._listener.closed is not None:
                return
            if kind == "wake":
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                for blocked in tuple(self._blocked):
                    self._watch(blocked, selectors.EVENT_READ | selectors.EVENT_WRITE)
            elif kind == "answer":
                if events & selectors.EVENT_WRITE and self._listener.flush(rank):
                    self._blocked.discard(rank)
                    self._watch(rank, selectors.EVENT_READ)
                if events & selectors.EVENT_READ:
                    self._take_answers(rank)
            elif kind == "death":
                self._bury(rank)
            else:
                self.read_output(rank)
        self._listener.answers.collect()
        self._listener.stuck.look()
        if self._listener.under_way:
            self._listener.carry_on()

    def _watch(self, rank: Rank, events: int) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it died, and is not listened to any more
            self._selector.modify(rank.connection, events, ("answer", rank))

    def _forget(self, source: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _take_answers(self, rank: Rank) -> None:
        packets = rank.answers()
        if packets is None:
            self._forget(rank.connection)
            self._bury(rank)
            return
        if packets:
            self.show_printed([rank])  # what it printed before it answered comes first
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
        for packet in rank.last_answers():
            self._listener.answers.take([rank], packet)
        self._listener.died(rank)

    def _tick(self) -> list[float | None]:
        """Show what is due: in how many seconds more is."""
        with self._showing:
            found = [self._collator.tick()]
            with contextlib.suppress(Exception):
                found.append(self._bars.tick())
        return found

    def _print(self, stream: str, text: str) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        with contextlib.suppress(Exception), self._bars.aside(target):  # a closed stream must not stop the thread
            target.write(text)
            target.flush()
