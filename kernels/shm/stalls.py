"""Ranks that wait for each other: found out after a second, and not when the timeout is over.

A rank that waits counts, on its page of the board, how often it has looked in vain. If all ranks of the mesh wait, and
each has looked often since one of them last began to wait or went on with anything, then nothing will come: whatever a
wait gets comes from a rank. Invariant: a rank that is stopped, or that computes, is not taken for one that waits.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

_SECONDS = 1.0  # that all ranks wait until it is clear
_LOOKS = 10  # of each rank, in that time
_HALF = 32
_BESIDE = {"spmd-nccl-watchdog", "spmd-mailbox", "spmd-progress"}  # threads that do no rank's part in anything


class Stalls:
    """What a rank publishes while it waits: a word with an odd number, another for each wait, and how often it looked.

    Args:
        words: of the board.
        places: the index of each rank's word, of its region, and of whether it is in it.
        rank: this rank's number among them.
    """

    def __init__(self, words: memoryview, places: Sequence[tuple[int, int, int]], rank: int):
        self._words, self._places, self._rank = words, tuple(places), rank
        self._before: tuple[object, list[int], float] = None, [], 0.0  # what all were in, their looks, since when
        self._steps = 0
        if rank < len(self._places):
            self.end()  # of the process before this one

    def all_wait(self, steps: int) -> bool:
        """Note that this rank has looked in vain; whether all ranks wait for each other.

        Args:
            steps: how many steps of operations this rank has taken so far: in a wait for one it goes on with others.
        """
        if not is_alone():
            self.end()  # that of another thread may begin during a wait
            return False
        if steps != self._steps:
            self.end()
            self._steps = steps
        at, now, words = self._places[self._rank][0], time.monotonic(), self._words
        words[at] = (words[at] | 1 << _HALF) + 1
        found = [divmod(words[its], 1 << _HALF) for its, _, _ in self._places]
        regions = [(words[region], words[active]) for _, region, active in self._places]
        waits, looks = [wait for wait, _ in found], [count for _, count in found]
        if (waits, regions) != self._before[0]:
            self._before = (waits, regions), looks, now
        _, before, since = self._before
        return (
            now - since >= _SECONDS
            and all(wait % 2 for wait in waits)
            and set(regions) == {(regions[self._rank][0], 1)}
            and all(count - earlier >= _LOOKS for count, earlier in zip(looks, before, strict=True))
        )

    def end(self) -> None:
        """Note that a wait is over."""
        at = self._places[self._rank][0]
        if (wait := self._words[at] >> _HALF) % 2:
            self._words[at] = wait + 1 << _HALF


def is_alone() -> bool:
    """Whether no other thread of this process may do its part while this one waits.

    Of threads that were started without `threading` it has no list: those that it met stay in it when they have ended.
    """
    beside = {one.ident for one in threading.enumerate() if one.name in _BESIDE}
    return sys._current_frames().keys() - beside == {threading.get_ident()}
