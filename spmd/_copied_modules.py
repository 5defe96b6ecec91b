"""Copies of modules, whole or without weights, in which the functions that they keep refer to the copy, too.

`copy.deepcopy` takes a function as it is: `self.head = lambda x: x @ self.embedding.weight.T` of a copy, or a hook that
captures the module, would compute with the weights of the original.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .kernels.errors import SpmdError, message


def skeleton_of(module: nn.Module, *emptied: dict[str, Tensor]) -> nn.Module:
    """A copy of `module` in which each of the `emptied` tensors is a replica without memory, tied as before."""
    memo: dict[int, Any] = {}
    for tensors in emptied:
        for tensor in tensors.values():
            replica = torch.empty_like(tensor.detach(), device="meta")
            memo[id(tensor)] = (
                nn.Parameter(replica, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else replica
            )
    for submodule in module.modules():
        for value in vars(submodule).values():
            # Left by a forward pass, for instance by weight norm: deepcopy refuses a tensor with a history.
            if isinstance(value, Tensor) and value.grad_fn is not None and id(value) not in memo:
                memo[id(value)] = value.detach().clone()
    try:
        return copied(module, memo)
    except Exception as error:
        raise SpmdError(
            message(
                f"functional cannot copy the module {type(module).__name__}",
                got=f"{type(error).__name__}: {error}",
                remedy="keep open files, locks and tensors with a history out of its attributes",
            )
        ) from error


def duplicate(skeleton: nn.Module) -> nn.Module:
    """A copy with the same tensors: nothing writes to them, and a copied storage would pickle with another address.

    Within a transform of `torch.func`, copies of them would be tensors of that transform.
    """
    return copied(skeleton, {id(tensor): tensor for tensor in (*skeleton.parameters(), *skeleton.buffers())})


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy; `memo` has what stands for which tensors."""
    functions = _Functions(module)
    for function in functions.found:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        memo[id(function)] = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, closure=cells
        )
    new = copy.deepcopy(module, memo)

    def copy_of(part: Any) -> Any:
        return copy.deepcopy(part, memo) if functions.refers(part) else part

    for function in functions.found:
        own = memo[id(function)]
        for cell, filled in zip(own.__closure__ or (), function.__closure__ or (), strict=True):
            if not _is_empty(filled):
                cell.cell_contents = copy_of(filled.cell_contents)
        own.__defaults__, own.__kwdefaults__ = copy_of(function.__defaults__), copy_of(function.__kwdefaults__)
        own.__qualname__, own.__module__, own.__doc__ = function.__qualname__, function.__module__, function.__doc__
        vars(own).update({name: copy_of(value) for name, value in vars(function).items()})
    return new


class _Functions:
    """Which functions a module keeps that refer to it, to its parts or tensors: as attributes, hooks, in lists.

    Attributes:
        found: these functions.
    """

    def __init__(self, module: nn.Module):
        own = [*module.modules(), *module.parameters(), *module.buffers()]
        self._refers = dict.fromkeys(map(id, own), True)
        self.found: list[types.FunctionType] = []
        for submodule in module.modules():
            self.refers(vars(submodule))

    def refers(self, obj: Any) -> bool:
        """Whether an object refers to the module; only what can hold a function is looked into."""
        known = self._refers.get(id(obj))
        if known is None:
            self._refers[id(obj)] = False  # until it is known, if it refers to itself
            known = self._refers[id(obj)] = True in [self.refers(part) for part in _parts_of(obj)]
            if known and isinstance(obj, types.FunctionType):
                self.found.append(obj)
        return known


def _parts_of(obj: Any) -> Iterable[Any]:
    if isinstance(obj, types.FunctionType):
        cells = [cell.cell_contents for cell in obj.__closure__ or () if not _is_empty(cell)]
        return [*cells, obj.__defaults__, obj.__kwdefaults__, vars(obj)]
    if isinstance(obj, types.MethodType):
        return [obj.__func__, obj.__self__]
    if isinstance(obj, functools.partial):
        return [obj.func, obj.args, obj.keywords]
    if isinstance(obj, dict):
        return list(obj.values())
    return obj if isinstance(obj, list | tuple | set) else ()


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True
