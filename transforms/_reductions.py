"""The named-axis reductions, with `jax.lax`'s semantics: functions of a tree of tensors, leaf by leaf, differentiable.

Invariant: all ranks of the axis make the same calls in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..kernels.callsite import public
from ..mesh.region import require
from ._named_axes import Axis, each_leaf, group, known
from ._operations import Extreme, Sum
from ._plan import current_plan
from ._tokens import run
from .compiled.tracing import each, traceable
from .first_call.means import warn_of_means


@public
def psum(x: Any, axis: Axis) -> Any:
    """Sum over the ranks along `axis`.

    On two ranks that hold 1.0 and 2.0, `psum(x, "data")` is 3.0 on both.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis; booleans are counted (int64).
        axis: mesh axis, or a tuple of them.

    Returns:
        The sum, same shape, on every rank of the axis; ranks are added in rank order.

    Raises:
        SpecError: no such axis. MeshError: outside a region. CollectiveMismatch: ranks disagree.
    """
    if is_dynamo_compiling() and traceable(x, axis, replicates=True):
        return each("psum", x, axis, before=counted)
    axes, comm = group("psum", axis)
    warn_of_means(x, axes)

    def one(leaf: Tensor) -> Tensor:
        return known(leaf, run(Sum(comm), counted(leaf)), same=axes)

    return each_leaf("psum", one, x)


@public
def pmean(x: Any, axis: Axis) -> Any:
    """Mean over the ranks along `axis`; of integers and booleans it is a float.

    On two ranks that hold 1.0 and 2.0, `pmean(x, "data")` is 1.5 on both.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them.

    Returns:
        The mean, same shape, on every rank of the axis. In a data_parallel step, over the axis that its batch is
        split over, ranks are weighted by their number of samples: the mean of means is that of the whole batch, and a
        rank without samples does not count.

    Raises:
        as `psum`.
    """
    if is_dynamo_compiling() and traceable(x, axis, replicates=True):
        return each("pmean", x, axis, False, before=_inexact)
    axes, comm = group("pmean", axis)
    plan, sizes = current_plan(), require("pmean").session.layout.axes
    # Whether the batch divides evenly is the same on all ranks; if it does, the plain mean is the weighted one.
    uneven = any(total % sizes[name] for name, (_, total) in plan.samples.items() if name in axes)

    def one(leaf: Tensor) -> Tensor:
        x = _inexact(leaf)
        if not uneven:
            return known(leaf, run(Sum(comm, "avg"), x), same=axes)
        weight, any_samples = plan.weight(axes, sizes)
        mine = x * weight
        if not any_samples:  # it may be NaN; what replaces it has a tangent, since all ranks sum the tangents, too
            mine = torch.where(torch.zeros_like(mine, dtype=torch.bool), mine, 0)
        return known(leaf, run(Sum(comm), mine), same=axes)

    return each_leaf("pmean", one, x)


@public
def pmax(x: Any, axis: Axis) -> Any:
    """Elementwise maximum over the ranks along `axis`.

    Args, Returns, Raises: as `psum`. The gradient goes to the ranks that hold the maximum, shared among ties.
    """
    return _extreme("pmax", "max", x, axis)


@public
def pmin(x: Any, axis: Axis) -> Any:
    """Elementwise minimum over the ranks along `axis`.

    Args, Returns, Raises: as `psum`. The gradient goes to the ranks that hold the minimum, shared among ties.
    """
    return _extreme("pmin", "min", x, axis)


def _extreme(name: str, op: str, x: Any, axis: Axis) -> Any:
    if is_dynamo_compiling() and traceable(x, axis, replicates=True):
        return each(name, x, axis)
    axes, comm = group(name, axis)
    return each_leaf(name, lambda leaf: known(leaf, run(Extreme(comm, op), leaf), same=axes), x)


def counted(leaf: Tensor) -> Tensor:
    """The tensor to sum: booleans become integers, so that the sum counts the true ones."""
    return leaf.to(torch.int64) if leaf.dtype is torch.bool else leaf


def _inexact(leaf: Tensor) -> Tensor:
    return leaf if leaf.dtype.is_floating_point or leaf.dtype.is_complex else leaf.to(torch.get_default_dtype())
