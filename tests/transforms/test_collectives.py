import functools
import importlib.util
import itertools
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from spmd import (
    CollectiveMismatch,
    MeshError,
    P,
    SpecError,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    barrier,
    grad,
    optimizer,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    put,
    spmd,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MESHES = (
    {"data": 1},
    {"data": 2},
    {"data": 3},
    {"data": 4},
    {"data": 2, "model": 2},
    {"data": 2, "one": 1, "model": 2},
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *EXACT, *COMPLEX)

on_both = pytest.mark.parametrize("backend", ["shm", "gloo"])


# -- what must come out: jax.lax's semantics in NumPy, from the tensors of a group in order ------


def expected(op, parts, at, *, dim=0, concat=0, tiled=False, perm=(), source=0):
    size = len(parts)
    counted = [part.astype(np.int64) if part.dtype == bool else part for part in parts]
    if op == "psum":
        return sum(counted)
    if op == "pmean":
        return sum(part if part.dtype.kind in "fc" else part.astype(np.float32) for part in parts) / size
    if op in ("pmax", "pmin"):
        return np.stack(parts).max(0) if op == "pmax" else np.stack(parts).min(0)
    if op == "all_gather":
        return np.concatenate(parts, dim) if tiled else np.stack(parts, dim)
    if op == "psum_scatter":
        piece = np.split(sum(counted), size, dim)[at]
        return piece if tiled else piece.squeeze(dim)
    if op == "all_to_all":
        pieces = [np.split(part, size, dim)[at] for part in parts]
        return np.concatenate(pieces, concat) if tiled else np.stack([p.squeeze(dim) for p in pieces], concat)
    if op == "ppermute":
        sources = [src for src, dst in perm if dst == at]
        return parts[sources[0]] if sources else np.zeros_like(parts[at])
    assert op == "pbroadcast"
    return parts[source]


CALLS = {
    "psum": lambda x, axis: psum(x, axis),
    "pmean": lambda x, axis: pmean(x, axis),
    "pmax": lambda x, axis: pmax(x, axis),
    "pmin": lambda x, axis: pmin(x, axis),
    "all_gather": lambda x, axis, dim, tiled: all_gather(x, axis, dim=dim, tiled=tiled),
    "psum_scatter": lambda x, axis, dim, tiled: psum_scatter(x, axis, dim=dim, tiled=tiled),
    "all_to_all": lambda x, axis, dim, concat, tiled: all_to_all(x, axis, dim, concat, tiled=tiled),
    "ppermute": lambda x, axis, perm: ppermute(x, axis, perm),
    "pbroadcast": lambda x, axis, source: pbroadcast(x, axis, source),
}


def result_dtype(op, dtype):
    if op in ("psum", "psum_scatter") and dtype is torch.bool:
        return torch.int64
    return torch.float32 if op == "pmean" and dtype in EXACT else dtype


def drawn(dtype, shape, seed):
    """Small whole numbers: sums of them are exact in every dtype."""
    low, high = (0, 2) if dtype is torch.bool else (0, 5) if dtype is torch.uint8 else (-4, 5)
    values = torch.from_numpy(np.asarray(np.random.default_rng(seed).integers(low, high, shape)))
    return torch.complex(values.double(), -2 * values.double()).to(dtype) if dtype.is_complex else values.to(dtype)


def as_numpy(tensor):
    return (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).numpy()


def call_all(cases, names):
    """On a rank: what each case gives."""
    rank = axis_index(names)
    return [CALLS[op](parts[rank], axis, **options) for op, axis, parts, options in cases]


def check(mesh, cases):
    everything = mesh.run(call_all, cases, tuple(mesh.axes))
    for rank, results in enumerate(everything):
        for (op, axis, parts, options), result in zip(cases, results, strict=True):
            axes = (axis,) if isinstance(axis, str) else axis
            group = mesh.layout.group(rank, axes)
            wanted = expected(op, [as_numpy(parts[peer]) for peer in group], group.index(rank), **options)
            note = (op, axis, options, parts[0].dtype, tuple(parts[0].shape), rank)
            assert result.dtype is result_dtype(op, parts[0].dtype), note
            assert tuple(result.shape) == wanted.shape, note
            if op == "pmean":  # dividing by three is not exact
                rounded = torch.from_numpy(np.asarray(wanted)).to(result.dtype)
                torch.testing.assert_close(result, rounded, rtol=2 * torch.finfo(result.dtype).eps, atol=0)
            else:
                assert np.array_equal(as_numpy(result), wanted), note


@st.composite
def a_case(draw, axes):
    op = draw(st.sampled_from(sorted(CALLS)))
    names = draw(st.permutations(sorted(axes)))[: draw(st.integers(1, len(axes)))]
    axis = names[0] if len(names) == 1 and draw(st.booleans()) else tuple(names)
    size = math.prod(axes[name] for name in names)
    dtype = draw(st.sampled_from(DTYPES if op not in ("pmax", "pmin") else (*FLOATS, *EXACT)))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=3))
    options = {}
    if op in ("psum_scatter", "all_to_all", "all_gather"):
        options["tiled"] = draw(st.booleans())
        if op != "all_gather" or options["tiled"]:
            shape = shape or [1]
        choices = len(shape) + (op == "all_gather" and not options["tiled"])
        options["dim"] = draw(st.integers(-choices, choices - 1))
        if op != "all_gather":
            shape[options["dim"]] = size * draw(st.integers(0, 2)) if options["tiled"] else size
        if op == "all_to_all":
            options["concat"] = draw(st.integers(-len(shape), len(shape) - 1))
    elif op == "ppermute":
        count = draw(st.integers(0, size))
        ends = [draw(st.permutations(range(size)))[:count] for _ in range(2)]
        options["perm"] = tuple(zip(*ends, strict=True))
    elif op == "pbroadcast":
        options["source"] = draw(st.integers(0, size - 1))
    seed = draw(st.integers(0, 2**31))
    parts = [drawn(dtype, shape, [seed, rank]) for rank in range(math.prod(axes.values()))]
    if draw(st.booleans()) and len(shape) > 1:  # strided
        parts = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
    return op, axis, parts, options


