"""Frames of messages that have been tampered with: none is read as anything else than what was sent."""

from __future__ import annotations

import contextlib
import datetime
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import until

from spmd import PeerLost
from spmd.kernels.network import mailbox, messages
from spmd.kernels.network.authentication import CODE_BYTES, AuthenticatedStore
from spmd.kernels.network.frames import Changed
from spmd.kernels.network.hosts import StoreWatch
from spmd.kernels.network.mailbox import Mailbox

MUTATIONS = 1000
OVER_SOCKETS = 40
BODIES = [b"", b"a", bytes(range(256)) * 3, struct.pack("<3f", 1, 2, 3), b"y" * 1016, b"z" * 1017]
STAMP = 0x0102030405060708
SENT = [(0, tag, body, STAMP) for tag, body in enumerate(BODIES)]
HEAD = struct.Struct("<qQ")
HELLO_BYTES = 8 + CODE_BYTES
EXTREMES = [0, 1, 2**31, 2**40, 2**62, 2**63, 2**64 - 1]


def store_of(secret: bytes) -> AuthenticatedStore:
    return AuthenticatedStore(dist.HashStore(), secret, datetime.timedelta(seconds=10))


@contextlib.contextmanager
def opened(store: dist.Store, rank: int) -> Iterator[Mailbox]:
    made = Mailbox(store, "group", rank, "127.0.0.1")
    try:
        yield made
    finally:
        made.close()


def frames_sent(to: Mailbox, secret: bytes, *, as_group: str = "group") -> list[bytes]:
    """What rank 0 sends to this mailbox: a hello, then each message's head and body, with the codes that they have."""
    store = store_of(secret)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = to._number.hex()
        store.set(f"{as_group}/mailbox/1", f"127.0.0.1 {listener.getsockname()[1]} {number}")
        sender = Mailbox(store, as_group, 0, "127.0.0.1")
        try:
            assert not sender.connected(1)
            connection, _ = listener.accept()
            connection.sendall(sender._welcome(to._number, 0, 1))
            assert until(lambda: sender.connected(1))
            for tag, body in enumerate(BODIES):
                data = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0).byte()
                sender.post(data, 1, tag, STAMP)
        finally:
            sender.close()
        with connection:
            data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    pieces = [data[:HELLO_BYTES]]
    rest = data[HELLO_BYTES:]
    coded = CODE_BYTES if len(rest) > sum(HEAD.size + 8 + len(body) for body in BODIES) else 0
    for nbytes in (8 + len(body) for body in BODIES):  # with the stamp
        for length in (HEAD.size + (coded if nbytes > 1024 else 0), nbytes + coded):
            pieces.append(rest[:length])
            rest = rest[length:]
    assert not rest
    return pieces


def mutated(frames: list[bytes], strange: list[bytes], draw: random.Random) -> bytes:
    """A stream with one or a few changes that know its structure."""
    frames = list(frames)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at = draw.randrange(len(frames))
        frame = bytearray(frames[at])
        how = draw.choice(["flip", "number", "cut", "grow", "drop", "double", "swap", "strange", "zero", "random"])
        if how == "flip" and frame:
            frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
        elif how == "number" and len(frame) >= 8:
            place = draw.choice([0, 8]) if len(frame) >= 16 else 0
            frame[place : place + 8] = struct.pack("<Q", draw.choice(EXTREMES))
        elif how == "cut":
            del frame[draw.randrange(len(frame) + 1) :]
        elif how == "grow":
            place = draw.randrange(len(frame) + 1)
            frame[place:place] = draw.randbytes(draw.choice([1, 8, 32, 100]))
        elif how == "zero":
            frame[:] = bytes(len(frame))
        elif how == "random":
            frame[:] = draw.randbytes(len(frame))
        elif how == "strange":
            frame[:] = strange[at % len(strange)]
        if how == "drop" and len(frames) > 1:
            del frames[at]
        elif how == "double":
            frames.insert(at, bytes(frame))
        elif how == "swap":
            other = draw.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
        else:
            frames[at] = bytes(frame)
    return b"".join(frames)


