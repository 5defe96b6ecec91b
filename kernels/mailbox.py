"""Messages between ranks over TCP, matched by (source, tag) in any order.

Why not Gloo's own: a receive there can neither be polled nor given up (its wait closes the connection when it times
out), and unmatched messages block. Here a thread moves bytes whatever the ranks' main threads do, so that a message
under way never depends on the receiver asking for it. Each ordered pair of ranks has a connection, made by the sender.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections import deque
from typing import Any

import torch

_HELLO = struct.Struct("<q")  # the sender's rank
_HEADER = struct.Struct("<qQ")  # tag, bytes


class _Outgoing:
    """A message being sent; `sent` once its bytes have left this process's memory."""

    __slots__ = ("pieces", "sent", "tensor")

    def __init__(self, tag: int, tensor: torch.Tensor):
        self.tensor = tensor  # keeps the memory alive
        self.pieces = [memoryview(_HEADER.pack(tag, tensor.numel())), tensor.numpy().data.cast("B")]
        self.sent = False


class _Incoming:
    """A connection that a peer sends on: whole messages go to the inbox, in order."""

    def __init__(self, connection: socket.socket, inbox: list[tuple[int, int, torch.Tensor]]):
        self._connection, self._inbox = connection, inbox
        self._head = bytearray()
        self._source: int | None = None
        self._tag = 0
        self._body: torch.Tensor | None = None
        self._got = 0

    def read(self) -> bool:
        """Take what is there; False at the end of the stream."""
        try:
            while True:
                if self._body is None:
                    wanted = (_HELLO if self._source is None else _HEADER).size
                    data = self._connection.recv(wanted - len(self._head))
                    if not data:
                        return False
                    self._head += data
                    if len(self._head) < wanted:
                        continue
                    if self._source is None:
                        (self._source,) = _HELLO.unpack(self._head)
                    else:
                        self._tag, nbytes = _HEADER.unpack(self._head)
                        self._body, self._got = torch.empty(nbytes, dtype=torch.uint8), 0
                    self._head.clear()
                if self._body is not None:
                    rest = self._body.numpy().data[self._got :]
                    if len(rest):
                        count = self._connection.recv_into(rest)
                        if not count:
                            return False
                        self._got += count
                    if self._got == self._body.numel():
                        assert self._source is not None
                        self._inbox.append((self._source, self._tag, self._body))
                        self._body = None
        except (BlockingIOError, InterruptedError):
            return True
        except ConnectionError:
            return False


class Mailbox:
    """This rank's end of the messages of one group.

    Args:
        store: shared by the group; ranks publish their address there.
        host: the address to listen on.
    """

    def __init__(self, store: Any, name: str, rank: int, host: str):
        self._store, self._name, self._rank = store, name, rank
        self.inbox: list[tuple[int, int, torch.Tensor]] = []  # (source, tag, bytes) not yet asked for
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._outgoing: dict[int, tuple[socket.socket, deque[_Outgoing]]] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._listener, selectors.EVENT_READ, "accept")
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")
        self._closed = False
        store.set(f"{name}/mailbox/{rank}", f"{host} {self._listener.getsockname()[1]}")
        self._thread = threading.Thread(target=self._run, name="spmd-mailbox", daemon=True)
        self._thread.start()

    def address(self, peer: int) -> tuple[str, int] | None:
        """Where a peer listens, or None while it has not said so."""
        key = f"{self._name}/mailbox/{peer}"
        if not self._store.check([key]):
            return None
        host, port = self._store.get(key).decode().split()
        return host, int(port)

    def connected(self, peer: int) -> bool:
        """Whether there is a connection to a peer; makes it if the peer listens."""
        if peer not in self._outgoing:
            address = self.address(peer)
            if address is None:
                return False
            connection = socket.create_connection(address, timeout=10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_HELLO.pack(self._rank))
            connection.setblocking(False)
            with self._lock:
                self._outgoing[peer] = (connection, deque())
        return True

    def post(self, tensor: torch.Tensor, peer: int, tag: int) -> _Outgoing:
        """Queue flat uint8 bytes for a connected peer."""
        message = _Outgoing(tag, tensor)
        with self._lock:
            connection, queue = self._outgoing[peer]
            queue.append(message)
            # Most messages fit the socket's buffer: send them here and spare the thread.
            if len(queue) == 1 and self._write(connection, queue):
                return message
        os.write(self._wake_write, b"!")
        return message

    @staticmethod
    def _write(connection: socket.socket, queue: deque[_Outgoing]) -> bool:
        """Write what the socket takes; whether the queue is empty now."""
        while queue:
            message = queue[0]
            while message.pieces:
                piece = message.pieces[0]
                if len(piece):
                    try:
                        count = connection.send(piece)
                    except (BlockingIOError, InterruptedError):
                        return False
                    except ConnectionError:
                        queue.clear()  # the peer is gone; whoever waits learns it from the watch
                        return True
                    message.pieces[0] = piece[count:]
                if not len(message.pieces[0]):
                    message.pieces.pop(0)
            message.sent = True
            queue.popleft()
        return True

    def _run(self) -> None:
        watched: set[int] = set()
        while not self._closed:
            with self._lock:
                for peer, (connection, queue) in self._outgoing.items():
                    if queue and peer not in watched:
                        self._selector.register(connection, selectors.EVENT_WRITE, peer)
                        watched.add(peer)
            for key, _ in self._selector.select():
                if key.data == "wake":
                    os.read(self._wake_read, 4096)
                elif key.data == "accept":
                    with contextlib.suppress(OSError):
                        connection, _ = self._listener.accept()
                        connection.setblocking(False)
                        self._selector.register(connection, selectors.EVENT_READ, _Incoming(connection, self.inbox))
                elif isinstance(key.data, _Incoming):
                    if not key.data.read():
                        self._selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
                else:
                    with self._lock:
                        connection, queue = self._outgoing[key.data]
                        if self._write(connection, queue):
                            self._selector.unregister(connection)
                            watched.discard(key.data)

    def close(self) -> None:
        """Stop the thread and close all connections."""
        self._closed = True
        os.write(self._wake_write, b"!")
        self._thread.join(2.0)
        for key in list(self._selector.get_map().values()):
            if not isinstance(key.fileobj, int):
                key.fileobj.close()  # type: ignore[attr-defined]
        for connection, _ in self._outgoing.values():
            connection.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
