"""Programs with many files open, with workers of their own, and with programs that ranks start."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fork_server import ForkServer
from patience import HANGS, end_within, until
from scripts import run, script, started, two_ranks

from spmd import Mesh, MeshError, restore, save

needs_namespaces = pytest.mark.skipif(
    os.getuid() != 0
    or subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False).returncode != 0,
    reason="needs root and unshare, for namespaces",
)


def told(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script(tmp_path, code)], capture_output=True, text=True, timeout=HANGS, cwd=tmp_path
    )


def test_many_files_open_before_the_first_mesh(server: ForkServer) -> None:
    code = """
import os, resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
held = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(1100)]
for fd in held:
    os.set_inheritable(fd, True)
from spmd import Mesh
with Mesh({"data": 2}) as mesh:
    print(mesh.run(lambda: mesh.rank))
"""
    out, err = server.start(code, environ=os.environ).communicate()
    assert out == "[0, 1]\n", err


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_workers_that_import_the_script_start_no_ranks(tmp_path: Path, method: str) -> None:
    code = """
import multiprocessing, sys
from spmd import Mesh
mesh = Mesh({"data": 2})
if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=print, args=("worker ran",))
    worker.start()
    worker.join()
    print(worker.exitcode, mesh.run(lambda: mesh.rank))
"""
    _, out, err = run(script(tmp_path, code), method, cwd=tmp_path)
    assert out == "1 [0, 1]\n", out + err
    for text in (
        "MeshError: a worker process of multiprocessing imports this program's main script",
        "if __name__ == '__main__':",
    ):
        assert err.count(text) == 1, err


@pytest.mark.parametrize(
    ("name", "value", "told"), [("frozen", True, "a frozen program"), ("executable", "", "or set sys.executable")]
)
def test_programs_that_are_no_python(name: str, value: object, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)  # a frozen one would run itself, and make a mesh again
    with pytest.raises(MeshError, match=f"cannot be started, since .*{told}"):
        Mesh({"data": 1})


def test_signals_that_the_driver_blocks_reach_its_ranks(tmp_path: Path) -> None:
    code = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGINT})  # to take them with sigwait
from spmd import Mesh
with Mesh({"data": 1}, on_loss="raise") as mesh:
    print(mesh.run(signal.pthread_sigmask, signal.SIG_BLOCK, ()))
    mesh.run(os.kill, mesh.run(os.getpid)[0], signal.SIGKILL)
"""
    done = told(code, tmp_path)
    assert done.stdout == "[set()]\n"
    assert "rank 0 was killed by SIGKILL" in done.stderr  # as the process that it is forked from heard by SIGCHLD


def test_what_ranks_start_ends_with_a_killed_driver(tmp_path: Path) -> None:
    code = """
import subprocess, time
from spmd import Mesh
mesh = Mesh({"data": 2})
started = mesh.run(lambda: subprocess.Popen(["sleep", "1000"], close_fds=False).pid)
print(*started, flush=True)
time.sleep(1000)
"""
    with started(script(tmp_path, code)) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        try:
            assert len(pids) == 2
            for pid in pids:
                assert not [link for link in descriptors(pid) if "memfd:spmd" in link]
        finally:
            driver.kill()
            driver.wait()
    assert end_within(30.0, pids), "programs that ranks have started outlive their driver"


KILLS_SLOWLY = """
from spmd.mesh.driver import spawn
slowly = "import gc, os, time; kill = os.kill; os.kill = lambda *told: (kill(*told), time.sleep(0.3)); "
spawn._zygote, spawn._BOOT = None, spawn._BOOT.replace("import gc; ", slowly)
"""


DIES = "os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("begin", "end"),
    [("", "mesh.close()"), ("", "os.kill(mesh.run(os.getpid)[0], 9)"), ("", DIES), (KILLS_SLOWLY, DIES)],
)
def test_what_ranks_leave_in_dev_shm_is_removed(server: ForkServer, begin: str, end: str) -> None:
    """As in one process, where Python's own resource tracker does it, and outlives those that it serves."""
    code = f"""
import os, sys
from spmd import Mesh
{begin}
def make():
    from multiprocessing import get_context, shared_memory
    sys.kept = shared_memory.SharedMemory(create=True, size=8), get_context("spawn").Lock()
    return sys.kept[0].name, sys.kept[1]._semlock.name

mesh = Mesh({{"data": 1}})
print(*mesh.run(make)[0], flush=True)
{end}
"""
    with server.start(code, environ=os.environ) as program:
        names = program.communicate()[0].split()
    assert len(names) == 2
    paths = [Path("/dev/shm", names[0]), Path("/dev/shm", f"sem.{names[1].removeprefix('/')}")]
    assert until(lambda: not any(path.exists() for path in paths), 60)


