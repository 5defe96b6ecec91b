"""What works on one host works over hosts: donation, checkpoints, progress bars, `Loader`s, the debugger."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bodies import never_finish_writing
from internals import compare_late_output
from patience import HANGS, running, slowness, until
from scripts import script
from test_bars import shown
from test_debugging import STEP, at_terminal
from test_donation import CASES, SHAPES
from test_donation import trained as trained_in_place
from torch.utils.data import Dataset
from tqdm import tqdm

from spmd import Loader, Mesh, P, axis_index, fetch, put, restore, save

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh({"data": 4}, hosts="local:2x2", timeout=60) as made:
        yield made


@pytest.mark.parametrize("shard", [None, "data"])
def test_donated_memory_stays_where_it_is(mesh: Mesh, shard: str | None) -> None:
    cls, hyper = CASES[1]
    expected, fresh = trained_in_place(mesh, cls, hyper, shard, ())
    found, places = trained_in_place(mesh, cls, hyper, shard, ("params", "state"))
    for turn, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert all(torch.equal(a[name], b[name]) for name in SHAPES), turn
    assert places[1] == places[0] == places[3] and fresh[1] != fresh[0]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def values() -> dict[str, torch.Tensor]:
    return {"cut": torch.arange(24.0).reshape(12, 2), "whole": torch.ones(5), "large": torch.arange(1 << 18)}


def on(mesh: Mesh) -> dict[str, Any]:
    specs = {"cut": P("data"), "whole": P(), "large": P("data")}
    return {name: put(value, specs[name], mesh=mesh) for name, value in values().items()}


def same(tree: Any) -> bool:
    plain = fetch(tree)
    return all(torch.equal(plain[name], value) for name, value in values().items())


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_of_hosts_at_other_sizes_and_back(
    mesh: Mesh, shared_mesh: Callable[..., Mesh], tmp_path: Path, background: bool
) -> None:
    one = shared_mesh({"data": 2})
    folder = save(tmp_path, on(mesh), background=background).result(HANGS)
    assert len([*folder.glob("rank-*.safetensors")]) == 4
    assert same(restore(tmp_path, mesh=mesh))
    with pytest.warns(UserWarning, match="backend class: hierarchical, now in order"):
        assert same(restore(tmp_path, mesh=one))
    save(tmp_path, on(one), background=background).result(HANGS)
    with pytest.warns(UserWarning, match="backend class: in order, now hierarchical"):
        back = restore(tmp_path, mesh=mesh)
    assert same(back) and back["cut"].mesh is mesh


def test_a_checkpoint_is_written_though_ranks_are_lost(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run(never_finish_writing, ranks=[1, 2])
    future = save(tmp_path, on(mesh), background=True)
    for rank in (1, 2):
        os.kill(mesh.status()[rank].pid, signal.SIGKILL)
    assert future.result(HANGS).exists() and same(restore(tmp_path))


APART = """
import os, subprocess, sys
from pathlib import Path
import torch
from spmd import Mesh, P, SpmdError, put, save

class Apart:
    hosts = ["here:1", "there:1"]
    def start(self, name, command, stdin):
        hidden = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {sys.argv[1]} && exec \\"$@\\"", "sh"]
        process = subprocess.Popen([*(hidden if name == "there" else []), *command], stdin=subprocess.PIPE)
        process.stdin.write(stdin)
        process.stdin.close()
        return process
    def stop(self, process):
        process.wait(60)

with Mesh({"data": 2}, hosts=Apart(), timeout=60) as mesh:
    for background in (False, True):
        try:
            save(sys.argv[1], {"x": put(torch.arange(4), P("data"), mesh=mesh)}, background=background).result(60)
        except SpmdError as error:
            print(error)
    print(os.listdir(sys.argv[1]))
