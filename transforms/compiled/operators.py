"""The collectives as operators registered with torch, which its compiler puts into graphs as they are.

Each takes a tensor and a token, and gives a tensor and a token (see `_tokens`). A compiler may reorder operations that
don't depend on each other; tokens keep the collectives of all ranks, and their transposes, in the program's order.
An operator names its axes; which ranks these are, and how much this rank's samples weigh, it finds out when it runs.
The first leaf of a tree comes with the keys of the whole tree, which ranks compare.
Invariant: values and gradients are those of `_operations`. Only traced code uses these operators, since torch's
dispatch of a custom operator is slow in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.call import labelled
from ...kernels.communicator import Communicator
from ...kernels.errors import SpecError
from ...mesh import trees
from ...mesh.region import require
from .._named_axes import group
from .._operations import Broadcast, Collect, Exchange, Extreme, Gather, Permute, Scatter, Sum
from .._plan import current_plan
from .._tokens import Operation, forget_undefined, perform

Pair = tuple[Tensor, Tensor]
Shape = Callable[[Tensor, int], Sequence[int]]

_SCHEMA = "(Tensor x, Tensor token, str[] axes, SymInt size, bool backward, str[] keys{more}) -> (Tensor, Tensor)"


def _communicator(name: str, axes: Sequence[str], size: int) -> Communicator:
    comm = group(name, tuple(axes))[1]
    if comm.size != size:
        raise SpecError(
            f"{name} was compiled for another mesh",
            got=f"{comm.size} ranks along {tuple(axes)}",
            expected=size,
            remedy="torch.compiler.reset(), or compile a function of its own for each mesh",
        )
    return comm


def _done(operation: Operation, x: Tensor, backward: bool) -> Tensor:
    """The result of an operation, contiguous and in memory of its own, as the operator's fake promises."""
    x = forget_undefined(x, current_plan()) if backward else x
    result = perform(operation, x.detach())
    if result.data_ptr() == x.data_ptr() and result.numel():
        result = result.clone()
    return result.contiguous()


