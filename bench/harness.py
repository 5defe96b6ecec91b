"""What all suites share: the contenders' groups, started when first asked for, and a measurement of one case.

A case is one piece of work that several contenders do in turn (an all-reduce of a size, a step of a model).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.cli.bench.groups import Group, in_turn, quartiles
from spmd.mesh.rank.environment import environment

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """One way of doing a case's work.

    Args:
        name: its name in the tables.
        peer: the group of processes that does it, one of those in `start`.
        options: for the side's method.
    """

    name: str
    peer: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def missing(peer: str) -> str | None:
    """Why a peer can't be measured here; None if it can."""
    needs = {"open mpi": ("mpi4py", "mpirun"), "jax": ("jax", None)}.get(peer)
    if needs is None:
        return None
    module, program = needs
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if program is not None and shutil.which(program) is None:
        return f"there is no {program}"
    return None


def start(peer: str, ranks: int) -> Group:
    """The processes of a peer."""
    launched = {"environ": environment({})}  # as `spmd run` does
    side, size, options = {
        "ours": ("spmd.cli.bench.contenders:Ours", ranks, launched),
        "ours beside plain": ("peers:OursAndPlain", ranks, launched),
        "driver": ("peers:FromDriver", 1, {"environ": {"SPMD_RANKS": str(ranks)}}),
        "programs": ("peers:Programs", 1, {"environ": {"SPMD_RANKS": str(ranks)}}),
        "collectives": ("peers:Collectives", 1, {"environ": {"SPMD_RANKS": str(ranks)}}),
        "floor": ("peers:Floor", ranks, launched),
        "gloo": ("spmd.cli.bench.contenders:Gloo", ranks, {}),
        "plain": ("peers:Plain", 1, {}),
        "plain thread": ("peers:PlainThread", 1, {}),
        "open mpi": (
            "peers:OpenMpi",
            ranks,
            {"launcher": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks))},
        ),
        "jax": (
            "jax_peer:Jax",
            1,
            {"environ": {"XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}", "JAX_PLATFORMS": "cpu"}},
        ),
    }[peer]
    return Group(side, size, path=HERE, **options)


class Groups:
    """Groups by (peer, ranks). They idle, blocked in a read, until their turn."""

    def __init__(self) -> None:
        self._started: dict[tuple[str, int], Group] = {}

    def get(self, peer: str, ranks: int) -> Group:
        if (peer, ranks) not in self._started:
            self._started[peer, ranks] = start(peer, ranks)
        return self._started[peer, ranks]

    def close(self) -> None:
        while self._started:
            self._started.popitem()[1].close()

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def measure(
    groups: Groups,
    contenders: Sequence[Contender],
    work: str,
    case: Any,
    *,
    ranks: int,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """Measure one case: its record, as the results' JSON has it.

    Returns:
        `{"work", "case", "ranks", "missing": {contender: why}, "seconds": {contender: samples},
        "quartiles": {contender: [lower, median, upper]}}`, in seconds per step.
    """
    without = {c.name: why for c in contenders if (why := missing(c.peer)) is not None}
    present = [c for c in contenders if c.name not in without]
    for each in present:  # start all before waiting for the first
        groups.get(each.peer, ranks)
    turns = {c.name: (groups.get(c.peer, ranks), c.name, c.options) for c in present}
    samples = in_turn(turns, work, case, rounds=rounds, seconds=seconds)
    return {
        "work": work,
        "case": case,
        "ranks": ranks,
        "missing": without,
        "seconds": samples,
        "quartiles": {name: quartiles(values) for name, values in samples.items()},
    }
