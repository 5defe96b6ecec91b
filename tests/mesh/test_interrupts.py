"""Ctrl-C, and the death of the driver: what the user sees, and that the ranks do not outlive what they worked for."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path

import pytest
import torch
from patience import HANGS, end_within, until
from scripts import ENDS_WHOLLY, left_in_shm, run, script, started

from spmd import Mesh, MeshError, P, axis_index, barrier, psum, put, spmd
from spmd.kernels import interrupts
from spmd.kernels.interrupts import uninterrupted
from spmd.mesh import protocol, wire
from spmd.mesh.array import meta
from spmd.mesh.driver import open_sessions, ranks, receiving, spawn
from spmd.mesh.hosts import launchers, meeting
from spmd.mesh.rank.local_values import LocalValues
from spmd.mesh.readers import pool
from spmd.mesh.remote import caller, node

INTERRUPTED = """
import os, signal, sys, threading, time, traceback
from pathlib import Path
import torch
from internals import calls_end_after_ctrl_c
from patience import soon
from spmd import Mesh, axis_index, barrier, psum, put, spmd

mesh, begun = Mesh({"data": 2}), Path(sys.argv[1])
print("pids", *mesh.driver.pids)
value = put(torch.ones(2), mesh=mesh)
add = spmd(lambda x: psum(x, "data"), mesh=mesh)
add(value)

def interrupted(what, call, *delays):
    pressed = []

    def press():
        while not begun.exists():
            time.sleep(0.01)
        for delay in delays:
            time.sleep(delay)
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    begun.unlink(missing_ok=True)
    threading.Thread(target=press).start()
    try:
        call()
    except KeyboardInterrupt as error:
        in_time = soon(1.3, pressed[0])
        print(what, "interrupted", error, "soon" if in_time else f"after {time.monotonic() - pressed[0]} s")
    else:
        print(what, "not interrupted")
    if mesh.closed:
        return
    began = time.monotonic()
    quiet = mesh.run(lambda: "quiet")
    print(what, quiet, float(add(value).full()[0]), "at once" if soon(0.5, began) else "late")

def compute():
    begun.touch()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        torch.ones(100, 100) @ torch.ones(100, 100)

def collective():
    begun.touch()
    if axis_index("data") == 0:
        time.sleep(30)
    barrier()

@spmd(mesh=mesh)
def slow(x, seconds):
    begun.touch()
    time.sleep(float(seconds))
    return x + 1

interrupted("compute", lambda: mesh.run(compute), 0.3)
interrupted("collective", lambda: mesh.run(collective), 0.3)
zero, long = put(torch.tensor(0.0), mesh=mesh), put(torch.tensor(30.0), mesh=mesh)
slow(value, zero)
waiting = slow(value, long)
interrupted("fetch", lambda: (begun.touch(), waiting.full()), 0.3)
try:
    waiting.full()
except Exception as error:
    print(type(error).__name__, error)

def many():
    x = value
    while True:
        x = slow(x, zero)

interrupted("calls", many, 0.3)
short = put(torch.tensor(0.02), mesh=mesh)
x = slow(value, short)

def loop():
    global x
    while True:
        x = slow(x, short)

with calls_end_after_ctrl_c():
    interrupted("loop", loop, 0.5)
print("state", float(x.full()[0]) >= 3)  # what was about to end has ended

def swallow():
    begun.touch()
    for _ in range(4):
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            print("swallowed") if axis_index("data") == 0 else None

interrupted("swallow", lambda: mesh.run(swallow), 0.3)

def deaf():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    barrier()
    begun.touch()
    time.sleep(30)

sys.stdout.flush()
interrupted("twice", lambda: mesh.run(deaf), 0.3, 0.9)
try:
    value.full()
except Exception as error:
    print(type(error).__name__, error)
