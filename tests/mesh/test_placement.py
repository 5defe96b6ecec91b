"""Where ranks run, and what they do with memory: those of this file that measure have a process of their own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripts import run, script

from spmd import Mesh
from spmd.cli.main import parse
from spmd.kernels import processes
from spmd.kernels.processes import processor_limit

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


def test_what_is_compared_is_not_copied(tmp_path: Path) -> None:
    status, out, err = run(script(tmp_path, COMPARED), fresh=True)
    assert status == 0, err
    assert out.split() == ["True"]


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
    proc: str | None, files: dict[str, str], limit: float, tmp_path: Path
) -> None:
    if proc is not None:
        (tmp_path / "proc").write_text(proc)
    for name, text in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert processor_limit(str(tmp_path / "proc"), str(tmp_path / "mounted")) == limit


def test_ranks_and_threads_are_as_many_as_the_processor_time_is_for(
    make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPMD_RANKS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(processes, "processor_limit", lambda: 1.2)
    assert make_mesh({"data": -1}).size == 2 and parse(["train.py"]).nproc_per_node == "2"
    assert make_mesh({"data": 1}).run(torch.get_num_threads) == [2]
