"""Ranks that wait for each other: found out after a second, and not when the timeout is over.

A rank that waits counts, on its page of the board, how often it has looked in vain. If all ranks of the mesh wait, and
each has looked often since one of them last began to wait or went on with anything, then nothing will come: whatever a
wait gets comes from a rank. The rank that finds it out first publishes what all were in, so that the others, which may
not see it wait any longer, find it out as well. Invariant: a rank that is stopped, or that computes, is not taken for
one that waits.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

_SECONDS = 1.0  # that all ranks wait until it is clear
_LOOKS = 10  # of each rank, in that time
_HALF = 32
IDLE = "spmd-idle"  # the name of a thread that does something only after another thread of its process has
_BESIDE = {IDLE, "spmd-nccl-watchdog", "spmd-mailbox", "spmd-progress"}  # threads that do no rank's part in anything


class Stalls:
    """What a rank publishes while it waits: a word with an odd number, another for each wait, and how often it looked.

    Args:
        words: of the board.
        places: the index of each rank's word, of its region, of whether it is in it, and of what it has found out.
        rank: this rank's number among them.
    """

    def __init__(self, words: memoryview, places: Sequence[tuple[int, int, int, int]], rank: int):
        self._words, self._places, self._rank = words, tuple(places), rank
        # What all were in, this as a number, their looks, since when.
        self._before: tuple[list[int], list[tuple[int, int]], int, list[int], float] = [], [], 0, [], 0.0
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
        found = [divmod(words[its], 1 << _HALF) for its, *_ in self._places]
        regions = [(words[region], words[active]) for _, region, active, _ in self._places]
        waits, looks = [wait for wait, _ in found], [count for _, count in found]
        known, known_regions, number, before, since = self._before
        if (waits, regions) != (known, known_regions):
            if known and known[self._rank] == waits[self._rank] and self._is_found(number):
                self.end()  # the program may go on, and wait for something else
                return True
            number = hash((*waits, *regions)) & (1 << 64) - 1
            self._before = waits, regions, number, before, since = waits, regions, number, looks, now
        all_waited = (
            now - since >= _SECONDS
            and all(wait % 2 for wait in waits)
            and set(regions) == {(regions[self._rank][0], 1)}
            and all(count - earlier >= _LOOKS for count, earlier in zip(looks, before, strict=True))
        )
        if all_waited:
            words[self._places[self._rank][3]] = number
            self.end()
        return all_waited

    def _is_found(self, number: int) -> bool:
        """Whether a rank has found out that all waited when they were in this; it has gone on since."""
        return number in [self._words[found] for *_, found in self._places]

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
