"""A model of cost, fitted to the scaling bench: time = latency(ranks) + bytes / bandwidth(ranks).

What a byte costs depends on where it lies (in which cache, or in memory). So the bytes of one operation are charged in
stretches, each at its own bandwidth, and time is a chain of straight lines over bytes. A small all-reduce has one phase
and a larger one two, so each kind has a latency and a chain of its own. For each number of ranks, latency and
bandwidths minimise the squared *relative* errors, and none is negative. The knees between stretches depend on how many
ranks share a cache; they are those measured sizes, at most three, that predict left-out points best.
Invariant: an error called unseen is that of a point which the straight lines were not fitted to.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.kernels.shm.slots import small_bytes

WORKS = ("all_reduce", "train_step")
Record = dict[str, Any]


def parts(size: float, knees: Sequence[float]) -> list[float]:
    """1, and how much of a size lies below the first knee, between the first and the second, and so on.

    >>> parts(100, [30, 60])
    [1.0, 30, 30, 40]
    """
    edges = [0, *knees, float("inf")]
    return [1.0, *(max(0, min(size, high) - low) for low, high in itertools.pairwise(edges))]


def fitted(sizes: Sequence[float], seconds: Sequence[float], knees: Sequence[float]) -> np.ndarray:
    """Latency, and seconds per unit of size in each part, none negative."""
    rows = np.array([[value / time for value in parts(size, knees)] for size, time in zip(sizes, seconds, strict=True)])
    # Columns differ by orders of magnitude.
    scale = np.maximum(np.abs(rows).max(0), 1e-300)
    rows, kept = rows / scale, list(range(rows.shape[1]))
    while True:
        solution = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
        if (solution >= 0).all() or len(kept) == 1:
            break
        del kept[int(solution.argmin())]
    found = np.zeros(rows.shape[1])
    found[kept] = np.maximum(solution, 0)
    return found / scale


def predicted(coefficients: np.ndarray, size: float, knees: Sequence[float]) -> float:
    return float(coefficients @ np.array(parts(size, knees)))


# The size, by the number of ranks, above which an operation takes another path, and so has another latency.
WAYS: dict[str, Callable[[int], float] | None] = {"all_reduce": small_bytes, "train_step": None}
MOST_KNEES = 3


def add_fits(cases: list[Record]) -> dict[str, Any]:
    """Fit every kind of work; every case gets the fit's time for it as "predicted".

    Returns:
        By kind of work `ways`, a list of `{"by_ranks": {ranks: {"above", "knees", "coefficients": [latency, seconds per
        unit of size in each stretch]}}}`; and relative errors: of the fit, and of points left out of it, one at a time.
    """
    fits = {}
    for work in WORKS:
        points = [case for case in cases if case["work"] == work]
        if not points:
            continue
        edge = WAYS[work] or (lambda ranks: 0.0)
        small = [case for case in points if case["size"] <= edge(case["ranks"])]
        large = [case for case in points if case["size"] > edge(case["ranks"])]
        ways = [_fit_way(mine, above) for mine, above in ((small, lambda ranks: 0.0), (large, edge)) if mine]
        errors = [abs(case["predicted"] / case["median"] - 1) for case in points]
        unseen = [error for way in ways for error in way.pop("unseen")]
        fits[work] = {
            "ways": ways,
            "median_error": statistics.median(errors),
            "largest_error": max(errors),
            "median_unseen": statistics.median(unseen) if unseen else None,
            "largest_unseen": max(unseen, default=None),
        }
    return fits


def _fit_way(points: list[Record], above: Callable[[int], float]) -> Record:
    """The fit of operations that all take one path: for each number of ranks, with the knees that fit it best."""
    found, unseen = {}, []
    for ranks in sorted({case["ranks"] for case in points}):
        group = [case for case in points if case["ranks"] == ranks]
        sizes, seconds = [case["size"] for case in group], [case["median"] for case in group]
        choices = (
            knees for count in range(MOST_KNEES + 1) for knees in itertools.combinations(sorted(sizes)[1:-1], count)
        )
        errors, knees = min(
            ((_unseen(sizes, seconds, knees), knees) for knees in choices),
            key=lambda each: _score(each[0]),
        )
        unseen += errors
        solution = fitted(sizes, seconds, knees)
        found[str(ranks)] = {"above": above(ranks), "knees": list(knees), "coefficients": solution.tolist()}
        for case in group:
            case["predicted"] = predicted(solution, case["size"], knees)
    return {"by_ranks": found, "unseen": unseen}


def _score(errors: Sequence[float]) -> float:
    """The mean square, rounded, so that among near equals the first wins, which has the fewest knees."""
    return round(statistics.fmean(error**2 for error in errors), 9) if errors else 0.0


def _unseen(sizes: Sequence[float], seconds: Sequence[float], knees: Sequence[float]) -> list[float]:
    """Relative errors of points between the smallest and the largest, each left out of the fit in turn."""
    errors = []
    for left_out in range(1, len(sizes) - 1):
        keep = [index for index in range(len(sizes)) if index != left_out]
        solution = fitted([sizes[index] for index in keep], [seconds[index] for index in keep], knees)
        errors.append(abs(predicted(solution, sizes[left_out], knees) / seconds[left_out] - 1))
    return errors


def predicted_for(fit: Record, ranks: int, size: float) -> float:
    """Seconds, by one of the fits that `add_fits` gave."""
    own = [way["by_ranks"][str(ranks)] for way in fit["ways"] if size > way["by_ranks"][str(ranks)]["above"]][-1]
    return predicted(np.array(own["coefficients"]), size, own["knees"])
