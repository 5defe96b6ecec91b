"""A node: one process of a mesh in its part as a caller of remote objects, and as a home of some.

The caller's own thread sends a call; answers, and calls of objects here, are received by the one thread of `Exchange`.
A call runs on its object's thread. Invariants: each call is answered once, even if a process dies; and results go
directly from the process that has them to the one that needs them.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import gc
import secrets
import select
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from ...kernels.errors import MeshError, SpmdError
from ...kernels.interrupts import uninterrupted
from ...kernels.limits import named_limits
from ...kernels.processes import Owned
from .. import wire
from . import answers
from .addresses import connected
from .caller import Caller
from .connections import Connection, Exchange
from .handle import plain_name_of
from .protocol import DRIVER, Cancelled, Invoke, NodeId, Raised, Result, SavedResult, SavedState, decode
from .residents import Residents

_MADE_SECONDS = 10.0  # for objects that are being made again
_BUSY_SECONDS = 1.0  # for the thread to finish what it is at, before objects count as in use


class Node(Owned):
    """This process's part in the remote calls of a mesh.

    Args:
        rank: of this process; `DRIVER` in the driver.
        key: the mesh's.
        describe: the mesh in a line, for messages.
        name_of, object_of: see `Contents`.
        elsewhere: gives the address where a rank on another host listens; None for a rank on this host.
        listening: sockets to which others connect; none in the driver, which has no objects.
        around: gives a context for running a method of an object here under the settings of its caller.

    Attributes:
        id: this process.
        caller: the calls that it makes.
        residents: the objects that live here, and calls of them.
        lock: guards all of these.
        closed: why nothing is sent any more, None while it is open.
    """

    def __init__(
        self,
        rank: int,
        key: bytes,
        *,
        describe: Callable[[], str],
        name_of: Callable[[Any], Any],
        object_of: Callable[[Any], Any],
        elsewhere: Callable[[int], tuple[str, int] | None],
        listening: Sequence[socket.socket] = (),
        around: Callable[[Any], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        super().__init__()
        self.id: NodeId = (rank, secrets.randbits(63))
        self.describe = describe
        self.lock = threading.RLock()
        self.closed: str | None = None
        self._remedy = ""
        self._to: dict[int, Connection] = {}  # rank -> the connection over which it is called
        self._dead: set[NodeId] = set()
        self._exchange = Exchange(key, self.id, self, listening, connect=lambda to: connected(key, to, elsewhere(to)))
        self._thread: int | None = None
        self.caller = Caller(self, name_of, object_of)
        self.residents = Residents(self, self.caller, around)
        self.wake, self.tidy = self._exchange.wake, self.caller.gone.tidy

    # -- the thread ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a thread that serves connections; safe in a signal handler."""
        if self._thread is None:
            with uninterrupted(), named_limits():
                if self._thread is None:
                    self._thread = _thread.start_new_thread(self._serve, ())

    def await_readable(self, connection: socket.socket) -> None:
        """Wait until a socket can be read; if somebody connects to this process meanwhile, start the thread.

        A signal alone does not do it: somebody may connect before it is set up, or between Python's last look for
        signals and the wait.
        """
        if self._thread is None:
            waiting = select.poll()
            for one in (connection, *self._exchange.listening):
                waiting.register(one, select.POLLIN)
            if any(fd != connection.fileno() for fd, _ in waiting.poll()):
                self.start()

    def _serve(self) -> None:
        try:
            self._exchange.serve()
        except BaseException as error:
            if self.closed is None:
                self.close(f"its remote calls have failed: {type(error).__name__}: {error}")
                raise
        finally:
            self._exchange.give_back()

    def is_serving_thread(self) -> bool:
        return threading.get_ident() == self._thread

    @property
    def in_use(self) -> bool:
        """Whether objects that this process has made are alive, or its calls are under way."""
        if not self.caller.gone.all_dropped:  # perhaps only by the frames that an error went through
            if self._thread is not None and not self.is_serving_thread():
                self._exchange.await_turn(_BUSY_SECONDS)  # it may have one still that it has just given to a Ref
            gc.collect()
        if self.caller.gone.all_dropped:
            self.caller.restoring.await_made(_MADE_SECONDS)  # what nobody needs any more, and is then released
        with self.lock:
            return not self.caller.gone.all_dropped or self.awaits

    @property
    def awaits(self) -> bool:
        """Whether calls that this process has made are under way."""
        with self.lock:
            return any(connection.pending for connection in self._to.values())

    @property
    def watching(self) -> bool:
        return self.caller.gone.watching

    # -- connections ---------------------------------------------------------------------------------------------------

    def connection(self, rank: int) -> Connection:
        """The connection over which calls go to a rank, made if there is none.

        Raises:
            OSError: no process listens there.
        """
        self.check_own()  # first, since in a fork the thread that holds the lock may not exist
        with self.lock:
            self.check_open()
            found = self._to.get(rank)
            if found is None or found.lost:
                self.start()
                found = self._to[rank] = self._exchange.open(rank)
            return found

    def alive(self, owner: NodeId) -> Connection | None:
        """The connection to a process; None if the process has ended, or this node is closed."""
        if owner in self._dead or self.closed is not None:
            return None
        with contextlib.suppress(OSError):
            return self.connection(owner[0])
        return None

    def lost_error(self, rank: int, what: str) -> SpmdError:
        """The error for a request that gets no answer: its rank has ended, or this node is closed."""
        try:
            self.check_open()
        except MeshError as error:
            return error
        return answers.lost(rank, what, self.describe())

    def check_own(self) -> None:
        if self.foreign:
            raise MeshError(
                "this mesh belongs to the process that this one was forked from", remedy="call objects there"
            )

    def check_open(self) -> None:
        self.check_own()
        if self.closed is not None:
            raise MeshError(f"remote objects are gone: {self.closed}", where=self.describe(), remedy=self._remedy)

    # -- what comes ----------------------------------------------------------------------------------------------------

    def received(self, connection: Connection, packet: wire.Packet) -> None:
        """Handle a message that has come over a connection."""
        msg: Any = decode(packet.head)
        kind = type(msg)
        if kind is Invoke:
            with self.lock:
                self.residents.take(connection, msg, packet)
        elif kind is SavedResult or kind is SavedState:
            self.caller.restoring.take(connection, msg, packet)
        elif kind is Result or kind is Raised or kind is Cancelled:
            self._answer(connection, msg, packet)
        else:
            with self.lock:
                self.residents.do(connection, msg)

    def _answer(self, connection: Connection, msg: Any, packet: wire.Packet) -> None:
        with self.lock:
            waiting = connection.pending.pop(msg.number, None)
            if waiting is None:
                packet.close()
                return
            connection.nbytes -= waiting.nbytes
        if isinstance(msg, Result):
            waiting.settle(None if msg.kept else packet, None)
        elif isinstance(msg, Raised):
            waiting.settle(None, answers.raised(packet, self.describe()))
        else:
            waiting.settle(None, CancelledError(f"{waiting.what} was cancelled before it began"))

    def lost(self, connection: Connection) -> None:
        """Handle the end of a connection: its process has ended, or has closed it."""
        with self.lock:
            if connection.peer is not None:
                if not connection.cut:
                    self._dead.add(connection.peer)
                if connection.outgoing is None:
                    self.residents.caller_gone(connection.peer)
            if connection.outgoing is not None and self._to.get(connection.outgoing) is connection:
                del self._to[connection.outgoing]
            pending, connection.pending = connection.pending, {}
            if connection.peer is not None and connection.outgoing is not None and self.closed is None:
                self.caller.restoring.rank_lost(connection.peer)
        rank = DRIVER if connection.outgoing is None else connection.outgoing
        for waiting in (one for one in pending.values() if not one.again):
            waiting.settle(None, answers.lost(rank, waiting.what, self.describe(), connection.cut))

    def close(self, why: str, remedy: str = "make a new Mesh") -> None:
        """End all calls; nothing is received or sent any more."""
        if self.foreign:
            return
        with uninterrupted():
            with self.lock:
                if self.closed is not None:
                    return
                self.closed, self._remedy = why, remedy
                self.caller.gone.close()
                waiting = [one for connection in self._to.values() for one in connection.pending.values()]
            for one in waiting:
                with contextlib.suppress(Exception):
                    one.settle(None, MeshError(f"{one.what} has no result: {why}", remedy=remedy))
            self.caller.restoring.close()
            if self._thread is None:
                self._exchange.give_back()
            else:
                self._exchange.close()


def driver_node(
    key: bytes,
    describe: Callable[[], str],
    mesh: Callable[[], Any],
    object_of: Callable[[Any], Any],
    elsewhere: Callable[[int], tuple[str, int] | None],
) -> Node:
    """The driver's node: it makes calls, and has no objects."""
    name_of = functools.partial(plain_name_of, mesh=mesh)
    return Node(DRIVER, key, describe=describe, name_of=name_of, object_of=object_of, elsewhere=elsewhere)
