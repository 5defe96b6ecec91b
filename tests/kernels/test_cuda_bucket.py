"""Buckets of GPUs without one: values on the fake of NCCL, with the kernels compiled for the host; and the order."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle
import nccl_fake
import pytest
import torch
from cuda_host import launcher, library_for_host
from streams_fake import CURRENT, SIDE

from spmd import Mesh, SpecError
from spmd.kernels import registry
from spmd.kernels.bucket import Leaf
from spmd.kernels.cuda.bucket import CudaBuckets
from spmd.transforms import _sums
from spmd.transforms._plan import Plan

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return library_for_host(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def mesh(make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> Mesh:
    monkeypatch.setitem(registry._FACTORIES, "nccl-fake", nccl_fake.factory)
    return make_mesh({"data": 2}, backend="nccl-fake")


def prepared(mesh: Mesh, library: str) -> Any:
    comm: Any = mesh.comm()
    comm.launch = launcher(ctypes.CDLL(library))
    del comm.library.nccl.log[:]
    return comm


def values_of(rank: int) -> list[torch.Tensor]:
    """Shapes and dtypes of all kinds: odd, empty, 0-dim, channels last, complex, integers, doubles."""
    generator = torch.Generator().manual_seed(rank)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul(8).round().to(dtype)

    return [
        some(3, 5),
        some(),
        some(0, 4),
        some(2, 3, 4, 5).to(memory_format=torch.channels_last),
        some(7, dtype=torch.float16),
        some(33, dtype=torch.bfloat16),
        torch.complex(some(4), some(4)),
        some(9, dtype=torch.float64),
        some(5, dtype=torch.int64),
        some(70001),
    ]


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_sums(mesh: Mesh, library: str, wire: torch.dtype | None, bucket_bytes: int) -> None:
    def body() -> list[torch.Tensor]:
        comm = prepared(mesh, library)
        values = values_of(comm.rank)
        for _ in range(3):
            buckets = CudaBuckets(
                comm, [Leaf.of(value) for value in values], bucket_bytes=bucket_bytes, wire_dtype=wire
            )
            for index in (9, 3, 0, 1, 2, 8, 7, 6, 5, 4):
                buckets.fill(index, values[index])
            found = buckets.finish()
        assert len(comm.plans) == 1
        return [one.clone() for one in found]

    expected = [a + b for a, b in zip(values_of(0), values_of(1), strict=True)]
    for found in mesh.run(body):
        for one, right in zip(found, expected, strict=True):
            assert one.dtype == right.dtype and one.shape == right.shape and one.stride() == right.stride()
            assert torch.equal(one, right)  # the values are small integers, which all dtypes hold


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_one_launch_for_each_bucket(mesh: Mesh, library: str, wire: torch.dtype | None) -> None:
    """Buckets are of one dtype: one launch packs it, one unpacks it if it was cast; the same buckets on both ranks."""

    def body() -> tuple[list[tuple[str, int]], list[tuple[int, int]]]:
        comm = prepared(mesh, library)
        start, launches = comm.launch, []

        def counted(name: str, blocks: int, arguments: tuple) -> None:
            launches.append((name, arguments[1]))
            start(name, blocks, arguments)

        comm.launch = counted
        values = values_of(comm.rank)
        buckets = CudaBuckets(comm, [Leaf.of(value) for value in values], bucket_bytes=1 << 25, wire_dtype=wire)
        order = range(len(values)) if comm.rank else reversed(range(len(values)))
        for index in order:
            buckets.fill(index, values[index])
        buckets.finish()
        return launches, [call[3:5] for call in comm.library.nccl.log if call[0] == "allReduce"]

    (launches, reductions), others = mesh.run(body)
    assert (launches, reductions) == others
    as_they_are = [("pack_bytes", 1), ("pack_float32_float32", 1), ("pack_bfloat16_bfloat16", 1)]
    if wire is None:  # complex leaves go with real ones of their width
        packed = [("pack_float32_float32", 6), *as_they_are[:1] * 2, as_they_are[2], ("pack_float16_float16", 1)]
        assert launches == packed
        return
    cast = [("float32_bfloat16", 5), ("float64_bfloat16", 1)]
    expected = [*((f"pack_{name}", count) for name, count in cast), *as_they_are, ("pack_float16_float16", 1)]
    assert sorted(launches[: len(expected)]) == sorted(expected)
    assert launches[len(expected) :] == [(f"unpack_{name}", count) for name, count in cast]


def test_wire_dtypes_without_a_kernel(mesh: Mesh, library: str) -> None:
    def body() -> None:
        comm = prepared(mesh, library)
        CudaBuckets(comm, [Leaf.of(torch.ones(3))], bucket_bytes=64, wire_dtype=torch.float8_e5m2)

    with pytest.raises(SpecError, match=r"wire_dtype got a dtype.*expected one of torch\.float32, .*got torch\.float8"):
        mesh.run(body)


def test_missing_leaves_are_zeros(mesh: Mesh, library: str) -> None:
    def body() -> list[list[float]]:
        comm = prepared(mesh, library)
        like = [torch.empty(3), torch.empty(2, dtype=torch.float64), torch.empty(4)]
        buckets = CudaBuckets(comm, [Leaf.of(one) for one in like], bucket_bytes=1 << 20)
        if comm.rank:
            buckets.fill(0, torch.ones(3))
        return [one.tolist() for one in buckets.finish()]

    assert mesh.run(body) == [[[1.0] * 3, [0.0] * 2, [0.0] * 4]] * 2


def test_other_collectives_keep_their_turn(mesh: Mesh, library: str) -> None:
    """Buckets that start late do so after what else the ranks do, whichever leaves a rank has filled in by then."""

    def body() -> list[float]:
        comm = prepared(mesh, library)
        buckets = CudaBuckets(comm, [Leaf.of(torch.ones(3))], bucket_bytes=64, early=False)
        if comm.rank:
            buckets.fill(0, torch.ones(3))
        one = torch.ones(1)
        comm.all_reduce(one)
        return [*one.tolist(), *buckets.finish()[0].tolist()]

    assert mesh.run(body) == [[2.0, 1.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("axes", "alone", "early"),
    [
        ([("data",), ("data",)], True, True),
        ([("data",), ("data",)], False, False),
        ([("data",), ("data", "model")], True, False),
        ([("data",), ()], True, True),
    ],
)
def test_when_buckets_start_early(
    monkeypatch: pytest.MonkeyPatch, axes: list[tuple[str, ...]], alone: bool, early: bool
) -> None:
    """While the backward pass runs, if nothing else communicates then whose order with them ranks might not share."""
    opened = []
    monkeypatch.setattr(_sums, "_kind", lambda device, comm: lambda *_, **options: opened.append(options["early"]))
    monkeypatch.setattr(_sums, "Leaf", SimpleNamespace(of=lambda like: like))
    layout = SimpleNamespace(axes={"data": 2, "model": 2})
    session = SimpleNamespace(layout=layout, device=torch.device("cuda"), comm=lambda axes, channel: None)
    region: Any = SimpleNamespace(session=session)
    like: Any = SimpleNamespace(device=torch.device("cuda"))
    sums = _sums.Sums(region, Plan(bucket_mb=1.0))
    for each in axes:
        sums.add(like, each)
    sums.add(like, ("model",), exact=True)  # such as the value: filled in before the backward pass begins
    sums.open(alone=alone)
    assert opened == [early] * (1 + len({each for each in axes if each}))


def test_beside_the_backward_pass(mesh: Mesh, library: str) -> None:
    """A full bucket starts on the side stream while others fill, in one order; the current stream waits at the end."""

    def body() -> Any:
        comm = prepared(mesh, library)
        values = [torch.ones(300_000), torch.ones(300_000), torch.ones(10)]
        buckets = CudaBuckets(comm, [Leaf.of(value) for value in values], bucket_bytes=1 << 20)
        counts = []
        for index in (1, 2, 0):  # the last leaf's bucket goes first, though the one before it is full already
            buckets.fill(index, values[index])
            counts.append([call[0] for call in comm.library.nccl.log].count("allReduce"))
        before = len(comm.library.nccl.log)
        buckets.finish()
        calls = comm.library.nccl.log
        streams = {call[-1] for call in calls if call[0] == "allReduce"}
        held = [call[-1] for call in calls[:before] if call[0] == "hold"]
        return counts, streams, set(held), [call[0] for call in calls[before:]], [call[-1] for call in calls[before:]]

    for counts, streams, held, names, where in mesh.run(body):
        assert counts == [0, 2, 3]
        assert streams == held == {SIDE}
        assert names == ["wait", "hold"] * 3
        assert set(where) == {CURRENT}
