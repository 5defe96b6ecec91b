"""Objects on ranks: their calls, what comes of them, and what is said when something goes wrong."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import gc
import importlib
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from host_processes import parent_of
from internals import refuse_next_message
from patience import HANGS, until

from spmd import Mesh, MeshError, P, PeerLost, SpecError, data_parallel, psum, put, spmd


class Counter:
    def __init__(self, value: int = 0):
        self.value = value

    def add(self, more: int, *, times: int = 1) -> int:
        self.value += more * times
        return self.value

    def fail(self, text: str, kind: type[Exception] = LookupError) -> None:
        raise kind(text)

    def get(self) -> int:
        return self.value


class Caller:
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Gate:
    """Calls of `wait` end when somebody opens it, which another object does: one object does one call at a time."""

    def __init__(self, opened: Any = None):
        self.opened, self.seen = opened, 0

    def wait(self) -> int:
        assert until(lambda: self.opened.get().get())
        self.seen += 1
        return self.seen

    def pass_by(self, what: int) -> int:
        self.seen += 1
        return what


class Tensors:
    def __init__(self) -> None:
        self.kept = torch.zeros(1 << 16)

    def make(self, size: int, fill: float) -> torch.Tensor:
        return torch.full((size,), fill)

    def total(self, *tensors: Any, **named: Any) -> float:
        return float(sum(t.sum() for t in tensors) + sum(t.sum() for t in named.get("tree", {}).values()))

    def grow(self) -> torch.Tensor:
        self.kept += 1
        return self.kept

    def where(self) -> int:
        return os.getpid()


class Chain:
    """Calls itself, and others of its kind, in ways that can end, and in ways that can't."""

    def set(self, other: Any) -> None:
        self.other = other

    def echo(self, value: Any = 1) -> Any:
        return value

    def wait_for_itself(self) -> Any:
        return self.other.echo().get()

    def wait_around(self) -> Any:
        return self.other.wait_for_itself().get()

    def hand_on(self, value: Any) -> Any:
        return self.other.echo(value)  # a Ref, which it does not wait for


def settings() -> tuple[torch.dtype, bool, str]:
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


class Held:
    def wait(self, begun: Path, ends: Path) -> tuple[torch.dtype, bool, str]:
        begun.touch()
        assert until(ends.exists)
        return settings()


HOSTS = pytest.mark.parametrize("hosts", [None, "local:2x1"], ids=["one host", "two hosts"])


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Callable[[], Mesh]]:
    made: list[Mesh] = []

    def get() -> Mesh:
        if not made:
            made.append(Mesh({"data": 2}, hosts="local:2x1", timeout=60.0))
        return made[0]

    yield get
    for mesh in made:
        mesh.close()


@pytest.fixture
def one_host(shared_mesh: Any) -> Mesh:
    return shared_mesh({"data": 2})


@pytest.fixture(params=["one host", "two hosts"])
def mesh(request: pytest.FixtureRequest, shared_mesh: Any, two_hosts: Callable[[], Mesh]) -> Mesh:
    return two_hosts() if request.param == "two hosts" else shared_mesh({"data": 2})


def test_calls_run_in_order_and_keep_what_they_change(mesh: Mesh) -> None:
    counter = mesh.remote(Counter, 10, rank=1)
    refs = [counter.add(1, times=number) for number in range(5)]
    assert [ref.get() for ref in refs] == [10, 11, 13, 16, 20]
    assert refs[0].done() and refs[0].get() is refs[0].get()
    assert "Counter" in repr(counter) and "done" in repr(refs[0])
    with pytest.raises(AttributeError, match=r"no method 'subtract'.*add"):
        counter.subtract(1)


