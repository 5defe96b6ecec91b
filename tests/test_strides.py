"""The order of elements in memory: kept by every copy on the way to the ranks, on them, and back."""

from __future__ import annotations

import doctest
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import launched, script

from spmd import P, put, spmd
from spmd.mesh import strides

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4)


def test_docstrings() -> None:
    assert doctest.testmod(strides).failed == 0


@settings(max_examples=200, deadline=None)
@given(SHAPES, st.randoms(use_true_random=False))
def test_in_any_order(shape: list[int], random: Any) -> None:
    order = [*range(len(shape))]
    random.shuffle(order)
    layout = strides.ordered(shape, order)
    tensor = torch.empty_strided(shape, layout)
    assert strides.dense(shape, layout) == layout == strides.copied(tensor).stride()
    assert strides.ordered(shape, strides.order_of(shape, layout)) == layout
    assert strides.standard(shape) == torch.empty(shape).stride()
    assert strides.is_standard(tensor) == (layout == torch.empty(shape).stride())
    if tensor.numel():
        # What torch makes itself, where it keeps the order at all.
        assert torch.empty_like(tensor).stride() == layout
        assert strides.flat(tensor).data_ptr() == tensor.data_ptr() and strides.flat(tensor).is_contiguous()


def test_with_gaps_and_overlaps() -> None:
    turned = torch.arange(24).reshape(4, 6).t()
    assert strides.copied(turned[::2]).stride() == (1, 3)  # in the order of what it is a part of
    assert strides.copied(torch.ones(2, 1).expand(2, 3)).stride() == (3, 1)
    assert strides.copied(torch.ones(2, 1).t().expand(3, 2)).stride() == (2, 1)
    assert strides.copied(torch.arange(5).unfold(0, 3, 1)).stride() == (3, 1)
    for tensor in (turned[::2], turned[:, 1:3], torch.arange(5).unfold(0, 3, 1), torch.ones(2, 1).expand(2, 3)):
        assert torch.equal(strides.copied(tensor), tensor)


def values() -> dict[str, torch.Tensor]:
    return {
        "last": torch.arange(400.0).reshape(4, 4, 5, 5).to(memory_format=torch.channels_last),
        "turned": torch.arange(24).reshape(4, 6).t(),
        "one channel": torch.arange(100.0).reshape(4, 1, 5, 5).to(memory_format=torch.channels_last),
        "one column": torch.arange(8).reshape(2, 4).t(),
        "usual": torch.arange(8.0).reshape(4, 2),
        "gaps": torch.arange(48).reshape(4, 12).t()[::2],
        "same": torch.arange(4.0)[:, None].expand(4, 3),
        "empty": torch.empty(0, 4).t(),
    }


SPECS = [P(), P("data"), P(None, "data"), P("model", "data")]


def wanted(whole: torch.Tensor, shard: torch.Size) -> tuple[int, ...]:
    """The strides of a rank's shard: in the order of the whole, without gaps."""
    whole = whole if all(whole.stride()) else whole.contiguous()
    part = whole[tuple(map(slice, shard))]
    return torch.empty_like(part).stride() if part.numel() else whole.stride()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_rank_has_the_order_of_the_whole(shared_mesh: Any, spec: P) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    for name, value in values().items():
        if any(size % 2 for size, cut in zip(value.shape, spec.entries, strict=False) if cut):
            continue
        array = put(value, spec, mesh=mesh)
        for shard in array.shards():
            assert shard.stride() == wanted(value, shard.shape), (name, shard.shape)
        whole = strides.dense(value.shape, value.stride())
        assert torch.equal(array.full(), value) and array.full().stride() == whole, name
        again = put(array, P("data"), mesh=mesh) if value.shape[0] % 2 == 0 else array
        assert torch.equal(again.full(), value) and again.full().stride() == whole, name
        seen = spmd(lambda x: x.stride(), mesh=mesh)(array)
        assert tuple(seen) == array.shards()[0].stride(), name


LAUNCHED = r"""
import sys
sys.path[:0] = [sys.argv[1]]
import torch
from spmd import Mesh, put
from spmd.mesh import strides
from test_strides import SPECS, values, wanted
mesh = Mesh({"data": 2, "model": 2})
for spec in SPECS:
    for name, value in values().items():
        if any(size % 2 for size, cut in zip(value.shape, spec.entries) if cut):
            continue
        array = put(value, spec, mesh=mesh)
        whole = strides.dense(value.shape, value.stride())
        full, shards = array.full(), array.shards()
        good = array.local.stride() == wanted(value, array.local.shape) and full.stride() == whole
        good = good and shards[mesh.rank].stride() == array.local.stride() and torch.equal(full, value)
        good = good and torch.equal(shards[mesh.rank], array.local)
        if not good:
            print("differs", mesh.rank, spec, name, array.local.stride(), full.stride(), whole)
print("done", mesh.rank)
mesh.close()
"""


def test_launched(tmp_path: Path) -> None:
    program = script(tmp_path, LAUNCHED)
    status, out, err = launched(4, program, str(Path(__file__).parent))
    assert status == 0, err
    assert sorted(out.split("\n")) == ["", *(f"done {rank}" for rank in range(4))]


def test_results_of_a_step_keep_their_order(shared_mesh: Any) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    for value, spec in itertools.product(values().values(), [P(), P("data")]):
        if spec.entries and value.shape[0] % 2:
            continue
        result = spmd(lambda x: torch.empty_like(x).copy_(x), mesh=mesh, out_specs=spec)(put(value, spec, mesh=mesh))
        assert torch.equal(result.full(), value)
        assert result.full().stride() == strides.dense(value.shape, value.stride())