@on_both
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_collective_gives_what_jax_does(shared_mesh, backend, data):
    axes = data.draw(st.sampled_from(MESHES))
    check(shared_mesh(axes, backend), data.draw(st.lists(a_case(axes), min_size=10, max_size=30)))


@pytest.mark.parametrize(
    ("backend", "every"), [("shm", True), ("gloo", False), pytest.param("gloo", True, marks=pytest.mark.long)]
)
def test_every_collective_on_every_mesh_and_dtype(shared_mesh, backend, every):
    """Or each mesh and each dtype at least once, where what carries the bytes knows no dtypes."""
    for number, axes in enumerate(MESHES):
        size = math.prod(axes.values())
        axis = tuple(axes)
        cases = []
        for dtype in DTYPES if every else DTYPES[number :: len(MESHES)]:
            parts = [drawn(dtype, (2 * size, size, 3), [7, rank]) for rank in range(size)]
            cases += [(op, axis, parts, {}) for op in ("psum", "pmean")]
            cases += [(op, axis, parts, {}) for op in ("pmax", "pmin") if not dtype.is_complex]
            cases += [("all_gather", axis, parts, {"dim": 1, "tiled": tiled}) for tiled in (False, True)]
            cases += [
                ("psum_scatter", axis, parts, {"dim": dim, "tiled": tiled}) for dim, tiled in ((0, True), (1, False))
            ]
            cases += [("all_to_all", axis, parts, {"dim": 0, "concat": 1, "tiled": True})]
            cases += [("ppermute", axis, parts, {"perm": tuple((i, (i + 1) % size) for i in range(size))})]
            cases += [("pbroadcast", axis, parts, {"source": size - 1})]
        check(shared_mesh(axes, backend), cases)


def test_large_tensors(shared_mesh):
    mesh = shared_mesh({"data": 3})
    shape = (6, 3, 30_001)
    parts = [drawn(torch.float32, shape, [3, rank]) for rank in range(3)]
    cases = [(op, "data", parts, {}) for op in ("psum", "pmean", "pmax", "pmin")]
    cases += [(op, "data", parts, {"dim": 1, "tiled": False}) for op in ("all_gather", "psum_scatter")]
    cases += [("all_to_all", "data", parts, {"dim": 0, "concat": 2, "tiled": True})]
    cases += [("ppermute", "data", parts, {"perm": ((0, 2),)}), ("pbroadcast", "data", parts, {"source": 1})]
    check(mesh, cases)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="not installed: jax")
def test_jax_agrees_with_the_oracle(make_mesh):
    """On a rank, since a process that has imported JAX warns at each fork."""
    make_mesh({"data": 1}).run(compare_with_jax)


