"""docs/launching.md: its blocks start its script, and all ways give the same losses; ranks' lines stay whole."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import launchers
import pytest
import slurm
from fork_server import shared_server
from jobs import BARE
from patience import HANGS
from scripts import FORKED_CHILDREN, launched, run


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    environ = {**launchers.prepare(folder), "SPMD_RANKS": "1"}
    _, out, _ = run("train.py", cwd=folder, env=environ, without=["SPMD_", "PET_"])
    return list(map(float, out.split()[1:]))


@pytest.fixture(scope="module")
def own_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str] | None]:
    """A Slurm for all tests that want one; None where there can be none."""
    if slurm.missing() is not None:
        yield None
        return
    with slurm.slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


# `spmd run` on one host is in tests below, and of restarts and attacks; the other blocks say the same otherwise.
ALWAYS = ("torchrun", "mpirun")
LONG = [pytest.param(way, marks=pytest.mark.long) for way in launchers.WAYS if way not in ALWAYS]


@pytest.mark.parametrize("way", [*ALWAYS, *LONG])
def test_a_block_of_the_page(way: str, tmp_path: Path, expected: list[float], request: pytest.FixtureRequest) -> None:
    if reason := launchers.reason_against(way):
        pytest.skip(reason)
    running = request.getfixturevalue("own_slurm") if way == "srun" else None
    found = list(map(float, launchers.losses(way, tmp_path, running)))
    assert len(found) == 6
    assert found == pytest.approx(expected, abs=2e-5)


@pytest.mark.skipif(slurm.missing() is not None, reason="without a Slurm it stands in for the page's block")
def test_srun_replayed(tmp_path: Path, expected: list[float]) -> None:
    """What stands in where there is no Slurm."""
    text = launchers.replayed(tmp_path, launchers.prepare(tmp_path))
    assert list(map(float, text.split()[1:])) == pytest.approx(expected, abs=2e-5)


@pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))
def test_shells_of_slurm_are_no_ranks(tmp_path: Path, own_slurm: dict[str, str]) -> None:
    """A real batch script and a real allocation: the script drives ranks of its own; in a step it is a rank."""
    environ = {**launchers.prepare(tmp_path), "SPMD_RANKS": "1", **own_slurm}
    (tmp_path / "who.py").write_text("import spmd; mesh = spmd.Mesh(); print('rank', mesh.rank, 'of', mesh.size)\n")
    said = launchers.told(["salloc", "-n", "2", "python", "who.py"], tmp_path, environ)
    assert said == "rank None of 1\n"
    assert launchers.told(["srun", "-n", "1", "python", "who.py"], tmp_path, environ) == "rank 0 of 1\n"
    job = "#!/bin/bash\n#SBATCH --ntasks=2\npython who.py\nsrun python who.py | sort\n"
    assert launchers.submitted(job, tmp_path, environ) == "rank None of 1\nrank 0 of 2\nrank 1 of 2\n"


LINES = """
import sys
from spmd import Mesh
mesh = Mesh(timeout=30)
for number in range(2000):
    print("rank", mesh.rank, "line", number, "." * (number % 90), "end", file=sys.stderr if number % 2 else sys.stdout)
"""


@pytest.mark.parametrize("unbuffered", [False, True])
def test_lines_stay_whole(unbuffered: bool, tmp_path: Path) -> None:
    program = tmp_path / "lines.py"
    program.write_text(LINES)
    if unbuffered:
        code, out, _ = launched(2, str(program), without=["SPMD_"], stderr=subprocess.STDOUT)
    else:
        command = [sys.executable, "-m", "spmd", "run", "-n", "2", str(program)]
        environ = {name: text for name, text in {**BARE, **FORKED_CHILDREN}.items() if name != "PYTHONUNBUFFERED"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with shared_server().run(command, env=environ, **pipes) as agent:
            out, _ = agent.communicate(timeout=HANGS)
        code = agent.returncode
    assert code == 0, out
    lines = [line for line in out.splitlines() if "line" in line]
    assert len(lines) == 2 * 2000
    for line in lines:
        found = re.fullmatch(r"rank [01] line (\d+) (\.*) end", line)
        assert found and len(found[2]) == int(found[1]) % 90, line
