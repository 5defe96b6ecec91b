"""A data-parallel train step (gradients and AdamW) of this library, of DDP on Gloo, and of one process.

    spmd run -n 2 bench/train_step.py [model ...]

Every contender takes the same number of steps on the same global batch, in turn, round after round. Rank 0 prints
JSON: for every model and contender the median and quartiles of seconds per step, the slowest rank's.
"""

import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS, loss_of, make

from spmd import Mesh, data_parallel, functional, optimizer, put, spmd, value_and_grad
from spmd.mesh.rendezvous import launch_of_process, meet
from spmd.mesh.spec import P

ROUNDS = 12


def ours(mesh: Mesh, name: str, **flags: Any) -> Callable[[], None]:
    model, x, y = make(name)
    apply, params = functional(model)
    opt = optimizer(torch.optim.AdamW, lr=1e-3, **flags)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(lambda params, batch: loss_of(apply(params, batch["x"]), batch["y"]))(
            params, batch
        )
        params, state = opt.step(params, grads, state)
        return params, state, loss

    carry = [put(params, mesh=mesh), opt.init(params)]
    batch = put({"x": x, "y": y}, P("data"), mesh=mesh)

    def run() -> None:
        carry[0], carry[1], _ = step(carry[0], carry[1], batch)

    return run


def ddp(mesh: Mesh, name: str, **flags: Any) -> Callable[[], None]:
    from torch.nn.parallel import DistributedDataParallel

    model, x, y = make(name)
    rank = mesh.rank or 0
    x, y = x.tensor_split(mesh.size)[rank], y.tensor_split(mesh.size)[rank]
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_step(parallel, x, y, **flags)


def plain_step(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, **flags: Any) -> Callable[[], None]:
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, **flags)

    def run() -> None:
        opt.zero_grad()
        loss_of(model(x), y).backward()
        opt.step()

    return run


def alone(mesh: Mesh, name: str) -> Callable[[], None]:
    """One process with all threads and the whole batch; the other ranks rest."""
    if mesh.rank != 0:
        return lambda: None
    step = plain_step(*make(name))

    def run() -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        step()
        torch.set_num_threads(1)

    return run


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    mesh = Mesh(threads=1)
    launch = launch_of_process()
    assert launch is not None
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("ddp", meet(launch, 60)),
        rank=launch.rank,
        world_size=launch.size,
        timeout=datetime.timedelta(seconds=60),
    )
    results: dict[str, dict[str, list[float]]] = {}
    for name in names:
        contenders = {
            "ours": ours(mesh, name, shard="data", fused=True),
            "ours, not fused": ours(mesh, name, shard="data"),
            "ours, not sharded": ours(mesh, name, fused=True),
            "ddp": ddp(mesh, name),
            "ddp, fused": ddp(mesh, name, fused=True),
            "one process": alone(mesh, name),
        }
        results[name] = rounds(mesh, contenders)
    if mesh.rank == 0:
        print(json.dumps({"ranks": mesh.size, "cores": len(os.sched_getaffinity(0)), "times": results}))
    dist.destroy_process_group()


def rounds(mesh: Mesh, contenders: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    comm = mesh.comm()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
        comm.barrier()
        call()
        comm.barrier()
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            comm.barrier()
            start = time.perf_counter()
            for _ in range(3):
                call()
            each = (time.perf_counter() - start) / 3
            samples[name].append(comm.all_reduced(torch.tensor(each, dtype=torch.float64), "max").item())
    return {name: statistics.quantiles(values, n=4) for name, values in samples.items()}


main(sys.argv[1:] or list(MODELS))
