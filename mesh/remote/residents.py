"""The remote objects of this process: calls of them arrive, run, and are answered; results are kept while needed.

Invariants: as in `objects`; a result that is asked for before its call has arrived is sent as soon as it is there; and
nothing is kept for a process that has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from ...kernels.errors import MeshError, PeerLost
from .. import wire
from ..rank.forks import end_fork
from . import answers
from .caller import Caller
from .connections import Connection, Post
from .objects import Call, LiveObject
from .pending import duplicate
from .probes import Probes
from .protocol import (
    LOAD,
    RESTORABLE,
    Cancel,
    Cancelled,
    Fetch,
    Invoke,
    Kept,
    Name,
    NodeId,
    Probe,
    Raised,
    Release,
    Result,
    WaitsForItself,
)
from .reference import Ref
from .restoring import Saving

PUSHED = 1 << 16  # results up to this many bytes are sent with the answer; larger ones are kept until they are fetched

Waiter = Callable[[type, wire.Packet], None]  # takes an answer: its kind (`Result`, or how it failed), and packet


class Residents:
    """All objects of this process.

    Args:
        post: carries messages.
        caller: this process's own calls.
        around: gives a context for running a method under the settings of its caller.
    """

    def __init__(self, post: Post, caller: Caller, around: Callable[[Any], contextlib.AbstractContextManager]):
        self._post, self._caller, self._around, self._lock = post, caller, around, post.lock
        self.objects: dict[Name, LiveObject] = {}
        self._calls: dict[Name, Call] = {}  # calls that have arrived, until their callers no longer need the results
        self._expected: dict[Name, list[Waiter]] = {}  # requests for results of calls that have not arrived yet
        self._latest: dict[NodeId, int] = {}  # by calling process, the number of its latest call
        self._gone: set[NodeId] = set()
        self._serials = itertools.count(1)
        self._here = threading.local()
        self._saving = Saving(post, caller.contents)
        self.probes = Probes(post.id, self._calls, self.objects, post.connection)

    # -- on an object's own thread -------------------------------------------------------------------------------------

    def call_here(self) -> Call | None:
        """The call that this thread runs, if it is an object's."""
        return getattr(self._here, "call", None)

    def current(self) -> int:
        """The serial number of the object whose method this thread runs; 0 if it runs none."""
        return getattr(self._here, "serial", 0)

    def _run(self, live: LiveObject, call: Call) -> None:
        with self._lock:
            if call.state == "cancelled":
                return
            call.state, live.running = "running", call
        self._here.call, self._here.serial = call, live.serial
        kind: type = Result
        try:
            settings, args, kwargs = self._read(call)
            with self._around(settings):
                result = live.do(call.invoke.method, args, kwargs)
            if self._post.foreign:
                end_fork()
            packet, refs = self._caller.contents.of_result(result, f"{type(live.value).__name__}.{call.invoke.method}")
            if refs and live.maker is not None:
                raise MeshError("an object that is restored returned a Ref", remedy="return its result")
        except BaseException as error:
            if self._post.foreign:
                end_fork(error)
            kind, packet, refs = Raised, answers.packed(error, self._post.id[0]), ()
        finally:
            self._here.call = None
        if refs:
            later = threading.Thread(target=self._finish_later, args=(live, call, packet, refs), daemon=True)
            later.start()
            with self._lock:
                live.running = None
                live.left(call)
            return
        if live.maker is not None and call.invoke.method not in (RESTORABLE, LOAD):
            kind, packet = self._saving.saved(live, call, kind, packet)
        self._finish(live, call, kind, packet)

    def _read(self, call: Call) -> tuple[Any, tuple, dict[str, Any]]:
        if call.invoke.method == LOAD:  # the content is just what `save` has returned
            return None, (self._caller.contents.loads(call.packet),), {}

        def argument(index: int) -> Any:
            return self._caller.contents.loads(call.arguments[index])

        try:
            return self._caller.contents.loads(call.packet, argument)
        finally:
            call.packet.close()
            for packet in call.arguments.values():
                packet.close()
            call.arguments.clear()

    def _finish_later(self, live: LiveObject, call: Call, first: wire.Packet, refs: tuple[Ref, ...]) -> None:
        """Finish a call whose result contains Refs, once their results are there."""
        kind: type = Result
        try:
            contents = self._caller.contents
            values = [ref.get() for ref in refs]
            packet = contents.dumps(contents.loads(first, values.__getitem__), "a result")[0]
        except BaseException as error:
            kind, packet = Raised, answers.packed(error, self._post.id[0])
        finally:
            first.close()
        self._finish(live, call, kind, packet, left=True)

    def _finish(self, live: LiveObject, call: Call, kind: type, packet: wire.Packet, *, left: bool = False) -> None:
        with self._lock:
            live.done += 1
            self._settle(call, "done", kind, packet)
            if not call.wanted:
                self._forget(call)
            if not left:
                live.running = None
                live.left(call)

    def _settle(self, call: Call, state: str, kind: type, packet: wire.Packet) -> None:
        """Set a call's state and answer, and send the answer to its caller and whoever else has asked for it."""
        call.state, call.answer = state, (kind, packet)
        for waiter in call.asked:
            waiter(kind, packet)
        call.asked.clear()
        if kind is Cancelled:
            call.origin.send(Cancelled(call.name[1]))
        elif kind is Raised:
            call.origin.send(Raised(call.name[1]), packet)
        elif call.wanted and packet.nbytes <= PUSHED:
            call.origin.send(Result(call.name[1], False), packet)
        else:
            call.origin.send(Result(call.name[1], True))

    # -- on the exchange's thread --------------------------------------------------------------------------------------

    def take(self, connection: Connection, msg: Invoke, packet: wire.Packet) -> None:
        """Take a call of an object of this process that has arrived."""
        assert connection.peer is not None
        name = (connection.peer, msg.number)
        call = Call(name, connection, msg, packet)
        with self._lock:
            self._latest[connection.peer] = max(msg.number, self._latest.get(connection.peer, 0))
            self._release(connection.peer, msg.released)
            self._calls[name] = call
            call.asked = self._expected.pop(name, [])
            live, problem = self._target(msg, call)
            if live is None:
                self._settle(call, "done", Raised, answers.packed(problem, self._post.id[0]))
                return
            call.missing = set(range(len(msg.refs)))
            live.add(call)
        for index, (owner, wanted) in enumerate(msg.refs):
            self._gather(live, call, index, owner, wanted)

    def _target(self, msg: Invoke, call: Call) -> tuple[LiveObject | None, Any]:
        if msg.method in ("", RESTORABLE):
            label, serial = f"object-{msg.number}", next(self._serials)
            made = self.objects[msg.target] = LiveObject(msg.target, label, serial, self._run)
            made.maker = call.origin if msg.method else None
            return made, None
        if msg.incarnation != self._post.id[1]:
            return None, answers.lost(self._post.id[0], "this object", self._post.describe())
        live = self.objects.get(msg.target)
        if live is None or live.closing:
            return None, answers.gone("this object", self._post.describe())
        return live, None

    def _gather(self, live: LiveObject, call: Call, index: int, owner: NodeId, wanted: Name) -> None:
        """Get the result of another call that is an argument of this one."""

        def came(packet: wire.Packet, failed: bool) -> None:
            with self._lock:
                if call.state != "queued":
                    packet.close()
                elif failed:  # then this call cannot begin
                    self._settle(call, "cancelled", Raised, packet)
                    live.left(call)
                else:
                    call.arguments[index] = packet
                    call.missing.discard(index)
                    live.consider(call)

        if owner[0] == self._post.id[0] and owner[1] in (0, self._post.id[1]):
            self._ask(wanted, lambda kind, packet: came(duplicate(packet), kind is not Result))
            return

        def fetched(future: Future) -> None:
            error = future.exception()
            if error is None:
                came(future.result(), False)
            else:
                came(answers.packed(error, owner[0]), True)

        self._caller.fetch(owner, wanted, "an argument").add_done_callback(fetched)

    def _ask(self, name: Name, waiter: Waiter) -> None:
        """Give a waiter the result of a call, now or as soon as it is there."""
        with self._lock:
            call = self._calls.get(name)
            if call is not None and call.answer is not None:
                waiter(*call.answer)
            elif call is not None:
                call.asked.append(waiter)
            elif name[0] in self._gone or self._latest.get(name[0], 0) >= name[1]:
                text = "a result is gone: the process that asked for it needs it no more, or has ended"
                waiter(Raised, answers.packed(PeerLost(text, name[0][0]), self._post.id[0]))
            else:
                self._expected.setdefault(name, []).append(waiter)

    def do(self, connection: Connection, msg: Any) -> None:
        """Handle any other message."""
        peer: Any = connection.peer
        if isinstance(msg, Fetch):

            def send(kind: type, packet: wire.Packet) -> None:
                connection.send(Result(msg.number, False) if kind is Result else Raised(msg.number), packet)

            if msg.incarnation in (0, self._post.id[1]):
                self._ask(msg.call, send)
            else:
                lost = answers.lost(self._post.id[0], "a result", self._post.describe())
                send(Raised, answers.packed(lost, self._post.id[0]))
        elif isinstance(msg, Kept):
            self._saving.kept(msg.number)
        elif isinstance(msg, Release):
            with self._lock:
                self._release(peer, msg.calls)
                for name in msg.objects:
                    self._drop(name)
        elif isinstance(msg, Cancel):
            in_time = self._cancel((peer, msg.call))
            connection.send(Result(msg.number, False), wire.Packet(pickle.dumps(in_time)))
        elif isinstance(msg, Probe):
            with self._lock:
                self.probes.look(msg)
        elif isinstance(msg, WaitsForItself):
            with self._lock:
                self.probes.found(msg.waiting, msg.chain)

    def _cancel(self, name: Name) -> bool:
        with self._lock:
            call = self._calls.get(name)
            if call is None or call.state != "queued":
                return False
            error = answers.packed(CancelledError("the call whose result this needs was cancelled"), self._post.id[0])
            self._settle(call, "cancelled", Cancelled, error)
            live = self.objects.get(call.invoke.target)
            if live is not None:
                live.left(call)
            return True

    def _release(self, caller: NodeId, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            call = self._calls.get((caller, number))
            if call is not None:
                call.wanted = False
                if call.answer is not None:
                    self._forget(call)

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.name, None)
        call.forget()

    def _drop(self, name: Name) -> None:
        live = self.objects.get(name)
        if live is not None:
            live.closing = True
            if live.idle:
                live.end()
            del self.objects[name]

    def caller_gone(self, peer: NodeId) -> None:
        """Drop what belongs to a calling process that has ended."""
        with self._lock:
            self._gone.add(peer)
            for call in [call for call in self._calls.values() if call.name[0] == peer]:
                call.wanted = False
                if call.state == "queued":
                    self._cancel(call.name)
                if call.answer is not None:
                    self._forget(call)
            for name in [name for name in self._expected if name[0] == peer]:
                for waiter in self._expected.pop(name):
                    text = "the process that has made this call has ended before it reached its object"
                    waiter(Raised, answers.packed(PeerLost(text, peer[0]), self._post.id[0]))
            for name in [name for name in self.objects if name[0] == peer]:
                self._drop(name)

    def deadlock_text(self, call: Call) -> str:
        """The problem with a call that waits for itself, in words."""
        live = self.objects.get(call.invoke.target)
        method = f"{type(live.value).__name__}.{call.invoke.method}" if live is not None else "this method"
        others = len(call.deadlock) - 2
        by_way = f", by way of {others} more" if others > 0 else ""
        return f"{method} waits for a call that cannot begin, or end, before {method} has{by_way}"
