"""Second derivatives of what `torch.compile` has made are refused: its graphs have first derivatives only.

Torch refuses them as well, but only where it comes to the node that says so, which a backward pass to some leaves goes
around: what comes out lacks a part, without a word. Invariant: the tape of each gradient of a step is looked at, also
where several are of one code (a helper that is given losses), and again after graphs were compiled (the first call of a
signature runs in eager mode).
"""

from __future__ import annotations

from torch import Tensor

from ...kernels import torch_compiled
from ...kernels.errors import SpecError, message
from .._call import Call
from ..first_call.samples import nodes

_NODE = "CompiledFunctionBackwardBackward"  # on a tape, the gradient of a compiled graph's gradient


def check_differentiated_once(call: Call, value: Tensor) -> None:
    """Refuse a value that was computed of a gradient of a compiled function."""
    graphs = torch_compiled.graphs()
    if not graphs:
        return
    looked_at, key = set(), None
    if call.region is not None:
        call.region.looks += 1
        looked_at = call.region.looked_at
        key = (_NODE, getattr(call.function, "__code__", call.function), call.nested, call.region.looks, graphs)
    if key in looked_at:
        return
    if any(type(node).__name__ == _NODE for node in nodes(value.grad_fn)):
        raise SpecError(
            message(
                f"{call.name} is computed of a gradient of a compiled function, and graphs of torch.compile can't be "
                "differentiated twice",
                where=call.where,
                remedy='do not compile what is differentiated twice, or compile it with backend="eager"; '
                "detach() the gradient if it is to be a constant",
            )
        )
    looked_at.add(key)
