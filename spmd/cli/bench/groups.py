"""Groups of processes that are measured in turn: the ranks of each contender are processes of their own.

What a library does to its process (how memory is allocated, how many threads there are) must neither flatter nor hurt
its peers, so no two of them share one. All groups live at once, and all but one wait, blocked in a read of a socket.
Invariant: within a round every contender has one turn, and of a turn the slowest rank's time counts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..temporary import temporary_folder

START_SECONDS = 120.0
MOST_STEPS = 2000
RANK = "{rank}"  # stands for the rank's number in a group's environment


class GroupFailed(Exception):
    """A process of a group raised, or ended."""


class Group:
    """The processes of one contender: they start at once, and do what `ask` says, all together.

    Args:
        side: what runs in them, "module:Class"; the class is called with (rank, size, meeting place).
        size: number of processes.
        launcher: a command that starts all of them, such as mpirun, and tells each its rank in `rank_variable`.
        environ: environment variables, in which "{rank}" stands for the rank's number.
        path: a folder to import from, or several (separated as in PATH).
        worker: the command of a process, which gets what `worker` takes.
    """

    def __init__(
        self,
        side: str,
        size: int,
        *,
        launcher: Sequence[str] = (),
        rank_variable: str = "OMPI_COMM_WORLD_RANK",
        environ: Mapping[str, str] | None = None,
        path: Path | str | None = None,
        worker: Sequence[str] = (sys.executable, "-m", "spmd.cli.bench.worker"),
    ):
        self.side, self.size = side, size
        self._on_close = contextlib.ExitStack()
        folder = self._on_close.enter_context(temporary_folder("bench"))
        self._connections: list[Connection] = []
        address = f"{folder}/socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(size)
        own = {**os.environ, **(environ or {})}
        if path is not None:
            own["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [*worker, side, address, str(size), f"{folder}/meeting"]
        started = (
            [[*launcher, *command, f"${rank_variable}"]] if launcher else [[*command, str(r)] for r in range(size)]
        )
        self._processes = [
            subprocess.Popen(
                arguments,
                env={name: value.replace(RANK, str(rank)) for name, value in own.items()},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
            )
            for rank, arguments in enumerate(started)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def ask(self, *request: Any) -> list[Any]:
        """Send every process the same request; the answers, in rank order."""
        if not self._connections:
            self._accept()
        for connection in self._connections:
            connection.send(request)
        answers = [self._answer(connection) for connection in self._connections]
        for rank, (kind, value) in enumerate(answers):
            if kind == "failed":
                raise GroupFailed(f"{self.side}, rank {rank} of {self.size}, at {request}:\n{value}")
        return [value for _, value in answers]

    def _accept(self) -> None:
        end = time.monotonic() + START_SECONDS
        found: dict[int, Connection] = {}
        self._listener.settimeout(0.2)
        while len(found) < self.size:
            if any(process.poll() is not None for process in self._processes):
                raise GroupFailed(f"{self.side}: a process ended before it was ready; its error output says why")
            if time.monotonic() > end:
                raise GroupFailed(f"{self.side}: {len(found)} of {self.size} came within {START_SECONDS:g} s")
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            found[connection.recv()] = connection
        self._connections = [found[rank] for rank in range(self.size)]

    def _answer(self, connection: Connection) -> tuple[str, Any]:
        try:
            return connection.recv()
        except (EOFError, OSError):
            raise GroupFailed(f"{self.side}: a process ended; its error output says why") from None

    def close(self) -> None:
        """End the processes: they end themselves when their connection closes."""
        for connection in self._connections:
            connection.close()
        self._listener.close()
        for process in self._processes:
            try:
                process.wait(20 if self._connections else 0)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
        self._on_close.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def in_turn(
    contenders: Mapping[str, tuple[Group, str, Any]], work: str, case: Any, *, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds per step of every contender, one sample a round.

    Args:
        contenders: name -> (its group, its variant among those of one side, and options of that variant).
        work, case: what all of them do: `side.<work>(options, case)` gives a step.
        rounds: how many turns each has.
        seconds: how long a turn should take; it is at least one step.
    """
    steps: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for name, (group, variant, options) in contenders.items():
            group.ask("open", variant, work, options, case)
            steps[name] = 2
            for _ in range(2):  # the first steps of all take far longer than those that follow
                once = max(group.ask("run", variant, steps[name]))
                steps[name] = max(1, min(MOST_STEPS, round(seconds / once)))
        names = list(contenders)
        for turn in range(rounds):
            for position in range(len(names)):
                name = names[(turn + position) % len(names)]  # each round begins with another
                group, variant, _ = contenders[name]
                samples[name].append(max(group.ask("run", variant, steps[name])))
    finally:
        for name in steps:
            group, variant, _ = contenders[name]
            group.ask("close", variant)
    return samples


def quartiles(samples: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
