"""Packets as plain bytes, which can leave a host: tensors that lie in a file without a name are read, and put back."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
from typing import Any

from .. import wire

_LENGTHS = struct.Struct("<QQ")  # of the head, of the pickle; the rest is the tensors' bytes


def framed(packet: wire.Packet) -> list[Any]:
    """A packet's bytes, in pieces."""
    tensors: Any = packet.inline
    if packet.fd not in (None, wire.LOST):
        size = os.fstat(packet.fd).st_size
        tensors = mmap.mmap(packet.fd, size, access=mmap.ACCESS_READ)
    return [_LENGTHS.pack(len(packet.head), len(packet.data)), packet.head, packet.data, tensors]


def unframed(content: bytes | memoryview, most: int = wire.INLINE_BYTES) -> wire.Packet:
    """The packet; more bytes of tensors than `most` lie in a file, which ranks of this host map, if it can be had."""
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
    """The same packet without a file, for who can open none."""
    return whole_packet(b"".join(framed(packet)))


def whole_packet(content: bytes) -> wire.Packet:
    """The packet, with all tensors beside the pickle."""
    return unframed(content, most=sys.maxsize)
