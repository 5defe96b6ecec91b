"""A tunnel to the store, if hosts can't dial the driver: ranks connect to a port of their own host, and the link
carries these connections.

Each end has one. Invariant: it never waits for the link or a connection: one thread serves all connections of an end,
and keeps what one of them does not take yet.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import threading
import time
from collections import deque
from typing import Any

from ...kernels.listening import READ, WRITE, Listening
from .link import PAUSE_SECONDS, Link, listener
from .protocol import Tunnelled

_BYTES = 1 << 16  # that are read at once


class Tunnel:
    """One end.

    Args:
        link: carries the data.
        store: at the driver's end, where the store listens; None at the host's end, where ranks connect to `port`.
    """

    def __init__(self, link: Link, store: tuple[str, int] | None = None):
        self._link, self._store = link, store
        self._numbers = itertools.count(1)
        self._connections: dict[int, socket.socket] = {}
        self._waiting: dict[int, bytearray] = {}  # what a connection has not taken yet
        self._incoming: deque[tuple[Tunnelled, bytes]] = deque()
        self._listening = Listening(self._take)
        self._closed = False
        self._listener: socket.socket | None = None
        self.port = 0
        if store is None:
            self._listener = listener("127.0.0.1")
            self._listener.setblocking(False)
            self._listening.selector.register(self._listener, READ, self._accept)
            self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="spmd-tunnel", daemon=True).start()

    def carry(self, msg: Tunnelled, content: bytes) -> None:
        """Take data that the other end has sent."""
        self._incoming.append((msg, content))
        self._listening.wake()

    def close(self) -> None:
        self._closed = True
        self._listening.wake()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed:
            for heard in self._listening.select():
                heard()
        for one in (*self._connections.values(), self._listening, self._listener):
            if one is not None:
                one.close()

    def _take(self) -> None:
        while self._incoming:
            msg, content = self._incoming.popleft()
            if msg.opens and self._store is not None:
                self._open(msg.connection)
            elif content:
                self._write(msg.connection, content)
            else:
                self._drop(msg.connection)

    def _open(self, number: int) -> None:
        try:
            connection = socket.create_connection(self._store or ("", 0))
        except OSError:
            self._link.send(Tunnelled(number, opens=False))
            return
        self._keep(number, connection)

    def _accept(self, events: int) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the connection is gone already
            return
        except OSError:  # no more files can be opened: it waits, and is accepted later
            time.sleep(PAUSE_SECONDS)
            return
        number = next(self._numbers)
        self._link.send(Tunnelled(number, opens=True))
        self._keep(number, connection)

    def _keep(self, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[number], self._waiting[number] = connection, bytearray()
        self._listening.selector.register(connection, READ, functools.partial(self._carry_on, number))

    def _carry_on(self, number: int, events: int) -> None:
        if events & WRITE:
            self._write(number)
        if events & READ and number in self._connections:
            self._read(number)

    def _read(self, number: int) -> None:
        data: Any = b""
        try:
            data = self._connections[number].recv(_BYTES)
        except BlockingIOError:
            return
        except OSError:
            pass
        if data:
            self._link.send(Tunnelled(number, opens=False), data)
        else:
            self._link.send(Tunnelled(number, opens=False))
            self._drop(number)

    def _write(self, number: int, content: bytes = b"") -> None:
        connection = self._connections.get(number)
        if connection is None:
            return  # it has ended, which the other side will learn
        waiting = self._waiting[number]
        waiting += content
        with contextlib.suppress(BlockingIOError, ConnectionError):  # its end is noticed by reading
            del waiting[: connection.send(waiting)]
        more = functools.partial(self._carry_on, number)
        self._listening.selector.modify(connection, READ | WRITE if waiting else READ, more)

    def _drop(self, number: int) -> None:
        """End a connection; nothing in it is lost, since a client of the store reads each answer before it ends."""
        if (connection := self._connections.pop(number, None)) is not None:
            del self._waiting[number]
            self._listening.forget(connection)
            connection.close()
