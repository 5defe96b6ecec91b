"""Partition specs: what P says, and what each rank of a layout holds of a value."""

from __future__ import annotations

import doctest
import itertools
import pickle

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd import P, Sharded, SpecError
from spmd.mesh import program, spec, trees
from spmd.mesh.replication import agreement
from spmd.mesh.spec import Layout, split_sizes

TWO = Layout((("data", 2), ("model", 3)))


@pytest.mark.parametrize("module", [spec, program, agreement], ids=lambda module: module.__name__)
def test_doctests(module):
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


# -- P -----------------------------------------------------------------------------------------------------------------


def test_equal_specs_have_one_form():
    assert P("data", None, None) == P("data") == P(("data",)) == P(["data"])
    assert P(()) == P(None) == P() and hash(P(None)) == hash(P())
    assert P("data", "model") != P(("data", "model")) != P(("model", "data"))
    assert repr(P(None, ("a", "b"))) == "P(None, ('a', 'b'))" and repr(P()) == "P()"
    assert P("a", None, ("b", "c")).axes == {"a", "b", "c"}
    assert [P("a", None, ("b", "c")).dim_axes(dim) for dim in range(5)] == [("a",), (), ("b", "c"), (), ()]
    assert pickle.loads(pickle.dumps(P("a", ("b", "c")))) == P("a", ("b", "c"))
    with pytest.raises(AttributeError):
        P("a").entries = ()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ((3,), ["P got an unexpected entry", "expected None, an axis name or a tuple of axis names", "got 3"]),
        ((("a", 3),), ["P got an unexpected entry", "('a', 3)"]),
        (("a", "a"), ["P names axis 'a' twice", "P('a', 'a')", "an axis can cut one dimension only"]),
        ((("a", "b"), "b"), ["P names axis 'b' twice"]),
        ((("a", "a"),), ["P names axis 'a' twice"]),
    ],
)
def test_bad_specs(entries, words):
    with pytest.raises(SpecError) as caught:
        P(*entries)
    assert all(word in str(caught.value) for word in words)


def test_sharded_is_a_node_of_trees():
    node = Sharded({"w": torch.ones(2)}, P("data"))
    leaves, treedef = trees.flatten({"x": node})
    again = trees.unflatten(treedef, leaves)["x"]
    assert again.spec == P("data") and again.local["w"] is node.local["w"]
    assert trees.paths({"x": node}) == ["['x'].local['w']"]
    assert repr(Sharded(1, P("data"))) == "Sharded(1, P('data'))"
    with pytest.raises(SpecError, match=r"Sharded got a bad spec \(expected P\(...\), got 'data'\)"):
        Sharded(torch.ones(2), "data")
    with pytest.raises(SpecError, match=r"Sharded got a Sharded: take its \.local"):
        Sharded(Sharded(torch.ones(2), P("data")), P("data"))
    assert optree.tree_leaves(node) == [node]  # in our namespace only


# -- Layout ------------------------------------------------------------------------------------------------------------


def test_ranks_are_row_major():
    assert [TWO.coords(rank) for rank in range(6)] == [
        {"data": data, "model": model} for data, model in itertools.product(range(2), range(3))
    ]
    assert all(TWO.rank(TWO.coords(rank)) == rank for rank in range(6))
    assert TWO.group(4, ("data",)) == (1, 4) and TWO.group(4, ("model", "data")) == (0, 3, 1, 4, 2, 5)
    assert TWO.parts(("data", "model")) == 6 and TWO.parts(()) == 1
    assert TWO.part(4, ("model",)) == 1 and TWO.part(4, ("model", "data")) == 3
    assert TWO.owner(P("model"), 4) == 1 and TWO.owner(P(), 5) == 0 and TWO.owner(P(("model", "data")), 5) == 5
    assert TWO.replicas(P("model"), 4) == [1, 4] and TWO.replicas(P("data", "model"), 4) == [4]


@pytest.mark.parametrize(
    ("shape", "its_spec", "words"),
    [
        ((4,), P("pipe"), ["P('pipe') names an axis", "expected one of ('data', 'model')", "got 'pipe'", "[here]"]),
        ((4,), P(None, "data"), ["has more entries than the tensor has dimensions", "at least 2", "shape (4,)"]),
        ((), P("data"), ["has more entries than the tensor has dimensions", "shape ()"]),
        ((5, 3), P("data"), ["dimension 0 of size 5 is not divisible by axis data of size 2", "pad or drop"]),
        ((6, 4), P(None, "model"), ["dimension 1 of size 4 is not divisible by axis model of size 3"]),
        ((4,), P(("data", "model")), ["dimension 0 of size 4 is not divisible by axis dataxmodel of size 6"]),
    ],
)
def test_shapes_that_do_not_fit(shape, its_spec, words):
    with pytest.raises(SpecError) as caught:
        TWO.check_shape(shape, its_spec, where="here")
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_batch_may_be_uneven():
    TWO.check_shape((5, 2), P("data"), uneven=True)
    with pytest.raises(SpecError, match="more entries"):
        TWO.check_shape((), P("data"), uneven=True)


@given(st.integers(0, 50), st.integers(1, 9))
def test_blocks_are_even(length, parts):
    sizes = split_sizes(length, parts)
    assert sum(sizes) == length and len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@st.composite
def values_on_layouts(draw):
    names = draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 3))]
    layout = Layout(tuple((name, draw(st.integers(1, 3))) for name in names))
    dims = draw(st.integers(0, 3))
    entries: list[list[str]] = [[] for _ in range(dims)]
    for name in draw(st.permutations(names)):
        where = draw(st.integers(-1, dims - 1))
        if where >= 0:
            entries[where].append(name)
    shape = tuple(draw(st.integers(0, 7)) for _ in range(dims))
    return layout, P(*map(tuple, entries)), torch.arange(torch.Size(shape).numel()).reshape(shape)


@settings(max_examples=200, deadline=None)
@given(values_on_layouts())
def test_cutting_and_joining_are_inverse(case):
    layout, its_spec, value = case
    shards = [layout.cut(value, its_spec, rank) for rank in range(layout.size)]
    assert torch.equal(layout.join(shards, its_spec), value)
    shapes = [tuple(shard.shape) for shard in shards]
    assert layout.global_shape(shapes, its_spec) == tuple(value.shape)
    assert shapes == [layout.shard_shape(tuple(value.shape), its_spec, rank) for rank in range(layout.size)]
    for rank, shard in enumerate(shards):
        replicas = layout.replicas(its_spec, rank)
        assert layout.owner(its_spec, rank) == min(replicas) and rank in replicas
        assert all(torch.equal(shards[replica], shard) for replica in replicas)
    owners = {layout.owner(its_spec, rank) for rank in range(layout.size)}
    assert sum(shards[rank].numel() for rank in owners) == value.numel()


@settings(max_examples=100, deadline=None)
@given(values_on_layouts())
def test_the_first_axis_of_a_tuple_is_major(case):
    """Cutting over ("a", "b") is cutting over a, and each block over b, where the sizes divide."""
    layout, its_spec, value = case
    for dim in range(len(its_spec.entries)):
        axes = its_spec.dim_axes(dim)
        if value.shape[dim] % layout.parts(axes):
            return
    for rank in range(layout.size):
        by_steps = value
        for dim in range(len(its_spec.entries)):
            for name in its_spec.dim_axes(dim):
                by_steps = layout.cut(by_steps, P(*[None] * dim, name), rank)
        assert torch.equal(by_steps, layout.cut(value, its_spec, rank))
