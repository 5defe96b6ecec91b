"""Objects that are made again if their rank has died: `mesh.remote(..., restore=True)`.

After each call such an object sends its state (`save`) to the process that has made it, and the call is answered when
the state has arrived. So when the rank dies, the object is made again on the replacement rank, gets its last state
(`load`), and does the calls that were not answered. Invariant: each of the maker's calls is done once, since the last
one that was done is known by its number, with its result; a call whose rank has died with it `ATTEMPTS` times is lost.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from ...kernels.errors import MeshError
from .. import wire
from . import answers
from .connections import Connection, Post
from .contents import Contents
from .objects import Call, LiveObject
from .pending import Waiting, duplicate
from .protocol import LOAD, RESTORABLE, Invoke, Kept, Name, NodeId, Raised, Release, SavedResult, SavedState

ATTEMPTS = 3  # to make an object, or a call of one, while its rank dies
PAUSE_SECONDS = 0.02  # between two tries to reach a rank's replacement


@dataclasses.dataclass(slots=True, eq=False)
class Sent:
    """An unanswered call: its message, and what takes the answer."""

    invoke: Invoke
    packet: wire.Packet
    waiting: Any


@dataclasses.dataclass(slots=True, eq=False)
class Restorable:
    """What the maker of an object keeps, to make it again.

    Attributes:
        owner: the process where it lives.
        making: the arguments that it was made with.
        state: what it last saved.
        last: the maker's call that it has done last: number, whether it failed, and result.
        coming: the same for a call whose state has not arrived yet.
        sent: the maker's unanswered calls, by number.
        away: its rank has died, and it is not made again yet.
        failed: making it again has failed; the next call tries once more.
        first: the number of the first unanswered call when its rank died, and how often in a row that was this call.
        handle: a weak reference to its handle.
    """

    name: Name
    label: str
    owner: NodeId
    making: wire.Packet
    state: wire.Packet | None = None
    last: tuple[int, bool, wire.Packet] | None = None
    coming: tuple[int, bool, wire.Packet] | None = None
    sent: dict[int, Sent] = dataclasses.field(default_factory=dict)
    away: bool = False
    failed: bool = False
    first: tuple[int, int] = (0, 0)
    handle: Callable[[], Any] = lambda: None

    def drop_coming(self) -> None:
        """Forget a result whose state will not come."""
        if self.coming is not None:
            self.coming[2].close()
            self.coming = None

    def close(self) -> None:
        self.drop_coming()
        for packet in (self.making, self.state, None if self.last is None else self.last[2]):
            if packet is not None:
                packet.close()


class Restoring:
    """The restorable objects that this process has made.

    Args:
        post: carries messages.
        next_number: gives a number for a message, used once.
        seconds: how long to wait for a dead rank to be replaced.
    """

    def __init__(self, post: Post, next_number: Callable[[], int], seconds: float):
        self._post, self._next_number, self._seconds = post, next_number, seconds
        self.objects: dict[Name, Restorable] = {}
        self._making: set[Restorable] = set()

    def add(self, one: Restorable, connection: Connection) -> None:
        """Add an object that was made."""
        with self._post.lock:
            self.objects[one.name] = one
            if connection.lost:
                self.rank_lost(one.owner)

    def note(self, one: Restorable, sent: Sent) -> Connection | None:
        """Note a call; returns the connection for it, or None if it will be sent when the object is made again.

        The node's lock is held from when the call's message was made for the object's owner until it is sent.
        """
        number, settle = sent.invoke.number, sent.waiting.settle
        sent.packet, sent.waiting.again = duplicate(sent.packet), True
        one.sent[number] = sent

        def answered(packet: Any, error: BaseException | None) -> None:
            with self._post.lock:
                mine = one.sent.pop(number, None)
            if mine is not None:
                mine.packet.close()
            settle(packet, error)

        sent.waiting.settle = answered
        if one.failed:
            one.failed = False
            self._start(one)
        connection = None if one.away else self._post.alive(one.owner)
        # It leads to another process if the owner has just ended: once that is noticed, the object is made again.
        return connection if connection is not None and connection.peer == one.owner else None

    def take(self, connection: Connection, msg: Any, packet: wire.Packet) -> None:
        """Take what an object has sent after a call: the result, or its state."""
        with self._post.lock:
            one = self.objects.get(msg.target)
            if one is None or one.owner != connection.peer:
                packet.close()
            elif isinstance(msg, SavedResult):
                one.coming = (msg.call, msg.failed, packet)
            else:
                if one.state is not None:
                    one.state.close()
                one.state = packet
                if one.coming is not None:
                    if one.last is not None:
                        one.last[2].close()
                    one.last, one.coming = one.coming, None
        if isinstance(msg, SavedState):
            connection.send(Kept(msg.number))

    def forget(self, name: Name) -> None:
        """Forget an object whose handle is gone."""
        one = self.objects.pop(name, None)
        if one is None:
            return
        sent, one.sent = one.sent, {}
        one.close()
        for call in sent.values():
            call.packet.close()
            call.waiting.again = False  # from now on like calls of any other object
            if one.away:
                call.waiting.settle(None, answers.lost(one.owner[0], one.label, self._post.describe()))

    def rank_lost(self, peer: NodeId) -> None:
        """A process has ended: make its objects again; the node's lock is held."""
        for one in self.objects.values():
            if one.owner == peer and not one.away:
                one.drop_coming()
                one.away = True
                self._start(one)

    def close(self) -> None:
        """Forget all objects."""
        with self._post.lock:
            for name in [*self.objects]:
                self.forget(name)

    def await_made(self, seconds: float) -> None:
        """Wait, at most for so long, while objects are being made again."""
        end = time.monotonic() + seconds
        while self._making and time.monotonic() < end:
            time.sleep(PAUSE_SECONDS)

    def _start(self, one: Restorable) -> None:
        self._making.add(one)
        threading.Thread(target=self._make_again, args=(one,), name="spmd-restore", daemon=True).start()

    def _make_again(self, one: Restorable) -> None:
        try:
            self._try_to_make(one)
        finally:
            self._making.discard(one)

    def _try_to_make(self, one: Restorable) -> None:
        end = time.monotonic() + self._seconds
        while time.monotonic() < end and self._post.closed is None and one.name in self.objects:
            try:
                connection = self._post.connection(one.owner[0])
            except (OSError, MeshError):  # not replaced yet, or closed meanwhile
                time.sleep(PAUSE_SECONDS)
                continue
            if self._made_on(connection, one):
                return
            time.sleep(PAUSE_SECONDS)
        self._fail(one, answers.lost(one.owner[0], one.label, self._post.describe()))

    def _fail(self, one: Restorable, error: BaseException) -> None:
        """Fail the calls of an object that could not be made again; the next call tries once more."""
        with self._post.lock:
            sent, one.sent, one.failed = one.sent, {}, True
        for call in sent.values():
            call.packet.close()
            call.waiting.settle(None, error)

    def _made_on(self, connection: Connection, one: Restorable) -> bool:
        """Make an object again over a connection, and send its unanswered calls; False if the process has ended."""
        failed = self._invoke(connection, one, Invoke(one.name[1], 0, one.name, RESTORABLE, 0, (), ()), one.making)
        if connection.peer is None or connection.lost:
            return False
        if failed is None and one.state is not None:
            msg = Invoke(self._next_number(), connection.peer[1], one.name, LOAD, 0, (), ())
            failed = self._invoke(connection, one, msg, one.state)
            if connection.lost:
                return False
        if failed is not None:
            connection.send(Release((), (one.name,)))
            self._fail(one, failed)
            return True
        with self._post.lock:
            if connection.lost:
                return False
            if one.name not in self.objects:  # its handle went meanwhile
                connection.send(Release((), (one.name,)))
                return True
            one.owner, one.away = connection.peer, False
            if (handle := one.handle()) is not None:
                handle._owner = one.owner
            sent, one.sent = one.sent, {}
            if not connection.lost:
                done = {0 if one.last is None else one.last[0]}
                hopeless = self._hopeless(one, [number for number in sent if number not in done])
                one.sent = {number: call for number, call in sent.items() if number not in done | hopeless}
                for number, call in one.sent.items():
                    connection.pending[number] = call.waiting
                    connection.nbytes += call.waiting.nbytes
                    call.invoke = dataclasses.replace(call.invoke, incarnation=one.owner[1], released=())
                    connection.send(call.invoke, call.packet)
                sent = {number: call for number, call in sent.items() if number in done | hopeless}
        for call in sent.values():
            call.packet.close()
            if one.last is None or call.invoke.number != one.last[0]:
                call.waiting.settle(None, answers.lost(one.owner[0], one.label, self._post.describe()))
            else:
                _, was_error, packet = one.last
                error = answers.raised(packet, self._post.describe()) if was_error else None
                call.waiting.settle(None if was_error else duplicate(packet), error)
        return True

    @staticmethod
    def _hopeless(one: Restorable, unanswered: list[int]) -> set[int]:
        """The call that is given up, if there is one, since ranks have died with it too often."""
        number = min(unanswered, default=0)
        one.first = (number, one.first[1] + 1 if number == one.first[0] else 1)
        return {number} if number and one.first[1] >= ATTEMPTS else set()

    def _invoke(
        self, connection: Connection, one: Restorable, msg: Invoke, packet: wire.Packet
    ) -> BaseException | None:
        """Send a call, and wait for the answer; returns the error, if it is one."""
        done, errors = threading.Event(), []

        def settle(answer: wire.Packet | None, error: BaseException | None) -> None:
            if answer is not None:
                answer.close()
            if error is not None:
                errors.append(error)
            done.set()

        with self._post.lock:
            if connection.lost:
                return None
            connection.pending[msg.number] = Waiting(settle, one.label)
            connection.send(msg, packet)
        done.wait()
        return errors[0] if errors else None


