"""Torch's functions on `Array`s outside regions: they run on the ranks and give `Array`s.

An elementwise operation on values that are cut alike runs on every rank's shards, without communication. Any other one
follows DTensor's rules, which say what stays cut, and move the rest; where DTensor has no rule, it runs on whole
values. Invariant: the result is that of the same function on plain tensors, whatever the specs. Nothing waits here,
except for results that are no tensors, and for @spmd functions whose results are cut: their shards may have any sizes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch

from ...kernels.errors import MeshError, SpecError, SpmdError
from ...kernels.torch_private import in_forward_mode, in_torch_func, run_as_written
from .. import trees
from ..ambient import refuse_tangents
from ..array import FREEZE, WAY, Array, Meta, refuse_gradients
from ..calling import Callee, HasRefs, call
from ..mesh import Mesh
from ..program import Program
from ..purity.writes import written_by
from ..put import as_tensor, fetch, is_array
from ..rank.operation import KINDS, UNWRITTEN, Operation, Way
from ..region import current
from ..request import Request
from ..spec import RAGGED, Layout, P

# Elementwise functions of torch, by the names of functions, methods or operators.
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
    "lshift", "rlshift", "rshift", "rrshift", "type", "where", "xlogy", "zeros_like",
))
# fmt: on
# Operators that change their first argument, beside those that torch calls by the names of methods such as `add_`.
_IN_PLACE = ("__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")
# Operators whose name in Python is not torch's name for the function.
_NAMES = {"__invert__": "bitwise_not", "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor"}
# Functions whose result's shape depends on values, as for some indices; see `_is_sized_by_values`.
_SIZED_BY_VALUES = frozenset(
    ("argwhere", "bincount", "masked_select", "nonzero", "one_hot", "repeat_interleave", "unique", "unique_consecutive")
)
_FLAGS = (torch.bool, torch.uint8)  # an index of these dtypes selects elements


def _mT(x: torch.Tensor) -> torch.Tensor:  # torch has no function that refuses the same tensors
    return x.mT


def _H(x: torch.Tensor) -> torch.Tensor:
    return x.H


# Attributes of a tensor that are not called.
ATTRIBUTES: dict[str, Callable[[Array], Any]] = {
    "real": lambda x: torch.real(x),  # type: ignore[arg-type]
    "imag": lambda x: torch.imag(x),  # type: ignore[arg-type]
    "T": lambda x: x.permute(tuple(reversed(range(x.ndim)))),
    "mT": lambda x: operate(_mT, (x,), {}),
    "mH": lambda x: x.adjoint(),
    "H": lambda x: operate(_H, (x,), {}),
    "device": lambda x: torch.device(x.mesh.device),
    "layout": lambda x: torch.strided,
    "itemsize": lambda x: x.dtype.itemsize,
    "nbytes": lambda x: x.numel() * x.dtype.itemsize,
    "data": lambda x: x,  # whose value never changes
    "is_cpu": lambda x: torch.device(x.mesh.device).type == "cpu",
    "is_cuda": lambda x: torch.device(x.mesh.device).type == "cuda",
    "is_leaf": lambda x: True,
    "is_nested": lambda x: False,
}
_OF_GRADIENTS = frozenset(
    ("backward", "grad", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad")
)
_ALONE = trees.flatten(((0,), {}))[1]  # one argument, and nothing else


def operate(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that was given an Array.

    Within a region, which may refer to Arrays of the program, it is called on their values there.

    Raises:
        SpecError: the Arrays are on different meshes, or the function would change one, or is about gradients.
        MeshError: called within a region, and an Array is cut.
    """
    name = _name_of(func)
    leaves, treedef = trees.flatten((args, kwargs))
    mesh = _mesh_of(name, args, kwargs, leaves)
    written = _written(func, name, args, kwargs)
    if written is not None and any(map(is_array, trees.leaves(written, is_leaf=is_array))):
        _refuse_write(name, inplace=kwargs.get("inplace"))
    if current() is not None:
        args, kwargs = trees.unflatten(treedef, [_here(name, leaf) for leaf in leaves])
        return func(*args, **kwargs)
    if written is not None:
        return func(*fetch(args), **fetch(kwargs))
    if mesh.is_driver and any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise SpecError(
            f"torch's {name} would draw on the ranks from copies of a generator, which itself would stay as it was",
            remedy="leave generator= out, the mesh's seed= then decides; or draw here, from x.full(), and put that",
        )
    if any(isinstance(leaf, np.ndarray) for leaf in leaves):
        leaves = list(map(as_tensor, leaves))
        args, kwargs = trees.unflatten(treedef, leaves)
    dtype = _dtype_of_other(args, kwargs) if name in ("to", "type_as") else None
    if dtype is not None:
        func, name, args, kwargs = torch.Tensor.to, "to", (args[0], dtype), {}
        leaves, treedef = trees.flatten((args, kwargs))
    is_sure = _be_sure(leaves)
    layout = mesh.layout
    way, specs, out = _way(layout, name, treedef, tuple(map(_kind_of, leaves)))
    # How results are cut may depend on a number (a dropout's), and known results are looked up by program.
    numbers = () if name in _ELEMENTWISE else tuple(leaf for leaf in leaves if isinstance(leaf, float))
    program, operation = _program(func, name, way, out, numbers)

    def request(mesh: Mesh, args: tuple, kwargs: dict[str, Any]) -> Request:
        return Request(mesh, name, args, kwargs, specs, None)

    try:
        with mesh.run_state.aside():
            callee = Callee(program, func, request, "never", operation)
            results = call(mesh, callee, (args, kwargs), (leaves, treedef))
            if _is_sized_by_values(name, leaves):  # the shape of the last result says nothing
                for result in trees.leaves(results, is_leaf=is_array):
                    _ = result.shape
            for result in filter(is_array, trees.leaves(results)):
                result._source.sure |= is_sure
    except HasRefs:
        problem = f"torch's {name} was given a Ref, the result of a remote call"
        raise SpecError(problem, remedy="give it the value, ref.get()") from None
    except SpmdError:
        if mesh.layout is layout:
            raise
    if mesh.layout is not layout:  # it was resized by this call, or by another thread: Arrays are cut otherwise now
        return operate(func, args, kwargs)
    return results


