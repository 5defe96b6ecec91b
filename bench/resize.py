"""The stall of a resize: how long no step finishes when a mesh changes its size during training.

    python bench/resize.py [--megabytes 4 64] [--turns 6]

A run of steps on parameters of so many megabytes (AdamW: three times that with its state) goes on while new ranks get
ready (`mesh.resize(..., wait=False)`), between 1 and 2 ranks, up and down. The stall is the switch and the first step
at the new size, minus a usual step there. Beside it is the time to move the bytes: one copy of all values to fresh
shared memory.
"""

from __future__ import annotations

import argparse
import mmap
import os
import platform
import statistics
import time

import torch
from torch import nn

from spmd import Mesh, data_parallel, functional, optimizer, spmd, value_and_grad

STEPS = 12  # before each resize


def copied_in(nbytes: int) -> float:
    """Seconds to copy so many bytes to shared memory that nobody has touched."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    fd = os.memfd_create("bench")
    os.ftruncate(fd, nbytes)
    target = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    began = time.perf_counter()
    target.copy_(source)
    passed = time.perf_counter() - began
    os.close(fd)
    return passed


def stalls(megabytes: int, turns: int) -> tuple[list[float], float, float]:
    """Seconds of each switch with its first step; a usual step, and the copy of the bytes."""
    wide = int((megabytes * (1 << 20) / 4 / 2) ** 0.5)
    torch.manual_seed(0)
    apply, params = functional(nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide)))
    opt = optimizer(torch.optim.AdamW, lr=1e-4)
    state = opt.init(params)
    batch = torch.randn(8, wide)
    found, usual = [], []
    with Mesh({"data": 2}) as mesh:

        @spmd(mesh=mesh)
        @data_parallel(shards=4)
        def step(params, state, batch):
            loss, grads = value_and_grad(lambda p, b: (apply(p, b) - b).square().mean())(params, batch)
            params, state = opt.step(params, grads, state)
            return params, state, loss

        for _ in range(turns):
            for _ in range(STEPS):
                began = time.perf_counter()
                params, state, loss = step(params, state, batch)
                float(loss)
                usual.append(time.perf_counter() - began)
            size = 3 - mesh.size
            mesh.resize({"data": size}, wait=False)
            while mesh.size != size:
                began = time.perf_counter()
                params, state, loss = step(params, state, batch)
                float(loss)
                passed = time.perf_counter() - began
            found.append(passed)
    return found, statistics.median(usual), copied_in(3 * megabytes << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.release()}, torch {torch.__version__}; 1 to 2 ranks and back, shards=4")
    print(f"{'parameters':>12}{'step ms':>10}{'switch and step ms':>26}{'copy ms':>10}{'stall beside it ms':>21}")
    for megabytes in options.megabytes:
        found, usual, copy = stalls(megabytes, options.turns)
        middle = statistics.median(found)
        spread = f"{1e3 * middle:.0f} ({1e3 * min(found):.0f} to {1e3 * max(found):.0f})"
        stall = f"{1e3 * max(0.0, middle - usual - copy):.0f}"
        print(f"{megabytes:>9} MB{1e3 * usual:>10.0f}{spread:>26}{1e3 * copy:>10.0f}{stall:>21}")


if __name__ == "__main__":
    main()
