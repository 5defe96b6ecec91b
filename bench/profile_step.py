"""Where a train step's time goes on rank 0: a breakdown by part of the step, and cProfile's own table.

    spmd run -n 2 bench/profile_step.py mlp_1k
    spmd run -n 2 bench/profile_step.py encoder --shard data --fused --donate --steps 20

The breakdown adds up each function's own time, by the file that it is in; the time of C functions (a copy, a matmul,
autograd's backward) counts for the file that calls them. cProfile slows Python down and C not at all, so shares of
Python are upper bounds; the first line has the step's time without it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from pathlib import Path
from typing import Any

from spmd import Mesh
from spmd.cli.bench.contenders import ours_step

# The first entry whose text is in a file's path gives the part of the step that the file belongs to.
PARTS = (
    ("transforms/_backward", "forward and backward"),
    ("transforms/_linear_weights", "forward and backward"),
    ("cli/bench/contenders", "forward and backward"),
    ("torch/nn", "forward and backward"),
    ("torch/autograd", "forward and backward"),
    ("torch/optim", "optimizer"),
    ("spmd/optim", "optimizer"),
    ("kernels/bucket", "copies into buckets"),
    ("transforms/_sums", "copies into buckets"),
    ("kernels/", "reduction, and waiting for peers"),
    ("spmd/_functional", "functional call"),
    ("transforms/", "region, trees, transforms"),
    ("mesh/", "region, trees, transforms"),
    ("spmd/", "region, trees, transforms"),
    ("optree", "region, trees, transforms"),
)
Function = tuple[str, int, str]


def part_of(function: Function) -> str:
    path = function[0].replace("\\", "/")
    return next((part for text, part in PARTS if text in path), "the rest")


def breakdown(stats: pstats.Stats) -> dict[str, float]:
    """Seconds by part of the step; a C function's own time goes to its callers' parts."""
    seconds: dict[str, float] = {}
    for function, (_, _, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        shares = {function: own}
        if function[0] == "~" and callers:
            shares = {caller: times[2] for caller, times in callers.items()}
        for owner, share in shares.items():
            seconds[part_of(owner)] = seconds.get(part_of(owner), 0.0) + share
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1]))


def asked(parser: argparse.ArgumentParser, *, steps: int) -> tuple[argparse.Namespace, dict[str, Any], Mesh]:
    """What is to be profiled, from the command line: all arguments, those for `ours_step`, and the launched mesh."""
    parser.add_argument("model", help="a function of bench/models.py")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--shard", help="axis over which the optimizer's state is cut")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True)")
    parser.add_argument("--donate", action="store_true", help="donate parameters and state")
    given = parser.parse_args()
    flags = {name: value for name in ("shard", "fused", "donate") if (value := getattr(given, name))}
    mesh = Mesh(threads=1)
    if mesh.is_driver:
        parser.error(f"start it on ranks: spmd run -n 2 bench/{Path(sys.argv[0]).name} {given.model}")
    return given, flags, mesh


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile a train step on rank 0.")
    parser.add_argument("--lines", type=int, default=25, help="of cProfile's table")
    given, flags, mesh = asked(parser, steps=10)
    step, barrier = ours_step(mesh, f"models:{given.model}", **flags), mesh.comm().barrier
    for _ in range(3):
        step()
    barrier()
    start = time.perf_counter()
    for _ in range(given.steps):
        step()
    plain = (time.perf_counter() - start) / given.steps
    barrier()
    profile = cProfile.Profile()
    with profile:
        for _ in range(given.steps):
            step()
    if mesh.rank == 0:
        stats = pstats.Stats(profile)
        total = stats.total_tt / given.steps  # type: ignore[attr-defined]
        print(f"{given.model} {flags or ''}: {plain * 1e3:.2f} ms a step, {total * 1e3:.2f} ms under the profiler")
        for part, seconds in breakdown(stats).items():
            print(f"{part:<34}{seconds / given.steps * 1e3:9.3f} ms  {seconds / given.steps / total:6.1%}")
        stats.strip_dirs().sort_stats("tottime").print_stats(given.lines)


if __name__ == "__main__":
    main()
