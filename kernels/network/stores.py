"""What torch's stores, in which ranks meet, don't tell: how they are reached, and whether they still are."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from .interface import is_loopback


def innermost(store: Any) -> Any:
    """The store inside wrappers such as `PrefixStore`."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def leads_nowhere_else(store: Any) -> bool:
    """Whether a store can be reached from this host only; a file may be on a file system that hosts share."""
    return is_loopback(getattr(innermost(store), "host", ""))


def limit_silence(store: Any, seconds: float) -> None:
    """End a store's operations with an error if its host or process is silent for `seconds`.

    torch waits for an answer as long as the connection exists: a quarter of an hour on a cut link, and for ever if the
    process that runs the store is stopped. (Waiting for a key that nobody has set yet has its own timeout in torch.)
    """
    store = innermost(store)
    if not isinstance(store, dist.TCPStore):
        return
    options: list[tuple[int, int, Any]] = [
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds)),
        (socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(1e6 * (seconds % 1)))),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 2))),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    ]
    for connection in _connections(store):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for level, name, value in options:
                connection.setsockopt(level, name, value)


def has_ended(store: Any) -> bool:
    """Whether the process that runs a store has closed its connection; torch would print an error for each request."""
    store = innermost(store)
    return isinstance(store, dist.TCPStore) and any(map(_is_closed, _connections(store)))


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError as error:
        return not isinstance(error, BlockingIOError)


def _connections(store: dist.TCPStore) -> Iterator[socket.socket]:
    """This process's connections to a store."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue  # `socket` would refuse its duplicate, and leave that open
            with socket.socket(fileno=os.dup(int(name))) as connection:
                # Only TCP sockets have a port; multiprocessing's pipes, for example, are nameless AF_UNIX sockets.
                over_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
                if over_ip and connection.type == socket.SOCK_STREAM and connection.getpeername()[1] == store.port:
                    yield connection
