"""Batch norm by the statistics of the whole batch, while each rank has only a part of it.

Sums and counts are added up by a `psum` over the axes that `data_parallel` splits the batch over; the sums are
differentiated like any collective. So the result is exact for uneven and empty parts, too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels.errors import SpecError, message
from .mesh.region import current
from .transforms import current_plan, psum

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_RUNNING = (*_KINDS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)  # what keeps running statistics


class SyncedBatchNorm(nn.Module):
    """A batch norm with the parameters, buffers and settings of another."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, norm: Any):
        super().__init__()
        self.eps, self.momentum, self.training = norm.eps, norm.momentum, norm.training
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        axes = _axes()
        count = torch.tensor(float(x.numel() // max(x.shape[1], 1)), dtype=wide.dtype, device="cpu")
        total, count = _summed(wide.sum(dims), axes), _summed(count, axes).detach()
        mean = total / count
        shape = [1, -1] + [1] * (x.dim() - 2)
        away = wide - mean.view(shape)
        var = _summed(away.square().sum(dims), axes) / count
        self._track(mean.detach(), var.detach(), count)
        out = (away * torch.rsqrt(var + self.eps).view(shape)).to(x.dtype)
        return (
            out if self.weight is None or self.bias is None else out * self.weight.view(shape) + self.bias.view(shape)
        )

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if (
            not self.training
            or self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        self.num_batches_tracked.add_(1)
        part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), part)


def synced(module: nn.Module) -> nn.Module:
    """A copy of a module, with the same parameters and buffers, whose batch norms look at the whole batch."""
    memo = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    module = copy.deepcopy(module, memo)
    if isinstance(module, _KINDS):
        return SyncedBatchNorm(module)
    made: dict[int, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _KINDS):
                setattr(parent, name, made.setdefault(id(child), SyncedBatchNorm(child)))
    return module


def _axes() -> tuple[str, ...]:
    if current() is None:
        return ()
    axes = tuple(current_plan().samples)
    if not axes:
        raise SpecError(
            message(
                "functional_with_buffers(sync=True) knows of no batch that is split over ranks here",
                remedy="call it in a step under data_parallel, or take the module with sync=False",
            )
        )
    return axes


def _summed(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    return psum(x, axes) if axes else x


def decays(module: nn.Module) -> dict[str, float]:
    """By name, what part of its old value a running statistic keeps in a batch; without those that average all."""
    found: dict[str, float] = {}
    for prefix, submodule in module.named_modules():
        if isinstance(submodule, _RUNNING) and submodule.momentum is not None:
            kept = 1.0 - submodule.momentum
            for name, decay in (("running_mean", kept), ("running_var", kept), ("num_batches_tracked", 1.0)):
                found[f"{prefix}.{name}" if prefix else name] = decay
    return found