def compare_with_jax():
    jax = importlib.import_module("jax")
    lax = jax.lax
    x = np.arange(4 * 4 * 8 * 4, dtype=np.float32).reshape(4, 4, 8, 4)  # ranks first
    perm = ((0, 2), (3, 1), (1, 0), (2, 3))  # all of them: under vmap jax wants a whole permutation
    theirs = {
        ("psum", ()): lambda v: lax.psum(v, "i"),
        ("pmean", ()): lambda v: lax.pmean(v, "i"),
        ("pmax", ()): lambda v: lax.pmax(v, "i"),
        ("pmin", ()): lambda v: lax.pmin(v, "i"),
        ("ppermute", (("perm", perm),)): lambda v: lax.ppermute(v, "i", perm),
    }
    for dim, tiled in itertools.product((0, 1, 2), (False, True)):
        options = (("dim", dim), ("tiled", tiled))
        theirs["all_gather", options] = lambda v, dim=dim, tiled=tiled: lax.all_gather(v, "i", axis=dim, tiled=tiled)
        if tiled or x.shape[1 + dim] == 4:
            theirs["psum_scatter", options] = lambda v, dim=dim, tiled=tiled: lax.psum_scatter(
                v, "i", scatter_dimension=dim, tiled=tiled
            )
            for concat in (0, 1, 2):
                theirs["all_to_all", (*options, ("concat", concat))] = lambda v, dim=dim, concat=concat, tiled=tiled: (
                    lax.all_to_all(v, "i", dim, concat, tiled=tiled)
                )
    for (op, options), call in theirs.items():
        found = np.asarray(jax.vmap(call, axis_name="i")(x))
        for at in range(4):
            assert np.array_equal(found[at], expected(op, list(x), at, **dict(options))), (op, options)


# -- trees, numbers, places ------


@on_both
def test_collectives_map_over_trees_and_take_numbers_and_arrays(shared_mesh, backend):
    def body():
        rank = axis_index("data")
        tree = {"b": torch.tensor([rank]), "a": (torch.tensor(True), [rank + 0.5, np.full(2, rank, np.int32)])}
        tree["n"] = None
        total = psum(tree, "data")
        gathered = all_gather(tree, "data")
        return (
            total,
            gathered["a"][1][0],
            psum(1, "data"),
            pmean(2, "data"),
            psum(1j, "data"),
            pmax(np.float64(rank), "data"),
            psum((np.float32(rank), np.int16(rank), np.bool_(rank > 0)), "data"),
        )

    for total, gathered, size, two, imaginary, largest, scalars in shared_mesh({"data": 3}, backend).run(body):
        assert list(total) == ["b", "a", "n"] and total["n"] is None
        assert total["b"].tolist() == [3]
        assert total["a"][0].item() == 3
        assert total["a"][1][0].item() == 4.5
        assert total["a"][1][1].dtype is torch.int32 and total["a"][1][1].tolist() == [3, 3]
        assert gathered.tolist() == [0.5, 1.5, 2.5]
        assert size.item() == 3 and two.item() == 2.0 and imaginary.item() == 3j and largest.item() == 2.0
        assert [(one.item(), one.dtype) for one in scalars[:2]] == [(3.0, torch.float32), (3, torch.int16)]
        assert scalars[2].item() == 2


def test_halves_are_averaged_without_overflow(shared_mesh):
    def body():
        return pmean(torch.tensor([60000.0], dtype=torch.float16), "data")

    assert [x.item() for x in shared_mesh({"data": 2}).run(body)] == [60000.0, 60000.0]


def test_places_on_a_mesh(shared_mesh):
    def body():
        return [(axis_index(axis), axis_size(axis)) for axis in ("a", "b", ("a", "b"), ("b", "a"), ["b"])]

    assert shared_mesh({"a": 2, "b": 2}).run(body) == [
        [(a, 2), (b, 2), (2 * a + b, 4), (2 * b + a, 4), (b, 2)] for a in range(2) for b in range(2)
    ]


@on_both
def test_barrier_waits_for_all(shared_mesh, backend, tmp_path):
    def body(path):
        rank = axis_index(("a", "b"))
        if rank == 2:
            import time

            time.sleep(0.2)
            (path / "here").touch()
        barrier()
        seen = (path / "here").exists()
        barrier("a")
        barrier(("b", "a"))
        return seen

    (tmp_path / backend).mkdir()
    assert shared_mesh({"a": 2, "b": 2}, backend).run(body, tmp_path / backend) == [True] * 4


