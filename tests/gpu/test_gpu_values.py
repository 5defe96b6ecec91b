"""On GPUs: values, errors and torch's own process groups, beyond what a train step needs.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spmd import Loader, Mesh, MeshError, P, PeerLost, axis_index, psum, put
from spmd import spmd as on_mesh

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def pair(make_mesh: Callable[..., Mesh], enough_gpus: Callable[[int], None]) -> Mesh:
    enough_gpus(2)
    return make_mesh({"data": 2}, device="cuda")


# -- errors and deaths -------------------------------------------------------------------------------------------------


def test_a_failed_assertion_in_a_kernel(mesh: Mesh) -> None:
    """CUDA refuses all that such a process asks of the GPU from then on: the ranks are replaced."""
    rows = on_mesh(lambda table, index: psum(F.embedding(index, table), "data"), mesh=mesh)
    table = torch.eye(4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device-side assert"):
            rows(table, torch.tensor([99])).full()
        assert rows(table, torch.tensor([1])).tolist() == [[0.0, float(mesh.size), 0.0, 0.0]]


def test_frozen_parameters_stay_frozen(mesh: Mesh) -> None:
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    for spec in (P(), P("data")):
        placed = put(frozen, spec, mesh=mesh)
        assert all(isinstance(shard, nn.Parameter) and not shard.requires_grad for shard in placed.shards())
        kinds = on_mesh(lambda x: isinstance(x, nn.Parameter) and x.is_cuda, mesh=mesh, in_specs=spec)
        assert kinds(placed) and kinds(frozen)


def test_no_memory(mesh: Mesh) -> None:
    """The process goes on, and with it the values that it has."""
    kept = put(torch.ones(3), mesh=mesh)
    total = on_mesh(lambda x, numel: psum(torch.zeros(numel, device=x.device)[:3] + x, "data"), mesh=mesh)
    with pytest.raises(torch.OutOfMemoryError):
        total(kept, 1 << 42).full()
    assert total(kept, 3).tolist() == [float(mesh.size)] * 3


def test_a_rank_that_died_has_its_values_again(pair: Mesh) -> None:
    """Those that another rank holds, too, and on its GPU; a shard that it alone held is lost, and named."""
    whole, cut = put(torch.arange(3.0), mesh=pair), put(torch.arange(4.0), P("data"), mesh=pair)
    total = on_mesh(lambda x: (psum(x, "data"), x.device.type), mesh=pair)
    for victim in (1, 0):
        assert total(whole)[0].tolist() == [0.0, 2.0, 4.0]
        with pytest.raises(PeerLost, match="SIGKILL"):
            pair.run(lambda: os.kill(os.getpid(), signal.SIGKILL), ranks=[victim])
    summed, device = total(whole)
    assert (summed.tolist(), device) == ([0.0, 2.0, 4.0], "cuda")
    with pytest.raises((MeshError, PeerLost), match="lost"):
        total(cut)[0].full()


def test_what_a_death_cuts_short_is_lost(pair: Mesh) -> None:
    """A call is over on the hosts before it is on the GPUs. What these have not done then is arbitrary, not a value."""

    def body(x: torch.Tensor, late: bool) -> torch.Tensor:
        if late and axis_index("data") == 1:
            torch.cuda._sleep(4_000_000_000)  # some seconds
        return psum(x * (1 + axis_index("data")), "data")

    total = on_mesh(body, mesh=pair)
    for late in (False, True):
        for _ in range(4):  # what these give is compared, for which the hosts wait
            before = total(torch.ones(1 << 20), late)
            assert before.full().eq(3).all() and total(before, late).full().eq(9).all()
    after = total(total(before, True), False)
    os.kill(pair.run(os.getpid)[1], signal.SIGKILL)
    with pytest.raises((MeshError, PeerLost)):
        after.full()
    with pytest.raises((MeshError, PeerLost), match="before the GPUs had computed it"):
        after.full()
    assert before.full().eq(3).all() and total(before, False).full().eq(9).all()


def test_what_a_step_s_exception_interrupts_is_computed(mesh: Mesh) -> None:
    """Earlier calls of which the GPU has not done all yet, whose values the program goes on with."""

    def body(x: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails:
            raise ValueError("in a later step")
        torch.cuda._sleep(1_000_000_000)  # more than half a second
        return psum(x * (1 + axis_index("data")), "data")

    total, sum_of = on_mesh(body, mesh=mesh), float(mesh.size * (mesh.size + 1) // 2)
    for _ in range(4):
        before = total(torch.ones(1 << 20), False)
        before.full()
    after = total(before, False)
    with pytest.raises(ValueError, match="in a later step"):
        total(after, True).full()
    assert after.full().eq(sum_of**2).all()


# -- tensors on their way ----------------------------------------------------------------------------------------------


def test_tensors_of_the_driver_s_gpu(mesh: Mesh) -> None:
    """Captured, given and put, they lie on the rank's GPU; what comes back lies on the CPU."""
    there, module = torch.arange(4.0, device="cuda"), nn.Linear(4, 2).cuda()
    assert on_mesh(lambda x: x + there, mesh=mesh)(torch.ones(4)).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert on_mesh(lambda x: x * 2, mesh=mesh)(there).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert put(there, mesh=mesh).tolist() == [0.0, 1.0, 2.0, 3.0]

    def body(x: torch.Tensor) -> Any:
        assert x is not there and isinstance(module.weight, nn.Parameter) and module.weight.requires_grad
        return x.device.type, module(x + there).detach(), torch.ones(2, device="cuda")

    for device, out, ones in mesh.run(body, there):
        assert device == "cuda" and out.device.type == ones.device.type == "cpu"
        torch.testing.assert_close(out, module(2 * there).detach().cpu())


