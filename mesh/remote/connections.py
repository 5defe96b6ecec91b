"""Connections between the processes of a mesh, independent of the main thread: one thread in each serves all of them.

Each process listens under a name that belongs to this mesh; whoever has a message for it connects, once, and answers
come back over the same connection. Invariants: nothing but a greeting of a fixed length is read from a connection until
that has proved, with the mesh's key and a number used once, that the other end is a process of this mesh; on one host
the kernel must also say that it belongs to the same user. And the thread never waits for one peer: what a socket does
not take is kept.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...kernels.errors import SpmdError
from ...kernels.interrupts import uninterrupted
from ...kernels.limits import named_limits
from ...kernels.listening import READ, WRITE, Listening
from ...kernels.network.codec import Message
from .. import wire
from ..hosts.coded import CodedReceiver, CodedSender, NotOfThisMesh, keep_alive
from ..hosts.greeting import Greeted, answering, opening
from .addresses import same_user
from .protocol import NodeId, encode

_ID = struct.Struct("<qQ")
_STRANGERS = 32  # connections that may be open before their greeting is complete
_PAUSE_SECONDS = 0.1  # without accepting connections, if no more files can be opened
_TIDY_SECONDS = 0.1  # between two looks at what is no longer needed, while there are Refs or handles


class Connection:
    """One connection, from its greeting on.

    Args:
        outgoing: the rank that this process has connected to; None at the other end.

    Attributes:
        peer: the process at the other end, once that is proved.
        pending: number of a request that was sent over it -> what takes the answer.
        lost: whether it has ended, or was never established.
    """

    def __init__(self, exchange: Exchange, socket_: socket.socket, outgoing: int | None):
        self._exchange, self.socket, self.outgoing = exchange, socket_, outgoing
        self.peer: NodeId | None = None
        self.lost, self.cut = False, ""  # `cut` says why, if this process has ended it
        self.pending: dict[int, Any] = {}
        self.nbytes = 0  # of what is pending
        self._lock = threading.Lock()
        self._sender: Any = wire.Sender(socket_)
        self.receiver: Any = wire.Receiver(socket_)
        self._early: deque[wire.Packet] = deque()  # sent before the greeting was complete
        self.greeted = self.blocked = False
        key, own = exchange.key, _ID.pack(*exchange.id)
        if outgoing is None:
            self._greet = answering(key, own, _ID.size)
        else:
            self._greet = opening(key, own, _ID.size, lambda peer: bool(_ID.unpack(peer)[0] == outgoing))
        said, self._wanted = next(self._greet)
        self._greeting = bytearray()  # the part of the awaited bytes that has come
        if said:
            socket_.send(said)

    def send(self, message: Message, packet: wire.Packet | None = None) -> None:
        """Send a message without waiting for the other end; it is dropped if the connection has ended."""
        packet = wire.Packet(b"") if packet is None else packet
        packet = wire.Packet(packet.data, packet.inline, packet.fd, encode(message))
        with uninterrupted(), self._lock:
            if self.lost:
                return
            if not self.greeted:
                with named_limits():
                    packet.fd = None if packet.fd is None else os.dup(packet.fd)
                self._early.append(packet)
                return
            self._send(packet)

    def _send(self, packet: wire.Packet) -> None:
        try:
            if not self.blocked and not self._sender.send(packet):
                self.blocked = True
                self._exchange.wake(self)
            elif self.blocked:
                self._sender.send(packet)
        except ConnectionError:
            pass  # its end is noticed by reading
        except OSError as error:
            self._cut(error)

    def flush(self) -> None:
        with self._lock:
            try:
                self.blocked = not self._sender.flush()
            except OSError as error:
                self.blocked = False
                if not isinstance(error, ConnectionError):
                    self._cut(error)

    def _cut(self, error: OSError) -> None:
        """A message could not be sent: the other end would lack it, so the connection ends, which reading notices."""
        self.cut = str(error)
        with contextlib.suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_RDWR)

    def greet(self) -> bool:
        """Go on with the greeting, as far as bytes have come; False if the other end is not of this mesh."""
        try:
            while True:
                if missing := self._wanted - len(self._greeting):
                    data = self.socket.recv(missing)
                    if not data:
                        return False
                    self._greeting += data
                    continue
                said, self._wanted = self._greet.send(bytes(self._greeting))
                self._greeting.clear()
                self.socket.send(said)
        except BlockingIOError:
            return True
        except NotOfThisMesh:
            return False
        except StopIteration as over:
            self._begin(over.value)
            return True

    def _begin(self, greeted: Greeted) -> None:
        """The greeting is complete: send what was held back."""
        rank, unique = _ID.unpack(greeted.peer)
        self.peer = (rank, unique)
        if self.socket.family != socket.AF_UNIX:  # on a network, every message carries an authentication code
            self._sender = CodedSender(self.socket, greeted.sending)
            self.receiver = CodedReceiver(self.socket, greeted.receiving)
        with self._lock:
            self.greeted = True
            while self._early:
                packet = self._early.popleft()
                self._send(packet)
                packet.close()

    def close(self) -> None:
        with self._lock:
            self.lost = True
            self._sender.close()
            self.receiver.close()
            while self._early:
                self._early.popleft().close()
            self.socket.close()


class Post(Protocol):
    """Sends messages, and takes those that the connections' thread receives: this process's node."""

    id: NodeId
    lock: threading.RLock
    closed: str | None
    residents: Any

    @property
    def foreign(self) -> bool: ...
    def check_own(self) -> None: ...
    def check_open(self) -> None: ...
    def describe(self) -> str: ...
    def connection(self, rank: int) -> Connection: ...
    def alive(self, owner: NodeId) -> Connection | None: ...
    def received(self, connection: Connection, packet: wire.Packet) -> None: ...
    def lost(self, connection: Connection) -> None: ...
    def lost_error(self, rank: int, what: str) -> SpmdError: ...
    @property
    def watching(self) -> bool: ...
    def tidy(self) -> None: ...
    def is_serving_thread(self) -> bool: ...
    def wake(self) -> None: ...


class Exchange:
    """All connections of a process, and the thread that serves them.

    Args:
        key: the mesh's.
        id: this process.
        listener: takes what is received.
        listening: listening sockets; none if nobody connects to this process.
        connect: gives a socket that is being connected to a rank.
    """

    def __init__(
        self,
        key: bytes,
        id: NodeId,
        listener: Post,
        listening: Sequence[socket.socket],
        connect: Callable[[int], socket.socket],
    ):
        self.key, self.id, self._listener, self.listening, self._connect = key, id, listener, listening, connect
        self._sockets = Listening(self._on_wake)
        for one in listening:
            self._sockets.selector.register(one, READ, functools.partial(self._accept, one))
            # A forked child that outlives this process would keep the name, which a replacement rank needs.
            os.register_at_fork(after_in_child=one.close)
        # Closed to accept and turn away a connection when no more files can be opened, so that it doesn't hang.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if listening else -1
        self._fresh: deque[Connection] = deque()  # to be watched, or flushed
        self._strangers: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._closed = False
        self._turns = 0  # how often the thread has handled what there was

    def wake(self, connection: Connection | None = None) -> None:
        """Make the thread look at a connection."""
        if connection is not None:
            self._fresh.append(connection)
        self._sockets.wake()

    def open(self, rank: int) -> Connection:
        """A connection to a rank, over which messages may be sent at once."""
        socket_ = self._connect(rank)
        try:
            connection = Connection(self, socket_, rank)
        except OSError:  # the rank has ended since
            socket_.close()
            raise
        self.wake(connection)
        return connection

    def serve(self) -> None:
        """The thread's main function: serves connections until `close`."""
        while not self._closed:
            for heard in self._sockets.select(_TIDY_SECONDS if self._listener.watching else None):
                if self._closed:
                    break
                heard()
            self._listener.tidy()
            self._turns += 1

    def await_turn(self, seconds: float) -> None:
        """Wait until the thread has handled what it is at, at most for so long."""
        before, end = self._turns, time.monotonic() + seconds
        self.wake()
        while self._turns == before and time.monotonic() < end:
            time.sleep(0.001)

    def _on_wake(self) -> None:
        while self._fresh:
            self._watch(self._fresh.popleft())

    def _watch(self, connection: Connection) -> None:
        if connection.lost:
            return
        events = READ | (WRITE if connection.blocked else 0)
        watch = self._sockets.selector.modify if connection in self._all else self._sockets.selector.register
        self._all.add(connection)
        watch(connection.socket, events, functools.partial(self._on_connection, connection))

    def _accept(self, listening: socket.socket, events: int) -> None:
        try:
            accepted, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away(listening)
            return
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            keep_alive(accepted)
        elif not same_user(accepted):
            accepted.close()
            return
        connection = Connection(self, accepted, None)
        self._strangers.append(connection)
        self._watch(connection)
        if len(self._strangers) > _STRANGERS:
            self._end(self._strangers[0])

    def _turn_away(self, listening: Any) -> None:
        if self._strangers:
            self._end(self._strangers[0])
            return
        if self._spare >= 0:
            os.close(self._spare)
        with contextlib.suppress(OSError):
            listening.accept()[0].close()
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._spare = -1
            time.sleep(_PAUSE_SECONDS)  # another thread has opened a file meanwhile

    def _on_connection(self, connection: Connection, events: int) -> None:
        if connection.lost:
            return
        if events & WRITE:
            connection.flush()
            if not connection.blocked:
                self._watch(connection)
        if not events & READ:
            return
        try:
            if not connection.greeted:
                if not connection.greet():
                    self._end(connection)
                elif connection.greeted and connection in self._strangers:
                    self._strangers.remove(connection)
                return
            packets = connection.receiver.receive(block=False)
        except OSError:
            packets = None
        if packets is None:
            self._end(connection)
            return
        for packet in packets:
            self._listener.received(connection, packet)

    def _end(self, connection: Connection) -> None:
        if connection in self._strangers:
            self._strangers.remove(connection)
        self._all.discard(connection)
        self._sockets.forget(connection.socket)
        connection.close()
        self._listener.lost(connection)

    def close(self) -> None:
        """End the thread, which then closes its connections."""
        self._closed = True
        self.wake()

    def give_back(self) -> None:
        """Close everything, once the thread has ended."""
        for connection in (*self._all, *self._fresh):
            connection.close()
        self._sockets.close()
        for one in self.listening:
            one.close()
        if self._spare >= 0:
            os.close(self._spare)
