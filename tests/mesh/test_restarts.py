"""Launchers that restart ranks, and that are killed."""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from fork_server import Forked, ForkServer
from patience import HANGS, end_within, until

JOB = """
import os, sys, time
import torch
from spmd import Mesh
mesh = Mesh(backend="gloo", timeout=60)
print(mesh.size, mesh.run(lambda: float(mesh.comm().all_reduced(torch.tensor(1.0)))), flush=True)
if os.environ["RANK"] == "0":
    open(sys.argv[1], "w").close()
    time.sleep(1000)
while not os.path.exists(sys.argv[1]):  # else the other could hear of the end before it has its result
    time.sleep(0.01)
os._exit(3)
"""


def start(server: ForkServer, store: dist.TCPStore, done: Path, rank: int, size: int, restarts: int) -> Forked:
    """A rank as an agent of torchrun's starts it, which keeps the store itself and counts its own restarts.

    Args:
        done: a file that rank 0 makes when it has its result; before that the other one does not end.
    """
    told = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "OMP_NUM_THREADS": 1,
    }
    return server.start(JOB, str(done), environ={**os.environ, **{name: str(text) for name, text in told.items()}})


def test_ranks_meet_again_whoever_was_restarted_how_often(server: ForkServer, tmp_path: Path) -> None:
    """A rank of one host dies, and its agent counts that; the other agent starts its own anew and counts nothing."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=HANGS), wait_for_workers=False
    )
    for life in range(3):
        done = tmp_path / str(life)
        first = start(server, store, done, 0, 2, 0)
        second = start(server, store, done, 1, 2, life)
        out, err = second.communicate()
        assert out == "2 [2.0, 2.0]\n", err
        first.kill()  # it waits as a rank does whose peer has died
        assert first.communicate()[0] == "2 [2.0, 2.0]\n"
    alone = start(server, store, tmp_path / "alone", 0, 1, 0)  # and the job may shrink
    assert until(lambda: "1 [1.0]\n" in alone.communicate_so_far())
    alone.kill()


SLEEPS = """
import os, sys, time
from pathlib import Path
from spmd import Mesh
mesh = Mesh(timeout=60)
mesh.run(lambda: 0)
(Path(sys.argv[1]) / str(os.getpid())).touch()
while True:
    mesh.run(lambda: time.sleep(0.01))
"""


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "spmd", "run"],
        pytest.param(
            ["mpirun", "--allow-run-as-root", "--oversubscribe"],
            marks=pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun"),
        ),
    ],
    ids=["spmd run", "mpirun"],
)
def test_ranks_end_with_their_launcher(server: ForkServer, tmp_path: Path, command: list[str]) -> None:
    """One that no other waits for."""
    script, pids = tmp_path / "job.py", tmp_path / "pids"
    script.write_text(SLEEPS)
    pids.mkdir()
    python = [sys.executable] if command[0] == "mpirun" else []
    begin = subprocess.Popen if python else server.run
    with begin([*command, "-n", "1", *python, str(script), str(pids)]) as launcher:
        try:
            end = time.monotonic() + HANGS
            while not list(pids.iterdir()):
                assert launcher.poll() is None and time.monotonic() < end
                time.sleep(0.05)
        finally:
            launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    assert end_within(1.0, [int(path.name) for path in pids.iterdir()])
