"""What checking results costs: steps with `check="first"`, the default, against `check="never"`, in turn in one run.

    python bench/check_cost.py [ranks] > bench/results/check_cost.txt

Each round has some steps of both kinds, in an order that changes from round to round; the ratio is the median of the
rounds' own ratios, with their quartiles.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from spmd import Mesh, data_parallel, functional, optimizer, put, spmd, value_and_grad

MODELS = {
    "20-64-5, batch 256": (lambda: [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)], 20, 5, 256, 40),
    "MLP 784-1024-1024-10, batch 256": (
        lambda: [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)],
        *(784, 10, 256, 5),
    ),
}
ROUNDS = 40


def main(ranks: int = 2) -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {ranks} ranks, {ROUNDS} rounds")
    with Mesh({"data": ranks}) as mesh:
        for name, (layers, width, classes, samples, steps) in MODELS.items():
            apply, params = functional(nn.Sequential(*layers()))
            opt = optimizer(torch.optim.AdamW, lr=1e-3)

            def loss_fn(params, batch, apply=apply):
                return F.cross_entropy(apply(params, batch[0]), batch[1])

            def step(params, state, batch, loss_fn=loss_fn, opt=opt):
                loss, grads = value_and_grad(loss_fn)(params, batch)
                params, state = opt.step(params, grads, state)
                return params, state, loss

            batch = (torch.randn(samples, width), torch.randint(classes, (samples,)))
            kinds = {kind: spmd(data_parallel(step), mesh=mesh, check=kind) for kind in ("first", "never")}
            values = {kind: put((params, opt.init(params)), mesh=mesh) for kind in kinds}
            seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
            for number in range(ROUNDS + 3):
                for kind in sorted(kinds, reverse=bool(number % 2)):
                    began = time.perf_counter()
                    for _ in range(steps):
                        *values[kind], loss = kinds[kind](*values[kind], batch)
                    float(loss)
                    if number >= 3:
                        seconds[kind].append((time.perf_counter() - began) / steps)
            ratios = [a / b for a, b in zip(seconds["first"], seconds["never"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            first, never = (1e3 * statistics.median(seconds[kind]) for kind in ("first", "never"))
            print(f"{name:32} {first:8.3f} ms {never:8.3f} ms  {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
