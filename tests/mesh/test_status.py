"""`mesh.status()` and `spmd top`: what every rank does just now."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from patience import HANGS, until

from spmd import Mesh


def doing(mesh: Mesh) -> list[str]:
    return [one.doing for one in mesh.status()]


def test_every_rank_has_a_row(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})
    pids, before = mesh.run(os.getpid), [one.calls for one in mesh.status()]
    mesh.run(lambda: None)
    status = mesh.status()
    assert [(one.rank, one.pid, one.doing) for one in status] == [(0, pids[0], "idle"), (1, pids[1], "idle")]
    assert [one.calls for one in status] == [count + 1 for count in before]
    assert all(one.memory > 1 << 20 and one.host for one in status)
    head, *rows = str(status).splitlines()
    assert head.split() == ["rank", "host", "pid", "memory", "calls", "doing"] and len(rows) == 2
    assert all(f">{pid}</td>" in status._repr_html_() for pid in pids)


def test_what_ranks_do(shared_mesh: Callable[..., Mesh], tmp_path: Path) -> None:
    mesh = shared_mesh({"data": 2})
    go = tmp_path / "go"

    def wait() -> None:
        assert until(go.exists)

    def meet() -> None:
        if mesh.rank == 1:
            wait()
        mesh.comm().barrier()

    alone = mesh.submit(wait, rank=1)
    assert until(lambda: doing(mesh)[1] == "in a function that runs on it alone") and doing(mesh)[0] == "idle"
    shown = subprocess.run(
        [sys.executable, "-m", "spmd", "top", "--once"], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS
    )
    mine = shown.stdout.partition(f"of process {os.getpid()}\n")[2]
    assert "in a function that runs on it alone" in mine, shown
    go.touch()
    alone.result()
    go.unlink()
    thread = threading.Thread(target=mesh.run, args=(meet,))
    thread.start()
    try:
        assert until(lambda: "last waiting in barrier" in doing(mesh)[0]), doing(mesh)
        assert until(lambda: doing(mesh)[1].endswith("in no collective yet"))
    finally:
        go.touch()
        thread.join()
    assert doing(mesh) == ["idle", "idle"]


def test_a_rank_sees_its_host(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})
    seen = mesh.run(lambda: [(one.rank, one.doing.startswith("in call")) for one in mesh.status()])
    assert seen[0][0] == (0, True) and seen[1][1] == (1, True)
