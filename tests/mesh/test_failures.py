"""When ranks fail or die: what is raised, how soon, and that the mesh goes on working.

Errors of specs, arguments and results are in test_spmd.py, those of collectives in test_mismatch.py.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import gc
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from internals import compare_late_output, exits_of_zygote
from patience import HANGS, end_within, running, soon, until

from spmd import (
    CollectiveMismatch,
    Loader,
    MeshError,
    P,
    PeerLost,
    RemoteError,
    SpecError,
    SpmdError,
    axis_index,
    barrier,
    data_parallel,
    pmean,
    psum,
    put,
    spmd,
    value_and_grad,
)

SECONDS = 1.5  # until the error is raised


@contextlib.contextmanager
def raises(kind, *words, within=SECONDS):
    """Expect an exception of exactly this type, soon; its text, with the remote traceback, has these words."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    assert soon(within, began)
    text = "".join(traceback.format_exception(caught.value))
    for word in words:
        assert word in text, text


def works(mesh) -> bool:
    total = spmd(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"))
    size = mesh.size
    return float(total(torch.ones(2 * size))) == 2 * size and mesh.run(lambda: axis_index("data")) == list(range(size))


@pytest.fixture
def all_answer(monkeypatch):
    """Errors tell what all ranks have answered, also those that are slow to give up."""
    monkeypatch.setattr("spmd.mesh.driver.recovery.GRACE_SECONDS", HANGS)


def kill(*pids: int, once: Path) -> None:
    """Kill processes together, once a file is there."""

    def wait() -> None:
        assert until(once.exists)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    threading.Thread(target=wait).start()


def sleeping(begun: Path) -> Callable[[], None]:
    """For ranks: what goes on for long, after a file says that it has begun."""

    def sleep() -> None:
        begun.touch()
        time.sleep(30)

    return sleep


# -- exceptions --------------------------------------------------------------------------------------------------------


def test_an_exception_on_one_rank(shared_mesh):
    mesh = shared_mesh({"data": 3})

    @spmd(mesh=mesh)
    def step(x):
        if axis_index("data") == 1:
            return x / helper(0)
        return psum(x, "data")

    def helper(n):
        return 1 // n

    for _ in range(2):
        # Those that wait for it may say that it left.
        words = ["on rank 1 of Mesh({'data': 3}", "return x / helper(0)", "return 1 // n", "[raised on rank 1"]
        with raises(ZeroDivisionError, *words) as caught:
            step(torch.ones(2))
        text = "".join(traceback.format_exception(caught.value))
        assert (
            text.index("on rank 1") < text.index("Traceback (most recent call last)") < text.rindex("step(torch.ones")
        )
        # The remote part shows the user's frames only.
        assert set(re.findall(r'File "(.*?)"', text.split("The above exception")[0])) == {__file__}, text
        assert works(mesh)


@pytest.mark.usefixtures("all_answer")
def test_exceptions_on_several_ranks(shared_mesh):
    mesh = shared_mesh({"data": 3})

    def all_alike():
        rank = axis_index("data")
        raise ValueError(f"rank {rank} has {rank + 3} samples at {hex(10 + rank)}")

    with raises(ValueError, "on ranks 0-2 of Mesh", "rank 0 has 3 samples") as caught:
        mesh.run(all_alike)
    assert str(caught.value.__cause__).count("Traceback") == 1  # told once

    def unlike():
        time.sleep(0.05 * axis_index("data"))
        raise (KeyError("first"), ValueError("second"), KeyError("first"))[axis_index("data")]

    words = ["on ranks 0, 2 of Mesh", "on rank 1 of Mesh", "ValueError: second", "other ranks failed in another way"]
    with raises(KeyError, *words):
        mesh.run(unlike)
    assert works(mesh)


class Local(ValueError):
    pass


def test_errors_of_this_library_with_arguments_and_notes_of_a_program(shared_mesh):
    """They come as they were raised."""
    mesh = shared_mesh({"data": 2})

    class OfProgram(SpecError):
        def __init__(self, text, code):
            super().__init__(text, code)

    def own():
        raise OfProgram("no such column", 7)

    def noted():
        error = PeerLost("a server is gone", 1)
        vars(error)["__notes__"] = ["[at night]"]  # as `add_note` of Python 3.11
        raise error

    def unpickled_without_notes():
        error = json.JSONDecodeError("no value", "{", 1)
        vars(error)["__notes__"] = ["[in line 7]"]
        raise error

    with pytest.raises(json.JSONDecodeError) as broken:
        mesh.run(unpickled_without_notes)
    assert broken.value.pos == 1 and broken.value.__notes__[0] == "[in line 7]"
    with pytest.raises(SpecError) as caught:
        mesh.run(own)
    assert type(caught.value).__name__ == "OfProgram" and caught.value.args == ("no such column", 7)
    with pytest.raises(PeerLost) as caught:
        mesh.run(noted)
    assert caught.value.rank == 1 and caught.value.__notes__[0] == "[at night]"


def test_types_of_exceptions(shared_mesh):
    mesh = shared_mesh({"data": 2})

    class Closure(Exception):
        pass

    class Demanding(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} or {b}")

    class Holding(Exception):
        def __init__(self, text):
            super().__init__(text)
            self.lock = threading.Lock()

    def throw(error):
        def body():
            raise error()

        mesh.run(body)

    class Mute(Exception):
        def __str__(self):
            return self.missing

    for run in (mesh.run, lambda body: mesh.submit(body).result(HANGS), lambda body: spmd(body, mesh=mesh)()):
        with pytest.raises(Mute):
            run(lambda: (_ for _ in ()).throw(Mute()))
        with pytest.raises(ValueError, match="no image: \udcff"):  # a file's name that is no UTF-8
            run(lambda: (_ for _ in ()).throw(ValueError("no image: \udcff")))
    for error in (Local, Closure, StopIteration, KeyError, AssertionError, SystemExit, torch.OutOfMemoryError):
        with raises(error):
            throw(lambda error=error: error("text"))
    with raises(Demanding, "this or that", "on ranks 0-1"):
        throw(lambda: Demanding("this", "that"))
    with raises(Holding, "text") as caught:
        throw(lambda: Holding("text"))
    assert not hasattr(caught.value, "lock")

    class Stubborn(Exception):
        def __new__(cls, *args):
            if not args or args[0] != "made":
                raise TypeError("not so")
            return super().__new__(cls, "made")

    with raises(RemoteError, "RemoteError: Stubborn: "):
        throw(lambda: Stubborn("made", 1, threading.Lock()))
    group = getattr(builtins, "ExceptionGroup", None)  # from Python 3.11 on
    if group is not None:
        with raises(group):
            throw(lambda: group("several", [ValueError("a")]))
        with raises(group) as caught:
            throw(lambda: group("several", [ValueError("a"), group("within", [Coded(3, "b")])]))
        first, (coded,) = caught.value.exceptions[0], caught.value.exceptions[1].exceptions
        assert (type(first), first.args, type(coded), coded.code) == (ValueError, ("a",), Coded, 3)
    with raises(MeshError, "because of what the function returned (lock): cannot pickle '_thread.lock' object"):
        mesh.run(threading.Lock)
    with raises(MeshError, "(dict): cannot pickle 'generator' object, which is its ['a'][0]", "return what it is made"):
        mesh.submit(lambda: {"a": [(i for i in range(3))], "mesh": mesh}).result()
    with raises(MeshError, "because of result ['a'][1] (lock): cannot pickle '_thread.lock' object [rank 0 at"):
        spmd(lambda x: {"a": [x, threading.Lock()]}, mesh=mesh)(torch.ones(2))
    with raises(SystemExit) as caught:
        mesh.run(lambda: sys.exit(3), ranks=[1])
    assert caught.value.code == 3 and works(mesh)


class Coded(Exception):
    """Pickle gives its class the arguments that it keeps, which are others."""

    def __init__(self, code, text):
        super().__init__(f"{text} {code}")
        self.code = code


class Deaf(Exception):
    def add_note(self, note):
        raise TypeError("not a word")

    def __str__(self):
        raise TypeError("nor one from me")


def deaf(*_):
    raise Deaf


class Fails:
    def call(self):
        raise Deaf


class Samples:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise Deaf


def test_an_exception_whose_methods_fail(make_mesh):
    """Its own methods are not called, not even by the thread that all answers come to, which would end the mesh."""
    mesh = make_mesh({"data": 2})
    fails = mesh.remote(Fails, rank=1)
    for run in (
        lambda: mesh.run(deaf),
        lambda: mesh.submit(deaf).result(HANGS),
        lambda: fails.call().get(HANGS),
        lambda: spmd(data_parallel(lambda batch: deaf()), mesh=mesh)(torch.ones(1)),
        lambda: next(iter(Loader(Samples(), 1, mesh=mesh, workers=1))),
    ):
        with pytest.raises(Deaf) as caught:
            run()
        text = "".join(traceback.format_exception(caught.value))
        assert "The above exception was the direct cause" in text and " of Mesh({'data': 2}" in text, text
    assert works(mesh)


def test_an_exception_has_its_cause(shared_mesh):
    def chained():
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("outer") from error

    with raises(RuntimeError, "KeyError: 'missing'", "The above exception was the direct cause", "RuntimeError: outer"):
        shared_mesh({"data": 2}).run(chained)


def test_an_unknown_axis(shared_mesh):
    mesh = shared_mesh({"data": 2})
    with raises(
        SpecError, "psum got an unknown \"axis\" (expected one of ('data',), got 'model') [rank 0 at (data=0)]"
    ):
        spmd(lambda x: psum(x, "model"), mesh=mesh)(torch.ones(1))


@pytest.mark.parametrize(
    "body",
    [
        lambda p, x: p["w"].add_(1),
        lambda p, x: torch.relu_(p["w"]),
        lambda p, x: p["w"].detach().zero_(),
        lambda p, x: p["w"][0].fill_(2),
    ],
)
def test_an_input_changed_in_place(shared_mesh, body):
    mesh = shared_mesh({"data": 2})

    def step(params, x):
        body(params, x)
        return x

    for params in ({"w": torch.ones(2)}, put({"w": torch.ones(2)}, mesh=mesh)):
        with raises(SpecError, "step changed its input argument 0['w'] in place [rank 0 at", "write x = x + y"):
            spmd(step, mesh=mesh)(params, torch.ones(1))
    with raises(SpecError, "changed its input argument 0['w'] in place"):
        spmd(step, mesh=mesh, in_specs=P("data"))({"w": torch.ones(4)}, torch.ones(2))
    assert works(mesh)


def test_a_body_that_takes_its_time(make_mesh):
    mesh = make_mesh({"data": 2})

    def sleepy():
        if axis_index("data") == 0:
            raise ValueError("early")
        time.sleep(60)

    with raises(ValueError, "early"):
        mesh.run(sleepy)  # sleeping is interrupted
    assert works(mesh)

    def deaf():
        if axis_index("data") == 0:
            raise ValueError("early")
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(0.1)
        return "late"

    with raises(ValueError, "early"):
        mesh.run(deaf)
    assert works(mesh)  # as soon as that rank is done


def test_a_rank_that_does_not_come_back(make_mesh):
    mesh = make_mesh({"data": 2}, timeout=1.0)

    def deaf():
        if axis_index("data") == 0:
            raise ValueError("early")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(30)

    with raises(ValueError, "early"):
        mesh.run(deaf)
    with raises(MeshError, "the mesh has not recovered from the last failure", "ranks [1] are still busy", within=2.0):
        mesh.run(lambda: 1)
    began, pids = time.monotonic(), mesh.driver.pids
    mesh.close()
    assert soon(4.0, began) and end_within(1.0, pids)


@pytest.mark.usefixtures("all_answer")
def test_who_left_because_of_an_error_is_told_by_it(make_mesh, tmp_path):
    mesh = make_mesh({"data": 2})

    def both():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        rank = axis_index("data")
        (tmp_path / str(rank)).touch()
        assert until((tmp_path / str(1 - rank)).exists)
        if rank == 1:
            raise ValueError("the cause")
        error = CollectiveMismatch("rank 1 left the region")
        error.rank = 1
        raise error

    with pytest.raises(ValueError, match="the cause") as info:
        mesh.run(both)
    assert "rank 1 left the region" in str(info.value.__cause__)
    assert "other ranks failed in another way, see above" in info.value.__notes__[0]


class Slow(Exception):
    """Its rank tells the others that they can give up, and takes its time to tell the driver why."""

    def __reduce__(self):
        time.sleep(1.5)
        return Slow, self.args


def test_a_cause_that_comes_late(make_mesh, monkeypatch):
    mesh = make_mesh({"data": 3})

    def late():
        if axis_index("data") == 2:
            raise Slow("the cause")
        barrier()

    with pytest.raises(Slow, match="the cause"):
        mesh.run(late)
    assert works(mesh)

    def never():
        if axis_index("data") == 2:
            with contextlib.suppress(SpmdError):
                mesh.comm().abort("enough")
            time.sleep(HANGS)
        barrier()

    monkeypatch.setattr("spmd.mesh.driver.recovery.FENCE_SECONDS", 1.0)
    with raises(RemoteError, "has not reported back since: rank 2: enough", within=2 * HANGS):
        mesh.run(never)
    assert works(mesh)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_torchs_collectives_in_a_step_say_what_to_write(make_mesh):
    """On ranks of their own: where an earlier test has made a process group, they run."""
    step = spmd(lambda x: torch.distributed.all_reduce(x.clone()), mesh=make_mesh({"data": 2}))
    with pytest.raises(ValueError, match="process group has not been initialized") as caught:
        step(torch.ones(2))
    assert 'psum(x, "data") for torch.distributed.all_reduce' in caught.value.__notes__[-1]


# -- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_answer")
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_is_killed_while_others_wait(make_mesh, backend):
    mesh = make_mesh({"data": 3}, backend=backend, on_loss="raise")
    params = put({"w": torch.arange(3.0)}, mesh=mesh)
    shards = put(torch.arange(6), P("data"), mesh=mesh)
    before = mesh.driver.pids

    @spmd(mesh=mesh)
    def step(params):
        barrier()  # all have begun: a rank that has not can't have waited
        if axis_index("data") == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return pmean(params["w"], "data")

    double = spmd(lambda p: p["w"] * 2, mesh=mesh)
    for _ in range(2):
        words = ["rank 1 was killed by SIGKILL; ranks 0, 2 waited for it and gave up [Mesh({'data': 3}"]
        with raises(PeerLost, *words, "the mesh has replaced it and goes on", within=0.5 + SECONDS) as caught:
            step(params)
        assert caught.value.rank == 1 and isinstance(caught.value, ConnectionError)
        assert works(mesh) and not running(before[1])
        assert mesh.driver.pids[::2] == before[::2] and mesh.driver.pids[1] != before[1]
        assert double(params).full().tolist() == [0, 2, 4]  # the new rank gets replicated values back
        assert torch.equal(params["w"].shards()[1], torch.arange(3.0))
        assert torch.equal(shards.full(), torch.arange(6))  # and what only the dead one held is there as well
        assert mesh.run(lambda: shards.local.tolist()) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_groups_open_in_the_order_of_the_program_after_a_death(make_mesh, backend):
    """A survivor knows groups from before that the new rank opens when the program asks for them."""
    mesh = make_mesh({"data": 2, "model": 2}, backend=backend)

    def step(fatal):
        data, model, everyone = mesh.comm("data"), mesh.comm("model"), mesh.comm()
        if fatal and mesh.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return [float(comm.all_reduced(torch.ones(1))) for comm in ((data,) if fatal else (everyone, model, data))]

    for _ in range(2):
        with raises(PeerLost, "rank 3 was killed by SIGKILL"):
            mesh.run(step, True)
        assert mesh.run(step, False) == [[4.0, 2.0, 2.0]] * 4


def test_shards_that_others_hold_too(make_mesh):
    mesh = make_mesh({"data": 2, "model": 2})
    value = put(torch.arange(4), P("model"), mesh=mesh)
    captured = spmd(lambda: value.full(), mesh=mesh)
    assert captured().full().tolist() == [0, 1, 2, 3]
    victim = mesh.driver.pids[3]  # a little later, perhaps, that of the rank that replaces it
    os.kill(victim, signal.SIGKILL)
    assert end_within(2, [victim])
    assert [shard.tolist() for shard in value.shards()] == [[0, 1], [2, 3]] * 2
    assert captured().full().tolist() == [0, 1, 2, 3]  # a function that was sent with it works on the new rank too
    assert mesh.run(lambda: value.local.tolist()) == [[0, 1], [2, 3]] * 2


def test_a_rank_is_killed_between_calls(make_mesh):
    mesh = make_mesh({"data": 2})
    step = spmd(lambda w: w + 1, mesh=mesh)
    w = step(put(torch.zeros(2), mesh=mesh))
    for victim in (0, 1, 1):
        pid = mesh.driver.pids[victim]
        os.kill(pid, signal.SIGKILL)
        assert end_within(2, [pid])
        w = step(w)
        assert w.full()[0] > 1
    assert w.full().tolist() == [4, 4] and works(mesh)


def test_a_rank_whose_death_nobody_has_noticed_yet(make_mesh):
    mesh = make_mesh({"data": 2})
    step = spmd(lambda w: w + 1, mesh=mesh)
    w = step(put(torch.zeros(2), mesh=mesh))
    w.full()
    victim = mesh.driver.pids[1]
    with mesh.driver.lock:  # without it nobody is told
        os.kill(victim, signal.SIGKILL)
        assert end_within(2, [victim])
        mesh.driver.ready()
        assert mesh.driver.pids[1] != victim
    assert step(w).full().tolist() == [2, 2]


def test_a_rank_is_killed_between_steps_over_virtual_shards(make_mesh):
    """The one in its place asks for no communicator that the others have and do not open again."""

    def step(w, batch):
        return value_and_grad(lambda w, x: (w * x).mean())(w, batch)[0]

    mesh = make_mesh({"data": 2})
    go, w, batch = spmd(data_parallel(step, shards=2), mesh=mesh), torch.ones(()), torch.arange(4.0)
    assert go(w, batch).item() == 1.5
    assert mesh.run(lambda: float(psum(torch.ones(()), "data"))) == [2.0, 2.0]
    victim = mesh.driver.pids[1]
    os.kill(victim, signal.SIGKILL)
    assert end_within(2, [victim])
    assert go(w, batch).item() == 1.5


def test_a_rank_is_killed_during_a_call_that_nobody_waits_for(make_mesh, tmp_path):
    mesh, may_end = make_mesh({"data": 2}, on_loss="raise"), tmp_path / "may end"

    @spmd(mesh=mesh)
    def step(x):
        while axis_index("data") == 0 and not may_end.exists():
            time.sleep(0.01)
        return psum(x, "data")

    may_end.touch()
    x = step(step(put(torch.ones(2), mesh=mesh)))
    assert x.full().tolist() == [4, 4]
    may_end.unlink()
    lost = step(x)
    os.kill(mesh.driver.pids[0], signal.SIGKILL)
    with raises(PeerLost, "rank 0 was killed by SIGKILL"):
        lost.full()
    with raises(PeerLost, "rank 0 was killed by SIGKILL"):
        step(lost)
    assert works(mesh)


def test_all_ranks_are_killed(make_mesh, tmp_path):
    mesh = make_mesh({"data": 3})
    w = put(torch.ones(2), mesh=mesh)
    assert w.tolist() == [1.0, 1.0]  # it is there
    kill(*mesh.driver.pids, once=tmp_path / "begun")
    with raises(PeerLost, "rank 0 was killed by SIGKILL", within=0.2 + SECONDS):
        mesh.run(sleeping(tmp_path / "begun"))
    assert w.tolist() == [1.0, 1.0] and works(mesh)


def test_a_rank_that_can_use_its_gpu_no_more_is_replaced(make_mesh, caplog):
    """As after a failed assertion in a kernel, when CUDA refuses all else; the error is the one that was raised."""
    mesh = make_mesh({"data": 2})
    total = spmd(lambda x: psum(x, "data"), mesh=mesh)

    class OfTwoStreams:
        def __del__(self):  # what torch does to the process there, for a tensor that several streams have used
            os.abort()

    def fail(who):
        from spmd.kernels.cuda import placement

        mesh.comm().barrier()  # all have begun: a rank that has not would be told that another failed
        if mesh.rank in who:
            tensor = OfTwoStreams()  # noqa: F841
            placement.fault = lambda: "CUDA error: device-side assert triggered"
            raise RuntimeError("of what came next")
        mesh.comm().barrier()

    for who in ((1,), (0, 1)):
        before = mesh.run(os.getpid)
        with raises(RuntimeError, "of what came next") as caught:
            mesh.run(fail, who)
        if sys.version_info >= (3, 11):
            assert "ended, as its process can use its GPU no more: CUDA error: device" in caught.value.__notes__[0]
        assert total(torch.ones(2)).tolist() == [2.0, 2.0]
        after = mesh.run(os.getpid)
        assert [old != new for old, new in zip(before, after, strict=True)] == [rank in who for rank in range(2)]
    assert "ranks 0-1 ended, as its process can use its GPU no more: CUDA error: device-side" in caplog.text


def test_a_rank_that_can_use_its_gpu_no_more_as_a_value_is_fetched(make_mesh):
    """What is called next waits until the rank has been replaced, instead of being lost with it."""
    mesh = make_mesh({"data": 2})
    total = spmd(lambda x: psum(x, "data"), mesh=mesh)

    def fail():
        from spmd.kernels.cuda import placement
        from spmd.mesh.protocol import FetchValues
        from spmd.mesh.rank.tasks import DO

        def fetch(*args):
            placement.fault = lambda: "CUDA error: device-side assert triggered"
            raise RuntimeError("of what came before")

        DO[FetchValues] = fetch

    for _ in range(3):
        mesh.run(fail)
        with raises(RuntimeError, "of what came before"):
            total(torch.ones(2)).full()
        assert mesh.run(axis_index, "data") == [0, 1]
        assert total(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("all_answer")
def test_a_rank_leaves(make_mesh, tmp_path):
    mesh = make_mesh({"data": 2})

    def leave(how):
        barrier()  # both have begun: a rank that has not can't have waited
        print("last words of", axis_index("data"))
        if axis_index("data") == 1:
            how()
        barrier()

    with raises(PeerLost, "rank 1 exited with code 3; rank 0 waited for it and gave up"):
        mesh.run(leave, lambda: os._exit(3))
    with raises(PeerLost, "rank 1 was killed by SIGSEGV"):
        mesh.run(leave, lambda: os.kill(os.getpid(), signal.SIGSEGV))
    with raises(PeerLost, "rank 1 exited with code 0"):
        mesh.run(leave, lambda: os._exit(0))
    assert works(mesh)
    # One rank raises, another dies of it: the death is told, and the exception with it.
    begun = tmp_path / "begun"

    def raise_or_exit():
        if axis_index("data") == 1:
            assert until(begun.exists)  # called off before, the other one would not raise
            time.sleep(0.2)
            os._exit(5)
        begun.touch()
        raise ValueError("the reason")

    with raises(PeerLost, "rank 1 exited with code 5", "on rank 0 of Mesh", "ValueError: the reason"):
        mesh.run(raise_or_exit)
    assert works(mesh)


def test_ranks_that_cannot_start(make_mesh, capfd):
    mesh = make_mesh({"data": 2})
    mesh.driver.ranks.request = dataclasses.replace(mesh.driver.ranks.request, cwd="/nowhere/to/be/found")
    os.kill(mesh.driver.pids[0], signal.SIGKILL)
    words = [
        "this mesh is closed: its ranks die before they are ready, 5 times in a row, the last:",
        "exited with code 1",
    ]
    with raises(MeshError, *words, within=10):
        for _ in range(100):
            with contextlib.suppress(PeerLost):
                mesh.run(lambda: 1)
    assert "FileNotFoundError" in capfd.readouterr().err


def test_the_process_that_ranks_are_forked_from_is_killed(make_mesh, tmp_path):
    meshes = [make_mesh({"data": 2}), make_mesh({"data": 1})]
    w = put(torch.ones(2), mesh=meshes[0])
    zygote = meshes[0].driver.ranks.all[0]._zygote._process.pid
    before = [pid for mesh in meshes for pid in mesh.driver.pids]
    kill(zygote, once=tmp_path / "begun")
    with raises(PeerLost, "rank 0 died with the process that forks ranks", within=10):
        meshes[0].run(sleeping(tmp_path / "begun"))
    assert end_within(1, before)
    assert all(works(mesh) for mesh in meshes)
    assert w.tolist() == [1.0, 1.0]


def test_how_a_rank_ended_is_told_by_a_process_that_was_held_up(make_mesh):
    mesh = make_mesh({"data": 2})
    zygote = mesh.driver.ranks.all[0]._zygote._process.pid

    def leave():
        if axis_index("data") == 1:
            os.kill(zygote, signal.SIGSTOP)
            os._exit(7)
        barrier()

    with pytest.raises(PeerLost, match="rank 1 exited with code 7"):
        mesh.run(leave)
    assert works(mesh)


# -- printing ----------------------------------------------------------------------------------------------------------


def shown(capfd, *words):
    """What is printed until all of these words were (output, error output)."""
    seen = ["", ""]

    def complete():
        for index, text in enumerate(capfd.readouterr()):
            seen[index] += text
        return all(word in seen[0] + seen[1] for word in words)

    assert until(complete), seen
    return seen


def test_a_process_number_that_is_used_again(make_mesh):
    """What is known of the end of an earlier process is not said of this one."""
    exits_of_zygote(make_mesh({"data": 1})).update(dict.fromkeys(range(1 << 16), 7))
    mesh = make_mesh({"data": 1})
    with raises(PeerLost, "rank 0 was killed by SIGKILL", within=HANGS):
        mesh.run(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_functions_that_failed_and_are_not_called_again_hold_nothing(shared_mesh):
    mesh = shared_mesh({"data": 2})

    def fail_each(names):
        for name in names:
            space = {}
            exec(f"def {name}(x):\n    raise ValueError('{name}')", space)
            with pytest.raises(ValueError, match=name):
                spmd(space[name], mesh=mesh)(torch.ones(2))

    def held():
        gc.collect()
        return sum(type(obj).__name__ in ("Task", "Failure") for obj in gc.get_objects())

    fail_each(["step"])
    before = held()
    fail_each([f"step_{number}" for number in range(12)])
    assert held() <= before + 3


def test_printed_lines(make_mesh, monkeypatch, capfd, tmp_path):
    compare_late_output(monkeypatch.setattr)
    mesh = make_mesh({"data": 3})

    def say():
        rank = axis_index("data")
        print("alike")
        print("unlike", rank)
        print("error output", file=sys.stderr)
        os.write(1, b"from below Python\n")
        if rank == 2:
            print("alike")

    capfd.readouterr()
    mesh.run(say)
    out, err = shown(capfd, "[rank 2] alike", "[rank 1] unlike 1")
    plain = [line for line in out.splitlines() if not line.startswith("[rank")]
    assert plain == ["alike", "unlike 0", "from below Python"]
    assert [line for line in out.splitlines() if line.startswith("[rank 2]")] == ["[rank 2] unlike 2", "[rank 2] alike"]
    assert "[rank 1] unlike 1" in out and err == "error output\n"

    def slow(path):
        print("at once")
        sys.stdout.flush()
        while not path.exists():
            time.sleep(0.01)

    future = mesh.submit(slow, tmp_path / "seen")
    assert "at once" in shown(capfd, "at once")[0] and not future.done()  # lines come as they are printed
    (tmp_path / "seen").touch()
    future.result(HANGS)
    with raises(ValueError):
        mesh.run(lambda: print("before it fails") or (_ for _ in ()).throw(ValueError()))
    assert capfd.readouterr().out == "before it fails\n"


def test_what_a_dying_rank_printed_is_shown(make_mesh, capfd):
    mesh = make_mesh({"data": 2})
    with raises(PeerLost):
        mesh.run(lambda: (print("x" * 5000, "farewell"), sys.stdout.flush(), os._exit(1)), ranks=[1])
    assert re.search(r"^\[rank 1\] x{5000} farewell$", shown(capfd, "farewell")[0], re.MULTILINE)
