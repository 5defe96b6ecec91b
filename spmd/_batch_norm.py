"""Batch norm by the statistics of the whole batch, while each rank has only a part of it.

Sums and counts are added up by a `psum` over the axes that `data_parallel` splits the batch over; the sums are
differentiated like any collective. So the result is exact for uneven and empty parts, too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ._copied_modules import copied
from .kernels.errors import SpecError
from .mesh.region import current, planned_session
from .transforms import current_plan, psum

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FORWARDS = {kind.forward for kind in _KINDS}
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
        part = self.momentum or 0.0
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else part
        training = self.training or self.running_mean is None
        return _batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training, part, self.eps)


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm`, by the whole batch in training."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    axes = _axes()
    count = torch.tensor(float(x.numel() // max(x.shape[1], 1)), dtype=wide.dtype, device="cpu")
    with torch.no_grad():  # so that the backward pass doesn't communicate for it
        count = _summed(count, axes)
    total = _summed(wide.sum(dims), axes)
    if planned_session() is None and not torch.compiler.is_compiling() and count <= 1:
        raise SpecError(
            "a batch norm in training got no more than one value of each channel in the whole batch",
            got=f"this rank's part {tuple(x.shape)}",
            expected="at least two, or there is no variance",
            remedy="give it larger batches: Loader(drop_last=True) leaves a short last one out",
        )
    mean = total / count
    shape = [1, -1] + [1] * (x.dim() - 2)
    away = wide - mean.view(shape)
    var = _summed(away.square().sum(dims), axes) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
            running_var.lerp_((var.detach() * (count / (count - 1))).to(running_var.dtype), momentum)
    out = away * torch.rsqrt(var + eps).view(shape)
    if weight is not None and bias is not None:
        out = out * weight.view(shape) + bias.view(shape)
    return out.to(x.dtype)


class _WholeBatch(TorchFunctionMode):
    """What calls `F.batch_norm` under it looks at the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.was_called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.was_called = self.was_called or func is F.batch_norm
        return (_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _own_forward(norm: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a norm's own class, which may do more than normalise (timm's have an activation)."""
    with _WholeBatch() as mode:
        out = type(norm).forward(norm, *args, **kwargs)
    if norm.training and not mode.was_called:
        raise SpecError(
            "functional_with_buffers(sync=True) does not know how a norm looks at its batch",
            got=f"a {type(norm).__name__}, whose forward calls no F.batch_norm",
            remedy="write it with F.batch_norm or super().forward, or take the module with sync=False",
        )
    return out


def synced(module: nn.Module) -> nn.Module:
    """A copy of a module, with the same parameters and buffers, whose batch norms look at the whole batch."""
    memo = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    module = copied(module, memo)
    made = {module: _synced(module)}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            new = made[child] = made[child] if child in made else _synced(child)
            if new is not child:
                setattr(parent, name, new)
    return made[module]


def _synced(module: nn.Module) -> nn.Module:
    if not isinstance(module, _KINDS):
        return module
    if type(module).forward in _FORWARDS:
        return SyncedBatchNorm(module)
    vars(module)["forward"] = functools.partial(_own_forward, module)
    return module


def _axes() -> tuple[str, ...]:
    if current() is None:
        return ()
    axes = tuple(current_plan().samples)
    if not axes:
        raise SpecError(
            "functional_with_buffers(sync=True) knows of no batch that is split over ranks here",
            remedy="call it in a step under data_parallel, or take the module with sync=False",
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
