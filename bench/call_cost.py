"""What a call that computes nothing costs from a driver, in this checkout and in another one, by ranks and leaves.

    python bench/call_cost.py ../before/.venv/bin/python [--ranks 1 2 4]
    python bench/call_cost.py --profile 40   # where the time of a call with 40 leaves goes, in the driver and on rank 0

The argument is the Python in which the other checkout is installed for editing; both take turns, a process each time.
Prints microseconds per call: on the clock, and of the driver's and of the busiest rank's processor time. Each is the
least of a process's rounds, and the median over processes; the ratios are of processor times, which other programs
disturb least. A call is "answered" if its number is fetched, and "in flight" if nothing is; a tree goes in and comes
out, as it is or with new tensors.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from call_sides import Calls

LEAVES = (4, 40, 400)
RANKS = (1, 2, 4)
ROUNDS = 5  # within a process
SHOWN = 28  # lines of a profile


def cases(side: Calls) -> dict[str, Callable[[], Any]]:
    found = {
        "no-op, answered": side.no_op({"answered": True}, None),
        "no-op, in flight": side.no_op({"answered": False}, None),
        "captures 200 tensors, in flight": side.capturing({}, 100),
    }
    for leaves in LEAVES:
        for kind, options in {"the same": {}, "new": {"made": True}}.items():
            for how in ("fetched", "in flight"):
                step = side.tree({**options, "fetched": how == "fetched"}, leaves)
                found[f"{leaves} leaves, {kind}, {how}"] = step
    return found


def measure() -> dict[str, list[float]]:
    """For each case, the microseconds of the clock, of the driver and of the busiest rank."""
    torch.set_num_threads(1)
    side, found = Calls(0, 1, ""), {}
    for label, step in cases(side).items():
        for _ in range(20):
            step()
        began = time.perf_counter()
        for _ in range(10):
            step()
        calls = max(10, min(200, int(0.5 / (time.perf_counter() - began))))
        rounds = [_round(side, step, calls) for _ in range(ROUNDS)]
        found[label] = [min(each) for each in zip(*rounds, strict=True)]
    side.mesh.close()
    return found


def _round(side: Calls, step: Callable[[], Any], calls: int) -> list[float]:
    before = [time.perf_counter(), time.process_time(), *side.mesh.run(time.process_time)]
    for _ in range(calls):
        step()
    each = side.mesh.run(time.process_time)
    after = [time.perf_counter(), time.process_time(), *each]
    wall, driver, *ranks = (1e6 * (b - a) / calls for a, b in zip(before, after, strict=True))
    return [wall, driver, max(ranks)]


def compare(python: str, ranks: int, turns: int) -> None:
    pythons = {"other": os.path.abspath(python), "this": sys.executable}
    found: dict[str, list[dict[str, list[float]]]] = {which: [] for which in pythons}
    for _ in range(turns):
        for which, path in pythons.items():
            environ = os.environ | {"SPMD_RANKS": str(ranks)}
            command = [path, str(Path(__file__).resolve()), "--measure"]
            done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
            found[which].append(json.loads(done.stdout))
    for label in found["this"][0]:
        medians = {
            which: [statistics.median(each) for each in zip(*(one[label] for one in runs), strict=True)]
            for which, runs in found.items()
        }
        shown = "".join("{:9.0f}{:7.0f}{:6.0f}  ".format(*medians[which]) for which in pythons)
        ratios = [a / b for a, b in zip(medians["other"], medians["this"], strict=True)]
        print(f"{ranks:5}  {label:32}{shown}{ratios[1]:10.2f}{ratios[2]:7.2f}", flush=True)


def profile(leaves: int, ranks: int, calls: int = 300) -> None:
    """The driver's functions and those of rank 0 by their own time, in microseconds a call."""
    os.environ["SPMD_RANKS"] = str(ranks)
    torch.set_num_threads(1)
    side = Calls(0, 1, "")
    for made in (False, True):
        step = side.tree({"fetched": True, "made": made}, leaves)
        for _ in range(20):
            step()
        here = cProfile.Profile()
        here.enable()
        for _ in range(calls):
            step()
        here.disable()
        side.mesh.run(_begin, ranks=[0])
        for _ in range(calls):
            step()
        there = side.mesh.run(_end, calls, ranks=[0])[0]
        kind = "new" if made else "as they are"
        print(f"-- {leaves} leaves, {kind}: the driver\n{_shown(here, calls)}\n-- the same: rank 0\n{there}")
    side.mesh.close()


def _begin() -> None:
    sys.call_cost = cProfile.Profile()  # type: ignore[attr-defined]  # where `_end` finds it
    sys.call_cost.enable()  # type: ignore[attr-defined]


def _end(calls: int) -> str:
    sys.call_cost.disable()  # type: ignore[attr-defined]
    return _shown(sys.call_cost, calls)  # type: ignore[attr-defined]


def _shown(found: cProfile.Profile, calls: int) -> str:
    entries = sorted(pstats.Stats(found, stream=io.StringIO()).stats.items(), key=lambda entry: -entry[1][2])  # type: ignore[attr-defined]
    lines = [f"{'own us':>8}{'all us':>8}{'times':>7}  where"]
    for (file, line, name), (_, times, own, whole, _) in entries[:SHOWN]:
        where = f"{'/'.join(file.split('/')[-3:])}:{line} {name}"
        lines.append(f"{1e6 * own / calls:8.1f}{1e6 * whole / calls:8.1f}{times / calls:7.1f}  {where}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="?")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--profile", type=int, metavar="LEAVES")
    parser.add_argument("--measure", action="store_true", help="this checkout alone, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
    elif options.profile is not None:
        profile(options.profile, options.ranks[0])
    elif options.python is None:
        parser.error("which other checkout?")
    else:
        print(f"{os.cpu_count()} cores, torch {torch.__version__}, {options.turns} turns; microseconds of a call")
        print(f"{'':39}{'other: clock, driver, rank':24}{'this: clock, driver, rank':24}  other / this: driver, rank")
        for ranks in options.ranks:
            compare(options.python, ranks, options.turns)


if __name__ == "__main__":
    main()
