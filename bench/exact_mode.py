"""What the same bits cost: a train step over virtual shards against the fast one, at the same number of ranks.

    python bench/exact_mode.py [ranks]

Every contender takes its steps on the same global batch, in turn, round after round, on meshes with one thread a rank.
It prints a table: for every model the median (and quartiles) of milliseconds per step, and by how much a step raises
the memory of a rank above what it holds between steps, in gradients' sizes.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from models import loss_of, make

from spmd import Mesh, data_parallel, functional, optimizer, put, spmd, value_and_grad

ROUNDS, CALLS = 10, 3
NAMES = ("mlp-1k", "cnn", "encoder")


def step_of(mesh: Mesh, name: str, shards: int | None, **options: Any) -> Callable[[], None]:
    model, x, y = make(name)
    apply, params = functional(model)
    opt = optimizer(torch.optim.AdamW, lr=1e-3, **options)

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any, batch: Any) -> Any:
            return loss_of(apply(params, batch["x"]), batch["y"])

        loss, grads = value_and_grad(loss_fn)(params, batch)
        params, state = opt.step(params, grads, state)
        return params, state, loss

    carry = [put(params, mesh=mesh), opt.init(params)]
    batch = put({"x": x, "y": y}, mesh=mesh)

    def run() -> None:
        for _ in range(CALLS):
            carry[0], carry[1], loss = step(carry[0], carry[1], batch)
        float(loss)

    return run


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def memory(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def raised(mesh: Mesh, run: Callable[[], None]) -> int:
    """The most that a rank needs in a step besides what it holds before."""
    before = mesh.run(memory, "VmRSS")
    mesh.run(forget_peak)
    run()
    return max(after - held for after, held in zip(mesh.run(memory, "VmHWM"), before, strict=True))


def main(ranks: int) -> None:
    counts = (ranks, 2 * ranks, 4 * ranks)
    print(f"| model | fast | {' | '.join(f'V = {count}' for count in counts)} |")
    print("|---|---|---|---|---|")
    with Mesh({"data": ranks}, threads=1) as mesh:
        for name in NAMES:
            size = sum(p.numel() * p.element_size() for p in make(name)[0].parameters())
            contenders = [step_of(mesh, name, shards) for shards in (None, *counts)]
            samples: list[list[float]] = [[] for _ in contenders]
            for run in contenders:
                run()
            for _ in range(ROUNDS):
                for run, times in zip(contenders, samples, strict=True):
                    start = time.perf_counter()
                    run()
                    times.append((time.perf_counter() - start) / CALLS * 1e3)
            cells = []
            for run, times in zip(contenders, samples, strict=True):
                low, middle, high = statistics.quantiles(times, n=4)
                cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f}) ms, {raised(mesh, run) / size:.1f} gradients")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
