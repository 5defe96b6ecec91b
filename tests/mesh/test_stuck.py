"""Ranks that are stopped or stuck, and others that only look so; where all of them are; and who else may be stopped."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Counter
from fork_server import ForkServer
from host_processes import parent_of
from internals import let_time_fly, say_what_closing_waits_for_after, wait_for_stacks
from patience import HANGS, end_within, running, soon, until

from spmd import Loader, Mesh, MeshError, P, PeerLost, RemoteError, SpmdError, put, save
from spmd.mesh.display import stacks
from spmd.mesh.driver.pending import Task

GRACE = 0.5


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh({"data": 2}, timeout=60, grace=GRACE) as made:
        yield made


def works(mesh: Mesh) -> bool:
    return mesh.run(lambda: float(mesh.comm().all_reduced(torch.tensor(1.0)))) == [mesh.size] * mesh.size


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# -- what is stuck ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["run", "full", "batch", "save"])
def test_a_stopped_rank_ends_what_waits_for_it(mesh: Mesh, what: str, tmp_path: Path) -> None:
    """The timeout is a minute; values that outlive the rank may be read in spite of it."""
    value = put(torch.arange(4.0), P("data"), mesh=mesh)
    loader = iter(Loader(torch.arange(8.0), 4, mesh=mesh, shuffle=False, prefetch=0))
    pid = mesh.driver.pids[1]
    os.kill(pid, signal.SIGSTOP)
    waits: dict[str, Callable[[], Any]] = {
        "run": lambda: mesh.run(lambda: 1),
        "full": lambda: value.full().tolist() == [0, 1, 2, 3],
        "batch": lambda: sorted(next(loader).full().tolist()) == [0, 1, 2, 3],
        "save": lambda: save(tmp_path, {"w": value}).result().exists(),
    }
    try:
        assert waits[what]()
        ended = not running(pid)
    except PeerLost as error:
        assert f"rank 1 was killed: it was stopped for {GRACE:g} s while it was waited for" in str(error)
        ended = True
    if ended:
        assert end_within(1.0, [pid])
    else:
        os.kill(pid, signal.SIGCONT)
    assert works(mesh)


@pytest.mark.parametrize("who", ["driver", "rank"])
@pytest.mark.parametrize("restore", [False, True])
def test_a_stopped_rank_ends_what_waits_for_its_objects(
    make_mesh: Callable[..., Mesh], who: str, restore: bool
) -> None:
    mesh = make_mesh({"data": 2}, timeout=60, grace=GRACE)
    counter = mesh.remote(Counter, rank=1, restore=restore)
    assert counter.add().get() == 1
    pid = mesh.driver.pids[1]
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")  # one of them could answer before it stops
    assert until(lambda: all(state(int(one.name)) == "T" for one in threads.iterdir()))
    if restore and who == "driver":
        assert counter.add().get(HANGS) == 2
    else:
        with pytest.raises(PeerLost, match="rank 1"):
            if who == "driver":
                counter.add().get(HANGS)
            else:
                mesh.submit(lambda: counter.add().get(HANGS), rank=0).result()
    assert end_within(1.0, [pid])
    assert until(lambda: mesh.driver.pids[1] != pid)
    assert works(mesh)


@pytest.fixture
def whole_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_ANSWER_SECONDS", stacks._ANSWER_SECONDS)  # as it was, at the end
    wait_for_stacks()


@pytest.mark.usefixtures("whole_stacks")
def test_a_rank_that_holds_the_lock_of_python(mesh: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    """Stuck in C: its stack is told where it happens, and again in the log when the rank is killed."""
    pid = mesh.driver.pids[1]

    def stuck_in_c() -> float:
        comm = mesh.comm()
        while comm.rank == 1:  # asked for its stack it comes back from C, and goes there again
            ctypes.PyDLL(None).sleep(1000)
        return float(comm.all_reduced(torch.ones(1)))

    seen: list[str] = []

    def look() -> None:
        assert until(lambda: "stuck_in_c" in mesh.stacks() or not running(pid))
        seen.append(mesh.stacks())

    looking = threading.Thread(target=look)
    looking.start()
    with pytest.raises(PeerLost, match=rf"rank 1 was killed: it did nothing for {GRACE:g} s.*rank 0 waited for it"):
        mesh.run(stuck_in_c)
    looking.join()
    assert seen and re.search(r"^rank 0: process \d+", seen[0], re.MULTILINE)
    log = capfd.readouterr().err
    assert "spmd: rank 1 was killed: it did nothing" in log and "in stuck_in_c" in log
    assert works(mesh) and not running(pid)


@pytest.mark.usefixtures("whole_stacks")
def test_a_rank_that_loops_in_c_while_another_waits(
    make_mesh: Callable[..., Mesh], capfd: pytest.CaptureFixture[str]
) -> None:
    """It computes, for all that can be seen: the timeout of who waits ends the call, and the grace the rank."""
    mesh = make_mesh({"data": 2}, timeout=2.0, grace=GRACE)
    value = put(torch.arange(4.0), P("data"), mesh=mesh)
    pid = mesh.driver.pids[1]

    def loops_in_c() -> float:
        comm = mesh.comm()
        if comm.rank == 1:
            sum(itertools.repeat(0))  # holds the lock of Python, and looks for no signal
        return float(comm.all_reduced(torch.ones(1)))

    with pytest.raises(SpmdError, match="rank 1"):
        mesh.run(loops_in_c)
    assert until(lambda: not running(pid))
    assert works(mesh) and value.full().tolist() == [0, 1, 2, 3]
    log = capfd.readouterr().err
    assert "spmd: rank 1 was killed: it was still in a call" in log and "in loops_in_c" in log


# -- what is not ------------------------------------------------------------------------------------------------------


def test_ranks_that_are_left_alone(mesh: Mesh, tmp_path: Path) -> None:
    """One that computes, one whose programs or readers do, those that wait for one of these, and one that serves."""
    pids = mesh.driver.pids
    lock = str(tmp_path / "lock")

    def late(how: str) -> float:
        comm = mesh.comm()
        if comm.rank == 1 and how == "computes":
            end = time.monotonic() + 2 * GRACE
            while time.monotonic() < end:
                pass
        elif comm.rank == 1:
            busy = f"import time\nend = time.monotonic() + {2 * GRACE}\nwhile time.monotonic() < end: pass"
            with open(lock, "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                comm.barrier()
                for _ in range(2):  # the second begins with no time spent
                    subprocess.run([sys.executable, "-S", "-c", busy], check=True)
        else:
            if how.startswith("waits"):
                comm.barrier()
            if how == "waits for programs of another":
                with open(lock) as file:
                    fcntl.flock(file, fcntl.LOCK_SH)
        return float(comm.all_reduced(torch.ones(1)))

    assert mesh.run(late, "computes") == [2.0, 2.0]
    assert mesh.run(late, "waits for programs that compute") == [2.0, 2.0]
    assert mesh.run(late, "waits for programs of another") == [2.0, 2.0]
    assert mesh.submit(time.sleep, 2 * GRACE, rank=1).result(HANGS) is None

    class Slow(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            end = time.monotonic() + 2 * GRACE
            while time.monotonic() < end:
                pass
            return index

    assert [batch.full().tolist() for batch in Loader(Slow(), 2, mesh=mesh, shuffle=False, workers=1)] == [[0, 1]]
    assert mesh.driver.pids == pids


class Ends:
    """A block whose end computes for ever, where Python can interrupt it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        while True:
            pass


