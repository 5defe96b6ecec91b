"""Objects on their way between the driver and its ranks: cloudpickle, with tensors beside the stream.

Tensors travel as raw bytes: a few inline, many in one `memfd` that the receiver maps copy-on-write, so that a value
sent to all ranks of a host is one copy in memory. What exists on one side only (a mesh, a value on it) is replaced
by a name through `name_of` and `object_of`. Invariant: a tensor referred to twice in one object arrives as one tensor.
"""

from __future__ import annotations

import array
import dataclasses
import errno
import hashlib
import io
import itertools
import mmap
import os
import pickle
import socket
import struct
import types
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch

from ..kernels.copying import copy_alone
from ..kernels.errors import MeshError
from ..kernels.limits import named_limits
from ..kernels.processes import ThreadBuffer
from . import strides
from .pickling.attributes import Parts
from .pickling.objects import Pickler
from .pickling.unpickler import Unpickler
from .readers.stacked import Stacked

INLINE_BYTES = 1 << 16
LOST = -1  # in place of a descriptor that arrived when this process could open no more files
_buffer = ThreadBuffer(1 << 18)  # bytes of one read
_SPACE = socket.CMSG_SPACE(16 * 4)  # for the descriptors that come with them
# As ints: combining the enumeration's members takes longer than receiving a message.
_WAITING, _AT_ONCE = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_CUT_SHORT = int(socket.MSG_CTRUNC)
_HEADER = struct.Struct("<QQQB")  # bytes of the head, of the pickle, of inline tensors; number of descriptors
_TENSORS = (torch.Tensor, torch.nn.Parameter)
# What most pickles are made of: checked first, as none of these is ever sent as a name.
_PLAIN = frozenset({str, int, float, bool, bytes, tuple, list, dict, set, type(None), types.FunctionType})


class Unsendable(MeshError):
    """An object that cannot be pickled."""


@dataclasses.dataclass(slots=True)
class Packet:
    """A pickle and its tensors, ready to be sent any number of times.

    Attributes:
        data: the content; reading it may need modules, names or values that the receiver lacks.
        inline, fd: the bytes of its tensors; `LOST` if they could not be received.
        head, values: the message whose content it is, encoded; the calls whose values it names (those of a driver's).
    """

    data: bytes
    inline: bytes | bytearray = b""
    fd: int | None = None
    head: bytes = b""
    values: Collection[int] = ()

    @property
    def nbytes(self) -> int:
        return len(self.data) + len(self.inline) + (0 if self.fd in (None, LOST) else os.fstat(self.fd).st_size)

    def close(self) -> None:
        if self.fd not in (None, LOST):
            os.close(self.fd)
        self.fd = None


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO, name_of: Callable[[Any], Any] | None, parts: Parts | None):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._name_of, self.parts = name_of, parts
        self._known: dict[int, int] = {}
        self.tensors: list[torch.Tensor | Stacked] = []
        self.kept: list[Any] = []  # alive, since ids are unique only among live objects

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN or (kind is torch.nn.Parameter and obj.__dict__):  # its attributes travel, too: see `Pickler`
            return None
        if kind in _TENSORS and obj.is_cpu and obj.layout is torch.strided and not obj.is_quantized:
            index = self._known.get(id(obj))
            if index is None:
                index = self._known[id(obj)] = len(self.kept)
                self.kept.append(obj)
                flat, layout = strides.flattened(obj)
                self.tensors.append(flat)
                trainable = obj.requires_grad and obj.is_leaf
                return ("tensor", index, flat.dtype, tuple(obj.shape), layout, trainable, kind is torch.nn.Parameter)
            return ("again", index)
        if kind is Stacked:
            self.kept.append(obj)
            self.tensors.append(obj)
            return ("tensor", len(self.kept) - 1, obj.dtype, obj.shape, None, False, False)
        return None if self._name_of is None else self._name_of(obj)


