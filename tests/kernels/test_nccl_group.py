"""Making, splitting and ending NCCL's communicators, none of which may hold up a rank: against a fake that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import nccl_fake
import pytest
import torch
from nccl_fake import Alone, log_of, until

from spmd import MeshError, PeerLost
from spmd.kernels.cuda import nccl_connection, nccl_group, nccl_watchdog
from spmd.kernels.cuda.nccl import NcclCommunicator
from spmd.kernels.cuda.nccl_channel import Channel
from spmd.kernels.errors import Aborted


@pytest.fixture
def make_comm() -> Iterator[Alone]:
    make = Alone()
    yield make
    make.close()


class Peer:
    """One that NCCL waits for inside one of its calls; it comes when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str):
        self.waited_for, self._here = threading.Event(), threading.Event()
        self.log: list[Any] = []
        self.thread = ""
        real = getattr(where, name)

        def late(of: Any, *arguments: Any) -> Any:
            found = real(of, *arguments)
            self.log, self.thread = getattr(of, "nccl", of).log, threading.current_thread().name
            self.waited_for.set()
            self._here.wait()
            return found

        monkeypatch.setattr(where, name, late)

    def comes(self) -> None:
        self._here.set()


def no_thread(name: str) -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == name]


class Opening:
    """A call that makes a communicator, and the peer that it waits for."""

    def __init__(self, make: Callable[[float], NcclCommunicator], peer: Peer):
        self.make, self.peer = make, peer

    def comes_late(self) -> None:
        """Nobody waits for it any more: the thread that has it aborts it."""
        before = self.peer.log.count(("abort",))
        self.peer.comes()
        until(lambda: self.peer.log.count(("abort",)) == before + 1)


@pytest.fixture(params=["made", "split"])
def opening(request: pytest.FixtureRequest, make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opening]:
    first = make_comm() if request.param == "split" else None
    if first is None:
        peer = Peer(monkeypatch, nccl_fake.Nccl, "NcclCommunicator")
    else:
        peer = Peer(monkeypatch, nccl_fake.Raw, "commSplit")

    def make(timeout: float) -> NcclCommunicator:
        if first is None:
            return make_comm(timeout)
        first.channel.group.host.timeout = timeout
        return make_comm(timeout, channel="buckets")

    yield Opening(make, peer)
    peer.comes()
    until(lambda: no_thread("spmd-nccl-pending"))


# -- making and splitting ----------------------------------------------------------------------------------------------


def test_timeout(opening: Opening) -> None:
    with pytest.raises(PeerLost, match=r"rank 0 was not connected by NCCL with .* after 0\.1 s .*NCCL_DEBUG"):
        opening.make(0.1)
    opening.comes_late()


def test_abort(opening: Opening, make_comm: Alone) -> None:
    def give_up() -> None:
        opening.peer.waited_for.wait()
        make_comm.arena.abort("rank 7 gave up")

    other = threading.Thread(target=give_up)
    other.start()
    with pytest.raises(Aborted, match="rank 7 gave up"):
        opening.make(30.0)
    other.join()
    opening.comes_late()


