"""`mesh.device_mesh` inside ranks, and Arrays as DTensors and back."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from internals import ranks_import
from torch import nn

import spmd
from spmd import MeshError, P, PeerLost, SpecError, put


@pytest.fixture(scope="module", autouse=True)
def torch_is_imported() -> Iterator[None]:
    """What DTensors and the compiler need, once for all ranks; programs of docs/torch_distributed.md import it late."""
    modules = "tensor.parallel", "fsdp"
    with ranks_import("torch._dynamo.backends.debugging", *(f"torch.distributed.{name}" for name in modules)):
        yield


@pytest.fixture
def mesh(shared_mesh: Any) -> spmd.Mesh:
    return shared_mesh({"data": 2, "model": 2})


def test_names_and_ranks_are_the_meshs(mesh: spmd.Mesh) -> None:
    def look() -> tuple[Any, ...]:
        there = mesh.device_mesh
        same = there is mesh.device_mesh
        return there.mesh_dim_names, there.mesh.tolist(), list(there.get_coordinate()), same

    coordinates = [list(mesh.coords(rank).values()) for rank in range(4)]
    found = mesh.run(look)
    assert found == [(("data", "model"), [[0, 1], [2, 3]], each, True) for each in coordinates]


def test_a_driver_is_no_rank(mesh: spmd.Mesh) -> None:
    with pytest.raises(MeshError, match=r"inside mesh\.run"):
        _ = mesh.device_mesh
    with pytest.raises(MeshError, match=r"inside mesh\.run"):
        put(torch.ones(2), mesh=mesh).to_dtensor()


def test_objects_and_submitted_functions_take_part_in_no_collective(make_mesh: Any) -> None:
    """Another rank's would be in another call, of the program itself perhaps."""
    mesh = make_mesh({"data": 2})

    def total() -> float:
        x = torch.ones(())
        torch.distributed.all_reduce(x, group=mesh.device_mesh["data"].get_group())
        return x.item()

    for what in ("make mesh.device_mesh", "communicate"):
        with pytest.raises(MeshError, match=f"remote object cannot {what}: the other ranks take no part"):
            mesh.remote(total, rank=0)
        with pytest.raises(MeshError, match=rf"mesh\.submit cannot {what}: its rank runs it alone"):
            mesh.submit(total).result(60)
        assert mesh.run(total) == [2, 2]


def test_groups_are_made_anew_when_a_rank_was_replaced(make_mesh: Any) -> None:
    """The new rank has made none of those that the other one has made, or has destroyed."""
    mesh = make_mesh({"data": 2})

    def total(kept: bool = False) -> tuple[float, bool]:
        before = mesh.device_mesh
        group = dist.new_group()
        group.monitored_barrier(datetime.timedelta(seconds=60))
        x = torch.ones(())
        dist.all_reduce(x, group=group)
        if not kept:
            dist.destroy_process_group()
        return x.item(), before is mesh.device_mesh

    for kept in (False, True, True):
        assert mesh.run(total, kept) == [(2, kept)] * 2
        with pytest.raises(PeerLost):
            mesh.run(lambda: os._exit(1) if mesh.rank else dist.barrier(mesh.device_mesh.get_group()))
    assert mesh.run(total) == [(2, False)] * 2


def test_a_group_of_before_a_rank_was_replaced_is_closed_late(make_mesh: Any) -> None:
    """Its memory is another group's by then."""
    mesh = make_mesh({"data": 3})

    def total(late: bool) -> float:
        if late:
            time.sleep(0.3)
            dist.destroy_process_group()
            time.sleep(0.5)  # the others wait meanwhile, and look whether this rank will come
        x = torch.ones(())
        dist.all_reduce(x, group=mesh.device_mesh.get_group())
        return x.item()

    assert mesh.run(lambda: total(False)) == [3] * 3
    with pytest.raises(PeerLost):
        mesh.run(lambda: os._exit(1) if mesh.rank == 2 else None)
    assert mesh.run(lambda: total(mesh.rank == 1)) == [3] * 3


