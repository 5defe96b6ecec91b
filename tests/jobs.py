"""What launchers leave in the environment, or none of it, and a real mpirun."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANGS


def environ_without(*prefixes: str) -> dict[str, str]:
    """This process's environment without the variables that begin with these prefixes."""
    return {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}


# As in a shell in which nothing was launched. Each process chooses its own number of threads.
BARE = environ_without("SPMD_", "PET_", "OMP_NUM_THREADS")

SALLOC = {  # a shell inside an allocation: no step
    "SLURM_JOB_ID": "8652",
    "SLURM_JOB_NODELIST": "node[003-007,9],gpu1",
    "SLURM_JOB_NUM_NODES": "7",
    "SLURM_NNODES": "7",
    "SLURM_NPROCS": "14",
    "SLURM_NTASKS": "14",
    "SLURM_TASKS_PER_NODE": "2(x7)",
}

KUBEFLOW = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PYTHONUNBUFFERED": "0",
    "RANK": "2",
    "WORLD_SIZE": "3",
}

needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py",
)


def mpirun(ranks: int, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python on so many ranks, whatever the number of cores and whoever the user (as containers have it)."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["mpirun", "--oversubscribe", "-np", str(ranks), sys.executable, *arguments],
        env={**environ_without("SPMD_", "OMPI_", "PMI"), **allowed, **environ},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )


def section(text: str, title: str) -> dict[str, str]:
    """The lines that `spmd doctor` printed below a title: first word -> the rest."""
    body = text.partition(f"\n{title}\n")[2].partition("\n\n")[0]
    return {line.split()[0]: " ".join(line.split()[1:]) for line in body.splitlines()}