@on_both
def test_results_are_private(shared_mesh, backend):
    """What one rank does to a result in place, another does not see; nor does the next call."""

    def body():
        rank = axis_index("data")
        out = []
        for size in (3, 100_000):
            x = torch.ones(size)
            for op in (
                psum,
                pmax,
                lambda x, axis: all_gather(x, axis, tiled=True),
                lambda x, axis: pbroadcast(x, axis, 0),
            ):
                first = op(x, "data")
                before = first.clone()
                first.mul_(rank + 2)
                barrier("data")
                out.append(torch.equal(first, before * (rank + 2)) and torch.equal(op(x, "data"), before))
        return out

    for results in shared_mesh({"data": 2}, backend).run(body):
        assert all(results)


# -- mistakes ------


def test_outside_a_region_no_axis_has_a_meaning():
    x = torch.ones(2)
    for call in (
        lambda: psum(x, "data"),
        lambda: pmean(x, "data"),
        lambda: pmax(x, "data"),
        lambda: pmin(x, "data"),
        lambda: all_gather(x, "data"),
        lambda: psum_scatter(x, "data"),
        lambda: ppermute(x, "data", []),
        lambda: all_to_all(x, "data", 0, 0),
        lambda: pbroadcast(x, "data", 0),
        lambda: axis_index("data"),
        lambda: axis_size("data"),
        barrier,
    ):
        with pytest.raises(MeshError, match="outside a region"):
            call()


def test_a_thread_of_a_step_is_in_no_region(shared_mesh):
    """It has no part in the order in which the ranks communicate."""

    def body(x):
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(psum, x, "data").result()

    with pytest.raises(MeshError, match=r"outside a region.*call it on the function's own thread"):
        spmd(body, mesh=shared_mesh({"data": 2}))(torch.ones(2))


MISTAKES = {  # and what the message must say
    "unknown axis": (lambda x: psum(x, "modle"), ('psum got an unknown "axis"', "'modle'", "('data',)")),
    "unknown axis in a tuple": (lambda x: all_gather(x, ("data", "x")), ("all_gather got an unknown", "'x'")),
    "an axis twice": (lambda x: psum(x, ("data", "data")), ("names an axis twice",)),
    "no axis": (lambda x: pmean(x, ()), ('pmean got a bad "axis"', "()")),
    "a number for an axis": (lambda x: pmax(x, 0), ('pmax got a bad "axis"', "0")),
    "index of an unknown axis": (lambda x: axis_index("x"), ("axis_index got an unknown", "'x'")),
    "size of a number": (lambda x: axis_size(3), ("axis_size got a bad", "3")),
    "barrier over an unknown axis": (lambda x: barrier("x"), ("barrier got an unknown", "'x'")),
    "a string": (lambda x: psum({"a": "b"}, "data"), ("psum got unexpected type", "str")),
    "an Array": (lambda x: psum(put(x, P("data")), "data"), ("psum got unexpected type", "Array", "its .local")),
    "nothing": (lambda x: psum(None, "data"), ("psum got unexpected type", "NoneType")),
    "dim too large": (lambda x: all_gather(x, "data", dim=3), ('all_gather got a bad "dim"', "-3 to 2", "3")),
    "tiled dim too large": (lambda x: all_gather(x, "data", dim=2, tiled=True), ("-2 to 1",)),
    "no dimension": (lambda x: all_gather(x.sum(), "data", tiled=True), ("at least one dimension",)),
    "dim for tiled": (lambda x: all_gather(x, "data", dim=True), ('all_gather got a bad "dim"', "-3 to 2", "True")),
    "dim too small": (lambda x: psum_scatter(x, "data", dim=-3), ('psum_scatter got a bad "dim"', "-3")),
    "another size": (lambda x: psum_scatter(x, "data", dim=1), ("dimension 1 does not fit the axis", "size 3", "pad")),
    "indivisible": (lambda x: psum_scatter(x, "data", dim=1, tiled=True), ("a multiple of 2", "size 3")),
    "a bad split": (lambda x: all_to_all(x, "data", 2, 0), ('"split_dim"',)),
    "a bad concat": (lambda x: all_to_all(x, "data", 0, 2), ('"concat_dim"',)),
    "an indivisible split": (lambda x: all_to_all(x, "data", 1, 0, tiled=True), ("all_to_all: dimension 1",)),
    "a destination twice": (lambda x: ppermute(x, "data", [(0, 1), (1, 1)]), ("each destination at most once",)),
    "a source twice": (lambda x: ppermute(x, "data", [(0, 0), (0, 1)]), ("each source at most once",)),
    "a rank that is not there": (lambda x: ppermute(x, "data", [(0, 2)]), ("0 to 1", "(0, 2)")),
    "no pairs": (lambda x: ppermute(x, "data", [0, 1]), ('ppermute got a bad "perm"', "[0, 1]")),
    "a bad source": (lambda x: pbroadcast(x, "data", 2), ('pbroadcast got a bad "source"', "0 to 1", "2")),
    "a flag for a source": (lambda x: pbroadcast(x, "data", True), ('pbroadcast got a bad "source"', "True")),
    "a negative source": (lambda x: pbroadcast(x, "data", -1), ('pbroadcast got a bad "source"',)),
    "the largest complex number": (lambda x: pmax(x + 0j, "data"), ("'max' is not defined",)),
}


