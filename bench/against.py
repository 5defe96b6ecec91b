"""This checkout against another one of the library, such as the commit before a change, in turns of one run.

    python bench/against.py ../before/.venv/bin/python [--only calls] [--rounds 15]

The argument is the Python in which the other checkout is installed for editing. For each case, prints the median and
the quartiles of both times, and of the rounds' ratios: the other's time divided by this one's, so below 1 this one is
slower.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spmd.cli.bench.groups import Group, in_turn, quartiles
from spmd.mesh.rank.environment import environment

HERE = Path(__file__).parent
BEST = {"shard": "data", "fused": True, "donate": True}
PLAIN = {"shard": None, "fused": False}
SIZES = (4, 1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 24, 1 << 26)
MODELS = ("mlp_1k", "mlp_4k", "encoder", "cnn")
# What: (side, processes, ranks, work, [(label, options, case)], seconds of a turn)
SUITES: dict[str, tuple[str, int, int, str, list[tuple[str, dict, Any]], float]] = {
    "calls": (
        "against_sides:Calls",
        1,
        4,
        "no_op",
        [("no-op, answered", {"answered": True}, None), ("no-op, in flight", {"answered": False}, None)],
        0.08,
    ),
    "small": (
        "against_sides:Fetched",
        1,
        2,
        "train_step",
        [
            *((f"{name}, {label}", flags, f"against_sides:{name}") for name in ("readme", "leaves_200")
              for label, flags in (("defaults", {}), ("best flags", BEST))),
        ],
        0.12,
    ),
    "all_reduce": (
        "{bench}.contenders:Ours",
        2,
        2,
        "all_reduce",
        [(f"{size} B, {kind}", {"kind": kind}, size) for size in SIZES for kind in ("any", "given up")],
        0.04,
    ),
    "steps": (
        "{bench}.contenders:Ours",
        2,
        2,
        "train_step",
        [(f"{model}, {label}", flags, f"models:{model}") for model in MODELS
         for label, flags in (("defaults", {}), ("plain", PLAIN), ("best flags", BEST))],
        0.2,
    ),
}  # fmt: skip


def bench_package(python: str) -> str:
    """The package in which a checkout has what runs in the processes of a bench."""
    code = (
        "import importlib.util as u; n = 'spmd.cli'; "
        "print('spmd.cli.bench' if u.find_spec(n) and u.find_spec(n + '.bench') else 'spmd._bench')"
    )
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout.strip()


def start(python: str, side: str, size: int, ranks: int) -> Group:
    package = bench_package(python)
    folder = Path(python).parents[2] / "bench"  # of .venv/bin/python, which is a link
    environ = environment({}) if size > 1 else {"SPMD_RANKS": str(ranks)}
    return Group(
        side.format(bench=package),
        size,
        environ=environ,
        path=os.pathsep.join([str(folder), str(HERE)]),
        worker=("env", "-C", str(folder), python, "-m", f"{package}.worker"),  # which it imports from first
    )


def compare(pythons: Mapping[str, str], name: str, which_cases: str, rounds: int) -> None:
    """Print a line for every case of a suite."""
    side, size, ranks, work, cases, seconds = SUITES[name]
    groups = {which: start(python, side, size, ranks) for which, python in pythons.items()}
    try:
        for label, options, case in cases:
            if which_cases not in label:
                continue
            turns = {which: (group, which, options) for which, group in groups.items()}
            samples = in_turn(turns, work, case, rounds=rounds, seconds=seconds)
            print(line(f"{work} {label}", samples["other"], samples["this"]), flush=True)
    finally:
        for group in groups.values():
            group.close()


def line(label: str, other: Sequence[float], this: Sequence[float]) -> str:
    ratio = quartiles([a / b for a, b in zip(other, this, strict=True)])
    shown = ["{1:10.1f} ({0:.1f} to {2:.1f})".format(*(1e6 * t for t in quartiles(of))) for of in (other, this)]
    return f"{label:<36}{shown[0]:<34}{shown[1]:<34}{ratio[1]:5.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--only", choices=SUITES, action="append", default=None)
    parser.add_argument("--case", default="", help="cases with this in their names alone")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    pythons = {"other": os.path.abspath(options.python), "this": sys.executable}
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {options.rounds} rounds; microseconds of a step")
    print(f"{'':<36}{'other':<34}{'this':<34}other / this")
    for name in options.only or SUITES:
        compare(pythons, name, options.case, options.rounds)


if __name__ == "__main__":
    main()
