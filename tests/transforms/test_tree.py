"""The tree by position: one order of additions, however the shards are divided among ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import same

from spmd.kernels.reduction import Pairwise, reduce_in_order
from spmd.mesh.spec import split_sizes
from spmd.transforms.exact.tree import Partials, combine, maximal_nodes


def by_halves(values: list[torch.Tensor]) -> torch.Tensor:
    """The tree written another way: the left half is the largest power of two that is less than the whole."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return by_halves(values[:half]) + by_halves(values[half:])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 99))
def test_any_division_gives_the_same_bits(shards: int, ranks: int, seed: int) -> None:
    values = list(torch.randn(shards, 5, generator=torch.Generator().manual_seed(seed)) * 10.0 ** torch.arange(5))
    nodes, start = {}, 0
    for owned in split_sizes(shards, ranks):
        partials, most = Partials(), 0
        for shard in range(start, start + owned):
            partials.push(shard, values[shard].clone())
            most = max(most, len(partials.nodes))
        assert [node for node, _ in partials.nodes] == maximal_nodes(range(start, start + owned))
        assert most <= 2 * max(1, owned.bit_length())
        nodes.update(dict(partials.nodes))
        start += owned
    assert same(combine(nodes), by_halves(values))


def test_what_was_pushed_stays_as_it_was() -> None:
    values = [torch.ones(2) for _ in range(4)]
    partials = Partials()
    for shard, value in enumerate(values):
        partials.push(shard, value)
    assert all(value.tolist() == [1, 1] for value in values) and partials.nodes[0][1].tolist() == [4, 4]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_the_reduction_that_adds_neighbours(count: int, dtype: torch.dtype) -> None:
    parts = list(torch.randn(count, 70000, generator=torch.Generator().manual_seed(count)).to(dtype))
    found = reduce_in_order(parts, Pairwise(0.3), torch.empty(70000, dtype=dtype))
    assert same(found, by_halves(parts) * 0.3)
