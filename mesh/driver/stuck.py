"""Ranks that are stuck: stopped, or waiting for what never comes. They are killed, and then count as dead.

Dead is known at once, slow is no fault, and stuck is what does nothing at all: a rank that somebody waits for, and that
for `grace` seconds neither comes to another task or region nor uses the processor (it, or what it has started). Ranks
that wait for others in a collective look for them many times a second, and so are none; nor is one that may wait, by a
lock of files say, for a program that another rank has started: compilers do. Invariant: a rank that is traced by a
debugger, or at the prompt of one, is left alone, and so are its peers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ...kernels.processes import status_of
from ..display.stacks import stacks_of
from .session_view import Session

LOOKS = 8  # in the grace
IDLE = 1e-3  # of a processor, up to which a rank does nothing


@dataclasses.dataclass(slots=True)
class _Mark:
    """When a rank was last seen to do something, and how far it had got.

    Attributes:
        cpu_ticks: processor time, of it and of what it has started.
        helpers: that of what all ranks have started.
    """

    at: float
    pid: int
    where: tuple[int, ...]
    cpu_ticks: int
    helpers: int

    def moved(self, later: _Mark, least: float, *, alone: bool) -> bool:
        """Whether something was done until later, by this rank or, unless alone, by what others have started.

        What ends takes its time with it.
        """
        helped = not alone and abs(later.helpers - self.helpers) > least
        return helped or abs(later.cpu_ticks - self.cpu_ticks) > least


class Stuck:
    """Looks for stuck ranks of one mesh; asked by the thread that listens to them.

    Args:
        grace: seconds; infinite: nobody is ever taken to be stuck.

    Attributes:
        killed: what is said of ranks that were killed here, by process.
    """

    def __init__(self, session: Session, grace: float):
        self._session, self._grace = session, grace
        self.pause = min(1.0, grace / LOOKS)
        self._next = 0.0
        self._marks: dict[int, _Mark] = {}
        self.killed: dict[int, str] = {}

    def look(self) -> None:
        """Kill the ranks that are stuck."""
        now = time.monotonic()
        if now < self._next or self._grace == float("inf"):
            return
        if now - self._next > 2 * self.pause:
            self._marks.clear()  # nobody has looked for long: this process was stopped itself, perhaps
        self._next = now + self.pause
        session = self._session
        with session.lock:
            awaited, ranks = session.pending.awaited(), session.ranks  # which a resize exchanges
            board = ranks.arena
        if board is None or (awaited and board.in_debugger()):
            self._marks.clear()
            return
        for rank in set(self._marks).difference(awaited):
            del self._marks[rank]
        if not awaited:
            return
        times = {rank: _nanoseconds(one.pid) for rank, one in enumerate(ranks.all)}
        helpers = sum(started for _, started in times.values())
        for rank, (number, waited_for) in awaited.items():
            pid = ranks.all[rank].pid
            status = status_of(pid)
            if not ranks.all[rank].alive or status is None:
                continue
            state, traced = status["State"], status["TracerPid"] != "0"
            stopped = state.startswith("T")
            now_at = _Mark(now, pid, (number, *board.region(rank)), sum(times[rank]), helpers)
            mark = self._marks.get(rank)
            if mark is None or mark.pid != pid:
                self._marks[rank] = now_at
            elif not (stopped or waited_for) or state.startswith(("D", "t")) or traced:
                self._marks[rank] = now_at  # nobody waits; or the kernel, or a debugger is at it
            elif now_at.where != mark.where or mark.moved(now_at, 1e9 * IDLE * self._grace, alone=stopped):
                self._marks[rank] = now_at
            elif now - mark.at >= self._grace:
                idle = "was stopped" if stopped else "did nothing"
                self._kill(rank, pid, f"{idle} for {self._grace:g} s while it was waited for")

    def end_timed_out(self, ranks: Iterable[int], seconds: float) -> None:
        """Kill ranks that are still in a call so many seconds after it has failed, if that is longer than the grace.

        They compute, for all that can be seen, but nothing that anybody will ask for: a loop in C, say.
        """
        board = self._session.ranks.arena
        if seconds < self._grace or board is None or board.in_debugger():
            return
        for rank in ranks:
            pid = self._session.ranks.all[rank].pid
            status = status_of(pid)
            if status is not None and status["TracerPid"] == "0" and pid not in self.killed:
                self._kill(rank, pid, f"was still in a call {self._grace:g} s after that had failed")

    def _kill(self, rank: int, pid: int, what: str) -> None:
        board = self._session.ranks.arena
        assert board is not None
        self.killed[pid] = f"was killed: it {what} (its stack is in the log; Mesh(grace=) says how long that may last)"
        text = f"spmd: rank {rank} {self.killed[pid]}\n{stacks_of(board, rank)}\n"
        with contextlib.suppress(Exception):
            sys.stderr.write(text)
            sys.stderr.flush()
        self._marks.pop(rank, None)
        self._session.ranks.all[rank].signal(signal.SIGKILL)


def _nanoseconds(pid: int) -> tuple[int, int]:
    """Processor time of a process, and of those that it has started and that still run."""
    own = started = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                own += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
                children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
                started += sum(sum(_nanoseconds(int(child))) for child in children)
    return own, started
