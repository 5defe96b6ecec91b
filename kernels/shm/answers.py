"""Short answers of ranks to the driver, in shared memory: each rank has a ring of them, on a page of its own.

A message over a socket would wake the driver once for each rank; these answers wake it once, by the last rank to
answer. Invariant: the driver takes a rank's answers after the messages that the rank had sent before.
"""

from __future__ import annotations

from collections.abc import Iterator

from .bells import Bells, fence
from .pages import PAGE

_SLOT = 256
_SLOTS = PAGE // _SLOT - 1  # the words below take the place of one slot
_HEAD = 24  # bytes of a slot: the task, how many messages the rank had sent, how many bytes follow
_MOST_BYTES = _SLOT - _HEAD
# words of a page: how many answers were put, how many were taken (written by the driver), the last answered task
_PUT, _TAKEN, _LAST = 0, 8, 1


def answers_bytes(size: int) -> int:
    """How much of the arena the answers of `size` ranks take."""
    return size * PAGE


class Answers:
    """The rings as one participant sees them; they lie in the arena from the byte `start` on.

    Attributes:
        received: in the driver, how many messages it has taken from each rank.
    """

    def __init__(self, words: memoryview, memory: memoryview, bells: Bells, start: int, size: int, rank: int):
        self._words, self._memory, self._bells, self._size = words, memory, bells, size
        self._pages = [(start + each * PAGE) // 8 for each in range(size)]
        self.received = [0] * size
        if rank < size:
            self._mine = self._pages[rank]
            self._others = [page + _LAST for page in self._pages if page != self._mine]

    def note(self, task: int) -> None:
        """Note that this rank is about to answer a task in another way."""
        self._words[self._mine + _LAST] = task

    def put(self, task: int, sent: int, data: bytes) -> bool:
        """Answer a task, after `sent` messages over the socket; False if there is no room."""
        words, mine = self._words, self._mine
        count = words[mine + _PUT]
        if len(data) > _MOST_BYTES or count - words[mine + _TAKEN] >= _SLOTS:
            return False
        slot = _slot(mine, count)
        words[slot], words[slot + 1], words[slot + 2] = task, sent, len(data)
        if data:
            at = 8 * slot + _HEAD
            self._memory[at : at + len(data)] = data
        words[mine + _PUT] = count + 1
        words[mine + _LAST] = task
        fence()  # if two ranks answer at the same time, at least one sees the other's answer
        for other in self._others:
            if words[other] < task:
                return True
        self._bells.ring((self._size,))
        return True

    def waiting(self) -> bool:
        """Whether there are answers for the driver to take."""
        words = self._words
        for page, received in zip(self._pages, self.received, strict=True):
            taken = words[page + _TAKEN]
            if words[page + _PUT] != taken and words[_slot(page, taken) + 1] <= received:
                return True
        return False

    def take(self) -> Iterator[tuple[int, int, bytes]]:
        """The answers since the last call: (rank, task, data)."""
        words = self._words
        for rank, page in enumerate(self._pages):
            while (taken := words[page + _TAKEN]) != words[page + _PUT]:
                slot = _slot(page, taken)
                task, sent, nbytes = words[slot], words[slot + 1], min(words[slot + 2], _MOST_BYTES)
                if sent > self.received[rank]:
                    break
                at = 8 * slot + _HEAD
                yield rank, task, bytes(self._memory[at : at + nbytes]) if nbytes else b""
                words[page + _TAKEN] = taken + 1


def _slot(page: int, count: int) -> int:
    """The first word of the answer that follows `count` others."""
    return page + (1 + count % _SLOTS) * _SLOT // 8
