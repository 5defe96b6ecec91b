"""Counts, in the arena, of the collectives that each rank of a group has finished and of the messages it has sent.

They are for transports whose bytes don't go through the arena, such as Gloo on one host: a wait for a rank that left
the region without its part can then end at once. Invariant: a rank counts an operation only when it is done with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from .call import word_key
from .shm.arena import Arena
from .shm.pages import PAGE


class Counters(Protocol):
    """What a communicator asks of the counts of its group, wherever they are."""

    finished: int

    def finish(self) -> None: ...

    def send(self, dst: int) -> None: ...

    def finished_by(self, rank: int) -> int: ...

    def sent_by(self, rank: int, dst: int) -> int: ...

    def close(self) -> None: ...


class Waits(Protocol):
    """What a communicator tells ranks of other hosts of its waits."""

    def check_wait(self, what: str, peers: Collection[int]) -> None: ...

    def end_wait(self) -> None: ...


class ProgressCounters:
    """The counts of one group, in one generation."""

    def __init__(self, arena: Arena, ranks: Sequence[int], channel: str):
        self._arena, self._ranks = arena, tuple(map(arena.participant, ranks))
        self._key = word_key("progress", arena.generation, self._ranks, channel)
        self._block = arena.heap.allocate(PAGE)
        for word in range(1 + len(self._ranks)):  # the collectives finished, the messages sent to each rank
            arena.words[self._block // 8 + word] = 0
        arena.directory.publish(self._key, self._block)
        self.finished = 0

    def finish(self) -> None:
        """Count one operation of this rank."""
        self.finished += 1
        self._arena.words[self._block // 8] = self.finished

    def send(self, dst: int) -> None:
        """Count one message of this rank."""
        self._arena.words[self._block // 8 + 1 + dst] += 1

    def finished_by(self, rank: int) -> int:
        """How many collectives a rank of the group has finished."""
        return self._count(rank, 0)

    def sent_by(self, rank: int, dst: int) -> int:
        """How many messages a rank of the group has sent to another."""
        return self._count(rank, 1 + dst)

    def _count(self, rank: int, word: int) -> int:
        block = self._arena.directory.lookup(self._ranks[rank], self._key)
        return 0 if block is None else self._arena.words[block // 8 + word]

    def close(self) -> None:
        self._arena.directory.forget(self._key)
        self._arena.heap.free(self._block, PAGE)