def descriptors(pid: int) -> list[str]:
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it is about to run another program, and closes them
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


FORKS_NOTHING = """
from spmd.mesh.driver import spawn
refuses = "import gc; os.fork = lambda: (_ for _ in ()).throw(BlockingIOError(11, 'no')); "
spawn._zygote, spawn._BOOT = None, spawn._BOOT.replace("import gc; ", refuses)
"""


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))", "RLIMIT_FSIZE"),
        ("resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))", "RLIMIT_AS"),
        ("resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))", "RLIMIT_NOFILE"),
        (FORKS_NOTHING, "RLIMIT_NPROC.*pids.max"),
        ("threading.Thread.start = none", "RLIMIT_NPROC.*pids.max"),
        ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", "the operating system refuses what a mesh needs"),
    ],
)
def test_limits_of_the_system_are_named(server: ForkServer, tmp_path: Path, limit: str, named: str) -> None:
    code = f"""
import os, resource, threading
import torch, numpy
os.chdir({str(tmp_path)!r})
def none(_):
    raise RuntimeError("can't start new thread")
from spmd import Mesh, MeshError
{limit}
try:
    Mesh({{"data": 2}})
except MeshError as error:
    print(error)
"""
    out, err = server.start(code, environ=os.environ).communicate()
    assert re.search(named, out), out + err


def test_limits_that_a_resize_meets_are_named(server: ForkServer) -> None:
    code = """
import os, resource, threading
from spmd import Mesh, MeshError

def refused():
    try:
        mesh.resize({"data": 2})
    except MeshError as error:
        print(error)

mesh, most = Mesh({"data": 1}), resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, most[1]))
refused()
resource.setrlimit(resource.RLIMIT_NOFILE, most)
start = threading.Thread.start

def none(_):
    raise RuntimeError("can't start new thread")
threading.Thread.start = none
refused()
threading.Thread.start = start
mesh.resize({"data": 2})
print(mesh.run(lambda: mesh.rank))
"""
    out, err = server.start(code, environ=os.environ).communicate()
    assert re.fullmatch("a mesh needs .*RLIMIT_NOFILE.*\na mesh needs .*RLIMIT_NPROC.*\n\\[0, 1\\]\n", out), out + err


def test_gloo_leaves_the_sockets_of_others_alone(make_mesh: Any) -> None:
    """Connections that another thread of a rank's program opens while a group connects outlive the group."""
    mesh = make_mesh({"data": 2}, backend="gloo")

    def connects() -> float:
        held = sys.held_by_test = []  # type: ignore[attr-defined]
        real = dist.ProcessGroupGloo

        class Opens(real):  # type: ignore[misc,valid-type]
            def __init__(self, *args: Any):
                listener = socket.create_server(("127.0.0.1", 0))
                theirs = socket.create_connection(listener.getsockname())
                held.append((listener, listener.accept()[0], theirs))
                super().__init__(*args)

        dist.ProcessGroupGloo = Opens  # type: ignore[misc]
        try:
            return float(mesh.comm().all_reduced(torch.tensor(1.0)))
        finally:
            dist.ProcessGroupGloo = real  # type: ignore[misc]

    def fails() -> None:
        raise ValueError("of the region: the group is opened anew after it")

    def still_there() -> tuple[float, list[bytes]]:
        total, received = float(mesh.comm().all_reduced(torch.tensor(2.0))), []
        for _, mine, theirs in sys.held_by_test:  # type: ignore[attr-defined]
            mine.sendall(b"here")
            received.append(theirs.recv(9))
        return total, received

    assert mesh.run(connects) == [2.0, 2.0]
    with pytest.raises(ValueError, match="of the region"):
        mesh.run(fails)
    assert mesh.run(still_there) == [(4.0, [b"here"])] * 2


