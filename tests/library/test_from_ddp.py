"""docs/from_ddp.md: a script with DistributedDataParallel and its port do the same; the page shows how they differ."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ports import free_port

DOCS = Path(__file__).parents[2] / "docs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


ENVIRON = {**os.environ, "SPMD_RANKS": "2", "OMP_NUM_THREADS": "1"}


def run(command: list[str], folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """What a script prints, and the weights that it saves."""
    folder.mkdir()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    return done.stdout, torch.load(folder / "model.pt")


def run_torchs(script: Path, folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """The same of a script that runs on torch alone, which is judged by that, however its ranks end.

    Now and then one of them is aborted at its exit ("terminate called without an active exception"), with which
    torchrun ends the others, too.
    """
    folder.mkdir()
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONUNBUFFERED": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENVIRON, **store, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        (printed, errors), (_, others_errors) = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert (folder / "model.pt").exists(), errors + others_errors
    return printed, torch.load(folder / "model.pt")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_same_losses_and_weights(tmp_path: Path) -> None:
    ours = str(DOCS / "ddp" / "train_spmd.py")
    printed, weights = run_torchs(DOCS / "ddp" / "train_ddp.py", tmp_path / "ddp")
    assert printed in (DOCS / "from_ddp.md").read_text() and printed.count("loss") == 2
    for way, command in {"driver": [sys.executable, ours], "launched": [*TORCHRUN, ours]}.items():
        ours_printed, ours_weights = run(command, tmp_path / way)
        assert ours_printed == printed, way
        for name, value in weights.items():
            torch.testing.assert_close(ours_weights[name], value)


@pytest.mark.long
def test_a_rank_of_torchs_script_that_is_aborted_at_its_exit(tmp_path: Path) -> None:
    text = (DOCS / "ddp" / "train_ddp.py").read_text()
    aborted = tmp_path / "aborted.py"
    aborted.write_text(f"{text}if rank == 1:\n    __import__('os').abort()\n")
    printed, weights = run_torchs(aborted, tmp_path / "ddp")
    assert printed in (DOCS / "from_ddp.md").read_text() and printed.count("loss") == 2 and len(weights) == 4


def test_the_page_shows_the_difference() -> None:
    before, after = ((DOCS / "ddp" / name).read_text().splitlines() for name in ("train_ddp.py", "train_spmd.py"))
    difference = "\n".join(difflib.unified_diff(before, after, "train_ddp.py", "train_spmd.py", n=1, lineterm=""))
    shown = re.search(r"```diff\n(.*?)\n```", (DOCS / "from_ddp.md").read_text(), re.S)
    assert shown is not None and shown[1] == difference
