"""Operators of torch, those that a program makes, and parametrized modules, in steps that travel to the ranks."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from spmd import P, SpecError, data_parallel, put, spmd, value_and_grad


def square(factor: float) -> Any:
    """An operator with all that can be registered for it."""

    @torch.library.custom_op("testing::square", mutates_args=(), device_types="cpu")
    def made(x: torch.Tensor) -> torch.Tensor:
        return factor * x * x

    @made.register_fake
    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * factor * x * grad + 0 * torch.ops.testing.square(x) + 0 * made(x)  # it may refer to itself

    made.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    made.register_autocast("cpu", torch.float32)
    made.register_vmap(lambda info, in_dims, x: (made(x), in_dims[0]))
    return made


def test_custom_operators_compute_and_are_differentiated_on_ranks(shared_mesh: Any) -> None:
    mesh, x = shared_mesh({"data": 2}), torch.arange(8.0)
    operators: Any = torch.ops
    for factor in (1.0, 10.0):  # made anew, as in a cell that is run again
        made = square(factor)
        compiled = torch.compile(lambda x, made=made: made(x), backend="eager", fullgraph=True)
        ways = (made, lambda x: operators.testing.square(x), torch.func.vmap(lambda x, made=made: made(x)))
        for way in (*ways, torch.ops.testing.square, torch.ops.testing.square.default, compiled):

            @spmd(mesh=mesh)
            @data_parallel
            def step(w: Any, batch: Any, way: Any = way) -> Any:
                return value_and_grad(lambda w, batch: way(w * batch).mean())(w, batch)

            value, grad = step(torch.tensor(2.0), x)
            assert (value.item(), grad.item()) == (70 * factor, 70 * factor)

    by_name = spmd(mesh=mesh)(lambda x: torch.ops.testing.square(x))
    square(2.0)
    assert by_name(torch.tensor(3.0)).item() == 18
    square(3.0)
    assert by_name(torch.tensor(3.0)).item() == 27, "what code names only as torch.ops is looked at, too"


def test_operators_of_a_module_are_imported_with_it(
    shared_mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_an_operator.py").write_text(
        "import torch\n\n"
        "@torch.library.custom_op('of_module::thrice', mutates_args=())\n"
        "def thrice(x: torch.Tensor) -> torch.Tensor:\n    return 3 * x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    __import__("with_an_operator")
    thrice, mesh = sys.modules["with_an_operator"].thrice, shared_mesh({"data": 2})
    named = torch.ops.of_module.thrice
    for way in (lambda x: torch.ops.of_module.thrice(x), lambda x: thrice(x), lambda x: named(x)):
        assert spmd(mesh=mesh)(way)(torch.ones(())).item() == 3


def test_operators_that_ranks_cannot_have_are_named(shared_mesh: Any) -> None:
    library = torch.library.Library("low_level", "DEF")
    library.define("plus_one(Tensor x) -> Tensor")
    library.impl("plus_one", lambda x: x + 1, "CPU")
    operator = torch.ops.low_level.plus_one
    with pytest.raises(SpecError, match=r"torch\.ops\.low_level\.plus_one is not there.*torch\.library\.custom_op"):
        spmd(mesh=shared_mesh({"data": 2}))(lambda x: operator(x))(torch.ones(2))


def test_operators_are_given_arrays_and_may_not_change_them(shared_mesh: Any) -> None:
    @torch.library.custom_op("testing::increase", mutates_args=("x",))
    def increase(x: torch.Tensor, by: torch.Tensor) -> None:
        x.add_(by)

    x = put(torch.arange(4.0), P("data"), mesh=shared_mesh({"data": 2}))
    assert torch.ops.aten.add.Tensor(x, x).full().tolist() == [0, 2, 4, 6]
    assert torch.ops.aten.relu(x - 2).full().tolist() == [0, 0, 0, 1]
    assert square(1.0)(x).full().tolist() == [0, 1, 4, 9]
    for change in (increase, torch.ops.testing.increase, torch.ops.aten.add_, torch.ops.aten.add_.Tensor):
        with pytest.raises(SpecError, match="would change an Array, whose value never changes"):
            change(x, x)
    plain = torch.zeros(4)
    increase(plain, x)
    assert plain.tolist() == x.full().tolist() == [0, 1, 2, 3]


def test_a_parametrized_module_that_a_step_captures(shared_mesh: Any) -> None:
    """torch refuses to pickle one. A frozen teacher may well have weight norm."""
    teacher = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)), parametrizations.spectral_norm(nn.Linear(4, 2))
    )
    teacher.eval().requires_grad_(False)

    @spmd(mesh=shared_mesh({"data": 2}), in_specs=P("data"), out_specs=P("data"))
    def taught(x: Tensor) -> Tensor:
        return teacher(x)

    x = torch.randn(4, 3)
    assert torch.allclose(taught(x).full(), teacher(x))
    with torch.no_grad():
        teacher[0].parametrizations.weight.original1.add_(1.0)
    assert torch.allclose(taught(x).full(), teacher(x))


def test_objects_with_slots_come_back(shared_mesh: Any) -> None:
    """Their class travels by value, and has no slots on the ranks."""
    mesh = shared_mesh({"data": 2})

    @dataclasses.dataclass(slots=True)
    class Point:
        x: int
        name: str = "p"

    class Named(Point):  # with a __dict__ of its own
        pass

    class Half:
        __slots__ = ("empty", "filled")

        def __init__(self, filled: Any) -> None:
            self.filled = filled

    named = Named(3)
    named.more = 4
    for given in (Point(3), named):
        for back in (
            *mesh.run(lambda x: x, given),
            mesh.submit(lambda x: x, given).result(),
            spmd(pick, mesh=mesh)(given),
        ):
            assert back == given and type(back) is type(given) and getattr(back, "more", 4) == 4
    (half, _) = mesh.run(lambda x: x, Half([torch.ones(2)]))
    assert half.filled[0].tolist() == [1, 1] and not hasattr(half, "empty")
    assert mesh.run(lambda x: x.x + x.more, named) == [7, 7]


def pick(x: Any) -> Any:
    return x
