"""How objects of all kinds travel to another process, where cloudpickle alone is not enough.

GPU tensors arrive on the GPU of a rank that has one, and in other processes on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels import torch_compiled
from ...kernels.arguments import arrived
from ...kernels.mapped_files import opened_elsewhere
from . import functions, operators

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_home = torch.device("cpu")


def arrive_on(device: torch.device) -> None:
    """Set the device on which GPU tensors that are sent to this process arrive."""
    global _home
    _home = device


def reduced(obj: Any) -> Any:
    """What `__reduce__` should return for an object; None for most, which cloudpickle pickles well."""
    if type(obj) in _TENSORS and obj.is_cuda and obj.layout is torch.strided:
        trainable = obj.requires_grad and obj.is_leaf
        return _placed, (obj.detach().cpu(), trainable, type(obj) is torch.nn.Parameter)
    if isinstance(obj, torch.Tensor) and (result := arrived(obj)) is not obj:
        return torch.Tensor.detach, (result,)
    found = operators.reduced(obj) or functions.reduced(obj)
    return found or torch_compiled.taken_apart(obj) or opened_elsewhere(obj)


def _placed(tensor: torch.Tensor, trainable: bool, is_parameter: bool) -> torch.Tensor:
    tensor = tensor.to(_home)
    return torch.nn.Parameter(tensor, trainable) if is_parameter else tensor.requires_grad_(trainable)
