"""On a GPU: world size 1 for real, two ranks on one GPU where NCCL takes them, memory, hidden synchronisation.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from cuda_host import COPIED, PAIRS, alike, extremes
from oracle import OPS, exact, meaningful, reduced, value
from torch import nn

from spmd import Mesh, P, data_parallel, functional, optimizer, psum, put, value_and_grad
from spmd import spmd as on_mesh
from spmd.kernels.cuda.nccl_arithmetic import NAMES
from spmd.kernels.cuda.pack import Table

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.timeout(300),
]


# -- kernels -----------------------------------------------------------------------------------------------------------


def places(lengths: list[int]) -> list[int]:
    """Where leaves of these lengths begin, with gaps."""
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += -(-length // 256) * 256
    return [*starts, at]


@pytest.mark.parametrize(("leaf", "wire"), PAIRS)
def test_kernels(leaf: torch.dtype, wire: torch.dtype) -> None:
    lengths = [0, 1, 7, 4096, 2049, 33, 700_001, 0]
    *starts, size = places(lengths)
    # Every other leaf begins one element past an aligned address.
    whole = [torch.randn(length + 1, device="cuda").mul(100).to(leaf) for length in lengths]
    leaves = [one[i % 2 :][: lengths[i]] for i, one in enumerate(whole)]
    bucket = torch.zeros(size, dtype=wire, device="cuda")
    table = Table(starts, lengths, leaf, wire)
    for _ in range(2):
        table.pack(leaves, bucket)
        for start, one in zip(starts, leaves, strict=True):
            assert torch.equal(bucket[start : start + len(one)], one.float().to(wire))
        outs = [torch.empty_like(one) for one in leaves]
        table.unpack(bucket, outs)
        for start, out in zip(starts, outs, strict=True):
            assert torch.equal(out, bucket[start : start + len(out)].float().to(leaf))
        leaves = [one.clone() for one in leaves]


@pytest.mark.parametrize(("leaf", "wire"), PAIRS)
def test_casts(leaf: torch.dtype, wire: torch.dtype) -> None:
    """The GPU's own conversions, which no other test sees, as the CPU's: subnormal numbers, ties, NaN."""
    for here, there, way in ((leaf, wire, "pack"), (wire, leaf, "unpack")):
        values = extremes(here)
        source, found = values.cuda(), torch.empty(len(values), dtype=there, device="cuda")
        table = Table([0], [len(values)], leaf, wire)
        table.pack([source], found) if way == "pack" else table.unpack(source, [found])
        assert alike(found.cpu(), values.to(there)), way


@pytest.mark.parametrize("dtype", COPIED)
def test_copies(dtype: torch.dtype) -> None:
    lengths = [1, 0, 15, 33, 70_001]
    *starts, size = places(lengths)
    leaves = [torch.randint(0, 2, (length + 1,), device="cuda").to(dtype)[1:] for length in lengths]
    bucket = torch.zeros(size, dtype=dtype, device="cuda")
    table = Table(starts, lengths, dtype, dtype)
    table.pack(leaves, bucket)
    outs = [torch.zeros(length, dtype=dtype, device="cuda") for length in lengths]
    table.unpack(bucket, outs)
    assert all(torch.equal(*pair) for pair in zip(leaves, outs, strict=True))


def test_more_elements_than_32_bits_count() -> None:
    """A leaf of 2^31 + 5 numbers beside a small one, in 13 GB."""
    length = (1 << 31) + 5
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("this takes 16 GiB of the GPU's memory")
    leaf, small = torch.zeros(length, dtype=torch.bfloat16, device="cuda"), torch.ones(3, device="cuda").bfloat16()
    leaf[-5:] = torch.arange(1, 6)
    bucket = torch.full((length + 507 + 512,), 7.0, dtype=torch.bfloat16, device="cuda")
    table = Table([0, length + 507], [length, 3], torch.bfloat16, torch.bfloat16)
    table.pack([leaf, small], bucket)
    assert bucket[length - 6 : length + 1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0]
    assert bucket[length + 507 : length + 511].tolist() == [1.0, 1.0, 1.0, 7.0]
    leaf.zero_()
    table.unpack(bucket, [leaf, small])
    assert leaf[-5:].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0] and int(leaf.count_nonzero()) == 5


# -- the communicator --------------------------------------------------------------------------------------------------


def reductions(mesh: Mesh) -> list[str]:
    comm = mesh.comm()
    wrong = []
    for op in OPS:
        for dtype in (*NAMES, torch.bool, torch.int16, torch.complex64):
            if not meaningful(op, dtype):
                continue
            inputs = [value(dtype, (3, 5), rank) for rank in range(comm.size)]
            mine = inputs[comm.rank].cuda()
            comm.all_reduce(mine, op)
            right = reduced(inputs, op)
            same = torch.equal if exact(op, dtype) and not dtype.is_floating_point else torch.allclose
            if not same(mine.cpu(), right):
                wrong.append(f"{op} of {dtype}: {mine.flatten()[:3]}, not {right.flatten()[:3]}")
    return wrong


def test_reductions(mesh: Mesh) -> None:
    assert mesh.run(reductions, mesh) == [[]] * mesh.size


def test_movements(mesh: Mesh) -> None:
    def body() -> bool:
        comm = mesh.comm()
        rank, size = comm.rank, comm.size
        mine = torch.full((5,), float(rank), device="cuda")
        outs = [torch.empty(5, device="cuda") for _ in range(size)]
        comm.all_gather(outs, mine)
        assert [out[0].item() for out in outs] == list(range(size))
        comm.all_to_all(outs, [torch.full((5,), float(10 * rank + dst), device="cuda") for dst in range(size)])
        assert [out[0].item() for out in outs] == [10 * src + rank for src in range(size)]
        work = comm.all_reduce(mine, async_op=True)
        work.wait()
        assert mine[0].item() == sum(range(size))
        if size > 1:
            sends = [comm.isend(torch.full((3,), float(tag), device="cuda"), 1 - rank, tag) for tag in (1, 2)]
            for tag in (2, 1):
                found = torch.empty(3, device="cuda")
                assert comm.recv(found, None, tag) == 1 - rank
                assert found[0].item() == tag
            for send in sends:
                send.wait()
        on_host = torch.ones(2)
        comm.all_reduce(on_host)  # tensors of the CPU in the same program
        return bool(on_host[0] == size)

    assert mesh.run(body) == [True] * mesh.size


def test_error_and_on(mesh: Mesh) -> None:
    """An error on one rank, while the others' GPUs wait for it, ends the region, and the mesh goes on."""

    def body() -> None:
        comm = mesh.comm()
        comm.barrier()
        if comm.rank == comm.size - 1:
            raise KeyError("mine")
        comm.all_reduce(torch.ones(4, device="cuda"))
        torch.cuda.synchronize()

    with pytest.raises(KeyError, match="mine"):
        mesh.run(body)
    total = on_mesh(lambda x: psum(x, "data"), mesh=mesh)(torch.ones(3))
    assert total.full().tolist() == [float(mesh.size)] * 3


