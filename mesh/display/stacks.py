"""The stacks of ranks, on request: even of a rank that is stuck in C, or holds the interpreter's lock.

Each of a rank's threads writes its own, from faulthandler's signal handler in C, into a nameless file that whoever asks
reads; so nothing that the rank is doing has to return first. No thread writes that of another, which might just be
ending. What the kernel says of the threads is added: for a stopped rank that is all there is. Invariant: asking does
not change what a rank computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
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
_ANSWER_SECONDS = 1.0  # for the first of a rank's threads that does not answer at once to begin to write its stack
_OTHERS_SECONDS = 0.05  # for each one after it
_WRITE_SECONDS = 10.0  # to finish, even with little processor time
_LOOK_SECONDS = 0.002
_TGKILL = 234  # the system call's number on x86-64, where alone there is an arena
_MOST_THREADS = 8  # of a process, each shown on a line; of more only the number is given

_stacks_fd: int | None = None
_syscall = ctypes.CDLL(None).syscall


def publish(board: Board) -> None:
    """Make this process, a rank, write its stacks when it is asked to."""
    global _stacks_fd
    if _stacks_fd is None:
        _stacks_fd = os.memfd_create("spmd-stacks", os.MFD_CLOEXEC)
        faulthandler.register(SIGNAL, file=_stacks_fd, all_threads=False, chain=False)
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
    """What the threads of a process write when they are asked for their stacks; empty if none does."""
    found, seconds = [], _ANSWER_SECONDS
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{number}", "rb", buffering=0) as file:
        if not _wait(lambda: _is_locked(file.fileno()), _WRITE_SECONDS):  # another one asks, and is stopped perhaps
            return ""
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task"))):
            before = os.fstat(file.fileno()).st_size
            if not _is_told(pid, thread, seconds):
                seconds = min(seconds, _OTHERS_SECONDS)
            size = os.fstat(file.fileno()).st_size - before
            if size:  # else it is no thread of Python's
                written = os.pread(file.fileno(), size, before).decode(errors="replace").strip()
                found.append(written.replace("Stack (", f"Thread {thread} (", 1))
    return "\n".join(found)


def _is_locked(fd: int) -> bool:
    """Lock a file, so that what others ask for is not written in between; whether that was possible."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_told(pid: int, thread: int, seconds: float) -> bool:
    """Send a thread the signal; whether it has dealt with it, or has ended."""
    if _has_signal(pid, thread, "SigBlk"):
        return True  # it would get it some time
    _syscall(_TGKILL, pid, thread, SIGNAL)
    if not _wait(lambda: not _has_signal(pid, thread, "SigPnd"), seconds):
        return False
    time.sleep(_LOOK_SECONDS)  # for a moment it is neither pending nor blocked, as it is while the handler runs
    return _wait(lambda: not _has_signal(pid, thread, "SigBlk"), _WRITE_SECONDS)


def _has_signal(pid: int, thread: int, field: str) -> bool:
    status = status_of(f"{pid}/task/{thread}")
    return status is not None and bool(int(status.get(field, "0"), 16) >> (SIGNAL - 1) & 1)


def _wait(ready: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (found := ready()) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
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
