"""What the ranks of a host do just now, as the board of their arena and the kernel tell it: a table.

Nothing is asked of a rank, so that one that computes, waits or is stopped is told of like any other. Invariant: looking
changes nothing; what is told of several ranks is not of one moment.
"""

from __future__ import annotations

import dataclasses
import html
import os
import socket
from collections.abc import Sequence
from typing import Any

from ...kernels.processes import status_of
from ...kernels.shm.board import Board
from .stacks import board_of


@dataclasses.dataclass(frozen=True, slots=True)
class RankStatus:
    """What is known of one rank.

    Attributes:
        rank, host, pid: its number in the mesh, the host's name, its process there.
        memory: bytes that are resident, what it shares with other ranks counted for each.
        doing: what it does now.
        calls: how many calls of all kinds it has done.
    """

    rank: int
    host: str
    pid: int
    memory: int
    doing: str
    calls: int


class Status(tuple[RankStatus, ...]):
    """The ranks' `RankStatus`, by rank; shown as a table, also in a notebook.

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
    """The status of a host's ranks.

    Args:
        members: their numbers in the mesh.
    """
    host = socket.gethostname()
    return Status(_of_rank(board, position, rank, host) for position, rank in enumerate(members))


def of_mesh(mesh: Any) -> Status:
    """The status of all ranks of a host, or of this process alone where they share nothing."""
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
