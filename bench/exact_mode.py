"""What the same bits cost: a train step over virtual shards against the fast one, at the same number of ranks.

    python bench/exact_mode.py [ranks]

Every contender takes its steps on the same global batch, in turn, round after round, on meshes with one thread a rank.
It prints a table: for every model the median (and quartiles) of milliseconds per step, and by how much a fresh rank's
peak of memory exceeds that of the fast step, in sizes of the gradient.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from spmd import Mesh, data_parallel, functional, optimizer, put, spmd, value_and_grad
from spmd.cli.bench.contenders import loss_of, made

ROUNDS, CALLS = 10, 3
NAMES = ("mlp_1k", "encoder")


def step_of(mesh: Mesh, name: str, shards: int | None, **options: Any) -> Callable[[], None]:
    model, x, y = made(f"models:{name}")
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


def high_water() -> int:
    """The most memory that this process ever had, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def peak(ranks: int, name: str, shards: int | None) -> int:
    """The most that a fresh rank ever has in its first steps."""
    with Mesh({"data": ranks}, threads=1) as mesh:
        step_of(mesh, name, shards)()
        return max(mesh.run(high_water))


def main(ranks: int) -> None:
    counts = (ranks, 2 * ranks, 4 * ranks)
    print(f"| model | fast | {' | '.join(f'V = {count}' for count in counts)} |")
    print("|---|---|---|---|---|")
    with Mesh({"data": ranks}, threads=1) as mesh:
        for name in NAMES:
            size = sum(p.numel() * p.element_size() for p in made(f"models:{name}")[0].parameters())
            contenders = [step_of(mesh, name, shards) for shards in (None, *counts)]
            samples: list[list[float]] = [[] for _ in contenders]
            for run in contenders:
                run()
            for _ in range(ROUNDS):
                for run, times in zip(contenders, samples, strict=True):
                    start = time.perf_counter()
                    run()
                    times.append((time.perf_counter() - start) / CALLS * 1e3)
            cells, fast = [], peak(ranks, name, None)
            for shards, times in zip((None, *counts), samples, strict=True):
                low, middle, high = statistics.quantiles(times, n=4)
                more = "" if shards is None else f", {(peak(ranks, name, shards) - fast) / size:+.1f} gradients"
                cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f}) ms{more}")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
