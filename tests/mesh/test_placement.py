"""Where ranks run, and what they do with memory: those of this file that measure have a process of their own."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from internals import environment_of_zygote
from scripts import FORKED_CHILDREN, run, script

from spmd import Mesh
from spmd.cli.main import parse
from spmd.kernels import processes
from spmd.kernels.processes import available_bytes, memory_kills, processor_limit

SPREAD = """
import os, torch
from spmd.kernels.processes import _current_core, spread
torch.set_num_threads(1)
allowed = sorted(os.sched_getaffinity(0))
for index in (1, 0, 1):
    spread(index, 2)
    print(_current_core() == allowed[index], sorted(os.sched_getaffinity(0)) == allowed)
"""

KEPT = """
import resource, torch
from spmd.mesh.rank.memory import keep_freed_memory, release_freed_memory
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory()
# Something small may come to lie where the large block was, and the heap has to rise again, perhaps more than once.
first, again = faults(), [faults() for _ in range(8)]
release_freed_memory(3)
later = [faults() for _ in range(8)]
release_freed_memory(4)
print(first > 10_000, min(again) < 1000, min(later) < 1000, faults() > 10_000)
"""

COMPARED = """
import resource, torch
from spmd.mesh.replication.values import tensor_print
value = torch.ones(32 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
tensor_print(value)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < value.nbytes / 2)
"""


THREADS = """
import os, torch
from spmd import Mesh, put, spmd
torch.set_num_threads(2)
with Mesh({"data": 1}) as mesh:
    total = spmd(lambda x: x.sum(), mesh=mesh)
    float(total(torch.ones(4)))
    batch, before = torch.frombuffer(bytearray(1 << 23), dtype=torch.float32), len(os.listdir("/proc/self/task"))
    print(float(total(batch)), float(total(put(batch))), len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_rank_goes_to_its_core_and_is_not_bound_to_it(tmp_path: Path) -> None:
    status, out, err = run(script(tmp_path, SPREAD))
    assert status == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert [free for _, free in lines] == ["True"] * 3
    assert [there for there, _ in lines].count("True") >= 2  # the kernel may move it on at once


def test_freed_memory_is_kept_and_now_and_then_given_back(tmp_path: Path) -> None:
    # As if nothing before had set malloc's own pages, which are larger and fewer.
    status, out, err = run(script(tmp_path, KEPT), env={"GLIBC_TUNABLES": ""}, fresh=True)
    assert status == 0, err
    assert out.split() == ["True"] * 4


def test_openmp_does_not_keep_cores_busy(tmp_path: Path) -> None:
    program = script(tmp_path, "from spmd import Mesh\nwith Mesh({'data': 1}) as mesh: print(mesh.run(int))")
    status, out, err = run(program, env={"OMP_DISPLAY_ENV": "verbose"}, without=["GOMP_", "OMP_"], fresh=True)
    assert (status, out) == (0, "[0]\n"), err
    assert {"10000"} <= set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", err))


@pytest.mark.parametrize(("own", "spins"), [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77")], ids=["not set", "set"])
def test_how_busy_openmp_keeps_cores_is_up_to_who_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str], spins: str
) -> None:
    """Of a driver's ranks, and of launched ones."""
    program = script(tmp_path, "import os; print(os.environ['GOMP_SPINCOUNT'])")
    told = {**FORKED_CHILDREN, **own}
    status, out, err = run("-m", "spmd", "run", "-n", "1", program, env=told, without=["GOMP_", "OMP_"])
    assert (status, out) == (0, f"{spins}\n"), err
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, text in own.items():
        monkeypatch.setenv(name, text)
    assert environment_of_zygote()["GOMP_SPINCOUNT"] == spins


def test_a_driver_sends_large_tensors_without_torchs_threads(tmp_path: Path) -> None:
    """Once begun, they wait for work for milliseconds, on cores that ranks need."""
    status, out, err = run(script(tmp_path, THREADS))
    assert (status, out) == (0, "0.0 0.0 0\n"), err


def test_what_is_compared_is_not_copied(tmp_path: Path) -> None:
    status, out, err = run(script(tmp_path, COMPARED))
    assert status == 0, err
    assert out.split() == ["True"]


def test_where_no_process_may_choose_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sandbox; it stays where it is."""
    asked = []

    def refuse(pid: int, cores: list[int]) -> None:
        asked.append(cores)
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    threads = torch.get_num_threads()
    monkeypatch.setattr(processes, "_CORES", 2 * threads)
    monkeypatch.setattr(processes, "_current_core", lambda: 2 * threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(2 * threads)})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    processes.spread(1, 2)
    assert asked == [[threads], [*range(2 * threads)]]


@pytest.mark.parametrize(
    ("proc", "files", "limit"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),  # a container sees its own group only
        ("0::/a.slice/b\n", {"a.slice/cpu.max": "50000 25000\n", "a.slice/b/cpu.max": "max 100000\n"}, 2.0),
        ("0::/a\n", {"a/cpu.max": "max 100000\n", "cpu.stat": "usage_usec 1\n"}, math.inf),
        (
            "4:cpu,cpuacct:/docker/f00\n3:memory:/a\n0::/\n",  # which a container of version 1 has at its root
            {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            4.0,
        ),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        (None, {}, math.inf),
    ],
    ids=["container", "slice", "none", "version 1", "none, version 1", "no groups"],
)
def test_the_processor_time_that_a_container_gets(
    proc: str | None, files: dict[str, str], limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_groups(monkeypatch, tmp_path, proc, files)
    assert processor_limit() == limit


def set_groups(monkeypatch: pytest.MonkeyPatch, folder: Path, proc: str | None, files: dict[str, str]) -> None:
    """Let /proc/self/cgroup have this text (None: there is none), and /sys/fs/cgroup these files."""
    if proc is not None:
        (folder / "proc").write_text(proc)
    for name, text in files.items():
        path = folder / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(processes, "_GROUPS", str(folder / "proc"))
    monkeypatch.setattr(processes, "_MOUNTED", str(folder / "mounted"))


def memory_files(group: str, limit: str, used: int, cached: int, kills: int) -> dict[str, str]:
    """The files of a group of version 1 (in memory/) or 2."""
    if group.startswith("memory"):
        return {
            f"{group}/memory.limit_in_bytes": f"{limit}\n",
            f"{group}/memory.usage_in_bytes": f"{used}\n",
            f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}\n",
            f"{group}/memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
        }
    return {
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{used}\n",
        f"{group}/memory.stat": f"anon 7\ninactive_file {cached}\n",
        f"{group}/memory.events": f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n",
    }


@pytest.mark.parametrize(
    ("proc", "files", "available", "kills"),
    [
        ("0::/\n", memory_files(".", "5000", 4000, 100, 3), 1100, 3),  # a container sees its own group only
        ("0::/a\n", memory_files("a", "5000", 100, 400, 0), 5000, 0),  # counted later than what is used in all
        ("0::/a/b\n", memory_files("a/b", "9000", 0, 0, 2) | memory_files("a", "5000", 4000, 0, 8), 1000, 2),
        ("0::/a/b\n", memory_files("a/b", "max", 0, 0, 0) | memory_files("a", "5000", 6000, 0, 8), 0, 0),
        ("4:cpu:/x\n3:memory:/docker/f00\n0::/\n", memory_files("memory", "5000", 4000, 200, 4), 1200, 4),
        (
            "3:memory:/a/b\n",
            memory_files("memory/a", "5000", 4000, 200, 4) | memory_files("memory/a/b", str((1 << 63) - 4096), 0, 0, 1),
            1200,
            1,
        ),
    ],
    ids=["container", "more cached than used", "nested", "no limit within", "version 1", "nested, version 1"],
)
def test_the_memory_that_a_container_gets(
    proc: str, files: dict[str, str], available: int, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_groups(monkeypatch, tmp_path, proc, files)
    assert available_bytes() == available
    assert memory_kills() == kills


@pytest.mark.parametrize("proc", ["0::/a\n", "0::/a:b\n0::/../..\n", "\n"], ids=["v2", "odd names", "no group"])
def test_memory_where_nothing_limits_it(proc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_groups(monkeypatch, tmp_path, proc, {"memory.stat": "anon 7\n"})
    assert 1 << 20 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_kills() >= 0


def test_ranks_and_threads_are_as_many_as_the_processor_time_is_for(
    make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPMD_RANKS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(processes, "processor_limit", lambda: 1.2)
    assert make_mesh({"data": -1}).size == 2 and parse(["train.py"]).nproc_per_node == "2"
    assert make_mesh({"data": 1}).run(torch.get_num_threads) == [2]
