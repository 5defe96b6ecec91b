"""Private parts of torch that pickling operators needs, each with why, and what public way there is.

Like `kernels/torch_private.py`, for what only this folder uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace, _Ops

from ...kernels.torch_private import arguments

# What `torch.ops`, `torch.ops.aten`, `torch.ops.aten.add` and `torch.ops.aten.add.Tensor` are. Public way: `type(...)`.
ALL, Namespace, Packet, Overload = _Ops, _OpNamespace, OpOverloadPacket, OpOverload
CustomOperator = CustomOpDef  # what `torch.library.custom_op` returns


def is_exported(obj: Any) -> bool:
    """Whether `torch.export` made this program or module. Public way: none for what `ExportedProgram.module()` gives.

    By the name of the class's file, which takes long to import.
    """
    made = type(obj)
    return any(cls.__module__ in _EXPORTING for cls in (made.__mro__ if isinstance(obj, nn.Module) else (made,)))


_EXPORTING = {f"torch.export.{name}" for name in ("_unlift", "exported_program", "unflatten")}


def custom_operators() -> dict[str, Any]:
    """What `torch.library.custom_op` has made in this process, by name. Public way: none."""
    return dict(OPDEFS)


def names_of(operator: Any) -> tuple[str, str | None]:
    """An operator's name, such as "aten::add", and its overload's; None if it stands for all overloads.

    Public way: parsing `str(operator)`.
    """
    if isinstance(operator, Packet):
        return operator._qualified_op_name, None
    return operator._schema.name, operator._overloadname


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
