"""Programs with many files open, with workers of their own, and with programs that ranks start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import HANGS


def told(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=HANGS, cwd=tmp_path)


def test_many_files_open_before_the_first_mesh(tmp_path: Path) -> None:
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
    done = told(code, tmp_path)
    assert done.stdout == "[0, 1]\n", done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_import_the_script_start_no_ranks(tmp_path: Path, method: str) -> None:
    code = f"""
import multiprocessing, os
from spmd import Mesh
mesh = Mesh({{"data": 2}})
if __name__ == "__main__":
    worker = multiprocessing.get_context("{method}").Process(target=print, args=("worker ran",))
    worker.start()
    worker.join()
    print(worker.exitcode, mesh.run(lambda: mesh.rank))
"""
    done = told(code, tmp_path)
    assert done.stdout == "1 [0, 1]\n", done.stdout + done.stderr
    assert "MeshError: a worker process of multiprocessing imports this program's main script" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


def test_what_ranks_start_ends_with_a_killed_driver(tmp_path: Path) -> None:
    code = """
import subprocess, time
from spmd import Mesh
mesh = Mesh({"data": 2})
started = mesh.run(lambda: subprocess.Popen(["sleep", "1000"], close_fds=False).pid)
print(*started, flush=True)
time.sleep(1000)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:
            assert not [link for link in descriptors(pid) if "memfd:spmd" in link]
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    end = time.monotonic() + HANGS
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < end, "programs that ranks have started outlive their driver"
        time.sleep(0.05)


def descriptors(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))", "RLIMIT_FSIZE"),
        ("resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))", "RLIMIT_AS"),
        ("resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))", "RLIMIT_NOFILE"),
        ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", "the operating system refuses what a mesh needs"),
    ],
)
def test_limits_of_the_system_are_named(tmp_path: Path, limit: str, named: str) -> None:
    code = f"""
import os, resource
import torch, numpy
from spmd import Mesh, MeshError
{limit}
try:
    Mesh({{"data": 2}})
except MeshError as error:
    print(error)
"""
    done = told(code, tmp_path)
    assert named in done.stdout, done.stdout + done.stderr