def test_a_source_may_be_any_integer(shared_mesh):
    def body():
        return [pbroadcast(axis_index("data") + 5, "data", s).item() for s in (np.int64(1), torch.tensor(0), 1)]

    assert shared_mesh({"data": 2}).run(body) == [[6, 5, 6]] * 2


def test_mistakes_are_told_and_leave_the_region_in_order(shared_mesh):
    def body():
        texts = {}
        for name, (mistake, _) in MISTAKES.items():
            try:
                mistake(torch.ones(2, 3))
                texts[name] = "nothing was raised"
            except SpecError as error:
                texts[name] = str(error)
        return texts, psum(torch.tensor(1), "data").item()

    for texts, ranks in shared_mesh({"data": 2}).run(body):
        assert ranks == 2
        for name, (_, parts) in MISTAKES.items():
            assert all(part in texts[name] for part in parts), (name, texts[name])


@on_both
def test_pairs_that_each_rank_makes_of_its_own_index_are_told(shared_mesh, backend):
    def step():
        index = axis_index("data")
        return ppermute(torch.ones(2), "data", [(index, 1 - index)])

    with pytest.raises(CollectiveMismatch, match=r"as ppermute.*give all ranks the same perm, .*without axis_index"):
        shared_mesh({"data": 2}, backend).run(step)


@on_both
def test_ranks_that_disagree_are_told_at_once(shared_mesh, backend):
    def shapes():
        return psum(torch.ones(2 + axis_index("data")), "data")

    def dtypes():
        return psum(torch.ones(2, dtype=torch.float32 if axis_index("data") else torch.float64), "data")

    def operations():
        return (psum if axis_index("data") else pmax)(torch.ones(2), "data")

    def gathered():
        return all_gather(torch.ones(2 + axis_index("data")), "data")

    mesh = shared_mesh({"data": 2}, backend)
    for body in (shapes, dtypes, operations, gathered):
        with pytest.raises(CollectiveMismatch):
            mesh.run(body)
    assert [x.item() for x in mesh.run(lambda: psum(torch.tensor(1), "data"))] == [2, 2]


def tree_of_rank(make=lambda x: x):
    """A dict whose keys lie in another order on the second rank."""
    pairs = [("a", make(torch.ones(2))), ("b", make(torch.ones(2)))]
    return dict(reversed(pairs) if axis_index("data") else pairs)


def sum_of(params):
    return (params["a"] - params["b"]).sum()


OTHER_KEYS = {
    "psum": lambda: psum(tree_of_rank(), "data"),
    "pmean": lambda: pmean(tree_of_rank(), "data"),
    "pmax": lambda: pmax([{"x": 1.0, **tree_of_rank()}], "data"),
    "all_gather": lambda: all_gather(tree_of_rank(), "data"),
    "psum_scatter": lambda: psum_scatter(tree_of_rank(), "data"),
    "all_to_all": lambda: all_to_all(tree_of_rank(), "data", 0, 0),
    "ppermute": lambda: ppermute(tree_of_rank(), "data", [(0, 1)]),
    "pbroadcast": lambda: pbroadcast(tree_of_rank(), "data", 0),
    "another key": lambda: psum({"b" if axis_index("data") else "a": torch.ones(2)}, "data"),
    "fewer keys": lambda: [psum({"b": x} if axis_index("data") else {"b": x, "a": x}, "data") for x in [torch.ones(2)]],
    "None": lambda: [
        psum({"a": None, "b": x} if axis_index("data") else {"a": x, "b": None}, "data") for x in [torch.ones(2)]
    ],
    "gradients": lambda: grad(sum_of)(tree_of_rank()),
    "gradients within a graph": lambda: grad(lambda w: grad(sum_of)(tree_of_rank(lambda x: x * w))["a"][0])(
        torch.tensor(1.0)
    ),
    "an optimizer": lambda: ADAM.step(tree_of_rank(), tree_of_rank(), ADAM.init(tree_of_rank())),
}
ADAM = optimizer(torch.optim.Adam, lr=0.1, shard="data")


