"""One thread that listens to many descriptors, such as those of this host's ranks: answers, output, and deaths.

Used by the driver's receiver, by the process on each host, and while new ranks get ready for a resize. Invariant: a
rank's events are reported in the order of its answers, and nothing is reported of a rank that has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .. import wire
from .ranks import Rank

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Listening:
    """A selector that other threads can wake; each descriptor is registered with a function that takes its events.

    Args:
        woken: called by the thread that listens, after another thread has woken it.
    """

    def __init__(self, woken: Callable[[], None] = lambda: None):
        self.selector = selectors.DefaultSelector()
        self._woken = woken
        self._pipe = os.pipe()
        for fd in self._pipe:
            os.set_blocking(fd, False)
        self.selector.register(self._pipe[0], READ, self._drain)

    def wake(self) -> None:
        """Have the listening thread call `woken`; may be called by any thread."""
        with contextlib.suppress(OSError):  # the pipe is full of wakes, or closed
            os.write(self._pipe[1], b"!")

    def _drain(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
        self._woken()

    def select(self, seconds: float | None = None) -> list[Callable[[], None]]:
        """Wait until descriptors are ready; gives what to call for each."""
        return [functools.partial(key.data, events) for key, events in self.selector.select(seconds)]

    def forget(self, source: Any) -> None:
        """Stop listening to a descriptor."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(source)

    def close(self) -> None:
        self.selector.close()
        for fd in self._pipe:
            os.close(fd)


class RankSockets(Listening):
    """Listens to ranks.

    Args:
        said, printed, ended: called with a rank (and its packets), when it has sent something, when it may have
            printed something, and when its process has ended.
        flush: sends what a rank's socket did not take before; whether that was all.
    """

    def __init__(
        self,
        said: Callable[[Rank, Iterable[wire.Packet]], None],
        printed: Callable[[Rank], None],
        ended: Callable[[Rank], None],
        flush: Callable[[Rank], bool] = Rank.flush,
    ):
        super().__init__(self._watch_blocked)
        self._said, self._printed, self._ended, self._flush = said, printed, ended, flush
        self._blocked: set[Rank] = set()

    def add(self, rank: Rank) -> None:
        for source, kind in rank.sources():
            do = {"answer": self._answer, "death": self._end}.get(kind, self._print)
            more = WRITE if kind == "answer" and rank in self._blocked else 0
            self.selector.register(source, READ | more, functools.partial(do, rank))

    def remove(self, rank: Rank) -> None:
        self._blocked.discard(rank)
        for source, _ in rank.sources():
            self.forget(source)

    def when_writable(self, rank: Rank) -> None:
        """Flush a rank's socket as soon as it takes more; may be called by any thread."""
        self._blocked.add(rank)
        self.wake()

    def output_of(self, rank: Rank) -> Iterator[tuple[str, bytes]]:
        """What a rank has printed that is not read yet, by stream; for one thread at a time."""
        for stream, fd in list(rank.pipes.items()):
            while data := rank.read(stream):
                yield stream, data
            if data is None:
                self.forget(fd)

    def _watch_blocked(self) -> None:
        for rank in tuple(self._blocked):
            self._watch(rank, READ | WRITE)

    def _watch(self, rank: Rank, events: int) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it has died, and is not listened to any more
            self.selector.modify(rank.connection, events, functools.partial(self._answer, rank))

    def _answer(self, rank: Rank, events: int) -> None:
        if not rank.alive:
            return
        if events & WRITE and self._flush(rank):
            self._blocked.discard(rank)
            self._watch(rank, READ)
        if events & READ:
            packets = rank.answers()
            if packets is None:
                self.forget(rank.connection)  # it has ended, or is about to
            elif packets:
                self._printed(rank)  # first, what it printed before it answered
                self._said(rank, packets)

    def _print(self, rank: Rank, events: int) -> None:
        if rank.alive:
            self._printed(rank)

    def _end(self, rank: Rank, events: int) -> None:
        if rank.alive:
            self.forget(rank.pidfd)
            self._ended(rank)
