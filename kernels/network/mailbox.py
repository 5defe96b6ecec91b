"""Messages between ranks over TCP, matched by (source, tag) in any order.

Why not Gloo's own: a receive there can neither be polled nor given up (its wait closes the connection when it times
out), and unmatched messages block. Here a thread moves bytes whatever the ranks' main threads do, so that a message
under way never depends on the receiver asking for it. Each ordered pair of ranks has a connection, made by the sender.

Invariant: nothing is read from a connection but a hello of a fixed length until that has proved which rank sends it.
The hello's code is made with the job's key, of a number used once that the receiver has put into the store, and each
rank may say hello once, so that nothing that was overheard helps anyone. Who says nothing makes room for the next.
Between hosts each message has a code as well, its head before its length is believed; on loopback nobody but the kernel
stands between the two ends of a connection.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ..errors import PeerLost, message
from ..processes import Owned
from .authentication import CODE_BYTES, MessageCodes, code, key_of, same
from .interface import is_loopback

_HELLO = struct.Struct(f"<q{CODE_BYTES}s")  # the sender's rank, and its code
_HEADER = struct.Struct("<qQ")  # tag, bytes
_SHORT = 1024  # bytes of a message that leaves in one piece, with one code
_STRANGERS = 32  # connections that may stand before they have said hello
_PAUSE_SECONDS = 0.1  # in which nobody is let in, when this process can open no more files


class _Outgoing:
    """A message being sent; `sent` once its bytes have left this process's memory."""

    __slots__ = ("pieces", "sent", "tensor")

    def __init__(self, tag: int, tensor: torch.Tensor, codes: MessageCodes | None):
        self.tensor = tensor  # keeps the memory alive
        head, body = _HEADER.pack(tag, tensor.numel()), tensor.numpy().data.cast("B")
        if len(body) <= _SHORT:
            short = bytes(body)
            self.pieces = [memoryview(b"".join((head, b"" if codes is None else codes.of_next(head, short), short)))]
        elif codes is None:
            self.pieces = [memoryview(head), body]
        else:
            self.pieces = [memoryview(head + codes.of_next(head)), body, memoryview(codes.of_body(body))]
        self.sent = False


class _Changed(Exception):
    """What has come from a peer is not what it has sent."""


class _Incoming:
    """A connection that a peer sends on: whole messages go to the inbox, in order.

    Args:
        admit: the rank that a hello proves to be at the other end; None if it proves nothing.
        codes_of: what codes a rank's messages have; None: none.
    """

    def __init__(
        self,
        connection: socket.socket,
        inbox: list[tuple[int, int, torch.Tensor]],
        admit: Callable[[bytes], int | None],
        codes_of: Callable[[int], MessageCodes | None],
    ):
        self.connection, self._inbox, self._admit, self._codes_of = connection, inbox, admit, codes_of
        self._head = bytearray()
        self.source: int | None = None
        self._codes: MessageCodes | None = None
        self._code_bytes = self._tag = 0
        self._begun = b""  # the head of the message that is being read, with its code
        self._body: torch.Tensor | None = None
        self._got = 0

    def read(self) -> bool:
        """Take what is there; False at the end of the stream, or if it is not a peer's.

        Raises:
            _Changed: it is a peer's no more.
        """
        try:
            while True:
                if self._body is None:
                    wanted = _HELLO.size if self.source is None else _HEADER.size + self._code_bytes
                    data = self.connection.recv(wanted - len(self._head))
                    if not data:
                        return False
                    self._head += data
                    if len(self._head) < wanted:
                        continue
                    if self.source is None:
                        self.source = self._admit(bytes(self._head))
                        if self.source is None:
                            return False
                        self._codes = self._codes_of(self.source)
                        self._code_bytes = 0 if self._codes is None else CODE_BYTES
                    else:
                        self._begin_message()
                    self._head.clear()
                if self._body is not None:
                    rest = self._body.numpy().data[self._got :]
                    if len(rest):
                        count = self.connection.recv_into(rest)
                        if not count:
                            return False
                        self._got += count
                    if self._got == self._body.numel():
                        assert self.source is not None
                        self._inbox.append((self.source, self._tag, self._checked(self._body)))
                        self._body = None
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def _begin_message(self) -> None:
        """Make room for a message whose head is there; a long one's only once its code fits."""
        self._tag, nbytes = _HEADER.unpack_from(self._head)
        if self._codes is not None and nbytes > _SHORT:
            self._compare(bytes(self._head[_HEADER.size :]), self._codes.of_next(bytes(self._head[: _HEADER.size])))
            nbytes += CODE_BYTES
        self._begun = bytes(self._head)
        self._body, self._got = torch.empty(nbytes, dtype=torch.uint8), 0

    def _checked(self, body: torch.Tensor) -> torch.Tensor:
        """A message's bytes without their code, which fits."""
        if self._codes is None:
            return body
        if body.numel() <= _SHORT:
            head, its_code = self._begun[: _HEADER.size], self._begun[_HEADER.size :]
            self._compare(its_code, self._codes.of_next(head, body.numpy().tobytes()))
            return body
        content = body[:-CODE_BYTES]
        self._compare(body[-CODE_BYTES:].numpy().tobytes(), self._codes.of_body(content.numpy().data))
        return content

    def _compare(self, its_code: bytes, expected: bytes) -> None:
        if not same(its_code, expected):
            raise _Changed(f"a message from rank {self.source} that is not what it has sent")


