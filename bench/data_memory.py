"""Memory of the driver and of each rank while they train on a mapped file of 2 GB, above what they had before.

    python bench/data_memory.py [--workers 1] > bench/results/data_memory.txt

Private memory is shared with no other process and backed by no file. Pages of the mapped file that a rank has read
belong to the system's cache, which takes them back when memory is wanted; they are listed beside it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmd import Loader, Mesh, data_parallel, functional, optimizer, spmd, value_and_grad

WIDTH, BATCH, GB, LIMIT = 784, 1024, 2, 100
ROWS = GB * 10**9 // (4 * WIDTH)


def memory(pid: int | None = None) -> dict[str, float]:
    """Megabytes of a process: private, and of files that are mapped and unchanged."""
    found: dict[str, float] = {}
    for line in Path(f"/proc/{pid or os.getpid()}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        found[name.rstrip(":")] = int(value) * 1024 / 1e6
    return {"private": found["Private_Dirty"], "cached": found["Private_Clean"] + found["Shared_Clean"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=0)
    workers = parser.parse_args().workers
    mesh = Mesh({"data": 2})
    apply, params = functional(torch.nn.Linear(WIDTH, 1))
    opt = optimizer(torch.optim.SGD, lr=1e-3)
    opt_state = opt.init(params)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(lambda p, x: (apply(p, x) - 1).square().mean())(params, batch["x"])
        return *opt.step(params, grads, opt_state), loss

    pids = {"driver": os.getpid(), **{f"rank {rank}": pid for rank, pid in enumerate(mesh.run(os.getpid))}}
    small = {"x": torch.ones(2 * BATCH, WIDTH)}
    for _ in range(20):
        for batch in Loader(small, BATCH, mesh=mesh):
            params, opt_state, loss = step(params, opt_state, batch)
    float(loss)
    before = {name: memory(pid) for name, pid in pids.items()}
    most = {name: dict(found) for name, found in before.items()}
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "rows.bin"
        with open(path, "wb") as file:
            file.truncate(ROWS * WIDTH * 4)  # a hole, which reads as zeros
        mapped = {"x": np.memmap(path, np.float32, "r", shape=(ROWS, WIDTH))}
        began = time.perf_counter()
        for number, batch in enumerate(Loader(mapped, BATCH, mesh=mesh, workers=workers)):
            params, opt_state, loss = step(params, opt_state, batch)
            if number % 20 == 19:
                float(loss)
                for name, pid in pids.items():
                    for kind, value in memory(pid).items():
                        most[name][kind] = max(most[name][kind], value)
        float(loss)
        seconds = time.perf_counter() - began
    print(f"{ROWS:,} rows, {ROWS * WIDTH * 4 / 1e9:.2f} GB, one epoch in batches of {BATCH} on 2 ranks", end=", ")
    print(f"{workers} workers a rank: {seconds:.0f} s; MB at most, and over what there was before the file was opened")
    print(f"{'':10}{'private':>9}{'over':>7}{'target':>9}   {'pages of files':>15}")
    for name, found in most.items():
        over = found["private"] - before[name]["private"]
        met = f"< {LIMIT} {'met' if over < LIMIT else 'MISSED'}"
        print(f"{name:10}{found['private']:9.0f}{over:7.0f} {met:>10}  {found['cached']:15.0f}")
    mesh.close()


if __name__ == "__main__":
    main()
