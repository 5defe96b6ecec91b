"""The other contenders: Open MPI, one process with all threads, one plain thread, and our mesh as a driver sees it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

import spmd
from spmd._bench.contenders import Ours, Step, made, ours_step, plain_step


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


class OursAndPlain(Ours):
    """A rank of ours that also takes plain steps (`plain=True`), with whatever the library does to its process."""

    def train_step(self, options: Mapping[str, Any], model: str | tuple) -> Step:
        flags = {name: value for name, value in options.items() if name != "plain"}
        return plain_step(*made(model), **flags) if "plain" in options else super().train_step(flags, model)


class FromDriver:
    """The process that drives a mesh of `SPMD_RANKS` ranks, which a turn ends by fetching the last loss."""

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

        def run() -> None:
            self.loss = step()

        return run