@on_both
def test_ranks_whose_dicts_differ_in_their_keys_are_told_at_once(shared_mesh, backend):
    mesh = shared_mesh({"data": 2}, backend)
    for name, body in OTHER_KEYS.items():
        with pytest.raises(CollectiveMismatch, match=r"(?s)rank 0: .*\['a'\].*rank 1: .*\['b'\]") as caught:
            mesh.run(body)
        assert "the same keys in the same order" in str(caught.value), name
    total = mesh.run(lambda: psum({"b": torch.ones(2), "a": [1, 2.0]}, "data"))[1]
    assert [*total] == ["b", "a"] and [float(x) for x in total["a"]] == [2, 4]


def test_what_keys_are_compared(shared_mesh):
    """Those of large trees, and of keys that print otherwise in each process what kind they are."""
    mesh = shared_mesh({"data": 2})

    class Key:
        pass

    def large(last):
        return psum({**dict.fromkeys(map(str, range(50)), 1.0), last: 2.0}, "data")

    with pytest.raises(CollectiveMismatch, match=r"(?s)rank 0: .*\(51 leaves, .*rank 1: .*\(51 leaves, "):
        mesh.run(lambda: large("b" if axis_index("data") else "a"))
    assert float(mesh.run(lambda: psum({Key(): {("a", Key()): 1.0}}, "data"))[0].popitem()[1].popitem()[1]) == 2
    assert float(mesh.run(lambda: psum((1.0,) if axis_index("data") else [1.0], "data"))[0][0]) == 2


@on_both
def test_the_same_bytes_in_another_shape(shared_mesh, backend):
    mesh = shared_mesh({"data": 2}, backend)

    def of_rank():
        return torch.ones((2, 2, 1) if axis_index("data") else (2, 1, 2))

    for body in (
        lambda: all_gather(of_rank(), "data"),
        lambda: psum_scatter(of_rank(), "data"),
        lambda: all_to_all(of_rank(), "data", 0, 0),
        lambda: ppermute(of_rank(), "data", [(0, 1), (1, 0)]),
    ):
        with pytest.raises(CollectiveMismatch, match=r"(?s)\[2, 1, 2\].*\[2, 2, 1\]"):
            mesh.run(body)


@on_both
def test_the_same_shape_along_another_dimension(shared_mesh, backend):
    mesh = shared_mesh({"data": 2}, backend)
    x = torch.ones(2, 2)
    for body in (
        lambda dim: all_gather(x, "data", dim=dim),
        lambda dim: psum_scatter(x, "data", dim=dim),
        lambda dim: psum_scatter(x, "data", dim=dim, tiled=True),
        lambda dim: all_to_all(x, "data", dim, 0),
        lambda dim: all_to_all(x, "data", 0, dim, tiled=True),
    ):
        for change in (body, torch.compile(body, backend="eager")):
            with pytest.raises(CollectiveMismatch, match=r"(?s)rank 0: .*dim=0 .*rank 1: .*dim=1 "):
                mesh.run(lambda change: change(axis_index("data")), change)
        assert mesh.run(body, -1)[1] is not None  # counted from either end


# -- torch's own transforms: right, or an error ------


def test_vmap_over_a_collective_is_the_loop_over_it(shared_mesh):
    def calls():
        return {
            "psum": lambda x: psum(x, "data"),
            "pmean": lambda x: pmean(x, "data"),
            "pmax": lambda x: pmax(x, "data"),
            "gather": lambda x: all_gather(x, "data", dim=1),
            "gather tiled": lambda x: all_gather(x, "data", dim=-1, tiled=True),
            "scatter": lambda x: psum_scatter(x, "data", dim=1),
            "scatter tiled": lambda x: psum_scatter(x, "data", dim=0, tiled=True),
            "exchange": lambda x: all_to_all(x, "data", 0, 1, tiled=True),
            "permute": lambda x: ppermute(x, "data", [(0, 1)]),
            "broadcast": lambda x: pbroadcast(x, "data", 1),
            "of nothing mapped": lambda x: x + psum(torch.ones(()), "data"),
            "integers": lambda x: psum(x.to(torch.int32), "data"),
        }

    def body():
        x = torch.randn(3, 4, 2)  # other numbers on each rank
        wrong = []
        for name, f in calls().items():
            for dim in (0, 1, 2):
                moved = x.movedim(0, dim)
                looped = torch.stack([f(piece) for piece in moved.unbind(dim)])
                if not torch.equal(torch.func.vmap(f, in_dims=dim)(moved), looped):
                    wrong.append((name, dim))
        y = torch.randn(2, 3, 4, 2)
        twice = torch.func.vmap(torch.func.vmap(calls()["gather"], in_dims=1), in_dims=2)(y)
        looped = torch.stack([torch.stack([calls()["gather"](y[:, i, j]) for i in range(3)]) for j in range(4)])
        return wrong, torch.equal(twice, looped)

    assert shared_mesh({"data": 2}).run(body) == [([], True)] * 2


