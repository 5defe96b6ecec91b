"""Gradient buckets: which leaf goes where, and that every layout comes back as it went in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import bits, reduced, same, value

from spmd import Mesh
from spmd.kernels.bucket import FIRST_BYTES, Buckets, Leaf
from spmd.kernels.call import Call
from spmd.kernels.communicator import Communicator
from spmd.kernels.operations import Steps
from spmd.kernels.waiting import Watch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MB = 1 << 20


class Quiet(Watch):
    """A watch under which nothing ever happens."""

    def __init__(self) -> None:
        self.generation = 1

    def check(self) -> None: ...

    def check_peers(self) -> None: ...
    def in_debugger(self) -> bool:
        return False

    def abort(self, text: str) -> None: ...


class Alone(Communicator):
    """A group of one that keeps the sizes of what it reduces, and what it made."""

    def __init__(self) -> None:
        super().__init__([0], 0, Quiet(), timeout=1.0)
        self.reduced: list[tuple[int, torch.dtype]] = []
        self.made: list[tuple[int, torch.dtype]] = []

    def _exchange(self, call: Any, sends: list[Any], recvs: list[Any]) -> Steps:
        yield lambda: True

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        raise NotImplementedError

    _recv = _send  # type: ignore[assignment]

    def all_reduced(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        self.reduced.append((tensor.numel(), tensor.dtype))
        return super().all_reduced(tensor, op, async_op=async_op)

    def scratch(self, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        self.made.append((numel, dtype))
        return torch.full((numel,), 77, dtype=dtype)  # as memory comes: not zero


def leaves_of(tensors: Sequence[torch.Tensor]) -> list[Leaf]:
    return [Leaf.of(tensor) for tensor in tensors]


def through(comm: Communicator, tensors: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Fill in reverse order, as a backward pass does, and finish."""
    buckets = Buckets(comm, leaves_of(tensors), **{"bucket_bytes": MB, **options})
    for index in reversed(range(len(tensors))):
        buckets.fill(index, tensors[index])
    return buckets.finish()


def of_all_kinds(rank: int) -> list[torch.Tensor]:
    return [
        value(torch.float32, (7, 5), rank, 1),
        value(torch.float64, (), rank, 2),
        value(torch.complex64, (3, 2), rank, 3),
        value(torch.float32, (2, 3, 4, 4), rank, 4).contiguous(memory_format=torch.channels_last),
        value(torch.float32, (0, 4), rank, 5),
        value(torch.bfloat16, (33,), rank, 6),
        value(torch.float32, (6, 9), rank, 7).mT,
        value(torch.complex128, (), rank, 8),
        value(torch.float16, (1, 1), rank, 9),
        value(torch.float32, (100, 300), rank, 10),
        value(torch.float32, (12, 10), rank, 11)[::2, ::3],
        value(torch.complex64, (4, 3), rank, 12).mT,
        value(torch.int64, (5,), rank, 13),
    ]


# -- which leaf goes where ---------------------------------------------------------------------------------------------


