"""Values whose elements lie in memory in every order, and where a rank's part of each should lie."""

from __future__ import annotations

import torch

from spmd import P


def values() -> dict[str, torch.Tensor]:
    return {
        "last": torch.arange(400.0).reshape(4, 4, 5, 5).to(memory_format=torch.channels_last),
        "turned": torch.arange(24).reshape(4, 6).t(),
        "one channel": torch.arange(100.0).reshape(4, 1, 5, 5).to(memory_format=torch.channels_last),
        "one column": torch.arange(8).reshape(2, 4).t(),
        "usual": torch.arange(8.0).reshape(4, 2),
        "gaps": torch.arange(48).reshape(4, 12).t()[::2],
        "same": torch.arange(4.0)[:, None].expand(4, 3),
        "empty": torch.empty(0, 4).t(),
    }


SPECS = [P(), P("data"), P(None, "data"), P("model", "data")]


def wanted(whole: torch.Tensor, shard: torch.Size) -> tuple[int, ...]:
    """The strides of a rank's shard: in the order of the whole, without gaps."""
    whole = whole if all(whole.stride()) else whole.contiguous()
    part = whole[tuple(map(slice, shard))]
    return torch.empty_like(part).stride() if part.numel() else whole.stride()


def dense(value: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy in the same order, without gaps."""
    if torch.empty_like(value).stride() == value.stride():  # torch keeps the order where there are no gaps
        return value.stride()
    if 0 in value.stride():
        return torch.empty(value.shape).stride()
    strides, step = [0] * value.ndim, 1
    for dim in sorted(range(value.ndim), key=lambda dim: (value.stride(dim), -dim)):
        strides[dim], step = step, step * value.shape[dim]
    return tuple(strides)
