"""How a process is started and ended on a host: by ssh, on this machine (which then stands for several hosts), by hand,
or by what a site already runs: `srun` in an allocation of Slurm, a placement group of a Ray cluster.

A *launcher* starts the per-host process. It is any object with `hosts`, a list of "name:ranks", and two methods:

    start(name, command, stdin) -> handle    run a command on the host of that name with this input, do not wait
    stop(handle)                             make sure that the command has ended

Invariant: what was taken from Slurm or Ray (steps, actors, the group) is given back when the mesh is closed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import shutil
import subprocess
import urllib.parse
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from ...kernels.errors import MeshError
from ...kernels.interrupts import uninterrupted
from ...kernels.network.authentication import code
from ..launch.meeting import show, tasks_per_node
from ..launch.secret import secret_of_user

_END_SECONDS = 5.0
_ALLOCATION = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")
_SECONDS = 60.0  # for an engine to answer


class Launcher(Protocol):
    """Starts and ends the processes of a mesh's hosts."""

    hosts: Sequence[str]

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> Any: ...
    def stop(self, handle: Any) -> None: ...


class LocalLauncher:
    """Simulated hosts on this machine: each is a process with its own shared memory."""

    def __init__(self, hosts: Sequence[str]):
        self.hosts = hosts

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> subprocess.Popen:
        return started(command, stdin)

    def stop(self, handle: subprocess.Popen) -> None:
        end(handle)


class SshLauncher(LocalLauncher):
    """Hosts that ssh reaches without asking for a password."""

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> subprocess.Popen:
        options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        return started(["ssh", *options, name, shlex.join(command)], stdin)


def started(command: Sequence[str], stdin: bytes) -> subprocess.Popen:
    """Start a process with this input, in its own session, so that Ctrl-C in this terminal does not reach it."""
    with uninterrupted():  # Ctrl-C would leave it to nobody, and waiting for its input
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which will be noticed
            process.stdin.write(stdin)
            process.stdin.flush()
        process.stdin.close()
        return process


def end(process: subprocess.Popen) -> None:
    """Wait a short while for a process to end with its connection to the driver; then kill it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    process.kill()
    process.wait()


class DialledHosts:
    """A launcher for hosts that are waiting already, "tcp://address:port:ranks": nothing is started there.

    Attributes:
        secret: the secret that both they and the driver prove to have.
    """

    def __init__(self, hosts: Sequence[str]):
        self.hosts, self.secret = hosts, secret_of_hosts()

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> None:
        """Do nothing: it is running already."""

    def stop(self, handle: None) -> None:
        """Do nothing: it ends with its connection."""


def secret_of_hosts() -> bytes:
    """The secret that a listening host and the driver that dials it prove to have, made from the job's secret."""
    found = secret_of_user()
    if not found.key:
        remedy = "set SPMD_SECRET, the same for the program and on all hosts"
        raise MeshError("a host that is dialled needs a secret", got=found.origin, remedy=remedy)
    return code(found.key, b"hosts")


def dialled_address(where: str) -> tuple[str, int] | None:
    """The address and port of "address:port", None if it is none.

    >>> dialled_address("10.0.0.5:7000"), dialled_address("[::1]:7000"), dialled_address("a"), dialled_address("a..b:1")
    (('10.0.0.5', 7000), ('::1', 7000), None, None)
    """
    try:
        found = urllib.parse.urlsplit(f"tcp://{where}")
        if not found.hostname or found.port is None or found.path:
            return None
        found.hostname.encode("idna")  # as for looking it up
        return found.hostname, found.port
    except ValueError:
        return None


class SlurmLauncher(LocalLauncher):
    """The nodes of the Slurm allocation that this program is in, with a step on each.

    Args:
        each: ranks of a node; None: the node's tasks in the allocation.
    """

    def __init__(self, each: int | None):
        self._job, nodes, tasks = (os.environ.get(name, "") for name in _ALLOCATION)
        if not self._job or not nodes or shutil.which("srun") is None:
            raise MeshError(
                'hosts="slurm" is for a program in an allocation of Slurm',
                got=f"{show(os.environ, *_ALLOCATION)}, {'' if shutil.which('srun') else 'no '}srun on the path",
                remedy="start it in one: salloc -N 2 --ntasks-per-node 8, or a script for sbatch",
            )
        command = ["scontrol", "show", "hostnames", nodes]
        names = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_SECONDS).stdout.split()
        counts = [each] * len(names) if each is not None else tasks_per_node(tasks)
        if len(counts) != len(names):
            raise MeshError(
                "it is not known how many ranks each node has",
                got=f"{len(names)} nodes, {show(os.environ, 'SLURM_TASKS_PER_NODE')}",
                remedy='give --ntasks-per-node to salloc or sbatch, or hosts="slurm:8"',
            )
        super().__init__([f"{name}:{count}" for name, count in zip(names, counts, strict=True)])

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> subprocess.Popen:
        where = [f"--jobid={self._job}", f"--nodelist={name}", "--nodes=1", "--ntasks=1"]
        return started(["srun", *where, "--overlap", "--cpu-bind=none", "--quiet", *command], stdin)


class RayLauncher:
    """The nodes of a Ray cluster: an actor on each, in one placement group, which exists while one of them runs.

    Args:
        each: ranks of a node; None: as many as it has processors.
    """

    def __init__(self, each: int | None):
        self._ray = ray = _ray()
        if not ray.is_initialized():
            ray.init(log_to_driver=True)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        nodes = [node for node in nodes if each is None or node["Resources"]["CPU"] >= each]
        if not nodes:
            raise MeshError(
                'hosts="ray" found no node', expected=f"nodes with {each or 1} processors", remedy="ray status"
            )
        seen: Counter[str] = Counter()
        self._counts: dict[str, int] = {}  # by the node's name
        for node in nodes:
            address = node["NodeManagerAddress"]
            seen[address] += 1
            name = address if seen[address] == 1 else f"{address}-{seen[address]}"  # several may be on one machine
            self._counts[name] = each or int(node["Resources"]["CPU"])
        self.hosts: Sequence[str] = [f"{name}:{count}" for name, count in self._counts.items()]
        self._group: Any = None
        self._actors: list[tuple[int, Any]] = []  # (index of the node, actor)

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> Any:
        ray, number = self._ray, list(self._counts).index(name)
        if self._group is None:
            bundles = [{"CPU": count} for count in self._counts.values()]
            self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
            try:
                ray.get(self._group.ready(), timeout=_SECONDS)
            except ray.exceptions.GetTimeoutError:
                raise OSError(f"the Ray cluster has no room for {self.hosts}: see ray status") from None
        within = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, number)
        # A replacement starts before the old actor has ended, on the same reserved processors.
        free = all(number != other for other, _ in self._actors)
        count = self._counts[name] if free else 0
        actor = ray.remote(num_cpus=count, scheduling_strategy=within)(_Process).remote(list(command), stdin)
        self._actors.append((number, actor))
        return actor

    def stop(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # its node may be gone
            self._ray.get(handle.wait.remote(), timeout=_SECONDS)
        self._ray.kill(handle)
        self._actors = [(number, actor) for number, actor in self._actors if actor is not handle]
        if not self._actors:
            self._ray.util.remove_placement_group(self._group)
            self._group = None


class _Process:
    """On a node of Ray: a command, which ends with its connection to the driver."""

    def __init__(self, command: list[str], stdin: bytes):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        self._process.stdin.write(stdin)
        self._process.stdin.close()

    def wait(self) -> None:
        end(self._process)


def _ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise MeshError('hosts="ray" needs Ray', remedy="pip install ray") from None
    return ray
