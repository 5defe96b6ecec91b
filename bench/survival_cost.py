"""What survival costs an undisturbed step: `on_loss="rerun"` beside "raise", in turns.

    python bench/survival_cost.py [--rounds 40] [--ranks 2]
    python bench/survival_cost.py --copies [--rounds 20]    # surviving a host's death: Mesh(copies=1) beside 0

Meshes train the same model, some steps each in turn, in an order that changes every round; every step's loss is waited
for. Prints the median step of each, and the median over rounds of their ratio, with its quartiles. Two meshes with the
same setting show how far two equals are apart. Copies are of AdamW's state, cut over all ranks of two hosts on this
machine (`hosts="local:2x2"`): they go over loopback, and compete with the steps for the cores. With --copies a host is
then killed in the middle of steps, a few times: printed are the seconds until the next `STEPS` are done, beyond what
they take undisturbed, mostly for a new process that imports torch.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from spmd import Mesh, data_parallel, functional, optimizer, spmd, value_and_grad

STEPS = 10  # of each in a round
KILLS = 5
MODELS = {
    "4 leaves, 0.26 M parameters": lambda: nn.Sequential(nn.Linear(16, 1200), nn.ReLU(), nn.Linear(1200, 200)),
    "12 leaves, 5 M parameters": lambda: nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(912, 912), nn.ReLU()))
    ),
}


def stepper(mesh: Mesh, module: nn.Module, shard: str) -> Callable[[], float]:
    """A function that does `STEPS` steps and returns the seconds of one."""
    apply, params = functional(module)
    opt = optimizer(torch.optim.AdamW, lr=1e-4, shard=shard)
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
    parser.add_argument("--copies", action="store_true")
    options = parser.parse_args()
    plain, other, size = ("copies=0", "copies=1", 4) if options.copies else ("raise", "rerun", options.ranks)
    print(f"{os.cpu_count()} cores, {platform.release()}, torch {torch.__version__}, {size} ranks")
    ratio, equals = f"{other} / {plain}", f"{plain} / {plain}"
    print(f"{'model':<32}{plain + ' ms':>14}{other + ' ms':>14}{ratio:>26}{equals:>26}")
    for name, make in MODELS.items():
        if options.copies:
            meshes = [Mesh({"data": size}, hosts="local:2x2", copies=copies) for copies in (0, 1, 0)]
        else:
            meshes = [Mesh({"data": size}, on_loss=kind) for kind in (plain, other, plain)]
        steppers = [stepper(mesh, make(), "data" if options.copies else "auto") for mesh in meshes]
        times: list[list[float]] = [[], [], []]
        for turn in range(options.rounds + 2):
            for which in (0, 1, 2) if turn % 2 else (2, 1, 0):
                seconds = steppers[which]()
                if turn >= 2:
                    times[which].append(seconds)
        if options.copies:
            lost = sorted(recovery(meshes[1], steppers[1]) - STEPS * statistics.median(times[1]) for _ in range(KILLS))
        for mesh in meshes:
            mesh.close()
        first, rerun, second = times
        both = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
        middle = [f"{1e3 * statistics.median(each):.2f}" for each in (both, rerun)]
        print(
            f"{name:<32}{middle[0]:>14}{middle[1]:>14}{_ratio(rerun, both):>26}{_ratio(second, first):>26}", flush=True
        )
        if options.copies:
            spread = f"{lost[0]:.2f} to {lost[-1]:.2f}"
            print(f"  a host killed {KILLS} times: {lost[KILLS // 2]:.2f} s ({spread})", flush=True)


def recovery(mesh: Mesh, some: Callable[[], float]) -> float:
    """Seconds that some steps take during which a host and all its ranks are killed."""

    def kill() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    some()  # afterwards copies are there
    ranks = [row.pid for row in mesh.status()][2:]
    pids = [_parent(_parent(ranks[0])), *ranks]
    timer = threading.Timer(0.05, kill)
    began = time.perf_counter()
    timer.start()
    some()
    seconds = time.perf_counter() - began
    timer.join()
    return seconds


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _ratio(above: list[float], below: list[float]) -> str:
    low, middle, high = statistics.quantiles([one / other for one, other in zip(above, below, strict=True)], n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
