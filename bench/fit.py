"""A model of cost, fitted to the scaling bench: time = latency(ranks) + bytes / bandwidth(ranks, where they lie).

For each number of ranks the latency and the bandwidths are those that make the squared *relative* errors smallest,
none of them negative. Bandwidth differs by where the bytes lie (within a small all-reduce's one phase, in the caches,
in memory), so that time is a chain of straight lines over bytes, each part of the bytes at its own speed.
Invariant: an error that is reported as predicted is that of a point which the fit did not see.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

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
