"""A train step of a driver's one rank on a GPU against plain torch, in turns.

    python bench/gpu_driver.py >bench/results/gpu_driver.txt

With leaves copied together as they are on GPUs, and only up to the size that they are on CPUs. Milliseconds: quartiles
of nine samples, of eight steps and one wait for the GPU each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from gpu_models import make
from gpu_suites import our_step, plain_step
from gpu_times import Run

from spmd import Mesh

STEPS, SAMPLES = 8, 9


def copy_together(elements: int) -> None:
    from spmd.optim import flat

    flat.SMALL_ON_GPU = elements


def sample(run: Run, wait: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(STEPS):
        run()
    wait()
    return 1e3 * (time.perf_counter() - started) / STEPS


def compare(mesh: Mesh, name: str) -> None:
    from spmd.optim import flat

    plain, ours = plain_step(*make(name)), our_step(mesh, *make(name))

    def wait() -> None:
        mesh.run(torch.cuda.synchronize)

    for _ in range(6):
        ours()
        plain()
    times: dict[str, list[float]] = {"plain torch": [], "spmd": [], "spmd, as on CPUs": []}
    for _ in range(SAMPLES):
        times["plain torch"].append(sample(plain, torch.cuda.synchronize))
        for contender, elements in (("spmd", flat.SMALL_ON_GPU), ("spmd, as on CPUs", flat.SMALL)):
            mesh.run(copy_together, elements)
            ours()
            wait()
            times[contender].append(sample(ours, wait))
    plain_median = statistics.median(times["plain torch"])
    for contender, found in times.items():
        low, middle, high = statistics.quantiles(found, n=4)
        over = middle / plain_median
        print(f"{name:12} {contender:17} {middle:6.2f} ({low:.2f} to {high:.2f})   {over:.3f} of plain torch")


def main() -> None:
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    with Mesh({"data": 1}, device="cuda") as mesh:
        for name in ("transformer", "cnn"):
            compare(mesh, name)


if __name__ == "__main__":
    main()
