"""A model of cost, fitted to the scaling bench: time = latency(ranks) + bytes / bandwidth(ranks).

What a byte costs depends on where it lies (in which cache, or in memory), so that the bytes of one operation are
charged in stretches, each at its own bandwidth, and time is a chain of straight lines over bytes. A small all-reduce
has one phase and a larger one two, so each kind has a latency and a chain of its own. For each number of ranks latency
and bandwidths are those that make the squared *relative* errors smallest, none of them negative. Caches are shared, so
the knees between stretches lie where the bytes of all ranks together reach a size: of the sizes measured those, two at
most, that predict left-out points best.
Invariant: an error called unseen is that of a point which the straight lines were not fitted to.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.kernels.communicator import ONE_PHASE_BYTES

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


# From which size on an operation is done in another way, and so has another latency.
WAYS: dict[str, tuple[float, ...]] = {"all_reduce": (ONE_PHASE_BYTES,), "train_step": ()}
MOST_KNEES = 2


def add_fits(cases: list[Record]) -> dict[str, Any]:
    """Fit every kind of work; every case gets what the fit says of it, as "predicted".

    Returns:
        By kind of work `ways`, a list of `{"above", "knees", "coefficients": {ranks: [latency, seconds per unit of size
        in each stretch]}}`; and relative errors: of the fit, and of points left out of it, one at a time.
    """
    fits = {}
    for work in WORKS:
        points = [case for case in cases if case["work"] == work]
        if not points:
            continue
        ways = []
        for low, high in itertools.pairwise((0.0, *WAYS[work], math.inf)):
            mine = [case for case in points if low < case["size"] <= high]
            if mine:
                ways.append({"above": low, **_fit_way(mine)})
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


def _fit_way(points: list[Record]) -> Record:
    """The fit of operations that are all done in one way, with the knees that serve them best."""
    groups = [[case for case in points if case["ranks"] == n] for n in sorted({case["ranks"] for case in points})]
    inner = sorted({case["size"] * case["ranks"] for case in points if case["ranks"] in (1, 2)})[1:-1]
    found: list[tuple[float, list[float], tuple[float, ...]]] = []
    for count in range(MOST_KNEES + 1):
        for knees in itertools.combinations(inner, count):
            unseen = [error for group in groups for error in _unseen(group, knees)]
            found.append((statistics.fmean(e**2 for e in unseen) if unseen else 0.0, unseen, knees))
    _, unseen, knees = min(found, key=lambda each: each[0])
    coefficients = {}
    for group in groups:
        own = [knee / group[0]["ranks"] for knee in knees]
        solution = fitted([case["size"] for case in group], [case["median"] for case in group], own)
        coefficients[str(group[0]["ranks"])] = solution.tolist()
        for case in group:
            case["predicted"] = predicted(solution, case["size"], own)
    return {"knees": list(knees), "coefficients": coefficients, "unseen": unseen}


def _unseen(group: list[Record], knees: Sequence[float]) -> list[float]:
    """Relative errors of points between the smallest and the largest, each left out of the fit in turn."""
    errors, own = [], [knee / group[0]["ranks"] for knee in knees]
    for number in range(1, len(group) - 1):
        others = group[:number] + group[number + 1 :]
        solution = fitted([case["size"] for case in others], [case["median"] for case in others], own)
        errors.append(abs(predicted(solution, group[number]["size"], own) / group[number]["median"] - 1))
    return errors


def predicted_for(fit: Record, ranks: int, size: float) -> float:
    """Seconds, by one of the fits that `add_fits` gave."""
    way = [way for way in fit["ways"] if size > way["above"]][-1]
    return predicted(np.array(way["coefficients"][str(ranks)]), size, [knee / ranks for knee in way["knees"]])