@pytest.mark.parametrize("destroys", [False, True])
def test_groups_that_only_some_ranks_have_made_before_a_call_failed(make_mesh: Any, destroys: bool) -> None:
    """Of the device mesh, or of the program's own: all make them anew. What all had made before stays."""
    mesh = make_mesh({"data": 2})
    kept: list[Any] = []

    def fail(first: bool) -> None:
        made = None if first else mesh.device_mesh
        if mesh.rank == 1:
            time.sleep(0.3)
            raise KeyError("mine")
        kept.append(mesh.device_mesh if made is None else dist.new_group([0, 1]))

    def total() -> tuple[float, bool]:
        before = bool(kept) and kept[-1] is mesh.device_mesh
        x = torch.ones(())
        for group in (mesh.device_mesh.get_group(), dist.new_group([0, 1])):
            dist.all_reduce(x, group=group)
        kept.append(mesh.device_mesh)
        return x.item(), before

    def destroy() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    for first in (True, False):
        with pytest.raises(KeyError):
            mesh.run(fail, first)
        if destroys:
            mesh.run(destroy)
        assert mesh.run(total) == [(4, not (first or destroys))] * 2
        assert mesh.run(total) == [(4, True)] * 2
        with pytest.raises(KeyError):
            mesh.run(lambda: {}[mesh.rank])
        assert mesh.run(total) == [(4, True)] * 2


def test_groups_are_made_anew_when_the_program_has_begun_again(mesh: spmd.Mesh, tmp_path: Path) -> None:
    def totals() -> tuple[float, float, bool]:
        before = mesh.device_mesh
        one = spmd.put(torch.ones(4), P("model")).to_dtensor().sum().full_tensor()
        dist.destroy_process_group()
        dist.init_process_group("spmd", store=dist.FileStore(str(tmp_path / "store"), 4), rank=mesh.rank, world_size=4)
        again = spmd.put(torch.ones(4), P("model")).to_dtensor().sum().full_tensor()
        same = before is mesh.device_mesh
        dist.destroy_process_group()
        return one.item(), again.item(), same

    assert mesh.run(totals) == [(4, 4, False)] * 4


def test_groups_that_a_failed_region_leaves_are_destroyed(mesh: spmd.Mesh) -> None:
    """Also by ranks that have never used them; nobody waits for what was before the failure."""

    def fails() -> None:
        _ = mesh.device_mesh
        if mesh.rank == 3:
            raise ValueError("on purpose")
        dist.barrier()

    def total() -> float:
        _ = mesh.device_mesh
        dist.destroy_process_group()
        return spmd.put(torch.ones(4), P("model")).to_dtensor().sum().full_tensor().item()

    with pytest.raises(ValueError, match="on purpose"):
        mesh.run(fails)
    assert mesh.run(total) == [4] * 4


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_message_is_the_first_operation_after_a_failure(make_mesh: Any, backend: str) -> None:
    """It goes by what its group has opened afresh, not by what it had before."""
    mesh = make_mesh({"data": 2}, backend=backend)

    def exchange(fails: bool) -> float:
        received, other = torch.zeros(1), 1 - mesh.device_mesh.get_rank()
        work = dist.isend(torch.full((1,), 2.0 - other), other)
        dist.recv(received, other)
        work.wait()
        if fails:
            raise ValueError("on purpose")
        return float(received)

    assert mesh.run(exchange, False) == [2.0, 1.0]
    with pytest.raises(ValueError, match=r"on purpose"):
        mesh.run(exchange, True)
    assert mesh.run(exchange, False) == [2.0, 1.0]


