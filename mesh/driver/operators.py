"""Torch's functions on `Array`s, in the process that drives the ranks: they run on the ranks and give `Array`s.

An operation that works element by element on values that are cut alike runs on every rank's shards, with nothing
beside it; any other one by DTensor's rules, which say what stays cut and move the rest; and what these do not know, on
whole values. Invariant: the result is that of the same function on the plain tensors, whatever the specs. Nothing waits
here, but for results that are no tensors.
"""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from ...kernels.errors import MeshError, SpecError, message
from .. import trees
from ..array import Array, refuse_ragged
from ..calling import call
from ..program import Program
from ..put import as_tensor, fetch, is_array
from ..rank.session import RankSession
from ..region import current, require, reseed
from ..request import Request
from ..spec import RAGGED, P, ragged_shape

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
    args, kwargs = trees.map(as_tensor, (args, kwargs), is_leaf=is_array)
    way, specs, out = _way(mesh, name, args, kwargs)
    program, operation = _program(func, name, way, out)
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


class _Way(enum.Enum):
    """What a rank gives a function: its shards as they are, its shards by DTensor's rules, or whole values."""

    OWN, RULES, WHOLE = "own", "rules", "whole"


def _way(mesh: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[_Way, Any, P]:
    """How a function is called on the ranks, how its arguments are cut first, and how its result is cut."""
    leaves, treedef = trees.flatten((args, kwargs), is_leaf=is_array)
    found = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor | Array)]
    shapes = {index: tuple(_shape(leaves[index])) for index in found}
    cut = {index: leaves[index].hint().spec for index in found if is_array(leaves[index])}
    cut = {index: spec for index, spec in cut.items() if spec.entries}
    if not cut:
        return _Way.OWN, None, P()
    specs = _alike(mesh, leaves, shapes, cut) if name in _ELEMENTWISE else None
    if specs is not None:
        return _Way.OWN, trees.unflatten(treedef, specs), next(iter(cut.values()))
    even = all(_is_even(mesh, shapes[index], spec) for index, spec in cut.items())
    return _Way.RULES if even else _Way.WHOLE, None, P()


def _alike(mesh: Any, leaves: list[Any], shapes: dict[int, tuple], cut: dict[int, P]) -> list[P | None] | None:
    """How to cut arguments such that each rank computes its own elements; None if what is cut differs."""
    (spec, whole), *others = {(spec, shapes[index]) for index, spec in cut.items()}
    if others or RAGGED in whole or torch.broadcast_shapes(*shapes.values()) != whole:
        return None
    specs: list[P | None] = [None] * len(leaves)
    for index in set(shapes) - set(cut):
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
    return specs


def _is_even(mesh: Any, shape: tuple[int, ...], spec: P) -> bool:
    """Whether DTensor knows such cuts."""
    if RAGGED in shape:
        return False
    names = mesh.layout.names
    axes = [spec.dim_axes(dim) for dim in range(len(spec.entries))]
    return all(
        shape[dim] % mesh.layout.parts(own) == 0 and list(own) == sorted(own, key=names.index)
        for dim, own in enumerate(axes)
    )


def _shape(leaf: Any) -> tuple[int, ...]:
    return leaf.hint().shape if isinstance(leaf, Array) else leaf.shape


@functools.lru_cache(maxsize=_KINDS)
def _program(func: Callable, name: str, way: _Way, out: P) -> tuple[Program, _Operation]:
    operation = _Operation(func, way)
    return Program(operation, out, name), operation


class _Operation:
    """What a rank does: the function itself, with the same random numbers on all ranks."""

    def __init__(self, func: Callable, way: _Way):
        self.func, self._way = func, way
        self._has_rule: dict[Any, bool] = {}  # for kinds of arguments, on this rank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region = require("an operation on Arrays")
        kind = _kind(args, kwargs) if self._way is _Way.RULES else None
        if kind is not None and self._has_rule.get(kind, True):
            # By name: torch's DTensor stands above this file.
            propagation = importlib.import_module("spmd.torch_distributed.propagation")
            if len(self._has_rule) >= _KINDS:
                self._has_rule.clear()
            try:
                result = propagation.on_shards(region, self.func, args, kwargs, first=kind not in self._has_rule)
                self._has_rule[kind] = True
                return result
            except propagation.NeedsWhole:
                self._has_rule[kind] = False
        if self._way is not _Way.OWN:
            args, kwargs = trees.map(functools.partial(_whole, region.session), (args, kwargs))
        reseed(region)
        return self.func(*args, **kwargs)


def _kind(args: tuple, kwargs: dict[str, Any]) -> Any:
    """What settles whether there is a rule."""
    leaves, treedef = trees.flatten((args, kwargs))
    return treedef, *(
        (_spec(leaf), leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    )


def _spec(leaf: torch.Tensor) -> P:
    spec: P = leaf._spmd_spec  # type: ignore[attr-defined]
    return spec


def _whole(session: RankSession, leaf: Any) -> Any:
    """A whole value on each rank, of all its shards."""
    if not isinstance(leaf, torch.Tensor) or not _spec(leaf).entries:
        return leaf
    comm, spec, mine = session.comm(), _spec(leaf), leaf.detach().cpu()
    sizes = [torch.empty(mine.dim(), dtype=torch.int64) for _ in range(comm.size)]
    comm.all_gather(sizes, torch.tensor(mine.shape))
    shapes = [tuple(size.tolist()) for size in sizes]
    refuse_ragged(ragged_shape(mine.shape, shapes, spec))
    shards = [torch.empty(shape, dtype=mine.dtype) for shape in shapes]
    comm.all_gather(shards, mine)
    return session.placed(session.layout.join(shards, spec))


def _name_of(func: Callable) -> str:
    name = getattr(func, "__name__", str(func))
    name = _NAMES.get(name, name)
    return name.strip("_") if name.startswith("__") else name


def _writes(func: Callable, name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes what it is given, by torch's rule for names."""
    own = getattr(func, "__name__", "")
    return (name.endswith("_") and not own.startswith("__")) or own == "__setitem__" or kwargs.get("out") is not None
