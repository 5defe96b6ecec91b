"""What it costs an undisturbed step that its ranks may die: `on_loss="rerun"` beside "raise", in turns.

    python bench/survival_cost.py [--rounds 40] [--ranks 2]

Two meshes train the same model, some steps each in turn, whose order changes every round; one waits for every step's
loss. Prints the median step of each, and the median over rounds of their ratio, with its quartiles. Two meshes with
"raise" say how far two equals are apart.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from spmd import Mesh, data_parallel, functional, optimizer, spmd, value_and_grad

STEPS = 10  # of each in a round
MODELS = {
    "4 leaves, 0.26 M parameters": lambda: nn.Sequential(nn.Linear(16, 1200), nn.ReLU(), nn.Linear(1200, 200)),
    "12 leaves, 5 M parameters": lambda: nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(912, 912), nn.ReLU()))
    ),
}


def stepper(mesh: Mesh, module: nn.Module) -> Callable[[], float]:
    """Does `STEPS` steps; the seconds of one."""
    apply, params = functional(module)
    opt = optimizer(torch.optim.AdamW, lr=1e-4)
    state = opt.init(params)
    wide = next(module.parameters()).shape[1]
    batch = torch.randn(64, wide)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, state, batch):
        loss, grads = value_and_grad(lambda p, b: F.mse_loss(apply(p, b).sum(1), b.sum(1)))(params, batch)
        params, state = opt.step(params, grads, state)
        return params, state, loss

    def some() -> float:
        nonlocal params, state
        began = time.perf_counter()
        for _ in range(STEPS):
            params, state, loss = step(params, state, batch)
            float(loss)
        return (time.perf_counter() - began) / STEPS

    return some


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.release()}, torch {torch.__version__}, {options.ranks} ranks")
    print(f"{'model':<32}{'raise ms':>10}{'rerun ms':>10}{'rerun / raise':>26}{'raise / raise':>26}")
    for name, make in MODELS.items():
        kinds = ("raise", "rerun", "raise")
        meshes = [Mesh({"data": options.ranks}, on_loss=kind) for kind in kinds]
        steppers = [stepper(mesh, make()) for mesh in meshes]
        times: list[list[float]] = [[], [], []]
        for turn in range(options.rounds + 2):
            for which in (0, 1, 2) if turn % 2 else (2, 1, 0):
                seconds = steppers[which]()
                if turn >= 2:
                    times[which].append(seconds)
        for mesh in meshes:
            mesh.close()
        first, rerun, second = times
        both = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
        middle = [f"{1e3 * statistics.median(each):.2f}" for each in (both, rerun)]
        print(
            f"{name:<32}{middle[0]:>10}{middle[1]:>10}{_ratio(rerun, both):>26}{_ratio(second, first):>26}", flush=True
        )


def _ratio(above: list[float], below: list[float]) -> str:
    low, middle, high = statistics.quantiles([one / other for one, other in zip(above, below, strict=True)], n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
