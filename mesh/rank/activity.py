"""What the ranks of one host are seen to do, by another process there: the driver, or the one that holds them.

Invariant: no rank has to answer, since it may be stopped, and looking changes nothing that it computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...kernels.processes import stat_of, status_of
from ...kernels.shm.board import Board


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """What a rank does at one moment.

    Attributes:
        pid: its process.
        region: the last region that it has entered, and whether it is still in it.
        own, started: nanoseconds of processor time that it has used, and that its readers and the programs that it has
            started have used, of those that still run.
        runs, started_run: whether it runs, or any of those does, or would if it had a processor.
        excused: whether it is to be left alone: a debugger traces it, or it waits for a device in the kernel.
        stopped: whether it is stopped, though not by a debugger.
    """

    pid: int
    region: tuple[int, bool]
    own: int
    started: int
    runs: bool
    started_run: bool
    excused: bool
    stopped: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """The ranks of one host at one moment.

    Attributes:
        at: seconds by that host's clock (`time.monotonic`).
        in_debugger: whether one of them is at a debugger's prompt, or traced by one.
        ranks: rank -> what it does, of those that have not ended.
        every: at least so many seconds pass until the next look.
    """

    at: float
    in_debugger: bool
    ranks: dict[int, Activity]
    every: float = 0.0


def look_at(board: Board, ranks: Sequence[int], pids: Sequence[int]) -> Look:
    """Look at the ranks of a board, given their numbers in the mesh and their processes; 0 for one that has ended."""
    found = {}
    for position, (rank, pid, use) in enumerate(zip(ranks, pids, _uses(pids), strict=True)):
        if (status := status_of(pid)) is not None:
            state, traced = status["State"], status["TracerPid"] != "0"
            excused, stopped = traced or state.startswith("D"), state.startswith("T") and not traced
            found[rank] = Activity(pid, board.region(position), *use, excused, stopped)
    return Look(time.monotonic(), board.in_debugger(), found)


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


def _uses(pids: Sequence[int]) -> list[_Use]:
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
