"""Tensors of GPUs on their way: a rank that has a GPU gets them there, all others on the CPU."""

from __future__ import annotations

from typing import Any

import torch

_KINDS = (torch.Tensor, torch.nn.Parameter)
_home = torch.device("cpu")


def arrive_on(device: torch.device) -> None:
    """Where tensors of GPUs that are sent to this process are to lie."""
    global _home
    _home = device


def reduced(obj: Any) -> tuple[Any, ...] | None:
    """How to pickle a tensor of a GPU; None for all else."""
    if type(obj) not in _KINDS or not obj.is_cuda or obj.layout is not torch.strided:
        return None
    trainable = obj.requires_grad and obj.is_leaf
    return _placed, (obj.detach().cpu(), trainable, type(obj) is torch.nn.Parameter)


def _placed(tensor: torch.Tensor, trainable: bool, is_parameter: bool) -> torch.Tensor:
    tensor = tensor.to(_home)
    return torch.nn.Parameter(tensor, trainable) if is_parameter else tensor.requires_grad_(trainable)
