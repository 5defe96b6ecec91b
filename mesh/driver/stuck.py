"""Ranks that are stuck: stopped, or waiting for what never comes. They are killed, and then count as dead.

A death is noticed at once, and being slow is no fault. A rank is stuck if somebody waits for it and for `grace` seconds
it begins no task or region, uses no processor time and does not wait for a processor (nor do its readers, or what it
has started). Ranks that wait for others in a collective poll many times a second, so they are not stuck. Nor is a rank
that may be waiting, at a lock file say, for a program that another rank has started, as compilers do. Where only remote
objects may be waited for, a rank is stuck if it is stopped, since methods may wait as long as they like. Invariant: a
rank that a debugger traces, or that is at a debugger's prompt, is left alone, and so are its peers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterable, Sequence

from ..rank.activity import Activity, Look
from .session_view import Session

LOOKS = 8  # how often to look in the grace time
# A rank that uses no more than this part of a processor does nothing. Over hosts, a thread of each rank uses about 2e-3
# to tell the others how far it is; ranks that wait in a collective use ten times as much, there as on one host.
IDLE, IDLE_OVER_HOSTS = 1e-3, 5e-3


@dataclasses.dataclass(slots=True)
class _Mark:
    """When a rank was last seen to do something, and how far it had got.

    Attributes:
        at: seconds by its host's clock.
        looked: when it was last seen.
        task: what it had to do.
        found: what it did.
        started: processor time of the readers of all ranks, and of the programs that they have started.
    """

    at: float
    looked: float
    task: int
    found: Activity
    started: int

    def moved(self, later: _Mark, least: float) -> bool:
        """Whether the rank has done something since, itself or its programs.

        Times may shrink, since those of processes that have ended no longer count.
        """
        before, now = self.found, later.found
        if (self.task, before.pid, before.region) != (later.task, now.pid, now.region):
            return True
        return abs(now.own + now.started - before.own - before.started) > least

    def helped(self, later: _Mark, least: float) -> bool:
        """Whether a program that any rank has started has done something since: this rank may wait for that."""
        return abs(later.started - self.started) > least


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
        self.killed: dict[int, str] = {}

    def look(self) -> None:
        """Kill the ranks that are stuck."""
        now = time.monotonic()
        if now < self._next or self._grace == float("inf"):
            return
        self._next = now + self.pause
        session = self._session
        with session.lock:
            awaited, ranks = session.pending.awaited(), session.ranks  # read together: a resize exchanges the ranks
        if awaited or session.node.awaits:  # objects on any rank may be waited for, by the driver or by other ranks
            awaited = dict.fromkeys(range(len(ranks.all)), (0, False)) | awaited
        for rank in set(self._marks).difference(awaited):
            del self._marks[rank]
        looks = ranks.looks() if awaited else []
        if any(look.in_debugger for look in looks):
            self._marks.clear()
            return
        found = [activity for look in looks for activity in look.ranks.values()]
        started, started_run = sum(one.started for one in found), any(one.started_run for one in found)
        for look in looks:
            for rank, activity in look.ranks.items():
                if rank in awaited and self._is_current(rank, activity):
                    self._compare(rank, *awaited[rank], look, started, started_run)

    def _compare(self, rank: int, task: int, waited_for: bool, look: Look, started: int, started_run: bool) -> None:
        """Kill a rank if it has done nothing since it was marked, long ago; or mark it now."""
        activity = look.ranks[rank]
        marked = _Mark(look.at, look.at, task, activity, started)
        mark = self._marks.setdefault(rank, marked)
        # If the last look was long ago, perhaps the host itself was stopped.
        paused = look.at - mark.looked > 3 * max(self.pause, look.every)
        excused = activity.excused or not (activity.stopped or waited_for)
        least = 1e9 * (IDLE_OVER_HOSTS if look.every else IDLE) * max(self._grace, look.every)
        helped = activity.runs or started_run or mark.helped(marked, least)
        if paused or excused or mark.moved(marked, least) or (helped and not activity.stopped):
            self._marks[rank] = marked
        elif look.at - mark.at >= self._grace:
            idle = "was stopped" if activity.stopped else "did nothing"
            self._kill(rank, activity.pid, f"{idle} for {self._grace:g} s while it was waited for")
        else:
            mark.looked = look.at

    def _is_current(self, rank: int, activity: Activity) -> bool:
        """Whether a rank has not been replaced, or killed, since it was looked at."""
        every = self._session.ranks.all
        pid = every[rank].pid if rank < len(every) and every[rank].alive else 0
        return pid == activity.pid and pid not in self.killed

    def _current(self, ranks: Iterable[int]) -> dict[int, Activity]:
        """What these ranks do; none of them, as long as one of the mesh is in a debugger."""
        looks = self._session.ranks.looks()
        if any(look.in_debugger for look in looks):
            return {}
        found = {rank: activity for look in looks for rank, activity in look.ranks.items()}
        return {rank: found[rank] for rank in ranks if rank in found and self._is_current(rank, found[rank])}

    def end_timed_out(self, ranks: Sequence[int], seconds: float) -> None:
        """Kill ranks that are still in a call `seconds` after it has failed and was interrupted, if that is longer than
        the grace.

        They use the processor (in a loop in C, say), but nobody will want what they compute.
        """
        if ranks and seconds >= self._grace:
            for rank, activity in self._current(ranks).items():
                if not activity.excused:
                    what = f"was still in a call {self._grace:g} s after that had failed and was interrupted"
                    self._kill(rank, activity.pid, what)

    def end_stopped(self, ranks: Iterable[int]) -> None:
        """Kill those of these ranks, which are to leave the mesh, that are stopped, though not by a debugger."""
        for rank, activity in self._current(ranks).items():
            if activity.stopped:
                self.killed[activity.pid] = "was killed: it was stopped when it was to leave the mesh"
                self._session.ranks.all[rank].signal(signal.SIGKILL)

    def _kill(self, rank: int, pid: int, what: str) -> None:
        stack, remark = self._session.ranks.stack_of(rank), "Mesh(grace=) says how long that may last"
        self.killed[pid] = f"was killed: it {what} ({'its stack is in the log; ' if stack else ''}{remark})"
        text = f"spmd: rank {rank} {self.killed[pid]}\n{stack}\n"
        with contextlib.suppress(Exception):
            sys.stderr.write(text)
            sys.stderr.flush()
        self._marks.pop(rank, None)
        self._session.ranks.all[rank].signal(signal.SIGKILL)