def test_torch_func_grad_jvp_and_their_batches_through_a_collective(shared_mesh):
    def through(x):
        gathered = all_gather(x.sin(), "data")
        return (
            psum(x * x, "data") * x + pmax(x.sin(), "data") + ppermute(gathered.cos().sum(0), "data", [(0, 1), (1, 0)])
        ).sum()

    def body():
        torch.manual_seed(axis_index("data"))
        x, v = torch.randn(2, 3, 4, dtype=torch.float64).unbind()
        slope = torch.func.jvp(through, (x,), (v,))[1]
        step = 1e-6
        wanted = (through(x + step * v) - through(x - step * v)) / (2 * step)
        with torch.autograd.forward_ad.dual_level():
            dual = through(torch.autograd.forward_ad.make_dual(x, v))
            slope_too = torch.autograd.forward_ad.unpack_dual(dual).tangent
        # The sum over ranks of every rank's slope is that of the sum of values, whose gradient torch.func.grad takes.
        gradient = torch.func.grad(through)(x)
        leaf = x.clone().requires_grad_()
        (same,) = torch.autograd.grad(through(leaf), leaf)
        batched = torch.func.vmap(torch.func.grad(through))(x)
        looped = torch.stack([torch.func.grad(through)(row) for row in x])
        curved = torch.func.jvp(torch.func.grad(through), (x,), (v,))[1]
        along = torch.func.jvp(lambda x: torch.func.jvp(through, (x,), (v,))[1], (x,), (v,))[1]
        bent = (torch.func.grad(through)(x + step * v) - torch.func.grad(through)(x - step * v)) / (2 * step)
        return {
            "jvp": torch.allclose(slope, wanted, atol=1e-7),
            "dual": torch.equal(slope, slope_too),
            "transposed": torch.allclose(psum((gradient * v).sum(), "data"), psum(slope, "data")),
            "grad": torch.allclose(gradient, same),
            "batched": torch.allclose(batched, looped),
            "forward over reverse": torch.allclose(curved, bent, atol=1e-6),
            "forward over forward": torch.allclose(psum(along, "data"), psum((curved * v).sum(), "data")),
        }

    for results in shared_mesh({"data": 2}).run(body):
        assert all(results.values()), results


def test_gradients_for_many_rows_at_once(shared_mesh):
    """By torch.func, and not by torch.autograd.grad's older kind of vmap."""

    def f(x):
        return psum((1.0 + axis_index("data")) * x.sin(), "data")

    x = torch.arange(3.0)
    mesh = shared_mesh({"data": 2})
    found = spmd(torch.func.jacfwd(f), mesh=mesh)(x).full()
    assert torch.allclose(found, torch.diag(3 * x.cos()))
    for collective in (psum, pmean, pmax, pmin):
        of = functools.partial(collective, axis="data")
        match = rf"gradient of {collective.__name__}.*is_grads_batched=True.*torch.func.jacfwd"
        with pytest.raises(SpecError, match=match):
            spmd(lambda x, of=of: torch.autograd.functional.jacobian(of, x, vectorize=True), mesh=mesh)(x)


