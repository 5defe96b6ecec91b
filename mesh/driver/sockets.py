"""One thread that listens to many descriptors, and to ranks of this host among them: what they say, print, and end by.

The driver's receiver, the process on each host, and who waits for ranks that get ready hear ranks so. Invariant: what
is heard of a rank is told in the order of its answers, and nothing is told of one that has ended.
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
    """A selector that other threads can wake; with a descriptor is registered what takes the events it is ready for.

    Args:
        woken: called by the thread that listens, once it was.
    """

    def __init__(self, woken: Callable[[], None] = lambda: None):
        self.selector = selectors.DefaultSelector()
        self._woken = woken
        self._pipe = os.pipe()
        for fd in self._pipe:
            os.set_blocking(fd, False)
        self.selector.register(self._pipe[0], READ, self._drain)

    def wake(self) -> None:
        """Have the thread call `woken`; from any thread."""
        with contextlib.suppress(OSError):  # full of wakes, or closed
            os.write(self._pipe[1], b"!")

    def _drain(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
        self._woken()

    def select(self, seconds: float | None = None) -> list[Callable[[], None]]:
        """Wait until descriptors are ready: what is to be done for each."""
        return [functools.partial(key.data, events) for key, events in self.selector.select(seconds)]

    def forget(self, source: Any) -> None:
        """Listen to a descriptor no more."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(source)

    def close(self) -> None:
        self.selector.close()
        for fd in self._pipe:
            os.close(fd)


class RankSockets(Listening):
    """Listens to ranks.

    Args:
        said, printed, ended: told of a rank with what it has said, that it may have printed something, and that its
            process has ended.
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
        """Flush a rank's socket as soon as it takes more; from any thread."""
        self._blocked.add(rank)
        self.wake()

    def output_of(self, rank: Rank) -> Iterator[tuple[str, bytes]]:
        """What a rank has printed and nobody has read yet, by stream; one thread at a time may ask."""
        for stream, fd in list(rank.pipes.items()):
            while data := rank.read(stream):
                yield stream, data
            if data is None:
                self.forget(fd)

    def _watch_blocked(self) -> None:
        for rank in tuple(self._blocked):
            self._watch(rank, READ | WRITE)

    def _watch(self, rank: Rank, events: int) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it died, and is not listened to any more
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
                self._printed(rank)  # what it printed before it answered comes first
                self._said(rank, packets)

    def _print(self, rank: Rank, events: int) -> None:
        if rank.alive:
            self._printed(rank)

    def _end(self, rank: Rank, events: int) -> None:
        if rank.alive:
            self.forget(rank.pidfd)
            self._ended(rank)
