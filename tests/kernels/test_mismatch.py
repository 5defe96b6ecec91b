"""Ranks that disagree: the driver learns at once who called what and where, and the mesh works afterwards."""

from __future__ import annotations

import _thread
import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from internals import stalls_at_once
from patience import HANGS, soon, until

from spmd import CollectiveMismatch, Mesh, PeerLost, SpmdError, psum, value_and_grad

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 2.5
Communicator = Any  # what mesh.comm() gives
LARGE = 90_000  # elements, past the threshold of one phase


@pytest.fixture(params=["shm", "gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def works(mesh: Mesh) -> None:
    """The mesh can be used again: also by operations in two phases and by messages."""

    def body() -> tuple[float, float, float]:
        comm = mesh.comm()
        target = torch.empty(())
        work = comm.isend(torch.tensor(float(comm.rank)), (comm.rank + 1) % comm.size)
        comm.recv(target, (comm.rank - 1) % comm.size)
        work.wait()
        return float(comm.all_reduced(torch.ones(2))[0]), float(comm.all_reduced(torch.ones(LARGE))[-1]), float(target)

    size = mesh.size
    assert mesh.run(body) == [(size, size, (rank - 1) % size) for rank in range(size)]


def refused(mesh: Mesh, body: Callable[[Communicator], Any]) -> str:
    """The text of the CollectiveMismatch that ends `body`, raised in good time."""
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        mesh.run(lambda: body(mesh.comm()))
    assert soon(SECONDS, began)
    return str(caught.value)


# -- other calls -------------------------------------------------------------------------------------------------------
# Rank 1 of three differs from the others. Each side's text: what the others call, what rank 1 calls.


def other_operation(comm: Communicator) -> None:
    comm.broadcast(torch.ones(2)) if comm.rank == 1 else comm.all_reduce(torch.ones(2))


def other_order(comm: Communicator) -> None:
    calls: list[Callable[[], Any]] = [comm.barrier, lambda: comm.all_reduce(torch.ones(2), "max")]
    for call in reversed(calls) if comm.rank == 1 else calls:
        call()


def other_shape(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(2, 2 + (comm.rank == 1)))


def other_large_shape(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(LARGE + (comm.rank == 1)))


def same_bytes_in_another_shape(comm: Communicator) -> None:
    comm.all_reduce(torch.ones((3, 2) if comm.rank == 1 else (2, 3)))


def other_dtype(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(2, dtype=torch.int32 if comm.rank == 1 else torch.float32))


def other_op(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(2), "max" if comm.rank == 1 else "min")


def other_root(comm: Communicator) -> None:
    comm.broadcast(torch.ones(2), 1 if comm.rank == 1 else 0)


def other_destination(comm: Communicator) -> None:
    comm.reduce(torch.ones(2), 1 if comm.rank == 1 else 0)


def large_against_small(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(2 if comm.rank == 1 else LARGE))


def after_many(comm: Communicator) -> None:
    for _ in range(40):
        comm.all_reduce(torch.ones(2))
    comm.barrier() if comm.rank == 1 else comm.all_reduce(torch.ones(2))


def after_a_long_wait(comm: Communicator) -> None:
    """What a rank said while it waited earlier is not what it calls now."""
    for late in range(3):
        if comm.rank == late:
            time.sleep(0.03)
        comm.all_reduce(torch.ones(5))
    comm.barrier() if comm.rank == 1 else comm.all_reduce(torch.ones(2))


CALLS: dict[str, tuple[Callable[[Communicator], Any], str, str]] = {
    "operation": (other_operation, "all_reduce float32[2] (sum)", "broadcast float32[2] (src=0)"),
    "order": (other_order, "barrier", "all_reduce float32[2] (max)"),
    "shape": (other_shape, "all_reduce float32[2, 2] (sum)", "all_reduce float32[2, 3] (sum)"),
    "large shape": (other_large_shape, f"all_reduce float32[{LARGE}] (sum)", f"all_reduce float32[{LARGE + 1}] (sum)"),
    "same bytes": (same_bytes_in_another_shape, "all_reduce float32[2, 3] (sum)", "all_reduce float32[3, 2] (sum)"),
    "dtype": (other_dtype, "all_reduce float32[2] (sum)", "all_reduce int32[2] (sum)"),
    "op": (other_op, "all_reduce float32[2] (min)", "all_reduce float32[2] (max)"),
    "root": (other_root, "broadcast float32[2] (src=0)", "broadcast float32[2] (src=1)"),
    "destination": (other_destination, "reduce float32[2] (sum, dst=0)", "reduce float32[2] (sum, dst=1)"),
    "phases": (large_against_small, f"all_reduce float32[{LARGE}] (sum)", "all_reduce float32[2] (sum)"),
    "after many": (after_many, "all_reduce float32[2] (sum)", "barrier"),
    "after a long wait": (after_a_long_wait, "all_reduce float32[2] (sum)", "barrier"),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_call(shared_mesh: Callable[..., Mesh], backend: str, name: str) -> None:
    body, most, one = CALLS[name]
    mesh = shared_mesh({"data": 3}, backend)

    def met(comm: Communicator) -> None:
        """All have begun: who differs waits half a second, and no longer, for what the others say."""
        comm.barrier()
        body(comm)

    text = refused(mesh, met)
    assert "group (0, 1, 2)" in text
    for rank, call in enumerate((most, one, most)):
        site = rf"{re.escape(__file__)}:\d+ in {body.__name__}" if name != "order" else re.escape(__file__)
        assert re.search(rf"rank {rank}: {re.escape(call)}, .*at {site}", text), text
    works(mesh)


def test_a_rank_that_gets_no_processor_is_waited_for(make_mesh: Callable[..., Mesh]) -> None:
    """Until it can say what it calls, however long that takes; not one that has other things to do."""
    mesh = make_mesh({"data": 2}, backend="shm")
    pid = mesh.driver.pids[1]

    def held_up() -> None:
        comm: Any = mesh.comm()
        comm.barrier()
        if comm.rank == 1:
            comm.all_reduce(torch.ones(2))
        while comm._slots.calls_of(1) < 2:
            time.sleep(1e-3)
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
        comm.broadcast(torch.ones(2))

    with pytest.raises(CollectiveMismatch) as caught:
        mesh.run(held_up)
    assert "rank 0: broadcast float32[2] (src=0), call 2" in str(caught.value)
    assert "rank 1: all_reduce float32[2] (sum), call 2" in str(caught.value)
    works(mesh)

    def busy(seconds: float) -> None:
        comm = mesh.comm()
        comm.barrier()
        work = comm.all_reduce(torch.ones(2), async_op=True) if comm.rank == 1 else comm.barrier()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
        work.wait()

    began = time.monotonic()
    with pytest.raises(CollectiveMismatch, match=r"rank 1: is at call \d, and did not say which"):
        mesh.run(busy, 60.0)
    assert soon(SECONDS, began)


def test_the_line_is_that_of_the_call(make_mesh: Callable[..., Mesh], backend: str) -> None:
    """Also of an asynchronous one, which is found wrong only when it is waited for."""
    mesh = make_mesh({"data": 2}, backend=backend)

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            work = comm.all_reduce(torch.ones(2), async_op=True)
        else:
            work = comm.barrier(async_op=True)
        time.sleep(0)
        work.wait()

    first = body.__code__.co_firstlineno
    text = refused(mesh, body)
    assert f"test_mismatch.py:{first + 2} in body" in text
    assert f"test_mismatch.py:{first + 4} in body" in text
    works(mesh)


def test_a_piece_of_another_size(shared_mesh: Callable[..., Mesh], backend: str) -> None:
    mesh = shared_mesh({"data": 3}, backend)

    def body(comm: Communicator) -> None:
        outs = [torch.empty(4 if comm.rank == 2 and r == 1 else 3) for r in range(3)]
        comm.all_gather(outs, torch.ones(3))

    text = refused(mesh, body)
    assert "all_gather float32[3]: rank 1 sends 12 bytes, rank 2 expects 16" in text
    assert "test_mismatch.py:" in text
    works(mesh)


def test_who_left_after_a_failure_is_not_its_cause(make_mesh: Callable[..., Mesh], backend: str) -> None:
    """Rank 2 fails and rank 1 leaves for that between two looks of rank 0: what has failed, and who has left."""
    mesh = make_mesh({"data": 3}, backend=backend)

    def body() -> None:
        comm = mesh.comm()
        if comm.rank == 2:
            time.sleep(0.5)
            raise CollectiveMismatch("the cause")
        if comm.rank == 0:
            has_left = comm._has_left
            comm._has_left = lambda rank: until(lambda: has_left(1)) and has_left(rank)
        try:
            comm.all_reduce(torch.ones(3))
        finally:
            vars(comm).pop("_has_left", None)

    with pytest.raises(CollectiveMismatch, match="the cause"):
        mesh.run(body)
    works(mesh)


def test_in_a_group(make_mesh: Callable[..., Mesh], backend: str) -> None:
    mesh = make_mesh({"a": 2, "b": 2}, backend=backend)

    def body(_: Communicator) -> None:
        comm = mesh.comm("b")
        comm.barrier() if mesh.rank == 3 else comm.all_reduce(torch.ones(()))

    text = refused(mesh, body)
    assert "group (2, 3)" in text
    assert "rank 2: all_reduce float32[] (sum)" in text
    assert "rank 3: barrier" in text
    works(mesh)


# -- ranks that do not come --------------------------------------------------------------------------------------------


def never_calls(comm: Communicator) -> None:
    if comm.rank != 1:
        comm.all_reduce(torch.ones(2))


def calls_less_often(comm: Communicator) -> None:
    for _ in range(2 if comm.rank == 1 else 3):
        comm.all_reduce(torch.ones(2))


def calls_far_less_often(comm: Communicator) -> None:
    outstanding = [comm.all_reduce(torch.ones(2), async_op=True) for _ in range(2 if comm.rank == 1 else 40)]
    for work in outstanding:
        work.wait()


def is_late_and_never_calls(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(0.3)
    else:
        comm.barrier()


def does_not_wait_for_a_large_one(comm: Communicator) -> None:
    comm.barrier()
    work = comm.all_reduce(torch.ones(LARGE), async_op=True)
    if comm.rank != 1:
        work.wait()


def is_only_asked_about(comm: Communicator) -> None:
    """Polling, too, must come to an end."""
    if comm.rank != 1:
        work = comm.all_reduce(torch.ones(2), async_op=True)
        while not work.is_completed():
            time.sleep(1e-4)


ABSENCES: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "never": (never_calls, "all_reduce float32[2] (sum)"),
    "less often": (calls_less_often, "all_reduce float32[2] (sum)"),
    "far less often": (calls_far_less_often, "all_reduce float32[2] (sum)"),
    "late": (is_late_and_never_calls, "barrier"),
    "no wait": (does_not_wait_for_a_large_one, f"all_reduce float32[{LARGE}] (sum)"),
    "polled": (is_only_asked_about, "all_reduce float32[2] (sum)"),
}


@pytest.mark.parametrize("name", ABSENCES)
@pytest.mark.parametrize("opened", [True, False], ids=["opened", "first use"])
def test_absence(
    make_mesh: Callable[..., Mesh], shared_mesh: Callable[..., Mesh], backend: str, name: str, opened: bool
) -> None:
    body, call = ABSENCES[name]
    mesh = (shared_mesh if opened else make_mesh)({"data": 3}, backend=backend)
    if opened:
        works(mesh)
    text = refused(mesh, body)
    waiting = re.search(r"rank 1 left the region without its part in (.*), for which rank [02] waits at (.*) \[", text)
    assert waiting, text
    assert waiting[1] in (call, "a collective")
    assert f"{__file__}:" in waiting[2]
    works(mesh)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_uses_the_group(make_mesh: Callable[..., Mesh], backend: str, absent: int) -> None:
    mesh = make_mesh({"data": 2}, backend=backend)
    text = ""
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        mesh.run(lambda: mesh.comm().all_reduced(torch.ones(2)) if mesh.rank != absent else None)
    assert soon(SECONDS, began)
    text = str(caught.value)
    assert f"rank {absent} left the region" in text
    works(mesh)


def test_some_ranks_only(make_mesh: Callable[..., Mesh], backend: str) -> None:
    """Ranks that `ranks=` leaves out count as gone."""
    mesh = make_mesh({"data": 3}, backend=backend)
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch, match="rank 2 left the region"):
        mesh.run(lambda: mesh.comm().barrier(), ranks=[0, 1])
    assert soon(SECONDS, began)
    works(mesh)


# -- giving up ---------------------------------------------------------------------------------------------------------


def test_abort(make_mesh: Callable[..., Mesh], backend: str) -> None:
    mesh = make_mesh({"data": 3}, backend=backend)
    mesh.run(lambda: mesh.comm().barrier())

    def body() -> None:
        comm = mesh.comm()
        if comm.rank == 1:
            comm.abort("had enough")
        comm.barrier()

    began = time.monotonic()
    with pytest.raises(SpmdError, match=r"rank 1 aborted the region .*had enough") as caught:
        mesh.run(body)
    assert type(caught.value) is SpmdError
    assert soon(SECONDS, began)
    works(mesh)


# -- what is left behind -----------------------------------------------------------------------------------------------


def test_what_was_under_way_is_void(make_mesh: Callable[..., Mesh], backend: str) -> None:
    """An operation of a region that failed neither disturbs the next one nor seems to succeed there."""
    mesh = make_mesh({"a": 2, "b": 2}, backend=backend)

    def fail() -> None:
        import builtins

        other = mesh.comm("a")
        other.barrier()
        kept = [other.all_reduce(torch.ones(LARGE), async_op=True)] if other.rank == 0 else []
        kept.append(other.irecv(torch.empty(1), other.rank, tag=77))
        builtins.kept = kept  # type: ignore[attr-defined]
        mesh.comm().barrier()  # all have kept theirs before the region fails
        mesh.comm("b").barrier() if mesh.rank else mesh.comm("b").broadcast(torch.ones(1))

    with pytest.raises(CollectiveMismatch):
        mesh.run(fail)

    def go_on() -> list[str]:
        import builtins

        mesh.comm("b").all_reduced(torch.ones(LARGE))
        said = []
        for work in builtins.kept:  # type: ignore[attr-defined]
            try:
                work.wait()
            except PeerLost as error:
                said.append(str(error))
        mesh.comm("a").barrier()
        return said

    for rank, said in enumerate(mesh.run(go_on)):
        assert len(said) == (2 if rank < 2 else 1)
        assert all("was under way when a region failed" in text for text in said)
    works(mesh)


def test_memory_is_used_again_after_failures(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh({"data": 2})

    def fail(comm: Communicator) -> None:
        large = torch.ones(1 << 18)
        outstanding = [comm.all_reduced(large, async_op=True) for _ in range(4)]
        held = [comm.all_reduced(large), *(work.wait() for work in outstanding)]
        comm.isend(large, 1 - comm.rank)
        comm.all_reduced(large, async_op=True)
        comm.barrier() if comm.rank else comm.all_reduce(large)
        del held

    def used() -> int:
        """Bytes handed out and not given back: how many blocks were in use at once depends on who came first."""
        heap = mesh.comm().arena.heap  # type: ignore[attr-defined]
        free = [heap._kept, heap._emptied]
        return heap._top - sum(size * len(blocks) for sizes in free for size, blocks in sizes.items())

    found = []
    for _ in range(5):
        refused(mesh, fail)
        works(mesh)
        found.append(mesh.run(used))
    for before, after in zip(found[1], found[-1], strict=True):
        assert after - before <= 1 << 21


# -- what Gloo does not notice -----------------------------------------------------------------------------------------


class Endless:
    """A group of Gloo's whose destructor does not return, as where Gloo misses that a send is over."""

    def __init__(self, group: Any):
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __del__(self) -> None:
        threading.Event().wait()


# -- ranks that wait for each other ------------------------------------------------------------------------------------


def in_a_circle(mesh: Mesh, comm: Communicator) -> None:
    comm.recv(torch.zeros(3), (comm.rank + 1) % comm.size)


def in_two_groups(mesh: Mesh, comm: Communicator) -> None:
    """Each of two ranks in a group of its own with the third, which waits for something else."""
    if comm.rank < 2:
        mesh.comm(ranks=[comm.rank, 2]).all_reduce(torch.ones(3))
    else:
        comm.barrier()


def in_a_backward_pass(mesh: Mesh, comm: Communicator) -> None:
    """That of one rank alone communicates, on whose result the others' values do not depend."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return psum(x, "data")

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return psum(gradient, "data")

    def loss(w: torch.Tensor) -> torch.Tensor:
        total = Sum.apply(w * (1 + comm.rank))
        return total.sum() if comm.rank == 1 else (w * w).sum()

    value_and_grad(loss)(torch.ones(3))


def in_a_group_that_one_does_not_open(mesh: Mesh, comm: Communicator) -> None:
    if comm.rank == 0:
        comm.barrier()
    else:
        mesh.comm(ranks=[0, 2, 1])


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        (in_a_group_that_one_does_not_open, ["barrier", *[r"the first operation of group \(0, 2, 1\)"] * 2]),
        (in_a_circle, [r"recv from 1", r"recv from 2", r"recv from 0"]),
        (in_two_groups, [r"all_reduce float32\[3\] \(sum\)"] * 2 + ["barrier"]),
        (in_a_backward_pass, ["all_reduce.*", r"all_reduce float32\[3\] \(sum\)", "all_reduce.*"]),
    ],
)
def test_ranks_that_wait_for_each_other(
    shared_mesh: Callable[..., Mesh], body: Callable[[Mesh, Communicator], Any], waits: list[str]
) -> None:
    """It is found out by shared memory; other transports may have something under way."""
    mesh = shared_mesh({"data": 3}, backend="shm")
    text = refused(mesh, functools.partial(body, mesh))
    assert "all ranks wait for each other, and none goes on" in text
    for rank, what in enumerate(waits):
        assert re.search(rf"rank {rank}: waiting in {what}", text), text
    works(mesh)


def test_ranks_of_which_one_will_come_do_not_wait_for_each_other(shared_mesh: Callable[..., Mesh]) -> None:
    """One computes; one is stopped, and has all it needs; one's wait ends by itself; one polls; one has a thread."""
    mesh = shared_mesh({"data": 3}, backend="shm")

    def computes(comm: Communicator) -> str:
        if comm.rank == 1:
            time.sleep(2)
        comm.barrier()
        return "done"

    def ends(comm: Communicator) -> str:
        if comm.rank == 0:
            work = comm.irecv(torch.zeros(3), 1)
            with pytest.raises(PeerLost, match="got no answer for 2 s"):
                work.wait(timeout=2)
            comm.send(torch.ones(3), 1)
            work.wait()  # else it would take the next test's message
        elif comm.rank == 1:
            comm.recv(torch.zeros(3), 0)
            comm.send(torch.ones(3), 0)
        comm.barrier()
        return "done"

    def polls(comm: Communicator) -> str:
        if comm.rank == 0:
            work, end = comm.irecv(torch.zeros(3), 1, tag=1), time.monotonic() + 2
            while time.monotonic() < end:
                assert not work.is_completed()
                time.sleep(0.01)
            comm.send(torch.ones(3), 1)
            work.wait()
        elif comm.rank == 1:
            comm.recv(torch.zeros(3), 0)
            comm.send(torch.ones(3), 0, tag=1)
        comm.barrier()
        return "done"

    def sends_in_a_thread(comm: Communicator) -> str:
        if comm.rank == 0:
            _thread.start_new_thread(lambda: (time.sleep(2), comm.send(torch.ones(3), 1, tag=2)), ())
            comm.recv(torch.zeros(3), 1, tag=2)
        elif comm.rank == 1:
            comm.recv(torch.zeros(3), 0, tag=2)
            comm.send(torch.ones(3), 0, tag=2)
        comm.barrier()
        return "done"

    for body in (computes, ends, polls, sends_in_a_thread):
        assert mesh.run(lambda body=body: body(mesh.comm())) == ["done"] * 3

    pids, began = mesh.run(os.getpid), time.monotonic()
    future = threading.Thread(target=wake, args=(pids[1],))
    future.start()
    assert mesh.run(lambda: computes(mesh.comm())) == ["done"] * 3
    future.join()
    assert time.monotonic() - began > 3


def test_a_thread_that_has_ended_is_not_waited_for(shared_mesh: Callable[..., Mesh]) -> None:
    """Not even one that was started without `threading`, and stays among the threads that this knows."""
    mesh = shared_mesh({"data": 3}, backend="shm")

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            ended = threading.Event()

            def receive() -> None:
                comm.recv(torch.zeros(3), 1)
                threading.current_thread()  # which makes an object for it
                ended.set()

            _thread.start_new_thread(receive, ())
            assert ended.wait(HANGS)
        elif comm.rank == 1:
            comm.send(torch.ones(3), 0)

    mesh.run(lambda: body(mesh.comm()))
    assert "none goes on" in refused(mesh, functools.partial(in_a_circle, mesh))


def test_looks_before_another_thread_had_begun_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins some time after it was started, and may do what the others wait for."""
    alone = True
    rank, other = stalls_at_once(monkeypatch, lambda: alone)
    assert not rank.all_wait(0) and not other.all_wait(0)
    assert not any(rank.all_wait(0) for _ in range(20))
    alone = False
    assert not rank.all_wait(0)
    alone = True  # the other one is
    assert not any(other.all_wait(0) for _ in range(20))
    assert any(rank.all_wait(0) or other.all_wait(0) for _ in range(20))


def test_what_one_rank_has_found_out_the_others_find_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the first one does not wait any more; but not of a wait that has begun since."""
    for waits_anew in (False, True):
        rank, other = stalls_at_once(monkeypatch, lambda: True)
        assert not rank.all_wait(0) and not other.all_wait(0) and not rank.all_wait(0)
        assert not any(other.all_wait(0) for _ in range(20))
        assert any(rank.all_wait(0) for _ in range(20))
        if waits_anew:
            other.end()
        assert other.all_wait(0) is not waits_anew


def test_the_first_operation_of_a_group_advances_what_is_under_way(shared_mesh: Callable[..., Mesh]) -> None:
    """The first rank of the group waits for the sum, of which the other one has a part to do."""
    mesh = shared_mesh({"data": 2}, backend="shm")

    def body() -> float:
        comm, x = mesh.comm(), torch.ones(3_000_000)
        work = comm.all_reduce(x, async_op=True)
        if comm.rank == 1:
            work.wait()
        mesh.comm(ranks=[1, 0]).barrier()
        work.wait()
        return float(x[-1])

    assert mesh.run(body) == [2.0, 2.0]


def wake(pid: int) -> None:
    """Stop a process for some seconds that has begun to sleep."""
    time.sleep(1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(pid, signal.SIGCONT)


def test_a_group_that_does_not_end_is_left_behind(make_mesh: Callable[..., Mesh]) -> None:
    def body(comm: Communicator) -> None:
        comm._group = Endless(comm._group)  # in truth it is a race within Gloo, one of a thousand
        comm.broadcast(torch.ones(2)) if comm.rank == 1 else comm.all_reduce(torch.ones(2))

    mesh = make_mesh({"data": 3}, backend="gloo")
    refused(mesh, body)
    works(mesh)


def test_a_rank_that_dies_while_the_group_connects(make_mesh: Callable[..., Mesh]) -> None:
    """After all have met, where the others' connections wait for it within Gloo."""

    def body() -> None:
        if mesh.rank == 1:

            class Dying(dist.ProcessGroupGloo):
                def __init__(self, *_: Any):
                    os.kill(os.getpid(), signal.SIGKILL)

            dist.ProcessGroupGloo = Dying
        mesh.comm()

    mesh = make_mesh({"data": 3}, backend="gloo")
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 was killed by SIGKILL"):
        mesh.run(body)
    works(mesh)
    assert soon(10, began)