def test_limits_of_launched_ranks(server: ForkServer, tmp_path: Path) -> None:
    """Where shared memory can't be had they use Gloo; too few open files are named, and nobody waits for the one."""
    code = """
import os, resource, sys
import torch
from spmd import Mesh
if sys.argv[1] == "memory":
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    os.mkdir(sys.argv[2])
    os.chdir(sys.argv[2])
    os.rmdir(sys.argv[2])
elif os.environ["SPMD_RANK"] == "0":
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened, opened))
mesh = Mesh(timeout=60 if sys.argv[1] == "memory" else 2)
print(mesh.backend, mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(1000)).sum())))
"""
    for kind in ("memory", "files"):
        told = {"SPMD_SIZE": "2", "SPMD_INIT_METHOD": f"file://{tmp_path}/{kind}", "OMP_NUM_THREADS": "1"}
        ranks = [
            server.start(code, kind, f"{tmp_path}/gone{rank}", environ={**os.environ, **told, "SPMD_RANK": str(rank)})
            for rank in range(2)
        ]
        outs = [rank.communicate() for rank in ranks]
        if kind == "memory":
            assert [out for out, _ in outs] == ["gloo [2000.0, 2000.0]\n"] * 2, outs
        else:
            assert "MeshError: a mesh needs more than the limit on open files allows, RLIMIT_NOFILE" in outs[0][1], outs
            assert "MeshError: " in outs[1][1] and "did not come within 2 s" in outs[1][1], outs


@needs_namespaces
def test_dev_shm_is_not_needed(tmp_path: Path) -> None:
    """Neither a large one nor any: here it takes nothing."""
    code = """
import torch
from spmd import Mesh, P, put
with Mesh({"data": 2}) as mesh:
    print(mesh.backend, mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(1 << 20)).sum())))
    print(float(put(torch.ones(1 << 20), P("data"), mesh=mesh).full().sum()))
"""
    command = f"mount -t tmpfs -o ro tmpfs /dev/shm && exec {sys.executable} {script(tmp_path, code)}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=HANGS)
    assert done.stdout == "shm [2097152.0, 2097152.0]\n1048576.0\n", done.stderr


@needs_namespaces
def test_a_writer_in_another_pid_namespace_is_alive(tmp_path: Path) -> None:
    """Both have one host name; the numbers of one's processes are nobody's in the other."""
    began, go = threading.Event(), threading.Event()

    real = os.fsync

    def waits(fd: int) -> None:
        began.set()
        assert go.wait(HANGS)
        real(fd)

    runs = tmp_path / "runs"
    other = f"""
import torch
from spmd import Mesh, MeshError, restore, save
folder = {str(runs)!r}
save(folder, {{"w": torch.zeros(2)}}, step=2)
print(restore(folder + "/step-00000002")["w"].tolist())
"""
    os.fsync = waits
    try:
        future = save(runs, {"w": torch.ones(2)}, step=1, background=True)
        assert began.wait(HANGS)
        half = [path for path in runs.iterdir() if ".tmp-" in path.name]
        assert len(half) == 1
        os.fsync = real
        in_namespace = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", other]
        done = subprocess.run(in_namespace, capture_output=True, text=True, timeout=HANGS, cwd=tmp_path)
        assert done.stdout == "[0.0, 0.0]\n", done.stderr
        assert half[0].exists()
    finally:
        os.fsync = real
        go.set()
    assert future.result() == runs / "step-00000001"
    assert restore(runs / "step-00000001")["w"].tolist() == [1.0, 1.0]


@needs_namespaces
def test_ranks_in_two_pid_namespaces_save_in_the_background(tmp_path: Path) -> None:
    code = """
import sys, torch
from spmd import Mesh, P, put, restore, save
mesh = Mesh(timeout=60)
save(sys.argv[1], {"w": put(torch.arange(4.0), P("data"), mesh=mesh)}, background=True).result()
print(restore(sys.argv[1])["w"].tolist())
"""
    outs = two_ranks(
        tmp_path,
        code,
        f"{tmp_path}/runs",
        inside=lambda rank: ["unshare", "--pid", "--fork", "--mount-proc"] if rank else [],
    )
    assert [out for out, _ in outs] == ["[0.0, 1.0, 2.0, 3.0]\n"] * 2, outs


def test_a_process_that_proc_does_not_show_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /proc is another namespace's, or hides other users' processes."""
    from spmd.kernels import processes

    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert not processes.gone(processes.namespace(), os.getppid())
    assert not processes.gone("another kernel's", 1 << 22)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert processes.gone(processes.namespace(), child)
