"""A port of a host's process at which ranks ask for something: each proves that it has the key of its mesh.

Invariant: of connections that have proved nothing there are few, and nobody waits for them.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from .coded import NotOfThisMesh
from .link import Link, accepted, greet_host, listener

_STRANGERS = 32  # connections at once that have not proved anything


class Serving:
    """Listens from when it is made until it is closed.

    Args:
        address: of this host, at which ranks of others reach it.
        secret: what they prove that they have.
        name: of its threads.
    """

    def __init__(self, address: str, secret: bytes, name: str):
        self._secret, self._name, self._listener = secret, name, listener(address)
        self.port: int = self._listener.getsockname()[1]
        self._strangers = threading.Semaphore(_STRANGERS)
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def serve(self, rank: int, link: Link) -> None:
        """Answer what a rank asks, on a thread of its own, until its connection ends; what raises ends it."""
        raise NotImplementedError

    def _accept(self) -> None:
        while (connection := accepted(self._listener)) is not None:
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), name=self._name, daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """A thread's main function: one rank's process."""
        try:
            rank, link = greet_host(connection, self._secret)
        except (OSError, NotOfThisMesh):
            connection.close()
            return
        finally:
            self._strangers.release()
        self.welcome(rank, link)

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
