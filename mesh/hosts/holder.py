"""Copies of values from ranks of other hosts, which a host's process keeps in memory in case such a host is lost.

A rank sends them over its own connection, and says when they are no longer needed; a replacement rank asks for them.
Invariants: a call's values are kept completely or not at all; and for each rank only the newest process may change
anything, so that one that was wrongly taken for dead has no effect.
"""

from __future__ import annotations

import threading
from typing import Any

from ...kernels.network.authentication import code
from ..protocol import ALL, each_span
from . import protocol
from .link import Link
from .serving import Serving


def secret_of(key: bytes) -> bytes:
    """The secret for these connections, from the mesh's key."""
    return code(key, b"copies")


class Holder(Serving):
    """The copies on one host."""

    def __init__(self, address: str, key: bytes):
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}  # by rank
        self._calls: dict[tuple[int, int], dict[int, Any]] = {}  # (rank, call) -> index -> bytes
        super().__init__(address, secret_of(key), "spmd-copies")

    def names(self) -> tuple[tuple[int, int, int], ...]:
        """All copies, as (rank, call, index)."""
        with self._lock:
            return tuple((*which, index) for which, values in self._calls.items() for index in values)

    def serve(self, rank: int, link: Link) -> None:
        with self._lock:
            before = self._links.get(rank)
            self._links[rank] = link
        if before is not None:
            before.close()
        while (messages := link.receive()) is not None:
            for msg, content in messages:
                with self._lock:
                    if self._links.get(rank) is not link:
                        return
                    answer, pieces = self._answer(rank, msg, content)
                link.send(answer, *pieces)

    def _answer(self, rank: int, msg: Any, content: bytes) -> tuple[Any, list[Any]]:
        if isinstance(msg, protocol.ListCopies):
            found = ((*which, index) for which, values in self._calls.items() if which[0] == rank for index in values)
            return protocol.CopiesHeld(tuple(found)), []
        if isinstance(msg, protocol.SendCopies):
            kept = [self._calls.get((msg.rank, call), {}).get(index, b"") for call, index in msg.names]
            return protocol.CopiesSent(tuple(map(len, kept))), kept
        if isinstance(msg, protocol.KeepCopies):
            view, start = memoryview(content), 0
            for index, nbytes in msg.values:
                self._calls.setdefault((rank, msg.call), {})[index] = view[start : start + nbytes]
                start += nbytes
        else:
            for call, start, stop in each_span(msg.values):
                self._drop((rank, call), start, stop)
        return protocol.Done(), []

    def _drop(self, which: tuple[int, int], start: int, stop: int) -> None:
        """Drop values of a call; those left get their own memory, so that the message they came in is freed."""
        values = self._calls.get(which, {})
        left = {index: bytes(kept) for index, kept in values.items() if stop != ALL and not start <= index < stop}
        self._calls[which] = left
        if not left:
            del self._calls[which]

    def close(self) -> None:
        """Drop all copies."""
        super().close()
        with self._lock:
            links, self._links = list(self._links.values()), {}
            self._calls.clear()
        for link in links:
            link.close()
