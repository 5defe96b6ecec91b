"""The inbox for messages from ranks on other hosts: the thread that reads the links fills it, another thread takes.

Invariant: things are taken in the order in which they were put there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import wire
from ..driver.ranks import Rank
from .coded import whole_packet
from .gathering import is_gathered

Heard = tuple[str, Sequence[Rank], Any]
"""(Kind, ranks, content): "answer" with a `wire.Packet`, "stdout" or "stderr" with bytes, or "death"."""


class Inbox:
    """What ranks have sent, until it is taken.

    Attributes:
        ended: the ranks whose process has ended, whether or not that was taken yet.
    """

    def __init__(self) -> None:
        self._found: deque[Heard] = deque()
        self._rung = False
        self._changed = threading.Condition()
        self._ring: Callable[[], None] = lambda: None  # called when there is something to take
        self.ended: set[Rank] = set()

    def put(self, kind: str, ranks: Sequence[Rank], what: Any = None) -> None:
        """Put in something from these ranks; an answer is given as the bytes of a framed packet."""
        self._found.append((kind, ranks, what))
        if not self._rung:
            with self._changed:
                self._rung = True
                self._ring()

    def bury(self, rank: Rank) -> None:
        """Note that a rank's process has ended."""
        with self._changed:
            self.ended.add(rank)
            self._changed.notify_all()
        self.put("death", (rank,))

    def ended_within(self, rank: Rank, seconds: float) -> bool:
        """Wait for a rank to end; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: rank in self.ended, seconds)

    def forget(self, ranks: Sequence[Rank]) -> None:
        """Forget all ranks that have ended, except these."""
        with self._changed:
            self.ended.intersection_update(ranks)

    def heard_by(self, ring: Callable[[], None]) -> None:
        """From now on call `ring` when there is something to take, in place of an earlier function; and once now."""
        with self._changed:
            self._ring = ring
            ring()

    def take(self) -> Iterator[Heard]:
        """Take what has come; equal answers in a row become one, whichever hosts they are from."""
        self._rung = False  # first, so that what comes from now on rings again
        while self._found:
            kind, ranks, what = self._found.popleft()
            if kind != "answer":
                yield kind, ranks, what
                continue
            packet: wire.Packet = whole_packet(what)
            if self._is_next(what) and is_gathered(packet):
                ranks = [*ranks]
                while self._is_next(what):
                    ranks += self._found.popleft()[1]
            yield kind, ranks, packet

    def _is_next(self, content: bytes) -> bool:
        return bool(self._found) and self._found[0][2] == content and self._found[0][0] == "answer"
