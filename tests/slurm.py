"""A Slurm of one node on this machine, for as long as it is needed: the real `srun` and `sbatch`.

Needs the programs (Debian: slurmd, slurmctld) and root. It listens on ports of its own, asks for no keys, and counts
on no cores: jobs get what they ask for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from patience import HANGS

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={controller}
SlurmdPort={daemon}
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
NodeName={host} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    absent = [name for name in ("srun", "sbatch", "slurmctld", "slurmd") if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return None if os.geteuid() == 0 else "starting Slurm's daemons needs root"


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start it: the environment for `srun` and the others.

    Raises:
        RuntimeError: it did not come up within 15 s.
    """
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with socket.socket() as first, socket.socket() as second:
        first.bind(("", 0))
        second.bind(("", 0))
        ports = {"controller": first.getsockname()[1], "daemon": second.getsockname()[1]}
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, folder=folder, **ports))
    environ = {"SLURM_CONF": str(config)}
    started = []
    try:
        for command in (["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            with open(folder / f"{command[0]}.log", "wb") as log:
                started.append(
                    subprocess.Popen([*command, "-f", str(config)], stdout=log, stderr=subprocess.STDOUT, env=None)
                )
        end = time.monotonic() + HANGS
        while b"idle" not in _ask("sinfo", "--noheader", "--format=%T", environ=environ):
            if time.monotonic() > end:
                raise RuntimeError("".join(path.read_text()[-500:] for path in folder.glob("*.log")))
            time.sleep(0.2)
        yield environ
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(20)


def _ask(*command: str, environ: dict[str, str]) -> bytes:
    done = subprocess.run(command, capture_output=True, env={**os.environ, **environ}, timeout=HANGS)
    return done.stdout
