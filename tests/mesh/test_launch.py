"""One training script, unchanged, in every way of starting it: plain torch's losses, and nothing left behind."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import BARE
from patience import HANGS, until
from training import SCRIPT, sequential

# How a script is started, and whether it is given as a file or on standard input.
WAYS: dict[str, tuple[list[str], bool]] = {
    "python": ([], True),
    "python -": (["-"], False),
    "python -i": (["-i", "-q"], False),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], True),
    "spmd run -n 2": (["-m", "spmd", "run", "-n", "2"], True),
    "spmd run -n 1": (["-m", "spmd", "run", "-n", "1"], True),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "train.py"
    path.write_text(SCRIPT)
    return path


def start(options: list[str], script: Path, *, as_file: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python and wait for it, with a mark in its environment by which its descendants are found."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    done = subprocess.run(
        [sys.executable, *options, *([str(script)] if as_file else [])],
        input=None if as_file else typed(script.read_text()),
        cwd=script.parent,
        env={**BARE, "SPMD_RANKS": "2", "LAUNCH_TEST": mark},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert until(lambda: not marked(mark), 2), f"still alive after {options}: {marked(mark)}"
    return done


def marked(mark: str) -> list[int]:
    """The living processes whose environment has the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"LAUNCH_TEST={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def typed(source: str) -> str:
    """A script as it would be typed at the prompt, where an empty line ends a block."""
    return re.sub(r"(\n +\S.*)(?=\n\S)", r"\1\n", re.sub(r"\n\n+", "\n", source)) + "\n"


def losses_of(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "losses" in line]
    assert len(lines) == 1, done.stdout
    return [float(word) for word in lines[0].partition("losses")[2].split()]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    with torch.random.fork_rng():
        return sequential()


@pytest.fixture(scope="module")
def losses(script: Path) -> Callable[[str], list[float]]:
    """The losses of a way; it is gone once, however many tests ask."""

    @functools.cache
    def of(way: str) -> list[float]:
        options, as_file = WAYS[way]
        return losses_of(start(options, script, as_file=as_file))

    return of


def elsewhere(*ways: str) -> Any:
    """Ways that other tests go, too, so that this one may wait for `make test-long`."""
    return pytest.param(*ways, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "way", [pytest.param(way) if way in ("python", "python -") else elsewhere(way) for way in WAYS]
)
def test_same_losses(way: str, losses: Callable[[str], list[float]], expected: list[float]) -> None:
    assert losses(way) == pytest.approx(expected, abs=1e-5, rel=0)


@pytest.mark.parametrize(("way", "other"), [("python", "python -"), elsewhere("torchrun", "spmd run -n 2")])
def test_two_runs_on_two_ranks_have_the_same_bits(way: str, other: str, losses: Callable[[str], list[float]]) -> None:
    assert losses(way) == losses(other)


def test_failing_script_gives_its_status(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text("import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)\n")
    done = start(["-m", "spmd", "run", "-n", "2"], script)
    assert done.returncode == 7
    assert "failing.py FAILED" in done.stderr
    assert "Traceback" not in done.stderr
