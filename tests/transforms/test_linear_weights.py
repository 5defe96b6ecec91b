"""Gradients of weights that are computed where they are summed: which leaves, and that they are what torch computes."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spmd import Mesh, P, data_parallel, grad, psum, spmd, value_and_grad
from spmd.transforms import _sums
from spmd.transforms._linear_weights import linear_weights

WIDTH = 256  # of a weight large enough to be looked at


def leaves() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (WIDTH, WIDTH), "second": (WIDTH, WIDTH), "a": (WIDTH,), "b": (WIDTH,)}
    return {name: torch.randn(shape, generator=generator) / 16 for name, shape in shapes.items()}


def batch(samples: int = 4, *more: int) -> Tensor:
    return torch.randn(samples, *more, WIDTH, generator=torch.Generator().manual_seed(1))


def copied(x: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy, by a function with this backward."""
    given = backward

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return given(gradient)

    return Copied.apply(x)


def two_layers(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(F.linear(x, p["first"], p["a"]).tanh(), p["second"], p["b"])


def without_biases(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(F.linear(x, p["first"]).tanh(), p["second"])


def without_a_bias_in_the_middle(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(F.linear(x, p["first"], p["a"]).tanh(), p["second"])


def tied(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(F.linear(x, p["first"], p["a"]).tanh(), p["first"], p["b"])


def used_besides(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return two_layers(p, x) + p["second"].square().mean()


def one_transpose_for_two(p: dict[str, Tensor], x: Tensor) -> Tensor:
    transposed = p["second"].t()
    return (x + p["a"]) @ transposed + (x + p["b"]) @ transposed


def not_transposed(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(x, p["first"], p["a"]) @ p["second"]


def times_two(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.addmm(p["a"], x, p["first"].t(), alpha=2)


def computed_again(p: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = checkpoint(lambda x: F.linear(x, p["first"], p["a"]), x, use_reentrant=False)
    return F.linear(hidden, p["second"], p["b"])


def kept_elsewhere(p: dict[str, Tensor], x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return two_layers(p, x)


def in_bfloat16(p: dict[str, Tensor], x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return two_layers(p, x)


def of_one_sum(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The gradient of the layer is one number, expanded."""
    return F.linear(x, p["first"], p["a"]).sum()


def of_sequences(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return two_layers(p, torch.stack([x, 2 * x], 1))


def of_sequences_not_contiguous(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return two_layers(p, torch.stack([x, 2 * x]).transpose(0, 1))


def second_unused(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(x, p["first"], p["a"])


def made_by_a_function(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The node of a function holds a leaf as one that accumulates its gradient does."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            ctx.variable = weight
            return (weight * 8).round() / 8

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 3 * gradient

    return F.linear(F.linear(x, p["first"], p["a"]).tanh(), Rounded.apply(p["second"]), p["b"])


def of_a_sparse_input(p: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = F.linear(x.relu().to_sparse(), p["first"], p["a"])
    return F.linear(hidden, p["second"], p["b"])


def passed_twice(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """A function whose backward differentiates the same layer, within the backward pass."""
    hidden = F.linear(x, p["first"], p["a"])

    def backward(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            total = hidden.square().sum()
        return gradient * torch.autograd.grad(total, p["a"], retain_graph=True)[0].mean()

    return F.linear(copied(hidden, backward), p["second"], p["b"])


# function -> the leaves whose gradients are written in place
PROGRAMS: dict[Callable[..., Tensor], set[str]] = {
    two_layers: {"first", "second"},
    without_biases: set(),
    without_a_bias_in_the_middle: {"first", "second"},
    tied: set(),
    used_besides: {"first"},
    one_transpose_for_two: set(),
    not_transposed: {"first"},
    times_two: set(),
    computed_again: {"second"},
    kept_elsewhere: set(),
    in_bfloat16: set(),
    of_one_sum: {"first"},
    of_sequences: {"first", "second"},
    of_sequences_not_contiguous: {"second"},
    second_unused: {"first"},
    made_by_a_function: {"first"},
    of_a_sparse_input: {"second"},
    passed_twice: {"first", "second"},
}


def with_a_hook(p: dict[str, Tensor], x: Tensor) -> Tensor:
    p["first"].register_hook(lambda gradient: 3 * gradient)
    return two_layers(p, x)


def with_a_hook_on_a_layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = F.linear(x, p["first"], p["a"])
    hidden.register_hook(lambda gradient: 3 * gradient)
    return F.linear(hidden, p["second"], p["b"])


def with_a_hook_on_a_node(p: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = F.linear(x, p["first"], p["a"])
    hidden.grad_fn.register_hook(lambda made, given: tuple(None if g is None else 3 * g for g in made))
    return F.linear(hidden, p["second"], p["b"])


def with_a_hook_below_a_node(p: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = F.linear(x, p["first"], p["a"])
    accumulation = hidden.grad_fn.next_functions[-1][0].next_functions[0][0]
    accumulation.register_prehook(lambda given: tuple(3 * g for g in given))
    return F.linear(hidden, p["second"], p["b"])


def with_a_hook_on_a_transpose(p: dict[str, Tensor], x: Tensor) -> Tensor:
    transposed = p["first"].t()
    transposed.register_hook(lambda gradient: 3 * gradient)
    return F.linear(torch.addmm(p["a"], x, transposed), p["second"], p["b"])


HOOKED = [
    with_a_hook,
    with_a_hook_on_a_layer,
    with_a_hook_on_a_node,
    with_a_hook_below_a_node,
    with_a_hook_on_a_transpose,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_which_leaves(program: Callable[..., Tensor]) -> None:
    p = {name: leaf.requires_grad_() for name, leaf in leaves().items()}
    loss = program(p, batch()).square().mean()
    found = {id(weight.leaf) for weight in linear_weights([loss], p.values(), p.values(), [])}
    assert {name for name, leaf in p.items() if id(leaf) in found} == PROGRAMS[program]


def test_only_what_is_wanted_and_not_looked_at() -> None:
    p = {name: leaf.requires_grad_() for name, leaf in leaves().items()}
    loss = two_layers(p, batch()).square().mean()
    assert not linear_weights([loss], p.values(), [], [])
    with torch.autograd.set_detect_anomaly(True):
        assert not linear_weights([loss], p.values(), p.values(), [])


def equal(x: Any, y: Any) -> bool:
    return all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize("program", [*PROGRAMS, *HOOKED], ids=lambda program: program.__name__)
def test_same_bits_as_torch(shared_mesh: Callable[..., Mesh], program: Callable[..., Tensor]) -> None:
    mesh = shared_mesh({"data": 2})

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return program(p, x).square().mean()

    @spmd(mesh=mesh, in_specs=(P(), P("data")))
    def both(p: dict[str, Tensor], x: Tensor) -> Any:
        mine = {name: leaf.detach().requires_grad_() for name, leaf in p.items()}
        loss(mine, x).backward(torch.tensor(0.5))
        wanted = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in mine.items()}
        return grad(loss)(p, x), psum(wanted, "data")

    found, wanted = both(leaves(), batch(8))
    assert equal({n: x.full() for n, x in found.items()}, {n: x.full() for n, x in wanted.items()})


def counted(program: Callable[..., Tensor], p: dict[str, Tensor], x: Tensor) -> int:
    """How many gradients were written in place."""
    written = []
    plain = _sums.Sums.fill_product

    def fill_product(self: Any, place: Any, *factors: Tensor) -> None:
        plain(self, place, *factors)
        written.append(place)

    _sums.Sums.fill_product = fill_product  # type: ignore[method-assign]
    try:
        grad(lambda p, x: program(p, x).square().mean())(p, x)
    finally:
        _sums.Sums.fill_product = plain  # type: ignore[method-assign]
    return len(written)


def test_they_are_written_in_place(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})
    assert mesh.run(counted, two_layers, leaves(), batch()) == [2, 2]
    small = {name: leaf[:8, :8] if leaf.dim() == 2 else leaf[:8] for name, leaf in leaves().items()}
    assert mesh.run(counted, two_layers, small, batch()[:, :8]) == [0, 0]
    assert mesh.run(data_parallel(counted, batch="x"), two_layers, leaves(), batch()) == [2, 2]


@pytest.mark.parametrize("program", HOOKED, ids=lambda program: program.__name__)
def test_not_where_the_function_made_hooks(shared_mesh: Callable[..., Mesh], program: Callable[..., Tensor]) -> None:
    assert shared_mesh({"data": 2}).run(counted, program, leaves(), batch()) == [0, 0]


@pytest.mark.parametrize("samples", [1, 3])
def test_ranks_with_fewer_samples_or_none(shared_mesh: Callable[..., Mesh], samples: int) -> None:
    mesh, x = shared_mesh({"data": 2}), batch(samples)

    def loss(p: dict[str, Tensor], batch: Tensor) -> Tensor:
        return two_layers(p, batch).square().mean()

    step = spmd(data_parallel(lambda p, batch: value_and_grad(loss)(p, batch)), mesh=mesh)
    value, found = step(leaves(), x)
    wanted_value, wanted = value_and_grad(loss)(leaves(), x)
    torch.testing.assert_close(value.full(), wanted_value)
    torch.testing.assert_close({name: leaf.full() for name, leaf in found.items()}, wanted)


def test_a_rank_that_leaves_a_layer_out(shared_mesh: Callable[..., Mesh]) -> None:
    mesh, x = shared_mesh({"data": 2}), batch()

    @spmd(mesh=mesh, in_specs=(P(), P(), P("data")))
    def step(p: dict[str, Tensor], x: Tensor, which: Tensor) -> Any:
        program = two_layers if which.item() else second_unused
        return grad(lambda p: program(p, x).square().mean())(p)

    found = step(leaves(), x, torch.tensor([1, 0]))
    one, other = (
        grad(lambda p, program=program: program(p, x).square().mean())(leaves())
        for program in (two_layers, second_unused)
    )
    torch.testing.assert_close({n: g.full() for n, g in found.items()}, {n: (one[n] + other[n]) / 2 for n in one})


def test_an_input_that_was_overwritten_is_an_error(shared_mesh: Callable[..., Mesh]) -> None:
    def step(p: dict[str, Tensor], x: Tensor) -> Any:
        def loss(p: dict[str, Tensor]) -> Tensor:
            hidden = x * 2
            y = F.linear(hidden, p["first"], p["a"])
            hidden.add_(1)
            return y.sum()

        return grad(loss)(p)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        shared_mesh({"data": 2}).run(step, leaves(), batch())


def test_a_backward_pass_that_fails_leaves_nothing(shared_mesh: Callable[..., Mesh]) -> None:
    def step(p: dict[str, Tensor], x: Tensor) -> bool:
        held = []

        def fail(gradient: Tensor) -> Tensor:
            raise ValueError("on purpose")

        def loss(p: dict[str, Tensor]) -> Tensor:
            held.append(weakref.ref(p["first"]))
            return F.linear(copied(F.linear(x, p["first"], p["a"]), fail), p["second"], p["b"]).sum()

        with contextlib.suppress(ValueError):
            grad(loss)(p)
        gc.collect()
        return held[0]() is None

    assert shared_mesh({"data": 2}).run(step, leaves(), batch()) == [True, True]


def test_under_a_wire_dtype_they_are_copied(shared_mesh: Callable[..., Mesh]) -> None:
    mesh, x = shared_mesh({"data": 2}), batch()

    def step(p: dict[str, Tensor], batch: Tensor) -> Any:
        return grad(lambda p, x: two_layers(p, x).square().mean())(p, batch)

    found = spmd(data_parallel(step, wire_dtype=torch.bfloat16), mesh=mesh)(leaves(), x)
    wanted = step(leaves(), x)
    for name in wanted:
        torch.testing.assert_close(found[name].full(), wanted[name], rtol=0.02, atol=1e-4)
        assert found[name].dtype == torch.float32
