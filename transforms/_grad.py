"""`grad` and `value_and_grad`: the derivative of the mean over the mesh of a function's value.

Every rank seeds its backward with its weight (1/N, or its share of a batch's samples), and each argument's gradient
is summed over the axes along which that argument is the same on all ranks. Source: DESIGN section 4, which has the
five numbers that tell this calculus from others.
Outside any region there is one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.errors import SpecError, message
from ..mesh import trees
from ..mesh.region import Region, current
from ..mesh.spec import Sharded, is_sharded
from . import _empty_shards, _shard_gradients
from ._arguments import prepare
from ._auxiliary import Auxiliary
from ._backward import Evaluated, outermost, within_a_graph
from ._chain import chain, in_torch_func, linked, started
from ._dealt import Dealt, as_dealt
from ._linear_weights import hooks_so_far
from ._named_axes import differs_over, note, place


def grad(f: Callable, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False, axes: Any = None) -> Callable:
    """The gradient of `f`'s mean over the mesh, as a function of the same arguments.

    >>> grad(lambda w, x: (w * x).sum())(torch.tensor(2.0), torch.tensor([3.0, 5.0]))
    tensor(8.)

    Args:
        f: returns a scalar tensor, or with `has_aux` (scalar, anything).
        argnums: which positional arguments to differentiate by.
        has_aux: `f` also returns auxiliary values, whose floating-point leaves are averaged as the value is.
        axes: the mesh axes of the mean: None for all, a name, a tuple of names; () is the purely local gradient.

    Returns:
        A function that returns the gradient (a tuple for a tuple `argnums`), with the structure, shapes and dtypes of
        the argument, or (gradient, aux). Frozen, integer and unused leaves get zeros.

    In a step that is `data_parallel(shards=)` the arguments that are the step's batch are cut into virtual shards, and
    `f` is called once for each that this rank runs.

    Raises:
        SpecError: `f`'s value is not a scalar, an argument does not exist, an axis does not exist, aux that cannot be
            averaged differs between ranks; it is called inside a transform of `torch.func` or under
            `torch.inference_mode`; under `data_parallel(shards=)` also: `f` uses the batch without taking it, or
            communicates over the axis that the batch is split over.
    """
    lift = _lift_of(f)
    if lift is not None:
        return lift(functools.partial(grad, argnums=argnums, has_aux=has_aux, axes=axes), argnums, False, has_aux)

    @functools.wraps(f)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        _, found, aux = _differentiate(f, argnums, has_aux, axes, args, kwargs)
        return (found, aux) if has_aux else found

    return gradient


def value_and_grad(
    f: Callable, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False, axes: Any = None
) -> Callable:
    """`f`'s mean over the mesh and its gradient, as a function of the same arguments.

    >>> value_and_grad(lambda w, x: (w * x).sum())(torch.tensor(2.0), torch.tensor([3.0, 5.0]))
    (tensor(16.), tensor(8.))

    Args, Raises: as `grad`.

    Returns:
        A function that returns (value, gradient), or ((value, aux), gradient).
    """
    lift = _lift_of(f)
    if lift is not None:
        return lift(
            functools.partial(value_and_grad, argnums=argnums, has_aux=has_aux, axes=axes), argnums, True, has_aux
        )

    @functools.wraps(f)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        value, found, aux = _differentiate(f, argnums, has_aux, axes, args, kwargs)
        return ((value, aux), found) if has_aux else (value, found)

    return value_and_gradient


def _lift_of(f: Callable) -> Callable | None:
    """How a wrapped function takes a transform in; wrapped twice, it has the inner way among its attributes."""
    own = getattr(type(f), "_spmd_lift", None)
    return getattr(f, "_spmd_lift", None) if own is None else functools.partial(own, f)


def _differentiate(f: Callable, argnums: Any, has_aux: bool, axes: Any, args: tuple, kwargs: dict) -> tuple:
    name = getattr(f, "__name__", "the function")
    if in_torch_func():
        raise SpecError(
            message(
                f"spmd's grad of {name} was called inside a transform of torch.func, which it cannot see through",
                remedy="use torch.func.grad there, and psum or pmean what comes out",
            )
        )
    if torch.is_inference_mode_enabled():
        raise SpecError(
            message(
                f"spmd's grad of {name} was called under torch.inference_mode, where nothing can be differentiated",
                remedy="take the gradient outside of it",
            )
        )
    chosen = _positions(argnums, len(args), name)
    region = current()
    over = () if region is None else region.session.layout.names if axes is None else _axes(axes)
    arguments, treedef = prepare(tuple(args[number] for number in chosen), region, over)
    # A part of an outer gradient's graph, ours or torch's own, has to become one in turn.
    nested = linked() or any(a.twin is not None and a.leaf.grad_fn is not None for a in arguments)
    by_shards = _shard_gradients.applies(region, over, nested, (args, kwargs), name)
    for argument in arguments:
        if isinstance(argument.twin, Dealt):
            argument.twin = as_dealt(argument.leaf)  # to be told from the leaf in another argument
        elif argument.twin is not None:
            leaf = argument.leaf
            argument.twin = leaf.view_as(leaf) if nested and leaf.requires_grad else leaf.detach().requires_grad_()
            known = differs_over(leaf)
            if known is not None:
                note(argument.twin, known)
    twins = trees.unflatten(treedef, [a.leaf if a.twin is None else a.twin for a in arguments])
    twins = trees.map(lambda node: node.local if isinstance(node, Sharded) else node, twins, is_leaf=is_sharded)
    full = list(args)
    for number, twin in zip(chosen, twins, strict=True):
        full[number] = twin
    if by_shards:
        assert region is not None
        evaluate = functools.partial(_evaluated, f, has_aux, name)
        call = _shard_gradients.Call(evaluate, full, kwargs, name)
        value, gradients, aux = _shard_gradients.over_shards(call, arguments, region, over)
        found = trees.unflatten(treedef, gradients)
        return value, found[0] if isinstance(argnums, int) else found, aux
    hooks = hooks_so_far()
    with chain() as collectives:
        value, aux = _evaluate(f, full, kwargs, has_aux, name, None if nested else region, over)
        collectives.stop()
        hooked = hooks_so_far() > hooks
        evaluated = Evaluated(value, Auxiliary.of(aux, over), arguments, region, over, collectives, hooked)
        value, gradients, aux = (within_a_graph if nested else outermost)(evaluated)
    found = trees.unflatten(treedef, gradients)
    return value, found[0] if isinstance(argnums, int) else found, aux


def _positions(argnums: Any, count: int, name: str) -> tuple[int, ...]:
    chosen = tuple(argnums) if isinstance(argnums, tuple | list) else (argnums,)
    for number in chosen:
        if not isinstance(number, int) or not -count <= number < count:
            raise SpecError(
                message(
                    f"grad got a bad argnums for {name}",
                    got=argnums,
                    expected=f"below {count} positional arguments",
                    remedy="pass what is to be differentiated by position",
                )
            )
    return tuple(number % count for number in chosen)


def _axes(axes: Any) -> tuple[str, ...]:
    return () if axes == () or axes == [] else place("grad", axes)[1]


def _evaluated(f: Callable, has_aux: bool, name: str, args: list, kwargs: dict) -> tuple[Tensor, Any]:
    with torch.enable_grad():
        return _split(f(*args, **kwargs), has_aux, name)


def _evaluate(
    f: Callable, args: list, kwargs: dict, has_aux: bool, name: str, region: Region | None, over: tuple[str, ...]
) -> tuple[Tensor, Any]:
    """The function's value and aux (an empty tree without `has_aux`); in a `region`, of a rank without samples too."""
    may_fail = region is not None and _empty_shards.possible(region, over)
    failed, result, before = None, None, started()
    try:
        with torch.enable_grad():
            result = f(*args, **kwargs)
    except Exception as error:
        if not may_fail or region is None or region.weight(over)[1] or started() > before:
            raise
        failed = error
    if failed is None:
        with torch.enable_grad():
            result = _split(result, has_aux, name)
    if may_fail and region is not None:
        result = _empty_shards.stand_in(region, over, failed, result)
    assert result is not None
    return result


def _split(out: Any, has_aux: bool, name: str) -> tuple[Tensor, Any]:
    value, aux = out, ()
    if has_aux:
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise SpecError(
                message(
                    f"{name} must return (value, aux) under has_aux=True", got=type(out).__name__, expected="a pair"
                )
            )
        value, aux = out
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        got = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise SpecError(
            message(
                f"{name} must return a scalar to be differentiated",
                expected="a floating-point tensor with one element",
                got=got,
                remedy="reduce it with .mean() or .sum(); with auxiliary values use has_aux=True",
            )
        )
    return value.reshape(()), aux
