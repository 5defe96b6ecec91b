"""Trees: one namespace, None is a leaf, dictionaries keep their order, and structures travel."""

from __future__ import annotations

import collections
import dataclasses
import doctest
import pickle
from typing import NamedTuple

import optree
import pytest
import torch
from scripts import FORKED_CHILDREN, run

from spmd import P, SpecError, data_parallel, put, spmd, value_and_grad
from spmd.mesh import trees


class Pair(NamedTuple):
    first: object
    second: object


@optree.dataclasses.dataclass(namespace=trees.NAMESPACE)
class State:
    weight: object
    name: str = optree.dataclasses.field(default="", pytree_node=False)


def test_doctests():
    assert doctest.testmod(trees).failed == 0


def test_none_is_a_leaf_and_dicts_keep_their_order():
    leaves, treedef = trees.flatten({"z": 1, "a": [None, (2,)], "m": {}})
    assert leaves == [1, None, 2]
    assert trees.unflatten(treedef, ["x", "y", "w"]) == {"z": "x", "a": ["y", ("w",)], "m": {}}
    assert list(trees.unflatten(treedef, leaves)) == ["z", "a", "m"]


def test_containers():
    tree = {
        "pair": Pair(1, [2]),
        "state": State(3, name="layer"),
        "ordered": collections.OrderedDict(b=4, a=5),
        "deque": collections.deque([6]),
        "default": collections.defaultdict(list, k=7),
    }
    doubled = trees.map(lambda x: 2 * x, tree)
    assert doubled["pair"] == Pair(2, [4]) and doubled["state"] == State(6, name="layer")
    assert list(doubled["ordered"].items()) == [("b", 8), ("a", 10)]
    assert trees.leaves(doubled) == [2, 4, 6, 8, 10, 12, 14]
    assert trees.map(lambda a, b: a + b, {"x": 1}, {"x": 2}) == {"x": 3}


def test_paths_are_expressions():
    tree = {"layer": Pair({"w": 1}, [2, 3]), "state": State(4)}
    assert trees.paths(tree) == [
        "['layer'].first['w']",
        "['layer'].second[0]",
        "['layer'].second[1]",
        "['state'].weight",
    ]
    assert trees.paths(5) == [""] and trees.paths({}) == []
    for path, leaf in zip(trees.paths(tree), trees.leaves(tree), strict=True):
        assert eval(f"tree{path}") == leaf


def test_a_prefix_covers_what_lies_below():
    tree = {"a": [1, 2], "b": Pair(3, {"c": 4})}
    assert trees.broadcast_prefix("x", tree) == ["x"] * 4
    assert trees.broadcast_prefix({"a": "x", "b": Pair("y", "z")}, tree) == ["x", "x", "y", "z"]
    assert trees.broadcast_prefix(None, tree) == [None] * 4
    assert trees.broadcast_prefix((), ()) == []
    other_order = {"b": Pair("y", "z"), "a": "x"}
    assert trees.broadcast_prefix(other_order, tree) == ["x", "x", "y", "z"]  # entries go by key
    ordered = collections.OrderedDict(b=1, a=[2])
    assert trees.broadcast_prefix({"a": "x", "b": "y"}, ordered) == ["y", "x"]
    with pytest.raises(ValueError):
        trees.broadcast_prefix({"a": "x"}, tree)
    with pytest.raises(ValueError):
        trees.broadcast_prefix({"a": ["x"], "b": "y"}, tree)


@pytest.mark.parametrize("tree", [1, {}, {"b": 1, "a": (None, [2])}, Pair(1, State(2, name="n"))])
def test_structures_travel(tree):
    treedef = trees.flatten(tree)[1]
    assert pickle.loads(pickle.dumps(trees.Packed(treedef))) == treedef


def test_a_structure_of_the_main_script_travels_to_a_process_that_lacks_it():
    script = """
import pickle, subprocess, sys
from typing import NamedTuple
import cloudpickle, optree
from spmd.mesh import trees

class Point(NamedTuple):
    x: int
    y: int

@optree.dataclasses.dataclass(namespace=trees.NAMESPACE)
class Layer:
    w: object
    name: str = optree.dataclasses.field(default="", pytree_node=False)

def local():
    @optree.dataclasses.dataclass(namespace=trees.NAMESPACE)
    class Inner:
        v: object
    Inner.__module__ = "spmd"  # as if defined in a function of a module
    return Inner

Inner = local()
packed = cloudpickle.dumps(trees.Packed(trees.flatten({"layer": Layer(Point(1, Inner(2)), name="first")})[1]))
reader = (
    "import sys, pickle; from spmd.mesh import trees;"
    "treedef = pickle.load(sys.stdin.buffer);"
    "tree = trees.unflatten(treedef, [10, 20]); layer = tree['layer'];"
    "print(type(layer).__name__, layer.name, layer.w.y.v, trees.flatten(tree)[1] == treedef)"
)
print(subprocess.run([sys.executable, "-c", reader], input=packed, stdout=subprocess.PIPE, check=True).stdout.decode())
"""
    _, out, err = run("-c", script, env=FORKED_CHILDREN)
    assert out.split() == ["Layer", "first", "20", "True"], err