class Saving:
    """States of this process's objects on their way to the makers; see `Restoring`."""

    def __init__(self, post: Post, contents: Contents):
        self._post, self._contents = post, contents
        self._numbers = itertools.count(1)
        self._coming: dict[int, threading.Event] = {}

    def saved(self, live: LiveObject, call: Call, kind: type, packet: wire.Packet) -> tuple[type, wire.Packet]:
        """Send an object's state to its maker, and wait until it is kept there: only then is the call's answer sent."""
        assert live.maker is not None
        try:
            state, _ = self._contents.of_result(live.value.save(), f"{type(live.value).__name__}.save")
        except BaseException as error:
            packet.close()
            return Raised, answers.packed(error, self._post.id[0])
        number, kept = next(self._numbers), threading.Event()
        self._coming[number] = kept
        with self._post.lock:
            if call.name[0] == live.name[0]:
                live.maker.send(SavedResult(live.name, call.name[1], kind is Raised), packet)
            live.maker.send(SavedState(number, live.name), state)
        state.close()
        while not kept.wait(1.0) and not live.maker.lost:
            pass
        del self._coming[number]
        return kind, packet

    def kept(self, number: int) -> None:
        """Note that the maker has kept the state with this number."""
        if number in self._coming:
            self._coming[number].set()
