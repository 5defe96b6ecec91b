"""The processes of a mesh over several hosts: what starts them, which holds a host's ranks, and what it holds open."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from fork_server import shared_server
from internals import host_popen


class Changed:
    """A launcher whose hosts are processes of this machine, and run something else.

    Args:
        hosts: their names, and how many ranks each has.
        change: host, command and who was started so far -> what is run there.
    """

    def __init__(self, hosts: Sequence[str], change: Callable[[str, Sequence[str], list[str]], Sequence[str]]):
        self.hosts, self._change = hosts, change
        self.started: list[str] = []
        self.stopped = 0

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> subprocess.Popen:
        command = self._change(name, command, self.started)
        self.started.append(name)
        begin = host_popen(shared_server().run)
        process: subprocess.Popen = begin(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(stdin)
            process.stdin.close()
        return process

    def stop(self, handle: subprocess.Popen) -> None:
        handle.kill()
        handle.wait()
        self.stopped += 1


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def host_process() -> int:
    """On a rank: the process that holds the ranks of its host, from whose fork they are forked."""
    return parent_of(os.getppid())


def arena_held_by(pid: int) -> int:
    """Bytes of the memory that a host's ranks share, which this process holds open."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # some are open for a moment
            found += [fd] if "spmd-arena" in os.readlink(fd) else []
    return 512 * max(os.stat(fd).st_blocks for fd in found)