def reductions(*leaves: tuple[int, torch.dtype], bucket_bytes: int = 4 * MB, **options: Any) -> list[tuple[int, Any]]:
    """The bytes and dtypes reduced, in order, for leaves given as (bytes, dtype)."""
    comm = Alone()
    through(comm, [torch.ones(n // d.itemsize, dtype=d) for n, d in leaves], bucket_bytes=bucket_bytes, **options)
    assert comm.made == comm.reduced
    return [(numel * dtype.itemsize, dtype) for numel, dtype in comm.reduced]


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def test_last_leaves_first_and_the_first_bucket_small() -> None:
    assert FIRST_BYTES == MB
    # In reverse: 512 K and 512 K fill the first bucket, then up to 4 MB.
    sizes = [3 * MB, 2 * MB, MB, 512 << 10, 512 << 10]
    assert reductions(*((size, F32) for size in sizes)) == [(MB, F32), (3 * MB, F32), (3 * MB, F32)]


def test_a_leaf_larger_than_a_bucket_has_its_own() -> None:
    assert reductions((64, F32), (9 * MB, F32), (64, F32)) == [(64, F32), (9 * MB, F32), (64, F32)]
    assert reductions((9 * MB, F32)) == [(9 * MB, F32)]


def test_dtypes_are_kept_apart() -> None:
    found = reductions((640, F32), (640, F64), (128, BF16), (640, F32), (64, F64))
    assert sorted(found, key=str) == sorted([(1280, F32), (704, F64), (128, BF16)], key=str)


def test_leaves_start_at_cache_lines() -> None:
    assert reductions((4, F32), (4, F32), (68, F32), (MB, F32)) == [(MB, F32), (256, F32)]


def test_a_single_small_bucket_lies_as_optimizers_have_it() -> None:
    """In order, and with zeros in between, since those are stepped, too."""
    comm = Alone()
    found = through(comm, [torch.full((3,), 1.0), torch.full((2, 65), 2.0), torch.full((1,), 3.0)], bucket_bytes=MB)
    flat = torch.zeros(320)
    flat[:3], flat[64:194], flat[256] = 1.0, 2.0, 3.0
    assert torch.equal(found[0].as_strided((320,), (1,), 0), flat)
    assert [one.storage_offset() for one in found] == [0, 64, 256]


def test_reduced_as_soon_as_full() -> None:
    """A bucket starts when its leaves and those of all buckets before it are in, in whatever order they come."""
    comm = Alone()
    leaves = leaves_of([torch.ones(MB // 4) for _ in range(3)])
    buckets = Buckets(comm, leaves, bucket_bytes=MB)
    buckets.fill(0, torch.full((MB // 4,), 1.0))
    buckets.fill(1, torch.full((MB // 4,), 2.0))
    assert comm.reduced == []
    buckets.fill(2, torch.full((MB // 4,), 3.0))
    assert len(comm.reduced) == 3
    assert [float(result[0]) for result in buckets.finish()] == [1.0, 2.0, 3.0]


def test_what_is_missing_counts_as_zero() -> None:
    comm = Alone()
    tensors = of_all_kinds(0)
    for turn in range(3):
        buckets = Buckets(comm, leaves_of(tensors), bucket_bytes=MB)
        for index in range(turn, len(tensors), 3):
            buckets.fill(index, tensors[index])
        for index, (result, tensor) in enumerate(zip(buckets.finish(), tensors, strict=True)):
            assert same(result, tensor if index % 3 == turn else torch.zeros_like(tensor))


def test_no_leaves() -> None:
    assert through(Alone(), []) == []


# -- what comes back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_layouts(wire_dtype: torch.dtype | None) -> None:
    for result, tensor in zip(through(Alone(), of_all_kinds(0), wire_dtype=wire_dtype), of_all_kinds(0), strict=True):
        expected = tensor
        # Only floats travel narrower; complex numbers and integers go as they are.
        if wire_dtype is not None and tensor.is_floating_point() and wire_dtype.itemsize < tensor.dtype.itemsize:
            expected = tensor.to(wire_dtype).to(tensor.dtype)
        assert same(result, expected)
        dense = torch.empty_like(tensor)
        assert result.stride() == dense.stride() or 0 in result.shape


def test_wire_dtype_goes_over_the_wire() -> None:
    assert reductions((640, F32), (640, F64), wire_dtype=BF16) == [(2 * (192 + 128), BF16)]
    assert reductions((640, F64), wire_dtype=F32) == [(512, F32)]
    assert reductions((64, BF16), wire_dtype=F32) == [(128, BF16)]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_leaves(data: st.DataObject) -> None:
    dtypes = st.sampled_from([F32, F64, BF16, torch.float16, torch.complex64])
    shapes = st.lists(st.tuples(dtypes, st.lists(st.integers(0, 9), max_size=4), st.booleans()), max_size=8)
    tensors = []
    for index, (dtype, shape, transposed) in enumerate(data.draw(shapes)):
        tensor = value(dtype, shape, index)
        tensors.append(tensor.mT if transposed and tensor.dim() > 1 else tensor)
    results = through(Alone(), tensors, bucket_bytes=data.draw(st.sampled_from([1, 100, 1000, MB])))
    assert all(map(same, results, tensors))


# -- over real ranks ---------------------------------------------------------------------------------------------------


def steps(mesh: Mesh, wire_dtype: torch.dtype | None) -> tuple[list[list[bytes]], list[int]]:
    """Five steps, each with other values; the results of one step must survive the next."""
    comm: Any = mesh.comm()
    kept, tops = [], []
    for step in range(5):
        tensors = [tensor + step for tensor in of_all_kinds(comm.rank)]
        kept.append(through(comm, tensors, bucket_bytes=64 << 10, wire_dtype=wire_dtype))
        tops.append(comm.arena.heap._top if comm.backend == "shm" else 0)
    return [[bits(result) for result in results] for results in kept], tops


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_sums(shared_mesh: Callable[..., Mesh], backend: str, ranks: int, wire_dtype: torch.dtype | None) -> None:
    mesh = shared_mesh({"data": ranks}, backend=backend)
    for results, _ in mesh.run(steps, mesh, wire_dtype):
        for step, found in enumerate(results):
            for index, got in enumerate(found):
                parts = [of_all_kinds(rank)[index] + step for rank in range(ranks)]
                dtype = parts[0].dtype
                if wire_dtype is not None and dtype.is_floating_point and dtype.itemsize > wire_dtype.itemsize:
                    parts = [part.to(wire_dtype) for part in parts]
                assert got == bits(reduced(parts, "sum").to(dtype)), f"leaf {index} of step {step}"


def test_buffers_are_used_again(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})

    def body() -> list[tuple[int, int]]:
        comm: Any = mesh.comm()
        found = []
        for _ in range(20):
            results = through(comm, [torch.ones(300_000), torch.ones(50_000)], bucket_bytes=MB)
            found.append((comm.arena.heap._top, len(comm.plans)))
            del results
        return found

    for found in mesh.run(body):
        assert found[-1][0] - found[5][0] <= 4 * MB
        assert found[-1][1] == found[5][1]


def test_what_is_kept_of_each_shape_is_forgotten_in_time(shared_mesh: Callable[..., Mesh]) -> None:
    """In a program that has other shapes at each step."""
    mesh = shared_mesh({"data": 2})

    def body() -> int:
        comm: Any = mesh.comm()
        for length in range(1, 300):
            assert through(comm, [torch.ones(length)], bucket_bytes=MB)[0][-1] == 2
        return len(comm.plans)

    assert max(mesh.run(body)) <= 256
    for length in range(5000):
        assert Call("gather", shown=(length,)).text == f"gather[{length}]"
    assert len(Call._known) <= 4096


def test_two_in_flight(shared_mesh: Callable[..., Mesh]) -> None:
    """Two uses of the same layout at once have buffers of their own."""
    mesh = shared_mesh({"data": 2})

    def body() -> list[float]:
        comm = mesh.comm()
        leaves = leaves_of([torch.ones(90_000)] * 2)
        first, second = (Buckets(comm, leaves, bucket_bytes=MB) for _ in range(2))
        for number, buckets in enumerate((first, second)):
            for index in range(2):
                buckets.fill(index, torch.full((90_000,), 10.0 * number + index))
        return [float(result[-1]) for buckets in (second, first) for result in buckets.finish()]

    assert mesh.run(body) == [[20.0, 22.0, 0.0, 2.0]] * 2
