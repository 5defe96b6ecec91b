"""Bells: how a rank that sleeps in the kernel is woken by the rank that it waits for.

A rank notes that it sleeps, checks once more whether it has to, and waits on the word of its bell (a futex) for at most
a moment. A rank that has written what others wait for rings the bells of those that sleep. The processor may perform a
load before an earlier store is visible, so a ring is missed now and then, unless both sides put a `fence` between; then
the sleeper only loses the rest of the moment.
Source: futex(2), futex(7).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

from ..operations import Ready
from ..waiting import others

_FUTEX, _WAIT, _WAKE, _ALL = (
    202,
    0,
    1,
    (1 << 31) - 1,
)  # the system call's number on x86-64, where alone there is an arena
_MOMENT = 1_000_000  # nanoseconds
_WORD = (1 << 32) - 1  # the part of a bell's word that the kernel compares


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
    *(ctypes.POINTER(_Timespec), ctypes.c_void_p, ctypes.c_int),
)
_syscall.restype = ctypes.c_long
_moment = _Timespec(0, _MOMENT)


def fence() -> None:
    """Make earlier stores visible before later loads (a memory barrier): taking a lock is a locked instruction."""
    threading.Lock().acquire(False)


class Bells:
    """The bells of an arena's ranks; each has two words: whether the rank sleeps, and the bell.

    Args:
        words: the arena's words, which begin at `address` in memory.
        at: for each rank, the first of its two words.
    """

    def __init__(self, words: memoryview, address: int, at: list[int], rank: int):
        self._words, self._address, self.at, self._rank = words, address, at, rank
        self._asleep = 0  # how many threads of this rank sleep

    def sleep(self, ready: Ready, seconds: float | None = None) -> None:
        """Sleep until the bell rings, or a moment has passed; not at all if `ready()` already holds.

        Args:
            seconds: sleep for up to so long (less than 1) instead of a moment, and put a `fence`; those who ring must
                put one, too, so that no ring is missed.
        """
        words, mine = self._words, self.at[self._rank]
        moment = _moment if seconds is None else _Timespec(0, int(1e9 * seconds))
        words[mine] = 1
        rung = words[mine + 1]
        if seconds is not None:
            fence()
        if not ready():
            self._asleep += 1
            try:
                with others():
                    _syscall(_FUTEX, self._address + 8 * (mine + 1), _WAIT, rung, moment, None, 0)
            finally:
                self._asleep -= 1
        words[mine] = int(self._asleep > 0)

    def ring(self, ranks: Iterable[int]) -> None:
        """Wake those of the ranks that sleep."""
        for rank in ranks:
            at = self.at[rank]
            if self._words[at]:
                self._words[at] = 0
                self._words[at + 1] = (self._words[at + 1] + 1) & _WORD
                _syscall(_FUTEX, self._address + 8 * (at + 1), _WAKE, _ALL, None, None, 0)
