"""Messages on the connections of a mailbox: how they are cut into pieces, and put together from what arrives.

Invariant: nothing is read but a hello of a fixed length until that has proved who sends it; and where messages have
codes, no head is believed before its own fits.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import torch

from .authentication import CODE_BYTES, MessageCodes, same

HELLO = struct.Struct(f"<q{CODE_BYTES}s")  # the sender's rank, and its code
HEADER = struct.Struct("<qQ")  # tag, bytes
SHORT = 1024  # bytes of a message that leaves in one piece, with one code


class Outgoing:
    """A message being sent; `sent` once its bytes have left this process's memory, `lost` if they never will."""

    __slots__ = ("lost", "pieces", "sent", "tensor")

    def __init__(self, tag: int, tensor: torch.Tensor, codes: MessageCodes | None):
        self.tensor = tensor  # keeps the memory alive
        head, body = HEADER.pack(tag, tensor.numel()), tensor.numpy().data.cast("B")
        if len(body) <= SHORT:
            short = bytes(body)
            self.pieces = [memoryview(b"".join((head, b"" if codes is None else codes.of_next(head, short), short)))]
        elif codes is None:
            self.pieces = [memoryview(head), body]
        else:
            self.pieces = [memoryview(head + codes.of_next(head)), body, memoryview(codes.of_body(body))]
        self.sent = self.lost = False


class Changed(Exception):
    """What has come from a peer is not what it has sent."""


class Incoming:
    """A connection that a peer sends on: whole messages go to the inbox, in order.

    Args:
        admit: the rank that a hello proves to be at the other end; None if it proves nothing.
        codes_of: what codes a rank's messages have; None: none.
    """

    def __init__(
        self,
        connection: socket.socket,
        inbox: list[tuple[int, int, torch.Tensor]],
        admit: Callable[[bytes], int | None],
        codes_of: Callable[[int], MessageCodes | None],
    ):
        self.connection, self._inbox, self._admit, self._codes_of = connection, inbox, admit, codes_of
        self._head = bytearray()
        self.source: int | None = None
        self._codes: MessageCodes | None = None
        self._code_bytes = self._tag = 0
        self._begun = b""  # the head of the message that is being read, with its code
        self._body: torch.Tensor | None = None
        self._got = 0

    def read(self) -> bool:
        """Take what is there; False at the end of the stream, or if it is not a peer's.

        Raises:
            Changed: it is a peer's no more.
        """
        try:
            while True:
                if self._body is None:
                    wanted = HELLO.size if self.source is None else HEADER.size + self._code_bytes
                    data = self.connection.recv(wanted - len(self._head))
                    if not data:
                        return False
                    self._head += data
                    if len(self._head) < wanted:
                        continue
                    if self.source is None:
                        self.source = self._admit(bytes(self._head))
                        if self.source is None:
                            return False
                        self._codes = self._codes_of(self.source)
                        self._code_bytes = 0 if self._codes is None else CODE_BYTES
                    else:
                        self._begin_message()
                    self._head.clear()
                if self._body is not None:
                    rest = self._body.numpy().data[self._got :]
                    if len(rest):
                        count = self.connection.recv_into(rest)
                        if not count:
                            return False
                        self._got += count
                    if self._got == self._body.numel():
                        assert self.source is not None
                        self._inbox.append((self.source, self._tag, self._checked(self._body)))
                        self._body = None
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def _begin_message(self) -> None:
        """Make room for a message whose head is there; a long one's only once its code fits."""
        self._tag, nbytes = HEADER.unpack_from(self._head)
        if self._codes is not None and nbytes > SHORT:
            self._compare(bytes(self._head[HEADER.size :]), self._codes.of_next(bytes(self._head[: HEADER.size])))
            nbytes += CODE_BYTES
        self._begun = bytes(self._head)
        self._body, self._got = torch.empty(nbytes, dtype=torch.uint8), 0

    def _checked(self, body: torch.Tensor) -> torch.Tensor:
        """A message's bytes without their code, which fits."""
        if self._codes is None:
            return body
        if body.numel() <= SHORT:
            head, its_code = self._begun[: HEADER.size], self._begun[HEADER.size :]
            self._compare(its_code, self._codes.of_next(head, body.numpy().tobytes()))
            return body
        content = body[:-CODE_BYTES]
        self._compare(body[-CODE_BYTES:].numpy().tobytes(), self._codes.of_body(content.numpy().data))
        return content

    def _compare(self, its_code: bytes, expected: bytes) -> None:
        if not same(its_code, expected):
            raise Changed(f"a message from rank {self.source} that is not what it has sent")
