"""Hosts that hear from the driver through others, which relay: the same results, whatever becomes of these."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attacks import listening as ports_of
from host_processes import host_process
from internals import links_sent_on, relays_beyond, with_relays
from patience import end_within, soon, until
from test_hosts import trained, works
from test_hosts_listening import listening

from spmd import Mesh, put, spmd

pytestmark = pytest.mark.long

HOSTS, HAVE_RELAYS = "local:5x1", [1, 2, 4]  # theirs are on hosts 0 and 3


@pytest.fixture(scope="module")
def made() -> Iterator[Mesh]:
    with relays_beyond(3), Mesh({"data": 5}, hosts=HOSTS, timeout=60, threads=1) as mesh:
        assert until(lambda: with_relays(mesh) == HAVE_RELAYS)
        yield mesh


@pytest.fixture
def mesh(made: Mesh) -> Iterator[Mesh]:
    """With all relays in place; all is relayed from the second message on that a host hears after that."""
    with relays_beyond(3):
        if with_relays(made) != HAVE_RELAYS:  # a test was about that: they come again when a host does
            os.kill(made.run(host_process)[3], signal.SIGKILL)
            with contextlib.suppress(Exception):
                made.run(os.getpid)
        assert until(lambda: with_relays(made) == HAVE_RELAYS)
        assert works(made) and works(made)
        yield made


def test_a_call_costs_the_driver_a_message_a_relay(mesh: Mesh) -> None:
    total = spmd(lambda a: a * 2, mesh=mesh)
    value = put(torch.ones(3), mesh=mesh)
    float(total(value).full()[0])
    mesh.run(os.getpid)
    with links_sent_on(mesh) as counts:
        for _ in range(20):
            mesh.run(int)
    assert 20 <= counts[0] == counts[3] <= 22  # besides, values of before are needed no more
    assert max(counts[place] for place in HAVE_RELAYS) <= 2  # what says how far it has heard the answers


def test_training_is_that_of_one_host(mesh: Mesh, shared_mesh: Callable[..., Mesh]) -> None:
    assert trained(mesh, 4) == trained(shared_mesh({"data": 2}), 4)
    large = torch.randn(1 << 18)  # which is not relayed
    assert all(torch.equal(one, large) for one in mesh.run(lambda value: value, large))
    assert with_relays(mesh) == HAVE_RELAYS


def test_few_hosts_have_no_relays() -> None:
    with Mesh({"data": 2}, hosts="local:2x1", timeout=60) as mesh:
        assert works(mesh) and not with_relays(mesh)


def note(turn: int, room: Any = None) -> None:
    """On a rank: note that this has come."""
    sys.__dict__.setdefault("turns", []).append(turn)


def noted() -> list[int]:
    return sys.__dict__.pop("turns", [])


def noting(mesh: Mesh) -> Callable[[], None]:
    """What has all ranks note a 0, and does not wait for that."""
    step, value = spmd(lambda a: (note(0), a)[1], mesh=mesh, check="never"), put(torch.ones(2), mesh=mesh)
    for _ in range(3):
        float(step(value).full()[0])
    mesh.run(noted)
    return lambda: step(value)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_what_is_sent_itself_comes_after_what_is_relayed(mesh: Mesh) -> None:
    """And the other way round, however long either takes."""
    to_all, hosts, futures = noting(mesh), mesh.run(host_process), []
    with stopped(hosts[0]):
        for turn in (1, 2):
            to_all()
            futures.append(mesh.submit(note, turn, rank=1))
        time.sleep(0.3)
        assert not any(future.done() for future in futures)
    for turn in range(3, 9):
        futures.append(mesh.submit(note, turn, torch.ones(1 << 22), rank=1))
        to_all()
    for future in futures:
        future.result()
    found = mesh.run(noted)
    assert found[1] == [0, 1, 0, 2, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 8, 0]
    assert found[0] == found[2] == found[3] == found[4] == [0] * 8
    assert with_relays(mesh) == HAVE_RELAYS  # it was not stopped for long


def test_a_rank_dies(mesh: Mesh, shared_mesh: Callable[..., Mesh], tmp_path: Path) -> None:
    pids = mesh.run(os.getpid)
    assert trained(mesh, 4, armed=tmp_path / "armed") == trained(shared_mesh({"data": 2}), 4)
    after = mesh.run(os.getpid)
    assert after[:3] == pids[:3] and after[3] != pids[3] and with_relays(mesh) == HAVE_RELAYS


def test_a_relay_is_lost(
    mesh: Mesh, shared_mesh: Callable[..., Mesh], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a step: the others stay, and hear the rest of it; then there are relays again."""
    pids, hosts = mesh.run(os.getpid), mesh.run(host_process)
    with caplog.at_level(logging.WARNING, "spmd"):
        found = trained(mesh, 4, armed=tmp_path / "armed", kill=lambda: hosts[0])
    assert found == trained(shared_mesh({"data": 2}), 4)
    after = mesh.run(os.getpid)
    assert after[1:] == pids[1:] and after[0] != pids[0]
    assert [record.getMessage()[:24] for record in caplog.records] == ["rank 0 was lost with hos"]
    assert end_within(10.0, [pids[0], hosts[0]])
    assert until(lambda: with_relays(mesh) == HAVE_RELAYS)


