"""What a copy of a tensor keeps besides its values: their order in memory, and whether it is a frozen parameter.

The order can change the bits, since kernels choose by it how they add: a convolution may give other bits with weights
in channels-last order than with the same weights in the usual order. Torch's own `clone` loses the order of a part of
a tensor, and so does concatenation. Invariant: a copy has neither gaps nor overlaps; if the tensor has none, the copy
has exactly the same strides, even for dimensions of size 1 and for empty tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.flat import resolved

Sizes = Sequence[int]


def standard(shape: Sizes) -> tuple[int, ...]:
    """The strides of a new tensor: the last dimension lies innermost.

    >>> standard((2, 3, 4)), standard((2, 0, 4))
    ((12, 4, 1), (4, 4, 1))
    """
    return ordered(shape, range(len(shape)))


def ordered(shape: Sizes, order: Sizes) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions lie in memory in this order, the outermost first.

    >>> ordered((2, 3, 4), (1, 2, 0))
    (1, 8, 2)
    """
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def order_of(shape: Sizes, strides: Sizes) -> list[int]:
    """The dimensions as they lie in memory, the outermost first.

    >>> order_of((2, 3, 4), (1, 8, 2)), order_of((1, 6), (1, 1))
    ([1, 2, 0], [1, 0])
    """
    # If two strides are equal, one of the two sizes is 1 (or 0), and that dimension counts as the inner one.
    return sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] < 2))


def dense(shape: Sizes, strides: Sizes) -> tuple[int, ...]:
    """The strides of a copy without gaps: the same if there are no gaps, the usual ones if elements overlap.

    >>> dense((2, 3), (1, 2)), dense((2, 3), (1, 4)), dense((2, 3), (1, 0))
    ((1, 2), (1, 2), (3, 1))
    """
    inner = [dim for dim in reversed(order_of(shape, strides)) if shape[dim] != 1]
    if 0 in shape:
        return tuple(strides)
    length, gaps = 1, False
    for dim in inner:
        if strides[dim] < length:
            return standard(shape)
        gaps = gaps or strides[dim] > length
        length = strides[dim] * shape[dim]
    return ordered(shape, order_of(shape, strides)) if gaps else tuple(strides)


def joined(shape: Sizes, part: Sizes, strides: Sizes) -> tuple[int, ...]:
    """The strides of a whole tensor of `shape` whose dense parts have the shape `part` and these `strides`."""
    return tuple(strides) if tuple(shape) == tuple(part) else ordered(shape, order_of(part, strides))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided (not sparse or the like) and not quantized."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def is_standard(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the strides of a new one."""
    if not tensor.is_contiguous():
        return False
    # For torch, strides of dimensions of size 1 or 0 don't matter to whether a tensor is contiguous.
    return min(tensor.shape, default=2) > 1 or tensor.stride() == standard(tensor.shape)


def copied(tensor: torch.Tensor, strides: Sizes | None = None) -> torch.Tensor:
    """A copy with its own memory and these strides; by default the tensor's own order without gaps."""
    if tensor.layout is not torch.strided:
        return tensor.clone()
    strides = dense(tensor.shape, tensor.stride()) if strides is None else strides
    out = torch.empty_strided(tensor.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device)
    return out.copy_(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order in which they lie in memory, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flattened(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """A tensor's elements in memory order, and its strides (None if they are the usual ones)."""
    tensor = resolved(tensor)
    if is_standard(tensor):
        return tensor.view(-1), None
    layout = dense(tensor.shape, tensor.stride())
    return flat(tensor if layout == tensor.stride() else copied(tensor, layout)), layout


# -- frozen parameters (`nn.Parameter` with `requires_grad=False`) stay frozen parameters when they are copied -------


def is_frozen(value: Any) -> bool:
    # Most values are plain tensors, and torch's check for Parameters is slow.
    return type(value) is not torch.Tensor and isinstance(value, torch.nn.Parameter) and not value.requires_grad


def frozen_as(like: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A copy or a part of `like`, as a frozen parameter if that is one."""
    return torch.nn.Parameter(tensor, requires_grad=False) if is_frozen(like) else tensor
