"""The thread that listens to a mesh's ranks: their answers, what they print, and their deaths.

It reads and reports, and decides nothing: that is its listener's business (`Recovery`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .. import wire
from ..display.bars import Bars
from ..display.output import Collator, coordinates_label
from ..spec import Layout
from .pending import Task
from .ranks import Rank, Ranks
from .stuck import Stuck

TICK_SECONDS = 0.1  # between two calls of `carry_on` while a recovery is under way


class Listener(Protocol):
    """What is told."""

    under_way: bool

    @property
    def stuck(self) -> Stuck: ...
    @property
    def closed(self) -> str | None: ...
    def answered(self, rank: Rank, packet: wire.Packet) -> None: ...
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
        label = coordinates_label(layout)
        self._collator = Collator(self._print, layout.size, label=label)
        self.bars = Bars(label=label)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", None))
        self._blocked: set[Rank] = set()
        self._soon: deque[Callable[[], None]] = deque()

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

    # -- for this thread (or any, before it starts and after it ends) ------------------------------------------------

    def add(self, rank: Rank) -> None:
        more = selectors.EVENT_WRITE if rank in self._blocked else 0
        self._selector.register(rank.connection, selectors.EVENT_READ | more, ("answer", rank))
        self._selector.register(rank.pidfd, selectors.EVENT_READ, ("death", rank))
        for stream, fd in rank.pipes.items():
            self._selector.register(fd, selectors.EVENT_READ, (stream, rank))

    def remove(self, rank: Rank) -> None:
        """Listen to a rank no more, after a last look at what it printed."""
        self.read_output(rank)
        self._blocked.discard(rank)
        for source in (rank.connection, rank.pidfd, *rank.pipes.values()):
            self._forget(source)

    def exchange(self, gone: Iterable[Rank], ranks: Ranks, layout: Layout) -> None:
        """Listen to other ranks than so far, of another layout."""
        for rank in gone:
            self.remove(rank)
        self._collator.flush()
        label = coordinates_label(layout)
        self._collator = Collator(self._print, layout.size, label=label)
        self.bars = Bars(label=label)
        ranks.listened_to(self.add)

    def read_output(self, rank: Rank) -> None:
        for stream, fd in list(rank.pipes.items()):
            while data := rank.read(stream):
                self._collator.feed(rank.rank, stream, data)
            if data is None:
                self._forget(fd)

    def show_output(self) -> None:
        """Show all that ranks have printed, and was held to see who else prints it."""
        self._collator.flush()

    def end_of_task(self, task: Task) -> None:
        """Show what a task has shown to the end; lines of the next region are matched with each other only."""
        with contextlib.suppress(Exception):  # of a front end that draws bars: no reason to stop listening
            self.bars.end(task)
        if task.region:
            self._collator.begin()

    def close(self, ranks: list[Rank]) -> None:
        if self is not threading.current_thread() and self.is_alive():
            self.wake()
            self.join(1.0)
        for rank in ranks:
            with contextlib.suppress(OSError, ValueError):
                self.read_output(rank)
        self._collator.flush()
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
        dues = [due for due in (self._collator.tick(), self._tick_bars()) if due is not None]
        due = min(dues, default=self._listener.stuck.pause)
        due = min(due, TICK_SECONDS if self._listener.under_way else self._listener.stuck.pause)
        for key, events in self._selector.select(due):
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
        while self._soon:
            self._soon.popleft()()
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
        packets = rank.receiver.receive(block=False)
        if packets is None:
            self._forget(rank.connection)
            if not rank.ended(0.2):
                rank.signal(signal.SIGKILL)  # it can't be reached any more
            self._bury(rank)
            return
        if packets and rank.has_printed():
            self.read_output(rank)  # what it printed before it answered comes first
        for packet in packets:
            self._listener.answered(rank, packet)

    def _bury(self, rank: Rank) -> None:
        if not rank.alive:
            return
        while packets := rank.receiver.receive(block=False):  # what it said before it died counts
            for packet in packets:
                self._listener.answered(rank, packet)
        self._listener.died(rank)

    def _tick_bars(self) -> float | None:
        with contextlib.suppress(Exception):
            return self.bars.tick()
        return None

    def _print(self, stream: str, text: str) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        with contextlib.suppress(Exception), self.bars.aside(target):  # a closed stream must not stop the thread
            target.write(text)
            target.flush()
