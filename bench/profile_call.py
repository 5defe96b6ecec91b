"""What a call that does nothing costs from a driver: time by the clock, and processor time by process.

    python bench/profile_call.py 4

Where ranks outnumber cores, calls that follow each other can't be faster than the sum of all processor time, shared
among the cores.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from peers import Programs

from spmd import Mesh

CALLS = 500


def processor_seconds(mesh: Mesh) -> list[float]:
    """The driver's processor time so far (all of its threads), then each rank's."""
    return [time.process_time(), *mesh.run(time.process_time)]


def measure(mesh: Mesh, call: Callable[[], object]) -> tuple[float, list[float]]:
    """Seconds per call, and processor seconds per call of the driver and of each rank."""
    for _ in range(CALLS // 5):
        call()
    before = processor_seconds(mesh)
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    mesh.run(int)  # until the last is over
    taken = time.perf_counter() - began
    after = processor_seconds(mesh)
    return taken / CALLS, [(now - then) / CALLS for then, now in zip(before, after, strict=True)]


def main(arguments: list[str] | None = None) -> None:
    ranks = int((sys.argv[1:] if arguments is None else arguments)[0])
    os.environ["SPMD_RANKS"] = str(ranks)
    torch.set_num_threads(1)
    programs = Programs(0, 1, "")
    cores = len(os.sched_getaffinity(0))
    for answered in (True, False):
        seconds, processor = measure(programs.mesh, programs.no_op({"answered": answered}, None))
        driver, *each = (share * 1e6 for share in processor)
        print(
            f"{'answered' if answered else 'in flight':<10}{seconds * 1e6:6.0f} us a call; processor time: "
            f"driver {driver:.0f} us, ranks {', '.join(f'{share:.0f}' for share in each)} us, "
            f"in all {(driver + sum(each)) / cores:.0f} us on each of {cores} cores"
        )
    programs.mesh.close()


if __name__ == "__main__":
    main()