"""
MOUNTS = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not MOUNTS, reason="mount namespaces can't be made here")
def test_a_path_that_not_all_hosts_see(tmp_path: Path) -> None:
    environ = {**os.environ, "SPMD_INTERFACE": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", APART, str(tmp_path)], env=environ, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"the directory of the checkpoint is not there on rank 1", done.stdout)) == 2, done.stdout
    assert done.stdout.endswith("[]\n"), done.stdout  # nothing half done is left


# -- what ranks show, and read -----------------------------------------------------------------------------------------


def test_one_progress_bar(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    compare_late_output(monkeypatch.setattr)

    def loop() -> None:
        for step in tqdm(range(4), "steps"):
            time.sleep(0.11 * (1 + axis_index("data") // 2))
            if step == 1 and mesh.rank == 3:
                print("half way")

    mesh.run(loop)
    out, err = capfd.readouterr()
    counts = [int(found[1]) for bar in shown(err) if (found := re.search(r"^steps: .* (\d)/4 ", bar))]
    common = counts[len(counts) - 1 - counts[::-1].index(0) :]  # since the slowest rank has begun
    assert common == sorted(common) and common[-1] == 4 and "[rank" not in err, counts
    assert out == "[rank 3] half way\n"


class Numbered(Dataset):
    """Samples that say which process has read them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "pid": os.getpid(), "rank": os.getpgrp(), "noise": torch.rand(())}


def test_workers_read_for_their_rank(mesh: Mesh, shared_mesh: Callable[..., Mesh]) -> None:
    def read(mesh: Mesh, workers: int) -> list[list[float]]:
        batches = [*Loader(Numbered(), 8, mesh=mesh, seed=3, shards=4, workers=workers)]
        if workers:
            pids.update(int(pid) for batch in batches for pid in batch["pid"].full())
            read_for = [{*shard.tolist()} for shard in batches[-1]["rank"].shards()]
            assert read_for == [{pid} for pid in mesh.run(os.getpid)]
        return [[float(number) for name in ("id", "noise") for number in batch[name].full()] for batch in batches]

    pids: set[int] = set()
    assert read(mesh, 2) == read(mesh, 0) == read(shared_mesh({"data": 2}), 0)
    assert len(pids) == 8
    mesh.run(lambda: None)
    assert until(lambda: not any(map(running, pids)))  # they go with their Loader


def test_stacks_of_ranks_that_wait(mesh: Mesh, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def wait_here() -> None:
        while mesh.rank == 3 and not go.exists():
            time.sleep(0.01)
        mesh.comm().barrier()

    mesh.run(lambda: mesh.comm().barrier())  # so that they have met
    thread = threading.Thread(target=mesh.run, args=(wait_here,))
    thread.start()
    try:
        assert until(lambda: "last waiting in barrier" in mesh.status()[0].doing, 20), mesh.status()
        assert until(lambda: "wait_here" in mesh.stacks().partition("rank 3: ")[2])
        assert until(lambda: "barrier" in mesh.stacks().partition("rank 1: ")[0])
    finally:
        go.touch()
        thread.join()


def test_restarted(mesh: Mesh) -> None:
    before = mesh.run(os.getpid)
    mesh.restart()
    assert not {*mesh.run(os.getpid)} & {*before}


@pytest.mark.parametrize("met", [False, True])
def test_breakpoint_on_another_host(tmp_path: Path, met: bool) -> None:
    """Its debugger is at the driver's terminal, and the other host waits past the timeout, if they have met or not."""
    program = STEP.replace('{"data": 2}', '{"data": 2}, hosts="local:2x1"').replace("lambda: 5", "os.getppid")
    if met:
        program = program.replace("breakpoint()", 'spmd.psum(x, "data"); breakpoint()')
    timeout = min(max(slowness(), 5.0), 10.0)  # all else that the ranks do is to take less, if cores are taken, too
    with at_terminal(script(tmp_path, program), SPMD_DEBUG_RANK="1", TIMEOUT=str(timeout)) as terminal:
        terminal.expect(r"total = spmd.psum.*\n\(Pdb rank 1\) ")
        terminal.type("p doubled, __import__('os').getppid()")
        host = terminal.expect(r"\(tensor\(6\.\), (\d+)\)\n\(Pdb rank 1\) ")[1]
        time.sleep(1.5 * timeout)  # rank 0 waits in the psum
        terminal.type("doubled = doubled + 1")
        terminal.expect(r"\(Pdb rank 1\) ")
        terminal.type("c")
        terminal.expect(r"result 14\.0\n")
        hosts = terminal.expect(r"after \[(\d+), (\d+)\]\n")
        assert hosts[1] != hosts[2] == host
        assert terminal.process.wait(HANGS) == 0