def read_back(to: Mailbox, stream: bytes) -> list[tuple[int, int, bytes, int]]:
    """What a mailbox takes from a connection on which this comes."""
    to._admitted.clear()
    inbox: list[tuple[int, int, torch.Tensor, int]] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.sendall(stream)
        ours.shutdown(socket.SHUT_WR)
        incoming = messages.Incoming(theirs, inbox, to._admit, to._codes_of)
        with contextlib.suppress(Changed):
            while incoming.read():
                pass
    return [(source, tag, body.numpy().tobytes(), stamp) for source, tag, body, stamp in inbox]


def test_mutations_of_messages_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sits between sends what he likes: messages come as they were sent, in their order, or not at all."""
    monkeypatch.setattr(mailbox, "is_loopback", lambda host: False)
    secret, draw = b"the secret of the job", random.Random(0)
    with opened(store_of(secret), 1) as to:
        honest, strange = frames_sent(to, secret), frames_sent(to, b"the secret of another job")
        other = frames_sent(to, secret, as_group="another group")
        assert len(honest[1]) == HEAD.size and len(honest[2]) == 8 + CODE_BYTES
        assert read_back(to, b"".join(honest)) == SENT
        longest = 0
        for number in range(MUTATIONS):
            stream = mutated(honest, strange if number % 2 else other, draw)
            got = read_back(to, stream)
            same = stream.startswith(b"".join(honest))
            assert got == SENT[: len(got)] and (same or len(got) < len(SENT)), number
            longest = longest if same else max(longest, len(got))
        assert longest == len(SENT) - 1  # changes of the last message, too
        assert to.inbox == []


def test_mutations_of_hellos() -> None:
    """Who can't sign in is not read at all, on loopback either."""
    secret, draw = b"the secret of the job", random.Random(1)
    with opened(store_of(secret), 1) as to:
        honest, strange = frames_sent(to, secret), frames_sent(to, b"the secret of another job")
        assert len(honest[1]) == HEAD.size and len(honest[2]) == 8
        assert read_back(to, b"".join(honest)) == SENT
        for number in range(MUTATIONS):
            hello = mutated(honest[:1], strange[:1], draw)
            if not hello.startswith(honest[0]):
                assert read_back(to, hello + b"".join(honest[1:])) == [], number


def test_mutations_over_sockets() -> None:
    """A mailbox that is sent all that while it works: its own peer's messages come, and nothing else."""
    secret, draw = b"the secret of the job", random.Random(2)
    store = store_of(secret)
    with opened(store, 1) as to, opened(store, 0) as sender, contextlib.ExitStack() as stack:
        honest, strange = frames_sent(to, secret), frames_sent(to, b"the secret of another job")
        assert until(lambda: sender.connected(1))
        port = to._listener.getsockname()[1]
        for number in range(OVER_SOCKETS):
            stream = mutated(honest[:1], strange[:1], draw) + b"".join(honest[1:])
            if stream.startswith(honest[0]) and number % 2:
                continue
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                stranger.sendall(stream)
            if number == 0:  # the real peer is known from now on, and what it has said helps nobody
                sender.post(torch.full((3,), number, dtype=torch.uint8), 1, number, STAMP)
                assert until(lambda: len(to.inbox) == 1)
            else:
                sender.post(torch.full((3,), number, dtype=torch.uint8), 1, number, STAMP)
        sender.post(torch.zeros(1, dtype=torch.uint8), 1, 99, STAMP)
        assert until(lambda: to.inbox and to.inbox[-1][1] == 99)
        assert all(source == 0 and (tag == 99 or body.tolist() == [tag] * 3) for source, tag, body, _ in to.inbox)
        to.check()