def test_a_relay_is_lost_with_what_it_was_about_to_relay(mesh: Mesh) -> None:
    """What hosts have not heard is said again, and what was not heard of them."""
    step, value = spmd(lambda a: a + 1, mesh=mesh), put(torch.zeros(5), mesh=mesh)
    for _ in range(3):
        value = step(value)
    assert value.full().tolist() == [3.0] * 5
    hosts, generation = mesh.run(host_process), mesh.driver.ranks.generation
    with stopped(hosts[0]):
        for _ in range(2):  # one more would be waited for
            value = step(value)
        os.kill(hosts[0], signal.SIGKILL)
        assert until(lambda: mesh.driver.ranks.generation > generation)
    assert value.full().tolist() == [5.0] * 5
    assert works(mesh) and until(lambda: with_relays(mesh) == HAVE_RELAYS)


def test_a_host_with_a_relay_is_lost(mesh: Mesh, shared_mesh: Callable[..., Mesh], tmp_path: Path) -> None:
    pids, hosts = mesh.run(os.getpid), mesh.run(host_process)
    assert trained(mesh, 4, armed=tmp_path / "armed", kill=lambda: hosts[1]) == trained(shared_mesh({"data": 2}), 4)
    after = mesh.run(os.getpid)
    assert [one == two for one, two in zip(pids, after, strict=True)] == [True, False, True, True, True]
    assert until(lambda: with_relays(mesh) == HAVE_RELAYS)


def test_a_relay_that_is_stopped_is_left(mesh: Mesh) -> None:
    """The others are told by the driver then, also what they have missed."""
    to_all, hosts, began = noting(mesh), mesh.run(host_process), time.monotonic()
    with stopped(hosts[0]):
        to_all()
        assert mesh.run(noted, ranks=[1, 2, 4]) == [[0]] * 3
        assert soon(8.0, began)
        assert with_relays(mesh) == [4]
    assert works(mesh)
    assert mesh.run(noted) == [[0], [], [], [0], []]


def test_a_mesh_is_closed_while_a_relay_is_stopped() -> None:
    with relays_beyond(3):
        mesh = Mesh({"data": 5}, hosts=HOSTS, timeout=60, threads=1)
        pids, hosts = mesh.run(os.getpid), mesh.run(host_process)
        assert until(lambda: with_relays(mesh) == HAVE_RELAYS)
        os.kill(hosts[0], signal.SIGSTOP)
        mesh.close()
        assert end_within(10.0, [*pids, *hosts])


def test_who_does_not_have_the_secret_is_not_relayed_to(mesh: Mesh) -> None:
    hosts = mesh.run(host_process)
    relay, other = ports_of([hosts[0]]), ports_of([hosts[1]])
    assert len(relay) > len(other)  # that of the relay, besides those of its rank
    for address in relay:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as stranger:
            stranger.sendall(secrets.token_bytes(4096))
            while stranger.recv(4096):
                pass
    assert works(mesh) and with_relays(mesh) == HAVE_RELAYS