def test_compiled_code_reads_it(make_mesh: Any) -> None:
    """Also the first time, which makes process groups: the compiler leaves that as it is."""
    mesh = make_mesh({"data": 2})

    def size() -> torch.Tensor:
        return torch.ones(()) * mesh.device_mesh["data"].size()

    compiled = torch.compile(size, backend="eager")
    assert mesh.run(compiled) == mesh.run(compiled) == [2, 2]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def test_fsdp_and_tensor_parallel_modules_in_a_run(mesh: spmd.Mesh) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def step() -> list[torch.Tensor]:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        there = mesh.device_mesh
        parallel = parallelize_module(model(), there["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(parallel, mesh=there["data"])
        parallel(x.chunk(2)[there.get_local_rank("data")]).square().mean().backward()
        return [parameter.grad.full_tensor() for parameter in parallel.parameters()]

    expected = model()
    expected(x).square().mean().backward()
    for found in mesh.run(step):
        for got, parameter in zip(found, expected.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad)
    with pytest.raises(ZeroDivisionError):
        mesh.run(lambda: 1 / 0)
    torch.testing.assert_close(mesh.run(step)[0][0], expected[0].weight.grad)  # also after a failure


class Scored(nn.Module):
    """The compiler leaves an `nn.Sequential` that DDP calls to Python, but not a module of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square()


def test_compiled_ddp_in_a_run(shared_mesh: Any) -> None:
    mesh = shared_mesh({"data": 2})
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def train(parallel: nn.Module, mine: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            parallel(mine).mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in parallel.parameters()]

    def compiled() -> tuple[int, list[torch.Tensor]]:
        from torch._dynamo.testing import CompileCounterWithBackend

        there = mesh.device_mesh
        graphs = CompileCounterWithBackend("eager")
        parallel = nn.parallel.DistributedDataParallel(Scored(), process_group=there["data"].get_group())
        mine = x.chunk(2)[there.get_local_rank("data")]
        learnt = train(torch.compile(parallel, backend=graphs), mine)
        return graphs.frame_count, learnt

    expected = train(Scored(), x)
    for graphs, found in mesh.run(compiled):
        assert graphs > 0
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model"), P("model", "data"), P(("data", "model"))])
def test_there_and_back_without_a_copy(mesh: spmd.Mesh, spec: P) -> None:
    whole = torch.arange(32.0).view(8, 4)
    array = put(whole, spec, mesh=mesh)

    def there_and_back() -> tuple[Any, ...]:
        dtensor = array.to_dtensor()
        back = spmd.from_dtensor(dtensor, mesh=mesh)
        places = {one.local.data_ptr() for one in (array, back)} | {dtensor.to_local().data_ptr()}
        return torch.equal(dtensor.full_tensor(), whole), back.spec, tuple(back.shape), len(places)

    assert mesh.run(there_and_back) == [(True, spec, (8, 4), 1)] * 4


def test_partial_is_reduced(mesh: spmd.Mesh) -> None:
    array = put(torch.arange(8.0).view(8, 1), P("data"), mesh=mesh)

    def total() -> tuple[P, list[float]]:
        found = spmd.from_dtensor(array.to_dtensor().sum(0), mesh=mesh)
        return found.spec, found.local.tolist()

    assert mesh.run(total) == [(P(), [28.0])] * 4


def test_what_an_spmd_function_returns(mesh: spmd.Mesh) -> None:
    array = put(torch.arange(8.0), P("data"), mesh=mesh)

    @spmd.spmd(mesh=mesh)
    def doubled() -> Any:
        return spmd.from_dtensor(array.to_dtensor() * 2)

    found = doubled()
    assert found.spec == P("data") and torch.equal(found.full(), 2 * torch.arange(8.0))


def test_collectives_of_torch_in_a_step_are_followed_by_type(mesh: spmd.Mesh) -> None:
    """What all ranks got is the same on all of them, and what each got its part of is not."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    def partial(x: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        return spmd.from_dtensor(DTensor.from_local(x, mesh.device_mesh, [Partial(), Replicate()]))

    def gathered(x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        return DTensor.from_local(x, mesh.device_mesh, [Shard(0), Replicate()]).full_tensor().view(2, 2).sum(0)

    def in_place(x: torch.Tensor, later: bool = False) -> torch.Tensor:
        total = x.clone()
        work = dist.all_reduce(total, group=mesh.device_mesh["data"].get_group(), async_op=later)
        if later:
            work.wait()
        return total

    def of_all_ranks(x: torch.Tensor) -> torch.Tensor:
        total = x / 2
        dist.all_reduce(total)
        return total

    def functionally(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", mesh.device_mesh["data"].get_group())

    ways = partial, gathered, in_place, lambda x: in_place(x, later=True), of_all_ranks, functionally
    for way in ways:
        for _ in range(2):
            assert spmd.spmd(way, mesh=mesh, in_specs=P("data"))(torch.arange(4.0)).tolist() == [2, 4]

    def scattered(x: torch.Tensor) -> torch.Tensor:
        mine = torch.empty(1)
        dist.reduce_scatter_tensor(mine, x.clone(), group=mesh.device_mesh["data"].get_group())
        return mine

    with pytest.raises(SpecError, match=r"may differ between ranks along data.*a message"):
        spmd.spmd(scattered, mesh=mesh)(torch.ones(2))
    part = spmd.spmd(scattered, mesh=mesh, out_specs=P("data"))(torch.arange(2.0))
    assert part.tolist() == [0, 2]
    with pytest.raises(SpecError, match="along data"):
        spmd.spmd(lambda x: in_place(x) + x, mesh=mesh, in_specs=P("data"))(torch.ones(4))


def test_what_a_gradient_does_not_go_through_is_refused(mesh: spmd.Mesh) -> None:
    """Torch's collectives write in place, and DTensor has other gradients; both would be wrong by a factor."""
    import torch.distributed as dist

    def summed(w: torch.Tensor, x: torch.Tensor, detached: bool = False) -> torch.Tensor:
        mean = (w * x).mean()
        total = mean.detach() if detached else mean.clone()
        dist.all_reduce(total, group=mesh.device_mesh["data"].get_group())
        return mean * total if detached else total

    def moved(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        return DTensor.from_local(w * x, mesh.device_mesh, [Shard(0), Replicate()]).mean().full_tensor()

    def gradient(loss: Any) -> torch.Tensor:
        step = spmd.spmd(lambda w, x: spmd.grad(loss)(w, x), mesh=mesh, in_specs=(P(), P("data")))
        return step(torch.tensor(1.0), torch.arange(8.0)).full()

    with pytest.raises(SpecError, match="all_reduce writes to a tensor that a gradient goes through"):
        gradient(summed)
    with pytest.raises(SpecError, match=r"moved moves a DTensor .*use psum"):
        gradient(moved)
    assert gradient(lambda w, x: summed(w, x, detached=True)).item() == 3.5 * 7


def test_what_has_no_counterpart_is_refused(mesh: spmd.Mesh) -> None:
    turned = put(torch.ones(8), P(("model", "data")), mesh=mesh)
    with pytest.raises(SpecError, match="another order"):
        mesh.run(turned.to_dtensor)
    some = spmd.spmd(lambda x: x[: 1 + 2 * spmd.axis_index("data")], mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    chosen = some(torch.ones(8))  # one and three
    with pytest.raises(SpecError, match=r"whose sizes a step has chosen.*got \[1\] of \[4\]"):
        mesh.run(chosen.to_dtensor)

    def uneven() -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        spmd.from_dtensor(distribute_tensor(torch.ones(5), mesh.device_mesh["data"], [Shard(0)]), mesh=mesh)

    with pytest.raises(SpecError, match="evenly"):
        mesh.run(uneven)

    def elsewhere() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_tensor

        other = init_device_mesh("cpu", (4,), mesh_dim_names=("rows",))
        spmd.from_dtensor(distribute_tensor(torch.ones(4), other, [Replicate()]), mesh=mesh)

    with pytest.raises(SpecError, match="another mesh"):
        mesh.run(elsewhere)

    def unnamed() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        spmd.from_dtensor(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (4,)), [Shard(0)]), mesh=mesh)

    with pytest.raises(SpecError, match=r"another mesh .*got axes without names"):
        mesh.run(unnamed)

    def otherwise_named() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
        spmd.from_dtensor(distribute_tensor(torch.ones(4), other, [Replicate(), Shard(0)]), mesh=mesh)

    with pytest.raises(SpecError, match=r"another mesh \(expected \[\d, \d\] on rank \d, got ranks .* along 'model'"):
        mesh.run(otherwise_named)
    with pytest.raises(SpecError, match="got no DTensor \\(got Tensor\\)"):
        mesh.run(spmd.from_dtensor, torch.ones(4))


def test_results_of_functional_collectives_are_waited_for(mesh: spmd.Mesh) -> None:
    """They are tensors of a class of torch's own, whose values may not have arrived."""

    def total(x: torch.Tensor) -> torch.Tensor:
        from torch.distributed import _functional_collectives as functional

        return functional.all_reduce(x, "sum", mesh.device_mesh["data"].get_group())

    step = spmd.spmd(total, mesh=mesh)
    for _ in range(3):
        assert step(torch.ones(2)).tolist() == [2, 2]
    assert [type(each) for each in mesh.run(total, torch.ones(2))] == [torch.Tensor] * 4
    assert [each.tolist() for each in mesh.run(total, torch.ones(2))] == [[2, 2]] * 4
    with pytest.raises(SpecError, match=r"got AsyncCollectiveTensor.*x\.wait\(\)"):
        spmd.spmd(lambda x: spmd.psum(total(x), "data"), mesh=mesh)(torch.ones(2))


def test_a_dtensor_where_a_plain_tensor_belongs_is_refused(mesh: spmd.Mesh) -> None:
    array = put(torch.ones(4), P("data"), mesh=mesh)
    step = spmd.spmd(lambda: array.to_dtensor(), mesh=mesh)
    with pytest.raises(SpecError, match=r"result .* is no plain tensor \(got DTensor\).*from_dtensor"):
        step()
    for way in (lambda x: mesh.comm().all_reduce(x), lambda x: mesh.comm().broadcast(x), lambda x: put(x, mesh=mesh)):
        with pytest.raises(SpecError, match=r"got DTensor\).*from_dtensor"):
            mesh.run(lambda way=way: way(array.to_dtensor()))
