"""Messages as bytes on a connection: each has a head of a fixed length, and a body.

Where messages have codes, that of a short one comes last; a long one's head has one of its own behind it.

Invariant: where messages have codes, nothing that has come is given away, and no length of more than `SHORT` believed,
before its code fits.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Callable, Iterator, Sequence

import torch

from ..processes import ThreadBuffer
from .authentication import CODE_BYTES, MessageCodes, same

HEADER = struct.Struct("<qQ")  # the sender's number for it, bytes
SHORT = 1024  # bytes of a message that leaves in one piece, with one code
_buffer = ThreadBuffer(1 << 12)  # for short messages, and where a long one begins


class Changed(Exception):
    """What has come is not what the other end has sent."""


def framed(number: int, pieces: Sequence[memoryview], codes: MessageCodes | None) -> Iterator[memoryview]:
    """A message as it is sent, in pieces that are made as they are asked for: a long one's code once its body has left.

    The first piece of each message must be asked for in the order in which they are sent.
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


class Frames:
    """Puts the messages of a connection together from what arrives.

    Args:
        codes: those that they have; None: none.
        take: is given each message's number and body, as soon as it is whole.
    """

    def __init__(self, connection: socket.socket, codes: MessageCodes | None, take: Callable[[int, memoryview], None]):
        self._connection, self._codes, self._take = connection, codes, take
        self._begun = b""  # of a message that is not known to be long
        self._long: _Long | None = None

    def read(self, flags: int = 0) -> bool:
        """Take what is there now, and no more once a message is whole with it; False at the end of the stream.

        Raises:
            Changed: what has come is not what the other end has sent.
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
        """Whether a message is whole."""
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
        """Note so many more bytes of a long message; whether it is whole."""
        assert self._long is not None
        whole = self._long.lengthen(count)
        if whole:
            self._take(self._long.number, self._long.body)
            self._long = None
        return whole


class _Long:
    """A long message whose head fits, while its body comes; its code is made meanwhile.

    Attributes:
        rest: where what comes next is to go.
    """

    def __init__(self, number: int, nbytes: int, of_body: hmac.HMAC | None):
        self.number, self._nbytes, self._of_body, self._got = number, nbytes, of_body, 0
        whole = nbytes + (0 if of_body is None else CODE_BYTES)
        self._whole = self.rest = torch.empty(whole, dtype=torch.uint8, device="cpu").numpy().data

    @property
    def body(self) -> memoryview:
        return self._whole[: self._nbytes]

    def lengthen(self, count: int) -> bool:
        """Note that so many bytes have come; whether that is all.

        Raises:
            Changed: it is, and its code does not fit.
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
