"""Small sums by compiled code: the bits, the errors and the views of the Python code, which ranks may mix with it."""

from __future__ import annotations

import array
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from oracle import bits

from spmd import CollectiveMismatch, Mesh, PeerLost

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("spmd.kernels.shm._small") is None, reason="there was no compiler when spmd was installed"
)

WITH, WITHOUT = "1", "0"
KINDS = [(d, n) for d in (torch.float32, torch.float64, torch.int64) for n in (1, 3, 1025, 4096)]


def given(dtype: torch.dtype, numel: int, rank: int) -> torch.Tensor:
    """Values whose sums round, vanish, overflow and wrap around; of many sizes."""
    generator = torch.Generator().manual_seed(7 * rank + numel)
    if dtype is torch.int64:
        return torch.randint(-(2**63), 2**63 - 1, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator, dtype=dtype)
    values[::5] *= torch.finfo(dtype).max
    values[1::5] *= torch.finfo(dtype).tiny
    values[2::7] = float("inf")
    values[3::7] = -0.0
    return values


def use(compiled: str) -> None:
    os.environ["SPMD_NATIVE"] = compiled


def sums(mesh: Mesh, compiled: dict[int, str]) -> list[bytes]:
    """In a rank: each kind, kept and overwritten, more often than there are slots; with compiled code or without."""
    comm = mesh.comm()
    use(compiled[comm.rank])
    found = []
    for dtype, numel in KINDS:
        tensor = given(dtype, numel, comm.rank)
        for _ in range(20):
            result = comm.all_reduced(tensor)
        overwritten = tensor.clone()
        comm.all_reduce(overwritten)
        found += [bits(result), bits(overwritten), bits(tensor)]
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_same_bits(make_mesh: Callable[..., Mesh], size: int) -> None:
    meshes = {way: make_mesh({"data": size}) for way in (WITH, WITHOUT)}
    with_it, without = (mesh.run(sums, mesh, dict.fromkeys(range(size), way)) for way, mesh in meshes.items())
    assert with_it == without


def test_ranks_with_and_without(make_mesh: Callable[..., Mesh]) -> None:
    mixed, without = make_mesh({"data": 3}), make_mesh({"data": 3})
    assert mixed.run(sums, mixed, {0: WITH, 1: WITHOUT, 2: WITH}) == without.run(
        sums, without, dict.fromkeys(range(3), WITHOUT)
    )


def test_a_sum_by_itself() -> None:
    """Which tensors it takes, and that it begins nothing while a peer may still read the slot."""
    small = importlib.import_module("spmd.kernels.shm._small")
    slots, signature, words, begun = 8, 7, bytearray(1 << 14), array.array("Q", [0])
    view = memoryview(words).cast("Q")
    ours, peers = (0, 64, 4096, 8 * 7), (1024, 1088, 8192, 1024 + 8 * 7)  # posted, slots, their data, a bell
    posted, read = peers[0] // 8, peers[0] // 8 + 2
    view[posted], view[read] = 1000, 5  # a peer that is far ahead, and has read five
    for slot in range(slots):
        view[peers[1] // 8 + 8 * slot] = signature
    tensor, op, label = torch.tensor([2.0, 3.0]), "sum", ""
    of = (torch.Tensor, tensor.shape, tensor.dtype, op, label)
    one = small.Small(words, begun, (ours, peers), 0, signature, "f", 2, (slots, 64, 128), 0, *of)

    others = [torch.ones(3), torch.ones(2, 1), tensor.double(), torch.ones(4)[::2], tensor.to("meta"), [2.0, 3.0]]
    others += [tensor.to_sparse(), torch.nn.Parameter(tensor), torch._neg_view(tensor), torch._efficientzerotensor(2)]
    assert [one.address(other, op, label) for other in others] == [0] * len(others)
    assert one.address(tensor, "avg", label) == one.address(tensor, op, "of params['b']") == 0
    assert one.address(tensor, op, label) == tensor.data_ptr()

    result = torch.zeros(2)
    flags = [one.run(tensor.data_ptr(), result.data_ptr(), 0) for _ in range(20)]
    assert flags == [0] * (5 + slots) + [small.FULL] * 7
    assert begun[0] == 5 + slots
    view[read] = 6
    assert one.run(tensor.data_ptr(), result.data_ptr(), 0) == 0
    assert result.tolist() == [2.0, 3.0]


@pytest.fixture(params=[WITH, WITHOUT], ids=["compiled", "python"])
def pair(make_mesh: Callable[..., Mesh], request: pytest.FixtureRequest) -> Mesh:
    mesh = make_mesh({"data": 2})
    mesh.run(use, request.param)
    return mesh


def test_another_call(pair: Mesh) -> None:
    def body() -> None:
        comm = pair.comm()
        comm.all_reduced(torch.ones(4 + comm.rank))

    with pytest.raises(CollectiveMismatch, match=r"all_reduce.*\[4\].*\n.*all_reduce.*\[5\]"):
        pair.run(body)
    assert pair.run(lambda: float(pair.comm().all_reduced(torch.ones(4))[0])) == [2.0, 2.0]


def test_a_rank_that_fails_ends_the_wait(pair: Mesh) -> None:
    def body() -> None:
        comm = pair.comm()
        if comm.rank:
            raise ValueError("no sum from here")
        comm.all_reduced(torch.ones(4))

    with pytest.raises(ValueError, match="no sum from here"):
        pair.run(body)


def test_a_rank_that_is_late(pair: Mesh) -> None:
    """It is waited for asleep, and has its part after the timeout only."""

    def body(seconds: float) -> float:
        comm = pair.comm()
        if comm.rank:
            time.sleep(seconds)
        return float(comm.all_reduced(torch.ones(4))[0])

    assert pair.run(body, 0.3) == [2.0, 2.0]

    def short() -> float:
        pair.comm().set_timeout(0.2)
        return body(1.0)

    with pytest.raises(PeerLost, match=r"all_reduce.*no answer for 0.2 s"):
        pair.run(short)


def test_tensors_of_all_kinds(pair: Mesh) -> None:
    def body() -> list[list[float]]:
        comm = pair.comm()
        negative = torch.view_as_complex(torch.ones(1, 2)).conj().imag
        weight = torch.nn.Parameter(torch.ones(2))
        given = [torch.ones(2, 2)[:, 0], negative, weight, torch.ones(2, requires_grad=True), torch.ones(3)[1:]]
        given.append(torch._efficientzerotensor(2))
        found = [comm.all_reduced(tensor) for tensor in given]
        with torch.inference_mode():
            inferred = torch.ones(2)
            comm.all_reduce(inferred)
        comm.all_reduce(inferred)
        return [[*map(float, result)] for result in (*found, inferred)] + [[result.requires_grad for result in found]]

    assert pair.run(body) == [[[2.0, 2.0], [-2.0], *[[2.0, 2.0]] * 3, [0.0, 0.0], [4.0, 4.0], [False] * 6]] * 2


def test_autograd_notices_what_is_overwritten(pair: Mesh) -> None:
    def body() -> str:
        comm, tensor = pair.comm(), torch.ones(2)
        squares = (torch.ones(2, requires_grad=True) * tensor).sum()
        comm.all_reduce(tensor)
        try:
            squares.backward()
        except RuntimeError as error:
            return str(error)
        return ""

    assert all("modified by an inplace operation" in error for error in pair.run(body))
