"""torch's own programs on its backend "gloo" and on "spmd", in turns of one run: DDP steps, FSDP2 steps, collectives.

    python bench/torch_steps.py [--only steps | bytes] [--busy 0 2] [--ranks 2] [--rounds 15] [--bound]

For each case, prints the median and the quartiles of both, and of the rounds' ratios, Gloo's time divided by ours:
below 1 ours is slower. `--busy` is how many processes compute beside the ranks, each number in turn. With `--bound` a
second line has torch's backend "fake" in our place, which does nothing: no backend can be faster.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from against import line
from busy import busy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import spmd
from spmd.cli.bench.contenders import SECONDS, Step, made, plain_step
from spmd.cli.bench.groups import Group, in_turn
from spmd.mesh.rank.memory import keep_freed_memory

KIB, MIB = 1 << 10, 1 << 20
MODELS = ("mlp_1k", "mlp_4k", "encoder")
# What: [(work, case)], seconds of a turn
SUITES: dict[str, tuple[list[tuple[str, Any]], float]] = {
    "steps": ([(work, f"models:{model}") for work in ("ddp", "fsdp2") for model in MODELS], 0.25),
    "bytes": (
        [
            *(("all_reduce", size) for size in (4, 64 * KIB, MIB, 64 * MIB)),
            *(("reduce_scatter", size) for size in (64 * KIB, 64 * MIB)),
            *(("all_gather", size) for size in (64 * KIB, 64 * MIB)),
            *(("send", size) for size in (4, 64 * KIB, MIB, 64 * MIB)),
        ],
        0.08,
    ),
}


class Side:
    """A rank of torch.distributed; each rank computes with one thread."""

    threads = 1
    backend = "gloo"

    def __init__(self, rank: int, size: int, meeting: str):
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        limit = datetime.timedelta(seconds=SECONDS)
        store = dist.FileStore(meeting, size)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=size, timeout=limit)
        self.rank, self.size, self.finish = rank, size, lambda: None

    def barrier(self) -> None:
        dist.barrier()

    def _mine(self, model: str) -> tuple[nn.Module, list[torch.Tensor]]:
        module, *batch = made(model)
        return module, [whole.tensor_split(self.size)[self.rank] for whole in batch]

    def ddp(self, options: Mapping[str, Any], model: str) -> Step:
        """Forward, backward and AdamW, which is fused."""
        module, batch = self._mine(model)
        return plain_step(DistributedDataParallel(module, gradient_as_bucket_view=True), *batch, fused=True)

    def fsdp2(self, options: Mapping[str, Any], model: str) -> Step:
        """The same, with each layer of the model sharded by itself."""
        from torch.distributed.fsdp import fully_shard

        module, batch = self._mine(model)
        mesh = init_device_mesh("cpu", (self.size,))
        layers = [each for each in module.modules() if isinstance(each, nn.Linear | nn.TransformerEncoderLayer)]
        inside = {id(part) for layer in layers for part in layer.modules() if part is not layer}
        for layer in layers:
            if id(layer) not in inside:
                fully_shard(layer, mesh=mesh)
        return plain_step(fully_shard(module, mesh=mesh), *batch, fused=True)

    def all_reduce(self, options: Mapping[str, Any], size: int) -> Step:
        tensor = torch.zeros(size // 4)
        return lambda: dist.all_reduce(tensor)

    def reduce_scatter(self, options: Mapping[str, Any], size: int) -> Step:
        whole, mine = torch.zeros(size // 4), torch.zeros(size // 4 // self.size)
        return lambda: dist.reduce_scatter_tensor(mine, whole)

    def all_gather(self, options: Mapping[str, Any], size: int) -> Step:
        whole, mine = torch.zeros(size // 4), torch.zeros(size // 4 // self.size)
        return lambda: dist.all_gather_into_tensor(whole, mine)

    def send(self, options: Mapping[str, Any], size: int) -> Step:
        """From the first rank to the second and back."""
        tensor = torch.zeros(size // 4)

        def step() -> None:
            for source in (0, 1):
                if self.rank == source:
                    dist.send(tensor, 1 - source)
                elif self.rank == 1 - source:
                    dist.recv(tensor, source)

        return step


class OnSpmd(Side):
    """The same over this library's communicators."""

    backend = "spmd"


class OnNothing(Side):
    """The same where collectives do nothing, in a process that keeps its memory as ours does."""

    def __init__(self, rank: int, size: int, meeting: str):
        torch.set_num_threads(1)
        keep_freed_memory()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        self.rank, self.size, self.finish = rank, size, lambda: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SUITES, action="append", default=None)
    parser.add_argument("--case", default="", help="cases with this in their names alone")
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bound", action="store_true", help="also over a backend that does nothing")
    options = parser.parse_args()
    about = f"spmd {spmd.__version__}, torch {torch.__version__}, Python threads of torch: 1"
    print(f"{os.cpu_count()} cores, {options.ranks} ranks, {about}, {options.rounds} rounds")
    print(f"{'us a step: median (quartiles)':<34}{'gloo':<34}{'spmd':<34} gloo / spmd")
    groups = {
        name: Group(f"torch_steps:{side}", options.ranks, path=Path(__file__).parent)
        for name, side in (("gloo", "Side"), ("spmd", "OnSpmd"), ("nothing", "OnNothing"))
        if options.bound or side != "OnNothing"
    }
    try:
        for count in options.busy:
            print(f"{count} busy processes beside them")
            with busy(count):
                for suite in options.only or SUITES:
                    cases, seconds = SUITES[suite]
                    for work, case in cases:
                        if options.case in f"{work} {case}":
                            turns = {name: (group, name, {}) for name, group in groups.items()}
                            samples = in_turn(turns, work, case, rounds=options.rounds, seconds=seconds)
                            label = f"{work} {str(case).removeprefix('models:')}"
                            print(line(label, samples["gloo"], samples["spmd"]), flush=True)
                            if options.bound:
                                print(line("    by nothing", samples["gloo"], samples["nothing"]), flush=True)
    finally:
        for group in groups.values():
            group.close()


if __name__ == "__main__":
    main()
