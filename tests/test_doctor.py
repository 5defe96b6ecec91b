"""`spmd doctor`: what it finds, why, and its exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_environments import KUBEFLOW, SALLOC
from test_mpi import mpirun, needs_mpi

from spmd import Mesh, _doctor
from spmd.__main__ import main
from spmd.kernels import arena

BARE = {name: text for name, text in os.environ.items() if not name.startswith(("SPMD_", "OMPI_", "PMI", "GLOO_"))}


def doctor(*launcher: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(launcher or ("-m", "spmd")), "doctor"]
    return subprocess.run(
        command, env={**BARE, "OMP_NUM_THREADS": "1", **environ}, capture_output=True, text=True, timeout=110
    )


def section(text: str, title: str) -> dict[str, str]:
    """The lines below a title: first word -> the rest."""
    body = text.partition(f"\n{title}\n")[2].partition("\n\n")[0]
    return {line.split()[0]: " ".join(line.split()[1:]) for line in body.splitlines()}


def test_alone() -> None:
    done = doctor(SPMD_RANKS="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("spmd ") and f"torch {torch.__version__}," in done.stdout
    assert section(done.stdout, "packages")["numpy"][0].isdigit()
    assert "cores for this process" in section(done.stdout, "devices")["cpu"]
    launched = section(done.stdout, "launched by")
    assert launched["torchrun"] == "no RANK and WORLD_SIZE are not set"
    assert launched["so"] == "a Mesh made here starts its own ranks: 3"
    assert section(done.stdout, "network")["lo"] == "127.0.0.1"
    assert section(done.stdout, "backend")["auto"].startswith("shm" if not arena.supported() else "gloo")
    transports = section(done.stdout, "transports")
    assert re.fullmatch(r"works 2 ranks, 4 MiB reduced in [\d.]+ ms", transports["gloo"])
    assert transports["shm"].split()[0] == ("absent:" if arena.supported() else "works")
    assert transports["mpi"].split()[0] in ("works", "absent")
    assert transports["nccl"].split()[0] in ("present:", "absent:")


def test_under_torchrun() -> None:
    done = doctor("-m", "spmd", "run", "-n", "2", "-m", "spmd")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("launched by") == 1  # rank 0 alone prints
    assert section(done.stdout, "launched by")["torchrun"] == "yes rank 0 of 2, local rank 0 of 2, meeting at env://"
    assert re.match(
        r"works \w+: 2 ranks, 4 MiB reduced in [\d.]+ ms \(2 on ", section(done.stdout, "transports")["auto"]
    )


@needs_mpi
def test_under_mpirun() -> None:
    done = mpirun(2, "-m", "spmd", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert section(done.stdout, "launched by")["so"] == "this process is rank 0 of 2, as openmpi says"


def test_a_contradiction_fails_and_names_the_variables() -> None:
    done = doctor(SPMD_RANK="3", SPMD_SIZE="2")
    assert done.returncode == 1
    assert "failed: the environment variables of spmd contradict each other" in done.stdout
    assert "SPMD_RANK='3', SPMD_SIZE='2'" in section(done.stdout, "launched by")["spmd"]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Transports that pass, or fail, without being tried."""
    for name in BARE.keys() ^ os.environ.keys():
        monkeypatch.delenv(name)
    monkeypatch.setattr(_doctor, "_mpi", lambda: ("absent", "mpirun is not on the PATH"))

    def failing(*names: str) -> None:
        def test(backend: str) -> str:
            if backend in names:
                raise TimeoutError(f"{backend} is silent\nand more")
            return "2 ranks"

        monkeypatch.setattr(_doctor, "_in_driver", test)

    return failing


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_needed_transport_that_fails(name: str, quiet: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    quiet(name)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert section(text, "transports")[name] == f"FAILS TimeoutError: {name} is silent"
    assert text.endswith(f"\nfailed: {name}\n")


def test_mpi_is_not_needed(quiet: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    quiet()
    monkeypatch.setattr(_doctor, "_mpi", lambda: ("FAILS", "no", "(not needed unless asked for)"))
    assert main(["doctor"]) == 0
    assert section(capsys.readouterr().out, "transports")["mpi"] == "FAILS no (not needed unless asked for)"


def test_without_shared_memory(
    quiet: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet("shm")
    monkeypatch.setattr(arena, "supported", lambda: "plain stores are not ordered between processes on riscv64")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert section(text, "backend")["auto"].startswith("gloo all ranks are on this host, and plain stores")
    assert section(text, "transports")["shm"].startswith("absent: plain stores")


def test_shells_that_look_like_ranks(
    quiet: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet()
    for name, text in {**SALLOC, **KUBEFLOW, "PET_NNODES": "2"}.items():
        monkeypatch.setenv(name, text)
    assert main(["doctor"]) == 0
    launched = section(capsys.readouterr().out, "launched by")
    assert launched["slurm"] == "no in a Slurm job, but in no step of it: start with srun"
    assert launched["kubeflow"].startswith("no PET_NNODES is set, so RANK may count nodes")


def test_a_wrong_sum_is_a_failure(monkeypatch: pytest.MonkeyPatch, make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh({"data": 2})
    assert _doctor.attempt(lambda: _doctor.reduce_once(mesh))[0]
    monkeypatch.setattr(mesh, "run", lambda body: [(3.0, 0.001), (2.5, 0.001)])
    works, text = _doctor.attempt(lambda: _doctor.reduce_once(mesh))
    assert not works and text == "MeshError: the sum is wrong: [3.0, 2.5] instead of 3.0"


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--fast"])
    assert caught.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "doctor" in capsys.readouterr().out


def test_readme_names_it() -> None:
    assert "spmd doctor" in (Path(__file__).parent.parent / "README.md").read_text()
