"""The programs in notebooks/ run, and check themselves."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import scripts

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
BY_HAND = [
    "tensor_parallel",
    "ring_attention",
    "pipeline",
    "parameter_server",
    "remote_pipeline",
    "replay_buffer",
]


def run(script: Path, *launcher: str, **environ: str) -> str:
    """What a script prints, run from its own folder."""
    status, out, err = scripts.run(*launcher, str(script), env=environ, cwd=script.parent)
    assert status == 0, out + err
    return out


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the programs print, one after another in one process: most of their time goes into importing torch."""
    programs = tmp_path_factory.mktemp("by_hand") / "programs.py"
    programs.write_text(
        f"import runpy\nfor name in {BY_HAND}:\n"
        "    print('program', name, flush=True)\n"
        f"    runpy.run_path(f'{NOTEBOOKS}/{{name}}.py', run_name='__main__')\n"
    )
    return run(programs)


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str, by_hand: str) -> None:
    assert "agree" in by_hand.partition(f"program {name}\n")[2].partition("program ")[0], by_hand


@pytest.mark.long
def test_by_hand_launched() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    assert "gradients agree" in run(NOTEBOOKS / "tensor_parallel.py", *launcher)


def test_digits(tmp_path: Path) -> None:
    for name in ("digits.py", "digits_plot.py"):
        shutil.copy(NOTEBOOKS / name, tmp_path / name)
    printed = run(tmp_path / "digits.py", SPMD_RANKS="2")
    accuracy = re.search(r"test accuracy ([\d.]+)", printed)
    assert accuracy and float(accuracy[1]) >= 0.97, printed
    assert f"picture: {tmp_path / 'digits.png'}" in printed
    assert (tmp_path / "digits.png").stat().st_size > 10_000
