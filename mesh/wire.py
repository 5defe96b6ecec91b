"""Objects on their way between the driver and its ranks: cloudpickle, with tensors beside the stream.

Tensors travel as raw bytes: a few inline, many in one `memfd` that the receiver maps copy-on-write, so that a value
sent to all ranks of a host is one copy in memory. What only one side can know (a mesh, a value on it) is replaced
by a name through `hooks`. Invariant: a tensor referred to twice in one object arrives as one tensor.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

INLINE_BYTES = 1 << 16
_HEADER = struct.Struct("<QQB")  # bytes of the pickle, bytes of inline tensors, number of descriptors
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(slots=True)
class Packet:
    """A pickle and its tensors, ready to be sent any number of times."""

    data: bytes
    inline: bytes | bytearray = b""
    fd: int | None = None

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, name_of: Callable[[Any], Any] | None):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._name_of = name_of
        self._known: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []
        self.kept: list[Any] = []  # ids stay unique only while the objects live

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN and obj.layout is torch.strided and obj.device.type == "cpu" and not obj.is_quantized:
            index = self._known.get(id(obj))
            if index is None:
                index = self._known[id(obj)] = len(self.kept)
                self.kept.append(obj)
                flat, permuted, order = _flatten(obj)
                self.tensors.append(flat)
                trainable = obj.requires_grad if kind is torch.nn.Parameter else None
                return ("tensor", index, flat.dtype, permuted, order, trainable)
            return ("again", index)
        return None if self._name_of is None else self._name_of(obj)


def _flatten(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...] | None]:
    """A tensor's elements in memory order, with the shape and order of dimensions that restore its strides."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1), tuple(tensor.shape), None
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))
    permuted = tensor.permute(order)
    return permuted.contiguous().view(-1), tuple(permuted.shape), order


def dumps(obj: Any, name_of: Callable[[Any], Any] | None = None) -> Packet:
    """Pickle `obj`; `name_of(x)` gives the name that stands for x on the other side, or None to send x itself."""
    file = io.BytesIO()
    pickler = _Pickler(file, name_of)
    pickler.dump(obj)
    packet = Packet(file.getvalue())
    if not pickler.tensors:
        return packet
    offsets, total = [], 0
    for flat in pickler.tensors:
        offsets.append(total)
        total += -(-flat.numel() * flat.element_size() // 64) * 64
    buffer: Any
    if total <= INLINE_BYTES:
        buffer = packet.inline = bytearray(total)
    else:
        packet.fd = os.memfd_create("spmd-values", os.MFD_CLOEXEC)
        os.ftruncate(packet.fd, total)
        buffer = mmap.mmap(packet.fd, total)
    for flat, offset in zip(pickler.tensors, offsets, strict=True):
        if flat.numel():
            torch.frombuffer(buffer, dtype=flat.dtype, count=flat.numel(), offset=offset).copy_(flat)
    return packet


def content_hash(packet: Packet) -> str:
    """Names a packet's content: equal for equal bytes."""
    digest = hashlib.blake2b(packet.data, digest_size=16)
    digest.update(packet.inline)
    if packet.fd is not None:
        size = os.fstat(packet.fd).st_size
        for start in range(0, size, 1 << 24):
            digest.update(os.pread(packet.fd, 1 << 24, start))
    return digest.hexdigest()


class _Unpickler(pickle.Unpickler):
    def __init__(self, packet: Packet, object_of: Callable[[Any], Any] | None):
        super().__init__(io.BytesIO(packet.data))
        self._object_of = object_of
        self._buffer: Any = bytearray(packet.inline)
        if packet.fd is not None:
            size = os.fstat(packet.fd).st_size
            self._buffer = mmap.mmap(packet.fd, size, flags=mmap.MAP_PRIVATE)
        self._at = 0
        self._tensors: list[torch.Tensor] = []

    def persistent_load(self, name: Any) -> Any:
        if name[0] == "again":
            return self._tensors[name[1]]
        if name[0] != "tensor":
            assert self._object_of is not None
            return self._object_of(name)
        _, _, dtype, shape, order, trainable = name
        numel = 1
        for size in shape:
            numel *= size
        if numel:
            tensor = torch.frombuffer(self._buffer, dtype=dtype, count=numel, offset=self._at).view(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        self._at += -(-numel * dtype.itemsize // 64) * 64
        if order is not None:
            tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
        if trainable is not None:
            tensor = torch.nn.Parameter(tensor, requires_grad=trainable)
        self._tensors.append(tensor)
        return tensor


def loads(packet: Packet, object_of: Callable[[Any], Any] | None = None) -> Any:
    """The object of a packet; `object_of(name)` undoes the sender's `name_of`."""
    return _Unpickler(packet, object_of).load()


def send(connection: socket.socket, packet: Packet) -> None:
    """Send a packet whole."""
    fds = [] if packet.fd is None else [packet.fd]
    header = _HEADER.pack(len(packet.data), len(packet.inline), len(fds))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    if len(packet.data) + len(packet.inline) < 1 << 14:
        frame = b"".join((header, packet.data, packet.inline))
        sent = connection.sendmsg([frame], rights)
        if sent < len(frame):
            connection.sendall(frame[sent:])
        return
    connection.sendmsg([header], rights)
    connection.sendall(packet.data)
    connection.sendall(packet.inline)


class Receiver:
    """Puts packets together from what arrives; never blocks on half of one."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._buffer = bytearray()
        self._fds: list[int] = []

    def receive(self, *, block: bool) -> list[Packet] | None:
        """The packets that are complete after one read; None at the end of the stream."""
        flags = 0 if block else socket.MSG_DONTWAIT
        try:
            space = socket.CMSG_SPACE(16 * 4)
            data, ancillary, _, _ = self._connection.recvmsg(1 << 18, space, flags | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._fds.extend(numbers)
        if not data:
            return None
        self._buffer += data
        packets = []
        while len(self._buffer) >= _HEADER.size:
            pickled, inline, count = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + pickled + inline
            if len(self._buffer) < end:
                break
            middle = _HEADER.size + pickled
            fd = self._fds.pop(0) if count else None
            packets.append(Packet(bytes(self._buffer[_HEADER.size : middle]), bytes(self._buffer[middle:end]), fd))
            del self._buffer[:end]
        return packets
