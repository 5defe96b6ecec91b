"""`Mesh.comm`: along axes, and among any listed ranks."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import pytest
import torch

from spmd import Mesh, MeshError, P, SpecError, axis_index, grad, psum, spmd

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(params=["shm", "gloo"])
def mesh(request: pytest.FixtureRequest, shared_mesh: Callable[..., Mesh]) -> Mesh:
    return shared_mesh({"a": 2, "b": 2}, backend=request.param)


def gathered(mesh: Mesh, ranks: Sequence[int]) -> tuple[int, list[float], float] | None:
    """On listed ranks: this one's place among them, all their numbers, and the sum of a large tensor."""
    if mesh.rank not in ranks:
        return None
    comm = mesh.comm(ranks=ranks)
    outs = [torch.empty(1) for _ in ranks]
    comm.all_gather(outs, torch.tensor([float(mesh.rank)]))
    total = comm.all_reduced(torch.full((90_000,), float(mesh.rank)))
    return comm.rank, [float(out) for out in outs], float(total[-1])


@pytest.mark.parametrize("ranks", [[0, 1, 3], [3, 1], [2], (0, 1, 2, 3)])
def test_any_ranks_in_the_order_given(mesh: Mesh, ranks: Sequence[int]) -> None:
    for _ in range(2):
        expected = [
            (ranks.index(rank), [float(each) for each in ranks], float(sum(ranks))) if rank in ranks else None
            for rank in range(4)
        ]
        assert mesh.run(gathered, mesh, ranks) == expected


def test_groups_of_one_call_do_not_disturb_each_other(mesh: Mesh) -> None:
    def body() -> list[float]:
        assert mesh.rank is not None
        across = mesh.comm(ranks=[0, 3] if mesh.rank in (0, 3) else [2, 1])
        one = across.all_reduced(torch.tensor([float(mesh.rank)]), async_op=True)
        everyone = mesh.comm(ranks=range(4)).all_reduced(torch.tensor([1.0]))
        return [float(one.wait()), float(everyone)]

    assert mesh.run(body) == [[3.0, 4.0]] * 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ranks": [0, 4]}, r"there is no such rank \(expected 0 to 3, got 4\)"),
        ({"ranks": [-1, 0]}, r"there is no such rank \(expected 0 to 3, got -1\)"),
        ({"ranks": ["a"]}, r"there is no such rank \(expected 0 to 3, got 'a'\)"),
        ({"ranks": [0, 1, 0]}, r"a rank is named twice \(got \[0, 1, 0\]\)"),
        ({"ranks": []}, "a rank that is not of the group"),
        ({"ranks": [1, 2]}, r"a rank that is not of the group \(got \[1, 2\]\) \[rank 0 at \(a=0, b=0\)\]"),
        ({"axis": "a", "ranks": [0]}, 'comm got both "axis" and "ranks"'),
    ],
)
def test_bad_ranks(mesh: Mesh, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(MeshError, match=text):
        mesh.run(lambda: mesh.comm(**arguments), ranks=[0])


@pytest.mark.parametrize("axis", ["c", ("a", "c"), ["c"]])
def test_an_unknown_axis(mesh: Mesh, axis: Any) -> None:
    with pytest.raises(SpecError, match=r'comm got an unknown "axis" \(.*got \'c\'\)') as caught:
        mesh.run(lambda: mesh.comm(axis))
    assert "KeyError" not in "".join(traceback.format_exception(caught.value))


def test_the_driver_is_no_rank(mesh: Mesh) -> None:
    with pytest.raises(MeshError, match="called in the driver"):
        mesh.comm(ranks=[0])


def test_what_came_from_listed_ranks_differs_along_all_their_axes(shared_mesh):
    mesh = shared_mesh({"data": 2, "model": 2})

    def step(x):
        if mesh.rank != 2:
            comm = mesh.comm(ranks=[0, 3, 1])
            x = x + 0
            if comm.rank < 2:
                (comm.send if comm.rank == 0 else comm.recv)(x, 1 - comm.rank)
        return x + 0

    with pytest.raises(SpecError, match="may differ between ranks along data, though it does not this time"):
        spmd(step, mesh=mesh, out_specs=P("model"))(torch.ones(1))


def reduced(comm: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    comm.all_reduce(x)
    return x


def gathered_sum(comm: Any, x: torch.Tensor) -> torch.Tensor:
    outs = [torch.empty_like(x) for _ in range(comm.size)]
    comm.all_gather(outs, x)
    return sum(outs, torch.zeros(()))


def sent(comm: Any, x: torch.Tensor) -> torch.Tensor:
    other = torch.empty_like(x)
    sending = comm.isend(x, 1 - comm.rank)
    comm.recv(other, 1 - comm.rank)
    sending.wait()
    return x + other


@pytest.mark.parametrize("summed", [reduced, gathered_sum, sent, lambda comm, x: comm.all_reduced(x)])
@pytest.mark.parametrize("take", [grad, lambda f: torch.func.grad(f)])
def test_messages_bring_no_gradients_and_are_refused_where_some_are_taken(shared_mesh, summed, take):
    """The sums were right, and their gradients zero, or those of this rank's own part."""
    mesh = shared_mesh({"data": 4})

    def step(x, detached):
        def loss(x):
            pair = [rank for rank in range(4) if rank % 2 == axis_index("data") % 2]
            return summed(mesh.comm(ranks=pair), (x.detach() if detached else x).sum()) + x.sum()

        return take(loss)(x)

    on_the_mesh = spmd(step, mesh=mesh, in_specs=(P("data"), None), out_specs=P("data"))
    with pytest.raises(SpecError, match=r"requires gradients, which do not go through messages.*one axis more"):
        on_the_mesh(torch.arange(4.0), False)
    if take is grad:  # torch.func's wrapped tensors have no memory to send
        assert on_the_mesh(torch.arange(4.0), True).full().tolist() == [0.25] * 4


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # by torch itself, for the first tangent of a process
@pytest.mark.parametrize("summed", [reduced, gathered_sum, sent])
def test_messages_bring_no_tangents_and_are_refused_where_there_are_some(shared_mesh, summed):
    """What was reduced in place kept that of this rank's own part."""
    mesh = shared_mesh({"data": 2})

    def tangent(x):
        with torch.autograd.forward_ad.dual_level():
            total = summed(mesh.comm(), torch.autograd.forward_ad.make_dual(x, x) * 1)
            return torch.autograd.forward_ad.unpack_dual(total).tangent

    with pytest.raises(SpecError, match="that has a tangent, which do not go through messages"):
        spmd(tangent, mesh=mesh)(torch.ones(3))


def test_a_function_with_its_own_gradient_may_send_messages(shared_mesh):
    mesh = shared_mesh({"data": 2})

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return mesh.comm().all_reduced(x).clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return mesh.comm().all_reduced(gradient).clone()

    def step(x, total):
        return grad(lambda x: total(x.sum()).square())(x)

    x = torch.arange(4.0)
    by = [
        spmd(lambda x, total=total: step(x, total), mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x).full()
        for total in (Summed.apply, lambda x: psum(x, "data"))
    ]
    assert torch.equal(*by) and by[0].tolist() == [12.0] * 4


def test_what_all_reduced_gives_is_followed(shared_mesh):
    mesh = shared_mesh({"data": 2, "model": 2})
    step = spmd(lambda x: mesh.comm("model").all_reduced(x) + 0, mesh=mesh, in_specs=P("data"))
    with pytest.raises(SpecError, match="may differ between ranks along data, though it does not this time"):
        step(torch.ones(2))
