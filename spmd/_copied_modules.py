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
from torch.nn.utils import parametrize

from .kernels.errors import SpmdError
from .kernels.torch_private import is_exported
from .mesh.pickling.references import content_of


def skeleton_of(module: nn.Module, *emptied: dict[str, Tensor]) -> nn.Module:
    """A copy of `module` in which each of the `emptied` tensors is a replica without memory, tied as before."""
    memo: dict[int, Any] = {}
    for tensors in emptied:
        for tensor in tensors.values():
            if tensor.layout is torch.strided:
                replica = torch.empty_like(tensor.detach(), device="meta")
            else:  # torch can't pickle a sparse one without memory
                replica = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            memo[id(tensor)] = (
                nn.Parameter(replica, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else replica
            )
    for value in (*(value for submodule in module.modules() for value in vars(submodule).values()), *module.buffers()):
        # deepcopy refuses a tensor with a history (left by a forward pass, for instance by weight norm), and one in a
        # compressed layout.
        refused = isinstance(value, Tensor) and (value.grad_fn is not None or value.layout in _COMPRESSED)
        if refused and id(value) not in memo:
            memo[id(value)] = value.detach().clone()
    try:
        return copied(module, memo)
    except Exception as error:
        remedy = "keep open files, locks and tensors with a history out of its attributes"
        if any(map(is_exported, module.modules())):
            remedy = "pass the module from before torch.export"
        raise SpmdError(
            f"functional cannot copy the module {type(module).__name__}",
            got=f"{type(error).__name__}: {error}",
            remedy=remedy,
        ) from error


def duplicate(skeleton: nn.Module) -> nn.Module:
    """A copy with the same tensors: nothing writes to them, and a copied storage would pickle with another address.

    Within a transform of `torch.func`, copies of them would be tensors of that transform.
    """
    return copied(skeleton, {id(tensor): tensor for tensor in (*skeleton.parameters(), *skeleton.buffers())})


def without_parametrized_classes(skeleton: nn.Module) -> nn.Module:
    """A copy with the classes from before `register_parametrization`, which generates ones that can't be pickled."""
    plain = duplicate(skeleton)
    for submodule in list(plain.modules()):
        submodule.__class__ = parametrize.type_before_parametrizations(submodule)
    return plain


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy; `memo` has what stands for which tensors."""
    referring = _Referring(module)
    for function in referring.functions:
        # Other cells stay, so that what functions share by `nonlocal` they still do.
        cells = (memo.setdefault(id(one), types.CellType()) if one in referring else one for one in _cells(function))
        memo[id(function)] = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, closure=tuple(cells)
        )
    new = copy.deepcopy(module, memo)

    def copy_of(part: Any) -> Any:
        return copy.deepcopy(part, memo) if part in referring else part

    for function in referring.functions:
        own = memo[id(function)]
        for cell, filled in zip(_cells(own), _cells(function), strict=True):
            if cell is not filled:
                cell.cell_contents = copy_of(filled.cell_contents)
        own.__defaults__, own.__kwdefaults__ = copy_of(function.__defaults__), copy_of(function.__kwdefaults__)
        own.__qualname__, own.__module__, own.__doc__ = function.__qualname__, function.__module__, function.__doc__
        vars(own).update({name: copy_of(value) for name, value in vars(function).items()})
    return new


class _Referring:
    """What a module keeps, as attributes, hooks, in lists, that refers to it, to its parts or tensors.

    Attributes:
        functions: the functions among it.
    """

    def __init__(self, module: nn.Module):
        found: list[Any] = [*module.modules(), *module.parameters(), *module.buffers()]
        self._ids = set(map(id, found))
        holders: dict[int, list[Any]] = {}  # of each object
        seen: dict[int, Any] = {}
        unseen: list[Any] = [vars(submodule) for submodule in module.modules()]
        while unseen:
            obj = unseen.pop()
            if id(obj) in seen:
                continue
            seen[id(obj)] = obj
            for part in _parts_of(obj):
                if id(part) in self._ids or isinstance(part, _HOLDERS):
                    holders.setdefault(id(part), []).append(obj)
                    unseen.append(part)
        while found:
            new = [one for one in holders.pop(id(found.pop()), ()) if id(one) not in self._ids]
            self._ids.update(map(id, new))
            found += new
        self.functions = [obj for obj in seen.values() if isinstance(obj, types.FunctionType) and obj in self]

    def __contains__(self, obj: Any) -> bool:
        return id(obj) in self._ids


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

# What can hold a function; nothing else is looked into.
_HOLDERS = (types.FunctionType, types.CellType, types.MethodType, functools.partial, dict, list, tuple, set)


def _parts_of(obj: Any) -> Iterable[Any]:
    if isinstance(obj, types.FunctionType):
        return [*_cells(obj), obj.__defaults__, obj.__kwdefaults__, vars(obj)]
    if isinstance(obj, types.CellType):
        return [content_of(obj)]
    if isinstance(obj, types.MethodType):
        return [obj.__func__, obj.__self__]
    if isinstance(obj, functools.partial):
        return [obj.func, obj.args, obj.keywords]
    if isinstance(obj, dict):
        return list(obj.values())
    return obj if isinstance(obj, list | tuple | set) else ()


def _cells(function: types.FunctionType) -> tuple[types.CellType, ...]:
    return function.__closure__ or ()