@on_both
def test_the_first_collective_of_a_group_inside_a_transform_of_torch_func(shared_mesh, backend):
    mesh = shared_mesh({"data": 2}, backend)
    calls = {
        "psum": lambda x: psum(x, "data"),
        "pmean": lambda x: pmean(x, "data"),
        "pmax": lambda x: pmax(x, "data"),
        "pmin": lambda x: pmin(x, "data"),
        "gather": lambda x: all_gather(x, "data"),
        "scatter": lambda x: psum_scatter(x, "data"),
        "exchange": lambda x: all_to_all(x, "data", 0, 1),
        "permute": lambda x: ppermute(x, "data", [(0, 1)]),
        "broadcast": lambda x: pbroadcast(x, "data", 1),
        "barrier": lambda x: (barrier("data"), x)[1],
    }

    def body(f):
        x = torch.arange(8.0).view(2, 2, 2) + axis_index("data")
        found = [
            torch.func.grad(lambda x: f(x).square().sum())(x[0]),
            torch.func.grad(lambda x: torch.func.grad(lambda x: f(x * x).square().sum())(x).sum())(x[0]),
            torch.func.vmap(f)(x),
            torch.func.jvp(f, (x[0],), (x[1],))[1],
        ]
        return torch.cat([part.reshape(-1) for part in found]).tolist()

    for f in calls.values():
        with pytest.raises(ZeroDivisionError):
            mesh.run(lambda: 1 // 0)  # after a failure groups are opened again
        first = mesh.run(body, f)
        assert mesh.run(body, f) == first


def test_collectives_first_made_in_inference_mode(make_mesh):
    def body():
        for inference in (True, False):
            with torch.inference_mode(inference):
                for _ in range(3):
                    found = [psum(torch.ones(size), "data").sum().item() for size in (3, 90000)]
        return found

    for backend in ("shm", "gloo"):
        assert make_mesh({"data": 2}, backend=backend).run(body) == [[6.0, 180000.0]] * 2


def test_checkpointed_layers_communicate_again_and_give_the_same_gradients(shared_mesh):
    from torch.utils.checkpoint import checkpoint

    def layer(w, x):
        return psum(torch.tanh(x @ w), "data").sin() + pmax(x, "data")

    def body():
        torch.manual_seed(0)
        w = torch.randn(3, 3, dtype=torch.float64)
        x = torch.randn(2, 3, dtype=torch.float64) + axis_index("data")

        def plain(w):
            return layer(w, layer(w, x)).sum()

        def again(w):
            return checkpoint(layer, w, checkpoint(layer, w, x, use_reentrant=False), use_reentrant=False).sum()

        def reentrant(w):
            return checkpoint(layer, w, x, use_reentrant=True).sum()

        try:
            grad(reentrant)(w)
            refused = False
        except SpecError as error:
            refused = "use_reentrant=False" in str(error)

        def bent(f):
            return grad(lambda w: (grad(f)(w) ** 2).sum())(w)

        return torch.equal(grad(plain)(w), grad(again)(w)), torch.allclose(bent(plain), bent(again)), refused

    assert shared_mesh({"data": 2}).run(body) == [(True, True, True)] * 2


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_checkpointed_layers_communicate_again_on_all_ranks_whatever_their_values_depend_on(shared_mesh, backend):
    """A rank's sum met its peer's gradient, as both have one shape."""
    from torch.utils.checkpoint import checkpoint

    def layer(w, x):
        return psum(torch.tanh(x @ w), "data").sin()

    def step(w, x, again):
        def loss(w):
            y = checkpoint(layer, w, x, use_reentrant=False) if again else layer(w, x)
            return y.sum() if axis_index("data") == 0 else (w * w).sum()

        return grad(loss)(w), grad(lambda w: grad(loss)(w).square().sum())(w)

    torch.manual_seed(0)
    w, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    on_the_mesh = spmd(step, mesh=shared_mesh({"data": 2}, backend=backend), in_specs=(P(), P("data"), None))
    for plain, again in zip(on_the_mesh(w, x, False), on_the_mesh(w, x, True), strict=True):
        assert torch.equal(plain.full(), again.full())


def test_our_gradient_inside_a_transform_of_torch_func_is_refused(shared_mesh):
    def body(x):
        try:
            torch.func.vmap(grad(lambda w: (w * w).sum()))(x)
        except SpecError as error:
            return str(error)

    for text in shared_mesh({"data": 2}).run(body, torch.ones(2, 3)):
        assert "torch.func" in text and "psum or pmean" in text


def test_collectives_in_a_module(shared_mesh):
    class Sync(nn.Module):
        def forward(self, x):
            return x - pmean(x.mean(0), "data")

    def body(module):
        return module(torch.full((2, 1), float(axis_index("data"))))

    first, second = shared_mesh({"data": 2}).run(body, Sync())
    assert first.tolist() == [[-0.5], [-0.5]] and second.tolist() == [[0.5], [0.5]]
