"""Operators: their schemas, those that a program defines, and modes that see every one that runs."""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace, _Ops
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .compiler import run_as_written

# What `torch.ops`, `torch.ops.aten`, `torch.ops.aten.add` and `torch.ops.aten.add.Tensor` are. Public way: `type(...)`.
ALL, Namespace, Packet, Overload = _Ops, _OpNamespace, OpOverloadPacket, OpOverload
CustomOperator = CustomOpDef  # what `torch.library.custom_op` returns
# The operator that `item` and `bool` of a tensor call. Public way: none, it has no other name.
ITEM = torch.ops.aten._local_scalar_dense
_OUTPUTS = {ITEM.default, torch.ops.aten.equal.default, torch.ops.aten.allclose.default}  # numbers, not tensors
_FIND_FAULTS = {"any", "isnan", "isinf"}  # in `if torch.any(x < 0): raise ...`
# What fake tensors raise where the shape of a result depends on values. Public way: none.
UnknownShape = DynamicOutputShapeException
# The logger to which fake tensors write the errors that they raise, too. Public way: none, loggers go by name.
FAKES_LOG = "torch._subclasses.fake_tensor"


Argument = namedtuple("Argument", "name kwarg_only is_written default_value")


@functools.cache  # torch makes new objects of a schema at each look
def arguments(operation: Any) -> tuple[Argument, ...]:
    """An operator's arguments, in order. Public way: none; names in "_" or with "out" miss some that it writes to."""
    found = [(one, one.alias_info) for one in operation._schema.arguments]
    return tuple(Argument(x.name, x.kwarg_only, bool(way and way.is_write), x.default_value) for x, way in found)


@functools.cache
def names_of(operator: Any) -> tuple[str, str | None]:
    """An operator's name, such as "aten::add", and its overload's; None if it stands for all overloads.

    Public way: parsing `str(operator)`.
    """
    if isinstance(operator, Packet):
        return operator._qualified_op_name, None
    return operator._schema.name, operator._overloadname


@functools.cache
def operation_name(operation: Any) -> str:
    """An operator's name without its namespace and overload: "add"."""
    return names_of(operation)[0].partition("::")[2]


@functools.cache  # torch makes a new list of tags at each look
def has_tag(operation: Any, tag: torch.Tag) -> bool:
    """Whether torch says something of an operator. Public way: none; the tags are public, but not where they are."""
    return tag in operation.tags


class DispatchMode(TorchDispatchMode):
    """Gets every operation below autograd, of forward and backward passes, in `operation`.

    Public way: none; `TorchFunctionMode` misses backward passes. Torch's own way to keep its compiler out of such a
    mode imports it at the first operation (half a second on every rank); `run_as_written` imports nothing. Below a mode
    torch overlooks lazy conjugates of its own making (in `linalg.pinv` of complex numbers), and reads tangents of
    constants, which have no memory (in `torch.add(x, y, alpha=2)`): here both are resolved.
    An operator that takes functions (`torch.cond`, `flex_attention`) goes to `with_functions`; what they do is unseen.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return self.with_functions(func, args, kwargs or {})
        excluded = torch._C._dispatch_tls_local_exclude_set() - _RESOLVED
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            return self.operation(func, args, kwargs or {})

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any: ...

    def with_functions(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


run_as_written([DispatchMode.__torch_dispatch__])
_RESOLVED = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
_RESOLVED = _RESOLVED.add(torch._C.DispatchKey.Negative).add(torch._C.DispatchKey.ZeroTensor)


class FakeTensors(FakeTensorMode):
    """Inside this mode, torch makes and computes with tensors that have shapes and devices but no values. Public way:
    the meta device, on which tensors that a function makes for itself don't land.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        with self:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def like(self, tensor: Tensor) -> Tensor:
        with self:
            fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake


class PretendedNumbers(TorchDispatchMode):
    """Inside this mode, `item()` of a fake tensor is 1 or True, or False for a condition that looks for faults.

    Public way: none; torch raises an error.

    Args:
        taken: called for each such number.
    """

    def __init__(self, taken: Callable[[], Any]):
        super().__init__()
        self._taken = taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OUTPUTS and is_fake(args[0]):
            self._taken()
            if func is not ITEM.default:
                return True
            dtype = args[0].dtype
            if dtype is torch.bool:
                return not getattr(args[0], "_spmd_finds_faults", False)
            return 1.0 if dtype.is_floating_point else 1j if dtype.is_complex else 1
        result = func(*args, **(kwargs or {}))
        if operation_name(func) in _FIND_FAULTS and isinstance(result, torch.Tensor):
            result._spmd_finds_faults = True  # type: ignore[attr-defined]
        return result


class PretendedArrays(TorchFunctionMode):
    """Inside this mode, NumPy's array of a fake tensor is all ones, and it is formatted as any tensor is. Public way:
    none; torch raises errors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TAKEN and is_fake(args[0]):
            tensor, rest = args[0], args[1:]
            if func is Tensor.__format__:
                return format(tensor.item(), *rest) if tensor.dim() == 0 else object.__format__(tensor, *rest)
            ones = numpy.ones(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            return ones.astype(rest[0]) if func is Tensor.__array__ and rest and rest[0] is not None else ones
        return func(*args, **(kwargs or {}))


_TAKEN: set[Any] = {Tensor.numpy, Tensor.__array__, Tensor.__format__}


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no values. Public way: none; `data_ptr()` raises."""
    return isinstance(tensor, FakeTensor)


def custom_operators() -> dict[str, Any]:
    """What `torch.library.custom_op` has made in this process, by name. Public way: none."""
    return dict(OPDEFS)


def qualified_name(made: Any) -> str:
    return made._qualname


def function_of(made: Any) -> Callable:
    """The function of a custom operator. Public way: none."""
    return made._init_fn


def declaration(made: Any) -> dict[str, Any]:
    """The arguments, besides its function, with which `torch.library.custom_op` makes such an operator."""
    written = [one.name for one in arguments(made._opoverload) if one.is_written]
    devices = None if None in made._backend_fns else tuple(made._backend_fns)  # None: one kernel for all
    given = {"name": made._qualname, "schema": made._schema, "mutates_args": written, "device_types": devices}
    return {**given, "tags": tuple(made._tags)}


def registered(made: Any) -> dict[str, Any]:
    """Everything that was registered for a custom operator. Public way: none."""
    if hasattr(made, "_autocast_dtype"):
        autocast = dict(made._autocast_dtype)
    else:  # torch 2.8
        autocast = {"cuda": made._autocast_cuda_dtype, "cpu": made._autocast_cpu_dtype}
    return {
        "function": made._init_fn,
        # Torch wraps each kernel in a function that can switch it off.
        "kernels": {
            device: inspect.getclosurevars(inspect.unwrap(kernel)).nonlocals["fn"]
            for device, kernel in made._backend_fns.items()
        },
        "fake": made._abstract_fn,
        "autograd": (made._backward_fn, made._setup_context_fn),
        "vmap": made._vmap_fn,
        "autocast": {device: dtype for device, dtype in autocast.items() if dtype is not None},
        "torch_dispatch": dict(made._torch_dispatch_fns),
    }


def set_function(made: Any, function: Callable) -> None:
    """Replace the function of a custom operator."""
    made._init_fn = function
