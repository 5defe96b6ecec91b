"""The parts of torch that transforms need and torch doesn't publish; see `kernels.torch_private`, which has most."""

from __future__ import annotations

import torch
from torch import Tensor


def being_exported() -> bool:
    """Whether `torch.export` is running.

    Public way: `torch.compiler.is_exporting`, which is true in what `torch.compile` traces, too, until torch 2.12.
    """
    return torch.compiler._is_exporting_flag


def is_batch_of_gradients(gradient: Tensor) -> bool:
    """Whether it stands for many, one for each row of what `torch.autograd.grad(is_grads_batched=True)` was given.

    Public way: none. They are not those of `torch.func.vmap`, and nothing but torch's own operations takes them.
    """
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def hooks_gradient(tensor: Tensor) -> bool:
    """Whether `tensor.register_hook` was called. Public way: none; hooks can be registered and removed, not listed."""
    return bool(tensor._backward_hooks)
