"""Collectives that `torch.compile` traces: one graph, and the values and gradients of eager ones."""

import sys

import cloudpickle
import pytest
import torch

import spmd
from spmd import (
    P,
    SpecError,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    data_parallel,
    grad,
    pbroadcast,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
    value_and_grad,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler


def counting(graph, inputs):
    torch.counted_graphs = counted() + 1
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def counted():
    return getattr(torch, "counted_graphs", 0)


# Those of a line are in one graph: most of a compilation's time does not depend on how much there is in it.
COLLECTIVES = {
    "reductions": [
        lambda x: psum(x * 1, "data"),
        lambda x: pmean(x * 1, ("data",)),
        lambda x: pmax(x.round(), "data"),
        lambda x: psum(x > 2, "data") * x,
        lambda x: psum({"a": x * 1, "b": [x.sum(), (x,)]}, "data")["b"][1][0],
        lambda x: psum(x * axis_index("data"), "data"),
    ],
    "gathered and scattered": [
        lambda x: all_gather(x * 1, "data", dim=1),
        lambda x: all_gather(x.t(), "data", dim=-1, tiled=True),
        lambda x: psum_scatter(x * 1, "data"),
        lambda x: psum_scatter(x * 1, "data", tiled=True),
    ],
    "moved": [
        lambda x: all_to_all(x * 1, "data", 0, 1),
        lambda x: all_to_all(x * 1, "data", 0, 1, tiled=True),
        lambda x: ppermute(x * 1, "data", [(0, 1)]),
        lambda x: ppermute(x * 1, "data", [(i, (i + 1) % axis_size("data")) for i in range(2)]),
        lambda x: pbroadcast(x * 1, "data", 1),
    ],
}


def compared(functions):
    """On a rank: values of the functions, and the gradient of a loss that uses all, eager and in one graph."""
    x = torch.tensor([[0.4, 1.3, 2.2], [2.7, 3.1, 4.9]]) * (1 + 0.5 * axis_index("data"))

    def loss(x):
        values = [function(x) for function in functions]
        return sum((value.sin() * x.sum()).sum() * (1 + place) for place, value in enumerate(values)), values

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), loss(x))
    for _ in range(2):
        found, expected = (value_and_grad(one, has_aux=True)(x) for one in (compiled, loss))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("names", COLLECTIVES)
def test_one_graph_with_the_values_and_gradients_of_eager(shared_mesh, names):
    shared_mesh({"data": 2}).run(compared, COLLECTIVES[names])


def test_tangents_go_through_compiled_collectives(shared_mesh):
    """In a graph they had none."""

    def on_a_rank():
        forward_ad, x = torch.autograd.forward_ad, torch.arange(3.0) + axis_index("data")
        torch._dynamo.reset()
        eager = lambda x: psum(x * x, "data").sin()  # noqa: E731
        for loss in (eager, torch.compile(eager, backend="aot_eager")):
            with forward_ad.dual_level():
                yield forward_ad.unpack_dual(loss(forward_ad.make_dual(x, torch.ones(3)))).tangent

    eager, compiled = shared_mesh({"data": 2}).run(lambda: list(on_a_rank()))[0]
    torch.testing.assert_close(compiled, eager)


def test_virtual_shards_share_a_graph(shared_mesh):
    """There was one for each, until torch gave up compiling: the others ran in eager mode, which ones by the ranks."""
    mesh = shared_mesh({"data": 1})
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    apply, params, buffers = spmd.functional_with_buffers(model)
    loss = torch.compile(lambda params, buffers, batch: apply(params, buffers, batch)[0].mean(), backend=counting)

    @spmd.spmd(mesh=mesh)
    @data_parallel(shards=12)
    def step(params, buffers, batch):
        return value_and_grad(loss)(params, buffers, batch)

    before = mesh.run(counted)[0]
    for _ in range(3):
        step(params, buffers, torch.ones(24, 3))
    assert mesh.run(counted)[0] == before + 1


def marking(graph, inputs):
    """A graph for any size gives another value, as Inductor rounds otherwise in it."""
    sizes_vary = any(isinstance(value, torch.SymInt) for value in inputs)
    return lambda *args: [one * (2 if sizes_vary else 1) for one in graph(*args)]


def test_a_virtual_shard_gets_the_same_graph_on_any_number_of_ranks(shared_mesh):
    """One process met shards of two sizes, and had a graph for any size, where several ranks had one for each."""
    batches, losses = [torch.arange(float(n))[:, None] for n in (8, 10, 10, 6, 10)], []
    for ranks in (1, 2):
        loss = torch.compile(lambda w, batch: (w * batch).square().mean(), backend=marking)

        @spmd.spmd(mesh=shared_mesh({"data": ranks}))
        @data_parallel(shards=4)
        def step(w, batch):
            return value_and_grad(loss)(w, batch)  # noqa: B023

        losses.append([float(step(torch.tensor(2.0), batch)[0]) for batch in batches])
    assert losses[0] == losses[1]


