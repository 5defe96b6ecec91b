"""The objects that live in this process, the calls that wait for them, and what came of the calls.

Each object has a thread of its own, so that one that computes for long keeps no other waiting, nor a region that runs
on the main thread. Invariants: an object does one call at a time; calls of one caller run in the order in which they
were made, and a call that waits for its arguments lets other callers' go before it; the result of a call is fixed when
the call ends (what the object does later does not change it), and stays until the caller needs it no more.
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
from ...kernels.errors import MeshError, message
from ...kernels.network.codec import Message
from .. import wire
from ..driver.snapshot import remember_sources
from .connections import Connection
from .handle import methods_of
from .protocol import LOAD, RESTORABLE, Invoke, Name

_UNFINISHED = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """A call of an object of this process.

    Attributes:
        name: of the call.
        origin: over which it came.
        invoke, packet: the message.
        arguments: results of other calls, by their index among `invoke.refs`, as they come.
        missing: those that have not come yet, by place.
        state: "queued", "running", "done" or "cancelled".
        waits_for: the call whose result its method waits for without a limit, and the process that has that.
        deadlock: the chain of calls through which it waits for itself, once that is known.
        answer: what came of it, and its content.
        asked: who else wants that.
        wanted: its caller has not said yet that it needs the result no more.
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
        """Give back what its result takes."""
        if self.answer is not None:
            self.answer[1].close()
        self.packet.close()


class LiveObject:
    """An object, its thread, and the calls that wait for it.

    Args:
        serial: tells it from others that call from this process.
        run: does a call, on the object's thread.

    Attributes:
        value: the object itself; None until it is made.
        maker: where what it has become is sent after each call, if it is one that is restored.
        running: the call that it is at.
        closing: no more calls will come.
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

    # The node's lock is held in what follows, except on the object's thread.

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
        """Let a call run, if it is the next of its caller and has its arguments."""
        waiting = self._callers.get(self._caller(call))
        if waiting and waiting[0] is call and not call.missing and call.state == "queued":
            self._ready.put(call)

    def left(self, call: Call) -> None:
        """A call is over, or is not to be begun: its caller's next one may run."""
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
        """Let go of the object, and end its thread; what is under way is finished."""
        self.value = None
        if self._thread is not None:
            self._ready.put(None)

    def do(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Do what a call asks for."""
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
                message(
                    "restore=True needs a class that can say what its objects have become",
                    got=f"{type(self.value).__name__}, which lacks {', '.join(sorted({'save', 'load'} - methods))}",
                    expected="save(), which returns a value, and load(value)",
                    remedy="add them, or leave restore out",
                )
            )
        return methods

    def _serve(self) -> None:
        while (call := self._ready.get()) is not None:
            self._run(self, call)
            del call  # what it holds must not live until the next one


def _made(args: tuple, kwargs: dict[str, Any]) -> Any:
    path, sources, cls, *rest = args
    sys.path.extend(folder for folder in path if folder not in sys.path)
    remember_sources(sources)
    return cls(*rest, **kwargs)
