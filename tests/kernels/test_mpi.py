"""Backend "mpi": the suite of the communication layer under mpirun, and what is said where MPI is missing."""

from __future__ import annotations

import pickle
import re
import subprocess
from pathlib import Path

import operations_table as table
import pytest
from jobs import mpirun, needs_mpi
from scripts import run

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The suite on two ranks, which in the end fail on purpose: it takes long to start a job."""
    return mpirun(2, "mpi_suite.py", str(tmp_path_factory.mktemp("mpi") / "cells.pickle"), "fail")


@needs_mpi
def test_suite(two: subprocess.CompletedProcess[str]) -> None:
    counted = re.fullmatch(r"ok (\d+) checks\n", two.stdout)
    assert counted and int(counted[1]) > 40, two.stdout + two.stderr


@needs_mpi
@pytest.mark.long
def test_suite_on_three_ranks(tmp_path: Path) -> None:
    path = tmp_path / "cells.pickle"
    done = mpirun(table.RANKS, "mpi_suite.py", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.fullmatch(r"ok (\d+) checks\n", done.stdout)
    assert counted and int(counted[1]) > 40, done.stdout
    page = (HERE.parent / "docs" / "operations.md").read_text()
    section = table.section("mpi", pickle.loads(path.read_bytes()))
    assert "\n".join(section) in page, "make docs/operations.md again"


@needs_mpi
def test_a_failure_that_nobody_catches_ends_the_job(two: subprocess.CompletedProcess[str]) -> None:
    assert two.returncode
    assert "ZeroDivisionError: division by zero" in two.stderr


def run_alone(folder: Path, code: str, **environ: str) -> str:
    """A script of one launched rank that mpirun did not start: its error output."""
    told = {"SPMD_RANK": "0", "SPMD_SIZE": "1", "SPMD_INIT_METHOD": f"file://{folder}/meet", **environ}
    status, out, err = run("-c", code, without=("SPMD_", "OMPI_", "PMI"), env=told)
    assert status == 1, out + err
    return err


USE = "from spmd import Mesh; mesh = Mesh(backend='mpi', timeout=5); mesh.run(lambda: mesh.comm().barrier())"


def test_not_under_mpirun(tmp_path: Path) -> None:
    text = run_alone(tmp_path, USE)
    assert re.search("MeshError: backend 'mpi' needs a process that mpirun started.*run under mpirun", text)


def test_without_mpi4py(tmp_path: Path) -> None:
    hidden = f"import sys; sys.modules['mpi4py'] = None; {USE}"
    text = run_alone(tmp_path, hidden, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1")
    assert re.search(r"MeshError: backend 'mpi' needs mpi4py.*pip install spmd\[mpi\], and run under mpirun", text)


def test_listed_without_being_imported() -> None:
    code = (
        "import sys, spmd\n"
        "try: spmd.Mesh({'data': 1}, backend='none')\n"
        "except spmd.MeshError as error: print('mpi' in str(error), 'mpi4py' in sys.modules)\n"
    )
    assert run("-c", code)[1] == "True False\n"
