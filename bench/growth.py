"""How the time of a step from a driver grows with leaves, parameters and ranks, in this checkout and in another one.

    python bench/growth.py ../before/.venv/bin/python [--ranks 1 2 4]

The argument is as for `against.py`: both take turns in one run. A step's arithmetic is one sum and one update of every
leaf; its loss is fetched. Prints the medians, with plain torch's step of the same leaves in this process, and for each
number of ranks the model `a + b * leaves + c * parameters` with the least squared relative errors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from against import start
from torch import nn

from spmd.cli.bench.contenders import made, plain_step
from spmd.cli.bench.groups import in_turn

LEAVES = (4, 40, 400)
PARAMETERS = (4_000, 1_000_000)
RANKS = (1, 2, 4)
MODEL = "growth:many"


class Many(nn.Module):
    """Sums each of its parameters: as little arithmetic as possible."""

    def __init__(self, leaves: int, parameters: int):
        super().__init__()
        self.leaves = nn.ParameterList(torch.full((parameters // leaves,), 0.01) for _ in range(leaves))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.stack([leaf.sum() for leaf in self.leaves]).sum()


def many(leaves: int, parameters: int) -> Any:
    """So many leaves, of so many parameters together, with 8 samples."""
    torch.manual_seed(0)
    return Many(leaves, parameters), torch.randn(8, 4), torch.randint(0, 4, (8,))


def fitted(points: Sequence[tuple[int, int]], seconds: Sequence[float]) -> tuple[np.ndarray, float]:
    """a, b and c, none negative, and the largest relative error.

    >>> fitted([(1, 10), (2, 10), (2, 30)], [13.0, 15.0, 35.0])[0].round(6).tolist()
    [1.0, 2.0, 1.0]
    """
    rows = np.array([[1.0, leaves, parameters] for leaves, parameters in points]) / np.array(seconds)[:, None]
    kept = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0).all() or len(kept) == 1:
            break
        del kept[int(found.argmin())]
    solution = np.zeros(3)
    solution[kept] = found
    return solution, float(np.abs(rows @ solution - 1).max())


def plain_seconds(leaves: int, parameters: int) -> float:
    """The median of plain torch's step, fused, its loss fetched."""
    step, taken = plain_step(*made((MODEL, leaves, parameters)), fused=True), []
    for _ in range(20):
        began = time.perf_counter()
        float(step())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    points = [(leaves, parameters) for leaves in LEAVES for parameters in PARAMETERS]
    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}, {options.rounds} rounds; medians, microseconds of a step"
    )
    print(f"{'ranks':>5}{'leaves':>8}{'parameters':>12}{'plain':>10}{'other':>10}{'this':>10}{'other / this':>14}")
    for ranks in options.ranks:
        pythons = {"other": os.path.abspath(options.python), "this": sys.executable}
        groups = {which: start(python, "against_sides:Fetched", 1, ranks) for which, python in pythons.items()}
        medians: dict[str, list[float]] = {which: [] for which in groups}
        try:
            for leaves, parameters in points:
                turns = {which: (group, which, {}) for which, group in groups.items()}
                case = (MODEL, leaves, parameters)
                samples = in_turn(turns, "train_step", case, rounds=options.rounds, seconds=0.08)
                for which, taken in samples.items():
                    medians[which].append(1e6 * statistics.median(taken))
                other, this = (medians[which][-1] for which in ("other", "this"))
                shown = f"{1e6 * plain_seconds(leaves, parameters):10.0f}{other:10.0f}{this:10.0f}{other / this:14.2f}"
                print(f"{ranks:5}{leaves:8}{parameters:12}{shown}", flush=True)
        finally:
            for group in groups.values():
                group.close()
        for which, taken in medians.items():
            (a, b, c), error = fitted(points, taken)
            print(f"      {which}: {a:.0f} + {b:.1f} * leaves + {1e3 * c:.2f} * parameters / 1000, within {error:.0%}")


if __name__ == "__main__":
    main()
