"""Messages between ranks over TCP, matched by (source, tag) in any order.

Why not Gloo's own messages: a receive there can neither be polled nor cancelled (its wait closes the connection when it
times out), and unmatched messages block. Here a thread moves bytes whatever the ranks' main threads do, so a message
gets through even if the receiver has not asked for it. Each ordered pair of ranks has a connection, made by the sender.

Invariant: from a new connection only a hello of a fixed length is read, until it has proved which rank sends it. Its
code is made with the job's key from a one-time number that the receiver put into the store, and each rank may say hello
once, so replaying what was overheard is useless. Connections that don't say hello are dropped for newer ones; a sender
sends messages only after its hello was answered with a welcome.
Between hosts each message has a code as well, and the code of its head is checked before its length is trusted. On
loopback nobody but the kernel is between the two ends of a connection.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import struct
import threading
import time
from collections import deque
from typing import Any

import torch

from ..errors import PeerLost
from ..listening import READ, WRITE, Listening
from ..processes import Owned
from .authentication import CODE_BYTES, MessageCodes, code, key_of, same
from .frames import Changed
from .interface import is_loopback
from .messages import HELLO, Incoming, Outgoing

_STRANGERS = 32  # how many connections may exist that have not said hello
_PAUSE_SECONDS = 0.1  # how long nobody is let in when this process can open no more files; and between dials


def address_key(name: str, rank: int) -> str:
    """Where a rank publishes the address of its mailbox, in the group's store."""
    return f"{name}/mailbox/{rank}"


