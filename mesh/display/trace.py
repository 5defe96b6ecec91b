"""SPMD_TRACE: a file of what a driver sends and its ranks do, for Perfetto, which shows each rank as a process.

The file is an array in the Trace Event Format, one event a line. A rank sends its events as log records of `LOGGER`, so
that they come from any host; other handlers of that logger get them, too. Invariant: without the variable nothing here
is called.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from ...kernels.errors import MeshError
from ..driver.pending import Task

LOGGER = "spmd.trace"
LEVEL = logging.DEBUG
_MOST = 100_000  # ranks of a mesh: a rank is shown as process (number of the mesh) * _MOST + rank


def mesh_id(key: bytes) -> str:
    """The name of a mesh in its events; not its key, which is secret."""
    return hashlib.blake2b(key, digest_size=8, person=b"trace").hexdigest()


class Recorder:
    """On a rank: collects the events of a task until it is over."""

    def __init__(self, key: bytes, send: Callable[[dict[str, Any]], None]):
        self._mesh, self._send = mesh_id(key), send
        self._collectives: list[tuple[float, float, str, str]] = []  # begun, seconds, operation, backend

    def collective(self, what: str, backend: str, began: float, seconds: float) -> None:
        self._collectives.append((began, seconds, what, backend))

    def task(self, number: int, region: int, name: str, began: float, seconds: float) -> None:
        """Send the events of a task that is over."""
        events: list[Any] = [(1, name, "call", began, seconds, {"task": number, "region": region})]
        ends: list[float] = []  # when each lane is free; within a lane nothing overlaps
        for start, lasted, what, backend in sorted(self._collectives):
            lane = next((lane for lane, end in enumerate(ends) if end <= start), len(ends))
            ends[lane : lane + 1] = [start + lasted]
            name_, _, details = what.partition(" ")
            about = {"of": details, "over": backend, "task": number}
            events.append((2 + lane, name_, "collective", start, lasted, about))
        self._collectives.clear()
        fields = {"name": LOGGER, "levelno": LEVEL, "levelname": "DEBUG", "msg": name}
        self._send({**fields, "mesh": self._mesh, "task": number, "called": name, "events": json.dumps(events)})


class Writer(logging.Handler):
    """In a driver: writes the file.

    Args:
        path: its name; an existing file is overwritten.
    """

    def __init__(self, path: str):
        try:
            self._file, self._pid = open(path, "w"), os.getpid()  # noqa: SIM115  # until the program ends
        except OSError as error:
            problem, remedy = "SPMD_TRACE names a file that can't be written", "name one that can, or unset it"
            raise MeshError(problem, got=str(error), remedy=remedy) from None
        super().__init__()
        self._meshes: dict[str, tuple[int, Sequence[str]]] = {}  # id -> number of the mesh, and each rank's host
        self._numbers = itertools.count(1)
        self._known: set[tuple[int, int]] = set()  # processes and threads that have a name
        self._calls: dict[tuple[str, int], str | tuple[Any, ...]] = {}  # by task: its name, or its times and ranks
        self._declare(0, 0, f"driver, process {self._pid}")

    def follow(self, key: bytes, hosts: Sequence[str]) -> Callable[[Task], None]:
        """Take the events of a mesh, too; returns a function to call with each of its tasks that is over."""
        mesh = mesh_id(key)
        with self.lock:  # type: ignore[union-attr]
            self._meshes[mesh] = (next(self._numbers), hosts)

        def settled(task: Task) -> None:
            with self.lock:  # type: ignore[union-attr]
                self._call(mesh, task.number, (task.began, task.began + task.seconds, task.ranks))

        return settled

    def emit(self, record: logging.LogRecord) -> None:
        """Write a rank's events."""
        about: Any = record
        number, hosts = self._meshes.get(about.mesh, (0, ()))
        pid = number * _MOST + about.rank
        host = f" on {hosts[about.rank]}" if about.rank < len(hosts) else ""
        of = f", mesh {number}" if number > 1 else ""
        for lane, name, category, began, seconds, args in json.loads(about.events):
            self._declare(pid, 0, f"rank {about.rank}{host}{of}")
            self._declare(pid, lane, "calls" if lane == 1 else "collectives")
            self._write(
                {"ph": "X", "name": name, "cat": category, "ts": 1e6 * began, "dur": 1e6 * seconds}
                | {"pid": pid, "tid": lane, "args": args}
            )
        self._call(about.mesh, about.task, about.called)

    def _call(self, mesh: str, task: int, found: str | tuple[Any, ...]) -> None:
        """Write the driver's own event of a call, once a rank has sent its name and it is over, in either order."""
        other = self._calls.get((mesh, task))
        if other is None or isinstance(found, str) == isinstance(other, str):
            self._calls[mesh, task] = found
            return
        name, took = (found, other) if isinstance(found, str) else (other, found)
        assert not isinstance(took, str)
        self._calls[mesh, task] = ""  # other ranks will send its name again
        (sent, answered, ranks), (number, _) = took, self._meshes.get(mesh, (0, ()))
        event = {"name": name, "cat": "call", "id": f"{number}.{task}", "pid": 0, "tid": 0}
        args = {"task": task, "ranks": len(ranks), "mesh": number}
        self._write({"ph": "b", "ts": 1e6 * sent, "args": args, **event})
        self._write({"ph": "e", "ts": 1e6 * answered, **event})

    def _declare(self, pid: int, tid: int, name: str) -> None:
        if (pid, tid) in self._known:
            return
        kind = "thread_name" if tid else "process_name"
        self._write({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})
        self._known.add((pid, tid))
        if not tid:
            self._write({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})

    def _write(self, event: dict[str, Any]) -> None:
        if os.getpid() == self._pid and not self._file.closed:
            self._file.write(f"{',' if self._known else '['}\n{json.dumps(event)}")

    def close(self) -> None:
        """End the file at the end of the program; if this is killed before, readers of the format do without that."""
        if os.getpid() == self._pid and not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()
        super().close()


_writers: list[Writer] = []


def writer() -> Writer | None:
    """This process's writer, if SPMD_TRACE names a file."""
    path = os.environ.get("SPMD_TRACE")
    if not path:
        return None
    if not _writers:
        _writers.append(Writer(path))
        logger = logging.getLogger(LOGGER)
        logger.setLevel(LEVEL)
        logger.propagate = False
        logger.addHandler(_writers[0])
        atexit.register(_writers[0].close)
    return _writers[0]
