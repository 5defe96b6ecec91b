"""Messages between GPUs on a fake that is as strict as NCCL: connecting waits, streams hold up, and data comes late."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import nccl_fake
import pytest
import streams_fake
import torch
from nccl_fake import Alone, lanes, registry, until

from spmd import CollectiveMismatch, Mesh

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def mesh(make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> Mesh:
    monkeypatch.setitem(registry._FACTORIES, "nccl-fake", nccl_fake.factory)
    return make_mesh({"data": 2}, backend="nccl-fake", timeout=20.0)


@pytest.fixture
def deferred_mesh(make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> Mesh:
    """Calls only go on their streams, and the hosts do not agree on each before."""
    monkeypatch.setitem(registry._FACTORIES, "nccl-deferred", nccl_fake.deferred_factory)
    return make_mesh({"data": 2}, backend="nccl-deferred", timeout=20.0)


def test_first_messages_that_cross(mesh: Mesh) -> None:
    """NCCL connects at the first message, and waits there for the other side: here each rank sends first."""

    def body() -> list[float]:
        comm: Any = mesh.comm()
        nccl, found = comm.library.nccl, []
        made = nccl.NcclCommunicator

        def sender_first(size: int, unique: bytes, rank: int) -> Any:
            time.sleep(0.5 * rank)
            return made(size, unique, rank)

        nccl.NcclCommunicator = sender_first
        for number in range(3):
            mine, theirs = torch.full((3,), 10.0 * comm.rank + number), torch.empty(3)
            sending = comm.isend(mine, 1 - comm.rank)
            comm.host.barrier()  # each finds the other's message announced, and answers it, before it puts its own
            comm.recv(theirs, 1 - comm.rank)
            sending.wait()
            found.append(theirs[0].item())
        assert comm.library.nccl.faults == []
        return found

    assert mesh.run(body) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def test_connecting_is_done_with_when_the_first_message_is_put(mesh: Mesh) -> None:
    """By one byte in each direction, in the thread that makes the communicator; the caller's waits for nobody."""

    def body() -> list[list[int]]:
        comm: Any = mesh.comm()
        x = torch.ones(5)
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        halves = [call for call in comm.library.nccl.log if call[0] in ("send", "recv")]
        return [[call[2], call[-1]] for call in halves]

    for (first, second), *more in mesh.run(body):
        assert second != streams_fake.CURRENT and first == 1
        assert [count for count, _ in more] == [20]


@pytest.mark.parametrize("strided", [False, True])
def test_what_is_received_is_there_after_wait(mesh: Mesh, strided: bool) -> None:
    """For the stream on which `wait` was called, whichever one was current when the message arrived."""

    def body() -> float:
        comm: Any = mesh.comm()
        if comm.rank == 0:
            comm.send(torch.arange(8.0), 1)
            return 28.0
        whole = torch.zeros(8, 2)
        out = whole[:, 0] if strided else torch.zeros(8)
        with streams_fake.watched(comm.streams):
            work = comm.irecv(out, 0)
            with comm.streams.beside("another"):
                until(work.is_completed)
            assert work.wait() == 0
            return float(out.sum())

    assert mesh.run(body) == [28.0, 28.0]


def test_a_message_under_way_holds_up_no_collective(deferred_mesh: Mesh) -> None:
    """A rank reduces, then sends; the other has its receive posted first: what it reduces must not wait behind it."""

    def body() -> Any:
        comm: Any = deferred_mesh.comm()
        x, y = torch.ones(4), torch.ones(4)
        for _ in range(2):  # connects
            comm.all_reduce(x)
            comm.send(y, 1) if comm.rank == 0 else comm.recv(y, 0)
        comm.host.barrier()
        if comm.rank == 0:
            comm.all_reduce(x)
            comm.send(y, 1)
        else:
            log = comm.library.nccl.log
            count = [call[0] for call in log].count("recv")
            work = comm.irecv(y, 0)
            until(lambda: (comm.progress(), [call[0] for call in log].count("recv") > count)[1])
            comm.all_reduce(x)
            work.wait()
        return comm.streams.queue

    streams_fake.replay(deferred_mesh.run(body))


def test_replay_finds_circles() -> None:
    first, second = ("launch", 1, [("a", 2)]), ("launch", 1, [("b", 2)])
    streams_fake.replay([[first, second], [first, second]])
    streams_fake.replay([[first, second], [first, ("launch", 2, [("b", 2)])]])
    with pytest.raises(AssertionError, match="wait for each other"):
        streams_fake.replay([[first, second], [second, first]])
    with pytest.raises(AssertionError, match="wait for each other"):
        streams_fake.replay([[("launch", 2, [("a", 2)]), ("record", 2, 7), ("wait", 1, 7), second], [second, first]])