def test_an_error_keeps_its_type_and_the_remote_traceback(mesh: Mesh) -> None:
    counter = mesh.remote(Counter, rank=1)
    with pytest.raises(LookupError, match="no such thing") as caught:
        counter.fail("no such thing").get()
    assert "in fail" in str(caught.value.__cause__) and "rank 1" in str(caught.value.__cause__)
    assert counter.add(1).get() == 1
    assert isinstance(counter.fail("again").exception(), LookupError)
    with pytest.raises(TimeoutError, match="its own"):
        counter.fail("its own", TimeoutError).get()
    with pytest.raises(ZeroDivisionError):
        mesh.remote(lambda: 1 // 0, rank=1)


def test_an_object_that_can_t_open_its_file_is_made_once(mesh: Mesh, tmp_path: Any) -> None:
    """Its error is of the kind that comes of a rank that can't be reached, and is no sign of one."""

    class Reader:
        def __init__(self, path: str) -> None:
            with open(f"{path}/made", "a") as file:
                file.write("made ")
            open(f"{path}/absent").close()

    with pytest.raises(FileNotFoundError, match="absent"):
        mesh.remote(Reader, str(tmp_path))
    assert (tmp_path / "made").read_text() == "made "


def test_an_error_that_nobody_asks_for_is_raised_at_the_next_call(mesh: Mesh) -> None:
    counter = mesh.remote(Counter, rank=1)
    counter.fail("dropped")
    with pytest.raises(LookupError, match="dropped"):
        counter.get().exception()  # over, when it is; and at this call, if it was over before
        counter.get()
    assert counter.get().get() == 0
    given: list[Callable[[Any], Any]] = [
        lambda failed: counter.add([failed]).get(),
        lambda failed: mesh.submit(len, failed).result(),
        lambda failed: mesh.run(len, failed),
        lambda failed: spmd(lambda x: x, mesh=mesh)(failed),
    ]
    for give in given:
        with pytest.raises(LookupError, match="given on"):
            give(counter.fail("given on"))
        assert counter.get().get() == 0, "it was raised already"


def test_an_error_that_nobody_asks_for_is_raised_in_its_thread(mesh: Mesh) -> None:
    counter, ended = mesh.remote(Counter), []

    def drop(text: str) -> None:
        failed = counter.fail(text)
        assert until(failed.done)

    def call() -> None:
        drop("of another thread")
        dropped.set()
        assert on.wait(20)
        with pytest.raises(LookupError, match="of another thread"):
            counter.get()
        drop("at its end")
        ended.append(True)

    dropped, on, thread = threading.Event(), threading.Event(), threading.Thread(target=call)
    thread.start()
    assert dropped.wait(20)
    assert counter.get().get() == 0
    on.set()
    thread.join(20)
    assert ended
    with pytest.raises(LookupError, match="at its end"):
        counter.get()


def test_results_go_from_rank_to_rank(mesh: Mesh) -> None:
    first, second = mesh.remote(Tensors, rank=0), mesh.remote(Tensors, rank=1)
    small, large = first.make(3, 2.0), first.make(1 << 18, 1.0)
    assert second.total(small, large, tree={"a": small}).get() == 6 + (1 << 18) + 6
    assert first.total(large, tree={"b": second.make(1 << 17, 2.0)}).get() == (1 << 18) * 2
    assert torch.equal(large.get(), torch.ones(1 << 18)) and large.get() is large.get()
    failed = mesh.remote(Counter, rank=0).fail("upstream")
    with pytest.raises(LookupError, match="upstream"):
        second.total(failed).get()
    assert failed.exception() is not None


def test_a_result_is_what_it_was_when_the_call_ended(mesh: Mesh) -> None:
    tensors = mesh.remote(Tensors, rank=1)
    before, after = tensors.grow(), tensors.grow()
    assert after.get()[0] == 2 and before.get()[0] == 1


class Counted:
    """Arrives as the number of times that it was pickled."""

    def __init__(self) -> None:
        self.times = 0

    def __reduce__(self) -> Any:
        self.times += 1
        return int, (self.times,)


def test_a_result_with_another_call_s_in_it_is_what_it_was_when_the_call_ended(mesh: Mesh) -> None:
    class Both:
        def both(self, other: Any) -> Any:
            return Counted(), other.add(2)

    assert mesh.remote(Both, rank=0).both(mesh.remote(Counter, 1, rank=1)).get() == (1, 3)


def test_handles_of_one_object_are_equal(mesh: Mesh) -> None:
    one, other = mesh.remote(Counter, rank=0), mesh.remote(Counter, rank=0)

    def find(handles: list[Any], wanted: Any) -> tuple[int, bool, int]:
        return handles.index(wanted), wanted in {one: 1}, len({*handles, wanted})

    for wanted, found in ((one, (1, True, 2)), (other, (0, False, 2))):
        assert find([other, one], wanted) == found
        assert mesh.run(find, [other, one], wanted) == [found, found]
        assert mesh.remote(Caller, rank=1).call(find, [other, one], wanted).get() == found
    assert one and one != 1 and one is not None


def test_functions_on_ranks_take_handles_and_results(mesh: Mesh) -> None:
    counter, tensors = mesh.remote(Counter, rank=1), mesh.remote(Tensors, rank=0)
    assert sorted(mesh.run(lambda handle: handle.add(1).get(), counter)) == [1, 2]
    assert sorted(mesh.run(lambda: counter.add(1).get())) == [3, 4]  # captured
    assert mesh.run(lambda x: float(x.sum()), tensors.make(1 << 17, 1.0)) == [1 << 17] * 2
    assert mesh.submit(lambda x: x + 1, counter.get(), rank=0).result() == 5
    (back, _) = mesh.run(lambda: counter)
    assert back.get().get() == 4


def test_regions_take_results(mesh: Mesh) -> None:
    tensors = mesh.remote(Tensors, rank=1)

    @spmd(mesh=mesh, in_specs=(P("data"), None), out_specs=P())
    def total(x: torch.Tensor, scale: Any) -> torch.Tensor:
        return psum((x * scale["by"]).sum(), "data")

    for _ in range(2):
        assert float(total(tensors.make(10, 1.0), {"by": tensors.make(1, 3.0)})) == 30
    failed = mesh.remote(Counter, rank=0).fail("upstream")
    with pytest.raises(LookupError, match="upstream"):
        total(failed, {"by": 1.0})


def test_ranks_call_objects_while_they_compute(mesh: Mesh) -> None:
    """An asynchronous parameter server: ranks read and write while the others go on."""

    class Server:
        def __init__(self) -> None:
            self.value, self.writes = torch.zeros(4), 0

        def read(self) -> torch.Tensor:
            return self.value

        def write(self, gradient: torch.Tensor) -> int:
            self.value -= gradient
            self.writes += 1
            return self.writes

    server = mesh.remote(Server, rank=0)

    def train(steps: int) -> float:
        for _ in range(steps):
            server.write(server.read().get() * 0 + 1.0)
        mesh.comm().barrier()
        return float(server.read().get().sum())

    mesh.run(train, 10)
    assert float(server.read().get().sum()) == -4 * 10 * mesh.size


def test_objects_are_made_by_ranks(mesh: Mesh) -> None:
    def make_elsewhere() -> int:
        counter = mesh.remote(Counter, 5, rank=1 - mesh.rank)
        return counter.add(mesh.rank).get()

    assert mesh.run(make_elsewhere) == [5, 6]


def test_a_call_does_not_wait_for_regions(mesh: Mesh) -> None:
    """Both ranks are in a function that ends when an object on one of them has been told to."""
    flag = mesh.remote(Counter, rank=0)
    waiting = threading.Thread(target=lambda: mesh.run(lambda: until(lambda: flag.get().get() == 1)))
    waiting.start()
    assert until(lambda: flag.add(0).get() == 0)
    flag.add(1).get()
    waiting.join(HANGS)
    assert not waiting.is_alive()


def test_a_call_that_ends_leaves_torchs_settings_to_what_runs_meanwhile(one_host: Mesh, tmp_path: Path) -> None:
    held, begun, ends, usual = one_host.remote(Held, rank=0), tmp_path / "begun", tmp_path / "ends", settings()

    def body() -> tuple[torch.dtype, bool, str]:
        ends.touch()
        time.sleep(0.3)  # the call ends
        return settings()

    with contextlib.ExitStack() as stack:
        for name, now, then in (
            ("set_default_dtype", torch.float64, usual[0]),
            ("use_deterministic_algorithms", True, usual[1]),
            ("set_float32_matmul_precision", "high", usual[2]),
        ):
            getattr(torch, name)(now)
            stack.callback(getattr(torch, name), then)
        ref = held.wait(begun, ends)
        assert until(begun.exists)
        assert [*one_host.run(body), ref.get()] == [(torch.float64, True, "high")] * 3
    assert one_host.run(settings) == [usual] * 2


def test_waits_end(mesh: Mesh) -> None:
    opened = mesh.remote(Counter, rank=0)
    gate = mesh.remote(Gate, opened, rank=1)
    first, second, third = gate.wait(), gate.wait(), gate.pass_by(3)
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        first.get(timeout=0.05)
    assert not first.done() and second.cancel() and second.cancelled()
    with pytest.raises(CancelledError):
        second.get()
    seen: list[Any] = []
    third.add_done_callback(lambda ref: seen.append(ref.get()))
    opened.add(1)
    assert third.get(HANGS) == 3 and first.get() == 1 and not first.cancel()
    assert until(lambda: seen == [3])

    async def together() -> list[Any]:
        return list(await asyncio.gather(*(gate.pass_by(number) for number in range(20))))

    assert asyncio.run(together()) == list(range(20))

    async def large() -> int:
        return len(await mesh.remote(Tensors, rank=0).make(1 << 17, 0.0))

    assert asyncio.run(large()) == 1 << 17

    async def ended(ref: Any) -> None:
        await asyncio.wait_for(ref, HANGS)

    cancelled = gate.pass_by(second)
    with pytest.raises(CancelledError):
        cancelled.get()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ended(cancelled))
    with pytest.raises(RuntimeError, match="raised StopIteration"):  # as of any coroutine
        asyncio.run(ended(opened.fail("an iterator at its end", StopIteration)))


