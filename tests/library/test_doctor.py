"""`spmd doctor`: what it finds, why, and its exit status."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch
from jobs import mpirun, needs_mpi, section
from patience import HANGS
from scripts import run

# The program, with time for a slow machine.
PATIENT = f"""
import runpy, internals
internals.doctor_waits({HANGS})
runpy.run_module("spmd", run_name="__main__", alter_sys=True)
"""
SHARED = platform.machine() in ("x86_64", "AMD64")  # elsewhere plain stores are not trusted


def doctor(*launcher: str, **environ: str) -> tuple[int, str, str]:
    command = (*(launcher or ("-m", "spmd")), "doctor")
    return run(*command, env=environ, without=("SPMD_", "OMPI_", "PMI", "GLOO_"))


def test_alone() -> None:
    status, out, err = doctor("-c", PATIENT, SPMD_RANKS="3")
    assert status == 0, out + err
    assert out.startswith("spmd ") and f"torch {torch.__version__}," in out
    assert section(out, "packages")["numpy"][0].isdigit()
    assert "cores for this process" in section(out, "devices")["cpu"]
    launched = section(out, "launched by")
    assert launched["torchrun"] == "no RANK and WORLD_SIZE are not set"
    assert launched["so"] == "a Mesh made here starts its own ranks: 3"
    assert section(out, "network")["lo"] == "127.0.0.1"
    assert section(out, "backend")["auto"].startswith("shm" if SHARED else "gloo")
    transports = section(out, "transports")
    assert re.fullmatch(r"works 2 ranks, 4 MiB reduced in [\d.]+ ms", transports["gloo"])
    assert transports["shm"].split()[0] == ("works" if SHARED else "absent:")
    assert transports["mpi"].split()[0] in ("works", "absent")
    assert transports["nccl"].split()[0] in ("present:", "absent:")


@pytest.mark.long
def test_under_torchrun() -> None:
    status, out, err = doctor("-m", "spmd", "run", "-n", "2", "-m", "spmd")
    assert status == 0, out + err
    assert out.count("launched by") == 1  # rank 0 alone prints
    # `spmd run` on one host has its ranks meet in a file.
    assert re.fullmatch(
        "yes rank 0 of 2, local rank 0 of 2, meeting at file:///.*", section(out, "launched by")["torchrun"]
    )
    assert re.match(r"works \w+: 2 ranks, 4 MiB reduced in [\d.]+ ms \(2 on ", section(out, "transports")["auto"])


@needs_mpi
@pytest.mark.long
def test_under_mpirun() -> None:
    done = mpirun(2, "-m", "spmd", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert section(done.stdout, "launched by")["so"] == "this process is rank 0 of 2, as openmpi says"


def test_a_contradiction_fails_and_names_the_variables() -> None:
    status, out, _ = doctor(SPMD_RANK="3", SPMD_SIZE="2")
    assert status == 1
    assert "failed: the environment variables of spmd contradict each other" in out
    assert "SPMD_RANK='3', SPMD_SIZE='2'" in section(out, "launched by")["spmd"]


def test_readme_names_it() -> None:
    assert "spmd doctor" in (Path(__file__).parents[2] / "README.md").read_text()
