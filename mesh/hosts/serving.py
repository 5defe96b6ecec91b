"""A port where ranks make requests to a host's process, or hosts connect to the driver, after proving who they are.

Invariant: there are only a few connections that have proved nothing yet, and nobody waits for them.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
from collections.abc import Callable

from .coded import NotOfThisMesh
from .link import Link, accepted, greet_host, listener

STRANGERS = 32  # open connections that have not proved anything yet


class Serving:
    """Listens from its creation until it is closed.

    Args:
        address: of this host, at which ranks on other hosts reach it.
        secret: what whoever connects has to prove to have.
        name: of its threads.
        welcome: called with the index and the link of whoever has proved it, on a thread of its own, instead of
            `serve`.
        most_strangers: how many connections may be open that have not proved it yet.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        name: str,
        *,
        welcome: Callable[[int, Link], None] | None = None,
        most_strangers: int = STRANGERS,
    ):
        self._secret, self._name, self._listener = secret, name, listener(address)
        self.port: int = self._listener.getsockname()[1]
        self._welcome, self._most_strangers = welcome or self._serve, most_strangers
        self._strangers: collections.deque[socket.socket] = collections.deque()
        self._lock_of_strangers = threading.Lock()
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def serve(self, rank: int, link: Link) -> None:
        """Answer a rank's requests, on a thread of its own, until its connection ends; an exception ends it, too."""
        raise NotImplementedError

    def _accept(self) -> None:
        while (connection := accepted(self._listener)) is not None:
            with self._lock_of_strangers:
                self._strangers.append(connection)
                if len(self._strangers) > self._most_strangers:  # the oldest makes room; its thread closes it
                    with contextlib.suppress(OSError):
                        self._strangers.popleft().shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._greet, args=(connection,), name=self._name, daemon=True).start()
            except RuntimeError:  # this process can start no more threads: who has connected may come again
                self._dismiss(connection)

    def _greet(self, connection: socket.socket) -> None:
        """A thread's main function: greet a new connection, and serve it."""
        try:
            index, link = greet_host(connection, self._secret)
        except (OSError, NotOfThisMesh):
            self._dismiss(connection)
            return
        self._forget(connection)
        self._welcome(index, link)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock_of_strangers, contextlib.suppress(ValueError):
            self._strangers.remove(connection)

    def _dismiss(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _serve(self, rank: int, link: Link) -> None:
        try:
            with contextlib.suppress(NotOfThisMesh):
                self.serve(rank, link)
        finally:
            link.close()

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