def test_the_end_of_a_cancelled_wait_shows_no_frame_of_the_library(mesh: Mesh) -> None:
    """As of a cell that waits with `await`, and is stopped."""
    opened = mesh.remote(Counter, rank=0)
    gate = mesh.remote(Gate, opened, rank=1)
    first, second = gate.wait(), gate.wait()
    shown: list[list[str]] = []

    async def waits(ref: Any) -> None:
        try:
            await ref
        except asyncio.CancelledError as error:
            shown.append([frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)])

    async def stopped() -> None:
        task = asyncio.ensure_future(waits(first))
        await asyncio.sleep(0)
        task.cancel()
        await task
        second.cancel()
        await waits(second)

    asyncio.run(stopped())
    opened.add(1)
    assert first.get() == 1 and shown == [["waits"], ["waits"]]


def test_a_caller_waits_where_too_many_calls_are_under_way(mesh: Mesh) -> None:
    opened = mesh.remote(Counter, rank=0)
    gate = mesh.remote(Gate, opened, rank=1)
    sent: list[Any] = []

    def send() -> None:
        sent.append(gate.wait())
        for number in range(3000):
            sent.append(gate.pass_by(number))

    sender = threading.Thread(target=send)
    sender.start()
    assert until(lambda: len(sent) == 1024)
    opened.add(1)
    sender.join(HANGS)
    assert [ref.get() for ref in sent[1:]] == list(range(3000))


