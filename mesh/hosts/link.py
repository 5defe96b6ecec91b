"""The connection between a driver and a per-host process: who is at the other end is proved, and every message is.

Either side proves with the mesh's secret, and a number used once, that it has it; then every message has a code of its
own. Invariants: nothing that has come is parsed, and no length of more than `SHORT` believed, before its code fits;
and `send` never waits for the other end, so that a driver that sends is not held up by a host that does not read.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from ...kernels.network.authentication import CODE_BYTES, MessageCodes, code, same
from ..protocol import Message
from .protocol import decode, encode

SHORT = 1024  # bytes of a message that has one code
_LENGTHS = struct.Struct("<QQ")  # of the message, of its content
_HEAD = _LENGTHS.size + CODE_BYTES
_PLACE = struct.Struct("<Q")
_CHUNK = 1 << 18
GREETING_SECONDS = 10.0
# A host that is cut off is noticed after so many seconds, by either side.
SILENT_SECONDS = 10


class NotOfThisMesh(Exception):
    """What is at the other end, or what has come from there, is not of this mesh."""


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice an end that is out of reach."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def greet_driver(connection: socket.socket, secret: bytes, place: int) -> Link:
    """The host's side of the greeting; raises `NotOfThisMesh`, or OSError."""
    connection.settimeout(GREETING_SECONDS)
    mine, at = secrets.token_bytes(CODE_BYTES), _PLACE.pack(place)
    connection.sendall(mine)
    theirs, proof = _exactly(connection, CODE_BYTES), _exactly(connection, CODE_BYTES)
    if not same(proof, code(secret, b"driver", mine, theirs)):
        raise NotOfThisMesh("who listens there is not the driver of this mesh")
    connection.sendall(at + code(secret, b"host", mine, theirs, at))
    keys = [code(secret, name, mine, theirs, at) for name in (b"to driver", b"to host")]
    return Link(connection, *keys)


def greet_host(connection: socket.socket, secret: bytes) -> tuple[int, Link]:
    """The driver's side: which of its hosts this is, and the link to it; raises `NotOfThisMesh`, or OSError."""
    connection.settimeout(GREETING_SECONDS)
    theirs, mine = _exactly(connection, CODE_BYTES), secrets.token_bytes(CODE_BYTES)
    connection.sendall(mine + code(secret, b"driver", theirs, mine))
    at, proof = _exactly(connection, _PLACE.size), _exactly(connection, CODE_BYTES)
    if not same(proof, code(secret, b"host", theirs, mine, at)):
        raise NotOfThisMesh("a connection that is not of a host of this mesh")
    keys = [code(secret, name, theirs, mine, at) for name in (b"to host", b"to driver")]
    return _PLACE.unpack(at)[0], Link(connection, *keys)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise NotOfThisMesh("the connection ended in the greeting")
        data += piece
    return data


class Link:
    """A connection after its greeting.

    Args:
        connection: to the other end.
        sending, receiving: the keys of the two directions.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes):
        self.connection = connection
        connection.settimeout(None)
        keep_alive(connection)
        self._outgoing, self._incoming = MessageCodes(sending), MessageCodes(receiving)
        self._backlog: collections.deque[memoryview] = collections.deque()
        self._changed = threading.Condition()
        self._buffer, self._chunk = bytearray(), bytearray(_CHUNK)
        self._lengths: tuple[int, int] | None = None  # of the long message that is coming
        self.ended = False
        self._writer: threading.Thread | None = None

    # -- sending -------------------------------------------------------------------------------------------------------

    def send(self, message: Message, *content: Any) -> None:
        """Send a message, and its content in pieces of bytes; what the connection does not take at once goes later."""
        said = encode(message)
        with self._changed:
            if self.ended:
                return
            self._backlog.extend(self._framed(said, [memoryview(piece).cast("B") for piece in content]))
            if self._writer is None and not self._push():
                self._writer = threading.Thread(target=self._write, name="spmd-link", daemon=True)
                self._writer.start()

    def _framed(self, said: bytes, content: Sequence[memoryview]) -> list[memoryview]:
        total = sum(map(len, content))
        lengths = _LENGTHS.pack(len(said), total)
        if len(said) + total <= SHORT:
            body = b"".join((said, *content))
            return [memoryview(b"".join((lengths, self._outgoing.of_next(lengths, body), body)))]
        head = lengths + self._outgoing.of_next(lengths)
        body = b"".join((said, *content))
        return [memoryview(head), memoryview(body), memoryview(self._outgoing.of_body(memoryview(body)))]

    def _push(self) -> bool:
        """Write what the connection takes now; whether that is all."""
        try:
            while self._backlog:
                sent = self.connection.send(self._backlog[0], socket.MSG_DONTWAIT)
                self._advance(sent)
        except BlockingIOError:
            return False
        except OSError:  # that it has ended is noticed where it is read
            self._backlog.clear()
        return True

    def _advance(self, sent: int) -> None:
        if sent == len(self._backlog[0]):
            self._backlog.popleft()
        else:
            self._backlog[0] = self._backlog[0][sent:]

    def _write(self) -> None:
        """A thread's main function: until there is nothing more to write."""
        while True:
            with self._changed:
                if not self._backlog or self.ended:
                    self._writer = None
                    return
                piece = self._backlog[0]
            try:
                sent = self.connection.send(piece)
            except OSError:
                sent = -1
            with self._changed:
                if sent < 0:
                    self._backlog.clear()
                elif self._backlog:
                    self._advance(sent)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def receive(self) -> list[tuple[Any, bytes]] | None:
        """The messages that are complete after one read, with their contents; None at the end.

        Raises:
            NotOfThisMesh: what has come is not what the other end has sent.
        """
        try:
            count = self.connection.recv_into(self._chunk)
        except InterruptedError:
            return []
        except OSError:
            return None
        if not count:
            return None
        self._buffer += memoryview(self._chunk)[:count]
        found = []
        while (one := self._next()) is not None:
            found.append(one)
        return found

    def _next(self) -> tuple[Any, bytes] | None:
        if self._lengths is None:
            if len(self._buffer) < _HEAD:
                return None
            lengths, its_code = bytes(self._buffer[: _LENGTHS.size]), bytes(self._buffer[_LENGTHS.size : _HEAD])
            said, content = _LENGTHS.unpack(lengths)
            if said + content <= SHORT:
                if len(self._buffer) < _HEAD + said + content:
                    return None
                body = bytes(self._buffer[_HEAD : _HEAD + said + content])
                self._compare(its_code, self._incoming.of_next(lengths, body))
                del self._buffer[: _HEAD + said + content]
                return decode(body[:said]), body[said:]
            self._compare(its_code, self._incoming.of_next(lengths))
            self._lengths = said, content
            del self._buffer[:_HEAD]
        said, content = self._lengths
        if len(self._buffer) < said + content + CODE_BYTES:
            return None
        body = bytes(self._buffer[: said + content])
        its_code = bytes(self._buffer[said + content : said + content + CODE_BYTES])
        self._compare(its_code, self._incoming.of_body(memoryview(body)))
        del self._buffer[: said + content + CODE_BYTES]
        self._lengths = None
        return decode(body[:said]), body[said:]

    @staticmethod
    def _compare(its_code: bytes, expected: bytes) -> None:
        if not same(its_code, expected):
            raise NotOfThisMesh("a message that the other end has not sent")

    def close(self) -> None:
        """End the connection; a thread that reads finds its end."""
        with self._changed:
            self.ended = True
            self._backlog.clear()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
