"""Programs of torch's stack, as users write them, on the process group "spmd": each checks its own results.

    python forked.py 2 torch_programs.py               # those that the suite runs
    python forked.py 4 torch_programs.py ddp fsdp2     # these
    python forked.py 3 torch_programs.py all
    python several_hosts.py 2 2 torch_programs.py all  # on two hosts, two ranks each: see there

Each makes a process group of its own, and destroys it. Prints "name: ok", or what went wrong. Expected results are
computed in the same process without communication.
"""

import copy
import datetime
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import spmd

Program = Callable[[int, int], None]
PROGRAMS: dict[str, Program] = {}
SLOW: set[str] = set()  # not in the suite: those that compile, above all


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def slow(function: Program) -> Program:
    SLOW.add(function.__name__)
    return program(function)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def batch(size: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(size * rows, 8, generator=torch.Generator().manual_seed(2))


def plain(steps: int, size: int, lr: float = 0.1, momentum: float = 0.9) -> dict[str, torch.Tensor]:
    """The model's parameters after so many steps on the whole batch."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch(size)).square().mean().backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def same(found: Iterator[tuple[str, torch.Tensor]], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    for name, value in found:
        torch.testing.assert_close(value.detach(), expected[name.removeprefix("module.")], **tolerance)


def train(model: nn.Module, mine: torch.Tensor, steps: int = 3, optimizer: object = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        optimizer.step()


def full(parameters: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value.full_tensor()) for name, value in parameters)


# -- data parallel -----------------------------------------------------------------------------------------------------


@program
def ddp(rank: int, size: int) -> None:
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.0005)  # several buckets
    train(model, batch(size).chunk(size)[rank])
    same(model.named_parameters(), plain(3, size))


@program
def ddp_hooks(rank: int, size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = DistributedDataParallel(Model())
        model.register_comm_hook(None, hook)
        train(model, batch(size).chunk(size)[rank])
        same(model.named_parameters(), plain(3, size), atol=2e-2, rtol=2e-2)
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.0005)  # several buckets, whose callbacks communicate
    model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook)
    train(model, batch(size).chunk(size)[rank], steps=10)
    mine = model.module.up.weight.detach().clone()
    dist.broadcast(mine, 0)
    assert torch.equal(mine, model.module.up.weight)


@program
def ddp_own_hook(rank: int, size: int) -> None:
    """A hook that asks for a future, and for what comes after it."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model = DistributedDataParallel(Model(), bucket_cap_mb=0.0005)
    model.register_comm_hook(None, hook)
    train(model, batch(size).chunk(size)[rank])
    same(model.named_parameters(), plain(3, size))


@program
def ddp_that_a_rank_leaves(rank: int, size: int) -> None:
    """Its backward pass raises on the other ranks, which go on."""
    group = dist.new_group()
    model = DistributedDataParallel(Model(), process_group=group)
    if rank == size - 1:
        dist.destroy_process_group(group)
    else:
        try:
            model(batch(size)).sum().backward()
        except RuntimeError as error:
            assert "MeshError: " in str(error) or "PeerLost: " in str(error), error  # the latter between hosts
        else:
            raise AssertionError("nothing was raised")
        dist.destroy_process_group(group)
    dist.barrier()


@program
def ddp_accumulates(rank: int, size: int) -> None:
    model = DistributedDataParallel(Model())
    mine = batch(size).chunk(size)[rank]
    with model.no_sync():
        model(mine[:2]).square().sum().backward()
    model(mine[2:]).square().sum().backward()
    expected = Model()
    expected(batch(size)).square().sum().backward()
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got.grad * size, wanted.grad)


@program
def sparse_embedding(rank: int, size: int) -> None:
    torch.manual_seed(1)
    table = nn.Embedding(10, 3, sparse=True)
    expected = copy.deepcopy(table)
    model = DistributedDataParallel(table)
    ids = torch.arange(2 * size) % 5
    model(ids.chunk(size)[rank]).sum().backward()
    expected(ids).sum().backward()
    torch.testing.assert_close(table.weight.grad.to_dense() * size, expected.weight.grad.to_dense())


