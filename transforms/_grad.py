"""`grad` and `value_and_grad`: the derivative of the mean over the mesh of a function's value.

Every rank seeds its backward pass with its weight (1/N, or its share of a batch's samples), and each argument's
gradient is summed over the axes along which that argument is the same on all ranks. Section 4 of docs/architecture.md
has five numbers that tell this definition from others.
Outside any region there is one rank.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..kernels.arguments import check_function, checked_flag, whole
from ..kernels.callsite import public
from ..kernels.errors import SpecError
from ..kernels.torch_private import compiled_from, in_torch_func, untraced
from ..mesh import trees
from ..mesh.region import Region, current, note_differentiated
from ..mesh.replication.net import active
from ..mesh.spec import is_sharded
from ..mesh.strides import is_frozen
from ._arguments import Argument, is_inexact, prepare
from ._backward import Plain
from ._call import Call, Strategy, refuse_tangents
from ._empty_shards import EmptyShards
from ._named_axes import check_axis
from ._plan import Plan, plan_of
from ._tokens import in_gradient, refuse_recording
from .exact.gradient import Exact, applies
from .first_call import left_out


@public
def grad(f: Callable, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False, axes: Any = None) -> Callable:
    """The gradient of `f`'s mean over the mesh, as a function of the same arguments.

    >>> grad(lambda w, x: (w * x).sum())(torch.tensor(2.0), torch.tensor([3.0, 5.0]))
    tensor(8.)

    Args:
        f: returns a scalar tensor or a `mean_of`; with `has_aux`, a pair of that and anything else.
        argnums: which positional arguments to differentiate by.
        has_aux: `f` also returns auxiliary values, whose floating-point leaves are averaged over samples. A leaf with a
            row for each sample can't be averaged: return `Sharded(logits, P("data"))`, or reduce it.
        axes: the mesh axes of the mean: None for all, a name, a tuple of names; () is the purely local gradient. If
            `f` communicates over an axis that is left out, the gradient is that of the sum over this axis.

    Returns:
        A function that returns the gradient (a tuple for a tuple `argnums`), with the structure, shapes and dtypes of
        the argument, or (gradient, aux). Frozen, integer and unused leaves get zeros.

    In a `data_parallel(shards=)` step, the batch among `f`'s arguments is cut into virtual shards, and `f` is called
    once for each shard that this rank runs.

    In a `data_parallel` step the first evaluation is checked. Refused are sums over samples, aux with a row for each
    sample, parameters that `f` captures, unequal chunks of the batch, and gradients that are all zero. Sums and rows
    are not found on a mesh of one rank without `shards=`, nor where `f` communicates: see docs/losses.md.

    Raises:
        SpecError: `f`'s value is not a scalar, an argument does not exist, an axis does not exist, or aux that can't be
            averaged differs between ranks; the gradient is taken inside a transform of `torch.func` or under
            `torch.inference_mode`; under `data_parallel(shards=)` also: `f` uses the batch without having it as an
            argument, or communicates over the axis that the batch is split over.
    """
    return _taken(grad, f, argnums, has_aux, axes)


@public
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
    return _taken(value_and_grad, f, argnums, has_aux, axes)


def _taken(transform: Callable, f: Callable, argnums: Any, has_aux: bool, axes: Any) -> Callable:
    """What `grad` or `value_and_grad`, whichever `transform` is, makes of a function."""
    what, with_value = transform.__name__, transform is value_and_grad
    check_function(what, f, f"{what}(loss_fn)(params, batch)")
    names = () if axes is None or isinstance(axes, str) else axes
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        expected = "None, the name of a mesh axis, or a tuple of them"
        raise SpecError(f"{what} got bad axes", got=repr(axes), expected=expected)
    has_aux = checked_flag(what, "has_aux", has_aux)
    argnums = _numbers(argnums, f)
    if isinstance(f, Transformable):
        transform = functools.partial(transform, argnums=argnums, has_aux=has_aux, axes=axes)
        return f.transformed(transform, argnums, with_value, has_aux)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, found, aux = untraced(_differentiate)(f, argnums, has_aux, axes, args, kwargs)
        if with_value:
            return ((value, aux), found) if has_aux else (value, found)
        return (found, aux) if has_aux else found

    # With the attributes of a compiled function, it would be taken for that.
    return public(gradient, like=f, updated=functools.WRAPPER_UPDATES if compiled_from(f) is None else ())


class Transformable(abc.ABC):
    """A wrapped function: transforming it transforms the function inside, and wraps the result in the same way."""

    @abc.abstractmethod
    def transformed(self, transform: Callable, argnums: Any, with_value: bool, has_aux: bool) -> Callable:
        """Apply `transform`, a gradient with these arguments, to the function inside, and wrap the result again."""

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


# The compiler doesn't trace it: tape, hooks and buckets fit no graph.
def _differentiate(f: Callable, argnums: Any, has_aux: bool, axes: Any, args: tuple, kwargs: dict) -> tuple:
    name, region = getattr(f, "__name__", "the function"), current()
    _check_surroundings(name, region)
    refuse_tangents(name, (args, kwargs))
    chosen = _positions(argnums, len(args), name)
    plan = plan_of(region)
    over = () if region is None else region.session.layout.names if axes is None else _axes(axes)
    arguments, treedef, declares = prepare(f, tuple(args[number] for number in chosen), region, over)
    differentiated = [argument for argument in arguments if argument.primal is not None]
    leaves = [argument.leaf for argument in differentiated]
    if not leaves:
        _check_trainable(name, arguments, plan)
    note_differentiated(region, leaves)
    # A gradient that is part of an outer gradient's graph (ours or torch's own) needs a graph itself.
    nested = in_gradient() or any(leaf.grad_fn is not None for leaf in leaves)
    strategy = _strategy(region, plan, over, nested, (args, kwargs), name)
    made = strategy.primals(differentiated)
    for argument, primal in zip(differentiated, made, strict=True):
        argument.primal = primal
    primals = trees.unflatten(treedef, [a.leaf if a.primal is None else a.primal for a in arguments])
    if declares.any:
        primals = trees.map(lambda node: node.local if is_sharded(node) else node, primals, is_leaf=is_sharded)
    full = list(args)
    for number, primal in zip(chosen, primals, strict=True):
        full[number] = primal
    call = Call(f, name, has_aux, full, kwargs, arguments, declares.keys, region, plan, over, nested)
    value, gradients, aux = strategy.solve(call) if active() is None else left_out.solve(strategy, call)
    found = trees.unflatten(treedef, gradients)
    return value, found[0] if isinstance(argnums, int) else found, aux


def _check_surroundings(name: str, region: Region | None) -> None:
    """Refuse a gradient where torch would not see it, or could not take it."""
    if region is not None and not in_torch_func():
        refuse_recording(f"spmd's grad of {name}")  # `torch.func.linearize` records in forward mode
    if in_torch_func():
        raise SpecError(
            f"spmd's grad of {name} was called inside a transform of torch.func, which it cannot see through",
            remedy="use torch.func.grad there, and psum or pmean what comes out",
        )
    if torch.is_inference_mode_enabled():
        raise SpecError(
            f"spmd's grad of {name} was called under torch.inference_mode, where nothing can be differentiated",
            remedy="take the gradient outside of it",
        )


def _strategy(
    region: Region | None, plan: Plan, over: tuple[str, ...], nested: bool, arguments: tuple[tuple, dict], name: str
) -> Strategy:
    """How a gradient is taken: decided here, and nowhere below."""
    if region is not None and plan.virtual is not None and applies(region, plan, over, nested, arguments, name):
        return Exact()
    return EmptyShards(nested) if not nested and plan.leaves_ranks_out(region, over) else Plain(nested)


def _check_trainable(name: str, arguments: list[Argument], plan: Plan) -> None:
    """Refuse arguments without tensors, and in a step also arguments of which none can be trained."""
    given = [argument.leaf for argument in arguments if argument.leaf is not None]
    if given and not any(isinstance(leaf, torch.Tensor) for leaf in given):
        raise SpecError(
            f"{name} is differentiated by an argument without tensors",
            got=type(given[0]).__name__,
            expected="tensors, in dicts, lists, tuples, dataclasses, or in classes known to torch.utils._pytree",
            remedy="apply, params = functional(model) gives a model's parameters, torch.tensor(2.0) is a number's "
            "tensor; argnums= says which argument is meant",
        )
    if given and not any(is_inexact(leaf) for leaf in given):
        raise SpecError(
            f"{name} is differentiated by whole numbers alone, for which every gradient is zero",
            got=", ".join(sorted({str(leaf.dtype) for leaf in given if isinstance(leaf, torch.Tensor)})),
            expected="a floating-point or complex tensor among them",
            remedy="write torch.tensor(3.0) for torch.tensor(3), or x.float(); argnums= says which argument is meant",
        )
    if plan.samples:
        frozen = sum(is_frozen(leaf) for leaf in given)
        remedy = "pass params of apply, params = functional(model), where a frozen model needs "
        remedy += "model.requires_grad_(True) before; or argnums= for what is to be trained"
        if not arguments:
            remedy = "choose parameters by name, or by their module's requires_grad: here it is False for all, and the "
            remedy += "frozen ones are nn.Parameters"
        raise SpecError(
            f"{name} is differentiated in a step by nothing that can be trained",
            got=f"{len(arguments)} leaves, of which {frozen} are frozen parameters (requires_grad=False)",
            expected="floating-point tensors that are not frozen",
            remedy=remedy,
        )


def _numbers(argnums: Any, f: Callable) -> int | tuple[int, ...]:
    """`argnums` in Python's own integers."""
    several = isinstance(argnums, tuple | list | range)
    numbers = [whole(number) for number in (argnums if several else (argnums,))]
    found = tuple(number for number in numbers if number is not None)
    if len(found) < len(numbers):
        raise SpecError(
            f"grad got a bad argnums for {getattr(f, '__name__', 'the function')}",
            got=repr(argnums),
            expected="a position, or a tuple of them",
            remedy="write has_aux=True" if argnums is True else "write the number that the argument has, from 0",
        )
    return found if several else found[0]


def _positions(argnums: int | tuple[int, ...], count: int, name: str) -> tuple[int, ...]:
    chosen = argnums if isinstance(argnums, tuple) else (argnums,)
    if not all(-count <= number < count for number in chosen):
        raise SpecError(
            f"grad got a bad argnums for {name}",
            got=repr(argnums),
            expected=f"below {count} positional arguments",
            remedy="pass what is to be differentiated by position",
        )
    positions = tuple(number % count for number in chosen)
    if len(set(positions)) < len(positions):
        raise SpecError(f"grad got a bad argnums for {name}", got=repr(argnums), expected="each argument at most once")
    return positions


def _axes(axes: Any) -> tuple[str, ...]:
    return () if axes == () or axes == [] else check_axis("grad", axes)[1]
