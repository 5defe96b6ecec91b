"""One thread that listens to this host's ranks: answers, output, and deaths.

Used by the driver's receiver, by the process on each host, and while new ranks get ready for a resize. Invariant: a
rank's events are reported in the order of its answers, and nothing is reported of a rank that has ended.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

from ...kernels.listening import READ, WRITE, Listening
from .. import wire
from .ranks import Rank


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
