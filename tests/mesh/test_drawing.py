"""Pictures of meshes and values: which rank is where, and which holds what."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from internals import compare_late_output

from spmd import Loader, Mesh, P, Sampler, SpecError, put, visualize


def test_a_mesh_of_one_axis(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})
    assert repr(mesh).splitlines() == [mesh.describe(), "data=0   data=1", "rank 0   rank 1"]


def test_a_mesh_of_three_axes_is_drawn_in_planes(make_mesh: Callable[..., Mesh]) -> None:
    lines = repr(make_mesh({"a": 2, "b": 1, "c": 2})).splitlines()
    titles = [line for line in lines if "at a=" in line]
    assert [title.rpartition(" at ")[2] for title in titles] == ["a=0", "a=1"]
    assert lines[-1].split() == ["b=0", "rank", "2", "rank", "3"]


def test_a_value_on_two_axes(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    lines = str(put(torch.zeros(6, 4), P("data", "model"), mesh=mesh)).splitlines()
    assert lines[1:] == ["      0:2      2:4", "0:3   rank 0   rank 1", "3:6   rank 2   rank 3"]
    lines = str(put(torch.zeros(6), P("model"), mesh=mesh)).splitlines()
    assert lines[1:] == ["0:3   ranks 0, 2", "3:6   ranks 1, 3"]
    assert lines[0] == "Array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], float32[6], P('model'))"
    assert str(put(torch.tensor(1.0), mesh=mesh)) == "Array(1.0, float32[], P())"


def test_html_shows_every_rank_in_its_colour(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    page = mesh._repr_html_()
    assert all(f">rank {rank}<" in page for rank in range(4)) and len(set(page.split("background:#")[1:])) == 4
    assert ">ranks 0-1<" in put(torch.zeros(4, 2), P("data"), mesh=mesh)._repr_html_()


def test_printed_lines_say_where_on_the_mesh(
    make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compare_late_output(monkeypatch.setattr)
    mesh = make_mesh({"data": 2, "model": 2})
    mesh.run(lambda: print("alike") or (mesh.rank == 2 and print("alone")))
    assert capfd.readouterr().out.splitlines() == ["alike", "[rank 2 data=1 model=0] alone"]


def test_which_rank_takes_which_sample(shared_mesh: Callable[..., Mesh], capsys: pytest.CaptureFixture[str]) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    visualize(Sampler(9, 4, shuffle=False), mesh=mesh)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{Sampler(9, 4, shuffle=False)}, epoch 0, 3 steps"
    assert lines == [
        "         ranks 0-1   ranks 2-3",
        "step 0   0 2         1 3",
        "step 1   4 6         5 7",
        "step 2   8",
    ]
    visualize(Loader({"x": torch.arange(100)}, 40, shuffle=False, shards=4, mesh=mesh), epoch=3)
    title, _, first, *_ = capsys.readouterr().out.splitlines()
    assert "epoch 3" in title
    assert re.split(" {2,}", first)[1:] == ["0 4 8 12 16 20 24 28 … (20)", "2 6 10 14 18 22 26 30 … (20)"]


def test_every_sample_is_drawn_in_its_ranks_colour(make_mesh: Callable[..., Mesh]) -> None:
    with make_mesh({"data": 3}):
        for page in (Sampler(9, 9)._repr_html_(), Loader({"x": torch.arange(9)}, 9)._repr_html_()):
            assert page.count("<td") == 3 and len(set(page.split("background:#")[1:])) == 3
    assert "0 steps" in Sampler(0, 3)._repr_html_()


def test_visualize_draws_all_arrays_of_a_tree(
    shared_mesh: Callable[..., Mesh], capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = shared_mesh({"data": 2})
    value = put(torch.zeros(4), P("data"), mesh=mesh)
    visualize({"w": value, "n": 3})
    assert capsys.readouterr().out == f"['w'] {value!r}\n0:2   rank 0\n2:4   rank 1\n"
    visualize(mesh)
    assert capsys.readouterr().out == f"{mesh!r}\n"
    with pytest.raises(SpecError, match=r"visualize got nothing that is on a mesh .* got int"):
        visualize(3)
