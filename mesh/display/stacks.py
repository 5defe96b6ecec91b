"""The stacks of ranks, on request: even of a rank that is stuck in C, or holds the interpreter's lock.

A rank writes them from faulthandler's signal handler in C into a nameless file that whoever asks reads; so nothing that
the rank is doing has to return first. What the kernel says of its threads is added: for a stopped rank that is all
there is. Invariant: asking does not change what a rank computes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...kernels.callsite import public
from ...kernels.processes import stat_of, status_of
from ...kernels.shm.board import Board

SIGNAL = signal.SIGRTMIN + 11  # programs use SIGUSR1 and SIGUSR2 themselves
_ANSWER_SECONDS = 1.0  # for a rank to begin to write its stacks
_WRITE_SECONDS = 10.0  # for it to finish, even if it gets little processor time
_LOOK_SECONDS = 0.005
_MOST_THREADS = 8  # of a process, each shown on a line; of more only the number is given

_stacks_fd: int | None = None


def publish(board: Board) -> None:
    """Make this process, a rank, write its stacks when it is asked to."""
    global _stacks_fd
    if _stacks_fd is None:
        _stacks_fd = os.memfd_create("spmd-stacks", os.MFD_CLOEXEC)
        faulthandler.register(SIGNAL, file=_stacks_fd, all_threads=True, chain=False)
    board.publish_stacks(_stacks_fd)


def stacks_of(board: Board, rank: int) -> str:
    """What a rank is doing: its threads as the kernel sees them, and each one's Python stack, innermost call first."""
    pid, number = board.process(rank)
    if not pid:
        return "it has only begun"
    status = status_of(pid)
    if status is None:
        return f"process {pid} has ended"
    state = status.get("State", "?")
    head = f"process {pid}, {state}" + (", traced by a debugger" if status.get("TracerPid", "0") != "0" else "")
    if state.startswith(("T", "t")):
        written = "it is stopped, and can't say where it is in Python"
    else:
        written = _asked(pid, number) or "it does not answer"
    return "\n".join([head, *_threads(pid), written])


def _asked(pid: int, number: int) -> str:
    """What a process writes when it is asked for its stacks; empty if it does not answer."""
    if number < 0:
        return ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{number}", "rb", buffering=0) as file:
        before, deaf = os.fstat(file.fileno()).st_size, _deaf_threads(pid)
        os.kill(pid, SIGNAL)
        _wait(lambda: os.fstat(file.fileno()).st_size > before, _ANSWER_SECONDS)
        # While its handler runs, the signal is blocked in that thread: this tells when it has finished.
        _wait(lambda: _deaf_threads(pid) <= deaf, _WRITE_SECONDS)
        last = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), last - before, before).decode(errors="replace").strip()
    return ""


def _wait(ready: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


def _deaf_threads(pid: int) -> set[str]:
    """The threads of a process that block the signal."""
    found = set()
    for path in Path(f"/proc/{pid}/task").iterdir():
        status = status_of(f"{pid}/task/{path.name}")
        if status is not None and int(status.get("SigBlk", "0"), 16) >> (SIGNAL - 1) & 1:
            found.add(path.name)
    return found


def _threads(pid: int) -> list[str]:
    """A line for each thread of a process: its state, and where in the kernel it waits."""
    lines = []
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            with contextlib.suppress(OSError):
                name = (task / "comm").read_text(errors="replace").strip()
                state = stat_of(f"{pid}/task/{task.name}")[0]
                where = (task / "wchan").read_text().strip("0\n")
                lines.append(f"  thread {task.name} ({name}): {state}" + (f" in {where}" if where else ""))
    return (
        lines if len(lines) <= _MOST_THREADS else [*lines[:_MOST_THREADS], f"  and {len(lines) - _MOST_THREADS} more"]
    )


def board_of(mesh: Any) -> tuple[Board | None, Sequence[int]]:
    """The board that the ranks of this host share, and their numbers in the mesh."""
    if mesh.is_driver:
        mesh.driver.check_open()
    board: Board | None = mesh.driver.ranks.arena if mesh.is_driver else mesh.session.host_arena
    return board, getattr(board, "members", range(mesh.size))


@public
def stacks(self: Any) -> str:
    """Where every rank is just now, even one that is stuck in C; on a launched rank, those of its host.

    >>> with Mesh({"data": 1}) as mesh:
    ...     print(mesh.stacks().split(":")[0])
    rank 0

    Returns:
        For each rank its threads as the kernel sees them, and each one's Python stack unless the rank is stopped.
    """
    board, members = board_of(self)
    if board is not None:
        return "\n\n".join(f"rank {rank}: {stacks_of(board, position)}" for position, rank in enumerate(members))
    if self.is_driver:
        self.driver.check_owner()
        text: str = self.driver.ranks.stacks()
        return text
    with open(os.memfd_create("spmd-stacks", os.MFD_CLOEXEC), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        written = file.read().decode(errors="replace").strip()
    return f"rank {self.rank}: process {os.getpid()}\n{written}"