class Mailbox(Owned):
    """This rank's end of the messages of one group.

    Args:
        store: shared by the group; ranks publish their address there.
        host: the address to listen on.
    """

    def __init__(self, store: Any, name: str, rank: int, host: str):
        super().__init__()
        self._store, self._name, self._rank = store, name, rank
        self.inbox: list[tuple[int, int, torch.Tensor, int]] = []  # (source, tag, bytes, stamp) not yet received
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self._key, self._number = key_of(store), secrets.token_bytes(CODE_BYTES)
        self._strangers: deque[Incoming] = deque()  # connections that have not said hello yet
        self._admitted: set[int] = set()
        self._host = host
        self._outgoing: dict[int, tuple[socket.socket, deque[Outgoing]]] = {}
        # For peers that have not let this rank in yet: connection, codes and expected welcome; when to dial again.
        self._dialled: dict[int, tuple[socket.socket, MessageCodes | None, bytes]] = {}
        self._again_at: dict[int, float] = {}
        self._codes: dict[int, MessageCodes | None] = {}  # of sent messages, by destination
        self._lock = threading.Lock()
        self._listening = Listening(self._watch_queues)
        self._listening.selector.register(self._listener, READ, self._accept)
        self._watched: set[int] = set()  # peers whose sockets took only a part of what is for them
        self._closed = self._pausing = False
        self._failure: BaseException | None = None
        store.set(address_key(name, rank), f"{host} {self._listener.getsockname()[1]} {self._number.hex()}")
        self._thread = threading.Thread(target=self._serve, name="spmd-mailbox", daemon=True)
        self._thread.start()

    def _code(self, use: bytes, number: bytes, source: int, destination: int) -> bytes:
        """The code for one use between two ranks; `number` is what the destination has put into the store."""
        return code(self._key, use, number, self._name.encode(), struct.pack("<qq", source, destination))

    def _hello(self, number: bytes, source: int, destination: int) -> bytes:
        return HELLO.pack(source, self._code(b"hello", number, source, destination))

    def _welcome(self, number: bytes, source: int, destination: int) -> bytes:
        """The answer to a rank that was let in."""
        return self._code(b"welcome", number, source, destination)

    def _codes_between(self, host: str, number: bytes, source: int, destination: int) -> MessageCodes | None:
        """The codes of one rank's messages to another, which listens at `host`."""
        return None if is_loopback(host) else MessageCodes(self._code(b"messages", number, source, destination))

    def _codes_of(self, source: int) -> MessageCodes | None:
        return self._codes_between(self._host, self._number, source, self._rank)

    def _admit(self, hello: bytes) -> int | None:
        source, _ = HELLO.unpack(hello)
        if not same(hello, self._hello(self._number, source, self._rank)) or source in self._admitted:
            return None
        self._admitted.add(source)
        return source

    def check(self) -> None:
        """Raise if messages no longer move."""
        if self._failure is None:
            return
        got, remedy = f"{type(self._failure).__name__}: {self._failure}", "start the job anew, and please report it"
        if isinstance(self._failure, Changed):
            got, remedy = str(self._failure), "see who else can reach the ports of this job: docs/security.md"
        problem = f"rank {self._rank} of its group can neither send nor receive messages any more"
        raise PeerLost(problem, got=got, remedy=remedy)

    def connected(self, peer: int) -> bool:
        """Whether a peer has let this rank in; dials it if it listens, and again if it dropped the connection.

        Until then only a hello is sent, so that no message can be lost with a connection.
        """
        self.check()
        if peer in self._outgoing:
            return True
        if peer not in self._dialled and not self._dial(peer):
            return False
        connection, codes, expected = self._dialled[peer]
        try:
            # It arrives as a whole or not at all, since it fits one TCP segment.
            stated = connection.recv(CODE_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            stated = b""
        del self._dialled[peer]
        if not same(stated, expected):
            connection.close()
            self._again_at[peer] = time.monotonic() + _PAUSE_SECONDS
            return False
        with self._lock:
            self._codes[peer] = codes
            self._outgoing[peer] = (connection, deque())
        return True

    def _dial(self, peer: int) -> bool:
        key = address_key(self._name, peer)
        if time.monotonic() < self._again_at.get(peer, 0.0) or not self._store.check([key]):
            return False
        host, port, text = self._store.get(key).decode().split()
        number = bytes.fromhex(text)
        try:
            connection = socket.create_connection((host, int(port)), timeout=10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._hello(number, self._rank, peer))
        except (ConnectionError, TimeoutError):  # if the peer has died, the watch will raise that
            self._again_at[peer] = time.monotonic() + _PAUSE_SECONDS
            return False
        connection.setblocking(False)
        codes = self._codes_between(host, number, self._rank, peer)
        self._dialled[peer] = connection, codes, self._welcome(number, self._rank, peer)
        return True

    def post(self, tensor: torch.Tensor, peer: int, tag: int, stamp: int) -> Outgoing:
        """Queue flat uint8 bytes, and their stamp, for a connected peer."""
        with self._lock:
            # Under the lock, since codes depend on the messages' order.
            message = Outgoing(tag, stamp, tensor, self._codes[peer])
            connection, queue = self._outgoing[peer]
            queue.append(message)
            # Most messages fit into the socket's buffer: send them here, without the thread.
            if len(queue) == 1 and self._write(connection, queue):
                return message
        self._listening.wake()
        return message

    @staticmethod
    def _write(connection: socket.socket, queue: deque[Outgoing]) -> bool:
        """Write as much as the socket takes; returns whether the queue is empty now."""
        while queue:
            message = queue[0]
            while message.piece is not None:
                try:
                    message.advance(connection.send(message.piece))
                except (BlockingIOError, InterruptedError):
                    return False
                except ConnectionError:
                    for each in queue:
                        each.lost = True
                    queue.clear()
                    return True
            message.sent = True
            queue.popleft()
        return True

    def _serve(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._failure = error  # `check` raises it in any wait

    def _run(self) -> None:
        while not self._closed:
            events = self._listening.select(_PAUSE_SECONDS if self._pausing else None)
            if self._pausing:
                self._listening.selector.register(self._listener, READ, self._accept)
                self._pausing = False
            for take in events:
                take()

    def _watch_queues(self) -> None:
        with self._lock:
            for peer, (connection, queue) in self._outgoing.items():
                if queue and peer not in self._watched:
                    self._listening.selector.register(connection, WRITE, functools.partial(self._write_more, peer))
                    self._watched.add(peer)

    def _write_more(self, peer: int, events: int) -> None:
        with self._lock:
            connection, queue = self._outgoing[peer]
            if self._write(connection, queue):
                self._listening.forget(connection)
                self._watched.discard(peer)

    def _accept(self, events: int) -> None:
        """Accept a connection; if too many have not said hello, drop the oldest of these."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:  # no more files: drop one, and leave the others waiting for a moment
            if self._strangers:
                self._drop(self._strangers[0])
            self._listening.forget(self._listener)
            self._pausing = True
            return
        connection.setblocking(False)
        incoming = Incoming(connection, self.inbox, self._admit, self._codes_of)
        self._listening.selector.register(connection, READ, functools.partial(self._read, incoming))
        self._strangers.append(incoming)
        self._read(incoming, READ)
        if len(self._strangers) > _STRANGERS:
            self._drop(self._strangers[0])

    def _read(self, incoming: Incoming, events: int) -> None:
        if incoming.connection.fileno() < 0:  # dropped in this round
            return
        stranger, whole = incoming.source is None, incoming.read()
        if stranger and incoming.source is not None:
            self._strangers.remove(incoming)
            with contextlib.suppress(OSError):
                incoming.connection.send(self._welcome(self._number, incoming.source, self._rank))
        if not whole:
            self._drop(incoming)

    def _drop(self, incoming: Incoming) -> None:
        self._listening.forget(incoming.connection)
        incoming.connection.close()
        if incoming in self._strangers:
            self._strangers.remove(incoming)

    def close(self) -> None:
        """Stop the thread and close all connections; in a forked child both belong to the parent."""
        self._closed = True
        if self.foreign:
            return
        self._listening.wake()
        self._thread.join(2.0)
        for key in list(self._listening.selector.get_map().values()):
            if not isinstance(key.fileobj, int):
                key.fileobj.close()  # type: ignore[attr-defined]
        for dialled in self._dialled.values():
            dialled[0].close()
        for outgoing in self._outgoing.values():
            outgoing[0].close()
        self._listening.close()
