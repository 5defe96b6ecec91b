"""Pictures of meshes and values: which rank is where, and which holds what."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch

from spmd import Mesh, P, put
from spmd.mesh import drawing
from spmd.mesh.spec import Layout


def test_the_examples_are_right() -> None:
    assert doctest.testmod(drawing).failed == 0


def test_a_mesh_of_one_axis(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})
    assert repr(mesh).splitlines() == [mesh.describe(), "data=0   data=1", "rank 0   rank 1"]


def test_a_mesh_of_three_axes_is_drawn_in_planes() -> None:
    grids = drawing.mesh_grids(Layout((("a", 2), ("b", 1), ("c", 3))), "Mesh")
    assert [grid.title for grid in grids] == ["Mesh at a=0", "Mesh at a=1"]
    assert grids[1].rows == [("b=0", [("rank 3", (3,)), ("rank 4", (4,)), ("rank 5", (5,))])]


def test_a_value_on_two_axes(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    lines = str(put(torch.zeros(6, 4), P("data", "model"), mesh=mesh)).splitlines()
    assert lines[1:] == ["      0:2      2:4", "0:3   rank 0   rank 1", "3:6   rank 2   rank 3"]
    lines = str(put(torch.zeros(6), P("model"), mesh=mesh)).splitlines()
    assert lines[1:] == ["0:3   ranks 0, 2", "3:6   ranks 1, 3"]
    assert str(put(torch.tensor(1.0), mesh=mesh)).splitlines()[1] == "ranks 0-3"


def test_html_shows_every_rank_in_its_colour(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    page = mesh._repr_html_()
    assert all(f">rank {rank}<" in page for rank in range(4)) and len(set(page.split("background:")[1:])) == 4
    assert ">ranks 0-1<" in put(torch.zeros(4, 2), P("data"), mesh=mesh)._repr_html_()


def test_printed_lines_say_where_on_the_mesh(
    shared_mesh: Callable[..., Mesh], capfd: pytest.CaptureFixture[str]
) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    mesh.run(lambda: print("alike") or (mesh.rank == 2 and print("alone")))
    assert capfd.readouterr().out.splitlines() == ["alike", "[rank 2 data=1 model=0] alone"]