def _register(
    name: str,
    more: str,
    forward: Callable[..., Tensor],
    shape: Shape,
    backward: Callable[..., Any],
    *,
    saves: bool = False,
) -> Any:
    """Register one operator: `forward`, the shape of its result, and its gradient; `saves` as for `Operation`."""

    def run(x: Tensor, token: Tensor, axes: Sequence[str], size: int, back: bool, keys: Any, *rest: Any) -> Pair:
        comm = _communicator(name, axes, size)
        with labelled(f"of {trees.joined_keys(keys)}" if keys else ""):
            return forward(comm, x, back, tuple(axes), *rest), torch.zeros((), device="cpu")

    def fake(x: Tensor, token: Tensor, axes: Sequence[str], size: int, back: bool, keys: Any, *rest: Any) -> Pair:
        return x.new_empty(shape(x, size)), torch.zeros((), device="cpu")

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
        x, _, *ctx.given = inputs
        ctx.inexact = x.dtype.is_floating_point or x.dtype.is_complex
        if saves:
            ctx.save_for_backward(x, output[0])

    def gradient(ctx: Any, of_result: Tensor, of_token: Tensor) -> tuple[Any, ...]:
        axes, size, _, _, *rest = ctx.given
        nothing = (None,) * len(ctx.given)
        if not ctx.inexact:
            return None, of_token, *nothing
        return *backward(of_result, of_token, axes, size, rest, ctx.saved_tensors), *nothing

    schema = _SCHEMA.format(more=more)
    operator = torch.library.custom_op(f"spmd::{name}", run, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    operator.register_autograd(gradient, setup_context=setup)
    return operator


def _same(x: Tensor, size: int) -> Sequence[int]:
    return x.shape


def _linear(name: str, kind: Callable[..., Any], more: str = "", shape: Shape = _same, transpose: str = "") -> Any:
    """The operator of a linear operation, whose transpose takes the same further arguments (`more`)."""

    def forward(comm: Communicator, x: Tensor, backward: bool, axes: Any, *rest: Any) -> Tensor:
        return _done(kind(comm, *rest), x, backward)

    def gradient(of_result: Tensor, of_token: Tensor, axes: Any, size: int, rest: Any, saved: Any) -> Pair:
        operator = getattr(torch.ops.spmd, transpose or name)
        found: Pair = operator(of_result, of_token, axes, size, True, [], *rest)
        return found

    return _register(name, more, forward, shape, gradient)


psum = _linear("psum", Sum)
all_gather = _linear("all_gather", Gather, ", str along", lambda x, size: (size, *x.shape), transpose="psum_scatter")
psum_scatter = _linear("psum_scatter", Scatter, ", str along", lambda x, size: x.shape[1:], transpose="all_gather")
all_to_all = _linear("all_to_all", Exchange, ", str along")
pbroadcast = _linear("pbroadcast", Broadcast, ", int source", transpose="pbroadcast_gradient")
_collect = _linear("pbroadcast_gradient", Collect, ", int source", transpose="pbroadcast")


# -- pairs -------------------------------------------------------------------------------------------------------------


def _permuted(comm: Communicator, x: Tensor, backward: bool, axes: Any, sources: Any, targets: Any) -> Tensor:
    return _done(Permute(comm, tuple(zip(sources, targets, strict=True))), x, backward)


def _permuted_back(of_result: Tensor, of_token: Tensor, axes: Any, size: int, rest: Any, saved: Any) -> Pair:
    sources, targets = rest
    found: Pair = torch.ops.spmd.ppermute(of_result, of_token, axes, size, True, [], targets, sources)
    return found


ppermute = _register("ppermute", ", int[] sources, int[] targets", _permuted, _same, _permuted_back)


# -- means -------------------------------------------------------------------------------------------------------------


def _mean(comm: Communicator, x: Tensor, backward: bool, axes: tuple[str, ...], transposed: bool) -> Tensor:
    """`pmean` or its transpose: with unequal shares, ranks are weighted before the sum, in the transpose after it."""
    plan, sizes = current_plan(), require("pmean").session.layout.axes
    if not any(total % sizes[name] for name, (_, total) in plan.samples.items() if name in axes):
        return _done(Sum(comm, "avg"), x, backward)
    weight, any_samples = plan.weight(axes, sizes)
    if not transposed:
        return _done(Sum(comm), x * weight if any_samples else torch.zeros_like(x), backward)
    total = _done(Sum(comm), x, backward)
    return total * weight if any_samples else torch.zeros_like(total)


def _mean_back(of_result: Tensor, of_token: Tensor, axes: Any, size: int, rest: Any, saved: Any) -> Pair:
    found: Pair = torch.ops.spmd.pmean(of_result, of_token, axes, size, True, [], not rest[0])
    return found


pmean = _register("pmean", ", bool transposed", _mean, _same, _mean_back)


# -- extremes ----------------------------------------------------------------------------------------------------------


def _extreme(op: str) -> Any:
    def forward(comm: Communicator, x: Tensor, backward: bool, axes: Any) -> Tensor:
        return _done(Extreme(comm, op), x, backward)

    def gradient(of_result: Tensor, of_token: Tensor, axes: Any, size: int, rest: Any, saved: Any) -> Pair:
        """Divide the gradient equally among the ranks that hold the extreme."""
        x, extreme = saved
        total, token = torch.ops.spmd.psum(of_result, of_token, axes, size, True, [])
        holds = (x.detach() == extreme.detach()).to(x.dtype)
        holders, token = torch.ops.spmd.psum(holds, token, axes, size, False, [])
        return total * (holds / holders), token

    return _register(f"p{op}", "", forward, _same, gradient, saves=Extreme.saves)


pmax = _extreme("max")
pmin = _extreme("min")