def test_a_dataset_on_the_driver_s_gpu(mesh: Mesh) -> None:
    x = torch.arange(12.0, device="cuda").view(6, 2)
    for columns in (x, x.T.contiguous().T):
        batches = [*Loader({"x": columns}, 4, shuffle=False, mesh=mesh)]
        assert all(batch["x"].is_cuda for batch in batches)
        assert sorted(row for batch in batches for row in batch["x"].tolist()) == x.tolist()


def test_arrays_compute(pair: Mesh) -> None:
    x = put(torch.arange(12.0).view(4, 3), P("data"), mesh=pair)
    plain = torch.arange(12.0).view(4, 3)
    assert x.is_cuda and x.device.type == "cuda"
    for function in (
        lambda x: (x - x.mean(0)) / x.std(0),
        lambda x: x @ torch.ones(3, 2),
        lambda x: x.T.sum(0),
        lambda x: x[x > 3],
        lambda x: torch.cat([x, x]).sort(0, descending=True).values,
    ):
        torch.testing.assert_close(function(x).full(), function(plain))


# -- torch.distributed -------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()


def fit(model: nn.Module, mine: Callable[[torch.Tensor], torch.Tensor]) -> float:
    x = torch.linspace(-1, 1, 512, device="cuda").view(64, 8)
    y = x.square().mean(1, keepdim=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        opt.zero_grad()
        F.mse_loss(model(mine(x)), mine(y)).backward()
        opt.step()
    return F.mse_loss(model(x), y).item()


def test_torch_s_modules_on_the_mesh(pair: Mesh) -> None:
    """DDP first: nobody has opened a group before it."""

    def my_rows(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(pair.size)[int(axis_index("data"))]

    def ddp() -> float:
        group = pair.device_mesh["data"].get_group()
        return fit(nn.parallel.DistributedDataParallel(make_model(), process_group=group), my_rows)

    def fsdp2() -> float:
        from torch.distributed.fsdp import fully_shard

        return fit(fully_shard(make_model(), mesh=pair.device_mesh["data"]), my_rows)

    def tensor_parallel() -> float:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return fit(parallelize_module(make_model(), pair.device_mesh["data"], plan), lambda x: x)

    expected = fit(make_model(), lambda x: x)
    for way in (ddp, fsdp2, tensor_parallel):
        assert pair.run(way) == pytest.approx([expected] * 2, rel=1e-2)


def test_process_groups_of_both_devices(pair: Mesh) -> None:
    """A group has communicators for tensors of the host and of GPUs, whichever is used first on which rank."""
    import torch.distributed as dist

    def body() -> list[float]:
        group = pair.device_mesh["data"].get_group()
        found = []
        for device in ("cuda", "cpu", "cuda"):
            x = torch.full((3,), 1.0 + group.rank(), device=device)
            dist.all_reduce(x, group=group)
            rows = torch.empty(2, device=device)
            dist.all_gather_into_tensor(rows, torch.full((1,), float(group.rank()), device=device), group=group)
            found += [x[0].item(), *rows.tolist()]
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, group.rank(), group=group)
        return [*found, *objects]

    assert pair.run(body) == [[3.0, 0.0, 1.0] * 3 + [0, 1]] * 2


PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import spmd

torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else int(__import__("os").environ["LOCAL_RANK"]))
dist.init_process_group("spmd")
rank = dist.get_rank()
x = torch.full((5,), rank + 1.0, device="cuda")
dist.all_reduce(x)
assert x.tolist() == [3.0] * 5
rows = torch.empty(10, device="cuda")
dist.all_gather_into_tensor(rows, x * rank)
assert rows.tolist() == [0.0] * 5 + [3.0] * 5
part = torch.empty(5, device="cuda")
dist.reduce_scatter_tensor(part, torch.arange(10.0, device="cuda"))
assert part.tolist() == [2.0 * (5 * rank + i) for i in range(5)]
work = dist.all_reduce(x, async_op=True)
work.wait()
if rank == 0:
    dist.send(x, 1)
else:
    dist.recv(x, 0)
swapped = torch.empty(4, device="cuda")
dist.all_to_all_single(swapped, torch.arange(4.0, device="cuda") + 10 * rank)
assert swapped.tolist() == [2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 10, 2.0 * rank + 11]
on_host = torch.ones(3)
dist.all_reduce(on_host)
assert on_host.tolist() == [2.0] * 3
again = dist.new_group([0, 1])
dist.barrier(group=again)
dist.all_reduce(x, group=again)
for wrap in (torch.nn.parallel.DistributedDataParallel, fully_shard):
    torch.manual_seed(0)
    model = wrap(torch.nn.Linear(8, 8).cuda())
    model(torch.randn(4, 8, device="cuda")).sum().backward()
torch.cuda.synchronize()
dist.destroy_process_group()
print("done", flush=True)
"""


def test_process_groups_under_torchrun(tmp_path: Path, enough_gpus: Callable[[int], None]) -> None:
    enough_gpus(2)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr[-3000:]


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_a_compiled_loss_with_collectives(mesh: Mesh) -> None:
    from spmd import pmean, value_and_grad

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return pmean(psum(torch.tanh(x @ w), "data").square().mean(), "data")

    w, x = torch.eye(8) * 0.3, torch.arange(64.0).view(8, 8) / 64
    eager, compiled = (
        on_mesh(value_and_grad(f), mesh=mesh, in_specs=(P(), P("data")))
        for f in (loss, torch.compile(loss, fullgraph=True))
    )
    for _ in range(2):  # the first call of a signature runs in eager mode
        for one, other in zip(eager(w, x), compiled(w, x), strict=True):
            torch.testing.assert_close(one.full(), other.full())