time.sleep(30)
"""

MESH = "Mesh({'data': 2}, backend='shm', device='cpu')"


def test_ctrl_c(tmp_path):
    with started(script(tmp_path, INTERRUPTED), str(tmp_path / "begun"), env=ENDS_WHOLLY) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        pids = [int(pid) for pid in next(lines).split()[1:]]
        seen: list[str] = []
        for line in lines:
            seen.append(line.rstrip())
            if "this mesh is closed" in line:
                break
        text = "\n".join(seen)
        for what in ("compute", "collective", "fetch", "calls", "loop"):
            assert f"{what} interrupted  soon" in text, text
            assert f"{what} ['quiet', 'quiet'] 2.0 at once" in text, text
        assert f"MeshError this call was interrupted, and has no results [{MESH}]: call it again" in text
        assert "state True" in text and "swallow interrupted" in text and text.count("swallowed") == 4
        assert re.search(r"^twice interrupted mesh killed: \d values that were on its ranks are lost", text, re.M), text
        assert re.search(
            r"^MeshError this mesh is closed: killed by a second Ctrl-C; \d values that were on it", text, re.M
        )
        assert end_within(1, pids)
        process.send_signal(signal.SIGINT)  # with nothing to interrupt, Ctrl-C is Python's own
        assert process.wait(HANGS) == -signal.SIGINT


DEAF = """
import os, signal, sys, threading, time
from pathlib import Path
from spmd import Mesh, barrier

mesh, begun, told = Mesh({"data": 2}), Path(sys.argv[1]), Path(sys.argv[2])

class Told:
    def write(self, text):
        sys.__stderr__.write(text)
        if "Press Ctrl-C again" in text:
            told.touch()

    def flush(self):
        sys.__stderr__.flush()

def as_in_c():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    barrier()
    begun.touch()
    end = time.monotonic() + 60
    while not told.exists() and time.monotonic() < end:
        time.sleep(0.01)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    time.sleep(60)

def press():
    while not begun.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

sys.stderr = Told()
threading.Thread(target=press).start()
try:
    mesh.run(as_in_c)
except KeyboardInterrupt:
    print("interrupted", told.exists(), mesh.run(lambda: 1))
"""


def test_what_python_cannot_interrupt(tmp_path):
    status, out, err = run(script(tmp_path, DEAF), str(tmp_path / "begun"), str(tmp_path / "told"))
    assert (status, out) == (0, "interrupted True [1, 1]\n"), err
    assert err == (
        f"spmd: interrupted; ranks 0-1 of {MESH} are in a call that Python can't interrupt (a long operation of "
        "torch?): waiting for its end. Press Ctrl-C again to kill the ranks and lose what is on them\n"
    )


STOPPED = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from patience import until
from spmd import Mesh, psum, spmd

mesh, sent, begun, ended = Mesh({"data": 2}), *map(Path, sys.argv[1:])

def fail():
    sent.touch()
    until(begun.exists)
    raise ValueError("mine")

@spmd(mesh=mesh)
def step(x):
    if mesh.rank == 0:
        begun.touch()
        time.sleep(20)
        ended.touch()
    return psum(x, "data")

def call():
    try:
        mesh.run(fail, ranks=[1])
    except ValueError as error:
        print(error)

def press():
    until(begun.exists)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)

threads = [threading.Thread(target=call), threading.Thread(target=press)]
for thread in threads:
    thread.start()
until(sent.exists)
try:
    step(torch.ones(()))
except KeyboardInterrupt:
    print("interrupted", mesh.run(lambda: 1), ended.exists())
for thread in threads:
    thread.join()
"""


def test_a_call_that_another_threads_failure_has_stopped_does_not_run_again_after_ctrl_c(tmp_path):
    status, out, err = run(script(tmp_path, STOPPED), *(str(tmp_path / name) for name in ("sent", "begun", "ended")))
    assert (status, sorted(out.splitlines())) == (0, ["interrupted [1, 1] False", "mine"]), err


