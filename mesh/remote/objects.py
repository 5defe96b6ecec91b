"""The objects that live in this process, the calls that wait for them, and the calls' results.

Each object has its own thread, so that a long computation delays neither other objects nor a region on the main thread.
Invariants: an object does one call at a time; calls of one caller run in the order in which they were made, and a call
that waits for its arguments lets other callers' calls go first; the result of a call is fixed when the call ends (what
the object does later does not change it), and is kept until the caller no longer needs it.
"""

from __future__ import annotations

import dataclasses
import queue
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from ...kernels.arguments import check_function
from ...kernels.cuda import placement
from ...kernels.errors import MeshError
from ...kernels.network.codec import Message
from .. import wire
from ..pickling.beside import remember_sources
from .connections import Connection
from .handle import methods_of
from .protocol import LOAD, RESTORABLE, Invoke, Name

_UNFINISHED = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """A call of an object of this process.

    Attributes:
        name: of the call.
        origin: the connection over which it arrived.
        invoke, packet: the message.
        arguments: results of other calls that have arrived, by their index in `invoke.refs`.
        missing: the indices of those that have not arrived yet.
        state: "queued", "running", "done" or "cancelled".
        waits_for: (process, call) whose result its method waits for without a timeout.
        deadlock: the chain of calls through which it waits for itself, once that is known.
        answer: the kind of its answer, and the content.
        asked: who else wants the answer.
        wanted: whether its caller may still need the result.
    """

    name: Name
    origin: Connection
    invoke: Invoke
    packet: wire.Packet
    arguments: dict[int, Any] = dataclasses.field(default_factory=dict)
    missing: set[int] = dataclasses.field(default_factory=set)
    state: str = "queued"
    waits_for: tuple[Any, Name] | None = None
    deadlock: tuple[Name, ...] = ()
    answer: tuple[type[Message], wire.Packet] | None = None
    asked: list[Callable[[type, wire.Packet], None]] = dataclasses.field(default_factory=list)
    wanted: bool = True

    def forget(self) -> None:
        """Free its result."""
        if self.answer is not None:
            self.answer[1].close()
        self.packet.close()


class LiveObject:
    """An object, its thread, and the calls that wait for it.

    Args:
        serial: its number among the objects of this process.
        run: does a call, on the object's thread.

    Attributes:
        value: the object itself; None until it is made.
        maker: where its state is sent after each call, if it is restorable.
        running: the current call.
        closing: whether no more calls will come.
    """

    def __init__(self, name: Name, label: str, serial: int, run: Callable[[LiveObject, Call], None]):
        self.name, self.label, self.serial, self._run = name, label, serial, run
        self.value: Any = None
        self.maker: Connection | None = None
        self.running: Call | None = None
        self.closing = False
        self.done = 0
        self._callers: dict[Any, deque[Call]] = {}
        self._ready: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # The node's lock must be held for the following methods, except on the object's thread.

    def add(self, call: Call) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"spmd-{self.label}", daemon=True)
            self._thread.start()
        waiting = self._callers.setdefault(self._caller(call), deque())
        waiting.append(call)
        if len(waiting) == 1:
            self.consider(call)

    @staticmethod
    def _caller(call: Call) -> Any:
        return (call.name[0], call.invoke.caller)

    def consider(self, call: Call) -> None:
        """Let a call run if it is its caller's next one and has all its arguments."""
        waiting = self._callers.get(self._caller(call))
        if waiting and waiting[0] is call and not call.missing and call.state == "queued":
            self._ready.put(call)

    def left(self, call: Call) -> None:
        """A call is over, or will not begin: its caller's next one may run."""
        waiting = self._callers[self._caller(call)]
        if waiting[0] is call:
            waiting.popleft()
            while waiting and waiting[0].state == "cancelled":
                waiting.popleft()
            if waiting:
                self.consider(waiting[0])
            else:
                del self._callers[self._caller(call)]
        if self.closing and not self._callers:
            self.end()

    def before(self, call: Call) -> list[Call]:
        """The calls that must be over before this one begins."""
        waiting = self._callers.get(self._caller(call), ())
        earlier = []
        for one in waiting:
            if one is call:
                break
            earlier.append(one)
        return earlier if self.running is None or self.running in earlier else [self.running, *earlier]

    @property
    def idle(self) -> bool:
        return not self._callers

    def end(self) -> None:
        """Drop the object, and end its thread after the current call."""
        self.value = None
        if self._thread is not None:
            self._ready.put(None)

    def do(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Make the object, or call one of its methods."""
        if method == LOAD:
            return self.value.load(*args)
        if method not in ("", RESTORABLE):
            called = getattr(self.value, method)
            result = called(*args, **kwargs)
            if isinstance(result, _UNFINISHED):
                if isinstance(result, types.CoroutineType):
                    result.close()
                check_function(f"a call of {self.label}", called, "def")
            return result
        self.value = _made(args, kwargs)
        methods = methods_of(type(self.value))
        if self.maker is not None and not {"save", "load"} <= methods:
            raise MeshError(
                "restore=True needs a class that can say what its objects have become",
                got=f"{type(self.value).__name__}, which lacks {', '.join(sorted({'save', 'load'} - methods))}",
                expected="save(), which returns a value, and load(value)",
                remedy="add them, or leave restore out",
            )
        return methods

    def _serve(self) -> None:
        placement.enter()
        while (call := self._ready.get()) is not None:
            self._run(self, call)
            del call  # else what it holds would live until the next call


def _made(args: tuple, kwargs: dict[str, Any]) -> Any:
    path, sources, cls, *rest = args
    sys.path.extend(folder for folder in path if folder not in sys.path)
    remember_sources(sources)
    return cls(*rest, **kwargs)