def test_a_call_that_waits_for_itself_is_told_so(mesh: Mesh) -> None:
    one, other = mesh.remote(Chain, rank=0), mesh.remote(Chain, rank=1)
    one.set(one).get()
    with pytest.raises(MeshError, match=r"Chain\.wait_for_itself waits for a call that cannot begin"):
        one.wait_for_itself().get()
    one.set(other).get()
    other.set(one).get()
    with pytest.raises(MeshError, match=r"waits for a call that cannot begin, or end, before Chain\.\w+ has"):
        one.wait_around().get()
    assert one.wait_for_itself().get() == 1  # the other one answers
    assert one.hand_on(7).get() == 7  # the result is another call's


class Empty:
    def __bool__(self) -> bool:
        return False


def test_what_is_refused(mesh: Mesh) -> None:
    tensors = mesh.remote(Tensors, rank=1)
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(MeshError, match=r"no derivative.*detach"):
        tensors.total(weight * 2)
    with pytest.raises(MeshError, match=r"Array.*array\.full\(\)"):
        tensors.total(put(torch.ones(2), mesh=mesh))
    with pytest.raises(MeshError, match="cannot be sent"):
        tensors.total(threading.Lock())
    for empty in (mesh.remote(list, rank=1), mesh.remote(Empty, rank=1)):
        with pytest.raises(MeshError, match=r"asked whether it is true.*`handle is not None`"):
            assert not empty
        assert "__bool__" not in dir(empty)
    with pytest.raises(MeshError, match="no such rank"):
        mesh.remote(Counter, rank=2)
    for timeout in ("x", math.nan):  # of which the second would never be over
        with pytest.raises(SpecError, match=r"a Ref got a bad timeout .*seconds.*got ('x'|nan)"):
            tensors.where().get(timeout=timeout)
    with pytest.raises(MeshError, match="cannot communicate"):
        mesh.remote(lambda: mesh.comm().barrier(), rank=0)
    with pytest.raises(MeshError, match="as an argument"):
        ref = tensors.where()
        mesh.run(lambda: ref.get())
    total = spmd(torch.sum, mesh=mesh, in_specs=P("data"))  # on its rank alone, of this one's rows
    with pytest.raises(MeshError, match="cannot call sum, an @spmd function: the other ranks take no part"):
        mesh.remote(lambda: total(torch.ones(4)), rank=0)
    with pytest.raises(MeshError, match="called by a method of a remote object"):
        mesh.remote(lambda: mesh.run(os.getpid), rank=0)


class Forking:
    def fork(self, how: str) -> tuple[str, int]:
        child = os.fork()
        if child == 0 and how == "exit":
            sys.exit(3)
        if child == 0 and how == "raise":
            raise LookupError("in the child")
        return how, child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_that_a_method_forks_answers_no_calls(mesh: Mesh) -> None:
    forking = mesh.remote(Forking, rank=1)
    answers = [forking.fork(how).get(timeout=HANGS) for how in ("exit", "raise", "return") * 2]
    assert answers == [("exit", 3), ("raise", 1), ("return", 0)] * 2


def test_methods_that_have_not_run_when_they_return_are_refused(mesh: Mesh) -> None:
    class Reader:
        async def read(self) -> int:
            return 1

        def lines(self) -> Iterator[int]:
            yield 1

        def made(self) -> Any:
            return iter(number for number in range(3))

    reader = mesh.remote(Reader, rank=0)
    for call, kind in ((reader.read, "async"), (reader.lines, "a generator")):
        with pytest.raises(SpecError, match=rf"which is {kind}.*write def, without async or yield"):
            call().get()
    with pytest.raises(MeshError, match=r"the result of Reader\.made cannot be sent"):
        reader.made().get()


