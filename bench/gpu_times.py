"""How long something takes on a GPU. Invariant: every time is that of finished work, never of launching it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[], Any]
# CUDA queues about a thousand launches; at the next one the host waits, and its time would be measured.
QUEUE = 512


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartile1": low, "quartile3": high}


def failure(error: Exception) -> dict[str, str]:
    """An error as the result of the contender that raised it."""
    return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def on_gpu(run: Run, launches: int = 1, samples: int = 15) -> list[float]:
    """Samples of the seconds that the GPU needs for one run, without those that the host needs to launch it.

    The launches of a sample are queued behind a kernel that only waits, and run back to back between two events.

    Args:
        launches: the most that one run makes; with many, a sample has fewer runs, so that they fit CUDA's queue.
    """
    repeats = max(1, min(20, QUEUE // launches))
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(repeats):
        run()
    to_launch = time.perf_counter() - before
    found = []
    for _ in range(samples):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2e9 * (2 * to_launch + 1e-3)))  # cycles, of which no GPU has more than 2e9 a second
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / repeats)
    return found


def wall(run: Run, samples: int, repeats: int = 3) -> list[float]:
    """Seconds on the clock for one run, several times over; each sample ends when the GPU has finished."""
    found = []
    for _ in range(samples):
        finish()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        finish()
        found.append((time.perf_counter() - start) / repeats)
    return found


def finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
