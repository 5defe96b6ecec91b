"""One process of a group: it makes its side of the work, and does what it is told until its connection closes.

python -m spmd.cli.bench.worker module:Class socket size meeting-place rank
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol


class Side(Protocol):
    """What one contender does in one of its processes. Each kind of work is a method that returns a step."""

    rank: int
    threads: int  # that compute

    def __init__(self, rank: int, size: int, meeting: str): ...

    def barrier(self) -> None:
        """Wait for the contender's other processes, by its own means."""

    def finish(self) -> None:
        """Wait for what steps left under way."""


def load(name: str) -> Any:
    """What "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def spread_out(side: Side) -> None:
    """Move each rank, or each thread of a side that computes with several, to a core of its own.

    After they have read a request, all may be on one core, and stay there for a whole turn. They are not pinned: right
    after the move the system may place them as it likes.
    """
    cores = sorted(os.sched_getaffinity(0))
    threads = sorted(map(int, os.listdir("/proc/self/task"))) if side.threads > 1 else [0]
    for number, thread in enumerate(threads, side.rank):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, {cores[number % len(cores)]})
            os.sched_setaffinity(thread, cores)


def run(side: Side, step: Callable[[], object], steps: int, *, spread: bool = True) -> float:
    """Seconds per step. One step before the clock starts warms caches that the others' turns have cooled."""
    if spread:
        spread_out(side)
    step()
    side.finish()
    side.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    side.finish()
    return (time.perf_counter() - start) / steps


def serve(side: Side, connection: Connection) -> None:
    """Answer requests: open, run and close a variant's work, take one step for its value, or call a method of the side.

    Options of a variant go to the side, but for `spread`: whether a turn begins with each rank on a core of its own.
    """
    opened: dict[str, tuple[Callable[[], Any], bool]] = {}

    def answer(kind: str, *given: Any) -> Any:
        if kind == "open":
            variant, work, options, case = given
            own = {name: value for name, value in options.items() if name != "spread"}
            opened[variant] = getattr(side, work)(own, case), options.get("spread", True)
        elif kind == "run":
            variant, steps = given
            step, spread = opened[variant]
            return run(side, step, steps, spread=spread)
        elif kind == "value":
            return float(opened[given[0]][0]())
        elif kind == "close":
            opened.pop(given[0], None)
            gc.collect()
        else:
            return getattr(side, kind)(*given)
        return None

    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            reply = ("ok", answer(*request))
        except Exception:
            reply = ("failed", traceback.format_exc())
        connection.send(reply)


def main(side: str, address: str, size: str, meeting: str, rank: str) -> None:
    rank = os.environ[rank[1:]] if rank.startswith("$") else rank
    made = load(side)(int(rank), int(size), meeting)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(address)
        connection = Connection(asking.detach())
    connection.send(int(rank))
    serve(made, connection)


if __name__ == "__main__":
    main(*sys.argv[1:])
