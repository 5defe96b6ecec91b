"""The main loop of a driver's rank: take a task from the socket, run it, answer.

Tasks run in the order in which they were sent. After a failed region everything already sent is refused until the
driver, which has waited for all ranks to fall quiet, opens the next generation; a task that this rank runs for itself
fails for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import pickle
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..kernels.errors import Aborted, MeshError, message
from . import naming, tasks, wire
from .agreement import Leaving
from .bars import BarState
from .failure import capture
from .interrupts import uninterrupted
from .rank import RankSession
from .reloading import LoadedModules
from .trees import Packed

INTERRUPT_SECONDS = 0.3  # between two interrupts of one task: the first one's cleaning up is left in peace


@dataclasses.dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a shipped object that this rank could not read, most often for a module that is not on its path."""

    error: BaseException


class Worker:
    """State of one rank: its session, its values by name, and the objects shipped to it by content hash."""

    def __init__(self, session: RankSession, connection: socket.socket, mesh: Any):
        self.session, self.mesh = session, mesh
        self.values: dict[Any, Any] = {}
        self.told: dict[str, tuple[Any, list[Leaving]]] = {}  # what the driver was last told of a program's results
        self._shipped: dict[str, Any] = {}
        self._connection = connection
        self.modules = LoadedModules()
        self._failed = self._running = False
        self._interrupted_at = 0.0
        self._task = 0
        self._sending = threading.Lock()

    def shipped(self, key: str) -> Any:
        """The object shipped under a key, or the error that reading it gave."""
        found = self._shipped[key]
        if isinstance(found, _Unreadable):
            raise found.error.with_traceback(None)
        return found

    def value(self, name: Any) -> Any:
        """(local tensor, spec) of a resident value."""
        if name not in self.values:
            raise MeshError(
                message(
                    "a value was lost with the rank that this one has replaced",
                    where=self.session.where(),
                    remedy="run the call again",
                )
            )
        return self.values[name]

    def free(self, names: Sequence[Any], keys: Sequence[str]) -> None:
        """Forget values, by name or by the number of the call that made them, and shipped objects."""
        for key in keys:
            self._shipped.pop(key, None)
            self.told.pop(key, None)
        for name in names:
            if isinstance(name, tuple):
                self.values.pop(name, None)
            else:
                for one in [one for one in self.values if one[0] == name]:
                    del self.values[one]

    # -- the loop -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        self._reply(("ready", 0))
        receiver = wire.Receiver(self._connection)
        while (packets := receiver.receive(block=True)) is not None:
            for packet in packets:
                if not self._handle(packet):
                    return

    def _handle(self, packet: wire.Packet) -> bool:
        """Do what a packet asks for; whether to go on."""
        kind, *rest = pickle.loads(packet.head)
        if kind in ("task", "again"):
            task, region, *unused = rest
            self.free(*unused)
            self._run(packet, task, region, again=kind == "again")
        elif kind == "ship":
            self._shipped[rest[0]] = self._read(packet)
        elif kind == "free":
            self.free(*rest)
        elif kind == "renew":
            self._failed = False
            self.told.clear()
            self.session.renew(rest[0])
        elif kind == "sources":
            remember_sources(rest[0])
        elif kind == "path":
            sys.path[:] = rest[0]
        packet.close()
        return kind != "exit"

    def _read(self, packet: wire.Packet) -> Any:
        try:
            found = wire.loads(packet, self._object_of)
            self.modules.notice()
            return found.unpack() if isinstance(found, Packed) else found
        except BaseException as error:
            return _Unreadable(error)

    def _object_of(self, name: Any) -> Any:
        return naming.object_on_rank(self, name)

    def _run(self, packet: wire.Packet, task: int, region: int, *, again: bool) -> None:
        if self._failed:
            self._reply(("skipped", task))
            return
        self._task = task
        try:
            with self.session.region(region) if region else self.session.alone():
                try:
                    self._running = True
                    if again:
                        result = tasks.call_again(self, *pickle.loads(packet.data))
                    else:
                        function, arguments = wire.loads(packet, self._object_of)
                        result = function(self, *arguments)
                finally:
                    self._running = False
            answer = self._answer(task, result)
        except BaseException as error:
            self._running = False
            self.told.clear()  # the driver may not hear of what was to be told
            self._failed = bool(region) or isinstance(error, (Aborted, KeyboardInterrupt))
            answer = wire.dumps(capture(error), head=("failed", task))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._send(answer)

    def _answer(self, task: int, result: Any) -> wire.Packet:
        if result is tasks.AS_BEFORE:
            return wire.Packet(b"", head=pickle.dumps(("as before", task)))
        if isinstance(result, tasks.Told):
            return wire.Packet(pickle.dumps(result.data), head=pickle.dumps(("told", task)))
        return wire.dumps(result, lambda obj: naming.name_on_rank(self, obj), head=("ok", task))

    def _reply(self, head: tuple) -> None:
        self._send(wire.Packet(b"", head=pickle.dumps(head)))

    def _send(self, packet: wire.Packet) -> None:
        with contextlib.suppress(ConnectionError), self._sending:  # the driver is gone, and this process soon will be
            wire.send(self._connection, packet)
        packet.close()

    def current_task(self) -> int:
        return self._task

    def report_bar(self, task: int, state: BarState) -> None:
        """Tell the driver of a progress bar; half a message would be the end of the connection."""
        with uninterrupted():
            self._reply(("bar", task, state))

    def interrupt(self, *_: Any) -> None:
        """SIGINT: the driver's Ctrl-C, meant for the task that runs; between tasks there is nothing to stop."""
        now = time.monotonic()
        if self._running and now - self._interrupted_at > INTERRUPT_SECONDS:
            self._interrupted_at = now
            raise KeyboardInterrupt


def remember_sources(sources: dict[str, list[str]]) -> None:
    """Source lines of functions that were typed, not read from a file, for tracebacks."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
