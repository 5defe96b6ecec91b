"""Where ranks hear calls of remote objects: on their own host under a name of the mesh's, on others at a port."""

from __future__ import annotations

import hashlib
import os
import socket
import struct

from ..hosts.coded import keep_alive

CONNECT_SECONDS = 5.0  # for another host to answer
_PEER = struct.Struct("3i")  # struct ucred


def address(key: bytes, rank: int) -> str:
    """The name under which a rank of a mesh listens on this host: without a file, gone with the process."""
    return "\0spmd-" + hashlib.blake2b(key + struct.pack("<q", rank), digest_size=16).hexdigest()


def listen(key: bytes, rank: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address(key, rank))
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def connected(key: bytes, rank: int, elsewhere: tuple[str, int] | None) -> socket.socket:
    """A connection to a rank: of this host, or where it listens on another.

    Raises:
        OSError: nobody is there.
    """
    if elsewhere is not None:
        connection = socket.create_connection(elsewhere, timeout=CONNECT_SECONDS)
        keep_alive(connection)
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address(key, rank))
            if not same_user(connection):
                raise ConnectionRefusedError("another user listens there")
        except OSError:
            connection.close()
            raise
    connection.setblocking(False)
    return connection


def same_user(connection: socket.socket) -> bool:
    """Whether the kernel says that the process at the other end is this user's."""
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except OSError:
        return False
    return _PEER.unpack(data)[1] == os.getuid()
