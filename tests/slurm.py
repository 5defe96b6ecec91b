"""A Slurm on this machine, with one node or several pretended ones: the real `srun`, `salloc` and `sbatch`.

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
from ports import free_port

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
SlurmdSpoolDir={folder}/spool%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={controller}
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    absent = [name for name in ("srun", "sbatch", "slurmctld", "slurmd") if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return None if os.geteuid() == 0 else "starting Slurm's daemons needs root"


@contextlib.contextmanager
def slurm(folder: Path, nodes: int = 1) -> Iterator[dict[str, str]]:
    """Start it, and give the environment for `srun` and the other commands.

    Args:
        nodes: how many; if there are several they are called node1 and so on.

    Raises:
        RuntimeError: it did not come up within 15 s.
    """
    host = socket.gethostname().partition(".")[0]
    names = [f"node{number}" for number in range(1, nodes + 1)] if nodes > 1 else [host]
    for name in ("state", *(f"spool{name}" for name in names)):
        (folder / name).mkdir()
    controller, *ports = (free_port() for _ in range(nodes + 1))
    lines = [
        f"NodeName={name} NodeHostname={host} Port={port} CPUs=8 State=UNKNOWN"
        for name, port in zip(names, ports, strict=True)
    ]
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, folder=folder, controller=controller, nodes="\n".join(lines)))
    environ = {"SLURM_CONF": str(config)}
    started = []
    try:
        daemons = [["slurmd", "-D", "-N", name] for name in names]
        for number, command in enumerate([["slurmctld", "-D", "-i"], *daemons]):
            with open(folder / f"{number}.log", "wb") as log:
                started.append(
                    subprocess.Popen([*command, "-f", str(config)], stdout=log, stderr=subprocess.STDOUT, env=None)
                )
        end = time.monotonic() + HANGS
        while _ask("sinfo", "--noheader", "--Node", "--format=%T", environ=environ).split() != [b"idle"] * nodes:
            if time.monotonic() > end:
                raise RuntimeError("".join(path.read_text()[-500:] for path in folder.glob("*.log")))
            time.sleep(0.2)
        yield environ
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(HANGS)


def _ask(*command: str, environ: dict[str, str]) -> bytes:
    done = subprocess.run(command, capture_output=True, env={**os.environ, **environ}, timeout=HANGS)
    return done.stdout
