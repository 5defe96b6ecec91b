"""The other contenders: Open MPI, one process with all threads, one plain thread, and our mesh as a driver sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

import spmd
from spmd.cli.bench.contenders import Ours, Step, loss_of, made, ours_step, plain_step


class OpenMpi:
    """A process that mpirun started, which all-reduces NumPy arrays in place through mpi4py."""

    threads = 1

    def __init__(self, rank: int, size: int, meeting: str):
        from mpi4py import MPI

        self.mpi, self.rank = MPI, rank
        self.barrier = MPI.COMM_WORLD.Barrier

    def finish(self) -> None:
        pass

    def all_reduce(self, options: Mapping[str, Any], size: int) -> Step:
        import numpy as np

        buffer, mpi = np.ones(size // 4, np.float32), self.mpi
        return lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, buffer, op=mpi.SUM)


class Plain:
    """One process without this library, on the whole batch, with all threads there are."""

    threads = len(os.sched_getaffinity(0))
    rank = 0

    def __init__(self, rank: int, size: int, meeting: str):
        torch.set_num_threads(self.threads)

    def barrier(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def train_step(self, options: Mapping[str, Any], model: str | tuple) -> Step:
        return plain_step(*made(model), **options)


class PlainThread(Plain):
    """The same with one thread."""

    threads = 1


class Floor(Ours):
    """The lower bound for any library: the same ranks do the arithmetic alone, and exchange nothing."""

    def all_reduce(self, options: Mapping[str, Any], size: int) -> Step:
        """Every rank adds one slice in place."""
        one, other = (torch.ones(max(1, size // 4 // self.mesh.size)) for _ in range(2))
        return lambda: one.add_(other)

    def train_step(self, options: Mapping[str, Any], model: str | tuple) -> Step:
        """Every rank goes forward and backward with its part of the batch."""
        module, x, y = made(model)
        x, y = (t.tensor_split(self.mesh.size)[self.rank] for t in (x, y))

        def step() -> None:
            module.zero_grad()
            loss_of(module(x), y).backward()

        return step


class OursAndPlain(Ours):
    """A rank of ours that also takes plain steps (`plain=True`), with whatever the library does to its process."""

    def train_step(self, options: Mapping[str, Any], model: str | tuple) -> Step:
        flags = {name: value for name, value in options.items() if name != "plain"}
        return plain_step(*made(model), **flags) if "plain" in options else super().train_step(flags, model)


class FromDriver:
    """The process that drives a mesh of `SPMD_RANKS` ranks; a turn ends by fetching the last loss."""

    rank, threads = 0, 1

    def __init__(self, rank: int, size: int, meeting: str):
        self.mesh = spmd.Mesh(threads=1)
        self.loss: Any = None

    def barrier(self) -> None:
        pass

    def finish(self) -> None:
        if self.loss is not None:
            float(self.loss)

    def train_step(self, options: Mapping[str, Any], model: str | tuple) -> Step:
        step = ours_step(self.mesh, model, **options)

        def run() -> Any:
            self.loss = step()
            return self.loss

        return run


class Programs(FromDriver):
    """What a driver costs: calls that do nothing, starting, and a rank that is killed and replaced."""

    def no_op(self, options: Mapping[str, Any], case: None) -> Step:
        """A call with two resident arguments. If it returns a number, it returns only once the ranks have answered."""
        if "bare" in options:
            return self._echo()
        answered = options["answered"]
        a, b = (spmd.put(torch.ones(1000), mesh=self.mesh) for _ in range(2))
        call = spmd.spmd(lambda a, b: 0 if answered else a, mesh=self.mesh)
        carried = [a]

        def step() -> None:
            result = call(carried[0], b)
            if not answered:
                carried[0] = result

        return step

    def _echo(self) -> Step:
        """A byte to each of as many bare Python processes, and one back from each; they end with this process."""
        command = [sys.executable, "-c", "import os\nwhile byte := os.read(0, 1): os.write(1, byte)"]
        pipes = [os.pipe() for _ in range(2 * self.mesh.size)]
        for (stdin, _), (_, stdout) in zip(pipes[::2], pipes[1::2], strict=True):
            subprocess.Popen(command, stdin=stdin, stdout=stdout)
            os.close(stdin)
            os.close(stdout)

        def step() -> None:
            for _, write in pipes[::2]:
                os.write(write, b".")
            for read, _ in pipes[1::2]:
                os.read(read, 1)

        return step

    def start(self, options: Mapping[str, Any], case: None) -> Step:
        """From the start of a Python process until it says that it is ready; then it is killed."""
        command = [sys.executable, "-c", options["program"]]

        def step() -> None:
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                if process.stdout.readline() != b"ready\n":
                    raise RuntimeError(f"the program ended early: {options['program']}")
                process.kill()

        return step

    def replacement(self, options: Mapping[str, Any], case: None) -> Step:
        """Kill an idle rank, and call all ranks until all have answered."""

        def step() -> None:
            os.kill(self.mesh.run(os.getpid)[1], signal.SIGKILL)
            while True:
                try:
                    self.mesh.run(os.getpid)
                    return
                except spmd.PeerLost:
                    continue

        return step


class Collectives(FromDriver):
    """All-reduces timed on the ranks of a driver's mesh, which start faster than as many launched processes."""

    def all_reduce_seconds(self, size: int, rounds: int, seconds: float) -> list[float]:
        """A sample for every round: seconds per call, the slowest rank's."""
        by_rank = self.mesh.run(timed_all_reduces, self.mesh, size, rounds, seconds)
        return [max(samples) for samples in zip(*by_rank, strict=True)]


def timed_all_reduces(mesh: spmd.Mesh, size: int, rounds: int, seconds: float) -> list[float]:
    """In a rank: seconds per all-reduce of a buffer of the arena, in each of some rounds."""
    comm = mesh.comm()
    buffer = comm.empty(size // 4, dtype=torch.float32).fill_(1.0)
    cores = sorted(os.sched_getaffinity(0))
    samples, steps = [], 1
    for number in range(rounds + 2):
        os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
        os.sched_setaffinity(0, cores)
        comm.all_reduced(buffer)
        comm.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            comm.all_reduced(buffer)
        each = (time.perf_counter() - start) / steps
        if number < 2:  # all ranks must agree on the number of calls
            slowest = comm.all_reduced(torch.tensor(each, dtype=torch.float64), "max").item()
            steps = max(1, min(1000, round(seconds / slowest)))
        else:
            samples.append(each)
    return samples
