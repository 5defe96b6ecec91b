"""Packets to and from another host: as plain bytes (tensors in a memfd are read, and put into another one), and as
messages with authentication codes, with one key for each direction."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
from typing import Any

from ...kernels.network.authentication import MessageCodes
from ...kernels.network.frames import Backlog, Changed, Frames
from ...kernels.network.frames import framed as coded
from .. import wire

_LENGTHS = struct.Struct("<QQ")  # of the head, of the pickle; the rest is the tensors' bytes

# The other end notices after so many seconds that one is cut off.
SILENT_SECONDS = 10


class NotOfThisMesh(Exception):
    """The other end, or something that has come from there, is not of this mesh."""


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel notice if the other end is out of reach."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class CodedSender:
    """Sends packets to another host without ever waiting; see `wire.Sender`."""

    def __init__(self, connection: socket.socket, key: bytes):
        self._connection, self._codes = connection, MessageCodes(key)
        self._backlog = Backlog()

    def send(self, packet: wire.Packet) -> bool:
        self._backlog.pieces.extend(coded(0, [memoryview(piece).cast("B") for piece in framed(packet)], self._codes))
        return self.flush()

    def flush(self) -> bool:
        return self._backlog.push(self._connection)

    def close(self) -> None:
        self._backlog.pieces.clear()


class CodedReceiver:
    """Puts packets from another host together; see `wire.Receiver`."""

    def __init__(self, connection: socket.socket, key: bytes):
        self._packets: list[wire.Packet] = []
        self._frames = Frames(connection, MessageCodes(key), self._take)

    def _take(self, number: int, content: memoryview) -> None:
        self._packets.append(unframed(content))

    def receive(self, *, block: bool) -> list[wire.Packet] | None:
        try:
            if not self._frames.read(0 if block else socket.MSG_DONTWAIT):
                return None
        except BlockingIOError:
            pass
        except (OSError, Changed):
            return None
        packets, self._packets = self._packets, []
        return packets

    def close(self) -> None:
        """Do nothing: it holds no descriptors."""


def framed(packet: wire.Packet) -> list[Any]:
    """A packet's bytes, in pieces."""
    tensors: Any = packet.inline
    if packet.fd not in (None, wire.LOST):
        size = os.fstat(packet.fd).st_size
        tensors = mmap.mmap(packet.fd, size, access=mmap.ACCESS_READ)
    return [_LENGTHS.pack(len(packet.head), len(packet.data)), packet.head, packet.data, tensors]


def unframed(content: bytes | memoryview, most: int = wire.INLINE_BYTES) -> wire.Packet:
    """The packet; tensors of more than `most` bytes in all go into a memfd, if one can be made, for ranks to map."""
    head, data = _LENGTHS.unpack_from(content)
    view = memoryview(content)[_LENGTHS.size :]
    tensors = view[head + data :]
    packet = wire.Packet(bytes(view[head : head + data]), head=bytes(view[:head]))
    if len(tensors) > most:
        with contextlib.suppress(OSError):
            packet.fd = os.memfd_create("spmd-values", os.MFD_CLOEXEC)
    if packet.fd is None:
        packet.inline = bytes(tensors)
        return packet
    written = 0
    while written < len(tensors):
        written += os.write(packet.fd, tensors[written:])
    return packet


def inlined(packet: wire.Packet) -> wire.Packet:
    """The same packet without a memfd, for a process that can open no more files."""
    return whole_packet(b"".join(framed(packet)))


def whole_packet(content: bytes) -> wire.Packet:
    """The packet, with all tensors inline."""
    return unframed(content, most=sys.maxsize)