@program
def join(rank: int, size: int) -> None:
    from torch.distributed.algorithms.join import Join

    for by_all in (True, False):  # or only by those that still have samples, whom C++ counts
        model = DistributedDataParallel(Model())
        with Join([model], divide_by_initial_world_size=by_all):
            for _ in range(2 + rank):
                model(batch(size).chunk(size)[rank]).square().mean().backward()
        mine = model.module.up.weight.grad.clone()
        dist.broadcast(mine, size - 1)
        assert torch.isfinite(mine).all()


@program
def zero(rank: int, size: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    train(model, batch(size).chunk(size)[rank], optimizer=optimizer)
    same(model.named_parameters(), plain(3, size))
    optimizer.consolidate_state_dict(0)


@program
def local_sgd(rank: int, size: int) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = Model()
    with torch.no_grad():
        model.up.weight.fill_(rank)
    model.up.weight.grad = torch.zeros_like(model.up.weight)  # those without are left alone
    PeriodicModelAverager(period=1, warmup_steps=0).average_parameters(model.parameters())
    assert torch.equal(model.up.weight, torch.full_like(model.up.weight, (size - 1) / 2))


class Wide(nn.Module):
    """Has several buckets in DDP, whose compiler wants at most a MiB in the first, and no less in the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def of_wide(steps: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model = Wide()
    train(model, x, steps)
    return {name: value.detach() for name, value in model.named_parameters()}


def compiled_steps(rank: int, size: int, backend: str) -> int:
    """Compiled DDP learns what one process learns; returns the number of graphs, which are cut by buckets."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    x = torch.randn(2 * size, 600, generator=torch.Generator().manual_seed(2))
    model = torch.compile(DistributedDataParallel(Wide(), bucket_cap_mb=1), backend=graphs)
    train(model, x.chunk(size)[rank])
    same(((name.removeprefix("_orig_mod."), value) for name, value in model.named_parameters()), of_wide(3, x))
    return graphs.frame_count


@program
def compiled_ddp(rank: int, size: int) -> None:
    assert compiled_steps(rank, size, "aot_eager") > 1


@slow
def compiled_ddp_in_other_ways(rank: int, size: int) -> None:
    assert compiled_steps(rank, size, "eager") > 1
    with torch._dynamo.config.patch(optimize_ddp=False):
        assert compiled_steps(rank, size, "aot_eager") == 1
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        compiled_steps(rank, size, "aot_eager")


@slow
def compiled_ddp_whole_step(rank: int, size: int) -> None:
    """A step that is compiled as a whole: what the compiler leaves to Python runs as written."""
    torch._dynamo.reset()
    model = DistributedDataParallel(Wide(), bucket_cap_mb=1)
    x = torch.randn(2 * size, 600, generator=torch.Generator().manual_seed(2))
    train_compiled = torch.compile(train, backend="aot_eager")
    train_compiled(model, x.chunk(size)[rank])
    same(model.named_parameters(), of_wide(3, x))


@slow
def compiled_fsdp2(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (size,))
    model = Model()
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(torch.compile(model, backend="aot_eager"), batch(size).chunk(size)[rank])
    same(full(model.named_parameters()), plain(3, size))


@slow
def compiled_collectives(rank: int, size: int) -> None:
    """Functional collectives, and those that compile to them, give one graph."""

    def f(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        y = functional.all_reduce(x * 2, "sum", group)
        return functional.all_gather_tensor(y + 1, 0, group).sum()

    torch._dynamo.reset()
    x = torch.full((3,), float(rank))
    found = torch.compile(f, backend="aot_eager", fullgraph=True)(x, dist.group.WORLD)
    assert found == size * 3 * (size * (size - 1) + 1)


@slow
def compiled_by_inductor(rank: int, size: int) -> None:
    for _ in range(2):  # the second time it has been compiled already, which torch tells all process groups
        torch.compiler.reset()
        model = DistributedDataParallel(torch.compile(Model()))
        train(model, batch(size).chunk(size)[rank])
        same(((name.replace("_orig_mod.", ""), value) for name, value in model.named_parameters()), plain(3, size))


# -- sharded -----------------------------------------------------------------------------------------------------------


@program
def fsdp1(rank: int, size: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
    train(model, batch(size).chunk(size)[rank])
    with FullyShardedDataParallel.summon_full_params(model):
        same(
            ((name.replace("_fsdp_wrapped_module.", ""), value) for name, value in model.named_parameters()),
            plain(3, size),
        )


@program
def fsdp2(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    model = Model()
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, batch(size).chunk(size)[rank])
    same(full(model.named_parameters()), plain(3, size))


@program
def hsdp(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    if size % 2:
        return
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Model(), mesh=mesh)
    train(model, batch(size).chunk(size)[rank])
    same(full(model.named_parameters()), plain(3, size))


@program
def tensor_parallel(rank: int, size: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    model = parallelize_module(Model(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train(model, batch(size))
    same(full(model.named_parameters()), plain(3, size))


@program
def tensor_and_data_parallel(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if size % 2:
        return
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))
    model = parallelize_module(Model(), mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    train(model, batch(size).chunk(size // 2)[mesh.get_local_rank("data")])
    same(full(model.named_parameters()), plain(3, size))


@program
def pipeline(rank: int, size: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(1)
    layers = [nn.Linear(8, 8) for _ in range(size)]
    whole = copy.deepcopy(nn.Sequential(*layers))
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"), input_args=(torch.zeros(2, 8),))
    x = batch(1, 8)

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out - target).square().sum()

    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss, scale_grads=False)
    if rank == 0:
        schedule.step(x, target=x) if size == 1 else schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=x)
    else:
        schedule.step()
    loss(whole(x), x).backward()
    torch.testing.assert_close(layers[rank].weight.grad, whole[rank].weight.grad)


@program
def dtensor(rank: int, size: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    x, w = torch.arange(12.0 * size).view(2 * size, 6), torch.arange(6.0 * size).view(6, size)
    cut = distribute_tensor(x, mesh, [Shard(0)])
    product = cut @ distribute_tensor(w, mesh, [Replicate()])
    assert torch.equal(product.full_tensor(), x @ w)
    partial = cut.sum()
    assert partial.full_tensor() == x.sum()
    again = cut.redistribute(mesh, [Shard(1)]) if 6 % size == 0 else cut.redistribute(mesh, [Replicate()])
    assert torch.equal(again.full_tensor(), x)


@program
def checkpoint(rank: int, size: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders, 0)
    mesh = init_device_mesh("cpu", (size,))
    model = fully_shard(Model(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, batch(size).chunk(size)[rank], 1, optimizer)
    state, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folders[0])
    other = fully_shard(Model(), mesh=mesh)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    state, of_optimizer = get_state_dict(other, fresh)
    dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=folders[0])
    set_state_dict(other, fresh, model_state_dict=state, optim_state_dict=of_optimizer)
    for got, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(got.full_tensor(), wanted.full_tensor())


@program
def asynchronous_checkpoint(rank: int, size: int) -> None:
    """Written by another thread, with a group of its own, while training goes on."""
    import torch.distributed.checkpoint as dcp

    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders, 0)
    beside = dist.new_group()
    model = DistributedDataParallel(Model())
    saved = {name: value.detach().clone() for name, value in model.module.state_dict().items()}
    writing = dcp.async_save(model.module.state_dict(), checkpoint_id=folders[0], process_group=beside)
    train(model, batch(size).chunk(size)[rank], 20)
    writing.result()
    fresh = {name: torch.zeros_like(value) for name, value in saved.items()}
    dcp.load(fresh, checkpoint_id=folders[0])
    for name, value in saved.items():
        assert torch.equal(fresh[name], value)


# -- collectives as such -----------------------------------------------------------------------------------------------


@program
def functional_collectives(rank: int, size: int) -> None:
    group = dist.group.WORLD
    x = torch.full((size, 2), float(rank))
    total = functional.all_reduce(x, "sum", group)
    assert torch.equal(torch.as_tensor(total), torch.full((size, 2), size * (size - 1) / 2))
    gathered = functional.all_gather_tensor(x, 0, group)
    assert gathered.shape == (size * size, 2) and gathered[-1, 0] == size - 1
    scattered = functional.reduce_scatter_tensor(x, "avg", 0, group)
    assert torch.equal(torch.as_tensor(scattered), torch.full((1, 2), (size - 1) / 2))
    swapped = functional.all_to_all_single(x, None, None, group)
    assert swapped[:, 0].tolist() == list(map(float, range(size)))
    several = functional.all_reduce_coalesced([x, x + 1], "max", group)
    assert several[1][0, 0] == size
    assert functional.broadcast(x, 1, group)[0, 0] == 1


@program
def objects(rank: int, size: int) -> None:
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": each} for each in range(size)]
    got = [None]
    dist.scatter_object_list(got, [f"for {each}" for each in range(size)] if rank == 0 else None, 0)
    assert got == [f"for {rank}"]
    at_root = [None] * size if rank == 1 else None
    dist.gather_object("x" * rank, at_root, 1)
    assert at_root is None or at_root == ["x" * each for each in range(size)]
    if rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    elif rank == 1:
        got = [None]
        dist.recv_object_list(got, 0)
        assert got == [{"a": 1}]
    # Bytes that the copy overwrites: the codes between hosts are those of what was sent.
    whole = torch.full((size, 3), rank + 1, dtype=torch.uint8)
    dist.all_gather(list(whole), whole[0])
    assert whole[:, 0].tolist() == [each + 1 for each in range(size)]
    pieces = list(torch.arange(size, dtype=torch.uint8))
    mine = pieces[1] if rank == 0 else torch.zeros((), dtype=torch.uint8)
    dist.scatter(mine, pieces if rank == 0 else None, 0)
    assert int(mine) == rank


@program
def objects_of_strangers(rank: int, size: int) -> None:
    """Between hosts, what torch would unpickle is refused if it has no code of the job's secret."""
    group = dist.new_group()
    if group.world.backend == "shm":  # the kernel vouches for it
        return
    comm = group._comm("cpu")
    if rank == 0:
        comm.key = b"another"
    everyone, mine = set(range(size)), torch.zeros(3, dtype=torch.uint8)
    exchanges = (  # and who raises
        (lambda: dist.broadcast_object_list([rank], 0, group), everyone - {0}),
        (lambda: dist.all_gather_object([None] * size, rank, group), everyone),
        (lambda: dist.scatter(mine, [mine] * size if rank == 0 else None, 0, group), everyone - {0}),
        (lambda: dist.gather_object(rank, [None] * size if rank == 1 else None, 1, group), {1}),
    )
    for exchange, expected in exchanges:
        group._broken = None
        try:
            exchange()
        except spmd.PeerLost as error:
            assert rank in expected and "is not of this job" in str(error)
        else:
            assert rank not in expected


@program
def messages(rank: int, size: int) -> None:
    if rank == 0:
        for peer in range(1, size):
            dist.send(torch.full((3,), 10.0 * peer), peer, tag=7)
            dist.send(torch.full((3,), 20.0 * peer), peer, tag=8)
        seen = set()
        for _ in range(1, size):
            x = torch.empty(2)
            source = dist.recv(x, tag=9)  # of its own: who has sent this goes on to what is below
            assert x.tolist() == [source, source]
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        x, y = torch.empty(3), torch.empty(3)
        dist.recv(y, 0, tag=8)
        dist.recv(x, 0, tag=7)
        assert (x[0], y[0]) == (10 * rank, 20 * rank)
        dist.send(torch.full((2,), float(rank)), 0, tag=9)
    x, y = torch.full((1 << 18,), float(rank)), torch.empty(1 << 18)
    operations = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, y, (rank - 1) % size),
    ]
    sent, received = dist.batch_isend_irecv(operations)
    sent.wait()
    received.wait()
    assert (y[-1], received._source_rank()) == ((rank - 1) % size, (rank - 1) % size)
    try:
        sent._source_rank()
    except spmd.SpecError as error:
        assert "has received nothing" in str(error)
    else:
        raise AssertionError("a send has no source")


@program
def groups_in_any_order(rank: int, size: int) -> None:
    """Each rank makes the groups of two that it is in, each beginning with another one."""
    pairs = [(one, other) for one in range(size) for other in range(one + 1, size) if rank in (one, other)]
    pairs = pairs[rank % max(1, len(pairs)) :] + pairs[: rank % max(1, len(pairs))]
    groups = {pair: dist.new_group(list(pair), use_local_synchronization=True) for pair in pairs}
    for pair in sorted(groups):
        x = torch.tensor([rank])
        dist.all_reduce(x, group=groups[pair])
        assert x.item() == sum(pair)


@program
def groups_of_a_bound_device(rank: int, size: int) -> None:
    """As `init_process_group(device_id=)` binds one: groups are made anew, since only C++ backends can be split."""
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    x = torch.tensor([rank])
    dist.all_reduce(x, group=dist.new_group())
    assert x.item() == sum(range(size))
    try:
        dist.split_group(split_ranks=[list(range(size))])
    except RuntimeError as error:
        assert "does not support splitting" in str(error)
    else:
        raise AssertionError("a group was split")


@program
def coalesced(rank: int, size: int) -> None:
    tensors = [torch.full((3,), rank + 1.0), torch.full((2, 2), 2.0 * rank)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert tensors[0][0] == size * (size + 1) / 2 and tensors[1][0, 0] == size * (size - 1)
    outs = [torch.empty(size * 2), torch.empty(size * 3)]
    with dist._coalescing_manager():
        for out, length in zip(outs, (2, 3), strict=True):
            dist.all_gather_into_tensor(out, torch.full((length,), float(rank)))
    assert outs[1].view(size, 3)[:, 0].tolist() == list(map(float, range(size)))
    back = torch.empty(2)
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(back, outs[0])
    assert back.tolist() == [size * rank, size * rank]


@program
def refused_before_it_begins(rank: int, size: int) -> None:
    """Bad arguments on one rank alone: the others don't notice, and the group goes on."""
    x, long, across = torch.ones(2, 3), torch.ones(3), torch.zeros(3, 2)
    wrong = (
        ("expanded", lambda: dist.all_reduce(torch.zeros(1).expand(3))),
        ("meta", lambda: dist.all_reduce(torch.zeros(3, device="meta"))),
        ("own part", lambda: dist.all_gather([torch.zeros(2) for _ in range(size)], long)),
        ("own part", lambda: dist.all_gather([across.clone() for _ in range(size)], x)),  # would be scrambled
        ("own part", lambda: dist.gather(x, [across] * size, 0)),
        ("own part", lambda: dist.scatter(across, [x] * size, 0)),
        ("own part", lambda: dist.reduce_scatter(across, [x] * size)),
        ("own part", lambda: dist.all_to_all([across.clone() for _ in range(size)], [x] * size)),
        ("own part", lambda: dist.all_to_all_single(torch.zeros(size, 2), torch.ones(size, 3))),
        ("contiguous", lambda: dist.all_gather_into_tensor(torch.zeros(size, size + 1).t(), torch.ones(size + 1))),
        ("without dimensions", lambda: dist.all_to_all_single(torch.zeros(()), torch.ones(()))),
        ("fake", lambda: dist.all_reduce(FakeTensorMode().from_tensor(long))),
        ("no derivative", lambda: torch.func.grad(lambda y: dist.all_reduce(y * 2) or y.sum())(long)),
    )
    for word, call in wrong if rank == 0 else ():
        try:
            call()
        except spmd.SpecError as error:
            assert word in str(error), error
        else:
            raise AssertionError(f"{word}: nothing was raised")
    pieces = [torch.zeros(1, each + 1) for each in range(size)]  # of several lengths, and with a dimension of size 1
    dist.all_gather(pieces, torch.full((rank + 1,), float(rank)))
    assert all((piece == each).all() for each, piece in enumerate(pieces))
    longer = torch.zeros(size, 6)  # rows of another length than those that fill them
    dist.all_to_all_single(longer, torch.arange(6.0 * size).view(2 * size, 3))
    assert longer.tolist() == [torch.arange(6.0 * rank, 6.0 * rank + 6).tolist()] * size


@program
def futures(rank: int, size: int) -> None:
    """Asking for a future finishes nothing, and its callbacks may communicate."""
    x = torch.full((1 << 17,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    chained = work.get_future().then(lambda done: done.value()[0].sum())
    assert chained.wait() == (1 << 17) * size * (size - 1) / 2
    assert work.is_completed() and work.is_success()
    pieces = [torch.zeros(1) for _ in range(size)]
    work = dist.all_gather(pieces, torch.full((1,), float(rank)), async_op=True)
    assert torch.cat(work.get_future().wait()).tolist() == list(range(size))  # one tensor a rank, as Gloo's
    assert torch.cat(work.result()).tolist() == list(range(size))
    if rank == 0:  # the others have not come, and won't before this has returned
        late = dist.barrier(async_op=True)
        late.get_future()
        assert not late.is_completed()
        dist.group.WORLD.get_group_store().set("go", "1")
    else:
        dist.group.WORLD.get_group_store().wait(["go"])
        late = dist.barrier(async_op=True)
    late.wait()


@program
def callbacks_that_communicate(rank: int, size: int) -> None:
    """Ranks come to them at different times, and start the same collectives in the same order."""
    futures, buckets = [], range(6)

    def sum_again(future: torch.futures.Future) -> torch.Tensor:
        y = future.value()[0].repeat(2)
        dist.all_reduce(y, async_op=True).get_future().wait()
        return y

    for bucket in buckets:
        work = dist.all_reduce(torch.tensor([float(bucket)]), async_op=True)
        futures.append(work.get_future().then(sum_again))
        time.sleep(0.02 * ((rank + bucket) % 2))
    for bucket, future in zip(buckets, futures, strict=True):
        assert torch.equal(future.wait(), torch.full((2,), float(bucket * size * size)))
    works = [dist.all_reduce(torch.tensor([float(bucket)]), async_op=True) for bucket in buckets]
    futures = []
    for bucket, work in zip(buckets, works, strict=True):  # all works are under way before the first callback
        time.sleep(0.02 * ((rank + bucket) % 2))
        futures.append(work.get_future().then(sum_again))
    for bucket, future in zip(buckets, futures, strict=True):
        assert torch.equal(future.wait(), torch.full((2,), float(bucket * size * size)))
    before, after = (rank - 1) % size, (rank + 1) % size
    if size > 1:  # a message may come after the next collective
        x = torch.zeros(1)
        received = dist.irecv(x, before).get_future().then(lambda future: float(x))
        dist.barrier()
        dist.isend(torch.full((1,), float(rank)), after).wait()
        assert received.wait() == before


@program
def a_callback_that_waits_for_the_program(rank: int, size: int) -> None:
    """It is waited for no longer than for a rank."""
    group, store = dist.new_group(timeout=datetime.timedelta(seconds=3)), dist.group.WORLD.get_group_store()
    if rank:
        store.wait(["begun"])
        dist.all_reduce(torch.ones(1), group=group)
        return
    on = threading.Event()
    dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().then(lambda future: on.wait(60))
    store.set("begun", "1")
    try:
        dist.barrier(group=group)
    except spmd.MeshError as error:
        assert "a callback of the future of an earlier operation of this group has not ended (got 3 s)" in str(error)
    else:
        raise AssertionError("nothing was raised")
    on.set()


@program
def a_wait_with_a_limit(rank: int, size: int) -> None:
    """A wait with its own time limit, which its error names; of coalesced operations, too."""
    group, other, store = dist.new_group(), dist.new_group(), dist.group.WORLD.get_group_store()
    if rank:
        store.wait(["waited"])
        return
    with dist._coalescing_manager(other, torch.device("cpu"), async_ops=True) as manager:
        dist.barrier(group=other, async_op=True)
    for work in (dist.barrier(group=group, async_op=True), *manager.works):
        assert not work.get_future().done()
        try:
            work.wait(datetime.timedelta(seconds=0.1))
        except RuntimeError as error:  # as torch's
            assert isinstance(error, spmd.PeerLost)
            text = str(error)
            assert "barrier on rank 0 got no answer for 0.1 s" in text and "init_process_group" in text, text
        else:
            raise AssertionError("nothing was raised")
    store.set("waited", "1")


@program
def asked_after_in_turns(rank: int, size: int) -> None:
    """Each rank asks whether the operation of one group is over, while the next one asks after another group's."""
    groups = [dist.new_group() for _ in range(2)]
    for group in groups:
        dist.barrier(group=group)
    works = [dist.all_reduce(torch.ones(1 << 18), group=group, async_op=True) for group in groups]
    end = time.monotonic() + 60
    while not works[rank % 2].is_completed():
        assert time.monotonic() < end
    for work in works:
        work.wait()


@program
def many_under_way(rank: int, size: int) -> None:
    """Starting operations waits for nobody, however many are under way."""
    group, tensors = dist.new_group(), [torch.ones(3) for _ in range(20)]
    if rank == 1:
        dist.recv(torch.empty(1), 0, group=group)
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    if rank == 0:
        dist.send(torch.ones(1), 1, group=group)
    for work in works:
        work.wait()
    assert all(x.tolist() == [size] * 3 for x in tensors)


@program
def inference(rank: int, size: int) -> None:
    """What is made in inference mode can be written there alone, but any thread may finish an operation."""
    plain = torch.full((3,), float(rank))
    with torch.inference_mode():
        mine, whole = torch.full((3,), float(rank)), torch.empty(3 * size)
        dist.all_gather_into_tensor(whole, mine, async_op=True).get_future().wait()
        works = [dist.broadcast(x, 1, async_op=True) for x in (mine, plain)]
    assert whole.tolist() == [each for each in range(size) for _ in range(3)]
    for work in works:
        work.wait()
    assert mine.tolist() == plain.tolist() == [1, 1, 1]
    dist.reduce_scatter_tensor(mine, whole)
    assert mine.tolist() == [rank * size] * 3


@program
def two_threads(rank: int, size: int) -> None:
    """Ranks take turns at being late in one group or in the other: no thread keeps the other's group waiting."""
    group, wrong = dist.new_group(), []

    def beside() -> None:
        x = torch.zeros(1)
        for number in range(200):
            x.fill_(number + rank)
            dist.all_reduce(x, group=group)
            if x.item() != size * number + size * (size - 1) / 2:
                wrong.append(number)

    thread = threading.Thread(target=beside)
    if rank % 2:
        thread.start()
    y = torch.zeros(1 << 12)
    for number in range(200):
        y.fill_(number)
        dist.all_reduce(y)
        assert y[-1] == size * number
        if number == 20 and not rank % 2:
            thread.start()
    thread.join()
    assert not wrong


@program
def disagreement(rank: int, size: int) -> None:
    group = dist.new_group()
    for attempt in range(2):
        try:
            dist.all_reduce(torch.ones(2 + rank if attempt == 0 else 2), group=group)
        except spmd.CollectiveMismatch as error:
            assert ("ranks disagree" if attempt == 0 else "this process group has failed") in str(error)
        else:
            raise AssertionError("nothing was raised")
    dist.barrier()  # other groups go on
    try:
        dist.all_reduce(torch.eye(2 + rank).to_sparse(), group=dist.new_group())
    except spmd.CollectiveMismatch as error:
        assert "a sparse [2, 2]" in str(error) and "a sparse [3, 3]" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    later = dist.new_group()
    time.sleep(0.1 * (rank == 0))
    try:  # what the others did in the first group is not what they do now
        dist.all_reduce(torch.ones(7), group=later) if rank == 0 else dist.barrier(group=later)
    except spmd.CollectiveMismatch as error:
        assert "all_reduce float32[7]" in str(error) and f"rank {size - 1}: barrier" in str(error), error
    else:
        raise AssertionError("nothing was raised")


@program
def groups_that_end_on_one_rank_alone(rank: int, size: int) -> None:
    """What is under way in them fails there, and on the ranks that wait for it; other groups go on."""
    last, other = size - 1, dist.new_group()
    for end in (dist.ProcessGroup.abort, dist.distributed_c10d._abort_process_group, dist.destroy_process_group):
        for used in (True, False):
            group = dist.new_group()
            work = dist.all_reduce(torch.ones(1 << 20), group=group, async_op=True) if used and rank == last else None
            if rank == last:
                if end is dist.ProcessGroup.abort:
                    group.abort()
                else:
                    end(group)
            calls = [] if rank == last else [lambda group=group: dist.all_reduce(torch.ones(1 << 20), group=group)]
            for call in [work.wait] if work is not None else calls:
                try:
                    call()
                except (spmd.MeshError, spmd.PeerLost) as error:
                    told = f"the group was shut down on rank {last} without its part in all_reduce float32[1048576]"
                    assert (told if work is None else "when its group was shut down on this rank") in str(error), error
                else:
                    raise AssertionError("nothing was raised")
            x = torch.ones(1)
            dist.all_reduce(x, group=other)
            assert x == size
            if rank != last:
                dist.destroy_process_group(group)


@program
def disagreement_that_nobody_has_waited_for(rank: int, size: int) -> None:
    """Other groups go on, whether a background thread advances the operation or a wait for another group does."""
    for by_a_thread in (False, True):
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(2 + rank), group=group, async_op=True)
        future = work.get_future() if by_a_thread else None
        for _ in range(3):
            x = torch.ones(1)
            dist.all_reduce(x)
            assert x == size
        for wait in (work.wait, work.wait if future is None else future.wait):
            try:
                wait()
            except spmd.CollectiveMismatch as error:
                assert f"rank {size - 1}: all_reduce float32[{size + 1}]" in str(error), error
            else:
                raise AssertionError("nothing was raised")


@program
def a_circle(rank: int, size: int) -> None:
    """All find out that they wait for each other, also one whose peers go on first; other groups go on."""
    group, x = dist.new_group(), torch.ones(1)
    dist.all_reduce(x, async_op=True).get_future().wait()  # which leaves a thread that has nothing to do
    try:
        dist.recv(x, (rank + 1) % size, group=group)
    except spmd.CollectiveMismatch as error:
        assert "all ranks wait for each other, and none goes on" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    dist.all_reduce(y := torch.ones(1))
    assert y == size


@program
def monitored_barrier(rank: int, size: int) -> None:
    group = dist.group.WORLD
    group.monitored_barrier(datetime.timedelta(seconds=60))
    if rank == 0:
        try:
            group.monitored_barrier(datetime.timedelta(0))
        except RuntimeError as error:
            assert "timed out in monitoredBarrier" in str(error)
        else:
            raise AssertionError("nothing was raised")


@program
def a_launched_mesh(rank: int, size: int) -> None:
    """Its device mesh takes an existing process group, or makes one on the mesh's own arena."""
    for _ in range(2):
        with spmd.Mesh({"data": -1}) as mesh:
            total = torch.ones(1)
            dist.all_reduce(total, group=mesh.device_mesh["data"].get_group())
            assert total == size and mesh.device_mesh.mesh_dim_names == ("data",)
            array = spmd.put(torch.arange(2.0 * size), spmd.P("data"), mesh=mesh)
            assert array.to_dtensor().sum().full_tensor() == size * (2 * size - 1)
            dist.destroy_process_group()
            assert mesh.device_mesh["data"].size() == size
            dist.barrier()
    try:
        dist.barrier()
    except spmd.MeshError as error:
        assert "closed" in str(error)
    dist.destroy_process_group()


@program
def events(rank: int, size: int) -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(5))
    (event,) = [event for event in profile.events() if event.name == "spmd:all_reduce"]
    assert event.is_async and event.input_shapes == [[5]]


def meeting_place(name: str, rank: int, size: int) -> dist.Store:
    """A store for each program; part of a TCPStore if the ranks are on several hosts."""
    method = os.environ["SPMD_INIT_METHOD"]
    kind, _, place = method.partition("://")
    if kind == "file":
        return dist.FileStore(os.path.join(os.path.dirname(place), name), size)
    host, _, port = place.partition(":")
    if method not in _stores:
        _stores[method] = dist.TCPStore(host, int(port), size, rank == 0)
    return dist.PrefixStore(name, _stores[method])


_stores: dict[str, dist.Store] = {}


def run(name: str, rank: int, size: int) -> str:
    """Run a program: "ok", or what it raised."""
    store = meeting_place(name, rank, size)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("spmd", store=store, rank=rank, world_size=size, timeout=limit)
    try:
        PROGRAMS[name](rank, size)
        if dist.is_initialized():
            dist.barrier()
        return "ok"
    except BaseException:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    warnings.simplefilter("ignore")
    rank, size = int(os.environ["SPMD_RANK"]), int(os.environ["SPMD_SIZE"])
    names = sys.argv[1:] or sorted(set(PROGRAMS) - SLOW)
    for name in PROGRAMS if names == ["all"] else names:
        began = time.monotonic()
        found = run(name, rank, size)
        if rank == 0:
            print(f"({name} took {time.monotonic() - began:.1f} s)", file=sys.stderr)
        if rank == 0 or found != "ok":
            sys.stdout.write(f"{name}: {found}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
