"""Ranks that are stuck: stopped, or waiting for what never comes. They are killed, and then count as dead.

A death is noticed at once, and being slow is no fault. A rank is stuck if somebody waits for it and for `grace` seconds
it begins no task or region, uses no processor time and does not wait for a processor (nor do its readers, or what it
has started). Ranks that wait for others in a collective poll many times a second, so they are not stuck. Nor is a rank
that may be waiting, at a lock file say, for a program that another rank has started, as compilers do. Where only remote
objects may be waited for, a rank is stuck if it is stopped, since methods may wait as long as they like. So is one on
another host, of which more is not known. Invariant: a rank that a debugger traces, or that is at a debugger's prompt,
is left alone, and so are its peers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...kernels.processes import stat_of, status_of
from ..display.stacks import stacks_of
from .ranks import Rank
from .session_view import Session

LOOKS = 8  # how often to look in the grace time
IDLE = 1e-3  # a rank that uses no more than this part of a processor does nothing


@dataclasses.dataclass(slots=True)
class _Mark:
    """When a rank was last seen to do something, and how far it had got.

    Attributes:
        cpu_nanoseconds: processor time, of it, its readers and the processes it has started.
        helpers: processor time of the readers of all ranks, and of the processes that they have started.
        runs: whether it or any of all these runs, or would if it had a processor.
    """

    at: float
    pid: int
    where: tuple[int, ...]
    cpu_nanoseconds: int
    helpers: int
    runs: bool

    def moved(self, later: _Mark, least: float, *, alone: bool) -> bool:
        """Whether this rank, or (unless `alone`) a process that any rank has started, has done something since.

        Times may shrink, since those of processes that have ended no longer count.
        """
        helped = not alone and (later.runs or abs(later.helpers - self.helpers) > least)
        return helped or abs(later.cpu_nanoseconds - self.cpu_nanoseconds) > least


class Stuck:
    """Looks for stuck ranks of one mesh; called by the thread that listens to them.

    Args:
        grace: seconds; infinite: no rank ever counts as stuck.

    Attributes:
        killed: pid -> why that rank was killed here, for messages.
    """

    def __init__(self, session: Session, grace: float):
        self._session, self._grace = session, grace
        self.pause = min(1.0, grace / LOOKS)
        self._next = 0.0
        self._marks: dict[int, _Mark] = {}
        self._stopped: dict[int, float] = {}  # processes on other hosts: since when they are stopped and waited for
        self.killed: dict[int, str] = {}

    def look(self) -> None:
        """Kill the ranks that are stuck."""
        now = time.monotonic()
        if now < self._next or self._grace == float("inf"):
            return
        if now - self._next > 2 * self.pause:
            self._marks.clear()  # the last look was long ago: perhaps this process itself was stopped
            self._stopped.clear()
        self._next = now + self.pause
        session = self._session
        with session.lock:
            awaited, ranks = session.pending.awaited(), session.ranks  # read together: a resize exchanges the ranks
            board = ranks.arena
        if awaited or session.node.awaits:  # objects on any rank may be waited for, by the driver or by other ranks
            awaited = dict.fromkeys(range(len(ranks.all)), (0, False)) | awaited
        if board is None:
            self._look_elsewhere([ranks.all[rank] for rank in awaited], now)
            return
        if awaited and board.in_debugger():
            self._marks.clear()
            return
        for rank in set(self._marks).difference(awaited):
            del self._marks[rank]
        if not awaited:
            return
        times = _times([one.pid for one in ranks.all])
        helpers, helped = sum(use.started for use in times), any(use.started_run for use in times)
        for rank, (number, waited_for) in awaited.items():
            pid = ranks.all[rank].pid
            status = status_of(pid)
            if not ranks.all[rank].alive or status is None:
                continue
            state, traced = status["State"], status["TracerPid"] != "0"
            stopped = state.startswith("T")
            use = times[rank]
            runs = use.runs or helped
            now_at = _Mark(now, pid, (number, *board.region(rank)), use.own + use.started, helpers, runs)
            mark = self._marks.setdefault(rank, now_at)
            in_kernel = state.startswith(("D", "t"))
            excused = in_kernel or traced or not (stopped or waited_for)
            other = mark.pid != pid or mark.where != now_at.where
            if excused or other or mark.moved(now_at, 1e9 * IDLE * self._grace, alone=stopped):
                self._marks[rank] = now_at
            elif now - mark.at >= self._grace:
                idle = "was stopped" if stopped else "did nothing"
                self._kill(rank, pid, f"{idle} for {self._grace:g} s while it was waited for")

    def _look_elsewhere(self, awaited: Iterable[Rank], now: float) -> None:
        """Kill ranks on other hosts that are stopped; their hosts tell every few seconds which are."""
        ranks = {one.pid: one.rank for one in awaited if one.alive and one.stopped}
        self._stopped = {pid: self._stopped.get(pid, now) for pid in ranks}
        late = [pid for pid, since in self._stopped.items() if now - since >= self._grace and pid not in self.killed]
        for pid in late if late and not self._session.ranks.in_debugger() else ():
            self._kill(ranks[pid], pid, f"was stopped for {self._grace:g} s while it was waited for")

    def end_timed_out(self, ranks: Iterable[int], seconds: float) -> None:
        """Kill ranks that are still in a call `seconds` after it has failed and was interrupted, if that is longer than
        the grace.

        They use the processor (in a loop in C, say), but nobody will want what they compute. On other hosts they may be
        stuck as well.
        """
        left = [rank for rank in ranks if self._session.ranks.all[rank].pid not in self.killed]
        if seconds < self._grace or not left or self._session.ranks.in_debugger():
            return
        for rank in left:
            pid, elsewhere = self._session.ranks.all[rank].pid, self._session.ranks.arena is None
            status = None if elsewhere else status_of(pid)
            if elsewhere or (status is not None and status["TracerPid"] == "0"):
                what = f"was still in a call {self._grace:g} s after that had failed and was interrupted"
                self._kill(rank, pid, what)

    def end_stopped(self, ranks: Iterable[int]) -> None:
        """Kill those of these ranks, which are to leave the mesh, that are stopped, though not by a debugger."""
        board = self._session.ranks.arena
        for rank in () if self._session.ranks.in_debugger() else ranks:
            one = self._session.ranks.all[rank]
            if one.stopped if board is None else is_stopped(one.pid):
                self.killed[one.pid] = "was killed: it was stopped when it was to leave the mesh"
                one.signal(signal.SIGKILL)

    def _kill(self, rank: int, pid: int, what: str) -> None:
        board, remark = self._session.ranks.arena, "Mesh(grace=) says how long that may last"
        stack = "" if board is None else f"{stacks_of(board, rank)}\n"  # of ranks on other hosts it would take too long
        self.killed[pid] = f"was killed: it {what} ({'its stack is in the log; ' if stack else ''}{remark})"
        text = f"spmd: rank {rank} {self.killed[pid]}\n{stack}"
        with contextlib.suppress(Exception):
            sys.stderr.write(text)
            sys.stderr.flush()
        self._marks.pop(rank, None)
        self._session.ranks.all[rank].signal(signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, though not by a debugger."""
    status = status_of(pid)
    return status is not None and status["State"].startswith("T") and status["TracerPid"] == "0"


