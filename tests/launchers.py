"""One script under every launcher: its losses side by side.

    python tests/launchers.py

The script and the commands are the blocks of docs/launching.md, word for word but for host names; mpirun gets the
options that a small machine and root need. Slurm is a real one, started for this (see slurm.py); without one, its
environment is replayed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import slurm
from patience import HANGS

PAGE = Path(__file__).parent.parent / "docs" / "launching.md"
BARE = {name: text for name, text in os.environ.items() if not re.match(r"SPMD_|PET_|OMPI_|PMI|SLURM_|MASTER_", name)}


def blocks(kind: str) -> list[str]:
    """The page's blocks of a kind: "bash", "python", ..."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def name_of(block: str) -> str:
    """The launcher with which a block starts the script."""
    known = ("srun", "spmd run -n 2 --nnodes", "spmd run", "torchrun", "mpirun", "SPMD_RANK=1", "SPMD_RANKS=2 python")
    return next(name for name in known if name in block)


WAYS = {name_of(block): block for block in blocks("bash")}


def reason_against(way: str) -> str | None:
    """Why it can't be tried here, or None."""
    if way == "mpirun" and shutil.which("mpirun") is None:
        return "mpirun is not installed"
    return None


def prepare(folder: Path) -> dict[str, str]:
    """Put train.py and this environment's commands where the blocks find them; returns the blocks' environment."""
    (folder / "train.py").write_text(blocks("python")[0])
    commands = folder / "bin"
    commands.mkdir()
    for name, text in {
        "python": f'exec {sys.executable} "$@"',
        "spmd": f'exec {sys.executable} -m spmd "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "mpirun": f'exec {shutil.which("mpirun")} --allow-run-as-root --oversubscribe "$@"',
    }.items():
        path = commands / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {**BARE, "PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def losses(way: str, folder: Path, running: dict[str, str] | None = None) -> list[str]:
    """Run a block, in the Slurm `running` if there is one; returns the losses, which rank 0 alone printed."""
    environ, block = prepare(folder), WAYS[way]
    if way == "srun":
        if running is not None:
            text = submitted(block, folder, {**environ, **running})
        else:
            text = under_slurm(block, folder, environ) if slurm.missing() is None else replayed(folder, environ)
    else:
        if "--nnodes" in way:  # two agents on this host: one in the background
            lines = [line.partition("#")[0].replace("host0", "127.0.0.1") for line in block.splitlines()]
            block = f"{lines[1]} &\n{lines[0]}\nwait"
        text = told(["bash", "-ec", block], folder, environ)
    lines = re.findall(r"^losses (.*)$", text, re.MULTILINE)
    assert len(lines) == 1, text
    return lines[0].split()


def told(command: list[str], folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def under_slurm(block: str, folder: Path, environ: dict[str, str]) -> str:
    """Submit the block, wait for the job to end, and return what it printed."""
    (folder / "slurm").mkdir()
    with slurm.slurm(folder / "slurm") as own:
        return submitted(block, folder, {**environ, **own})


def submitted(job: str, folder: Path, environ: dict[str, str]) -> str:
    # A file tells when the job ends: `sbatch --wait` only asks every few seconds.
    (folder / "job.sh").write_text(f"{job}\necho $? > status.new; mv status.new status\n")
    (folder / "status").unlink(missing_ok=True)
    told(["sbatch", "--output=job.out", "job.sh"], folder, environ)
    end = time.monotonic() + HANGS
    while not (folder / "status").exists():
        assert time.monotonic() < end, "the job does not end"
        time.sleep(0.05)
    text = (folder / "job.out").read_text()
    assert (folder / "status").read_text() == "0\n", text
    return text


def replayed(folder: Path, environ: dict[str, str]) -> str:
    """What srun would set for two tasks on this host."""
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    ranks = "\n".join(f"SLURM_PROCID={rank} SLURM_LOCALID={rank} python train.py &" for rank in (1, 0))
    return told(["bash", "-ec", f"{ranks}\nwait"], folder, {**environ, **step, "SLURM_STEP_TASKS_PER_NODE": "2"})


def main() -> None:
    found = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            against = reason_against(way)
            found[way] = [against] if against else losses(way, Path(folder))
    replay = "" if slurm.missing() is None else f" (replayed: {slurm.missing()})"
    for way, curve in found.items():
        print(f"{way + (replay if way == 'srun' else ''):<28} {'  '.join(curve)}")


if __name__ == "__main__":
    main()
