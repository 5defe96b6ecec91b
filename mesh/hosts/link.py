"""The authenticated connection between a driver and a per-host process.

Both sides prove that they have the mesh's secret (`greeting`); then every message has an authentication code.
Invariant: `send` never waits for the other end, so that a host that does not read can't delay the driver.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ...kernels.network.authentication import MessageCodes, code
from ...kernels.network.codec import Message
from ...kernels.network.frames import Backlog, Changed, Frames, framed
from ...kernels.processes import Owned
from .coded import NotOfThisMesh, keep_alive
from .greeting import Greeted, Greeting, answering, opening
from .protocol import decode, encode

_INDEX = struct.Struct("<Q")
GREETING_SECONDS = 10.0
PAUSE_SECONDS = 0.1  # without accepting connections, if this process can open no more files


def mesh_key(secret: bytes, number: bytes) -> bytes:
    """The key by which a mesh's processes know each other, from a number that is used once."""
    return code(secret, b"mesh", number)


def listener(address: str) -> socket.socket:
    """A socket that listens at an address of this host, at any port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def accepted(listening: socket.socket) -> socket.socket | None:
    """Wait for the next connection, even while no files can be opened; None once the listening socket is closed."""
    while True:
        try:
            return listening.accept()[0]
        except OSError as error:
            if listening.fileno() < 0 or error.errno in (errno.EINVAL, errno.EBADF):
                return None
            time.sleep(PAUSE_SECONDS)


def greet_driver(connection: socket.socket, secret: bytes, index: int) -> Link:
    """The host's side of the greeting; raises `NotOfThisMesh`, or OSError."""
    greeted = _greeted(connection, opening(secret, _INDEX.pack(index), 0))
    return Link(connection, greeted.sending, greeted.receiving)


def dial(address: tuple[str, int], secret: bytes, index: int) -> Link:
    """Connect to a driver or another host, and greet it; raises as `greet_driver`."""
    connection = socket.create_connection(address, timeout=GREETING_SECONDS)
    try:
        return greet_driver(connection, secret, index)
    except BaseException:
        connection.close()
        raise


def greet_host(connection: socket.socket, secret: bytes) -> tuple[int, Link]:
    """The driver's side of the greeting; returns the host's index, and the link. Raises `NotOfThisMesh`, or OSError."""
    greeted = _greeted(connection, answering(secret, b"", _INDEX.size))
    return _INDEX.unpack(greeted.peer)[0], Link(connection, greeted.sending, greeted.receiving)


def _greeted(connection: socket.socket, greeting: Greeting) -> Greeted:
    """Carry out a greeting, in at most `GREETING_SECONDS`."""
    end, said = time.monotonic() + GREETING_SECONDS, next(greeting)
    try:
        while True:
            connection.sendall(said[0])
            said = greeting.send(_exactly(connection, said[1], end))
    except StopIteration as over:
        greeted: Greeted = over.value
        return greeted


def _exactly(connection: socket.socket, count: int, end: float) -> bytes:
    """Receive exactly `count` bytes, all of them before `end`."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(1e-3, end - time.monotonic()))
        piece = connection.recv(count - len(data))
        if not piece:
            raise NotOfThisMesh("the connection ended in the greeting")
        data += piece
    return data


class Link(Owned):
    """A connection after its greeting, with the keys of the two directions."""

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes):
        super().__init__()
        self.connection = connection
        connection.settimeout(None)
        keep_alive(connection)
        self._codes = MessageCodes(sending)
        self._received: list[tuple[Any, bytes]] = []
        self._frames = Frames(connection, MessageCodes(receiving), self._take)
        self._backlog = Backlog()
        self._changed = threading.Condition()
        self.ended = False
        self._writer: threading.Thread | None = None

    # -- sending -------------------------------------------------------------------------------------------------------

    def send(self, message: Message, *content: Any) -> None:
        """Send a message, and its content in pieces of bytes; what the connection doesn't take now is sent later."""
        self.send_encoded(encode(message), content)

    def send_encoded(self, msg: bytes, content: Sequence[Any]) -> None:
        """As `send`, for an encoded message."""
        if self.foreign:  # messages are numbered, and only the parent may send them
            return
        with self._changed:
            if self.ended:
                return
            self._backlog.pieces.extend(self._framed(msg, content))
            if self._writer is None and not self._push():
                self._writer = threading.Thread(target=self._write, name="spmd-link", daemon=True)
                self._writer.start()

    def ask(self, message: Message, *content: Any) -> tuple[Any, bytes]:
        """Send a message, wait for the answer, and return it with its content; only if nobody else uses this end.

        Raises:
            OSError: the connection has ended. NotOfThisMesh: what has come was not sent by the other end.
        """
        for piece in self._framed(encode(message), content):
            self.connection.sendall(piece)
        while not (found := self.receive()):
            if found is None:
                raise ConnectionResetError("the other end has gone")
        return found[0]

    def _framed(self, msg: bytes, content: Sequence[Any]) -> Iterator[memoryview]:
        return framed(len(msg), [memoryview(piece).cast("B") for piece in (msg, *content)], self._codes)

    def _push(self) -> bool:
        """Write what the connection takes now; whether that was everything."""
        try:
            return self._backlog.push(self.connection)
        except OSError:  # its end is noticed by reading
            self._backlog.pieces.clear()
            return True

    def _write(self) -> None:
        """A thread's main function: writes until there is nothing more to write."""
        while True:
            with self._changed:
                if not self._backlog.pieces or self.ended:
                    self._writer = None
                    return
                piece = self._backlog.pieces[0]
            try:
                sent = self.connection.send(piece)
            except OSError:
                sent = -1
            with self._changed:
                if sent < 0:
                    self._backlog.pieces.clear()
                elif self._backlog.pieces:
                    self._backlog.advance(sent)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def receive(self, flags: int = 0) -> list[tuple[Any, bytes]] | None:
        """The messages that are complete after one read, with their contents; None at the end.

        Args:
            flags: of the read: MSG_DONTWAIT not to wait.

        Raises:
            NotOfThisMesh: what has come was not sent by the other end.
        """
        try:
            if not self._frames.read(flags):
                return None
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return None
        except Changed:
            raise NotOfThisMesh("a message that the other end has not sent") from None
        received, self._received = self._received, []
        return received

    def _take(self, msg: int, body: memoryview) -> None:
        """Take a message (the first `msg` bytes) and its content (the rest)."""
        self._received.append((decode(bytes(body[:msg])), bytes(body[msg:])))

    def shut(self) -> None:
        """End the connection; a thread that reads finds its end."""
        if self.foreign:
            return
        with self._changed:
            self.ended = True
            self._backlog.pieces.clear()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and close its descriptor."""
        self.shut()
        self.connection.close()