def out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts are told of a port of their relay at which nobody listens."""
    from spmd.mesh.hosts import protocol

    real = protocol.DialRelay
    monkeypatch.setattr(protocol, "DialRelay", lambda address, port, number: real(address, 1, number))


def test_hosts_that_can_not_reach_their_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that wait to be dialled, say: each is told by the driver, which they can reach."""
    secret = secrets.token_hex()
    monkeypatch.setenv("SPMD_SECRET", secret)
    with listening(4, {"SPMD_SECRET": secret}) as (found, _), relays_beyond(3):
        for reached in (True, False):
            if not reached:
                out_of_reach(monkeypatch)
            with Mesh({"data": 4}, hosts=[f"{host}:1" for host in found], timeout=60, threads=1) as mesh:
                if reached:
                    assert until(lambda: with_relays(mesh) == [1, 3])
                else:
                    time.sleep(0.5)
                for _ in range(3):
                    assert works(mesh)
                assert with_relays(mesh) == ([1, 3] if reached else [])


# -- the order, without processes --------------------------------------------------------------------------------------


class TwoWays:
    """Messages from one end to the other, by a link or a relay, that arrive when they are let."""

    def __init__(self) -> None:
        from spmd.mesh.hosts import protocol
        from spmd.mesh.hosts.relaying.ordered import Ordered

        self._protocol = protocol
        self.link: list[Any] = []
        self.back: list[Any] = []
        self.relay: list[Any] = []
        self.taken: list[int] = []
        self.sender = Ordered(self._end(self.link), lambda msg, content: None)
        self.receiver = Ordered(self._end(self.back), lambda msg, content: self.taken.append(msg.port))

    def _end(self, sent: list[Any]) -> Any:
        return SimpleNamespace(
            foreign=False,
            send=lambda msg, *content: sent.append(msg),
            send_encoded=lambda msg, content: sent.append(self._protocol.decode(msg)),
        )

    def send(self, turn: int, by_relay: bool) -> None:
        msg = self._protocol.encode(self._protocol.Relaying(turn))
        if by_relay and (number := self.sender.relayed(msg, ())):
            self.relay.append(self._protocol.Numbered(number, msg))
        else:
            self.sender.send_encoded(msg, ())

    def arrive(self, by: list[Any]) -> None:
        if not by:
            return
        msg = by.pop(0)
        if by is self.back:
            self.sender.had(msg)
        elif isinstance(msg, self._protocol.Numbered):
            self.receiver.take(msg.number, msg.encoded, b"")
        else:
            self.taken.append(msg.port)


@pytest.mark.parametrize("seed", range(20))
def test_all_is_taken_once_and_in_order(seed: int) -> None:
    """Whichever way is faster, and wherever the relay is lost, with what it had, or comes again."""
    chance, ways, sent, has_relay = random.Random(seed), TwoWays(), 0, False
    for _ in range(3000):
        what = chance.random()
        if what < 0.4:
            ways.send(sent, chance.random() < 0.7)
            sent += 1
        elif what < 0.98:
            ways.arrive(chance.choice([ways.link, ways.relay, ways.back]))
        elif has_relay:
            late = ways.relay[: chance.randint(0, len(ways.relay))]  # of what it had some has arrived, or will
            ways.sender.use_relay(has_relay := False)
            ways.relay[:] = late if chance.random() < 0.5 else []
        else:
            ways.sender.use_relay(has_relay := True)
    ways.sender.use_relay(False)
    ways.relay.clear()
    while ways.link:
        ways.arrive(ways.link)
    assert ways.taken == list(range(sent))
    assert ways.sender._kept == type(ways.sender._kept)()


def test_what_was_taken_is_not_kept() -> None:
    ways = TwoWays()
    ways.sender.use_relay(True)
    for turn in range(1000):
        ways.send(turn, True)
        for by in (ways.link, ways.relay, ways.back):
            ways.arrive(by)
        assert len(ways.sender._kept) <= 32
    assert ways.taken == list(range(1000))
