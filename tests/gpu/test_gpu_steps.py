"""Train steps and buckets that the CPU and GPUs must do alike: the same tests on both, against one plain process.

Those of GPUs run where there is one; those of the CPU see that the tests are right.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import cuda_host
import nccl_fake
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spmd import (
    Mesh,
    P,
    SpecError,
    axis_index,
    data_parallel,
    functional,
    grad,
    optimizer,
    pmean,
    psum,
    put,
    value_and_grad,
)
from spmd import spmd as on_mesh
from spmd.kernels import registry
from spmd.kernels.bucket import Leaf
from spmd.kernels.cuda.bucket import CudaBuckets

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(300)

on_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
)


@pytest.fixture(params=[("cpu", 2), pytest.param(("cuda", 1), marks=on_gpu), pytest.param(("cuda", 2), marks=on_gpu)])
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The device, and how many ranks: on a GPU each, or on one where NCCL 2.30 or later is at hand."""
    return request.param


@pytest.fixture
def device(case: tuple[str, int]) -> str:
    return case[0]


@pytest.fixture
def mesh(
    case: tuple[str, int],
    shared_mesh: Callable[..., Mesh],
    make_mesh: Callable[..., Mesh],
    enough_gpus: Callable[[int], None],
) -> Mesh:
    device, size = case
    if device == "cpu":
        return shared_mesh({"data": size})
    enough_gpus(size)
    return make_mesh({"data": size}, device="cuda")


# -- train steps -------------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))


def batches(*sizes: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(size, 7, generator=generator),
            "y": torch.randint(0, 5, (size,), generator=generator),
        }
        for size in sizes
    ]


def plainly(data: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], list[float]]:
    """What one process without this library makes of the batches: the parameters, and the losses."""
    model, losses = make_model(), []
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in data:
        opt.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def trained(
    mesh: Mesh, data: list[dict[str, Tensor]], shard: str | None = None, donate: Any = (), **options: Any
) -> tuple[Any, Any, list[float], Any]:
    """The same on a mesh: the parameters, the optimizer's state, the losses, and the parameters one step before."""
    apply, params = functional(make_model())
    opt = optimizer(torch.optim.AdamW, shard=shard, lr=1e-2)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(apply(params, batch["x"]), batch["y"])

    @on_mesh(mesh=mesh, donate=donate)
    @data_parallel(**options)
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(loss_fn)(params, batch)
        return (*opt.step(params, grads, state), loss)

    params = put(params, mesh=mesh)
    state = opt.init(params)
    losses, before = [], params
    for batch in data:
        before = params
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, state, losses, before


def alike(params: Any, expected: dict[str, Tensor], **tolerance: float) -> bool:
    assert set(params) == set(expected)
    return all(torch.allclose(params[name].full().cpu(), expected[name], **tolerance) for name in expected)


def test_uneven_batches(mesh: Mesh) -> None:
    """That do not divide, and of one sample, which leaves ranks without any."""
    data = batches(7, 1, 6, 3)
    params, _, losses, _ = trained(mesh, data)
    expected, its_losses = plainly(data)
    assert losses == pytest.approx(its_losses, rel=1e-4)
    assert alike(params, expected, atol=1e-4)