def dumps(
    obj: Any,
    name_of: Callable[[Any], Any] | None = None,
    *,
    allocate: Callable[[int], memoryview] | None = None,
    in_step: bool = False,
) -> Packet:
    """Pickle `obj`; `name_of(x)` gives the name that stands for x on the other side, or None to send x itself.

    Args:
        allocate: gives memory for this many bytes of tensors, if these are not to travel with the packet.
        in_step: a step refers to it; then methods travel with those attributes of their objects that they read.
    """
    parts, settled = Parts() if in_step else None, False
    while not settled:
        pickler = _Pickler(file := io.BytesIO(), name_of, parts)
        pickler.dump(obj)
        settled = parts is None or parts.suffice(pickler.memo.copy())
    packet = Packet(file.getvalue())
    if not pickler.tensors:
        return packet
    offsets, total = [], 0
    for flat in pickler.tensors:
        offsets.append(total)
        total += -(-flat.numel() * flat.element_size() // 64) * 64
    buffer: Any = None
    if total <= INLINE_BYTES:
        buffer = packet.inline = bytearray(total)
    elif allocate is not None:
        buffer = allocate(total)
    try:
        if buffer is None:
            with named_limits():
                packet.fd = os.memfd_create("spmd-values", os.MFD_CLOEXEC)
                os.ftruncate(packet.fd, total)
                buffer = mmap.mmap(packet.fd, total)
        for flat, offset in zip(pickler.tensors, offsets, strict=True):
            if flat.numel():
                part = torch.frombuffer(buffer, dtype=flat.dtype, count=flat.numel(), offset=offset)
                flat.write(part) if isinstance(flat, Stacked) else copy_alone(part, flat)
    except BaseException:  # Ctrl-C, say
        packet.close()
        raise
    return packet


def content_hash(packet: Packet) -> str:
    """A hash of a packet's content, without its head."""
    digest = hashlib.blake2b(packet.data, digest_size=16)
    digest.update(packet.inline)
    if packet.fd is not None:
        for start in range(0, os.fstat(packet.fd).st_size, 1 << 24):
            digest.update(os.pread(packet.fd, 1 << 24, start))
    return digest.hexdigest()


class _Unpickler(Unpickler):
    def __init__(self, packet: Packet, object_of: Callable[[Any], Any] | None, memory: memoryview | None):
        super().__init__(io.BytesIO(packet.data))
        self._object_of = object_of
        self._buffer: Any = bytearray(packet.inline)
        # Tensors from a file are views of one tensor: torch maps the file and closes it, while mmap keeps a descriptor.
        self._base: torch.Tensor | None = None
        if memory is not None:
            self._base = torch.frombuffer(memory, dtype=torch.uint8)
        elif packet.fd is not None:
            with named_limits():
                if packet.fd == LOST:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                size = os.fstat(packet.fd).st_size
                self._base = torch.from_file(f"/proc/self/fd/{packet.fd}", shared=False, size=size, dtype=torch.uint8)
        self._at = 0
        self._tensors: list[torch.Tensor] = []

    def persistent_load(self, name: Any) -> Any:
        if name[0] == "again":
            return self._tensors[name[1]]
        if name[0] != "tensor":
            assert self._object_of is not None
            return self._object_of(name)
        _, _, dtype, shape, layout, trainable, parameter = name
        numel = 1
        for size in shape:
            numel *= size
        if numel:
            if self._base is None:
                tensor = torch.frombuffer(self._buffer, dtype=dtype, count=numel, offset=self._at)
            else:
                tensor = self._base[self._at : self._at + numel * dtype.itemsize].view(dtype)
            tensor = tensor.view(shape) if layout is None else tensor.as_strided(shape, layout)
        else:
            tensor = torch.empty_strided(shape, layout or strides.standard(shape), dtype=dtype, device="cpu")
        self._at += -(-numel * dtype.itemsize // 64) * 64
        if parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=trainable)
        elif trainable:
            tensor.requires_grad_()
        self._tensors.append(tensor)
        return tensor


def loads(packet: Packet, object_of: Callable[[Any], Any] | None = None, memory: memoryview | None = None) -> Any:
    """The object of a packet; `object_of(name)` undoes the sender's `name_of`.

    Args:
        memory: the memory that the sender's `allocate` gave.
    """
    return _Unpickler(packet, object_of, memory).load()


def to_bytes(obj: Any, name_of: Callable[[Any], Any] | None = None) -> bytes:
    """An object as one bytes object, for transports that know no packets."""
    packet = dumps(obj, name_of)
    # Mapped, since Linux reads at most 2 GiB at once.
    tensors = packet.inline if packet.fd is None else mmap.mmap(packet.fd, 0, access=mmap.ACCESS_READ)
    packet.close()
    return b"".join((len(packet.data).to_bytes(8, "little"), packet.data, tensors))


def from_bytes(data: bytes, object_of: Callable[[Any], Any] | None = None) -> Any:
    end = 8 + int.from_bytes(data[:8], "little")
    return loads(Packet(data[8:end], data[end:]), object_of)


def frame(packet: Packet) -> list[memoryview]:
    """A packet's bytes in the order in which they are sent; a descriptor goes with the first of them."""
    header = _HEADER.pack(len(packet.head), len(packet.data), len(packet.inline), packet.fd is not None)
    parts = (header, packet.head, packet.data, packet.inline)
    if len(packet.data) + len(packet.inline) < 1 << 14:
        return [memoryview(b"".join(parts))]
    return [memoryview(part) for part in parts if part]


def _rights(fd: int | None) -> list[tuple[int, int, array.array]]:
    return [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]


def send(connection: socket.socket, packet: Packet) -> None:
    """Send a packet whole, however long it takes."""
    first, *rest = frame(packet)
    connection.sendall(first[connection.sendmsg([first], _rights(packet.fd)) :])
    for part in rest:
        connection.sendall(part)


class Sender:
    """Sends packets without ever waiting: what the socket does not take now is kept until `flush`."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._waiting: deque[tuple[memoryview, int | None]] = deque()

    def send(self, packet: Packet, parts: list[memoryview] | None = None) -> bool:
        """Take over a packet, which the caller may then close; whether all of it is on its way.

        Args:
            parts: its `frame`, if the caller has made it to send the packet to several receivers.
        """
        fd = packet.fd
        parts = frame(packet) if parts is None else parts
        if not self._waiting:  # try at once: keeping the packet would need another descriptor
            try:
                sent = self._sent(parts[0], fd)
                parts, fd = [parts[0][sent:], *parts[1:]] if sent < len(parts[0]) else parts[1:], None
            except BlockingIOError:
                pass
            if not parts:
                return True
        for part in parts:
            with named_limits():
                self._waiting.append((part, None if fd is None else os.dup(fd)))
            fd = None
        return self.flush()

    def _sent(self, part: memoryview, fd: int | None) -> int:
        if fd is None:
            return self._connection.send(part, socket.MSG_DONTWAIT)
        return self._connection.sendmsg([part], _rights(fd), socket.MSG_DONTWAIT)

    def flush(self) -> bool:
        """Send what the socket takes; whether that was all."""
        while self._waiting:
            part, fd = self._waiting[0]
            try:
                sent = self._sent(part, fd)
            except BlockingIOError:
                return False
            if fd is not None:
                os.close(fd)
            self._waiting[0] = (part[sent:], None)
            if sent == len(part):
                self._waiting.popleft()
        return True

    def close(self) -> None:
        while self._waiting:
            Packet(b"", fd=self._waiting.popleft()[1]).close()


class Receiver:
    """Puts packets together from what arrives, and never blocks to wait for the rest of one."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._buffer = bytearray()
        self._fds: list[int] = []

    def receive(self, *, block: bool) -> list[Packet] | None:
        """The packets that are complete after one read; None at the end of the stream."""
        flags, chunk = _WAITING if block else _AT_ONCE, _buffer.data
        try:
            nbytes, ancillary, found, _ = self._connection.recvmsg_into([chunk], _SPACE, flags)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._fds.extend(numbers)
        if found & _CUT_SHORT:  # the descriptor that came with this read was dropped; a packet has at most one
            self._fds.append(LOST)
        if not nbytes:
            return None
        self._buffer += memoryview(chunk)[:nbytes]
        packets = []
        while len(self._buffer) >= _HEADER.size:
            *lengths, count = _HEADER.unpack_from(self._buffer)
            ends = list(itertools.accumulate(lengths, initial=_HEADER.size))
            if len(self._buffer) < ends[-1]:
                break
            head, pickled, inline = (bytes(self._buffer[a:b]) for a, b in itertools.pairwise(ends))
            packets.append(Packet(pickled, inline, self._fds.pop(0) if count else None, head))
            del self._buffer[: ends[-1]]
        return packets

    def close(self) -> None:
        """Close the descriptors of packets that never became complete."""
        while self._fds:
            Packet(b"", fd=self._fds.pop()).close()