def test_death_of_a_peer(opening: Opening, make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> None:
        if opening.peer.waited_for.is_set():
            raise PeerLost("rank 3 died", 3)

    monkeypatch.setattr(make_comm.arena, "check_peers", look)
    with pytest.raises(PeerLost, match="rank 3 died"):
        opening.make(30.0)
    opening.comes_late()


def test_a_peer_that_comes(opening: Opening) -> None:
    """In a thread that has taken the device."""
    other = threading.Thread(target=lambda: (opening.peer.waited_for.wait(), opening.peer.comes()))
    other.start()
    comm = opening.make(30.0)
    other.join()
    assert opening.peer.thread == "spmd-nccl-pending"
    comm.broadcast(torch.ones(1))
    assert ("abort",) not in log_of(comm)


def test_the_thread_takes_the_device(make_comm: Alone) -> None:
    assert "spmd-nccl-pending" in make_comm().streams.entered


def test_ranks_that_are_waited_for_are_named(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = make_comm()
    monkeypatch.setattr(comm.host, "ranks", (4, 6, 8))
    comm.channel.group.host = comm.host
    comm.host.timeout = 0.0
    with pytest.raises(PeerLost, match=r"rank 4 was not done with ranks \[6, 8\] after 0 s \[group \(4, 6, 8\)"):
        comm.channel.group._wait(lambda: False, "done with")


@pytest.mark.parametrize("error", [RuntimeError("NCCL_ERROR_SYSTEM_ERROR"), KeyError(7)])
def test_an_error_while_splitting(make_comm: Alone, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    make_comm()

    def fail(raw: Any, *_: Any) -> None:
        raise error

    monkeypatch.setattr(nccl_fake.Raw, "commSplit", fail)
    with pytest.raises(MeshError, match=r"could not connect the GPUs.*NCCL 2\.32\.3"):
        make_comm(channel="buckets")


def test_a_split_waits_for_a_quiet_parent(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may deadlock else; and no longer than the timeout."""
    first = make_comm()
    first.streams.stuck = True
    first.broadcast(torch.ones(1), async_op=True)
    asked = threading.Event()

    def goes_on() -> None:
        asked.wait()
        assert ("commSplit", 0, 0) not in log_of(first)
        first.streams.stuck = False

    other = threading.Thread(target=goes_on)
    monkeypatch.setattr(first.channel, "quiet", lambda: (asked.set(), Channel.quiet(first.channel))[1])
    other.start()
    make_comm(channel="buckets").broadcast(torch.ones(1))
    other.join()
    assert ("commSplit", 0, 0) in log_of(first)
    first.streams.stuck = True
    first.broadcast(torch.ones(1), async_op=True)
    first.channel.group.host.timeout = 0.1
    with pytest.raises(PeerLost, match="rank 0 was not done with the collectives that it began with"):
        make_comm(channel="messages")
    first.streams.stuck = False


def test_the_first_generation_may_be_0(make_comm: Alone) -> None:
    """It is where launched ranks of several hosts begin."""
    make_comm.arena.clear(0)
    make_comm.arena.generation = 0
    comm = make_comm()
    comm.broadcast(torch.ones(1))
    assert log_of(comm)[1] == ("NcclCommunicator", 1, 0)


# -- ending ------------------------------------------------------------------------------------------------------------


def test_ending_does_not_hold_up(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a thread of its own, all begun before one is waited for, and that not for ever."""
    comms = [make_comm(), make_comm(channel="buckets")]
    peer = Peer(monkeypatch, nccl_fake.Raw, "abort")
    monkeypatch.setattr(nccl_connection, "END_SECONDS", 0.05)
    for comm in comms:
        comm.channel.failure = PeerLost("rank 3 died", 3)
    for comm in comms:
        comm.close()
    until(lambda: log_of(comms[0]).count(("abort",)) == 2)
    assert not no_thread("spmd-nccl-ending")
    assert all(thread.daemon for thread in nccl_connection._endings)
    peer.comes()
    until(lambda: no_thread("spmd-nccl-ending"))


def test_a_new_one_waits_for_the_end_of_the_old(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a while; what they have of the GPU is not theirs twice."""
    comm = make_comm()
    peer = Peer(monkeypatch, nccl_fake.Raw, "abort")
    waited = nccl_connection.await_endings
    over: list[bool] = []

    def wait() -> None:
        peer.comes()
        waited()
        over.append(no_thread("spmd-nccl-ending") and [call[0] for call in log_of(comm)].count("NcclCommunicator") == 1)

    monkeypatch.setattr(nccl_group, "await_endings", wait)
    begin_anew(make_comm)
    comm.broadcast(torch.ones(1))
    peer.comes()
    assert over == [True]


def test_a_late_end_of_the_old_leaves_the_new_alone(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """One channel has begun anew after a recovery before the watching thread looks after another."""
    monkeypatch.setattr(nccl_watchdog, "watch", lambda comm: None)
    first, second = make_comm(), make_comm(channel="buckets")
    begin_anew(make_comm)
    second.broadcast(torch.ones(1))
    first.channel.look_after()
    first.broadcast(torch.ones(1))
    second.broadcast(torch.ones(1))
    nccl_connection.await_endings()
    assert [call[0] for call in log_of(first)].count("NcclCommunicator") == 2
    assert log_of(first).count(("abort",)) == 2


def begin_anew(make_comm: Alone) -> None:
    """As after a failure that the mesh has recovered from."""
    make_comm.arena.clear(2)
    make_comm.arena.generation = 2


def test_ending_takes_the_device(make_comm: Alone) -> None:
    comm = make_comm()
    comm.close()
    comm.close()
    assert "spmd-nccl-ending" in comm.streams.entered
    assert [call for call in log_of(comm) if call[0] in ("abort", "destroy")] == [("destroy",)]
    assert not [group for group in nccl_group._groups.values() if group is comm.channel.group]


def test_a_direction_of_messages_is_abandoned(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank of a pair never comes: the thread that waits for it holds up neither a wait nor the end."""
    comm = make_comm()
    peer = Peer(monkeypatch, nccl_fake.Nccl, "NcclCommunicator")
    assert not comm.channel.pairs.connect((0, 1), b"unique")
    peer.waited_for.wait()
    comm.close()
    peer.comes()
    until(lambda: no_thread("spmd-nccl-pending"))
    until(lambda: ("abort",) in log_of(comm))  # in a thread of its own


def test_what_is_abandoned_is_not_given(make_comm: Alone) -> None:
    pending = nccl_connection.Pending(lambda abandoned: None, lambda: None)
    until(pending.done)
    pending.abandon()
    pending.abandon()
    with pytest.raises(PeerLost, match="abandoned"):
        pending.result()


# -- connecting --------------------------------------------------------------------------------------------------------


def test_nothing_is_freed_under_a_call_that_connects(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer of a first collective never comes: this rank goes on, and the abort waits for NCCL to come back."""
    comm = make_comm()
    monkeypatch.setattr(nccl_connection, "END_SECONDS", 0.05)
    monkeypatch.setattr(comm.channel, "ranks", (0, 1))
    monkeypatch.setattr(make_comm.arena, "abort", lambda text: None)  # or this rank's own error might come second
    peer = Peer(monkeypatch, nccl_fake.Nccl, "run")

    def time_runs_out() -> None:
        peer.waited_for.wait()
        comm.set_timeout(0.2)

    other = threading.Thread(target=time_runs_out)
    other.start()
    with pytest.raises(PeerLost, match=r"broadcast .* was not over after 0\.2 s"):
        comm.broadcast(torch.ones(1))
    other.join()
    comm.close()
    peer._here.wait(0.2)  # for who does not wait
    assert peer.thread == "spmd-nccl-pending" and ("abort",) not in log_of(comm)
    assert comm.library.nccl.faults == []
    peer.comes()
    until(lambda: ("abort",) in log_of(comm))
    assert comm.library.nccl.faults == []


def test_a_call_that_connects_waits_for_a_quiet_gpu(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that where it is left behind, nothing that it was given before is stuck on the GPU; a second call does not."""
    comm = make_comm()
    comm.broadcast(torch.ones(1))
    comm.streams.stuck = True
    comm.broadcast(torch.ones(1), async_op=True)
    monkeypatch.setattr(comm.channel, "ranks", (0, 1))
    asked = threading.Event()
    monkeypatch.setattr(comm.channel, "quiet", lambda: (asked.set(), Channel.quiet(comm.channel))[1])
    del log_of(comm)[:]

    def goes_on() -> None:
        asked.wait()
        assert not any(call[0] == "broadcast" for call in log_of(comm))
        comm.streams.stuck = False

    other = threading.Thread(target=goes_on)
    other.start()
    comm.broadcast(torch.ones(1))
    other.join()
    asked.clear()
    comm.broadcast(torch.ones(1))
    assert not asked.is_set()


def test_an_end_waits_for_who_is_inside() -> None:
    nccl = nccl_fake.Nccl()
    raw = nccl.NcclCommunicator(1, b"unique", 0)
    connection = nccl_connection.Connection(raw, lambda: None)
    inside, leave = threading.Event(), threading.Event()

    def goes_inside(raw: nccl_fake.Raw) -> None:
        with raw._in("allReduce"):
            inside.set()
            leave.wait()

    other = threading.Thread(target=lambda: connection.call(goes_inside, waits=True), daemon=True)
    other.start()
    inside.wait()
    connection.end(abort=True)
    connection.end(abort=True)
    with pytest.raises(PeerLost, match="was ended"):
        connection.call(lambda raw: None)
    leave.wait(0.2)  # for who does not wait
    assert not raw.ended and nccl.faults == []
    leave.set()
    other.join()
    until(lambda: raw.ended == "abort")
    assert nccl.log.count(("abort",)) == 1 and nccl.faults == []
