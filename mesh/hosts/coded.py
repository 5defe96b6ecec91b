"""Messages of one connection as bytes with codes, each way a key of its own.

Invariant: nothing that has come is parsed, and no length of more than `SHORT` believed, before its code fits.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from ...kernels.network.authentication import CODE_BYTES, MessageCodes, same
from .. import wire
from .framing import framed, unframed

SHORT = 1024  # bytes of a message that has one code
# An end that is cut off is noticed after so many seconds, by the other.
SILENT_SECONDS = 10
_LENGTHS = struct.Struct("<QQ")  # of the message, of its content
_HEAD = _LENGTHS.size + CODE_BYTES
_CHUNK = 1 << 18


class NotOfThisMesh(Exception):
    """What is at the other end, or what has come from there, is not of this mesh."""


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice an end that is out of reach."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Coding:
    """What one end of a connection knows of its messages.

    Args:
        sending, receiving: the keys of the two directions.
    """

    def __init__(self, sending: bytes, receiving: bytes):
        self._outgoing, self._incoming = MessageCodes(sending), MessageCodes(receiving)
        self._buffer = bytearray()
        self._lengths: tuple[int, int] | None = None  # of the long message that is coming

    def framed(self, said: bytes, content: Sequence[memoryview]) -> list[memoryview]:
        """A message and its content as they are sent."""
        total = sum(map(len, content))
        lengths = _LENGTHS.pack(len(said), total)
        body = b"".join((said, *content))
        if len(body) <= SHORT:
            return [memoryview(b"".join((lengths, self._outgoing.of_next(lengths, body), body)))]
        head = lengths + self._outgoing.of_next(lengths)
        return [memoryview(head), memoryview(body), memoryview(self._outgoing.of_body(memoryview(body)))]

    def take(self, data: memoryview) -> list[tuple[bytes, bytes]]:
        """The messages that are complete with these bytes, and their contents.

        Raises:
            NotOfThisMesh: what has come is not what the other end has sent.
        """
        self._buffer += data
        found = []
        while (one := self._next()) is not None:
            found.append(one)
        return found

    def _next(self) -> tuple[bytes, bytes] | None:
        if self._lengths is None:
            if len(self._buffer) < _HEAD:
                return None
            lengths, its_code = bytes(self._buffer[: _LENGTHS.size]), bytes(self._buffer[_LENGTHS.size : _HEAD])
            said, content = _LENGTHS.unpack(lengths)
            if said + content <= SHORT:
                if len(self._buffer) < _HEAD + said + content:
                    return None
                body = bytes(self._buffer[_HEAD : _HEAD + said + content])
                _compare(its_code, self._incoming.of_next(lengths, body))
                del self._buffer[: _HEAD + said + content]
                return body[:said], body[said:]
            _compare(its_code, self._incoming.of_next(lengths))
            self._lengths = said, content
            del self._buffer[:_HEAD]
        said, content = self._lengths
        if len(self._buffer) < said + content + CODE_BYTES:
            return None
        body = bytes(self._buffer[: said + content])
        its_code = bytes(self._buffer[said + content : said + content + CODE_BYTES])
        _compare(its_code, self._incoming.of_body(memoryview(body)))
        del self._buffer[: said + content + CODE_BYTES]
        self._lengths = None
        return body[:said], body[said:]


def _compare(its_code: bytes, expected: bytes) -> None:
    if not same(its_code, expected):
        raise NotOfThisMesh("a message that the other end has not sent")


class CodedSender:
    """Sends packets to another host without ever waiting; see `wire.Sender`."""

    def __init__(self, connection: socket.socket, coding: Coding):
        self._connection, self._coding = connection, coding
        self._waiting: deque[memoryview] = deque()

    def send(self, packet: wire.Packet) -> bool:
        content: list[Any] = [memoryview(piece).cast("B") for piece in framed(packet)]
        self._waiting.extend(self._coding.framed(b"", content))
        return self.flush()

    def flush(self) -> bool:
        while self._waiting:
            try:
                sent = self._connection.send(self._waiting[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            if sent == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][sent:]
        return True

    def close(self) -> None:
        self._waiting.clear()


class CodedReceiver:
    """Puts packets from another host together; see `wire.Receiver`."""

    def __init__(self, connection: socket.socket, coding: Coding):
        self._connection, self._coding = connection, coding
        self._chunk = bytearray(_CHUNK)

    def receive(self, *, block: bool) -> list[wire.Packet] | None:
        try:
            count = self._connection.recv_into(self._chunk, 0, 0 if block else socket.MSG_DONTWAIT)
            if not count:
                return None
            return [unframed(content) for _, content in self._coding.take(memoryview(self._chunk)[:count])]
        except BlockingIOError:
            return []
        except (OSError, NotOfThisMesh):
            return None

    def close(self) -> None:
        """Nothing is held that is not garbage."""
