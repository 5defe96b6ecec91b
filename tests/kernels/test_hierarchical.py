"""Backend "hierarchical": on ranks of one machine that are taken for several hosts' (see test_nodes for real ones)."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fork_server import shared_server
from oracle import reduced
from patience import HANGS, until
from torch import distributed as dist

from spmd import MeshError, PeerLost
from spmd.kernels.network import hosts, interface
from spmd.kernels.network.hosts import HostWatch
from spmd.kernels.reduction import divide

HERE = Path(__file__).parents[1]
BARE = {name: text for name, text in os.environ.items() if not name.startswith("SPMD_")}


def ranks(size: int, folder: Path, *arguments: str, **environ: str) -> list[tuple[int, str]]:
    """Run Python on so many launched ranks: the status and the output of each."""
    meeting = {"SPMD_SIZE": str(size), "SPMD_INIT_METHOD": f"file://{folder}/meet", "OMP_NUM_THREADS": "1"}
    started = [
        shared_server().run(
            [sys.executable, *arguments],
            env={**BARE, **meeting, "SPMD_RANK": str(rank), **environ},
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [process.communicate(timeout=HANGS)[0] for process in started]
        return [(process.returncode, text) for process, text in zip(started, told, strict=True)]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(["[[0, 1], [2]]"], marks=pytest.mark.long), ["[[0, 1], [2, 3]]", "[[0, 2], [1, 3]]"]],
    ids=["3", "4"],
)
def test_suite(layouts: list[str], tmp_path: Path) -> None:
    """Layouts of as many ranks one after the other in the same processes, which take long to start."""
    size = len(re.findall(r"\d", layouts[0]))
    told = ranks(size, tmp_path, "hierarchical_suite.py", *layouts)
    assert [status for status, _ in told] == [0] * size, "\n".join(text for _, text in told)
    counted = [int(count) for count in re.findall(r"^ok (\d+) checks$", told[0][1], re.M)]
    assert len(counted) == len(layouts) and min(counted) > 150, told[0][1]


def test_one_host_takes_shared_memory(tmp_path: Path) -> None:
    """Asked for where there is one host: its ranks talk as those of "shm" do."""
    program = (
        "import torch; from spmd import Mesh\n"
        "with Mesh(backend='hierarchical', timeout=30) as mesh:\n"
        "    def body(): return mesh.comm().backend, float(mesh.comm().all_reduced(torch.ones(9))[0])\n"
        "    print(mesh.backend, mesh.run(body))"
    )
    said = "hierarchical [('shm', 2.0), ('shm', 2.0)]\n"
    assert ranks(2, tmp_path, "-c", program) == [(0, said)] * 2


def test_a_driver_has_one_host(make_mesh) -> None:
    mesh = make_mesh({"data": 2}, backend="hierarchical")
    with pytest.raises(MeshError, match="backend 'hierarchical' needs ranks that a launcher started"):
        mesh.run(lambda: mesh.comm().barrier())


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.float64, torch.complex64],
)
def test_an_average_is_a_sum_divided(dtype: torch.dtype) -> None:
    parts = [torch.arange(3 * rank, 3 * rank + 20).to(dtype) for rank in range(3)]
    total = reduced(parts, "sum")
    divide(total, 3)
    assert total.tolist() == reduced(parts, "avg").tolist()


def test_groups_are_split_in_their_own_order() -> None:
    watch = object.__new__(HostWatch)
    watch.hosts = ((0, 3), (1, 2), (4,))
    assert watch.split((0, 1, 2, 3, 4)) == [[0, 3], [1, 2], [4]]
    assert watch.split((4, 2, 3)) == [[4], [2], [3]]
    assert watch.split((2, 1)) == [[2, 1]]


class Unreached(dist.Store):
    """Of a host that says nothing; each request takes until a limit."""

    asked = 0

    def add(self, key: str, amount: int) -> int:
        self.asked += 1
        raise dist.DistNetworkError("Socket Timeout")


def test_a_store_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait asks for each of its peers in turn, which took so many times the limit."""
    monkeypatch.setattr(hosts, "_GRACE_SECONDS", 0.0)
    store = Unreached()
    watch = HostWatch.__new__(HostWatch)
    beyond = hosts.StoreWatch(store, 2)
    watch.arena = SimpleNamespace(beyond=beyond)
    beyond.enter(1)
    try:
        assert not any(beyond.progress.has_left(rank) for rank in (0, 1, 3) for _ in range(2))
        assert store.asked == 1
        beyond.check_peers()
        with pytest.raises(PeerLost, match=r"rank 2 has lost contact with the meeting place .*Socket Timeout"):
            until(beyond.check_peers, HANGS)
        assert store.asked == 1 and "lost contact" in watch.lost
    finally:
        beyond.leave()


def test_examples() -> None:
    for module in (hosts, interface):
        assert doctest.testmod(module).failed == 0
