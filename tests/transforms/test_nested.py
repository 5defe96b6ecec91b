"""Calls of @spmd functions within a region: cut, run and joined over the axes that the caller does not use."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from spmd import Mesh, P, SpecError, axis_index, grad, pmean, psum, put, spmd


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh]) -> Mesh:
    return shared_mesh({"data": 2, "model": 2})


def test_an_inner_region_over_another_axis(mesh: Mesh) -> None:
    inner = spmd(lambda x, w: x @ w, in_specs=(P(), P(None, "model")), out_specs=P(None, "model"))

    @spmd(mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check="always")
    def outer(x, w):
        y = inner(x, w)
        assert y.shape == (2, 6)  # whole along "model", this rank's rows along "data"
        return y

    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(outer(x, w).full(), x @ w)


def test_gradients_go_through_an_inner_region(mesh: Mesh) -> None:
    inner = spmd(lambda x, w: torch.tanh(x @ w), in_specs=(P(), P(None, "model")), out_specs=P(None, "model"))

    @spmd(mesh=mesh, in_specs=(P(), P("data")), check="always")
    def gradient(w, x):
        return grad(lambda w: inner(x, w).square().mean())(w)

    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    expected = grad(lambda w: torch.tanh(x @ w).square().mean())(w)
    torch.testing.assert_close(gradient(w, x).full(), expected)


def test_an_axis_that_is_cut_already_is_shared(mesh: Mesh) -> None:
    total = spmd(lambda x: psum(x.sum(), "data"), in_specs=P("data"))
    same = spmd(lambda x: x + axis_index("data"), in_specs=P("data"), out_specs=P("data"))

    @spmd(mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")))
    def outer(x):
        return total(x), same(x)

    sums, moved = outer(torch.arange(4.0))
    assert sums.item() == 6 and moved.full().tolist() == [0.0, 1.0, 3.0, 4.0]


def test_an_axis_of_another_cut_is_refused(mesh: Mesh) -> None:
    both = spmd(lambda x: x, in_specs=P(("data", "model")))
    with pytest.raises(SpecError, match="differs over"):
        spmd(lambda x: both(x), mesh=mesh, in_specs=P("data"), out_specs=P("data"))(torch.arange(8.0))


def test_what_was_computed_of_parts_is_not_cut_again(mesh: Mesh) -> None:
    total = spmd(lambda x: psum((x * x).sum(), "data"), in_specs=P("data"))
    parts = {"mesh": mesh, "in_specs": P("data")}
    for body in (lambda x: total(x * 2), lambda x: grad(lambda x: total(x.sin()))(x)):
        with pytest.raises(SpecError, match=r"a tensor that differs over \['data'\] already.*leave @spmd off"):
            spmd(body, **parts, out_specs=P("data"))(torch.arange(8.0))
    whole = spmd(lambda x: total(x * 2), mesh=mesh)
    assert [whole(torch.arange(8.0)).item() for _ in range(2)] == [560.0, 560.0]


def test_a_part_of_what_differs_over_another_axis_still_does(mesh: Mesh) -> None:
    half = spmd(lambda x: x * 1, in_specs=P("model"))
    with pytest.raises(SpecError, match="may differ between ranks along data, though it does not this time"):
        spmd(lambda x: psum(half(x * 2), "model"), mesh=mesh, in_specs=P("data"))(torch.ones(4))


def test_values_move_from_one_spec_to_another(mesh: Mesh) -> None:
    x = torch.arange(48.0).reshape(4, 12)
    specs = [P(), P("data"), P("model", "data"), P(("data", "model")), P(None, ("model", "data"))]
    for old in specs:
        array = put(x, old, mesh=mesh)
        for new in specs:
            moved = put(array, new, mesh=mesh)
            assert moved.spec == new and torch.equal(moved.full(), x)
            for rank, shard in enumerate(moved.shards()):
                assert torch.equal(shard, mesh.layout.cut(x, new, rank))


def test_partial_use_of_a_mesh(mesh: Mesh) -> None:
    mean = spmd(lambda x: pmean(x, "model"), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check="always")
    assert mean(torch.arange(4.0)).full().tolist() == [0.0, 1.0, 2.0, 3.0]


ran: list[int] = []


def counted(graph, inputs):
    def run(*args):
        ran.append(1)
        return graph.forward(*args)

    return run


@functools.cache  # not made when tests are collected, which would import torch's compiler
def compiled_total():
    doubled = torch.compile(lambda x: (x * 2).sum(), backend=counted)
    return spmd(lambda x: psum(doubled(x), "data"), in_specs=P("data"))


def calls_of_the_compiled(x):
    compiled_total()(x)
    return len(ran)


def test_of_equal_calls_in_mesh_run_only_the_first_is_followed(shared_mesh: Callable[..., Mesh]) -> None:
    """Following would run what is compiled op by op each time."""
    mesh, x = shared_mesh({"data": 2}), torch.ones(8)
    assert [mesh.run(calls_of_the_compiled, x) for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert mesh.run(calls_of_the_compiled, torch.ones(4)) == [2, 2]  # of another signature


def test_a_call_in_mesh_run_that_failed_is_followed_again(shared_mesh: Callable[..., Mesh]) -> None:
    mesh, x = shared_mesh({"data": 2}), torch.ones(8)

    def checked(x, fail):
        total = (x > 0).sum()
        if fail[0]:
            raise ValueError("as asked")
        return total

    step = spmd(checked, in_specs=(P("data"), None))
    differs = (SpecError, "may differ between ranks")
    for fail, (error, text) in (([True], (ValueError, "as asked")), ([False], differs), ([False], differs)):
        with pytest.raises(error, match=text):
            mesh.run(lambda x, fail: step(x, fail), x, fail)
