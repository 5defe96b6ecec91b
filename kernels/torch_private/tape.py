"""The tape of autograd: its nodes, the backward pass that runs, hooks, and the transforms of `torch.func`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

Node = Any  # an autograd node: the type `torch.autograd.graph.Node` lacks the attributes for saved tensors


def saved(node: Node, name: str) -> Any:
    """What a node has saved for its backward, by the formula's name. Public way: none that says which node saved it."""
    return getattr(node, f"_saved_{name}")


def saves_itself(node: Node, name: str) -> Tensor | None:
    """The tensor that a node has saved, if it was not packed by a hook; else None.

    A packed tensor (`torch.utils.checkpoint`, `save_on_cpu`) may be read only once. Always None in torch 2.8, which
    doesn't say whether it is packed. Public way: none.
    """
    kept = getattr(node, f"_raw_saved_{name}")
    return None if getattr(kept, "unpack_hook", kept) is not None else getattr(kept, "data", None)


def scales(node: Node) -> bool:
    """Whether a node's product is multiplied by something other than 1. Public way: none."""
    return getattr(node, "_saved_alpha", 1) != 1


def sums_up(node: Node) -> bool:
    """Whether a node is that of a loss with `reduction="sum"`. Public way: none."""
    return getattr(node, "_saved_reduction", 1) == 2


def order(node: Node) -> int:
    """A number that grows with every node that this thread adds to a graph. Public way: none."""
    return node._sequence_nr()


def in_backward() -> bool:
    """Whether a backward pass runs on this thread. Public way: none; every graph would need a hook."""
    return torch._C._current_graph_task_id() != -1


def backward_keeps_tape() -> bool:
    """Whether the running backward pass was called with `retain_graph=True`. Public way: none."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def hooks_made() -> int:
    """How many hooks of tensors, nodes and modules were ever made. Public way: none; a node's hooks can't be listed."""
    return RemovableHandle.next_id


def has_step_hooks() -> bool:
    """Whether hooks for all optimizers' steps are registered. Public way: none; they can be registered, not listed."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def has_hooks(tensor: Tensor) -> bool:
    """Whether hooks for a tensor's gradient are registered. Public way: none; they can be registered, not listed."""
    return hooks_gradient(tensor) or bool(tensor._post_accumulate_grad_hooks)


def hooks_gradient(tensor: Tensor) -> bool:
    """Whether `tensor.register_hook` was called. Public way: none; hooks can be registered and removed, not listed."""
    return bool(tensor._backward_hooks)


def in_torch_func() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, jvp, ...) is running. Public way: none."""
    return torch._C._are_functorch_transforms_active()


def in_forward_mode() -> bool:
    """Whether a level of `torch.autograd.forward_ad` is open, and operations have tangents. Public way: none.

    They have none in the `forward` of a `torch.autograd.Function`.
    """
    return torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def outside_torch_func() -> contextlib.AbstractContextManager[Any]:
    """Inside this block, tensors are made and written as if outside `torch.func`. Public way: none."""
    return temporarily_clear_interpreter_stack()


def with_tangents() -> contextlib.AbstractContextManager[Any]:
    """Inside this block, operations have tangents, as elsewhere: torch turns them off while it asks a Function for its
    `jvp`, also those of an outer `jvp`, which would be 0. Public way: none.
    """
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)
