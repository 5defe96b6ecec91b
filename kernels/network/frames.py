"""Messages as bytes on a connection: each has a head of a fixed length, and a body.

If messages have codes, a short message ends with its code; a long one has one code behind its head, and one at its end.

Invariant: if messages have codes, nothing is handed on, and no length above `SHORT` is trusted, before its code was
checked.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from ..processes import ThreadBuffer
from .authentication import CODE_BYTES, MessageCodes, same

HEADER = struct.Struct("<qQ")  # the sender's number for the message, its bytes
SHORT = 1024  # bytes of a message that leaves in one piece, with one code
_buffer = ThreadBuffer(1 << 12)  # for short messages, and the start of long ones


class Changed(Exception):
    """Received data is not what the other end has sent."""


def framed(number: int, pieces: Sequence[memoryview], codes: MessageCodes | None) -> Iterator[memoryview]:
    """A message as pieces to send, made one by one: the code of a long body is made after the body was sent.

    Messages must be sent in the order in which their first pieces are taken from these iterators.
    """
    nbytes = sum(map(len, pieces))
    head = HEADER.pack(number, nbytes)
    if nbytes <= SHORT:
        whole = b"".join((head, *pieces))
        yield memoryview(whole if codes is None else whole + codes.of_next(whole))
    elif codes is None:
        yield memoryview(head)
        yield from pieces
    else:
        its_code, of_body = codes.of_next(head), codes.of_body()
        yield memoryview(head + its_code)
        for piece in pieces:
            yield piece
            of_body.update(piece)
        yield memoryview(of_body.digest())


class Backlog:
    """What a connection has not taken yet.

    Attributes:
        pieces: in the order in which they are to be sent.
    """

    def __init__(self) -> None:
        self.pieces: deque[memoryview] = deque()

    def push(self, connection: socket.socket) -> bool:
        """Send what the connection takes now, without waiting; whether that was everything."""
        while self.pieces:
            try:
                self.advance(connection.send(self.pieces[0], socket.MSG_DONTWAIT))
            except BlockingIOError:
                return False
        return True

    def advance(self, sent: int) -> None:
        """Note how many bytes of the first piece were sent."""
        if sent == len(self.pieces[0]):
            self.pieces.popleft()
        else:
            self.pieces[0] = self.pieces[0][sent:]


class Frames:
    """Puts the messages of a connection together from what arrives.

    Args:
        codes: the codes of the messages; None if they have none.
        take: called with each message's number and body, as soon as it is complete.
    """

    def __init__(self, connection: socket.socket, codes: MessageCodes | None, take: Callable[[int, memoryview], None]):
        self._connection, self._codes, self._take = connection, codes, take
        self._begun = b""  # the start of a message whose head is not complete, or that is short
        self._long: _Long | None = None

    def read(self, flags: int = 0) -> bool:
        """Read what has arrived, until a message is complete; False at the end of the stream.

        Raises:
            Changed: the data is not what the other end has sent.
        """
        while True:
            into = memoryview(_buffer.data) if self._long is None else self._long.rest
            count = self._connection.recv_into(into, 0, flags)
            if not count:
                return False
            if self._long is not None:
                whole = self._lengthen(count)
            else:
                whole = self._cut(memoryview(self._begun + into[:count]) if self._begun else into[:count])
            if whole or count < len(into):
                return True

    def _cut(self, data: memoryview) -> bool:
        """Cut received data into messages; returns whether any is complete."""
        at, codes, whole = 0, self._codes, False
        while len(data) - at >= HEADER.size:
            number, nbytes = HEADER.unpack_from(data, at)
            begin = at + HEADER.size
            end = after = begin + nbytes if nbytes <= SHORT else begin
            if codes is not None:
                after += CODE_BYTES
            if after > len(data):
                break
            if codes is not None and not same(data[end:after], codes.of_next(data[at:end])):
                raise Changed
            at = after
            if nbytes <= SHORT:
                self._take(number, memoryview(bytearray(data[begin:end])))
                whole = True
                continue
            self._long = _Long(number, nbytes, None if codes is None else codes.of_body())
            rest = self._long.rest
            count = min(len(data) - at, len(rest))
            rest[:count] = data[at : at + count]
            at += count
            whole |= self._lengthen(count)
        self._begun = bytes(data[at:])
        return whole

    def _lengthen(self, count: int) -> bool:
        """Note `count` more bytes of a long message; returns whether it is complete."""
        assert self._long is not None
        whole = self._long.lengthen(count)
        if whole:
            self._take(self._long.number, self._long.body)
            self._long = None
        return whole


class _Long:
    """A long message, with a checked head, while its body arrives; the body's code is computed on the way.

    Attributes:
        rest: the memory for the bytes that come next.
    """

    def __init__(self, number: int, nbytes: int, of_body: hmac.HMAC | None):
        self.number, self._nbytes, self._of_body, self._got = number, nbytes, of_body, 0
        whole = nbytes + (0 if of_body is None else CODE_BYTES)
        self._whole = self.rest = torch.empty(whole, dtype=torch.uint8, device="cpu").numpy().data

    @property
    def body(self) -> memoryview:
        return self._whole[: self._nbytes]

    def lengthen(self, count: int) -> bool:
        """Note that `count` bytes have arrived; returns whether the message is complete.

        Raises:
            Changed: it is, and its code is wrong.
        """
        began = self._got
        self._got += count
        self.rest = self._whole[self._got :]
        if self._of_body is not None:
            self._of_body.update(self._whole[began : min(self._got, self._nbytes)])
        if len(self.rest):
            return False
        if self._of_body is not None and not same(self._whole[self._nbytes :], self._of_body.digest()):
            raise Changed
        return True