def test_a_use_beside_the_writer_is_found(make_comm: Alone) -> None:
    comm = make_comm()
    x = torch.ones(3)
    with streams_fake.watched(comm.streams):
        work = comm.all_reduce(x, async_op=True)
        with pytest.raises(AssertionError, match="not ordered after NCCL's launch"):
            x.sum()
        work.wait()
        x.sum()


@pytest.fixture
def make_comm() -> Any:
    make = Alone()
    yield make
    make.close()


@pytest.mark.parametrize("debug", ["0", "1"])
def test_what_an_operation_works_on_lives_until_it_is_over(
    make_comm: Alone, monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    """Though nobody else refers to it, whether or not operations are printed."""
    monkeypatch.setenv("SPMD_DEBUG", debug)
    comm = make_comm()
    comm.streams.stuck = True
    started: list[Callable[[Any, torch.Tensor], Any]] = [
        lambda comm, x: comm.all_reduce(x, async_op=True),
        lambda comm, x: comm.broadcast(x, async_op=True),
        lambda comm, x: comm.all_gather([torch.empty(3)], x, async_op=True),
        lambda comm, x: comm.gather(x, [torch.empty(3)], async_op=True),
        lambda comm, x: comm.all_to_all([x], [torch.empty(3)], async_op=True),
        lambda comm, x: comm.reduce_scatter(torch.empty(3), [x], async_op=True),
    ]
    alive = []
    for start in started:
        x = torch.ones(3)
        alive.append(weakref.ref(x))
        start(comm, x)
        del x
    gc.collect()
    assert [one() is not None for one in alive] == [True] * len(started)
    comm.streams.stuck = False
    until(lambda: comm.channel.quiet())

    def left() -> list[torch.Tensor]:
        gc.collect()
        return [x for one in alive if (x := one()) is not None]

    until(lambda: not left())  # the watching thread may be looking at one


# -- streams of messages -----------------------------------------------------------------------------------------------


class Event:
    over = False

    def query(self) -> bool:
        return self.over


class Source:
    """Makes streams."""

    def __init__(self) -> None:
        self.made, self.back = 0, list[int]()

    def new(self) -> int:
        self.made += 1
        return self.made

    def give_back(self, stream: int) -> None:
        self.back.append(stream)


def test_directions_share_no_stream_while_they_are_under_way() -> None:
    source = Source()
    taken = lanes.Lanes(source)
    events = []
    for other in range(1, lanes.MOST + 1):
        assert taken.promise((other, 0))
        events.append(Event())
        taken.given((other, 0), events[-1])
    assert len({taken.stream((other, 0)) for other in range(1, lanes.MOST + 1)}) == lanes.MOST
    assert taken.promise((3, 0))  # it has one
    assert not taken.promise((lanes.MOST + 1, 0))
    for event in events[:3]:
        event.over = True
    kept = taken.stream((3, 0))
    assert taken.promise((lanes.MOST + 1, 0)) and taken.promise((lanes.MOST + 2, 0))
    assert not taken.promise((lanes.MOST + 3, 0))  # the third has a message to come
    assert taken.stream((3, 0)) == kept
    assert source.made == lanes.MOST
    taken.close()
    assert sorted(source.back) == list(range(1, lanes.MOST + 1))


def test_more_messages_than_streams(make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no stream goes when another is over."""
    monkeypatch.setitem(registry._FACTORIES, "nccl-fake", nccl_fake.factory)
    mesh = make_mesh({"data": 3}, backend="nccl-fake")

    def body() -> Any:
        lanes.MOST = 1
        comm: Any = mesh.comm()
        others = [rank for rank in range(3) if rank != comm.rank]
        found = {rank: torch.empty(2) for rank in others}
        receives = [comm.irecv(found[rank], rank) for rank in others]
        sends = [comm.isend(torch.full((2,), 10.0 * comm.rank + rank), rank) for rank in others]
        for work in (*receives, *sends):
            work.wait()
        lanes.MOST = 16
        halves = [call for call in comm.library.nccl.log if call[0] in ("send", "recv") and call[2] == 8]
        return len({stream for *_, stream in halves}), [found[rank][0].item() for rank in others]

    for rank, (streams, found) in enumerate(mesh.run(body)):
        assert found == [10.0 * other + rank for other in range(3) if other != rank]
        assert streams <= 2  # one each way


def test_dtype_mismatch(mesh: Mesh) -> None:
    """NCCL would put the bits of one into the other: the hosts compare them beforehand."""

    def body() -> None:
        comm: Any = mesh.comm()
        if comm.rank == 0:
            comm.send(torch.ones(3), 1)
        else:
            comm.recv(torch.empty(3, dtype=torch.int32), 0)

    with pytest.raises(CollectiveMismatch, match=r"dtypes differ.*3 elements of int32.*3 elements of float32"):
        mesh.run(body)
