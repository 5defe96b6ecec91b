"""How what the ranks of other hosts say comes to whoever takes it: the thread that reads the links fills an inbox.

Invariant: what it puts there is taken in that order.
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
"""What has come, from whom: "answer" with a `wire.Packet`, "stdout" or "stderr" with bytes, or "death"."""


class Inbox:
    """What ranks have said, until it is taken.

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
        """Something that these ranks have said; an answer comes framed, and as bytes."""
        self._found.append((kind, ranks, what))
        if not self._rung:
            with self._changed:
                self._rung = True
                self._ring()

    def bury(self, rank: Rank) -> None:
        """Nothing more comes from a rank."""
        with self._changed:
            self.ended.add(rank)
            self._changed.notify_all()
        self.put("death", (rank,))

    def ended_within(self, rank: Rank, seconds: float) -> bool:
        """Wait for a rank to end; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: rank in self.ended, seconds)

    def forget(self, ranks: Sequence[Rank]) -> None:
        """Of ranks that have ended only these matter still."""
        with self._changed:
            self.ended.intersection_update(ranks)

    def heard_by(self, ring: Callable[[], None]) -> None:
        """Have somebody else take it, from what has not been taken yet on: who took it so far is rung for no more."""
        with self._changed:
            self._ring = ring
            ring()

    def take(self) -> Iterator[Heard]:
        """What has come; answers that follow each other and are alike are one, whichever hosts they are from."""
        self._rung = False  # before it is looked: what comes from now on rings
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
