"""`spmd`: what goes into a region, what the body sees, what comes back."""

from __future__ import annotations

import collections
import functools
import math
import types
from typing import NamedTuple

import numpy as np
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytrees import NAMESPACE
from torch import nn

from spmd import Array, Mesh, MeshError, P, Sharded, SpecError, axis_index, fetch, pmean, psum, put, spmd

TWO = torch.arange(2)


class Pair(NamedTuple):
    first: object
    second: object


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class State:
    weight: object
    name: str = optree.dataclasses.field(default="", pytree_node=False)


@pytest.fixture
def mesh(shared_mesh):
    return shared_mesh({"data": 2})


@pytest.fixture
def square(shared_mesh):
    return shared_mesh({"data": 2, "model": 2})


def local(x):
    """What a rank sees, as a value that the driver gets from every rank."""
    return Sharded(x.reshape(1, -1), P(("data", "model")))


# -- specs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "seen"),
    [
        (P(), [[0, 1, 2, 3, 4, 5, 6, 7]] * 4),
        (P("data"), [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2),
        (P(None, "model"), [[0, 2, 4, 6], [1, 3, 5, 7]] * 2),
        (P("data", "model"), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (P("model", "data"), [[0, 2], [4, 6], [1, 3], [5, 7]]),
        (P(("data", "model")), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (P(("model", "data")), [[0, 1], [4, 5], [2, 3], [6, 7]]),
    ],
    ids=str,
)
def test_what_each_rank_sees(square, spec, seen):
    x = torch.arange(8).reshape(4, 2)
    for value in (x, put(x, spec, mesh=square), put(x, mesh=square), put(x, P("data"), mesh=square), x.numpy()):
        assert spmd(local, mesh=square, in_specs=spec)(value).full().tolist() == seen
    assert spmd(local, mesh=square)(put(x, spec, mesh=square)).full().tolist() == seen  # an Array keeps its own
    there_and_back = spmd(lambda x: x, mesh=square, in_specs=spec, out_specs=spec)(x)
    assert there_and_back.spec == spec and torch.equal(there_and_back.full(), x)


def test_prefix_trees(square):
    x, tree = torch.arange(4), {"a": torch.arange(4), "b": [torch.arange(4), 7]}

    def shapes(x, tree, *, last):
        return [tuple(leaf.shape) for leaf in (x, tree["a"], tree["b"][0], last)]

    def check(in_specs, expected):
        assert spmd(shapes, mesh=square, in_specs=in_specs)(x, tree, last=x) == expected

    check(None, [(4,)] * 4)
    check((P("data"), {"a": P(("data", "model")), "b": P()}), [(2,), (1,), (4,), (4,)])
    check((P("data"), {"a": None, "b": [P("model"), None]}, P("data")), [(2,), (4,), (2,), (2,)])
    check((P(), P("data")), [(4,), (2,), (2,), (4,)])  # what is no tensor is not cut
    check({"tree": {"a": P("data"), "b": None}, "last": P("model")}, [(4,), (2,), (4,), (2,)])
    check([P(), None], [(4,)] * 4)
    check((P(), {"b": P("data"), "a": P()}), [(4,), (4,), (2,), (4,)])  # by key, whatever the order
    plain = {"a": x, "b": [x, x]}
    assert spmd(shapes, mesh=square, in_specs=P("data"))(x, plain, last=x) == [(2,)] * 4


def test_named_arguments(mesh):
    def f(a, b=TWO, /, *rest, c, d=3, **more):
        sizes = [tuple(leaf.shape) for leaf in (a, b, *rest, c, *more.values())]
        return {"sizes": sizes, "names": tuple(more), "d": d}

    x = torch.arange(4)
    every = spmd(f, mesh=mesh, in_specs=P("data"))
    assert every(x, x, x, c=x, d=None, e=x)["sizes"] == [(2,)] * 5
    by_name = spmd(f, mesh=mesh, in_specs={"a": P("data"), "rest": P("data"), "e": P("data")})
    found = by_name(x, x, x, x, e=x, c=x, g=x, d=5)
    assert found["sizes"] == [(2,), (4,), (2,), (2,), (4,), (2,), (4,)]
    assert found["names"] == ("e", "g") and found["d"] == 5
    assert by_name(x, c=x)["sizes"] == [(2,), (2,), (4,)]
    by_position = spmd(f, mesh=mesh, in_specs=(P("data"), P()))
    assert by_position(x, x, c=x)["sizes"] == [(2,), (4,), (4,)]
    assert by_position(x, c=x)["d"] == 3
    for wrong in (lambda: every(), lambda: every(x), lambda: by_name(x, a=x, c=x) and by_name(c=x)):
        with pytest.raises(TypeError, match=r"f\(\) missing a required argument"):
            wrong()


def test_what_specs_are_refused(mesh, square):
    x = torch.arange(4)

    def fails(words, function, *args, **kwargs):
        with pytest.raises(SpecError) as caught:
            function(*args, **kwargs)
        assert all(word in str(caught.value) for word in words), caught.value

    def f(x, y=None):
        return x

    fails(["spmd got bad in_specs for f", "got 'data'", "P(...) or None", "write P('data')"], spmd, f, in_specs="data")
    fails(["spmd got bad out_specs for f", "got 3"], spmd, f, out_specs={"a": 3})
    fails(["spmd got a bad check", "'sometimes'", "('first', 'always', 'never')"], spmd, f, check="sometimes")
    fails(["spmd got a bad donate for f", "got 'z'", "one of (x, y)"], spmd, f, donate="z")
    fails(["spmd got a bad donate for f", "got 0", "one of (x, y)"], spmd, f, donate=0)
    cases = [
        ({"z": P()}, ["in_specs of f name an unknown argument", "'z'", "(x, y)"]),
        ((P(), P(), P()), ["in_specs of f do not fit its arguments", "3 specs for 1 positional"]),
        ((), ["in_specs of f do not fit its arguments", "0 specs for 1"]),
        (({"a": P()},), ["in_specs of f do not fit the arguments", "for ((*,), {})", "give a prefix"]),
        (P("model"), ["P('model') names an axis that the mesh does not have", "('data',)", "[argument 0 of f]"]),
        (P(None, "data"), ["more entries than the tensor has dimensions", "(4,)", "argument 0 of f"]),
    ]
    for in_specs, words in cases:
        fails(words, spmd(f, mesh=mesh, in_specs=in_specs), x)
    fails(["dimension 0 of size 5 is not divisible", "[argument 0['w'] of f]"],
          spmd(f, mesh=mesh, in_specs=P("data")), {"w": torch.ones(5)})  # fmt: skip
    fails(["argument 1 of f is on another mesh", "if the mesh was made again", "put(array.full(), mesh=...)"],
          spmd(f, mesh=mesh), x, put(x, mesh=square))  # fmt: skip
    fails(["names an axis that the mesh does not have", "out_specs of f"], spmd(f, mesh=mesh, out_specs=P("model")), x)
    assert torch.equal(spmd(f, mesh=mesh)(x).full(), x)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_leaves_that_are_no_tensors_pass_through(mesh):
    class Options:
        def __init__(self, width):
            self.width = width

        def __eq__(self, other):
            return self.width == other.width

    leaves = ["text", None, 3, 2.5, True, 1j, b"bytes", math.inf, range(3), {1, 2}, Options(4), torch.float32, ...]
    assert spmd(lambda tree: tree, mesh=mesh)(leaves) == leaves
    assert spmd(lambda tree: {k: type(v).__name__ for k, v in tree.items()}, mesh=mesh)(
        {"numpy scalar": np.float32(2), "object array": np.array([None, "x"]), "array": np.arange(3)}
    ) == {"numpy scalar": "float32", "object array": "ndarray", "array": "Tensor"}


def test_numpy_arguments(mesh):
    total = spmd(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"))
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    records = np.array([(0.0, 1), (1.0, 1), (2.0, 1), (3.0, 1)], dtype=[("x", "f8"), ("y", "i4")])
    for x in (frozen, np.arange(8.0)[::2] / 2, np.arange(4.0)[::-1], np.arange(4).astype(">f8"), records["x"]):
        assert float(total(x)) == 6.0
    image = np.arange(8).reshape(2, 2, 2)
    assert np.array_equal(
        np.asarray(spmd(lambda x: x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(image)), image
    )


def test_numpy_results(mesh):
    """Also of kinds that torch does not take as they are; what would lose its mask is refused."""
    for change in (np.flip, lambda x: x.astype(">f4")[::-1], lambda x: np.broadcast_to(x[-1], 3) - x):
        assert spmd(lambda x, change=change: change(x.numpy()), mesh=mesh)(torch.arange(3.0)).full().tolist() == [
            2,
            1,
            0,
        ]
    with pytest.raises(SpecError, match="lose its mask"):
        spmd(lambda x: np.ma.masked_less(x.numpy(), 1), mesh=mesh)(torch.arange(3.0)).full()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors(mesh, layout):
    """Captured, passed, put and returned; compared by their indices and values, not as dense tensors."""
    graph = getattr(torch.tensor([[0.0, 2.0], [3.0, 0.0]]), layout)()
    x = torch.eye(2)
    assert torch.equal(spmd(lambda x: graph @ x, mesh=mesh)(x).full(), graph.to_dense())
    for given_graph in (graph, put(graph, mesh=mesh)):
        step = spmd(lambda graph, x: (graph @ x, getattr(graph.to_dense() * x, layout)()), mesh=mesh)
        for _ in range(3):
            dense, sparse = step(given_graph, torch.ones(2, 2))
        assert torch.equal(dense.full(), torch.tensor([[2.0, 2.0], [3.0, 3.0]]))
        assert sparse.full().layout is graph.layout and torch.equal(sparse.full().to_dense(), graph.to_dense())
    with pytest.raises(SpecError, match="should be the same on all ranks"):
        spmd(lambda x: getattr(x * (1 + axis_index("data")), layout)(), mesh=mesh)(x)


def test_jagged_tensors(mesh):
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    twice = spmd(lambda rows: rows * 2, mesh=mesh)(rows)
    for result in (twice.full(), fetch([twice, twice])[1]):
        assert [row.tolist() for row in result.unbind()] == [[2.0, 2.0], [2.0, 2.0, 2.0]]
    assert str(twice).startswith("Array(float32[2, ")


def test_objects_that_hold_tensors(mesh):
    """Of classes that are no trees: they are compared by the tensors' values."""
    x = torch.arange(3.0)
    makers = (
        lambda x: types.SimpleNamespace(x=x),
        lambda x: collections.UserList([x, x.bfloat16(), x.bool(), x[:0], x[0], torch.complex(x, -x).conj()]),
        lambda x: torch.distributions.Normal(x, nn.Parameter(x + 1)),
    )
    for make in makers:
        result, expected = spmd(make, mesh=mesh)(x), make(x)
        held, plain = vars(result), vars(expected)
        if isinstance(result, collections.UserList):
            held, plain = dict(enumerate(result)), dict(enumerate(expected))
        assert held.keys() == plain.keys()
        for name, value in plain.items():
            if isinstance(value, torch.Tensor):
                assert held[name].dtype == value.dtype and torch.equal(held[name], value), name
        with pytest.raises(SpecError, match="should be the same on all ranks"):
            spmd(lambda x, make=make: make(x + axis_index("data")), mesh=mesh)(x)


def test_trees(mesh):
    x = torch.arange(4.0)
    tree = {
        "z": Pair(x, (x, [x])),
        "a": State(x, name="first"),
        "o": collections.OrderedDict(b=x, a=x),
        "empty": {},
        "none": None,
    }
    out = spmd(lambda t: t, mesh=mesh, in_specs=({**dict.fromkeys("zao", P("data")), "empty": {}, "none": None},),
               out_specs={**dict.fromkeys("zao", P("data")), "empty": {}, "none": None})(tree)  # fmt: skip
    assert list(out) == list(tree) and isinstance(out["z"], Pair) and out["a"].name == "first"
    assert list(out["o"]) == ["b", "a"] and out["empty"] == {} and out["none"] is None
    assert all(torch.equal(leaf.full(), x) for leaf in (out["z"].second[1][0], out["a"].weight, out["o"]["a"]))
    for empty in ((), {}, [[], {}], None):
        assert spmd(lambda t: t, mesh=mesh)(empty) == empty


def test_a_tensor_that_comes_twice_is_one_tensor(mesh):
    same = spmd(lambda a, b, c: (a is b, a is c), mesh=mesh)
    x = torch.ones(2)
    assert same(x, x, torch.ones(2)) == (True, False)
    array = put(x, mesh=mesh)
    assert same(array, array, put(x, mesh=mesh)) == (True, False)


def test_nothing_set_on_a_bodys_tensors_lasts(mesh):
    x = put(torch.ones(2), mesh=mesh)

    @spmd(mesh=mesh)
    def old_style(x):
        fresh = not x.requires_grad and x.grad is None and not hasattr(x, "note")
        x.requires_grad_()
        x.note = "mine"
        (x * x).sum().backward()
        return fresh, x.grad

    for _ in range(3):
        fresh, gradient = old_style(x)
        assert fresh and gradient.full().tolist() == [2, 2]


# -- functions ---------------------------------------------------------------------------------------------------------


def helper(x):
    return x + 1


@spmd
def module_level(x):
    return helper(x)


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @spmd
    def method(self, x):
        return x * self.rate

    def plain(self, x):
        return x * self.rate

    def __call__(self, x):
        return x - self.rate


def test_kinds_of_functions(mesh):
    x, table = torch.arange(3.0), torch.tensor([10.0, 20.0, 30.0])

    def nested(x):
        def inner(y):
            return y + table

        return inner(x)

    def recursive(x, n=3):
        return x if n == 0 else recursive(x + 1, n - 1)

    with_arguments = spmd(mesh=mesh, check="always")
    trainer = Trainer(2.0)
    with mesh_entered(mesh):
        cases = [
            (spmd(lambda x: x + table, mesh=mesh), x + table),
            (with_arguments(nested), x + table),
            (spmd(recursive, mesh=mesh), x + 3),
            (spmd(functools.partial(recursive, n=1), mesh=mesh), x + 1),
            (spmd(trainer.plain, mesh=mesh), x * 2),
            (spmd(trainer, mesh=mesh), x - 2),
            (module_level, x + 1),
            (trainer.method, x * 2),
            (spmd(torch.nn.ReLU(), mesh=mesh), x),
            (spmd(torch.neg, mesh=mesh), -x),
        ]
        for function, expected in cases:
            for _ in range(2):
                assert torch.equal(function(x).full(), expected)
        table += 1
        assert torch.equal(cases[0][0](x).full(), x + table)
        trainer.rate = 5.0
        assert torch.equal(trainer.method(x).full(), x * 5) and torch.equal(cases[4][0](x).full(), x * 5)


class mesh_entered:
    """`with mesh:` without closing it at the end, for meshes that are shared."""

    def __init__(self, mesh):
        self._mesh = mesh

    def __enter__(self):
        self._mesh._depth += 1
        return self._mesh.__enter__()

    def __exit__(self, *error):
        self._mesh.__exit__(*error)
        self._mesh._depth -= 1


def test_the_wrapper_looks_like_the_function():
    @spmd(donate="x")
    def step(x, *, rate: float = 1.0):
        """One step."""

    assert (step.__name__, step.__doc__, step.__wrapped__.__kwdefaults__) == ("step", "One step.", {"rate": 1.0})
    assert repr(step) == "spmd(step)"
    assert repr(spmd(functools.partial(helper, 1))) == "spmd(helper)"


def test_calls_within_a_region(mesh, square):
    whole = torch.arange(4.0)

    @spmd(in_specs=P("data"))
    def inner(x):
        return x.sum()

    @spmd(mesh=mesh, out_specs=P("data"))
    def outer(x):
        return inner(x)[None]

    assert outer(whole).full().tolist() == [1.0, 5.0]  # the same on all ranks, so it is cut
    sharded = spmd(outer.__wrapped__, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert sharded(whole).full().tolist() == [1.0, 5.0]  # cut already

    bound_here = spmd(lambda x: x + 1, mesh=mesh)
    assert float(spmd(lambda x: bound_here(x), mesh=mesh)(1.0 * torch.ones(()))) == 2.0
    elsewhere = spmd(lambda x: x, mesh=square)
    with pytest.raises(MeshError, match="refers to another mesh than the one it runs on"):
        spmd(lambda x: elsewhere(x), mesh=mesh)(whole)
    for use in (lambda: mesh.run(len, "x"), lambda: mesh.submit(len, "x"), lambda: Mesh({"data": 2})):
        with pytest.raises(MeshError, match="inside a region"):
            spmd(lambda x, use=use: use(), mesh=mesh)(whole)


def test_arguments_of_a_step_in_run_are_compared_on_calls_1_2_4_8(mesh):
    def accepted(check):
        step = spmd(torch.neg, check=check)
        for number in range(1, 9):
            step(torch.ones(3))
            try:
                step(torch.ones(3) * axis_index("data"))
            except SpecError:
                continue
            return number  # the first pair of calls whose second one was not compared
        return None

    assert mesh.run(lambda: [accepted(check) for check in ("first", "always", "never")]) == [[3, None, 1]] * mesh.size


def test_whole_results_of_a_call_in_run_are_the_same_on_all_ranks(mesh):
    total = spmd(torch.sum, in_specs=P("data"))
    with pytest.raises(SpecError, match=r"result .* of sum may differ between ranks along data; .*psum or pmean"):
        mesh.run(lambda: float(total(torch.ones(4))))
    which = spmd(lambda: axis_index("data"))
    with pytest.raises(SpecError, match=r"of <lambda> should be the same on all ranks.*got rank 0: 0; rank 1: 1"):
        mesh.run(lambda: which())
    summed = spmd(lambda x: psum(x.sum(), "data"), in_specs=P("data"))
    parts = spmd(lambda x: x * 2, in_specs=P("data"), out_specs=P("data"))
    assert (
        mesh.run(lambda: (float(summed(torch.ones(4))), parts(torch.arange(4)).tolist())) == [(4.0, [0, 2, 4, 6])] * 2
    )


def test_a_captured_mesh_is_the_ranks_own_view(square):
    def look():
        return square.rank, square.size, square.axes, square.is_driver, square.coords(), square.closed

    assert square.rank is None and square.is_driver
    assert square.run(look) == [
        (rank, 4, {"data": 2, "model": 2}, False, {"data": rank // 2, "model": rank % 2}, False) for rank in range(4)
    ]
    assert square.run(lambda: square)[2] is square


def test_captured_arrays(mesh):
    weight = put(torch.arange(4.0), P("data"), mesh=mesh)

    @spmd(mesh=mesh, out_specs={"same": None, "twice": P("data"), "whole": P()})
    def f(x):
        return {"same": weight, "twice": weight.local * 2, "whole": weight.full() + x}

    for _ in range(2):
        out = f(torch.tensor(1.0))
        assert out["same"].spec == P("data") and out["same"].full().tolist() == [0, 1, 2, 3]
        assert out["twice"].full().tolist() == [0, 2, 4, 6] and out["whole"].full().tolist() == [1, 2, 3, 4]
    assert mesh.run(lambda: (weight.shape, weight.spec, weight.local.tolist())) == [
        ((4,), P("data"), [0, 1]),
        ((4,), P("data"), [2, 3]),
    ]
    weight = put(torch.zeros(4), P("data"), mesh=mesh)
    assert f(torch.tensor(1.0))["whole"].full().tolist() == [1] * 4


# -- results -----------------------------------------------------------------------------------------------------------


def test_results(square):
    @spmd(mesh=square, out_specs={"rep": P(), "data": P("data"), "both": P(None, ("model", "data"))})
    def f():
        rank = 2 * axis_index("data") + axis_index("model")
        return {
            "rep": torch.tensor(3),
            "data": torch.full((1, 2), axis_index("data")),
            "both": Pair(torch.full((1, 1), rank), Sharded({"m": torch.tensor([axis_index("model")])}, P("model"))),
        }

    out = f()
    assert int(out["rep"]) == 3 and out["data"].full().tolist() == [[0, 0], [1, 1]]
    assert out["both"].first.full().tolist() == [[0, 2, 1, 3]]
    declared = out["both"].second
    assert declared["m"].spec == P("model") and declared["m"].full().tolist() == [0, 1]  # the node's spec counts
    assert isinstance(spmd(lambda: np.arange(3), mesh=square)(), Array)


def test_results_of_a_class_that_checks_what_it_is_made_of(mesh):
    class Checked:
        def __init__(self, weight):
            assert isinstance(weight, torch.Tensor | Array | Sharded), "made of something else"
            self.weight = weight

    register = {"flatten_func": lambda box: ((box.weight,), None), "unflatten_func": lambda _, parts: Checked(*parts)}
    optree.register_pytree_node(Checked, namespace=NAMESPACE, **register)

    @spmd(mesh=mesh)
    def passed(box, cut):
        return type(box)(Sharded(box.weight, P("data")) if cut else box.weight)

    try:
        for cut in (False, True, False, True):
            found = passed(Checked(torch.ones(2)), cut).weight
            assert found.spec == (P("data") if cut else P()) and found.full().tolist() == [1.0] * (4 if cut else 2)
    finally:
        optree.unregister_pytree_node(Checked, namespace=NAMESPACE)


def test_uneven_results(mesh):
    uneven = spmd(
        lambda: torch.full((1 + 2 * axis_index("data"), 2), axis_index("data")), mesh=mesh, out_specs=P("data")
    )
    for _ in range(2):
        array = uneven()
        assert array.shape == (4, 2) and array.full()[:, 0].tolist() == [0, 1, 1, 1]
        assert [len(shard) for shard in array.shards()] == [1, 3]
        assert spmd(lambda x: psum(x.sum(), "data"), mesh=mesh)(array).item() == 6
    nothing = spmd(lambda: torch.ones(2 * axis_index("data")), mesh=mesh, out_specs=P("data"))()
    assert nothing.shape == (2,) and [len(shard) for shard in nothing.shards()] == [0, 2]


@pytest.mark.parametrize(
    ("body", "out_specs", "words"),
    [
        (
            lambda i: {"loss": torch.tensor(float(i))},
            None,
            [
                "result ['loss'] of f should be the same on all ranks along data",
                "rank 0: 0.0; rank 1: 1.0",
                "psum or pmean",
            ],
        ),
        (lambda i: torch.full((2,), i), None, ["(the whole of it)", "rank 1: int64[2] with other bytes", 'P("data")']),
        (lambda i: (1, i), None, ["result [1] of f", "rank 0: 0; rank 1: 1", "return a tensor, and psum or pmean it"]),
        (lambda i: "ab"[i], None, ["rank 0: 'a'; rank 1: 'b'"]),
        (lambda i: (torch.tensor(1), 1)[i], None, ["differs in kind", "rank 0: int64[] P(); rank 1: int"]),
        (lambda i: [1] * (i + 1), None, ["returned different trees on rank 0 and rank 1", "same structure"]),
        (lambda i: {"a": torch.ones(2).to((torch.float32, torch.int64)[i])}, None, ["['a']", "float32[2]", "int64[2]"]),
        (lambda i: torch.ones(2), {"a": P()}, ["out_specs of f do not fit", "{'a': P()} for *", "prefix"]),
        (
            lambda i: i,
            P("data"),
            ["(the whole of it) of f should be the same on all ranks along data", "return a tensor"],
        ),
        (lambda i: torch.tensor(1.0), P("data"), ["has fewer dimensions than its spec", "shape ()"]),
        (lambda i: Sharded(torch.ones(1), P("model")), None, ["names an axis that the mesh does not have", "'model'"]),
        (lambda i: torch.ones(2, 2 + i), P("data"), ["the shards of", "do not fit together", "rank 1: [2, 3]"]),
        (lambda i: torch.ones([2] * (i + 1)), P("data"), ["do not fit together"]),
    ],
)
def test_results_that_do_not_agree(mesh, body, out_specs, words):
    def f():
        return body(axis_index("data"))

    with pytest.raises(SpecError) as caught:
        spmd(f, mesh=mesh, out_specs=out_specs)()
    assert all(word in str(caught.value) for word in words), caught.value
    assert mesh.run(lambda: 1) == [1, 1]


def test_agreement_over_some_axes(square):
    by = spmd(lambda axis: torch.tensor([float(axis_index(axis))]), mesh=square, out_specs=P("data"))
    assert by("data").full().tolist() == [0, 1]
    with pytest.raises(SpecError, match="should be the same on all ranks along model, and is not"):
        by("model")
    assert spmd(lambda: pmean(torch.tensor(float(axis_index("model"))), "model"), mesh=square)().item() == 0.5


def test_values_that_agree_without_being_identical(mesh):
    class Odd:
        """Compares by identity."""

    odd = spmd(
        lambda: {"nan": float("nan"), "set": {"a", "b", "c"}, "array": np.array([None, 2]), "odd": Odd()}, mesh=mesh
    )
    assert math.isnan(odd()["nan"]) and odd()["set"] == {"a", "b", "c"}
    nans = spmd(lambda: torch.tensor([float("nan"), -0.0]), mesh=mesh, check="always")
    assert nans().full().isnan().tolist() == [True, False]


def test_a_sharded_argument_is_cut_as_it_says(mesh):
    x = torch.arange(4.0)
    same = spmd(lambda tree: tree, mesh=mesh)
    for whole in (Sharded(x, P("data")), {"w": [None, Sharded({"a": put(x, mesh=mesh)}, P("data"))]}):
        for _ in range(2):
            with pytest.raises(SpecError, match=r"is Sharded, .*got P\('data'\), and P\(\) for .*pass put\(x"):
                same(whole)
    cut = spmd(lambda tree: tree, mesh=mesh, in_specs=P("data"))
    for part in (cut(Sharded(x, P("data"))), same(Sharded(put(x, P("data"), mesh=mesh), P("data")))):
        assert part.spec == P("data") and torch.equal(part.full(), x)
    assert torch.equal(same(Sharded(x, P())).full(), x)


def test_what_is_returned_as_it_came_keeps_its_own_spec(mesh):
    x = put(torch.arange(4.0), P("data"), mesh=mesh)

    def f(x, changed):
        return {"x": x + 1 if bool(changed) else x}

    either = spmd(f, mesh=mesh)
    for _ in range(5):
        same = either(x, torch.tensor(False))["x"]
        assert same.spec == P("data") and same.full().tolist() == [0, 1, 2, 3]
    with pytest.raises(SpecError, match="should be the same on all ranks along data"):
        either(x, torch.tensor(True))["x"].full()  # the sixth call, in which other tensors are not compared
    for undeclared in (spmd(f, mesh=mesh), spmd(lambda x, _: {"x": x}, mesh=mesh, in_specs=(P("data"), P()))):
        with pytest.raises(SpecError, match="should be the same on all ranks along data"):
            undeclared(x, torch.tensor(True))
    with pytest.raises(SpecError, match="should be the same on all ranks along data"):
        spmd(f, mesh=mesh, out_specs=P())(x, torch.tensor(False))
    mean = spmd(lambda x, whole: {"x": pmean(x, "data") if bool(whole) else x}, mesh=mesh)
    whole = [True] * 4 + [False]  # also if those before, of the same shape on each rank, had none
    assert [mean(x, torch.tensor(each))["x"].spec for each in whole] == [*[P()] * 4, P("data")]


def test_check(mesh):
    def f(x, differ):
        return x + (axis_index("data") if bool(differ) else 0)

    x, no, yes = torch.ones(2), torch.tensor(False), torch.tensor(True)
    first = spmd(f, mesh=mesh)
    assert first(x, no).full().tolist() == [1, 1]
    assert first(x, no).full().tolist() == [1, 1]
    assert first(x, yes).full().tolist() == [1, 1]  # not looked at in the third call: rank 0's
    with pytest.raises(SpecError, match="should be the same"):
        first(x, yes).full()
    with pytest.raises(SpecError, match="should be the same"):
        first(torch.ones(3), yes)  # another signature
    always = spmd(f, mesh=mesh, check="always")
    always(x, no)
    with pytest.raises(SpecError, match="should be the same"):
        always(x, yes)
    never = spmd(lambda x, differ: (f(x, differ), int(axis_index("data"))), mesh=mesh, check="never")
    array, number = never(x, yes)
    assert array.full().tolist() == [1, 1] and number == 0


def test_specs_by_hypothesis(square):
    """Whatever the specs: cut, added to and joined is added to."""
    entries = st.sampled_from([(), ("data",), ("model",), ("data", "model"), ("model", "data")])

    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(entries, min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=3, max_size=3), st.booleans()
    )
    def check(chosen, factors, resident):
        names = [name for entry in chosen for name in entry]
        if len(set(names)) < len(names):
            return
        spec, shape = P(*chosen), [4 * factor for factor in factors[: len(chosen)]]
        value = torch.arange(float(math.prod(shape))).reshape(shape)
        add = spmd(lambda x, y: x + y, mesh=square, in_specs=spec, out_specs=spec)
        out = add(put(value, spec, mesh=square) if resident else value, put(value, mesh=square))
        assert out.spec == spec and torch.equal(out.full(), 2 * value)

    check()
