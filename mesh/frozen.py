"""Frozen parameters (`nn.Parameter` with `requires_grad=False`): they stay what they are wherever a value goes."""

from __future__ import annotations

from typing import Any

import torch


def is_frozen(value: Any) -> bool:
    # Most are plain tensors, and asking whether one is a Parameter takes torch a while.
    return type(value) is not torch.Tensor and isinstance(value, torch.nn.Parameter) and not value.requires_grad


def frozen_as(like: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A copy or a part of `like`, as a frozen parameter if that is one."""
    return torch.nn.Parameter(tensor, requires_grad=False) if is_frozen(like) else tensor
