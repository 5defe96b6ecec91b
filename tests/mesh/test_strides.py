"""The order of elements in memory: kept by every copy on the way to the ranks, on them, and back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import launched, script
from strided import SPECS, dense, values, wanted

from spmd import P, put, spmd

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.randoms(use_true_random=False))
def test_in_any_order(shared_mesh: Any, shape: list[int], random: Any) -> None:
    """Strides of dimensions of size 1, and of empty tensors, are kept as well."""
    order = [*range(len(shape))]
    random.shuffle(order)
    strides, step = [1] * len(shape), 1
    for dim in order:
        strides[dim], step = step, step * max(shape[dim], 1)
    tensor = torch.empty_strided(shape, strides).fill_(1.0)
    array = put(tensor, mesh=shared_mesh({"data": 2}))
    assert {shard.stride() for shard in array.shards()} == {tuple(strides)} == {array.full().stride()}


def test_with_gaps_and_overlaps(shared_mesh: Any) -> None:
    turned = torch.arange(24).reshape(4, 6).t()
    cases = {
        (1, 3): turned[::2],  # in the order of what it is a part of
        (1, 6): turned[:, 1:3],
        (2, 1): torch.ones(2, 1).t().expand(3, 2),
        (3, 1): torch.arange(5).unfold(0, 3, 1),
    }
    for strides, tensor in [*cases.items(), ((3, 1), torch.ones(2, 1).expand(2, 3))]:
        array = put(tensor, mesh=shared_mesh({"data": 2}))
        assert [shard.stride() for shard in array.shards()] == [strides] * 2
        assert torch.equal(array.full(), tensor)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_rank_has_the_order_of_the_whole(shared_mesh: Any, spec: P) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    for name, value in values().items():
        if any(size % 2 for size, cut in zip(value.shape, spec.entries, strict=False) if cut):
            continue
        array = put(value, spec, mesh=mesh)
        for shard in array.shards():
            assert shard.stride() == wanted(value, shard.shape), (name, shard.shape)
        whole = dense(value)
        assert torch.equal(array.full(), value) and array.full().stride() == whole, name
        again = put(array, P("data"), mesh=mesh) if value.shape[0] % 2 == 0 else array
        assert torch.equal(again.full(), value) and again.full().stride() == whole, name
        seen = spmd(lambda x: x.stride(), mesh=mesh)(array)
        assert tuple(seen) == array.shards()[0].stride(), name


LAUNCHED = r"""
import sys
sys.path[:0] = sys.argv[1:]
import torch
from spmd import Mesh, put
from strided import SPECS, dense, values, wanted
mesh = Mesh({"data": 2, "model": 2})
for spec in SPECS:
    for name, value in values().items():
        if any(size % 2 for size, cut in zip(value.shape, spec.entries) if cut):
            continue
        array = put(value, spec, mesh=mesh)
        whole = dense(value)
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
    status, out, err = launched(4, program, *map(str, Path(__file__).parents[:2]))
    assert status == 0, err
    assert sorted(out.split("\n")) == ["", *(f"done {rank}" for rank in range(4))]


def test_results_of_a_step_keep_their_order(shared_mesh: Any) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    for value, spec in itertools.product(values().values(), [P(), P("data")]):
        if spec.entries and value.shape[0] % 2:
            continue
        result = spmd(lambda x: torch.empty_like(x).copy_(x), mesh=mesh, out_specs=spec)(put(value, spec, mesh=mesh))
        assert torch.equal(result.full(), value)
        assert result.full().stride() == dense(value)
