"""Where ranks accept calls of remote objects: from their own host under a socket name, from other hosts at a port.

Any user can see which names are in use, and could take one as soon as its rank has died. So a rank has several names,
and nobody without the mesh's key can know the next. Invariant: whoever connects to a name reaches a process of the same
user, or nobody.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct

from ..hosts.coded import keep_alive

CONNECT_SECONDS = 5.0  # for another host to answer
_NAMES = 16  # that a rank can try, one after another
_PEER = struct.Struct("3i")  # struct ucred


def _name(key: bytes, rank: int, turn: int) -> str:
    """An abstract socket name for a rank on this host: there is no file, and it is gone with the process."""
    return "\0spmd-" + hashlib.blake2b(key + struct.pack("<qq", rank, turn), digest_size=16).hexdigest()


def listen(key: bytes, rank: int) -> socket.socket:
    """Listen under the first of a rank's names that is free.

    Raises:
        OSError: none is free.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for turn in range(_NAMES):
        try:
            listener.bind(_name(key, rank, turn))
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or turn == _NAMES - 1:
                listener.close()
                raise
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def connected(key: bytes, rank: int, elsewhere: tuple[str, int] | None) -> socket.socket:
    """A connection to a rank on this host, or on another, at the address `elsewhere`.

    Raises:
        OSError: no process listens there.
    """
    if elsewhere is not None:
        connection = socket.create_connection(elsewhere, timeout=CONNECT_SECONDS)
        keep_alive(connection)
        connection.setblocking(False)
        return connection
    for turn in range(_NAMES):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        with contextlib.suppress(ConnectionError, BlockingIOError):
            connection.connect(_name(key, rank, turn))
            if same_user(connection):
                return connection
        connection.close()
    raise ConnectionRefusedError(f"nobody of this user's listens as rank {rank}")


def same_user(connection: socket.socket) -> bool:
    """Whether the kernel says that the process at the other end is this user's."""
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except OSError:
        return False
    return _PEER.unpack(data)[1] == os.getuid()
