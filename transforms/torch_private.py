"""The parts of torch that transforms need and torch doesn't publish; see `kernels.torch_private`, which has most."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


def is_batch_of_gradients(gradient: Tensor) -> bool:
    """Whether it stands for many, one for each row of what `torch.autograd.grad(is_grads_batched=True)` was given.

    Public way: none. They are not those of `torch.func.vmap`, and nothing but torch's own operations takes them.
    """
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def hooks_gradient(tensor: Tensor) -> bool:
    """Whether `tensor.register_hook` was called. Public way: none; hooks can be registered and removed, not listed."""
    return bool(tensor._backward_hooks)
