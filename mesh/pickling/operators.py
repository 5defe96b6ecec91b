"""Pickling torch's operators and a program's own for another process, in which only torch's are registered.

An operator travels by name. If `torch.library.custom_op` made it, its definition travels with it: as its module if that
can be imported there, else as the functions that were registered for it, which may refer to the operator. Invariant: a
function that uses `torch.ops` finds all operators there that its program has made in this way.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch

from ...kernels import torch_private
from ...kernels.errors import SpecError
from ...kernels.torch_private import ALL, CustomOperator, Namespace, Overload, Packet
from .functions import travels_by_name

_NOT_THE_PROGRAMS = ("torch", "spmd")  # packages whose operators exist in every process


def reduced(obj: Any) -> tuple[Any, ...] | None:
    """How to pickle an operator, a namespace of them, or all of `torch.ops`; None for all else."""
    kind = type(obj)
    if kind is CustomOperator:
        function = torch_private.function_of(obj)
        if travels_by_name(function):
            return _imported, (function.__module__, torch_private.qualified_name(obj))
        return _declared, (torch_private.declaration(obj),), torch_private.registered(obj), None, None, _register
    if kind is Packet or kind is Overload:
        name, overload = torch_private.names_of(obj)
        return _named, (name, overload, torch_private.custom_operators().get(name))
    if kind is Namespace or kind is ALL:
        return _looked_up, (obj.name if kind is Namespace else "",), _of_program(), None, None, _ignore
    return None


def named_among(names: frozenset[str]) -> list[Any]:
    """A program's own operators that code with these names uses, as `torch.ops.mylib.op`, except importable ones."""
    return [
        made
        for made in _of_program()
        if names.issuperset(torch_private.qualified_name(made).split("::"))
        and not travels_by_name(torch_private.function_of(made))
    ]


def _of_program() -> list[Any]:
    return [
        made
        for made in torch_private.custom_operators().values()
        if torch_private.function_of(made).__module__.partition(".")[0] not in _NOT_THE_PROGRAMS
    ]


# -- where it arrives --------------------------------------------------------------------------------------------------


def _declared(declaration: dict[str, Any]) -> Any:
    """A custom operator without its functions, which may refer to it."""
    return torch.library.custom_op(declaration.pop("name"), _unregistered, **declaration)


def _unregistered(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("an operator was called before its functions had arrived")


def _register(made: Any, functions: dict[str, Any]) -> None:
    torch_private.set_function(made, functions["function"])
    for device, kernel in functions["kernels"].items():
        made.register_kernel(device)(kernel)
    backward, setup_context = functions["autograd"]
    if functions["fake"] is not None:
        made.register_fake(functions["fake"])
    if backward is not None:
        made.register_autograd(backward, setup_context=setup_context)
    if functions["vmap"] is not None:
        made.register_vmap(functions["vmap"])
    for device, dtype in functions["autocast"].items():
        made.register_autocast(device, dtype)
    for cls, function in functions["torch_dispatch"].items():
        made.register_torch_dispatch(cls, function)


def _imported(module: str, name: str) -> Any:
    importlib.import_module(module)
    return torch_private.custom_operators().get(name)


def _named(name: str, overload: str | None, made: Any) -> Any:
    """The operator of this name; `made` (unpickled first) defines it if it is the program's. No overload means all."""
    namespace, _, own = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), own, None)
    if packet is None:
        problem = f"the operator torch.ops.{namespace}.{own} is not there on the ranks"
        remedy = "make it with torch.library.custom_op, or in a module that the function imports"
        raise SpecError(problem, remedy=remedy)
    return packet if overload is None else getattr(packet, overload or "default")


def _looked_up(namespace: str) -> Any:
    return getattr(torch.ops, namespace) if namespace else torch.ops


def _ignore(found: Any, made: Iterable[Any]) -> None:
    """Do nothing: unpickling `made` has registered the operators that were sent along."""
