"""A process as a caller of remote objects: it sends calls, waits for results, and releases what it no longer needs.

Invariants: calls of one thread go out in order; at most `CALLS` calls, with `BYTES` of arguments, are unanswered at one
process, and a thread that would send more waits; results that are arguments of a call are kept until that call is
answered; an error that nobody has asked for is raised at its thread's next call, or when the mesh is closed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from ...kernels.arguments import is_number
from ...kernels.errors import MeshError, PeerLost, SpecError
from ...kernels.interrupts import raised_by_handler, uninterrupted
from .. import wire
from . import answers
from .connections import Connection, Post
from .contents import Contents
from .gone import Gone
from .handle import Remote, handle_of
from .pending import Waiting, duplicate, new_future, result_of, settles
from .protocol import RESTORABLE, Cancel, Fetch, Invoke, Name, NodeId, Probe
from .reference import Ref
from .restoring import Restorable, Restoring, Sent

CALLS, BYTES = 1024, 1 << 30
REPLACED_SECONDS = 60.0  # how long to wait for a dead rank to be replaced
PROBE_SECONDS = 0.1  # how long a method waits for a call before it checks whether it waits for itself


class Unreached(Exception):
    """A rank on which an object was to be made lets nobody in: it has died, and nothing was sent to it."""


class Caller:
    """The calls that this process makes.

    Args:
        post: carries them.
        name_of, object_of: see `Contents`.
    """

    def __init__(self, post: Post, name_of: Callable[[Any], Any], object_of: Callable[[Any], Any]):
        self._post = post
        self.contents = Contents(self, post.describe, name_of, object_of)
        self._numbers = itertools.count(1)
        self.restoring = Restoring(post, self.next_number, REPLACED_SECONDS)
        self.gone = Gone(post, self.restoring)
        self.raise_unseen = self.gone.raise_unseen

    # -- calls ---------------------------------------------------------------------------------------------------------

    def make(self, rank: int, args: tuple, kwargs: dict[str, Any], label: str, *, restore: bool) -> Remote:
        """Make an object on a rank: `args` are the module path, sources, the class and its arguments.

        Args:
            restore: make it again if its rank dies.

        Raises:
            Unreached: no process listens there; nothing has been sent.
        """
        try:
            connection, name = self._post.connection(rank), (self._post.id, self.next_number())
        except OSError as error:
            if raised_by_handler(error):
                raise
            raise Unreached from error
        packet, refs = self.contents.of_call(args, kwargs, label)
        if restore and refs:
            packet.close()
            raise MeshError(f"{label} is to be restored, and was given a Ref", remedy="give it ref.get()")
        making = duplicate(packet)
        try:
            self.gone.made.add(name)
            ref = self._send(connection, (rank, 0), name, RESTORABLE if restore else "", packet, refs, label)
            methods = ref.get()
            assert connection.peer is not None
            with uninterrupted():
                handle = Remote(self, connection.peer, name, label, methods)
                self.gone.watch(handle, connection.peer, name)
            if restore:
                one = Restorable(name, label, connection.peer, making, handle=weakref.ref(handle))
                self.restoring.add(one, connection)
            else:
                making.close()
            return handle
        except BaseException as error:  # the class has raised, or Ctrl-C was pressed: nobody can call what is made
            making.close()
            self.gone.drop(connection.peer or (rank, 0), name)
            if isinstance(error, PeerLost) and connection.peer is None:
                # A process that was about to die has accepted the connection, and read nothing.
                raise Unreached from None
            raise

    def invoke(self, handle: Remote, method: str, args: tuple, kwargs: dict[str, Any]) -> Ref:
        """Call a method of an object."""
        self.raise_unseen()
        owner, label = handle._owner, f"{handle._label}.{method}"
        self._post.check_open()
        packet, refs = self.contents.of_call(args, kwargs, label)
        restorable = self.restoring.objects.get(handle._named) if self.restoring.objects else None
        connection = self._post.alive(owner)
        if connection is None and restorable is None:
            packet.close()
            with uninterrupted():
                ref = self._watched(Ref(self, owner, (self._post.id, 0), label))
            ref.future.set_exception(answers.lost(owner[0], handle._label, self._post.describe()))
            return ref
        return self._send(connection, owner, handle._named, method, packet, refs, label, restorable)

    def _send(
        self,
        connection: Connection | None,
        owner: NodeId,
        target: Name,
        method: str,
        packet: wire.Packet,
        refs: tuple[Ref, ...],
        label: str,
        restorable: Restorable | None = None,
    ) -> Ref:
        try:
            caller = self._post.residents.current()
            if connection is not None:
                self._wait_for_room(connection, owner)
            with uninterrupted(), self._post.lock:
                number = target[1] if method in ("", RESTORABLE) else self.next_number()
                owner = owner if restorable is None else restorable.owner  # it may have been made again just now
                where = owner if restorable is None else (owner[0], 0)  # 0: in whichever process the object is then
                ref = self._watched(Ref(self, where, (self._post.id, number), label))
                waiting = Waiting(self._settler(ref, restorable), label, ref.future, ref.name, refs, packet.nbytes)
                names = tuple((one.owner, one.name) for one in refs)
                released = self.gone.results_of(owner)
                msg = Invoke(number, owner[1], target, method, caller, names, released)
                if restorable is not None:
                    connection = self.restoring.note(restorable, Sent(msg, packet, waiting))
                elif connection is None or connection.lost or self._post.closed is not None:
                    ref.future.set_exception(answers.lost(owner[0], label, self._post.describe()))
                    return ref
                if connection is not None:
                    connection.pending[number] = waiting
                    connection.nbytes += packet.nbytes
                    connection.send(msg, packet)
        finally:
            packet.close()
        return ref

    def _watched(self, ref: Ref) -> Ref:
        self.gone.watch(ref, ref.owner, ref.name, ref.future.unseen)
        return ref

    def next_number(self) -> int:
        """A number for a message, used once by this process."""
        return next(self._numbers)

    def _settler(self, ref: Ref, restorable: Restorable | None) -> Callable[[Any, BaseException | None], None]:
        """A `Waiting.settle` for a Ref, which does not keep the Ref alive."""
        future, alive = ref.future, weakref.ref(ref)

        def settle(packet: Any, error: BaseException | None) -> None:
            if restorable is not None and (answered := alive()) is not None:
                answered.owner = restorable.owner  # where it has run
            if error is None:
                future.set_result(packet)
                return
            future.set_exception(error)
            if alive() is None:
                self.gone.note_unseen(future.unseen)

        return settle

    def _wait_for_room(self, connection: Connection, owner: NodeId) -> None:
        while len(connection.pending) >= CALLS or connection.nbytes >= BYTES:
            with self._post.lock:
                oldest = next((one for one in connection.pending.values() if one.name is not None), None)
            if oldest is None or oldest.future.done():
                time.sleep(0)  # its answer is being taken
                continue
            try:
                self.wait(oldest.future, None, (owner, oldest.name))
            except Exception as error:  # whoever has the call's Ref gets its error
                if raised_by_handler(error):
                    raise
            if not oldest.future.done():
                raise MeshError(
                    f"{CALLS} calls, or {BYTES >> 20} MB of arguments, are under way, and no room can come free",
                    where=self._post.describe(),
                    remedy="a method that calls its own object must end before those calls begin; call fewer",
                )

    def cancel(self, ref: Ref) -> bool:
        """Cancel a call that has not begun; whether that was in time."""
        future = new_future()

        def settle(packet: Any, error: BaseException | None) -> None:
            future.set_result(error is None and pickle.loads(packet.data))

        self._ask(ref.owner, lambda number: Cancel(number, ref.name[1]), Waiting(settle, ref.label))
        return self.wait(future, None, None)

    def check_own(self) -> None:
        """Raise an error in a fork of the process that made the calls: their answers go to the parent."""
        self._post.check_own()

    # -- results -------------------------------------------------------------------------------------------------------

    def wait(self, future: Future, timeout: float | None, waits_for: tuple[NodeId, Name] | None) -> Any:
        """The result of a future.

        Args:
            waits_for: (process, call) of the future, if only its result can end the wait.

        Raises:
            the future's error; TimeoutError; MeshError: the waiting method waits for itself.
        """
        self.check_own()
        if timeout is not None and (not is_number(timeout) or math.isnan(timeout)):
            expected = "a number of seconds, or None for as long as it takes"
            raise SpecError("a Ref got a bad timeout", got=repr(timeout), expected=expected, remedy="write timeout=10")
        if future.done():
            return future.result()
        if self._post.is_serving_thread():
            raise MeshError("a callback waits for a result that is not there", remedy="wait in a thread")
        call = self._post.residents.call_here()
        if call is None or waits_for is None:
            try:
                return result_of(future, timeout)
            except FutureTimeout as error:
                if future.done() or raised_by_handler(error):  # the call's own error, or the program's
                    raise
                raise TimeoutError(f"no result within {timeout:g} s") from None
        seconds = PROBE_SECONDS
        call.waits_for = waits_for
        try:
            while True:
                with contextlib.suppress(FutureTimeout):
                    return result_of(future, seconds)
                if future.done():
                    return future.result()
                if call.deadlock:
                    raise MeshError(
                        self._post.residents.deadlock_text(call),
                        where=self._post.describe(),
                        remedy="return the Ref instead of waiting for it, or call another object",
                    )
                with self._post.lock:
                    self._post.residents.probes.send(waits_for[0], Probe(call.name, waits_for[1], (call.name,)))
                seconds = min(2 * seconds, 2.0)
        finally:
            with self._post.lock:
                call.waits_for, call.deadlock = None, ()

    def read_result(self, ref: Ref, outcome: wire.Packet | None, timeout: float | None) -> Any:
        """A call's result: `outcome`, or if that is None, what the process that ran the call has kept."""
        if outcome is None:
            outcome = self.wait(self.fetch(ref.owner, ref.name, ref.label), timeout, None)
        try:
            return self.contents.loads(outcome)
        finally:
            outcome.close()

    def fetch(self, owner: NodeId, name: Name, what: str) -> Future:
        """Ask a process for the result of a call; returns a future of the packet."""
        future = new_future()
        self._ask(owner, lambda number: Fetch(number, owner[1], name), Waiting(settles(future), what))
        return future

    def object_of(self, name: tuple) -> Any:
        """The handle, or the result, that a name stands for (see `handle.named`)."""
        if name[0] != "ref":
            return handle_of(name, self)
        _, owner, call = name
        packet = self.wait(self.fetch(owner, call, "the result of a call"), None, (owner, call))
        try:
            return self.contents.loads(packet)
        finally:
            packet.close()

    def _ask(self, owner: NodeId, make: Callable[[int], Any], waiting: Waiting) -> None:
        """Send a request to a process, for which `waiting` takes the answer."""
        connection = self._post.alive(owner)
        with self._post.lock:
            if connection is not None and not connection.lost:
                number = self.next_number()
                connection.pending[number] = waiting
                connection.send(make(number))
                return
        waiting.settle(None, self._post.lost_error(owner[0], waiting.what))
