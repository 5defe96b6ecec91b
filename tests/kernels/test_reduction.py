"""The order of additions, what accumulates in what, and copies, in one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DTYPES, HALVES, OPS, bits, exact, meaningful, reduced, same, value

from spmd import SpecError
from spmd.kernels import copying
from spmd.kernels.reduction import check_op, reduce_in_order, slice_bounds


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_against_numpy(op: str, dtype: torch.dtype) -> None:
    if not meaningful(op, dtype):
        with pytest.raises(SpecError, match=f"op '{op}' is not defined for {dtype}"):
            check_op(op, dtype)
        return
    check_op(op, dtype)
    for count in (1, 2, 3, 5):
        parts = [value(dtype, (130,), rank) for rank in range(count)]
        before = [part.clone() for part in parts]
        out = torch.empty_like(parts[0])
        assert reduce_in_order(parts, op, out) is out
        expected = reduced(parts, op)
        assert same(out, expected) if exact(op, dtype) else torch.allclose(out, expected)
        assert all(map(same, parts, before))


def test_refuses_what_has_no_arithmetic() -> None:
    with pytest.raises(SpecError, match=r"unknown reduction op .*'mean'"):
        check_op("mean", torch.float32)
    with pytest.raises(SpecError, match="float8_e4m3fn"):
        check_op("sum", torch.float8_e4m3fn)


@pytest.mark.parametrize("count", [2, 3])
def test_blocks_change_nothing(count: int) -> None:
    """Long tensors are added block by block; each element's sum is the same."""
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        parts = [value(dtype, ((1 << 16) * 2 + 77,), rank) for rank in range(count)]
        assert same(reduce_in_order(parts, "sum", torch.empty_like(parts[0])), reduced(parts, "sum"))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["sum", "avg", "product"])
def test_halves_are_rounded_once(dtype: torch.dtype, op: str) -> None:
    """1 and many times half a unit in the last place: adding in 16 bits would lose every one."""
    tiny = torch.finfo(dtype).eps / 2
    count = 9
    if op == "product":
        parts = [torch.full((4,), 1.3, dtype=dtype) for _ in range(count)]
        exactly = float(parts[0][0]) ** count
    else:
        parts = [torch.ones(4, dtype=dtype), *(torch.full((4,), tiny, dtype=dtype) for _ in range(count - 1))]
        exactly = (1 + (count - 1) * tiny) / (count if op == "avg" else 1)
    got = reduce_in_order(parts, op, torch.empty(4, dtype=dtype))
    assert torch.equal(got, torch.full((4,), exactly, dtype=torch.float32).to(dtype))
    naive = parts[0]
    for part in parts[1:]:
        naive = naive * part if op == "product" else naive + part
    assert not torch.equal(got, naive / count if op == "avg" else naive)


def test_order_is_that_of_ranks() -> None:
    parts = [torch.tensor([number]) for number in (1e8, 1.0, -1e8, 1.0)]
    assert reduce_in_order(parts, "sum", torch.empty(1)).item() == 1.0  # ((1e8 + 1) - 1e8) + 1
    assert reduce_in_order(parts[::-1], "sum", torch.empty(1)).item() == 0.0


def test_integers_wrap_and_averages_truncate() -> None:
    def one(op: str, dtype: torch.dtype, *numbers: int) -> int:
        parts = [torch.tensor([number], dtype=dtype) for number in numbers]
        return int(reduce_in_order(parts, op, torch.empty(1, dtype=dtype)).numpy()[0])

    assert one("sum", torch.int8, 127, 1) == -128
    assert one("sum", torch.uint16, 65535, 2) == 1
    assert one("max", torch.uint64, 2**64 - 1, 1) == 2**64 - 1
    assert one("min", torch.uint32, 2**31 + 5, 7) == 7
    assert one("avg", torch.int32, -3, 0) == -1
    assert one("avg", torch.int32, 3, 0) == 1
    assert one("avg", torch.uint16, 3, 4, 4) == 3


@settings(max_examples=200, deadline=None)
@given(numel=st.integers(0, 100_000), parts=st.integers(1, 70))
def test_slices(numel: int, parts: int) -> None:
    """They cover everything once, are cut at multiples of 64 and differ by at most 64."""
    bounds = slice_bounds(numel, parts)
    assert len(bounds) == parts + 1
    assert (bounds[0], bounds[-1]) == (0, numel)
    lengths = np.diff(bounds)
    assert (lengths >= 0).all()
    assert all(bound % 64 == 0 or bound == numel for bound in bounds)
    whole = -(-numel // 64) * 64
    padded = np.diff([*bounds[:-1], max(whole, bounds[-2])]) if numel else lengths
    assert padded.max() - padded.min() <= 64


def test_slices_put_tails_in_the_same_place() -> None:
    """Adding slice by slice gives the bits of adding the whole, for every number of slices."""
    inputs = [value(torch.float32, (10_007,), rank) for rank in range(3)]
    whole = reduce_in_order(inputs, "avg", torch.empty(10_007))
    for parts in (1, 2, 3, 7):
        bounds = slice_bounds(10_007, parts)
        out = torch.empty(10_007)
        for start, end in itertools.pairwise(bounds):
            reduce_in_order([tensor[start:end] for tensor in inputs], "avg", out[start:end])
        assert same(out, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_copies_of_any_size(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: int) -> None:
    monkeypatch.setattr(copying, "LARGE_BYTES", limit)
    source = value(dtype, (33, 5), 0, 0)
    whole = torch.zeros(200, dtype=dtype)
    out = whole[7 : 7 + 165].view(33, 5)
    assert copying.copy(out, source) is out
    assert bits(out) == bits(source)
    assert not whole[:7].any() and not whole[172:].any()


def test_a_large_copy_of_what_memory_holds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of conjugates and negatives, which a bit of the tensor says."""
    monkeypatch.setattr(copying, "LARGE_BYTES", 0)
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    for source in (numbers.conj(), torch.ones(3)._neg_view()):
        out = torch.empty(source.shape, dtype=source.dtype)
        assert copying.copy(out, source).tolist() == source.tolist()
