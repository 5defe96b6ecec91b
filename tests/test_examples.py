"""The programs in notebooks/ run, and check themselves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def run(script: Path, *launcher: str, **environ: str) -> str:
    """What a script prints, run from its own folder."""
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["tensor_parallel", "ring_attention", "pipeline"])
def test_by_hand(name: str) -> None:
    assert "agree" in run(NOTEBOOKS / f"{name}.py")


def test_by_hand_launched() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    assert "gradients agree" in run(NOTEBOOKS / "tensor_parallel.py", *launcher)


def test_digits(tmp_path: Path) -> None:
    for name in ("digits.py", "digits_plot.py"):
        shutil.copy(NOTEBOOKS / name, tmp_path / name)
    printed = run(tmp_path / "digits.py", SPMD_RANKS="2")
    accuracy = re.search(r"test accuracy ([\d.]+)", printed)
    assert accuracy and float(accuracy[1]) >= 0.97, printed
    assert (tmp_path / "digits.png").stat().st_size > 10_000