# -- a train step ------------------------------------------------------------------------------------------------------


def make_step(mesh: Mesh, wrap: Callable[[Callable[[], Any]], Any] = lambda run: run()) -> tuple[Any, list[Any], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    apply, params = functional(model)
    opt = optimizer(torch.optim.AdamW, lr=1e-3)

    def loss_fn(params: Any, batch: Any) -> Any:
        return F.cross_entropy(apply(params, batch["x"]), batch["y"])

    @on_mesh(mesh=mesh)
    @data_parallel
    def step(params: Any, state: Any, batch: Any) -> Any:
        def run() -> Any:
            loss, grads = value_and_grad(loss_fn)(params, batch)
            return (*opt.step(params, grads, state), loss)

        return wrap(run)

    batch = {"x": torch.randn(64, 64), "y": torch.randint(0, 10, (64,))}
    return step, [params, opt.init(params)], batch


def test_same_as_on_the_cpu(mesh: Mesh, make_mesh: Callable[..., Mesh]) -> None:
    losses = []
    for each in (mesh, make_mesh({"data": mesh.size}, device="cpu")):
        step, (params, state), batch = make_step(each)
        its = []
        for _ in range(20):
            params, state, loss = step(params, state, batch)
            its.append(float(loss))
        losses.append(its)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]


def memory() -> tuple[int, int]:
    """Bytes that torch has given out on this rank's GPU, and bytes of the GPU that nobody has."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]


def test_memory_stays_flat(mesh: Mesh) -> None:
    """Over 1,000 steps: to the byte what torch gave out, and the device's free memory but for a segment of torch's."""
    step, (params, state), batch = make_step(mesh)
    placed = put(batch, P("data"), mesh=mesh)
    found = []
    for number in range(1000):
        params, state, _ = step(params, state, placed)
        if number in (99, 999):
            found.append(mesh.run(memory))
    for (given, free), (given_at_end, free_at_end) in zip(*found, strict=True):
        assert given == given_at_end
        assert free - free_at_end <= 32 << 20


def without_synchronisation(run: Callable[[], Any]) -> Any:
    """Run with torch raising at every call that makes the host wait for the GPU."""
    run()  # what is made at the first call may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        return run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_hidden_synchronisation(mesh: Mesh) -> None:
    step, (params, state), batch = make_step(mesh, without_synchronisation)
    placed = put(batch, P("data"), mesh=mesh)
    for _ in range(3):
        params, state, loss = step(params, state, placed)
    assert float(loss) > 0
