"""Torch's functions on `Array`s, in the process that drives the ranks: they run on the ranks and give `Array`s.

An operation that works element by element runs on every rank's shards, cut as they are; any other one on whole values,
which every rank is given first. Invariant: the result is that of the same function on the plain tensors, whatever the
specs. Nothing waits here, but for results that are no tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...kernels.errors import MeshError, SpecError, message
from .. import trees
from ..array import Array
from ..calling import call
from ..program import Program
from ..put import fetch, is_array, place
from ..region import current, require, reseed
from ..request import Request
from ..spec import RAGGED, P

# Functions of torch, as functions, methods or operators, that give each element from the elements at its place.
# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "absolute", "acos", "acosh", "add", "addcdiv", "addcmul", "asin", "asinh", "atan", "atan2", "atanh",
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bool", "ceil", "clamp", "clamp_max",
    "clamp_min", "clip", "clone", "copysign", "cos", "cosh", "deg2rad", "detach", "div", "divide", "double",
    "elu", "eq", "erf", "erfc", "exp", "exp2", "expm1", "fix", "float", "float_power", "floor", "floor_divide",
    "floordiv", "fmax", "fmin", "fmod", "frac", "ge", "gelu", "greater", "greater_equal", "gt", "half",
    "hardsigmoid", "hardswish", "hardtanh", "heaviside", "hypot", "int", "isclose", "isfinite", "isinf",
    "isnan", "isneginf", "isposinf", "le", "leaky_relu", "lerp", "less", "less_equal", "lgamma", "log", "log10",
    "log1p", "log2", "log_sigmoid", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor",
    "logit", "logsigmoid", "long", "lt", "maximum", "minimum", "mish", "mod", "mul", "multiply", "nan_to_num",
    "ne", "neg", "negative", "not_equal", "ones_like", "positive", "pow", "rad2deg", "radd", "rdiv",
    "reciprocal", "relu", "relu6", "remainder", "rfloordiv", "rmod", "rmul", "round", "rpow", "rsqrt", "rsub",
    "rtruediv", "selu", "sgn", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh", "softplus",
    "softsign", "sqrt", "square", "sub", "subtract", "tan", "tanh", "to", "true_divide", "truediv", "trunc",
    "type", "where", "xlogy", "zeros_like",
))
# fmt: on
# Python's names of operators that are torch's functions by another.
_NAMES = {"__invert__": "bitwise_not", "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor"}
_OF_GRADIENTS = frozenset(("backward", "grad", "requires_grad_", "register_hook", "retain_grad"))
_KINDS = 4096  # of operations and specs whose programs are kept


def operate(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that was given an Array.

    Raises:
        SpecError: the Arrays are on different meshes, or one is asked to change.
        MeshError: called within a region.
    """
    if _name_of(func) in _OF_GRADIENTS:
        raise SpecError(
            message(
                f"{_name_of(func)} was asked of an Array, whose gradients are not recorded",
                remedy="differentiate in an @spmd function: value_and_grad(loss_fn)(params, batch)",
            )
        )
    arrays = [leaf for leaf in trees.leaves((args, kwargs), is_leaf=is_array) if is_array(leaf)]
    mesh, name = arrays[0].mesh, _name_of(func)
    if current() is not None:
        raise MeshError(
            message(f"torch's {name} was given an Array in a region", remedy="use its .local, this rank's shard, there")
        )
    if any(array.mesh is not mesh for array in arrays):
        raise SpecError(
            message(
                f"torch's {name} was given Arrays of different meshes", remedy="move one with put(x.full(), mesh=...)"
            )
        )
    if _writes(func, name, kwargs):
        if is_array(args[0] if args else None) or any(map(is_array, trees.leaves(kwargs.get("out"), is_leaf=is_array))):
            raise SpecError(
                message(f"torch's {name} would change an Array, whose value never changes", remedy="write x = x + y")
            )
        return func(*fetch(args), **fetch(kwargs))
    cut = _cut(mesh, name, args, kwargs)
    if cut is None:
        args, kwargs = _whole(mesh, args), _whole(mesh, kwargs)
    specs, out = cut or (None, P())
    program, operation = _program(func, name, out)
    with mesh.run_state.aside():
        return call(
            mesh,
            program,
            operation,
            (args, kwargs),
            lambda: Request(mesh, name, args, kwargs, specs, None),
            check="never",
            holder=operation,
        )


def _cut(mesh: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, P] | None:
    """How arguments and result are cut where each rank computes its own elements; None where all need the whole."""
    leaves, treedef = trees.flatten((args, kwargs), is_leaf=is_array)
    found = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor | Array)]
    shapes = {index: tuple(_shape(leaves[index])) for index in found}
    cut = {index for index in found if is_array(leaves[index]) and leaves[index].hint().spec.entries}
    specs: list[P | None] = [None] * len(leaves)
    kinds = {(leaves[index].hint().spec, shapes[index]) for index in cut}
    if not kinds:
        return trees.unflatten(treedef, specs), P()
    (spec, whole), *others = kinds
    if name not in _ELEMENTWISE or others or RAGGED in whole or torch.broadcast_shapes(*shapes.values()) != whole:
        return None
    for index in set(found) - cut:
        missing = len(whole) - len(shapes[index])
        own = [
            spec.entries[missing + dim] if missing + dim < len(spec.entries) and size > 1 else None
            for dim, size in enumerate(shapes[index])
        ]
        if any(own):  # each rank takes the elements that go with its shard
            specs[index] = theirs = P(*own)
            parts = [mesh.layout.parts(theirs.dim_axes(dim)) for dim in range(len(own))]
            if any(size % count for size, count in zip(shapes[index], parts, strict=True)):
                return None  # uneven shards, which are not cut so
    return trees.unflatten(treedef, specs), spec


def _shape(leaf: Any) -> tuple[int, ...]:
    return leaf.hint().shape if isinstance(leaf, Array) else leaf.shape


def _whole(mesh: Any, tree: Any) -> Any:
    """A tree whose Arrays are the same on all ranks."""
    return trees.map(
        lambda leaf: place(mesh, leaf, P()) if is_array(leaf) and leaf.spec.entries else leaf, tree, is_leaf=is_array
    )


@functools.lru_cache(maxsize=_KINDS)
def _program(func: Callable, name: str, out: P) -> tuple[Program, _Operation]:
    operation = _Operation(func)
    return Program(operation, out, name), operation


class _Operation:
    """What a rank does: the function itself, with the same random numbers on all ranks."""

    def __init__(self, func: Callable):
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reseed(require("an operation on Arrays"))
        return self.func(*args, **kwargs)


def _name_of(func: Callable) -> str:
    name = getattr(func, "__name__", str(func))
    name = _NAMES.get(name, name)
    return name.strip("_") if name.startswith("__") else name


def _writes(func: Callable, name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes what it is given, by torch's rule for names."""
    own = getattr(func, "__name__", "")
    return (name.endswith("_") and not own.startswith("__")) or own == "__setitem__" or kwargs.get("out") is not None
