"""Hosts of what a site already runs: a Slurm allocation, by `srun`, and a Ray cluster, by one placement group.

Invariant: what was taken of the engine (steps, actors, the group) is given back when the mesh is closed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...kernels.errors import MeshError, message
from ..launch.meeting import show, tasks_per_node
from .launchers import LocalLauncher, started

_ALLOCATION = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")
_SECONDS = 60.0  # for an engine to answer


class SlurmLauncher(LocalLauncher):
    """The nodes of the allocation that this program is in: a step on each.

    Args:
        each: ranks of a node; None: its tasks, as the allocation says.
    """

    def __init__(self, each: int | None, environ: Mapping[str, str] = os.environ):
        self._job, nodes, tasks = (environ.get(name, "") for name in _ALLOCATION)
        if not self._job or not nodes or shutil.which("srun") is None:
            raise MeshError(
                message(
                    'hosts="slurm" is for a program in an allocation of Slurm',
                    got=f"{show(environ, *_ALLOCATION)}, {'' if shutil.which('srun') else 'no '}srun on the path",
                    remedy="start it in one: salloc -N 2 --ntasks-per-node 8, or a script for sbatch",
                )
            )
        command = ["scontrol", "show", "hostnames", nodes]
        names = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_SECONDS).stdout.split()
        counts = [each] * len(names) if each is not None else tasks_per_node(tasks)
        if len(counts) != len(names):
            raise MeshError(
                message(
                    "it is not known how many ranks each node has",
                    got=f"{len(names)} nodes, {show(environ, 'SLURM_TASKS_PER_NODE')}",
                    remedy='give --ntasks-per-node to salloc or sbatch, or hosts="slurm:8"',
                )
            )
        super().__init__([f"{name}:{count}" for name, count in zip(names, counts, strict=True)])

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> subprocess.Popen:
        where = [f"--jobid={self._job}", f"--nodelist={name}", "--nodes=1", "--ntasks=1"]
        return started(["srun", *where, "--overlap", "--cpu-bind=none", "--quiet", *command], stdin)


class RayLauncher:
    """The nodes of a Ray cluster: an actor on each, in one placement group, which is there while one of them runs.

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
                message('hosts="ray" found no node', expected=f"nodes with {each or 1} processors", remedy="ray status")
            )
        seen: Counter[str] = Counter()
        self._names: list[str] = []
        self._counts: list[int] = []
        for node in nodes:
            address = node["NodeManagerAddress"]
            seen[address] += 1
            name = address if seen[address] == 1 else f"{address}-{seen[address]}"  # several may be on one machine
            self._names.append(name)
            self._counts.append(each or int(node["Resources"]["CPU"]))
        self.hosts: Sequence[str] = [f"{name}:{count}" for name, count in zip(self._names, self._counts, strict=True)]
        self._group: Any = None
        self._actors: list[tuple[int, Any]] = []  # and of which node

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> Any:
        ray, number = self._ray, self._names.index(name)
        if self._group is None:
            bundles = [{"CPU": count} for count in self._counts]
            self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
            try:
                ray.get(self._group.ready(), timeout=_SECONDS)
            except ray.exceptions.GetTimeoutError:
                raise OSError(f"the Ray cluster has no room for {self.hosts}: see ray status") from None
        within = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, number)
        # One that takes another's place begins before that has ended, on the processors that the group has reserved.
        free = all(number != other for other, _ in self._actors)
        count = self._counts[number] if free else 0
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
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise MeshError(message('hosts="ray" needs Ray', remedy="pip install ray")) from None
    return ray
