"""The main loop of a driver's rank: take a task from the socket, run it, answer.

Tasks run in the order in which they were sent. After a failure everything already sent is refused until the driver,
which has waited for all ranks to fall quiet, opens the next generation.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from ..kernels.arena import Arena
from ..kernels.errors import Aborted
from . import wire
from .failure import capture
from .rank import RankSession
from .spec import Layout
from .trees import Packed


class Worker:
    """State of one rank: its session, its values by id, and the objects shipped to it by content hash."""

    def __init__(self, session: RankSession, connection: socket.socket, mesh_id: int):
        self.session, self.connection, self.mesh_id = session, connection, mesh_id
        self.values: dict[Any, Any] = {}
        self.shipped: dict[str, Any] = {}
        self.mesh: Any = None
        self.failed = False
        self.running = False

    def object_of(self, name: Any) -> Any:
        from .mesh import object_on_rank

        return object_on_rank(self, name)

    def name_of(self, obj: Any) -> Any:
        from .mesh import name_on_rank

        return name_on_rank(self, obj)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        receiver = wire.Receiver(self.connection)
        while True:
            packets = receiver.receive(block=True)
            if packets is None:
                return
            for packet in packets:
                if not self.handle(packet):
                    return

    def handle(self, packet: wire.Packet) -> bool:
        """Do what a packet asks for; whether to go on."""
        try:
            kind, *rest = wire.loads(packet, self.object_of)
            key = wire.content_hash(packet) if kind == "ship" else ""
        except BaseException as error:
            # Most often a module that is not on this rank's path: fail the task that needs it.
            self._run(None, 0, _raise, (error,))
            return True
        finally:
            packet.close()
        if kind == "exit":
            return False
        if kind == "ship":
            self.shipped[key] = rest[0].unpack() if isinstance(rest[0], Packed) else rest[0]
        elif kind == "sources":
            remember_sources(rest[0])
        elif kind == "free":
            for value in rest[0]:
                self.values.pop(value, None)
        elif kind == "renew":
            self.failed = False
            self.session.renew(rest[0])
        else:
            self._run(*rest)
        return True

    def _run(self, task: int | None, region: int, function: Callable[..., Any], arguments: tuple) -> None:
        if self.failed:
            self._reply(task, "skipped", None)
            return
        try:
            self.running = True
            with self.session.region(region) if region else contextlib.nullcontext():
                result = function(self, *arguments)
            self.running = False
            self._flush()
            packet = wire.dumps((task, "ok", result), self.name_of)
        except BaseException as error:
            self.running = False
            failure = capture(error)
            self.failed = True
            if not isinstance(error, Aborted):
                self.session.abort(f"{type(error).__qualname__}: {error}")
            self._flush()
            self._reply(task, "failed", failure)
            return
        wire.send(self.connection, packet)
        packet.close()

    def _reply(self, task: int | None, status: str, value: Any) -> None:
        packet = wire.dumps((task, status, value))
        with contextlib.suppress(ConnectionError):
            wire.send(self.connection, packet)

    def say_ready(self) -> None:
        self._reply(None, "ready", None)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    def interrupt(self, *_: Any) -> None:
        """SIGINT: the driver's Ctrl-C, meant for the region that runs; between regions there is nothing to stop."""
        if self.running:
            raise KeyboardInterrupt


def _raise(worker: Worker, error: BaseException) -> None:
    raise error


def remember_sources(sources: dict[str, list[str]]) -> None:
    """Source lines of functions that were typed, not read from a file, for tracebacks."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


# -- the process ----------------------------------------------------------------------------------------------------------


def main(request: dict[str, Any], fds: list[int]) -> None:
    """Become a rank: called in a fresh fork of the zygote."""
    control, out, err, arena_fd = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[:] = request["path"]
    sys.argv[:] = request["argv"]
    import torch

    torch.set_num_threads(request["threads"])
    rank = request["rank"]
    random.seed(request["seed"] * 65537 + rank)
    layout = Layout(request["axes"])
    arena = Arena(arena_fd, layout.size, rank)
    connection = socket.socket(fileno=control)
    session = RankSession(
        layout,
        rank,
        backend=request["backend"],
        watch=arena,
        store=lambda: _store(request["store"], request["timeout"]),
        timeout=request["timeout"],
        seed=request["seed"],
        launched=False,
    )
    worker = Worker(session, connection, request["mesh_id"])
    session.renew(request["generation"])
    from .mesh import mesh_on_rank

    worker.mesh = mesh_on_rank(session, request)
    signal.signal(signal.SIGINT, worker.interrupt)
    worker.say_ready()
    worker.serve()
    session.close()


def _store(address: tuple[str, int] | None, timeout: float) -> Any:
    import datetime

    import torch.distributed as dist

    assert address is not None
    host, port = address
    return dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout))
