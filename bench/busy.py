"""All-reduce where other processes want the cores too: ours against torch's Gloo, in turns, in one run.

    python bench/busy.py [--busy 2] [--ranks 2]

Prints for each size the mean time of a blocking all-reduce on the slowest rank (a mean, since the cost of waiting is in
the few calls that wait long) and the ratio; then the same without busy processes, for comparison.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import cloudpickle
import torch
import torch.distributed as dist

from spmd import Mesh

SIZES = (4, 1 << 10, 1 << 16, 1 << 20)
CALLS, TURNS = 100, 5

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that do nothing but compute."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def timed(mesh: Mesh, store: str) -> dict[int, list[tuple[float, float]]]:
    """In a rank: for each size and turn, the seconds of (a call of ours, one of Gloo's)."""
    comm = mesh.comm()
    gloo = dist.ProcessGroupGloo(dist.FileStore(store, comm.size), comm.rank, comm.size)
    found: dict[int, list[tuple[float, float]]] = {}
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        ways = (lambda: comm.all_reduce(tensor), lambda: gloo.allreduce([tensor]).wait())  # noqa: B023
        for _ in range(TURNS):
            seconds = []
            for way in ways:
                comm.barrier()
                start = time.perf_counter()
                for _ in range(CALLS):
                    way()
                seconds.append((time.perf_counter() - start) / CALLS)
            found.setdefault(size, []).append((seconds[0], seconds[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {options.ranks} ranks, torch {torch.__version__}")
    for count in (0, options.busy):
        with (
            tempfile.TemporaryDirectory() as folder,
            Mesh({"data": options.ranks}, threads=1) as mesh,
            busy(count),
        ):
            ranks = mesh.run(timed, mesh, f"{folder}/store")
        print(f"{count} busy processes: bytes, us ours, us Gloo, Gloo / ours")
        for size in SIZES:
            turns = [[max(rank[size][turn][way] for rank in ranks) for turn in range(TURNS)] for way in (0, 1)]
            ours, gloo = (1e6 * statistics.mean(way) for way in turns)
            print(f"{size:>10} {ours:>10.1f} {gloo:>10.1f} {gloo / ours:>6.2f}")


if __name__ == "__main__":
    main()
