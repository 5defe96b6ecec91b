"""A port at which ranks ask a host's process for something, or hosts come to the driver: each proves who it is.

Invariant: of connections that have proved nothing there are few, and nobody waits for them.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
from collections.abc import Callable

from .coded import NotOfThisMesh
from .link import Link, accepted, greet_host, listener

STRANGERS = 32  # connections at once that have not proved anything


class Serving:
    """Listens from when it is made until it is closed.

    Args:
        address: of this host, at which ranks of others reach it.
        secret: what they prove that they have.
        name: of its threads.
        welcome: takes who has proved it and its link, on a thread of its own, instead of `serve`.
        most_strangers: connections at once that have not proved it.
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
        self._instead, self._most_strangers = welcome, most_strangers
        self._strangers: collections.deque[socket.socket] = collections.deque()
        self._lock_of_strangers = threading.Lock()
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def serve(self, rank: int, link: Link) -> None:
        """Answer what a rank asks, on a thread of its own, until its connection ends; what raises ends it."""
        raise NotImplementedError

    def _accept(self) -> None:
        while (connection := accepted(self._listener)) is not None:
            with self._lock_of_strangers:
                self._strangers.append(connection)
                if len(self._strangers) > self._most_strangers:  # the oldest makes room; its thread closes it
                    with contextlib.suppress(OSError):
                        self._strangers.popleft().shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._greet, args=(connection,), name=self._name, daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """A thread's main function: one that has connected."""
        try:
            index, link = greet_host(connection, self._secret)
        except (OSError, NotOfThisMesh):
            connection.close()
            return
        finally:
            with self._lock_of_strangers, contextlib.suppress(ValueError):
                self._strangers.remove(connection)
        (self._instead or self.welcome)(index, link)

    def welcome(self, rank: int, link: Link) -> None:
        try:
            with contextlib.suppress(NotOfThisMesh):
                self.serve(rank, link)
        finally:
            link.close()

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()