def test_sharded_optimizer(mesh: Mesh) -> None:
    """Each rank keeps its part of the state, where it computes."""
    data = batches(8, 8, 8)
    params, state, _, _ = trained(mesh, data, shard="data")
    assert alike(params, plainly(data)[0], atol=1e-4)

    def kept(state: Any) -> tuple[int, set[str]]:
        import pytrees

        leaves = [getattr(leaf, "local", leaf) for leaf in pytrees.leaves(state)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        return sum(tensor.numel() for tensor in tensors), {tensor.device.type for tensor in tensors}

    whole = 2 * sum(parameter.numel() for parameter in make_model().parameters())
    for count, devices in mesh.run(kept, state):
        assert whole / mesh.size <= count <= whole / mesh.size + 8 * 64 and devices == {mesh.device}


@pytest.mark.parametrize("shard", [None, "data"])
def test_donation(mesh: Mesh, shard: str | None) -> None:
    """The results are those without it, and what was given away cannot be read."""
    data = batches(8, 5, 8)
    params, _, losses, before = trained(mesh, data, shard, ("params", "state"))
    kept, _, its_losses, _ = trained(mesh, data, shard)
    assert losses == its_losses
    assert all(torch.equal(params[name].full(), kept[name].full()) for name in params)
    with pytest.raises(SpecError, match="donated"):
        before["0.weight"].full()


def test_wire_dtype(mesh: Mesh) -> None:
    data = batches(8, 8)
    params, _, losses, _ = trained(mesh, data, wire_dtype=torch.bfloat16)
    exact, _, its_losses, _ = trained(mesh, data)
    assert losses == pytest.approx(its_losses, rel=1e-2)
    assert alike(params, plainly(data)[0], atol=2.5e-2)  # AdamW turns a small gradient's error into one of its rate
    same = all(torch.equal(params[name].full(), exact[name].full()) for name in params)
    assert same == (mesh.size == 1)  # one rank has no wire


def test_large_leaves(mesh: Mesh, device: str) -> None:
    """A leaf larger than a bucket, whose length nothing divides, beside small ones and an empty one."""
    large = (1 << (26 if device == "cuda" else 20)) + 13

    @on_mesh(mesh=mesh)
    @data_parallel(bucket_mb=1.0)
    def step(params: Any, batch: Any) -> Any:
        return grad(lambda params, batch: sum((leaf * batch.mean()).sum() for leaf in params.values()))(params, batch)

    params = {"a": torch.zeros(3), "large": torch.zeros(large), "none": torch.zeros(0), "b": torch.zeros(5, 5)}
    found = step(params, torch.arange(4.0))
    for name, leaf in params.items():
        its = found[name].full()
        assert its.shape == leaf.shape and its.eq(1.5).all()


# -- gradients of gradients, and layers computed again -----------------------------------------------------------------


def test_backward_passes_of_the_function_s_own(mesh: Mesh, device: str) -> None:
    """The function's own derivative, through a collective; torch runs it in another thread, or would."""

    def body() -> Any:
        x = torch.tensor(3.0 + axis_index("data"), device=device)

        def f(w: Tensor) -> Tensor:
            total = psum(torch.sin(w * x), "data")
            (slope,) = torch.autograd.grad(total, w, create_graph=True)
            mean = pmean(slope, "data")
            return slope * mean if axis_index("data") == 0 else w * 0

        return float(grad(f)(torch.tensor(2.0, device=device)))

    found = mesh.run(body)
    # psum's transpose is psum: every rank's slope is size * x cos(wx), of which the first uses its own and the mean.
    size, w = mesh.size, torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    slopes = [size * (3.0 + rank) * torch.cos(w * (3.0 + rank)) for rank in range(size)]
    (expected,) = torch.autograd.grad(slopes[0] * sum(slopes) / size / size, w)
    assert found == pytest.approx([float(expected)] * size, rel=1e-4)


def test_layers_computed_again(mesh: Mesh, device: str) -> None:
    """They communicate again, also in a backward pass that the function makes by itself."""

    def layer(w: Tensor, x: Tensor) -> Tensor:
        return psum(torch.tanh(x @ w), "data").sin()

    def body() -> Any:
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(3, 3, generator=generator).to(device)
        x = torch.randn(2, 3, generator=generator).to(device) + axis_index("data")

        def own(run: Callable[..., Tensor]) -> Tensor:
            twin = w.clone().requires_grad_()
            run(layer, twin, x).sum().backward()
            assert twin.grad is not None
            return twin.grad

        def again(layer: Any, *args: Tensor) -> Tensor:
            return checkpoint(layer, *args, use_reentrant=False)

        def plain(layer: Any, *args: Tensor) -> Tensor:
            return layer(*args)

        ours = [grad(lambda w, run=run: run(layer, w, x).sum())(w) for run in (plain, again)]
        return torch.equal(own(plain), own(again)), torch.equal(*ours)

    assert mesh.run(body) == [(True, True)] * mesh.size


# -- buckets -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """The kernels compiled for the host, once, where they are asked for."""
    return functools.cache(lambda: cuda_host.library_for_host(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def bucket_mesh(
    case: tuple[str, int],
    library: Callable[[], str],
    make_mesh: Callable[..., Mesh],
    enough_gpus: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Mesh, str]:
    """A mesh whose `comm()` is NCCL's, or on the CPU its fake's, with the kernels that it needs there."""
    device, size = case
    if device == "cuda":
        enough_gpus(size)
        return make_mesh({"data": size}, device="cuda"), ""
    monkeypatch.setitem(registry._FACTORIES, "nccl-fake", nccl_fake.factory)
    return make_mesh({"data": size}, backend="nccl-fake"), library()


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_buckets_without_synchronisation(bucket_mesh: tuple[Mesh, str], device: str, wire: torch.dtype | None) -> None:
    """With torch raising wherever the host would wait for the GPU; leaves of all kinds, elsewhere each time."""
    mesh, library = bucket_mesh

    def values(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        shapes = [((300, 70), torch.float32), ((), torch.float32), ((0, 2), torch.float32), ((1001,), torch.bfloat16)]
        shapes += [((64,), torch.float64), ((77,), torch.int64)]
        return [torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape, dtype in shapes]

    def body() -> list[Tensor]:
        comm: Any = mesh.comm()
        if library:
            comm.launch = cuda_host.launcher(ctypes.CDLL(library))
        whole = [value.to(device) for value in values(comm.rank)]
        found: list[Tensor] = []
        for number in range(4):
            leaves = [leaf.clone() for leaf in whole]
            if number and device == "cuda":  # what is made at the first time may wait
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                buckets = CudaBuckets(comm, [Leaf.of(leaf) for leaf in leaves], bucket_bytes=1 << 14, wire_dtype=wire)
                for index in reversed(range(len(leaves))):
                    buckets.fill(index, leaves[index])
                found = buckets.finish()
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        return [one.cpu().clone() for one in found]

    expected = [sum(leaves) for leaves in zip(*(values(rank) for rank in range(mesh.size)), strict=True)]
    for found in mesh.run(body):
        for one, right in zip(found, expected, strict=True):
            assert one.dtype == right.dtype and torch.equal(one, right)


def test_leaves_of_the_host_beside_those_of_the_gpu(mesh: Mesh, device: str) -> None:
    """Gradients lie where their arguments do, and each kind is summed in buckets of its own; collectives likewise."""

    def body() -> Any:
        params = {"there": torch.ones(3, device=device), "here": torch.ones(2, dtype=torch.float64)}
        scale = 1.0 + axis_index("data")
        found = grad(lambda w: scale * (w["there"].sum() + 2 * w["here"].sum().to(device)))(params)
        totals = [psum(torch.ones(2, device=where), "data") for where in (device, "cpu")]
        assert [leaf.device.type for leaf in (*found.values(), *totals)] == [device, "cpu"] * 2
        return [leaf.tolist() for leaf in (*found.values(), *totals)]

    mean, size = (1.0 + mesh.size) / 2, float(mesh.size)
    assert mesh.run(body) == [[[mean] * 3, [2 * mean] * 2, [size] * 2, [size] * 2]] * mesh.size


def test_placed_batches(mesh: Mesh, device: str) -> None:
    """What is put on the mesh lies where its ranks compute."""
    array = put(torch.arange(6.0), P("data"), mesh=mesh)
    assert on_mesh(lambda x: x.device.type, mesh=mesh, in_specs=P("data"))(array) == device
    assert array.full().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    large = torch.arange(1 << 18)  # by way of pinned memory
    assert torch.equal(
        on_mesh(lambda x: x + 1, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(large).full(), large + 1
    )
