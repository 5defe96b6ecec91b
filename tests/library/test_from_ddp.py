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

DOCS = Path(__file__).parents[2] / "docs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command: list[str], folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """What a script prints, and the weights that it saves."""
    folder.mkdir()
    environment = {**os.environ, "SPMD_RANKS": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, torch.load(folder / "model.pt")


@pytest.mark.timeout(600)
def test_the_same_losses_and_weights(tmp_path: Path) -> None:
    ddp, ours = (str(DOCS / "ddp" / name) for name in ("train_ddp.py", "train_spmd.py"))
    printed, weights = run([*TORCHRUN, ddp], tmp_path / "ddp")
    assert printed in (DOCS / "from_ddp.md").read_text()
    for way, command in {"driver": [sys.executable, ours], "launched": [*TORCHRUN, ours]}.items():
        ours_printed, ours_weights = run(command, tmp_path / way)
        assert ours_printed == printed, way
        for name, value in weights.items():
            torch.testing.assert_close(ours_weights[name], value)


def test_the_page_shows_the_difference() -> None:
    before, after = ((DOCS / "ddp" / name).read_text().splitlines() for name in ("train_ddp.py", "train_spmd.py"))
    difference = "\n".join(difflib.unified_diff(before, after, "train_ddp.py", "train_spmd.py", n=1, lineterm=""))
    shown = re.search(r"```diff\n(.*?)\n```", (DOCS / "from_ddp.md").read_text(), re.S)
    assert shown is not None and shown[1] == difference