@pytest.mark.parametrize("place", [1, 4, -2, -1], ids=["head", "body", "long one's head", "long one's body"])
def test_a_change_on_the_way_is_told(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr(mailbox, "is_loopback", lambda host: False)
    secret = b"the secret of the job"
    with opened(store_of(secret), 1) as to:
        honest = frames_sent(to, secret)
        place %= len(honest)
        frame = bytearray(honest[place])
        frame[0] ^= 1
        with socket.create_connection(("127.0.0.1", to._listener.getsockname()[1])) as connection:
            connection.sendall(b"".join([*honest[:place], bytes(frame), *honest[place + 1 :]]))
            assert until(lambda: to._failure is not None)
        with pytest.raises(PeerLost, match=r"got a message from rank 0 that is not what it has sent.*security\.md"):
            to.check()
        come = [(source, tag, body.numpy().tobytes(), stamp) for source, tag, body, stamp in to.inbox]
        assert come == SENT[: (place - 1) // 2]


def test_a_thread_that_has_died_is_told_at_once(make_mesh: Any) -> None:
    """Whatever the cause: who waits for a message does not wait until the time is out."""
    mesh = make_mesh({"data": 2}, backend="gloo", timeout=40)

    def dies(*_: Any) -> None:
        raise ArithmeticError("of any cause")

    def body() -> None:
        comm, data = mesh.comm(), torch.zeros(3)
        if comm.rank == 1:
            Mailbox._read = dies  # type: ignore[method-assign]
            comm.recv(data, 0)
        else:
            comm.send(data, 1)

    with pytest.raises(PeerLost, match=r"can neither send nor receive.*got ArithmeticError: of any cause"):
        mesh.run(body)


def test_strangers_make_room_for_the_next() -> None:
    """Connections that say nothing are not kept."""
    store = store_of(b"a secret of the job")
    with opened(store, 1) as to, contextlib.ExitStack() as stack:
        host, port, _ = store.get("group/mailbox/1").decode().split()
        idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(100)]
        for connection in idle:
            connection.setblocking(False)

        def kept() -> int:
            found = 0
            for connection in idle:
                try:
                    found += bool(connection.recv(1))
                except BlockingIOError:
                    found += 1
                except ConnectionError:
                    pass
            return found

        assert until(lambda: kept() <= 32, 30.0)
        sender = stack.enter_context(opened(store, 0))
        assert until(lambda: sender.connected(1))
        sender.post(torch.ones(3).view(torch.uint8), 1, 7, STAMP)
        assert until(lambda: to.inbox)


def test_an_abort_that_is_none() -> None:
    """Where there is no secret, anybody may have written it."""
    for text in ("not a number", "", "-1 stop", "1e5 stop", "9" * 5000 + " stop", "\xb2 stop"):
        store = dist.HashStore()
        store.set("abort/0", text)
        StoreWatch(store, 0).check_peers()


@pytest.mark.parametrize("size", [2, 3])
def test_what_gloo_brings_is_not_unpickled_unless_a_rank_has_made_it(make_mesh: Any, size: int) -> None:
    mesh = make_mesh({"data": size}, backend="gloo")

    def body() -> list[bytes]:
        comm = mesh.comm()
        makes = [vars(base)["all_gather_bytes"] for base in type(comm).__mro__ if "all_gather_bytes" in vars(base)]
        return makes[-1 if comm.rank == 1 else 0](comm, b"from rank %d" % comm.rank)  # rank 1 says it without a code

    with pytest.raises(PeerLost, match="what came as rank 1's is not of this job"):
        mesh.run(body)


def test_no_message_is_lost_with_a_connection() -> None:
    """Who had to make room before it was let in dials again; what is lost after that is known to be."""
    number, store = bytes(CODE_BYTES), store_of(b"a secret of the job")
    with socket.create_server(("127.0.0.1", 0)) as listener, opened(store, 0) as sender:
        store.set("group/mailbox/1", f"127.0.0.1 {listener.getsockname()[1]} {number.hex()}")
        listener.setblocking(False)

        def dialled() -> socket.socket:
            """The next connection, before which the sender was let in by none."""
            found: list[socket.socket] = []

            def came() -> bool:
                assert not sender.connected(1)
                with contextlib.suppress(BlockingIOError):
                    found.append(listener.accept()[0])
                return bool(found)

            assert until(came)
            return found[0]

        for said in (b"", bytes(CODE_BYTES)):
            with dialled() as connection:
                connection.sendall(said)
        connection = dialled()
        connection.sendall(sender._welcome(number, 0, 1))
        assert until(lambda: sender.connected(1))
        assert until(lambda: sender.post(torch.zeros(3, dtype=torch.uint8), 1, 7, STAMP).sent)
        assert len(connection.recv(HELLO_BYTES, socket.MSG_WAITALL)) == HELLO_BYTES
        whole = HEAD.pack(7, 11) + struct.pack("<Q", STAMP) + bytes(3)
        assert connection.recv(len(whole), socket.MSG_WAITALL) == whole
        long = sender.post(torch.zeros(64 << 20, dtype=torch.uint8), 1, 8, STAMP)
        connection.close()
        assert until(lambda: long.lost) and not long.sent
