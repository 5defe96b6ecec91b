"""The two ends of a mailbox's connection: a message on its way out, and a connection on which messages come in.

Invariant: only a hello of a fixed length is read until it has proved who sends it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import torch

from .authentication import CODE_BYTES, MessageCodes
from .frames import Changed, Frames, framed

_STAMP = struct.Struct("<Q")  # before a message's bytes
HELLO = struct.Struct(f"<q{CODE_BYTES}s")  # the sender's rank, and its code


class Outgoing:
    """A message being sent; `sent` once its bytes have left this process's memory, `lost` if they never will.

    Attributes:
        piece: the bytes to send next; None when all are sent.
    """

    __slots__ = ("_pieces", "_tensor", "lost", "piece", "sent")

    def __init__(self, tag: int, stamp: int, tensor: torch.Tensor, codes: MessageCodes | None):
        self._tensor = tensor  # keeps the memory alive
        self._pieces = framed(tag, [memoryview(_STAMP.pack(stamp)), tensor.numpy().data], codes)
        self.piece: memoryview | None = next(self._pieces)
        self.sent = self.lost = False

    def advance(self, count: int) -> None:
        """Note that `count` bytes have been sent."""
        assert self.piece is not None
        self.piece = self.piece[count:] if count < len(self.piece) else next(self._pieces, None)


class Incoming:
    """A connection that a peer sends on: whole messages go to the inbox, in order.

    Args:
        admit: gives the rank that a hello proves to be at the other end, or None if it proves nothing.
        codes_of: gives the codes of a rank's messages, or None if they have none.
    """

    def __init__(
        self,
        connection: socket.socket,
        inbox: list[tuple[int, int, torch.Tensor, int]],
        admit: Callable[[bytes], int | None],
        codes_of: Callable[[int], MessageCodes | None],
    ):
        self.connection, self._inbox, self._admit, self._codes_of = connection, inbox, admit, codes_of
        self._hello = b""
        self.source: int | None = None
        self._frames: Frames | None = None

    def read(self) -> bool:
        """Read what has arrived; False at the end of the stream, or if the other end is not a peer.

        Raises:
            Changed: a message is not what the peer has sent.
        """
        try:
            if self._frames is None:
                return self._read_hello()
            return self._frames.read()
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        except Changed:
            raise Changed(f"a message from rank {self.source} that is not what it has sent") from None

    def _take(self, tag: int, body: memoryview) -> None:
        assert self.source is not None
        if len(body) < _STAMP.size:
            raise Changed
        data = torch.frombuffer(body, dtype=torch.uint8)
        self._inbox.append((self.source, tag, data[_STAMP.size :], *_STAMP.unpack_from(body)))

    def _read_hello(self) -> bool:
        data = self.connection.recv(HELLO.size - len(self._hello))
        self._hello += data
        if len(self._hello) == HELLO.size:
            self.source = self._admit(self._hello)
            if self.source is None:
                return False
            self._frames = Frames(self.connection, self._codes_of(self.source), self._take)
        return bool(data)