def a_constant_elsewhere(x):
    y = psum(x.sin(), "data").sum() * pmean(x * 2, "data").sum()
    return x.sum() * 0 if axis_index("data") else y


def one_without_gradients(x):
    total = psum((x * x).sum(), "data")
    with torch.no_grad():
        scale = psum(x.sum(), "data")
    return total * psum((x * scale).sum(), "data")


def results_that_nobody_uses(x):
    psum(x * 1, "data"), psum(x * x, "data")
    return (x * x).sum()


@pytest.mark.parametrize("loss", [a_constant_elsewhere, one_without_gradients, results_that_nobody_uses])
def test_all_ranks_run_all_transposes(shared_mesh, loss):
    """Whatever a rank's value depends on; else they would wait for each other, or take one sum for another."""

    def on_a_rank():
        x = torch.arange(6.0).reshape(2, 3) + 10 * axis_index("data")
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(value_and_grad(compiled)(x), value_and_grad(loss)(x))

    shared_mesh({"data": 2}).run(on_a_rank)


def a_loss(p, batch):
    product = (p * batch["x"]).mean()
    return psum(product * 0.5, "data") * pmean(product, "data")


def test_uneven_batches_and_few_graphs(shared_mesh):
    """A rank's share of the samples is asked for when a graph runs; later steps compile nothing."""
    mesh = shared_mesh({"data": 2})
    before = mesh.run(counted)

    def steps(loss):
        @spmd.spmd(mesh=mesh)
        @data_parallel
        def step(p, batch):
            return value_and_grad(loss)(p, batch)

        batches = [torch.arange(3.0 * size).reshape(size, 3) for size in (8, 8, 7, 8, 5, 7, 8)]
        found = [step(torch.ones(3), {"x": x}) for x in batches]
        return [leaf.full() for pair in found for leaf in pair]

    found = steps(torch.compile(a_loss, fullgraph=True, backend=counting))
    torch.testing.assert_close(found, steps(a_loss))
    graphs = [now - then for now, then in zip(mesh.run(counted), before, strict=True)]
    assert all(1 <= one <= 3 for one in graphs), graphs


def test_what_a_result_differs_over_is_known_as_in_eager(shared_mesh):
    """The gradient by a shard, equal on all ranks by chance, is this rank's own, and is not summed."""

    def step(w):
        shard = scatter(w)
        return grad(lambda w: (w * (1.0 + axis_index("data"))).sum())(shard)

    scatter = torch.compile(lambda w: psum_scatter(w, "data", tiled=True), backend="aot_eager")
    mesh = shared_mesh({"data": 2})
    run = spmd.spmd(step, out_specs=P("data"), mesh=mesh)
    for _ in range(3):
        assert run(torch.ones(2)).full().tolist() == [0.5, 1.0]
    whole = torch.compile(lambda w: psum_scatter(w, "data", tiled=True), backend="eager", fullgraph=True)
    run = spmd.spmd(lambda w: whole(w), out_specs=P("data"), mesh=mesh)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="psum_scatter of this value can't be part of a graph"):
        for _ in range(2):  # the first one is as written
            run(torch.ones(2)).full()


def test_errors_are_those_of_eager(shared_mesh):
    def on_a_rank():
        for wrong in (lambda x: psum(x, "modl"), lambda x: all_gather(x, "data", dim=5), lambda x: psum(None, "data")):
            torch._dynamo.reset()
            with pytest.raises(SpecError) as expected:
                wrong(torch.ones(2))
            with pytest.raises(SpecError) as found:
                torch.compile(wrong, backend="eager")(torch.ones(2))
            assert str(found.value) == str(expected.value)

    shared_mesh({"data": 2}).run(on_a_rank)
    with pytest.raises(spmd.MeshError, match="outside a region"):
        torch.compile(lambda x: psum(x, "data"), backend="eager")(torch.ones(2))


def test_the_keys_of_trees_are_compared(shared_mesh):
    """Also with those of a rank that has not compiled."""
    mesh = shared_mesh({"data": 2})

    def total(tree):
        return psum(tree, "data")

    compiled = torch.compile(total, backend="eager", fullgraph=True)

    def body(keys_of_rank, functions):
        place = axis_index("data")
        return functions[place]({key: [torch.ones(2)] for key in keys_of_rank[place]})["a"][0].tolist()

    for functions in ((compiled, compiled), (total, compiled)):
        assert mesh.run(body, ("ab", "ab"), functions) == [[2, 2]] * 2
        with pytest.raises(spmd.CollectiveMismatch, match=r"(?s)of \['a'\]\[0\], \['b'\].*of \['b'\]\[0\], \['a'\]"):
            mesh.run(body, ("ab", "ba"), functions)
