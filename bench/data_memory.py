"""What training on a file larger than what one would copy takes of memory: python bench/data_memory.py [megabytes]

Two ranks train on a memory-mapped array, 2 GB unless told otherwise, shuffled, for one epoch. Printed is what each
process has more than before its first batch: memory of its own (anonymous and shared), and pages of the file that are
mapped, which the kernel takes back when it wants them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from spmd import Loader, Mesh, data_parallel, spmd, value_and_grad

WIDTH, BATCH = 1024, 1024


def memory(pid: int) -> tuple[float, float]:
    """(own, mapped from files) megabytes of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kilobytes = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "RssFile")}
    return (kilobytes["RssAnon"] + kilobytes["RssShmem"]) / 1e3, kilobytes["RssFile"] / 1e3


def main(megabytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, Mesh({"data": 2}) as mesh:
        rows = megabytes * 1_000_000 // (4 * WIDTH)
        written = np.memmap(Path(folder) / "data", dtype=np.float32, mode="w+", shape=(rows, WIDTH))
        for at in range(0, rows, BATCH):
            written[at : at + BATCH] = np.arange(at, min(at + BATCH, rows))[:, None] % 7
        written.flush()
        del written
        data = np.memmap(Path(folder) / "data", dtype=np.float32, mode="r", shape=(rows, WIDTH))

        @spmd(mesh=mesh)
        @data_parallel
        def step(w, batch):
            loss, grad = value_and_grad(lambda w, x: (x @ w).square().mean())(w, batch)
            return w - 1e-6 * grad, loss

        w, _ = step(torch.zeros(WIDTH), torch.zeros(BATCH, WIDTH))
        names = {"driver": os.getpid(), **{f"rank {rank}": pid for rank, pid in enumerate(mesh.run(os.getpid))}}
        before = {name: memory(pid) for name, pid in names.items()}
        most = dict.fromkeys(names, (0.0, 0.0))
        began = time.perf_counter()
        for count, batch in enumerate(Loader(data, BATCH, mesh=mesh)):
            w, loss = step(w, batch)
            if count % 20 == 0:
                float(loss)
                for name, pid in names.items():
                    most[name] = tuple(map(max, most[name], memory(pid)))  # type: ignore[assignment]
        float(loss)
        seconds = time.perf_counter() - began
        print(f"{rows * WIDTH * 4 / 1e9:.2f} GB, {rows} samples in {seconds:.1f} s, torch {torch.__version__}")
        for name in names:
            own, mapped = (after - at for after, at in zip(most[name], before[name], strict=True))
            print(
                f"{name}: {own:.0f} MB of its own more than before the first batch; {mapped:.0f} MB of the file mapped"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