def test_a_step_may_be_given_a_handle_while_others_call(mesh: Mesh) -> None:
    """What the library notes behind it meanwhile is nothing that the step captures."""
    counter = mesh.remote(Counter, rank=1)
    mesh.run(lambda handle: setattr(handle._caller, "noted", torch.zeros(())), counter)

    def step(handle: Any, x: torch.Tensor) -> torch.Tensor:
        handle._caller.noted += 1
        return x

    assert float(spmd(step, mesh=mesh)(counter, torch.ones(()))) == 1


def test_training_goes_on_beside_calls(mesh: Mesh) -> None:
    """A replay buffer is filled and read while the ranks take steps; the steps give what they give without it."""
    buffer = mesh.remote(Tensors, rank=1)

    def losses(beside: bool) -> list[float]:
        @spmd(mesh=mesh)
        @data_parallel
        def step(weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return psum((weight * batch).sum(), "data")

        out = []
        for number in range(5):
            refs = [buffer.make(100, 1.0) for _ in range(10)] if beside else []
            out.append(float(step(torch.tensor(2.0), torch.arange(8.0) + number)))
            assert all(len(ref.get()) == 100 for ref in refs)
        return out

    assert losses(True) == losses(False)


def test_objects_go_with_their_handles(mesh: Mesh) -> None:
    counter = mesh.remote(Counter, rank=1)
    keeper = mesh.remote(Gate, counter, rank=0)
    del counter
    waits = keeper.wait()
    with pytest.raises(MeshError, match=r"handle that mesh\.remote returned"):
        waits.get()


def test_errors_that_were_seen_keep_nothing(make_mesh: Callable[..., Mesh]) -> None:
    """What a function had that has caught one goes, and with it the objects: the mesh can be resized."""
    mesh = make_mesh({"data": 2})

    def catches(ask: Callable[[Any], None]) -> weakref.ref:
        counter = mesh.remote(Counter, rank=1)
        ref, mine = counter.fail("not this one"), torch.ones(3)
        with contextlib.suppress(LookupError):
            ask(ref)
        return weakref.ref(mine)

    def asks(ref: Any) -> None:
        raise ref.exception()

    def gets_while_the_thread_is_busy(ref: Any) -> None:
        ref.add_done_callback(lambda _: time.sleep(0.3))  # on the thread that has the error, too
        ref.get()

    async def awaits(ref: Any) -> None:
        await ref

    for ask in (lambda ref: ref.get(), asks, lambda ref: asyncio.run(awaits(ref)), gets_while_the_thread_is_busy):
        mine = catches(ask)
        mesh.resize({"data": 5 - mesh.size})
        assert mine() is None


@HOSTS
def test_a_rank_that_dies_takes_its_objects_along(make_mesh: Any, hosts: str | None) -> None:
    mesh = make_mesh({"data": 2}, hosts=hosts)
    lost, kept = mesh.remote(Tensors, rank=1), mesh.remote(Counter, 0, rank=0)
    large = lost.make(1 << 18, 1.0)
    pid = lost.where().get()
    gate = mesh.remote(Gate, kept, rank=1)
    under_way = gate.pass_by(1), gate.wait()
    assert under_way[0].get() == 1
    os.kill(pid, signal.SIGKILL)
    for ref in (under_way[1], large):
        with pytest.raises(PeerLost, match="rank 1") as caught:
            ref.get(HANGS)
        assert caught.value.rank == 1
    with pytest.raises(PeerLost):
        lost.where().get()
    assert kept.get().get() == 0
    total = mesh.remote(Tensors, rank=0).total(large)
    for wait in (total.get, mesh.submit(lambda x: float(x.sum()), large).result):
        with pytest.raises(PeerLost, match="rank 1"):
            wait(HANGS)
    with pytest.raises(PeerLost, match="rank 1"):
        spmd(lambda x: x.sum(), mesh=mesh)(large)
    again = mesh.remote(Tensors, rank=1)
    assert again.where().get() != pid
    assert mesh.run(lambda: float(torch.ones(2).sum())) == [2.0, 2.0]


@HOSTS
def test_closing_and_restarting(make_mesh: Any, hosts: str | None) -> None:
    mesh = make_mesh({"data": 1}, hosts=hosts and "local:1x1")
    kept = mesh.remote(Counter, 0)
    gate = mesh.remote(Gate, kept)
    waits = gate.wait()
    mesh.restart()
    for lost in (waits, kept):
        with pytest.raises(MeshError, match=r"restarted.*: make them again$"):
            lost.get()
    mesh.remote(Counter, 0).fail("at the end")
    with pytest.raises(MeshError, match="of another mesh, or of one that was restarted"):
        mesh.run(lambda handle: handle, kept)
    with pytest.raises(LookupError, match="at the end"):
        while not mesh.closed:
            mesh.remote(Counter, 1).get().get()


class Ledger:
    """Notes what it is told, and can be killed on the way."""

    def __init__(self, first: str):
        self.lines = [first]

    def write(self, line: str) -> int:
        self.lines.append(line)
        return len(self.lines)

    def write_and_die(self, line: str) -> int:
        if os.path.exists(line):
            return self.write(line)
        if not line.startswith("/dev"):
            open(line, "w").close()  # the second time it lives
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def fail(self, line: str) -> None:
        self.lines.append(line)
        raise LookupError(line)

    def read(self) -> list[str]:
        return self.lines

    def where(self) -> int:
        return os.getpid()

    def save(self) -> list[str]:
        return self.lines

    def load(self, lines: list[str]) -> None:
        self.lines = lines


@HOSTS
def test_an_object_that_saves_is_restored(make_mesh: Any, tmp_path: Any, hosts: str | None) -> None:
    """Each call is done once, those on their way included, wherever its rank dies."""
    mesh = make_mesh({"data": 2}, hosts=hosts)
    ledger, other = mesh.remote(Ledger, "first", rank=1, restore=True), mesh.remote(Counter, rank=0)
    fatal = str(tmp_path / "fatal")
    before = [ledger.write("a"), ledger.fail("b"), ledger.write(ledger.where()), ledger.write_and_die(fatal)]
    after = [ledger.write(str(number)) for number in range(20)]
    assert before[0].get() == 2 and isinstance(before[1].exception(), LookupError)
    pid = before[2].get() and mesh.remote(Ledger, "", rank=0).where().get()
    assert before[3].get(HANGS) == 5
    assert [ref.get(HANGS) for ref in after] == list(range(6, 26))
    lines = ledger.read().get()
    assert [lines[0], lines[1], lines[2], lines[4]] == ["first", "a", "b", fatal] and len(lines) == 25
    assert ledger.where().get() not in (lines[3], pid)
    captured = lambda: ledger.read().get()[0]  # noqa: E731
    assert mesh.run(captured) == ["first"] * 2
    os.kill(ledger.where().get(), signal.SIGKILL)
    assert ledger.read().get(HANGS) == lines
    assert mesh.run(captured) == mesh.run(lambda handle: handle.read().get()[0], ledger) == ["first"] * 2
    assert other.add(1).get() == 1
    with pytest.raises(PeerLost, match="rank 1"):
        ledger.write_and_die("/dev/null/always").get(HANGS)
    assert ledger.read().get(HANGS) == lines
    with pytest.raises(MeshError, match=r"restore=True needs.*lacks load, save"):
        mesh.remote(Counter, rank=0, restore=True)


class Fragile(Ledger):
    """Is read from a file that may be away for a moment."""

    def load(self, lines: list[str]) -> None:
        if not os.path.exists(lines[0]):
            raise FileNotFoundError(lines[0])
        self.lines = lines

    def much(self) -> torch.Tensor:
        return torch.ones(1 << 18)

    def wait(self) -> None:
        time.sleep(HANGS)


class Saved(Fragile):
    """Says when it has saved."""

    def save(self) -> list[str]:
        Path(self.lines[0]).touch()
        return self.lines


def open_values() -> int:
    """How many descriptors this process has of tensors on their way."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += "spmd-values" in os.readlink(f"/proc/self/fd/{name}")
    return found


@HOSTS
def test_results_of_objects_that_save_are_let_go(make_mesh: Any, tmp_path: Path, hosts: str | None) -> None:
    mesh, before, saved = make_mesh({"data": 2}, hosts=hosts), open_values(), tmp_path / "saved"
    ledger = mesh.remote(Saved, str(saved), rank=1, restore=True)
    pid = ledger.where().get()
    ledger.write("x" * (1 << 25)).get()  # its state takes a while to send
    answered, goes_on = threading.Event(), threading.Event()
    ledger.where().add_done_callback(lambda _: (answered.set(), goes_on.wait(HANGS)))
    assert answered.wait(HANGS)  # now this process reads nothing from the rank
    saved.unlink()
    large = ledger.much()
    assert until(saved.exists)
    time.sleep(0.5)  # so that the result is on its way, and the state is not
    os.kill(pid, signal.SIGKILL)
    goes_on.set()
    assert float(large.get(HANGS).sum()) == 1 << 18
    assert ledger.write("y").get(HANGS) == 3
    assert open_values() == before
    ledger.much().get()
    mesh.close()
    assert open_values() == before


def test_objects_that_could_not_be_made_leave_nothing(mesh: Mesh) -> None:
    def refuse() -> None:
        raise LookupError("no room")

    before = mesh.run(threading.active_count)
    for attempt in range(8):
        with pytest.raises(LookupError, match="no room"):
            mesh.remote(refuse, rank=1, restore=attempt % 2 == 1)
    assert until(lambda: mesh.run(threading.active_count)[1] <= before[1])


def test_an_object_whose_rank_dies_as_it_is_made_is_made_again(mesh: Mesh, tmp_path: Path) -> None:
    """Up to three times, and only if it is to be restored."""

    def make(deaths: int) -> Ledger:
        tries = len(os.listdir(tmp_path))
        (tmp_path / f"try-{tries}").touch()
        if tries < deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return Ledger("first")

    assert mesh.remote(make, 2, rank=1, restore=True).read().get() == ["first"]
    for restore in (True, False):
        with pytest.raises(PeerLost, match="rank 1"):
            mesh.remote(make, 99, rank=1, restore=restore)


class SlowToLoad:
    """Says when it begins to load its state, and waits for a moment."""

    def __init__(self, begun: Path):
        self.begun = begun

    def save(self) -> Path:
        return self.begun

    def load(self, begun: Path) -> None:
        self.begun = begun
        begun.touch()
        time.sleep(0.5)

    def where(self) -> int:
        return os.getpid()


def test_an_object_that_is_made_again_while_a_call_is_made(make_mesh: Any) -> None:
    """The call reaches the new one, although its caller has looked at the old one."""
    mesh = make_mesh({"data": 2})
    ledger = mesh.remote(Ledger, "first", rank=1, restore=True)

    class Line:
        def __reduce__(self) -> Any:
            os.kill(ledger.where().get(), signal.SIGKILL)
            ledger.where().get(HANGS)
            return str, ("second",)

    assert ledger.write(Line()).get(HANGS) == 2 and ledger.read().get() == ["first", "second"]


def test_an_object_whose_handle_goes_while_it_is_made_again(make_mesh: Any, tmp_path: Path) -> None:
    def left() -> int:
        gc.collect()
        return sum(type(one).__name__ == SlowToLoad.__name__ for one in gc.get_objects())

    mesh, begun = make_mesh({"data": 2}), tmp_path / "begun"
    for resized in (False, True):
        slow = mesh.remote(SlowToLoad, begun, rank=1, restore=True)
        os.kill(slow.where().get(), signal.SIGKILL)
        assert until(begun.exists)
        del slow
        gc.collect()
        begun.unlink()
        if resized:
            mesh.resize({"data": 1})
        else:
            assert until(lambda: mesh.run(left) == [0, 0])


def test_an_object_that_cannot_be_restored_yet(make_mesh: Any, tmp_path: Any) -> None:
    """No call is done by one that has not what was saved; the next call tries again."""
    mesh, path = make_mesh({"data": 2}), tmp_path / "there"
    ledger = mesh.remote(Fragile, str(path), rank=1, restore=True)
    assert ledger.write("a").get() == 2
    os.kill(ledger.where().get(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="there"):
            ledger.write("b").get(HANGS)
    path.touch()
    assert ledger.write("b").get(HANGS) == 3 and ledger.read().get() == [str(path), "a", "b"]
    large = ledger.much()
    assert until(large.done)
    os.kill(ledger.where().get(), signal.SIGKILL)
    with pytest.raises(PeerLost, match="rank 1"):  # it lived there, and is not made again
        large.get(HANGS)
    assert ledger.write("c").get(HANGS) == 4
    pid, under_way = ledger.where().get(), ledger.wait()
    del ledger
    gc.collect()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match="rank 1"):
        under_way.get(HANGS)
    mesh.remote(Ledger, "", rank=0).fail("unseen")
    with pytest.raises(LookupError, match="unseen"):
        while True:
            with contextlib.suppress(MeshError):  # while the call is under way
                mesh.resize({"data": 1 + mesh.size % 2})


def test_strangers_are_turned_away(mesh: Mesh, one_host: Mesh) -> None:
    """Whoever finds a rank's socket, but lacks the mesh's key: what it sends is not looked at."""
    counter = mesh.remote(Counter, rank=1)
    assert counter.add(1).get() == 1
    unix, ports = listening(mesh.run(os.getpid))
    assert len(unix) == 2 and len(ports) == (0 if mesh is one_host else 2)
    for name in (*unix, *(("127.0.0.1", port) for port in ports)):
        family = socket.AF_UNIX if isinstance(name, str) else socket.AF_INET
        with contextlib.ExitStack() as stack:
            silent, garbage, leaves = (stack.enter_context(socket.socket(family)) for _ in range(3))
            for connection in (silent, garbage, leaves):
                connection.settimeout(HANGS)
                connection.connect(name)
            garbage.sendall(b"x" * 32)
            assert len(garbage.recv(80, socket.MSG_WAITALL)) == 80  # a number, who it is, and its proof
            garbage.sendall(b"y" * 48)
            assert garbage.recv(1) == b""  # it was put out
            leaves.sendall(b"x" * 32)
    assert counter.add(1).get() == 2


def sockets_of(pids: list[int]) -> set[str]:
    found = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    return found


def listening(pids: list[int]) -> tuple[list[str], list[int]]:
    """The names and ports at which ranks hear calls, which any process of the host can see."""
    inodes, shared = sockets_of(pids), sockets_of([parent_of(parent_of(pid)) for pid in pids])
    found = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@spmd-" in line]
    names = {fields[7] for fields in found if fields[6] in inodes and fields[3] == "00010000"}
    over_ip = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {
        int(fields[1].partition(":")[2], 16) for fields in over_ip if fields[3] == "0A" and fields[9] in inodes & shared
    }
    return ["\0" + name[1:] for name in names], [*ports]


@pytest.mark.parametrize("restore", [False, True])
def test_a_call_that_cannot_be_sent(make_mesh: Callable[..., Mesh], restore: bool) -> None:
    """As for want of memory: it fails, or is sent again, and does not wait for an answer that nobody gives."""
    mesh = make_mesh({"data": 2})
    pids = mesh.driver.pids
    ledger = mesh.remote(Ledger, "first", rank=1, restore=restore)
    assert ledger.write("second").get(HANGS) == 2
    refuse_next_message(mesh, 1, remote=True)
    if restore:
        assert ledger.write("third").get(HANGS) == 3
    else:
        with pytest.raises(PeerLost, match=r"Ledger.write lived, could not be sent a message: .*buffer space"):
            ledger.write("third").get(HANGS)
        ledger = mesh.remote(Ledger, "again", rank=1)
    assert ledger.read().get(HANGS) == (["first", "second", "third"] if restore else ["again"])
    assert mesh.driver.pids == pids


def test_a_rank_that_a_signal_does_not_wake(make_mesh: Callable[..., Mesh]) -> None:
    """The one that tells an idle rank of its first caller may come just before the rank begins to wait."""
    mesh = make_mesh({"data": 1})
    mesh.run(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGIO])
    assert mesh.remote(Counter, 1).add(41).get(timeout=HANGS) == 42


def test_calls_that_no_thread_can_be_started_for(make_mesh: Callable[..., Mesh], monkeypatch: Any) -> None:
    """The next one tries again."""
    mesh = make_mesh({"data": 1})

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", refuse)
        with pytest.raises(MeshError, match="RLIMIT_NPROC"):
            mesh.remote(Ledger, "first")
    assert mesh.remote(Ledger, "first").read().get(HANGS) == ["first"]


@pytest.mark.parametrize("at", [0, -1], ids=["length", "content"])
def test_a_message_that_was_changed_on_the_way_is_not_read(at: int) -> None:
    """Between hosts each message has a code: one that does not fit ends the connection."""
    from spmd.mesh import wire
    from spmd.mesh.hosts.coded import CodedReceiver, CodedSender

    (here, middle), (relay, there) = socket.socketpair(), socket.socketpair()
    with here, middle, relay, there:
        sender, receiver = CodedSender(here, b"one" * 10), CodedReceiver(there, b"one" * 10)
        for change in (False, True):
            sender.send(wire.Packet(b"content" * 500, head=b"a head"))
            data = bytearray(middle.recv(1 << 16))
            if change:
                data[at] ^= 1
            relay.sendall(data)
            found = receiver.receive(block=True)
            if change:
                assert found is None
            else:
                assert [(one.head, one.data) for one in found or ()] == [(b"a head", b"content" * 500)]


def test_an_object_and_a_step_import_parts_of_one_package(
    one_host: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which import each other: Python alone would give one of the two threads a module that is half imported."""
    package, begun = tmp_path / "in_a_circle", tmp_path / "begun"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import pathlib, time\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "time.sleep(0.5)\n"  # the other thread gets to where it would wait for this one
        "VERSION = 1\n"
        "from in_a_circle.models import fit\n"
    )
    (package / "models.py").write_text("import in_a_circle.tools\ndef fit(x): return x + in_a_circle.tools.one()\n")
    (package / "tools.py").write_text("from in_a_circle import VERSION\ndef one(): return VERSION\n")
    monkeypatch.syspath_prepend(tmp_path)
    models, tools = importlib.import_module("in_a_circle.models"), importlib.import_module("in_a_circle.tools")
    held = one_host.remote(Caller, rank=1)
    begun.unlink()
    told = held.call(tools.one)
    assert until(begun.exists)
    assert spmd(models.fit, mesh=one_host)(torch.ones(2)).tolist() == [2, 2]
    assert told.get() == 1
