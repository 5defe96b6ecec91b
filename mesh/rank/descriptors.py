"""Short messages that carry file descriptors, between a driver and its zygote."""

from __future__ import annotations

import array
import contextlib
import socket
from typing import Any

from .. import protocol


def send(connection: socket.socket, message: protocol.Message, fds: list[int]) -> None:
    data = protocol.encode(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with contextlib.suppress(ConnectionError):
        connection.sendmsg([len(data).to_bytes(8, "little")], rights)
        connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """One message and its descriptors, or (None, []) at the end of the stream."""
    try:
        head, ancillary, _, _ = connection.recvmsg(
            8, socket.CMSG_SPACE(64), socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return None, []
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content)
    if len(head) < 8:
        return None, []
    data = b""
    length = int.from_bytes(head, "little")
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            return None, []
        data += piece
    return protocol.decode(data), list(fds)