def test_a_rank_that_ends_a_block_when_its_call_fails_is_interrupted(mesh: Mesh) -> None:
    """It is given half a second to end it; a grace time that is about as short begins after that."""
    pids = mesh.driver.pids

    def fails() -> float:
        comm = mesh.comm()
        if comm.rank == 1:
            with Ends():
                comm.barrier()
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        mesh.run(fails)
    assert works(mesh) and mesh.driver.pids == pids


@contextlib.contextmanager
def hardly_any_processor() -> Iterator[Path]:
    """The file of a control group whose processes may run for a millisecond a second, to write their numbers to."""
    version = 1 if Path("/sys/fs/cgroup/cpu").is_dir() else 2
    folder = Path("/sys/fs/cgroup", "cpu" if version == 1 else "", f"spmd-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        if version == 1:
            (folder / "cpu.cfs_period_us").write_text("1000000")
            (folder / "cpu.cfs_quota_us").write_text("1000")
        elif (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text("1000 1000000")
        else:
            pytest.skip("control groups have no limits of processor time here")
        yield folder / "cgroup.procs"
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def test_a_rank_whose_program_waits_for_a_processor_is_left_alone(mesh: Mesh) -> None:
    pids = mesh.driver.pids
    with hardly_any_processor() as group:
        code = f"import os, time\nopen({str(group)!r}, 'w').write(str(os.getpid()))\n"
        code += f"end = time.monotonic() + {3 * GRACE}\n"

        def waits() -> float:
            comm = mesh.comm()
            if comm.rank == 1:
                subprocess.run([sys.executable, "-S", "-c", code + "while time.monotonic() < end: pass"], check=True)
            return float(comm.all_reduced(torch.ones(1)))

        assert mesh.run(waits) == [2.0, 2.0]
    assert mesh.driver.pids == pids


def test_a_rank_in_a_debugger_is_left_alone(mesh: Mesh) -> None:
    """A tracer is attached to it, or it is at a prompt."""
    pids = mesh.driver.pids
    with traced(pids[1]) as stop:
        future: list[Any] = []
        call = threading.Thread(target=lambda: future.append(mesh.run(sleeps, 1, 2 * GRACE)))
        call.start()
        call.join(HANGS)
        assert future == [[0, 1]]
        stop()

    def at_prompt() -> int:
        mesh.session.watch.set_in_debugger(True)
        try:
            time.sleep(2 * GRACE)
        finally:
            mesh.session.watch.set_in_debugger(False)
        return 1

    assert mesh.run(at_prompt) == [1, 1] and mesh.driver.pids == pids


@contextlib.contextmanager
def traced(pid: int) -> Iterator[Callable[[], None]]:
    """Trace a process as a debugger does; gives a function that stops it, which must be called."""
    libc = ctypes.CDLL(None, use_errno=True)
    seize, interrupt, detach = 0x4206, 0x4207, 17
    if libc.ptrace(seize, pid, None, None):
        pytest.skip("this system lets nobody trace another process")

    def stop() -> None:
        libc.ptrace(interrupt, pid, None, None)
        os.waitpid(pid, 0x40000000)  # __WALL

    try:
        yield stop
    finally:
        libc.ptrace(detach, pid, None, None)


def test_the_peers_of_a_rank_that_a_debugger_has_stopped_wait_for_it(tmp_path: Path) -> None:
    later = tmp_path / "later"
    with Mesh({"data": 2}, timeout=HANGS) as mesh, ThreadPoolExecutor() as pool:
        assert works(mesh)
        mesh.run(let_time_fly, str(later), HANGS, ranks=[0])
        with traced(mesh.driver.pids[1]) as stop:
            stop()
            call = pool.submit(works, mesh)
            later.touch()
            assert until(lambda: not later.exists())  # several timeouts have passed
        assert call.result(HANGS)


def sleeps(rank: int, seconds: float) -> int:
    from spmd import axis_index

    if axis_index("data") == rank:
        time.sleep(seconds)
    return int(axis_index("data"))


def test_a_stopped_rank_that_nobody_waits_for(mesh: Mesh) -> None:
    assert works(mesh)  # it has begun
    pid = mesh.driver.pids[1]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * GRACE)
    assert state(pid) == "T" and "it is stopped, and can't say where it is" in mesh.stacks()
    os.kill(pid, signal.SIGCONT)
    assert works(mesh) and mesh.driver.pids[1] == pid


def test_a_name_that_the_kernel_cuts_within_a_character(mesh: Mesh) -> None:
    """It keeps 15 bytes of a process's or a thread's name."""

    def renamed() -> None:
        ctypes.CDLL(None).prctl(15, "abcdefghijklmné".encode())  # PR_SET_NAME
        time.sleep(GRACE / 2)  # the driver looks at it meanwhile

    mesh.run(renamed)
    assert mesh.stacks().count("(abcdefghijklmn\N{REPLACEMENT CHARACTER})") == 2
    assert works(mesh)


# -- stacks -----------------------------------------------------------------------------------------------------------


def test_stacks_of_launched_ranks(server: ForkServer, tmp_path: Path) -> None:
    code = """
from internals import let_time_fly, wait_for_stacks
from spmd import Mesh
wait_for_stacks()
mesh = Mesh(timeout=60)
def at_rest():
    mesh.comm().barrier()
    text = mesh.stacks() if mesh.rank == 0 else ""
    mesh.comm().barrier()
    return text
print(mesh.run(at_rest)[0])
"""
    told = {"SPMD_SIZE": "2", "SPMD_INIT_METHOD": f"file://{tmp_path}/meet", "OMP_NUM_THREADS": "1"}
    ranks = [server.start(code, environ={**os.environ, **told, "SPMD_RANK": str(rank)}) for rank in range(2)]
    (text, error), _ = [rank.communicate() for rank in ranks]
    assert [line.partition(":")[0] for line in text.splitlines() if line.startswith("rank")] == ["rank 0", "rank 1"], (
        error
    )
    assert text.count("in at_rest") == 2


def test_stacks_where_no_temporary_file_can_be_made(server: ForkServer, tmp_path: Path) -> None:
    code = """
import tempfile
from internals import without_shared_memory
from spmd import Mesh
pretended = without_shared_memory()
pretended.__enter__()
def none():
    raise FileNotFoundError(2, "No usable temporary directory found")
mesh = Mesh(backend="gloo", timeout=60)
tempfile.gettempdir = none
print(mesh.stacks())
"""
    told = {"SPMD_SIZE": "1", "SPMD_RANK": "0", "SPMD_INIT_METHOD": f"file://{tmp_path}/meet"}
    text, error = server.start(code, environ={**os.environ, **told}).communicate()
    assert text.startswith("rank 0: process ") and "most recent call first" in text, error


def test_stacks_of_a_rank_whose_threads_begin_and_end(mesh: Mesh, tmp_path: Path) -> None:
    """Each writes its own: one that wrote those of others read what these had freed, and the rank crashed."""
    pids, done = mesh.driver.pids, tmp_path / "done"

    def below(depth: int) -> None:
        below(depth - 1) if depth else None

    def begin_and_end() -> None:
        while not done.exists():
            threads = [threading.Thread(target=below, args=(60,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    call = mesh.submit(begin_and_end, rank=1)
    assert until(lambda: "in begin_and_end" in mesh.stacks())
    for _ in range(200):
        mesh.stacks()
    done.touch()
    assert call.result(HANGS) is None and mesh.driver.pids == pids


def test_stacks_of_a_rank_that_is_preempted_while_it_writes(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh({"data": 1})
    done = threading.Event()

    def below(depth: int) -> None:
        below(depth - 1) if depth else threading.Event().wait()

    def begin() -> None:  # so many that writing them takes a while
        for _ in range(50):
            threading.Thread(target=below, args=(90,), daemon=True).start()

    mesh.run(begin)
    board, pid = mesh.driver.ranks.arena, mesh.driver.pids[0]
    _, number = board.process(0)

    def preempt() -> None:
        path = f"/proc/{pid}/fd/{number}"
        before = os.stat(path).st_size
        while os.stat(path).st_size == before and not done.is_set():
            pass
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=preempt)
    thread.start()
    text = stacks.stacks_of(board, 0)
    done.set()
    thread.join()
    assert text.count("in below") == 50 * 91, text[-2000:]


# -- the process that ranks are forked from, and the ends of others ---------------------------------------------------


def zygote_of(mesh: Mesh) -> int:
    return parent_of(mesh.driver.pids[0])


def test_the_zygote_is_stopped(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh({"data": 2})
    os.kill(zygote_of(mesh), signal.SIGSTOP)
    os.kill(mesh.driver.pids[1], signal.SIGKILL)
    with contextlib.suppress(PeerLost):
        mesh.run(lambda: 1)
    assert works(mesh)


def test_sys_exit_on_a_rank_does_not_end_the_program(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})

    def leaves() -> None:
        if mesh.rank == 1:
            sys.exit()
        mesh.comm().barrier()

    with pytest.raises(RemoteError, match=r"rank 1 called sys.exit\(\) in a call of the mesh"):
        mesh.run(leaves)
    with pytest.raises(RemoteError, match=r"ranks 0-1 called sys.exit\(0\) in a call of the mesh"):
        mesh.run(lambda: sys.exit(0))
    with pytest.raises(SystemExit) as caught:
        mesh.run(lambda: sys.exit(3))
    assert caught.value.code == 3


def test_closing_with_calls_under_way_waits_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of them ends just as it is looked at who is busy."""
    say_what_closing_waits_for_after(monkeypatch, 0.5)
    mesh, may_end = Mesh({"data": 2}, timeout=2.0), tmp_path / "may end"
    first = mesh.submit(time.sleep, 1000, rank=0)
    ends = mesh.submit(until, may_end.exists, rank=1)
    futures = [first, *(mesh.submit(time.sleep, 1000, rank=rank) for rank in (1, 0, 1))]
    busy = Task.busy

    def busy_as_one_ends(task: Task) -> set[int]:
        if threading.current_thread() is threading.main_thread():
            may_end.touch()
            assert until(ends.done)
        return busy(task)

    monkeypatch.setattr(Task, "busy", busy_as_one_ends)
    began = time.monotonic()
    mesh.close()
    assert soon(4 * 2.0, began)
    assert "waits up to 2 s for what ranks 0-1 do (Ctrl-C: no longer)" in capfd.readouterr().err
    assert ends.result() and all(isinstance(future.exception(), MeshError) for future in futures)


def test_a_driver_that_is_killed_while_torch_is_imported(tmp_path: Path) -> None:
    """What it has started ends at once, without a word."""
    script = tmp_path / "script.py"
    script.write_text("from spmd import Mesh\nprint('begins', flush=True)\nMesh({'data': 2})\n")
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None and driver.stderr is not None
        assert driver.stdout.readline() == "begins\n"
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
        assert until(lambda: any("spmd.mesh.rank.zygote" in command(int(pid)) for pid in children.read_text().split()))
        pids = [int(pid) for pid in children.read_text().split()]
        driver.kill()
        assert end_within(0.5, pids)
        assert driver.stderr.read() == ""


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def test_a_kill_for_memory_says_so(make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel's count of such kills has risen when a rank was killed."""
    mesh = make_mesh({"data": 2})
    monkeypatch.setattr("spmd.mesh.driver.ranks.memory_kills", lambda: 1 << 60)

    def killed() -> None:
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mesh.comm().barrier()

    with pytest.raises(PeerLost, match="rank 1 was killed by SIGKILL, for memory by all appearances"):
        mesh.run(killed)