class _Use(NamedTuple):
    """Nanoseconds of a process, and of those it has started that still run; whether either has work to do now."""

    own: int = 0
    started: int = 0
    runs: bool = False
    started_run: bool = False

    def starting(self, others: Iterable[_Use]) -> _Use:
        """This one's with that of others that it has started."""
        started, started_run = self.started, self.started_run
        for other in others:
            started += other.own + other.started
            started_run |= other.runs or other.started_run
        return self._replace(started=started, started_run=started_run)


def _times(pids: Sequence[int]) -> list[_Use]:
    """That of each rank. Readers count as started by it; they are forked where it was, and are of its process group."""
    readers: dict[int, list[int]] = {pid: [] for pid in pids}
    for parent in {_parent_and_group(pid)[0] for pid in pids} - {0}:
        for child in _children(parent, parent):
            readers.get(_parent_and_group(child)[1], []).append(child)
    return [_use(pid).starting(_use(one) for one in readers[pid] if one != pid) for pid in pids]


def _parent_and_group(pid: int) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        _, parent, group, *_ = stat_of(pid)
        return int(parent), int(group)
    return 0, 0


def _children(pid: int, task: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [*map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())]
    return []


def _use(pid: int) -> _Use:
    found = _Use()
    with contextlib.suppress(OSError):
        for task in map(int, os.listdir(f"/proc/{pid}/task")):
            with contextlib.suppress(OSError):
                here = Path(f"/proc/{pid}/task/{task}")
                own = found.own + int((here / "schedstat").read_text().split()[0])
                runs = found.runs or stat_of(f"{pid}/task/{task}")[0] == "R"
                found = found._replace(own=own, runs=runs).starting(map(_use, _children(pid, task)))
    return found