def _mesh_of(name: str, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> Mesh:
    """The mesh on which to call a function of torch; refuses what can't be called with these arguments, or here."""
    if name in _OF_GRADIENTS:
        freezes = name == "requires_grad_" and False in (*args[1:], *kwargs.values())
        refuse_gradients(f"{name} was asked of an Array", FREEZE if freezes else WAY)
    if in_torch_func() and current() is None:
        raise SpecError(
            f"a transform of torch.func (grad, vmap, ...) came to {name} of an Array, which it can't follow",
            remedy=f"use it in an @spmd function, on tensors; gradients: {WAY}",
        )
    if in_forward_mode():
        refuse_tangents(f"torch's {name} of an Array", leaves)
    arrays = [leaf for leaf in leaves if type(leaf) is Array]
    mesh = arrays[0].mesh
    if any(array.mesh is not mesh for array in arrays):
        closed = any(array.mesh.closed for array in arrays)
        remedy = "fetch values with .full() before their mesh is closed" if closed else ""
        problem = f"torch's {name} was given Arrays of different meshes{', of which one is closed' if closed else ''}"
        raise SpecError(problem, remedy=remedy or "move one with put(x.full(), mesh=...)")
    return mesh


def _here(name: str, leaf: Any) -> Any:
    """The value of an Array that is whole, on this rank."""
    if type(leaf) is not Array:
        return leaf
    if leaf.spec.entries:
        problem, remedy = f"torch's {name} was given an Array that is cut", "use its .local, this rank's shard, there"
        raise MeshError(f"{problem}, in a region", got=repr(leaf), remedy=remedy)
    return leaf.local


def _refuse_write(name: str, *, inplace: Any) -> NoReturn:
    if name == "setitem":
        remedy = "write x = torch.where(here, y, x)"
    elif inplace:
        remedy = "leave inplace=True out"
    else:
        remedy = "write x = x + y"
    problem = f"torch's {name} would change an Array, whose value never changes"
    raise SpecError(problem, remedy=f"{remedy}, or change a tensor in an @spmd function")


run_as_written([operate, *map(inspect.unwrap, filter(inspect.isfunction, vars(Array).values()))])  # no tensors to trace


def _be_sure(leaves: list[Any]) -> bool:
    """Wait for @spmd functions if some results are cut: how depends on all shapes, and ranks could not tell others.

    Returns whether the shapes of all are known.
    """
    arrays = [leaf for leaf in leaves if type(leaf) is Array]
    is_sure = all(array._source.sure for array in arrays)
    if not is_sure and any(array.hint().spec.entries for array in arrays):
        for array in arrays:
            _ = array.shape
        return True
    return is_sure


def _kind_of(leaf: Any) -> Meta | tuple[int, ...] | None:
    """What decides how a function is called, of each argument: an Array's shape and spec, a tensor's shape."""
    if type(leaf) is Array:
        return leaf.hint()
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None


@functools.lru_cache(maxsize=KINDS)
def _way(layout: Layout, name: str, treedef: Any, kinds: tuple[Any, ...]) -> tuple[Way, Any, P]:
    """How a function is called on the ranks, how its arguments are cut first, and how its result is cut."""
    metas = {index: kind for index, kind in enumerate(kinds) if isinstance(kind, Meta)}
    shapes = {index: getattr(kind, "shape", kind) for index, kind in enumerate(kinds) if kind is not None}
    cut = {index: meta.spec for index, meta in metas.items() if meta.spec.entries}
    if not cut:
        return Way.WHOLE, None, P()
    elementwise = name in _ELEMENTWISE and (name != "where" or len(kinds) > 1)  # else `where` gives indices
    specs = _alike(layout, len(kinds), shapes, metas) if elementwise else None
    if specs is not None:
        return Way.OWN, trees.unflatten(treedef, specs), next(iter(cut.values()))
    if name == "sum" and treedef == _ALONE:  # the sum of all elements, the most common reduction
        return Way.ADDED, None, P()
    even = all(metas[index].shards is None and _is_even(layout, shapes[index], spec) for index, spec in cut.items())
    return Way.RULES if even else Way.WHOLE, None, P()


def _alike(layout: Layout, leaves: int, shapes: dict[int, tuple], metas: dict[int, Meta]) -> list[P | None] | None:
    """How to cut arguments so that each rank computes its own elements; None if the Arrays are not cut alike."""
    cut = {index: meta.spec for index, meta in metas.items() if meta.spec.entries}
    (spec, whole, shards), *others = {(spec, shapes[index], metas[index].shards) for index, spec in cut.items()}
    if others or RAGGED in whole or not _are_within(whole, shapes.values()):
        return None
    specs: list[P | None] = [None] * leaves
    for index, shape in shapes.items():
        if index in cut:
            specs[index] = spec
            continue
        missing = len(whole) - len(shape)
        own = [
            spec.entries[missing + dim] if missing + dim < len(spec.entries) and size > 1 else None
            for dim, size in enumerate(shape)
        ]
        specs[index] = theirs = P(*own)  # each rank takes the elements that match its shard
        if theirs.entries and shards is not None:
            return None
        parts = [layout.parts(theirs.dim_axes(dim)) for dim in range(len(own))]
        if any(size % count for size, count in zip(shape, parts, strict=True)):
            return None  # uneven shards can't be matched in this way
    return specs


def _are_within(whole: tuple[int, ...], shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether all shapes broadcast to `whole`; if not, the function on whole values will say what is wrong."""
    try:
        return torch.broadcast_shapes(*shapes) == whole
    except RuntimeError:
        return False


def _is_even(layout: Layout, shape: tuple[int, ...], spec: P) -> bool:
    """Whether DTensor can represent these cuts: even shards, with axes in mesh order."""
    if RAGGED in shape or 0 in shape:  # torch's rule for views of tensors without elements may never end
        return False
    names = layout.names
    axes = [spec.dim_axes(dim) for dim in range(len(spec.entries))]
    return all(
        shape[dim] % layout.parts(own) == 0 and list(own) == sorted(own, key=names.index)
        for dim, own in enumerate(axes)
    )


@functools.lru_cache(maxsize=KINDS)
def _program(func: Callable, name: str, way: Way, out: P, numbers: tuple[float, ...]) -> tuple[Program, Operation]:
    operation = Operation(func, way)
    return Program(operation, out, name, UNWRITTEN), operation


def _is_sized_by_values(name: str, leaves: list[Any]) -> bool:
    """Whether the result's shape depends on values, and not only on the arguments' shapes."""
    if name == "getitem":
        return any(map(_selects, leaves[1:]))
    if name == "where":
        return len(leaves) == 1
    return name in _SIZED_BY_VALUES


def _selects(index: Any) -> bool:
    if isinstance(index, slice):
        return any(map(_is_value, (index.start, index.stop, index.step)))
    return _is_value(index) and (index.hint().dtype if type(index) is Array else index.dtype) in _FLAGS


def _is_value(x: Any) -> bool:
    return isinstance(x, torch.Tensor | Array)


def _dtype_of_other(args: tuple, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The other tensor's dtype in `x.to(other)`; its device doesn't count, since a mesh's values are on its device."""
    other = kwargs.get("other", args[1] if len(args) > 1 else None)
    return other.dtype if isinstance(other, torch.Tensor | Array) else None


def _name_of(func: Callable) -> str:
    own = getattr(func, "__name__", str(func))
    name = _NAMES.get(own, own)
    return name.strip("_") if name.startswith("__") else name


def _written(func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> list[Any] | None:
    """Which arguments a function changes, by an operator's schema or torch's naming rule; None if it changes none."""
    operators = [getattr(func, each) for each in func.overloads()] if hasattr(func, "overloads") else [func]
    if hasattr(operators[0], "overloadpacket"):  # of `torch.ops`
        written = [value for one in operators for _, value in written_by(one, args, kwargs)]
        return [value for value in written if value is not None] or None
    own = getattr(func, "__name__", "")
    named = own in _IN_PLACE or (name.endswith("_") and not own.startswith("__"))
    if named or kwargs.get("inplace"):
        return [*args, *kwargs.values()][:1]  # `torch.nn.init` passes on everything by name, the tensor first
    return None if kwargs.get("out") is None else [kwargs["out"]]