def test_plain_dataclasses_are_leaves():
    @dataclasses.dataclass
    class Options:
        width: int

    assert trees.leaves({"o": Options(3), "t": torch.ones(1)})[0] == Options(3)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "train"


class Columns(collections.abc.Mapping):
    """A mapping that is no dict."""

    def __init__(self, columns: dict):
        self._columns = columns

    def __getitem__(self, key):
        return self._columns[key]

    def __iter__(self):
        return iter(self._columns)

    def __len__(self):
        return len(self._columns)


class Registered:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __getitem__(self, key):
        return getattr(self, key)


torch.utils._pytree.register_pytree_node(
    Registered, lambda it: ([it.x, it.y], None), lambda parts, _: Registered(*parts)
)


CONTAINERS = {
    "dataclass": Batch,
    "mapping": lambda x, y: Columns({"x": x, "y": y}),
    "user dict": lambda x, y: collections.UserDict(x=x, y=y),
    "torch's": Registered,
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_a_batch_of_any_container_is_split(shared_mesh, make):
    """The same loss and gradient as on one device: seven samples on two ranks; results, too, come in such classes."""
    x, y, w = torch.randn(7, 3), torch.randn(7), torch.randn(3)

    def of(batch, name):
        return getattr(batch, name) if isinstance(batch, Batch) else batch[name]

    def loss_fn(w, batch):
        return ((of(batch, "x") @ w - of(batch, "y")) ** 2).mean()

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel
    def step(w, batch):
        loss, gradient = value_and_grad(loss_fn)(w, batch)
        return make(gradient, loss)

    found = step(w, make(x, y))
    assert type(found) is type(make(x, y))
    gradient, loss = torch.func.grad_and_value(lambda w: ((x @ w - y) ** 2).mean())(w)
    torch.testing.assert_close(of(found, "x").full(), gradient)
    torch.testing.assert_close(of(found, "y").full(), loss)


def test_a_class_that_is_registered_after_it_was_refused(shared_mesh):
    """In the next cell of a notebook, say."""

    class Late(Registered):
        pass

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel
    def step(params, batch):
        return value_and_grad(lambda params: (batch @ params.x - params.y).square().mean())(params)

    w, x = torch.randn(3), torch.randn(6, 3)
    with pytest.raises(SpecError, match=r"without tensors.*dataclasses, or in classes known to torch.utils._pytree"):
        step(Late(w, w[0]), x)
    torch.utils._pytree.register_pytree_node(Late, lambda it: ([it.x, it.y], None), lambda parts, _: Late(*parts))
    _, gradients = step(Late(w, w[0]), x)
    wanted = torch.func.grad(lambda w, b: (x @ w - b).square().mean(), (0, 1))(w, w[0])
    torch.testing.assert_close((gradients.x.full(), gradients.y.full()), wanted)


def count_places() -> None:
    """Have this process count the leaves whose place in a tree is put in words."""
    words = optree.PyTreeAccessor.codify
    counted: list[int] = []
    optree.counting = words, counted

    def codify(self: optree.PyTreeAccessor, *args: str) -> str:
        counted.append(1)
        return words(self, *args)

    optree.PyTreeAccessor.codify = codify


def counted_places() -> int:
    """How many were counted; none are any more."""
    optree.PyTreeAccessor.codify, counted = optree.__dict__.pop("counting")
    return len(counted)


def test_the_places_of_many_leaves_are_found_once(shared_mesh):
    """They were found anew for each leaf of what is put, or cut: 2000 leaves took half a minute."""
    mesh, many = shared_mesh({"data": 2}), {f"leaf{index}": torch.ones(2) for index in range(100)}
    count_places()
    mesh.run(count_places)
    try:
        put(many, mesh=mesh)
        spmd(lambda tree: {**tree, "one more": torch.ones(2)}, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(many)
    finally:
        here, there = counted_places(), mesh.run(counted_places)
    assert max(here, *there) <= 500
