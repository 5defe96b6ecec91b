"""Refuses second derivatives of compiled functions: graphs of `torch.compile` have first derivatives only.

Torch refuses them too, but only when it reaches the node that raises. A backward pass to some leaves does not reach
it, and silently gives a gradient that lacks a part. Invariant: the autograd graph of each gradient in a step is
checked, even if several gradients run the same code (a helper that is passed the loss), and again after graphs were
compiled (the first call of a signature runs in eager mode).
"""

from __future__ import annotations

from torch import Tensor

from ...kernels import torch_private
from ...kernels.errors import SpecError
from .._call import Call
from ..first_call.samples import nodes

_NODE = "CompiledFunctionBackwardBackward"  # the autograd node that differentiates a compiled graph's gradient


def check_differentiated_once(call: Call, value: Tensor) -> None:
    """Refuse a value that was computed from the gradient of a compiled function."""
    graphs = torch_private.graphs_compiled()
    if not graphs:
        return
    region, key = call.region, None
    if region is not None:
        region.looks += 1
        key = (_NODE, getattr(call.function, "__code__", call.function), call.nested, region.looks, graphs)
        if key in region.noted.looked_at:
            return
    if any(type(node).__name__ == _NODE for node in nodes(value.grad_fn)):
        raise SpecError(
            f"{call.name} is computed of a gradient of a compiled function, and graphs of torch.compile can't be "
            "differentiated twice",
            where=call.where,
            remedy='do not compile what is differentiated twice, or compile it with backend="eager"; '
            "detach() the gradient if it is to be a constant",
        )
    if region is not None:
        region.noted.note_checked(key)
