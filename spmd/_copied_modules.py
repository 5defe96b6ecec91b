"""Copies of modules in which the functions that they keep as attributes refer to the copy, too.

`copy.deepcopy` takes a function as it is: `self.head = lambda x: x @ self.embedding.weight.T` of a copy would compute
with the weights of the original.
"""

from __future__ import annotations

import copy
import types
from typing import Any

from torch import nn


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy; `memo` has what stands for which tensors."""
    new = copy.deepcopy(module, memo)
    for submodule in new.modules():
        for name, value in vars(submodule).items():
            if isinstance(value, types.FunctionType) and value.__closure__:
                vars(submodule)[name] = _rebound(value, memo)
    return new


def _rebound(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """The same function of the copies of the modules that it captures."""
    cells = tuple(_copy_of(cell, memo) for cell in function.__closure__ or ())
    if all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    new = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__, new.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(new).update(vars(function))
    return new


def _copy_of(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    try:
        captured = cell.cell_contents
    except ValueError:  # it is empty
        return cell
    copy_of_it = memo.get(id(captured)) if isinstance(captured, nn.Module) else None
    return cell if copy_of_it is None else types.CellType(copy_of_it)