def test_a_block_that_is_not_interrupted():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
        done.append("never")
    assert done == ["whole"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("pressed", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_that_comes_while_handlers_are_restored(monkeypatch, pressed):
    """Its handler raises an exception before the others are restored: they are, all the same."""

    came, set_handler = [], interrupts._signal.signal

    def restored(number, handler):
        set_handler(number, handler)
        if number == pressed and not came:
            came.append(number)
            signal.raise_signal(number)

    def stop(number, frame):
        raise ZeroDivisionError

    with handled(stop, signal.SIGINT), handled(stop, signal.SIGUSR1), monkeypatch.context() as patched:
        with pytest.raises(ZeroDivisionError), uninterrupted():
            patched.setattr(interrupts._signal, "signal", restored)
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGUSR1) is stop


def test_interrupts_at_any_moment(make_mesh):
    """Whatever the driver does when Ctrl-C comes, the ranks agree on what they were told, and go on."""
    mesh = make_mesh({"data": 2})
    step = spmd(lambda x: psum(x, "data") / 2, mesh=mesh)
    x = step(put(torch.ones(2), mesh=mesh))
    for number in range(25):
        timer = threading.Timer(
            0.002 + 0.0011 * number, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        )
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            y = x
            while True:
                y = step(y)
                mesh.run(len, "x" * number)
        assert mesh.run(lambda: barrier()) == [None, None]
    assert x.full().tolist() == [1, 1]


@contextlib.contextmanager
def handled(handler, number=signal.SIGALRM):
    """Within a `with` block a signal has this handler; no alarm that was set there comes later."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)


def test_handlers_that_make_calls_are_refused_in_the_middle_of_one(make_mesh, monkeypatch):
    """What was being sent is sent to all ranks before the handler runs, and the ranks go on."""
    mesh = make_mesh({"data": 2})
    step = spmd(lambda x: psum(x, "data") / 2, mesh=mesh)
    x = step(put(torch.ones(2), mesh=mesh))
    tell = mesh.driver.tell

    def signalled(*arguments):
        signal.raise_signal(signal.SIGUSR1)
        tell(*arguments)

    with handled(lambda *_: mesh.run(int), signal.SIGUSR1), monkeypatch.context() as patched:
        patched.setattr(mesh.driver, "tell", signalled)
        with pytest.raises(MeshError, match=r"handler of a signal.*in the middle of another call.*set a flag"):
            step(x)
    assert mesh.run(lambda: barrier()) == [None, None] and step(x).full().tolist() == [1, 1]


def too_late(*_):
    raise TimeoutError("too late")


class _Late:
    """While it is pickled, an alarm comes that the program has set."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGALRM)
        return str, ()


class _Waits:
    def wait(self):
        time.sleep(2)


class _Refuses:
    def __reduce__(self):
        raise TimeoutError("its own")


def test_a_timeout_while_something_is_pickled_is_raised_as_it_is(shared_mesh):
    mesh, late, refuses = shared_mesh({"data": 2}), _Late(), _Refuses()

    class Stop:
        def __call__(self, number, frame):
            too_late()

    held = mesh.remote(list)
    calls = (
        lambda: mesh.run(repr, late),
        lambda: mesh.run(lambda: repr(late)),
        lambda: mesh.remote(list, late),
        lambda: held.append(late),
    )
    for handler in (too_late, Stop(), functools.partial(too_late)):
        for call in calls:
            with handled(handler), pytest.raises(TimeoutError, match="too late"):
                call()
    with handled(too_late), pytest.raises(MeshError, match=r"cannot be sent.*'refuses'.*its own"):
        mesh.run(lambda: repr(refuses))


def test_a_timeout_while_an_object_s_result_is_waited_for(shared_mesh):
    """Python's own error for it has the same class as that of a `get(timeout=)`."""
    ref = shared_mesh({"data": 2}).remote(_Waits).wait()
    with handled(too_late), pytest.raises(TimeoutError, match="too late"):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        ref.get()
    ref.cancel()


def test_an_exception_of_a_handler_that_ends_after_the_call(shared_mesh):
    """As of one that saves the training first."""
    ref = shared_mesh({"data": 2}).remote(_Waits).wait()

    def stop(number, frame):
        until(ref.done)
        raise SystemExit("saved")

    with handled(stop), pytest.raises(SystemExit, match="saved"):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        ref.exception()
    assert ref.exception() is None


def test_a_timeout_while_a_call_waits_for_room(shared_mesh):
    """Errors of the calls before it are ignored there; the program's own are not."""
    held = shared_mesh({"data": 2}).remote(_Waits)
    refs = [held.wait()]
    with handled(too_late), pytest.raises(TimeoutError, match="too late"):
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        while True:
            refs.append(held.wait())
    for ref in reversed(refs):
        ref.cancel()


@pytest.mark.parametrize("what", ["an Array", "an Array of a rank", "the values of a call"])
def test_ctrl_c_while_a_value_goes(make_mesh, what):
    """Python ignores what finalizers raise: none may run where a signal is handled."""
    mesh = make_mesh({"data": 2})
    mesh.run(int)
    values, before = mesh.driver.values, len(mesh.driver.values)
    if what == "an Array":
        last = {"it": put(torch.ones(2), mesh=mesh)}
    elif what == "the values of a call":
        last = {"it": mesh.driver.new_values()}
    else:
        last = {"it": LocalValues(None, [torch.ones(2)], [meta((2,), torch.float32, P())]).arrays(mesh)[0]}
    # All in C: the signal comes, and the last that refers to it goes, before Python looks for signals.
    press = map(ctypes.CDLL(None)["raise"], [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        deque(itertools.chain(press, map(last.pop, ["it"])), maxlen=0)
    assert not last
    mesh.run(int)
    mesh.run(int)
    assert len(values) == before and not values.of_calls(read=False) and not values.freed()


class _Kept:
    def all(self):
        return [1] * 100_000  # kept on the rank until it is fetched


@pytest.mark.parametrize("what", ["a Ref", "an object's handle"])
def test_ctrl_c_while_something_remote_goes(make_mesh, what):
    mesh = make_mesh({"data": 1})
    gone = mesh.driver.node.caller.gone
    held = mesh.remote(_Kept)
    ref = held.all()
    ref.get()
    assert until(lambda: len(gone._watches) == 2)  # the Ref of making it is gone
    last = {"it": ref if what == "a Ref" else held}
    del ref, held
    assert until(lambda: len(gone._watches) == 1)
    press = map(ctypes.CDLL(None)["raise"], [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        deque(itertools.chain(press, map(last.pop, ["it"])), maxlen=0)
    assert not last and until(lambda: not gone.watching)


def test_results_that_outlive_their_mesh_go_with_their_refs(make_mesh):
    mesh = make_mesh({"data": 1})
    held = mesh.remote(_Kept)
    ref = held.all()
    ref.get()
    gone, outcome = mesh.driver.node.caller.gone, weakref.ref(ref.future)
    mesh.close()
    del ref
    gc.collect()
    assert outcome() is None and not gone.watching


def test_ctrl_c_when_the_thread_for_remote_calls_begins(make_mesh, monkeypatch):
    mesh = make_mesh({"data": 1})
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(node, "named_limits", press_and(node.named_limits))
        mesh.remote(_Kept)
    assert len(mesh.remote(_Kept).all().get(HANGS)) == 100_000


def test_a_handler_calls_while_a_call_is_noted(make_mesh, monkeypatch):
    """What is in flight is noted after the lock of the mesh was released: a handler's call may go on."""
    mesh = make_mesh({"data": 1})
    add = spmd(lambda x: x + 1, mesh=mesh)
    x, found = put(torch.zeros(2), mesh=mesh), []
    for _ in range(3):
        x = add(x)
    seen = _Seen(mesh.driver._flight._tasks, lambda: found.append(add(x)))
    monkeypatch.setattr(mesh.driver._flight, "_tasks", seen)
    y = add(x)
    assert [y.tolist(), found[0].tolist()] == [[4.0, 4.0], [4.0, 4.0]]


class _Seen(deque):
    """Calls something as the first is appended."""

    def __init__(self, items, call):
        super().__init__(items)
        self.call = call

    def append(self, item):
        call, self.call = self.call, None
        if call is not None:
            call()
        super().append(item)


class PressedWhenSet(dict):
    """Ctrl-C is pressed as soon as something is noted here, once."""

    pressed = False

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_a_function_is_sent(make_mesh, monkeypatch):
    """It is sent, or not noted as sent: later calls of it do not fail."""
    mesh, function = make_mesh({"data": 2}), lambda: 7
    monkeypatch.setattr(mesh.driver.shipped, "_packets", PressedWhenSet(mesh.driver.shipped._packets))
    with pytest.raises(KeyboardInterrupt):
        mesh.run(function)
    assert mesh.run(function) == [7, 7]


def test_ctrl_c_when_an_object_was_made(make_mesh, monkeypatch):
    """Nobody has its handle: it goes, and a mesh on which no object lives can be resized."""
    mesh = make_mesh({"data": 2})
    monkeypatch.setattr(caller, "Remote", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        mesh.remote(list)
    mesh.resize({"data": 1})
    assert mesh.run(int) == [0]


@pytest.mark.parametrize("module, name", [(ranks, "Rank"), (ranks, "request_of"), (receiving.Receiving, "start")])
def test_ctrl_c_while_a_mesh_is_made(monkeypatch, module, name):
    """No process, thread or descriptor is left, and the next mesh works."""
    Mesh({"data": 1}).close()  # the zygote stays
    gc.collect()
    made, descriptors, threads = getattr(module, name), len(os.listdir("/proc/self/fd")), threading.active_count()
    children = children_of_zygote()

    def makes(*arguments, **options):
        found = made(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return found

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, name, makes)
        Mesh({"data": 2})
    assert until(lambda: children_of_zygote() <= children) and threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with Mesh({"data": 1}) as mesh:
        assert mesh.run(int) == [0]


def test_ctrl_c_when_all_hosts_have_come(monkeypatch):
    """What was started there ends, and is waited for."""
    handles, start, come = [], launchers.LocalLauncher.start, meeting.Meeting.hosts

    def noted(self, *arguments):
        handles.append(start(self, *arguments))
        return handles[-1]

    def all_come(self):
        hosts = come(self)
        signal.raise_signal(signal.SIGINT)
        return hosts

    monkeypatch.setattr(launchers.LocalLauncher, "start", noted)
    monkeypatch.setattr(meeting.Meeting, "hosts", all_come)
    with pytest.raises(KeyboardInterrupt):
        Mesh({"data": 2}, hosts="local:2x1")
    assert len(handles) == 2 and None not in [handle.returncode for handle in handles]


def children_of_zygote():
    """The processes that this process's zygote has forked."""
    pid = spawn.zygote()._process.pid
    return {*Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_ctrl_c_when_the_process_that_forks_ranks_has_begun():
    """It says so once: the next mesh does not wait for it."""

    class Pressed(socket.socket):
        def recv(self, count):
            found = super().recv(count)
            signal.raise_signal(signal.SIGINT)
            return found

    zygote = spawn.Zygote()
    zygote._control = Pressed(fileno=zygote._control.detach())
    try:
        with pytest.raises(KeyboardInterrupt):
            zygote.await_ready()
        zygote.await_ready()
    finally:
        zygote.close()


@pytest.mark.parametrize("how", ["close", "with", "restart", "checkpoints"])
def test_ctrl_c_while_a_mesh_is_closed(make_mesh, monkeypatch, how):
    """It is closed all the same."""
    mesh = make_mesh({"data": 2})
    pids, descriptors = mesh.driver.pids, len(os.listdir("/proc/self/fd"))
    receiving, tell, close = mesh.driver.receiving, mesh.driver.tell, mesh.driver.node.close

    def press(does, *told):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        does(*told)

    if how == "checkpoints":
        monkeypatch.setattr(open_sessions, "wait", lambda _: press(int))
    elif how == "restart":
        monkeypatch.setattr(mesh.driver.node, "close", functools.partial(press, close))
    else:
        monkeypatch.setattr(mesh.driver, "tell", functools.partial(press, tell))
    with pytest.raises(KeyboardInterrupt):
        if how == "with":
            with mesh:
                raise ZeroDivisionError
        mesh.restart() if how == "restart" else mesh.close()
    assert mesh.closed and end_within(HANGS, pids) and len(os.listdir("/proc/self/fd")) < descriptors
    assert until(lambda: not receiving.is_alive())


def test_ctrl_c_while_a_mesh_that_nothing_refers_to_is_closed(monkeypatch, capfd):
    """Python ignores what finalizers raise: it interrupts the program after that."""
    mesh = Mesh({"data": 2})
    pids, tell = mesh.driver.pids, mesh.driver.tell

    def press(*told):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        tell(*told)

    monkeypatch.setattr(mesh.driver, "tell", press)
    with pytest.raises(KeyboardInterrupt):
        del mesh
        until(lambda: False)
    assert end_within(HANGS, pids) and capfd.readouterr() == ("", "")


def test_values_that_go_in_a_cycle(make_mesh):
    """The garbage collector takes the last of a call's Arrays together with all that refers to them."""
    mesh = make_mesh({"data": 2})
    pair = spmd(lambda x: (x + 1, {"twice": 2 * x}), mesh=mesh)
    found = [*pair(torch.ones(2))]
    found.append(found)
    assert len(mesh.driver.values) == 2
    del found
    gc.collect()
    mesh.run(int)
    assert len(mesh.driver.values) == 0 and mesh.run(int) == [0, 0]


# -- the driver dies ---------------------------------------------------------------------------------------------------

DRIVER = """
import sys, time
import torch
from spmd import Mesh, axis_index, barrier

mesh, idle = Mesh({"data": 2}, backend=sys.argv[1]), Mesh({"data": 1})

def busy():
    while axis_index("data") == 0:
        torch.ones(100, 100) @ torch.ones(100, 100)
    barrier()

mesh.run(lambda: barrier()), idle.run(lambda: 1)
print(mesh.driver.ranks.all[0]._zygote._process.pid, *mesh.driver.pids, *idle.driver.pids, flush=True)
mesh.run(busy)
"""


@pytest.mark.parametrize(("backend", "number"), [("shm", signal.SIGKILL), ("gloo", signal.SIGTERM)])
def test_the_driver_is_killed(tmp_path, backend, number):
    """Ranks that compute, wait for others, or have nothing to do all end with it, and leave nothing in /dev/shm.

    So does the process that has forked them, stopped or not.
    """
    before = set(os.listdir("/dev/shm"))
    with started(script(tmp_path, DRIVER), backend) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 4
        time.sleep(0.2)
        if number == signal.SIGKILL:
            os.kill(pids[0], signal.SIGSTOP)
        process.send_signal(number)
        process.wait(HANGS)
        assert end_within(1.0, pids)
    assert not left_in_shm(before)


def test_a_mesh_that_could_not_be_made_leaves_nothing():
    """The last of its ranks cannot be started."""
    import spmd.mesh.driver.ranks as module

    Mesh({"data": 1}).close()  # the zygote stays
    start, made = module.Rank, []

    def start_two(rank, *rest):
        if rank == 2:
            raise MeshError("no more processes")
        made.append(start(rank, *rest))
        return made[-1]

    before = len(os.listdir("/proc/self/fd"))
    module.Rank = start_two
    try:
        with pytest.raises(MeshError, match="no more processes"):
            Mesh({"data": 3})
    finally:
        module.Rank = start
    assert end_within(1, [rank.pid for rank in made])
    assert len(os.listdir("/proc/self/fd")) <= before, sys.version


CELLS = """
import gc
import torch
from spmd import Loader, Mesh, psum, spmd

gc.disable()  # so that what is left of the cells before is collected while Python ends
cell = '''
mesh = Mesh({"data": 1})

@spmd(mesh=mesh)
def step(x):
    return psum(x, "data")

for batch in Loader(torch.arange(4.0), 2, mesh=mesh):
    result = step(batch.sum())
'''
for _ in range(3):
    exec(cell, globals())
print("last")
gc.enable()
gc.set_threshold(1)
"""


def test_meshes_that_cells_left_open_are_closed_at_exit():
    """Some of them are garbage by then, and the collector closes them while they are being closed."""
    assert run("-c", CELLS) == (0, "last\n", "")


def test_a_mesh_is_collected_while_another_one_starts(make_mesh, monkeypatch):
    """The collector of garbage closes it in the middle of what holds a lock that closing needs."""
    stand_by, gone = spawn.Zygote.stand_by, []

    def stand_by_and_collect(zygote):
        before = alive()
        gone.append(before is not None)
        del before
        gc.collect()
        gone.append(alive() is None)
        stand_by(zygote)

    mesh = Mesh({"data": 1})
    mesh.itself, alive = mesh, weakref.ref(mesh)
    monkeypatch.setattr(spawn.Zygote, "stand_by", stand_by_and_collect)
    gc.disable()
    try:
        del mesh
        assert make_mesh({"data": 1}).run(int) == [0] and gone == [True, True]
    finally:
        gc.enable()


def test_a_handler_closes_a_mesh_that_is_being_closed(make_mesh, monkeypatch):
    """It leaves that to what it has interrupted; a thread that closes it, too, waits until it is closed."""
    mesh, closed = make_mesh({"data": 2}), []
    other = threading.Thread(target=lambda: (mesh.close(), closed.append(mesh.closed)))
    tell = mesh.driver.tell

    def tell_and_interrupt(*told):
        tell(*told)
        if other.ident is None:
            other.start()
            signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(mesh.driver, "tell", tell_and_interrupt)
    with handled(lambda *_: mesh.close()):
        mesh.close()
    other.join(HANGS)
    assert closed == [True]


@pytest.mark.parametrize("how", ["a call", "a resize"])
def test_a_handler_closes_a_mesh_in_the_middle_of(make_mesh, monkeypatch, capfd, how):
    """It waits for nothing that the thread that it has interrupted would have to do."""
    mesh = make_mesh({"data": 2}, timeout=10)
    mesh.run(bytes, 1)  # the function is sent before the call
    interrupted = "tell" if how == "a call" else "hand_over"
    does = getattr(mesh.driver, interrupted)

    def does_and_is_interrupted(*told):
        monkeypatch.undo()
        does(*told)
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(mesh.driver, interrupted, does_and_is_interrupted)
    was_closed = pytest.raises(MeshError, match=r"this mesh is closed: Mesh\.close\(\) was called")
    with handled(lambda *_: mesh.close()), was_closed:
        mesh.run(bytes, 1 << 20) if how == "a call" else mesh.resize({"data": 1})  # too long for the arena
    assert mesh.closed and "waits up to" not in capfd.readouterr().err


def test_a_handler_closes_a_mesh_in_the_middle_of_a_call_while_a_thread_closes_it(make_mesh, monkeypatch, tmp_path):
    """It leaves that to the thread, which needs what the interrupted call holds."""
    mesh, waits = make_mesh({"data": 2}, timeout=HANGS), threading.Event()
    go_on = tmp_path / "go on"

    def rank_waits():
        while not go_on.exists():
            time.sleep(0.01)

    mesh.submit(rank_waits)
    discard, tell = open_sessions.discard, mesh.driver.tell
    other = threading.Thread(target=mesh.close)

    def discard_and_say(session):
        waits.set()
        discard(session)

    def tell_and_interrupt(*told):
        if len(mesh.driver.pending.tasks) < 2:  # not the call yet, but a path or a module that the ranks need
            return tell(*told)
        monkeypatch.setattr(mesh.driver, "tell", tell)
        tell(*told)
        other.start()
        assert waits.wait(HANGS)
        signal.raise_signal(signal.SIGALRM)
        return go_on.touch()

    monkeypatch.setattr(open_sessions, "discard", discard_and_say)
    monkeypatch.setattr(mesh.driver, "tell", tell_and_interrupt)
    with handled(lambda *_: mesh.close()):
        assert mesh.run(bytes, 1) == [b"\0"] * 2
    other.join(HANGS)
    assert mesh.closed


def test_what_shows_the_output_of_ranks_may_close_the_mesh(make_mesh, monkeypatch, capfd):
    """A program's own sys.stdout is written to by the thread without which no call ends."""
    mesh = make_mesh({"data": 1}, timeout=60)

    class Output:
        def write(self, text):
            if "stop" in text:
                mesh.close()

        def flush(self):
            pass

    def prints():
        print("stop", flush=True)
        time.sleep(1000)

    monkeypatch.setattr(sys, "stdout", Output())
    with pytest.raises(MeshError, match=r"this mesh is closed: Mesh\.close\(\) was called"):
        mesh.run(prints)
    assert "waits up to" not in capfd.readouterr().err


class Setting:
    """Set within a `with` block, at whose beginning or end an interrupt comes."""

    def __init__(self, moment):
        self.moment, self.is_set = moment, False

    def __enter__(self):
        self.is_set = True
        self.interrupt("begins")

    def __exit__(self, *_):
        self.interrupt("ends")
        self.is_set = False

    def interrupt(self, moment):
        if moment == self.moment:
            signal.raise_signal(signal.SIGINT)


class Endless(Setting):
    def __enter__(self):
        self.interrupt("begins")
        time.sleep(HANGS)


def test_a_with_statement_is_not_cut_short(make_mesh):
    """Else what it has set for its block would stay set on that rank, as a gradient's order of collectives did."""

    mesh = make_mesh({"data": 3})

    def stays_set():
        setting = (Setting("begins"), Setting("ends"), Endless("begins"))[mesh.rank]
        with contextlib.suppress(KeyboardInterrupt):
            with setting:
                pass
            time.sleep(HANGS)
        return setting.is_set

    assert mesh.run(stays_set) == [False, False, False]


def test_an_import_is_not_cut_short(make_mesh, tmp_path, monkeypatch):
    """A rank that imports while another fails has the whole module, then and afterwards."""
    package = tmp_path / "slowly"
    package.mkdir()
    (package / "__init__.py").write_text("import time\nfrom . import part\ntime.sleep(1.0)\nwhole = part.value\n")
    (package / "part.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    mesh = make_mesh({"data": 2})

    @spmd(mesh=mesh)
    def step(x):
        if axis_index("data") == 1:
            time.sleep(0.3)
            raise ZeroDivisionError
        import slowly

        return psum(x + slowly.whole, "data")

    with pytest.raises(ZeroDivisionError):
        step(torch.ones(2))

    @spmd(mesh=mesh)
    def again(x):
        import slowly

        return psum(x + slowly.whole + slowly.part.value, "data")

    assert again(torch.zeros(2)).tolist() == [28.0, 28.0]


def press_and(does):
    """Presses Ctrl-C, and then does what would have been done."""

    def pressed(*arguments):
        signal.raise_signal(signal.SIGINT)
        return does(*arguments)

    return pressed


def test_ctrl_c_twice_at_once(make_mesh, monkeypatch):
    """The second kills the ranks from the first on: no call goes on whose end nobody waits for."""
    mesh = make_mesh({"data": 2})
    pids, driver = mesh.driver.pids, mesh.driver
    monkeypatch.setattr(driver.run_state, "note_failure", press_and(driver.run_state.note_failure))
    timer = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"mesh killed"):
        timer.start()
        mesh.run(time.sleep, 1000)
    assert mesh.closed and end_within(HANGS, pids)


def interrupted_send(connection, packet):
    """A part of a packet, and then Ctrl-C."""
    connection.sendall(wire.frame(packet)[0][:10])
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["begins", "asks", "receives"])
def test_ctrl_c_while_a_reader_is_used(monkeypatch, moment):
    """The rest of what was sent to it, or of what it has sent, is not missing afterwards."""
    readers = pool.Pool(len, 1)
    if moment != "begins":
        assert readers.take(readers.ask(("a",))) == 1
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        if moment == "receives":
            patched.setattr(protocol, "decode", press_and(protocol.decode))
        else:
            patched.setattr(wire, "send", interrupted_send)
        readers.take(readers.ask(("ab",)))
    readers.forget()
    assert readers.take(readers.ask(("abc",))) == 3
    readers.close()
