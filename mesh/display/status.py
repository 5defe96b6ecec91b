"""A table of what the ranks of a host are doing, as the board of their arena and the kernel say.

The ranks themselves are not asked, so that it works alike if they compute, wait or are stopped. In a notebook the table
that was shown last stays live while other cells run. Invariant: looking changes nothing; but the rows are not all of
the same moment.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import html
import os
import socket
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from ...kernels.callsite import public
from ...kernels.errors import SpmdError
from ...kernels.processes import status_of
from ...kernels.shm.board import Board
from . import notebook
from .stacks import board_of

SECONDS = 1.0  # between two looks
_shown: weakref.WeakKeyDictionary[Any, threading.Event] = weakref.WeakKeyDictionary()  # mesh -> ends its live table


@dataclasses.dataclass(frozen=True, slots=True)
class RankStatus:
    """The status of one rank.

    Attributes:
        rank, host, pid: its number in the mesh, the host's name, its process there.
        memory: resident bytes; memory that ranks share counts for each of them.
        doing: what it is doing now.
        calls: how many calls of all kinds it has done.
    """

    rank: int
    host: str
    pid: int
    memory: int
    doing: str
    calls: int


class Status(tuple[RankStatus, ...]):
    """The ranks' `RankStatus`, in rank order; shown as a table, also in a notebook.

    >>> print(Status([RankStatus(0, "a", 17, 300 << 20, "idle", 4)]))
    rank   host   pid   memory    calls   doing
    0      a      17    300 MiB   4       idle
    """

    __slots__ = ()

    def __repr__(self) -> str:
        rows = [_HEAD, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in _HEAD)
        rows = (
            "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in _cells(one)) for one in self
        )
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


_HEAD = ("rank", "host", "pid", "memory", "calls", "doing")


def _cells(one: RankStatus) -> tuple[str, ...]:
    memory = f"{one.memory >> 20} MiB"
    return str(one.rank), one.host, str(one.pid) if one.pid else "", memory, str(one.calls), one.doing


def of_board(board: Board, members: Sequence[int]) -> Status:
    """The status of a host's ranks; `members` are their numbers in the mesh."""
    host = socket.gethostname()
    return Status(_of_rank(board, position, rank, host) for position, rank in enumerate(members))


def _of_mesh(mesh: Any) -> Status:
    """The status of all ranks (on a launched rank, of those of its host, or of itself if they share nothing)."""
    board, members = board_of(mesh)
    if board is not None:
        return of_board(board, members)
    if mesh.is_driver:
        mesh.driver.check_owner()
        rows: Status = mesh.driver.ranks.status()
        return rows
    pid = os.getpid()
    memory, calls = _memory(status_of(pid)), mesh.session.regions
    return Status([RankStatus(mesh.rank, socket.gethostname(), pid, memory, "runs this program", calls)])


def _of_rank(board: Board, position: int, rank: int, host: str) -> RankStatus:
    pid, _ = board.process(position)
    status = status_of(pid) if pid else None
    begun, done = board.tasks(position)
    doing = _doing(board, position, begun > done) if status else "has ended" if pid else "is starting"
    if status and status.get("State", "").startswith(("T", "t")):
        doing = f"stopped; {doing}"
    return RankStatus(rank, host, pid, _memory(status), doing, done)


def _doing(board: Board, position: int, busy: bool) -> str:
    if not busy:
        return "idle"
    region, active = board.region(position)
    if not active:
        return "in a function that runs on it alone"
    last = board.status(position)
    return f"in call {region}" + (f", last {last}" if last else ", in no collective yet")


def _memory(status: dict[str, str] | None) -> int:
    return 1024 * int((status or {}).get("VmRSS", "0").split()[0])


class LiveStatus(Status):
    """A `Status` that a notebook keeps up to date where it is shown."""

    mesh: Any = None  # a weak reference

    def _ipython_display_(self) -> None:
        mesh = None if self.mesh is None else self.mesh()
        show = sys.modules["IPython"].display.display
        if mesh is None or mesh.closed:
            show(_drawn(self), raw=True)
            return
        handle = show(_drawn(self), raw=True, display_id=True)
        if (before := _shown.get(mesh)) is not None:
            before.set()
        ended = _shown[mesh] = threading.Event()
        # In this cell's context, so that the kernel shows the thread's output in this cell.
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(_follow, self.mesh, handle, ended), name="spmd-status", daemon=True).start()


@public
def status(self: Any) -> Status:
    """What every rank is doing just now, as a table, live in a notebook; on a launched rank, those of its host.

    Returns:
        A row for each rank: `rank`, `host`, `pid`, `memory` in bytes, `calls` done, and what it is `doing`.
    """
    rows = _of_mesh(self)
    if not self.is_driver or notebook.shell() is None:
        return rows
    found = LiveStatus(rows)
    found.mesh = weakref.ref(self)
    return found


def _follow(reference: Any, handle: Any, ended: threading.Event) -> None:
    """A thread's main function: updates the table until the mesh is closed, gone, or has another live table."""
    before: Any = None
    while not ended.wait(SECONDS):
        mesh = reference()
        if mesh is None or mesh.closed:
            return
        with contextlib.suppress(SpmdError):  # a host is lost, and may come back
            rows = _of_mesh(mesh)
            if rows != before and not ended.is_set():
                handle.update(_drawn(rows), raw=True)
                before = rows
        del mesh


def _drawn(rows: Status) -> dict[str, str]:
    return {"text/plain": Status.__repr__(rows), "text/html": rows._repr_html_()}
