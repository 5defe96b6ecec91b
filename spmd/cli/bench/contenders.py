"""This library and Gloo (with `DistributedDataParallel`), doing the same work: all-reduces and train steps.

Each is one process of its group; a step is a function without arguments. Every rank has one thread.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spmd

from ...mesh.launch.environments import Launch
from .worker import load

Step = Callable[[], object]
# A model, its inputs and its labels: the same in every process.
Model = tuple[nn.Module, Tensor, Tensor]
SECONDS = 120


def made(model: str | tuple) -> Model:
    """The model that "module:function" makes, or ("module:function", argument, ...)."""
    name, *arguments = (model,) if isinstance(model, str) else model
    return load(name)(*arguments)


def mlp(inputs: int, hidden: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def mlp_1k() -> Model:
    """784-1024-1024-10, with 128 samples."""
    torch.manual_seed(0)
    return mlp(784, 1024, 10), torch.randn(128, 784), torch.randint(0, 10, (128,))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


class Ours:
    """A rank of a launched mesh."""

    threads = 1

    def __init__(self, rank: int, size: int, meeting: str):
        torch.set_num_threads(1)
        spmd.initialize(rank, size, init_method=f"file://{meeting}", local_rank=rank, local_size=size)
        self._use(spmd.Mesh(threads=1, timeout=SECONDS))

    @classmethod
    def launched(cls) -> Ours:
        """In a rank that something else started."""
        side = cls.__new__(cls)
        side._use(spmd.Mesh(threads=1, timeout=SECONDS))
        return side

    def _use(self, mesh: spmd.Mesh) -> None:
        assert mesh.rank is not None
        self.mesh, self.comm, self.rank = mesh, mesh.comm(), mesh.rank
        self.barrier, self.finish = self.comm.barrier, lambda: None

    def all_reduce(self, options: Mapping[str, Any], size: int) -> Step:
        """All-reduce `size` bytes of float32; `kind` says where they lie, and what happens to them.

        "kept" in the arena; "overwritten" there, in place on every rank; "given up" there, as the buckets of gradients
        are, whose result may take their place; "any" tensor.
        """
        comm, numel, kind = self.comm, size // 4, options.get("kind", "kept")
        if kind == "given up":
            return lambda: comm.all_reduced(comm.scratch(numel, dtype=torch.float32))
        if kind == "any":
            ordinary = torch.ones(numel)
            return lambda: comm.all_reduced(ordinary)
        buffer = comm.empty(numel, dtype=torch.float32).zero_()  # stays finite however often it is reduced
        return (lambda: comm.all_reduced(buffer)) if kind == "kept" else (lambda: comm.all_reduce(buffer))

    def train_step(self, options: Mapping[str, Any], model: str | tuple) -> Step:
        """`value_and_grad` and AdamW; `donate=True`, and the rest are the optimizer's options."""
        return ours_step(self.mesh, model, **options)


def ours_step(mesh: spmd.Mesh, model: str | tuple, *, donate: bool = False, **flags: Any) -> Step:
    module, x, y = made(model)
    apply, params = spmd.functional(module)
    opt = spmd.optimizer(torch.optim.AdamW, lr=1e-3, **flags)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return loss_of(apply(params, batch["x"]), batch["y"])

    @spmd.spmd(mesh=mesh, donate=("params", "opt_state") if donate else ())
    @spmd.data_parallel
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = spmd.value_and_grad(loss_fn)(params, batch)
        params, opt_state = opt.step(params, grads, opt_state)
        return params, opt_state, loss

    # Nothing else may hold the first parameters: a step's inputs are freed when its outputs take their place.
    carried = [spmd.put(params, mesh=mesh), opt.init(params)]
    del params, module
    batch = spmd.put({"x": x, "y": y}, spmd.P("data"), mesh=mesh)

    def step() -> Any:
        carried[0], carried[1], loss = train_step(carried[0], carried[1], batch)
        return loss

    return step


class Gloo:
    """A process of torch's Gloo, and of `DistributedDataParallel` over it."""

    threads = 1

    def __init__(self, rank: int, size: int, meeting: str):
        torch.set_num_threads(1)
        self._use(dist.FileStore(meeting, size), rank, size, "lo")

    @classmethod
    def launched(cls, store: dist.Store, launch: Launch) -> Gloo:
        """In a rank that something else started; over the interface that this library would use."""
        side = cls.__new__(cls)
        one_host = launch.local_size == launch.size
        side._use(store, launch.rank, launch.size, "lo" if one_host else os.environ.get("SPMD_INTERFACE"))
        return side

    def _use(self, store: dist.Store, rank: int, size: int, interface: str | None) -> None:
        self.rank, self.size = rank, size
        limit = datetime.timedelta(seconds=SECONDS)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)

    def barrier(self) -> None:
        dist.barrier()

    def finish(self) -> None:
        pass

    def all_reduce(self, options: Mapping[str, Any], size: int) -> Step:
        # The process group itself: torch.distributed.all_reduce adds some microseconds of Python to it.
        group: Any = dist.group.WORLD
        buffers, how = [torch.ones(size // 4)], dist.AllreduceOptions()
        return lambda: group.allreduce(buffers, how).wait()

    def train_step(self, options: Mapping[str, Any], model: str | tuple) -> Step:
        """Forward, backward and AdamW, with the optimizer's options."""
        module, x, y = made(model)
        parallel = DistributedDataParallel(module, gradient_as_bucket_view=True)
        return plain_step(parallel, *(t.tensor_split(self.size)[self.rank] for t in (x, y)), **options)


def plain_step(model: nn.Module, x: Tensor, y: Tensor, **flags: Any) -> Step:
    """The step of a program without this library."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, **flags)

    def step() -> Tensor:
        opt.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return step
