"""Where ranks run, and what they do with memory: each test has a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scripts import run, script

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
