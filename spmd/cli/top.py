"""`spmd top`: what the ranks of all of this user's meshes on this host are doing, redrawn every second.

A mesh is found by its arena, which the processes of this user have open: there is no list on disk, so nothing is left
of a mesh that has ended. Invariant: another user's processes are not looked at, and nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..kernels.shm import arena
from ..kernels.shm.board import Board
from ..mesh.display import status

CLEAR = "\033[H\033[2J"


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A mesh that is there.

    Attributes:
        driver: the process that has it; 0 where ranks were launched.
        title: as it calls itself.
    """

    driver: int
    title: str
    status: status.Status

    def text(self) -> str:
        return f"{self.title or 'a mesh'} of process {self.driver}\n{self.status}"


def meshes() -> Iterator[Found]:
    """The meshes of this user's drivers on this host, as they are now, the oldest process first."""
    seen: set[tuple[int, int]] = set()
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid != os.getuid() or pid == os.getpid():
                continue
            for position, (number, size) in arena.found_in(pid).items():
                if position in seen:
                    continue
                fd = arena.open_of(pid, number, size)
                seen.add(position)
                try:
                    board = Board(fd, size, size)
                    driver, _ = board.process(size)
                    if driver and Path(f"/proc/{driver}").exists():
                        yield Found(driver, board.status(size), status.of_board(board, range(size)))
                finally:
                    os.close(fd)


def top(arguments: Sequence[str]) -> int:
    """Draw the meshes until Ctrl-C; once if the output is no terminal, or with --once."""
    parser = argparse.ArgumentParser(prog="spmd top", description="What the ranks of your meshes on this host do now.")
    parser.add_argument("--once", action="store_true", help="print it once")
    parser.add_argument("--seconds", type=float, default=1.0, help="from one table to the next (default: 1)")
    options = parser.parse_args(arguments)
    once = options.once or not sys.stdout.isatty()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            text = "\n\n".join(found.text() for found in meshes()) or "no mesh of yours is open on this host"
            print(text if once else f"{CLEAR}{text}", flush=True)
            if once:
                break
            time.sleep(options.seconds)
    return 0
