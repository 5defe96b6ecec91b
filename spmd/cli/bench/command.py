"""`spmd bench`: a minute of measuring on the user's own machine, or on the ranks of the job that it is part of.

On one machine every contender has processes of its own. In a launched job ours and Gloo share the processes that the
job has, since nothing else says where its hosts are; the table says which it was.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Mapping
from typing import Any

from ...kernels.processes import cores
from .groups import Group, in_turn, quartiles

SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
MODEL = "spmd.cli.bench.contenders:mlp_1k"
SHARDED = {"shard": "data", "fused": True, "donate": True}
# work -> name -> (side, options)
ALL_REDUCE: dict[str, tuple[str, dict[str, Any]]] = {
    "ours, arena": ("ours", {}),
    "ours, any tensor": ("ours", {"kind": "any"}),
    "gloo": ("gloo", {}),
}
TRAIN_STEP: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("ours", {}),
    "ours, best flags": ("ours", SHARDED),
    "ddp": ("gloo", {"foreach": True}),
    "ddp, fused": ("gloo", {"fused": True}),
}
# Measures one case: (work, case, contenders) -> seconds per step of each.
Measure = Callable[[str, Any, Mapping[str, tuple[str, dict]]], dict[str, list[float]]]


def main(arguments: list[str]) -> int:
    """Run `spmd bench` with these arguments; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="spmd bench",
        description="All-reduces and a train step of this library, of torch's Gloo and of DDP, measured in turn.",
        epilog="In a launched job (spmd run -n 4 -m spmd bench) it measures the job's own ranks.",
    )
    parser.add_argument("-n", type=int, default=max(2, cores()), metavar="N", help="ranks (default: this host's cores)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each contender (default: 12)")
    given = parser.parse_args(arguments)
    if given.n < 1 or given.rounds < 1:
        parser.error("-n and --rounds are at least 1")

    from ...mesh.launch.rendezvous import launch_of_process

    launch = launch_of_process()
    if launch is None:
        with (
            Group("spmd.cli.bench.contenders:Ours", given.n) as ours,
            Group("spmd.cli.bench.contenders:Gloo", given.n) as gloo,
        ):
            sides = {"ours": ours, "gloo": gloo}

            def measure(work: str, case: Any, contenders: Mapping[str, tuple[str, dict]]) -> dict[str, list[float]]:
                turns = {name: (sides[side], name, options) for name, (side, options) in contenders.items()}
                return in_turn(turns, work, case, rounds=given.rounds, seconds=SECONDS[work])

            show(f"{given.n} ranks on {cores()} cores, each contender in processes of its own", measure)
        return 0

    from .within import Within

    within = Within(launch, given.rounds)
    where = f"{launch.size} ranks of this job (backend {within.backend}), ours and Gloo in the same processes"
    show(where, lambda *case: within.measure(*case, seconds=SECONDS[case[0]]), quiet=launch.rank != 0)
    within.close()
    return 0


SECONDS = {"all_reduce": 0.02, "train_step": 0.1}  # a turn


def show(where: str, measure: Measure, *, quiet: bool = False) -> None:
    """Measure, and print a table as it comes."""

    def say(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    import torch

    say(f"{where}\n{platform.machine()}, torch {torch.__version__}, one thread a rank")
    say("Medians [quartiles] of seconds per call, the slowest rank's; contenders in turn.\n")
    for work, cases, contenders in (("all_reduce", SIZES, ALL_REDUCE), ("train_step", (MODEL,), TRAIN_STEP)):
        for case in cases:
            found = {name: quartiles(samples) for name, samples in measure(work, case, contenders).items()}
            theirs = min(middle for name, (_, middle, _) in found.items() if not name.startswith("ours"))
            what = f"all-reduce {case:>9} B" if work == "all_reduce" else "step, MLP 784-1024-1024-10"
            for name, (low, middle, high) in found.items():
                ratio = f"{theirs / middle:6.1f}x" if name.startswith("ours") else ""
                spread = f"[{time_text(low)}, {time_text(high)}]"
                say(f"{what:<28}{name:<20}{time_text(middle):>9} {spread:<22}{ratio}".rstrip())
    say("\nnx: as many times as fast as the fastest of Gloo or DDP.")


def time_text(seconds: float) -> str:
    """A time with three digits and its unit.

    >>> time_text(2.5e-6), time_text(0.0123), time_text(3)
    ('2.5 us', '12.3 ms', '3 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