class Mailbox(Owned):
    """This rank's end of the messages of one group.

    Args:
        store: shared by the group; ranks publish their address there.
        host: the address to listen on.
    """

    def __init__(self, store: Any, name: str, rank: int, host: str):
        super().__init__()
        self._store, self._name, self._rank = store, name, rank
        self.inbox: list[tuple[int, int, torch.Tensor]] = []  # (source, tag, bytes) not yet asked for
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self._key, self._number = key_of(store), secrets.token_bytes(CODE_BYTES)
        self._strangers: deque[_Incoming] = deque()  # have not said hello yet
        self._admitted: set[int] = set()
        self._host = host
        self._outgoing: dict[int, tuple[socket.socket, deque[_Outgoing]]] = {}
        self._codes: dict[int, MessageCodes | None] = {}  # of what this rank sends, by destination
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._listener, selectors.EVENT_READ, "accept")
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")
        self._closed = self._crowded = False
        self._failure: BaseException | None = None
        store.set(f"{name}/mailbox/{rank}", f"{host} {self._listener.getsockname()[1]} {self._number.hex()}")
        self._thread = threading.Thread(target=self._serve, name="spmd-mailbox", daemon=True)
        self._thread.start()

    def _hello(self, number: bytes, source: int, destination: int) -> bytes:
        return _HELLO.pack(
            source, code(self._key, number, self._name.encode(), struct.pack("<qq", source, destination))
        )

    def _codes_between(self, host: str, number: bytes, source: int, destination: int) -> MessageCodes | None:
        """The codes of one rank's messages to another, who listens at `host` and has put this number into the store."""
        if is_loopback(host):
            return None
        pair = struct.pack("<qq", source, destination)
        return MessageCodes(code(self._key, b"messages", number, self._name.encode(), pair))

    def _codes_of(self, source: int) -> MessageCodes | None:
        return self._codes_between(self._host, self._number, source, self._rank)

    def _admit(self, hello: bytes) -> int | None:
        source, _ = _HELLO.unpack(hello)
        if not same(hello, self._hello(self._number, source, self._rank)) or source in self._admitted:
            return None
        self._admitted.add(source)
        return source

    def check(self) -> None:
        """Raise if messages no longer move."""
        if self._failure is None:
            return
        got, remedy = f"{type(self._failure).__name__}: {self._failure}", "start the job anew, and please report it"
        if isinstance(self._failure, _Changed):
            got, remedy = str(self._failure), "see who else can reach the ports of this job: docs/security.md"
        problem = f"rank {self._rank} of its group can neither send nor receive messages any more"
        raise PeerLost(message(problem, got=got, remedy=remedy))

    def connected(self, peer: int) -> bool:
        """Whether there is a connection to a peer; makes it if the peer listens."""
        self.check()
        if peer not in self._outgoing:
            key = f"{self._name}/mailbox/{peer}"
            if not self._store.check([key]):
                return False
            host, port, number = self._store.get(key).decode().split()
            connection = socket.create_connection((host, int(port)), timeout=10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._hello(bytes.fromhex(number), self._rank, peer))
            connection.setblocking(False)
            with self._lock:
                self._codes[peer] = self._codes_between(host, bytes.fromhex(number), self._rank, peer)
                self._outgoing[peer] = (connection, deque())
        return True

    def post(self, tensor: torch.Tensor, peer: int, tag: int) -> _Outgoing:
        """Queue flat uint8 bytes for a connected peer."""
        with self._lock:
            message = _Outgoing(tag, tensor, self._codes[peer])  # codes go by the messages' order
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

    def _serve(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._failure = error  # whoever waits is told at once

    def _run(self) -> None:
        watched: set[int] = set()
        while not self._closed:
            with self._lock:
                for peer, (connection, queue) in self._outgoing.items():
                    if queue and peer not in watched:
                        self._selector.register(connection, selectors.EVENT_WRITE, peer)
                        watched.add(peer)
            events = self._selector.select(_PAUSE_SECONDS if self._crowded else None)
            if self._crowded:
                self._selector.register(self._listener, selectors.EVENT_READ, "accept")
                self._crowded = False
            for key, _ in events:
                if key.data == "wake":
                    os.read(self._wake_read, 4096)
                elif key.data == "accept":
                    self._accept()
                elif isinstance(key.data, _Incoming):
                    if key.data.connection.fileno() >= 0:  # not dropped in this round
                        self._read(key.data)
                else:
                    with self._lock:
                        connection, queue = self._outgoing[key.data]
                        if self._write(connection, queue):
                            self._selector.unregister(connection)
                            watched.discard(key.data)

    def _accept(self) -> None:
        """Let one in; of those who say nothing the oldest makes room."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:  # no more files: drop one, and leave the others waiting for a moment
            if self._strangers:
                self._drop(self._strangers[0])
            self._selector.unregister(self._listener)
            self._crowded = True
            return
        connection.setblocking(False)
        incoming = _Incoming(connection, self.inbox, self._admit, self._codes_of)
        self._selector.register(connection, selectors.EVENT_READ, incoming)
        self._strangers.append(incoming)
        self._read(incoming)
        if len(self._strangers) > _STRANGERS:
            self._drop(self._strangers[0])

    def _read(self, incoming: _Incoming) -> None:
        stranger = incoming.source is None
        if not incoming.read():
            self._drop(incoming)
        elif stranger and incoming.source is not None:
            self._strangers.remove(incoming)

    def _drop(self, incoming: _Incoming) -> None:
        self._selector.unregister(incoming.connection)
        incoming.connection.close()
        if incoming in self._strangers:
            self._strangers.remove(incoming)

    def close(self) -> None:
        """Stop the thread and close all connections; in a forked child both are the parent's."""
        self._closed = True
        if self.foreign:
            return
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
