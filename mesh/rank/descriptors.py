"""Every message between a process and its zygote, with the file descriptors that come along."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import os
import socket
from typing import Any

from ...kernels.network.codec import Codec, Message


@dataclasses.dataclass(frozen=True, slots=True)
class RankRequest(Message):
    """To the zygote: fork a rank; its socket, standard output and error, and the arena come as descriptors.

    Attributes:
        rank, axes: its number, and the mesh's axes and sizes.
        backend, factory: the transport, and its pickled factory, if the program has registered it.
        device, threads, pinned, seed, timeout: as in `Mesh`; `pinned` is the number of threads under `shards=`.
        store: path or tcp://host:port of the store, for backends that need one; hosts: each one's ranks, if several.
        address: where ranks of other hosts reach this one; copies: how many other hosts have each value.
        generation: the mesh's; key: the mesh's secret, by which its processes know each other.
        cwd, path, argv, environ: the driver's; levels: of its loggers, by name.
    """

    rank: int
    axes: tuple[tuple[str, int], ...]
    backend: str
    factory: bytes | None
    device: str
    threads: int
    pinned: int
    seed: int
    timeout: float
    store: str
    hosts: tuple[tuple[int, ...], ...]
    address: str
    copies: int
    generation: int
    key: bytes
    cwd: str
    path: tuple[str, ...]
    argv: tuple[str, ...]
    environ: dict[str, str]
    levels: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReaderRequest(Message):
    """To the zygote of a rank: fork a reader; its socket, the memory for its notes, standard output and error, and the
    current folder come as descriptors.

    Attributes:
        index: its number on its rank.
        path, environ: the rank's.
    """

    index: int
    path: tuple[str, ...]
    environ: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class StandBy(Message):
    """To the zygote: fork another zygote, which serves the socket that comes along."""


@dataclasses.dataclass(frozen=True, slots=True)
class Forked(Message):
    """From the zygote: it has forked this process, whose pidfd comes along."""

    pid: int


@dataclasses.dataclass(frozen=True, slots=True)
class Refused(Message):
    """From the zygote: forking has failed, with this errno."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Exited(Message):
    """From the zygote: a child process has ended; the status is negative for a signal."""

    pid: int
    status: int


_codec = Codec(RankRequest, ReaderRequest, StandBy, Forked, Refused, Exited)
encode, decode = _codec.encode, _codec.decode


def send(connection: socket.socket, message: Message, fds: list[int]) -> None:
    content = encode(message)
    data = len(content).to_bytes(8, "little") + content
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with contextlib.suppress(ConnectionError):
        # At once, as far as it fits, so that nobody waits for the rest from a process that is stopped in between.
        if rest := data[connection.sendmsg([data], rights) :]:
            connection.sendall(rest)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """One message and its descriptors, or (None, []) at the end of the stream.

    No descriptors, where some were sent, mean that this process can open no more files.
    """
    fds = array.array("i")
    try:
        head, ancillary, flags, _ = connection.recvmsg(8, socket.CMSG_SPACE(64), socket.MSG_CMSG_CLOEXEC)
        for _, _, content in ancillary:
            fds.frombytes(content)
        head += _received(connection, 8 - len(head)) if head else b""
        data = _received(connection, int.from_bytes(head, "little")) if head else b""
    except ConnectionError:
        data, flags = b"", 0
    if not data or flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        del fds[:]
    return decode(data) if data else None, list(fds)


def _received(connection: socket.socket, length: int) -> bytes:
    """The next bytes, as many as this."""
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionResetError("the stream ended within a message")
        data += piece
    return data
