"""`Mesh.comm`: along axes, and among any listed ranks."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import pytest
import torch

from spmd import Mesh, MeshError, P, SpecError, spmd

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
