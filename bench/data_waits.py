"""Does a step wait for its batch where batches are read faster than it trains?

    python bench/data_waits.py > bench/results/data_waits.txt

One rank trains on one core and leaves the other to the reader. Each sample takes a while to read, as from a disk or
over a network, in the rank itself or in a worker beside it. Prints the time of a step of the loop divided by that of a
step on a batch that is there, medians of the same run: 1.00 is no wait.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from spmd import Loader, Mesh, data_parallel, functional, optimizer, spmd, value_and_grad

BATCH, STEPS, ROUNDS = 32, 30, 5
PARTS = (0.1, 0.25, 0.5, 0.75, 0.9)  # the time to read a rank's part of a batch, as a part of a step's time


class Slow(Dataset):
    """Samples that each take so many seconds."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((512,), float(index))


def main() -> None:
    mesh = Mesh({"data": 1}, threads=1)
    apply, params = functional(
        nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 1))
    )
    opt = optimizer(torch.optim.AdamW, lr=1e-4)
    state: Any = (params, opt.init(params))

    @spmd(mesh=mesh)
    @data_parallel
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(lambda params, x: apply(params, x).square().mean())(params, batch)
        return *opt.step(params, grads, opt_state), loss

    def trained(batches: Any) -> float:
        """Seconds of a step, the median, each with its loss read."""
        nonlocal state
        times, began = [], time.perf_counter()
        for batch in batches:
            *state, loss = step(*state, batch)
            float(loss)
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
        return statistics.median(times[3:])

    there = next(iter(Loader(Slow(0.0), BATCH, mesh=mesh)))
    trained([there] * STEPS)
    alone = statistics.median(trained([there] * STEPS) for _ in range(ROUNDS))
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; a step alone {1e3 * alone:.1f} ms")
    print(f"{'reading, of a step':>20}{'no worker':>12}{'one worker':>18}")
    for part in PARTS:
        seconds = part * alone / (BATCH / mesh.size)
        row = f"{part:>20}"
        for workers, width in ((0, 12), (1, 18)):
            ratios = []
            for _ in range(ROUNDS):  # in turns
                slow = trained(Loader(Slow(seconds), BATCH, mesh=mesh, workers=workers))
                ratios.append(slow / trained([there] * STEPS))
            row += f"{statistics.median(ratios):>{width}.2f}"
        print(row, flush=True)
    mesh.close()


if __name__ == "__main__":
    main()
