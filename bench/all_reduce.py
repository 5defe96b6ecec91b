"""All-reduce times of this library and of its peers, measured in turn in one run, by the ranks themselves.

    spmd run -n 2 bench/all_reduce.py            ours and torch's Gloo
    mpirun -np 2 python bench/all_reduce.py      and Open MPI through mpi4py

Rank 0 prints JSON: for every size in bytes and every contender the median and the quartiles of seconds per call.
A round gives each contender a few calls, one contender after the other; the slowest rank's time counts.
"""

import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from spmd import Mesh
from spmd.mesh.rendezvous import launch_of_process, meet

SIZES = [4, 64, 1 << 10, 8 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def contenders(mesh: Mesh) -> dict[str, Callable[[int], Callable[[], object]]]:
    """name -> (size in bytes -> a function that all-reduces a float32 buffer of that size once)."""
    comm = mesh.comm()

    def arena(size: int) -> Callable[[], object]:
        buffer = comm.empty(size // 4, dtype=torch.float32).fill_(1.0)
        return lambda: comm.all_reduced(buffer)

    def ordinary(size: int) -> Callable[[], object]:
        buffer = torch.ones(size // 4)
        return lambda: comm.all_reduced(buffer)

    launch = launch_of_process()
    assert launch is not None
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=60)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(dist.PrefixStore("bench", meet(launch, 60)), launch.rank, launch.size, options)

    def gloo(size: int) -> Callable[[], object]:
        buffers = [torch.ones(size // 4)]
        how = dist.AllreduceOptions()
        return lambda: group.allreduce(buffers, how).wait()

    found = {"ours, in the arena": arena, "ours, any tensor": ordinary, "gloo": gloo}
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        from mpi4py import MPI

        def open_mpi(size: int) -> Callable[[], object]:
            buffer = torch.ones(size // 4).numpy()
            return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer, op=MPI.SUM)

        found["open mpi"] = open_mpi
    return found


def measure(mesh: Mesh, sizes: list[int], seconds: float) -> dict[int, dict[str, list[float]]]:
    comm, times = mesh.comm(), {}
    made = contenders(mesh)
    for size in sizes:
        calls = {name: make(size) for name, make in made.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        repeats = {}
        for name, call in calls.items():
            for _ in range(3):
                call()
            comm.barrier()
            start = time.perf_counter()
            call()
            # All ranks must agree on the number of calls.
            once = comm.all_reduced(torch.tensor(time.perf_counter() - start), "max").item()
            repeats[name] = max(1, min(200, int(seconds / 40 / max(once, 1e-6))))
        for _ in range(20):
            for name, call in calls.items():
                comm.barrier()
                start = time.perf_counter()
                for _ in range(repeats[name]):
                    call()
                each = (time.perf_counter() - start) / repeats[name]
                samples[name].append(comm.all_reduced(torch.tensor(each, dtype=torch.float64), "max").item())
        times[size] = {name: statistics.quantiles(values, n=4) for name, values in samples.items()}
    return times


torch.set_num_threads(1)
mesh = Mesh(threads=1)
result = measure(mesh, SIZES, float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
if mesh.rank == 0:
    print(json.dumps({"ranks": mesh.size, "cores": len(os.sched_getaffinity(0)), "times": result}))
