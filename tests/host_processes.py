"""The processes of a mesh over several hosts: who holds a host's ranks, and what it holds open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
