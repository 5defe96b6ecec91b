"""Modules: their tables of parameters, parametrizations, and classes that torch knows as trees."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import SUPPORTED_NODES


def parameters(module: nn.Module) -> dict[str, Any]:
    """A module's own dict of parameters, to be written to.

    Public way: `setattr`, which refuses a plain tensor in a parameter's place; `torch.func.functional_call`, which
    looks up every name in every call (0.3 ms for 50 parameters).
    """
    return module._parameters


def buffers(module: nn.Module) -> dict[str, Any]:
    """See `parameters`."""
    return module._buffers


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own dict of children. Public way: `module.named_children()`, which takes three times as long, before
    every call, and is not to be written to.
    """
    return module._modules


_HOOKS = operator.attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks(module: nn.Module) -> tuple[OrderedDict[int, Any], ...]:
    """A module's tables of hooks, each with a number that no other one ever gets. Public way: none."""
    return _HOOKS(module)


def inject_parametrizations(module: nn.Module, names: Iterable[str]) -> None:
    """Give a module its generated class again, whose properties compute the parametrized tensors. Public way:
    `register_parametrization`, which makes the original tensors again, under other names.
    """
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)


def clipping_functions() -> list[Any]:
    """The closure cells of torch's gradient clipping functions, to replace what they call. Public way: none; there are
    hooks for optimizers' steps only, and programs import these functions by name.
    """
    functions: list[Any] = [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_]
    return [one.__closure__[one.__code__.co_freevars.index("func")] for one in functions]


def is_exported(obj: Any) -> bool:
    """Whether `torch.export` made this program or module. Public way: none for what `ExportedProgram.module()` gives.

    By the name of the class's file, which takes long to import.
    """
    made = type(obj)
    return any(cls.__module__ in _EXPORTING for cls in (made.__mro__ if isinstance(obj, nn.Module) else (made,)))


_EXPORTING = {f"torch.export.{name}" for name in ("_unlift", "exported_program", "unflatten")}


def tree_nodes() -> dict[type, Any]:
    """The classes that are registered with torch's pytrees, with `flatten_fn` and `unflatten_fn`. Public way: none."""
    return SUPPORTED_NODES
