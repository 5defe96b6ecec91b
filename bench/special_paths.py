"""What the special paths of a train step gain: steps with and without each, in turn, in one run on the same ranks.

    spmd run -n 2 bench/special_paths.py [model ...] [--paths WORD]

Prints median times, and the ratio of processor times, which says more on a machine that does other work, too. A path
that makes no model's step 5% faster is not worth its lines.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from spmd import Mesh
from spmd.cli.bench.contenders import ours_step
from spmd.mesh import donation
from spmd.optim import blocks, engine, slices
from spmd.transforms import _backward, _sums

ROUNDS, SECONDS = 11, 0.15
DONATED = {"shard": "data", "fused": True, "donate": True}


def without_gradients_in_place() -> Any:
    return mock.patch.object(_backward, "_in_place", lambda f, sums, ends, twins, handles: twins)


def without_factors() -> Any:
    return mock.patch.object(_sums, "_LEAST", 1 << 62)


def without_parameters_rewritten() -> Any:
    return mock.patch.object(slices.Slice, "_donated_flat", lambda *_: None)


@contextlib.contextmanager
def without_donation() -> Iterator[None]:
    with mock.patch.object(donation, "may_take", lambda tensor: False), without_parameters_rewritten():
        yield


@contextlib.contextmanager
def with_journal() -> Iterator[None]:
    """Copy each block of donated memory aside before it is stepped, to a place that stays in the cache.

    With these copies and the sums of gradients, a step could be finished for a rank that dies while it overwrites.
    """
    kept: dict[str, torch.Tensor] = {}
    lend = blocks.FlatJob.lend

    def block_by_block(jobs: Any, length: int | None) -> Any:
        return blocks.batches(jobs, blocks.BLOCK)

    def note(self: Any, start: int, stop: int) -> Any:
        for name, flat in {"param": self.out, **self._new}.items():
            if name not in kept:
                kept[name] = torch.empty(blocks.BLOCK).share_memory_()
            kept[name][: stop - start].copy_(flat[start:stop])
        return lend(self, start, stop)

    with mock.patch.object(engine, "batches", block_by_block), mock.patch.object(blocks.FlatJob, "lend", note):
        yield


PATHS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "weight gradients written into buckets": (without_gradients_in_place, {}),
    "the same, sharded, fused, donated": (without_gradients_in_place, DONATED),
    "factors of weight gradients exchanged": (without_factors, {}),
    "factors exchanged, donated": (without_factors, {"donate": True}),
    "sharded parameters rewritten in place": (without_parameters_rewritten, DONATED),
    "parameters and state rewritten in place": (without_donation, DONATED),
    "donated memory overwritten without a journal": (with_journal, DONATED),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=("mlp_1k", "mlp_4k", "large", "encoder", "cnn"))
    parser.add_argument("--paths", default="", help="only those with this word in their names")
    options = parser.parse_args()
    mesh = Mesh(threads=1)
    assert mesh.rank is not None, "start it on ranks: spmd run -n 2 bench/special_paths.py"
    comm = mesh.comm()
    for model, (name, (without, flags)) in itertools.product(options.models, PATHS.items()):
        if options.paths in name:
            step = ours_step(mesh, f"models:{model}", **flags)
            times: dict[bool, list[float]] = {True: [], False: []}
            worked: dict[bool, list[float]] = {True: [], False: []}
            for warm in (True, False):
                with contextlib.nullcontext() if warm else without():
                    start = time.perf_counter()
                    for _ in range(3):
                        step()
                    taken = (time.perf_counter() - start) / 3
            calls = int(comm_max(comm, max(1, SECONDS / taken)))
            for _ in range(ROUNDS):
                for special in (True, False):
                    with contextlib.nullcontext() if special else without():
                        step()
                        comm.barrier()
                        start, began = time.perf_counter(), time.process_time()
                        for _ in range(calls):
                            step()
                        worked[special].append(time.process_time() - began)
                        comm.barrier()
                        times[special].append((time.perf_counter() - start) / calls)
            if mesh.rank == 0:
                with_it, alone = statistics.median(times[True]), statistics.median(times[False])
                ratios = statistics.quantiles([b / a for a, b in zip(times[True], times[False], strict=True)], n=4)
                print(
                    f"{model:8} {name:44} {with_it * 1e3:8.2f} ms, without {alone * 1e3:8.2f} ms: "
                    f"{alone / with_it:.3f} times (quartiles {ratios[0]:.3f} to {ratios[2]:.3f}), "
                    f"processor time {statistics.median(worked[False]) / statistics.median(worked[True]):.3f} times",
                    flush=True,
                )


def comm_max(comm: Any, value: float) -> float:
    return float(comm.all_reduced(torch.tensor(float(value)), "max"))


if __name__ == "__main__":
    main()
