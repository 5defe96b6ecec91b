"""Gradients of linear layers' weights, computed in their buckets instead of being copied there.

torch makes a weight's gradient, `gradient.t() @ x`, in memory of its own, and copying it into a bucket costs as much
traffic as reducing it. Where the tape shows that a leaf is the weight of one linear layer and nothing else, torch is
not asked for it: a hook on the layer's node computes the same product with `out=` the leaf's place. Invariants: the
same bits as torch's own gradient; only nodes that run for another leaf's sake are taken, since no other hook is called;
none where the function made hooks (see `hooks_so_far`), which may look at what torch would have computed or change it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

Node = Any  # of torch's tape

_PLAIN = (Tensor, torch.nn.Parameter)
_LARGE = 1 << 17  # bytes; below, a copy costs less than finding out
# The nodes of `x @ weight.t()`, with and without a bias; the weight is what their last edge leads to.
_INPUTS = {"AddmmBackward0": "mat1", "MmBackward0": "self"}


@dataclasses.dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight, and the node whose backward computes its gradient; `saved` is the name of what it kept of the input."""

    twin: Tensor
    node: Node
    saved: str

    def gradient(self, gradient: Tensor, out: Tensor) -> None:
        torch.mm(gradient.t(), getattr(self.node, f"_saved_{self.saved}"), out=out)

    def hook(self, room: Callable[[], Tensor], filled: Callable[[], None]) -> Any:
        """Have the backward pass write the gradient to `room()` and say so; returns the handle that ends it."""

        def compute(gradients: tuple[Tensor | None, ...]) -> None:
            # A backward of the function's own, within this one and over the same tape, has to keep it.
            within_another = torch._C._autograd._get_current_graph_task_keep_graph()
            if gradients[0] is not None and not within_another:
                self.gradient(gradients[0], room())
                filled()

        return self.node.register_prehook(compute)


def linear_weights(
    ends: Iterable[Tensor], twins: Sequence[Tensor], wanted: Callable[[Tensor], bool]
) -> list[LinearWeight]:
    """Those of the leaves `twins` that are `wanted`, and nothing but the weight of one linear layer each.

    Args:
        ends: where the backward pass begins, whose `inputs` the other leaves will be.
    """
    if torch.is_anomaly_enabled():  # which looks at what nodes return
        return []
    large = {id(twin): twin for twin in twins if _eligible(twin) and wanted(twin)}
    if not large:
        return []
    uses = _uses(end.grad_fn for end in ends)
    found = []
    for node in uses:
        saved = _INPUTS.get(type(node).__name__)
        if saved is None:
            continue
        transposed = node.next_functions[-1][0]
        if type(transposed).__name__ != "TBackward0" or uses[transposed] > 1:
            continue
        leaf = transposed.next_functions[0][0]
        twin = large.get(_leaf_of(leaf))
        if twin is not None and uses[leaf] == 1 and _as_it_was(node, saved):
            found.append(LinearWeight(twin, node, saved))
    taken = {id(weight.twin) for weight in found}
    others = {id(twin) for twin in twins} - taken
    alive: set[Node] = set()
    dead: set[Node] = set()
    # From the first layer on, so that none looks further than to the one below.
    found.sort(key=lambda weight: weight.node._sequence_nr())
    return [weight for weight in found if _leads_to(weight.node, others, alive, dead)]


def hooks_so_far() -> int:
    """Counts the hooks that torch has been given in this process, of tensors, nodes and modules."""
    return RemovableHandle.next_id


def _eligible(twin: Tensor) -> bool:
    """Whether it is worth it, and can be written as it is."""
    return (
        type(twin) in _PLAIN
        and twin.is_cpu
        and twin.dim() == 2
        and min(twin.shape) > 1
        and twin.dtype.is_floating_point
        and twin.is_contiguous()
        and twin.numel() * twin.element_size() >= _LARGE
    )


def _uses(ends: Iterable[Node]) -> dict[Node, int]:
    """Every node of the tape, and how many edges lead to it."""
    uses: dict[Node, int] = {end: 1 for end in ends if end is not None}
    left = list(uses)
    while left:
        for node, _ in left.pop().next_functions:
            if node is None:
                continue
            if node in uses:
                uses[node] += 1
            else:
                uses[node] = 1
                left.append(node)
    return uses


def _as_it_was(node: Node, saved: str) -> bool:
    """Whether the node multiplies by nothing else, and keeps its input itself, which is a plain matrix.

    What is computed again, or lies elsewhere (`torch.utils.checkpoint`, `save_on_cpu`), may be asked for only once.
    """
    kept = getattr(node, f"_raw_saved_{saved}")
    if getattr(node, "_saved_alpha", 1) != 1 or getattr(kept, "unpack_hook", kept) is not None:
        return False
    x: Any = getattr(kept, "data", None)
    return type(x) in _PLAIN and x.layout == torch.strided


def _leaf_of(node: Node) -> int:
    """The `id` of the leaf that a node accumulates, else 0; a node of the function's own may have any attribute."""
    return id(node.variable) if type(node).__name__ == "AccumulateGrad" else 0


def _leads_to(node: Node, leaves: set[int], alive: set[Node], dead: set[Node]) -> bool:
    """Whether one of the leaves lies below the node; `alive` and `dead` are what is known to lead to some or none."""
    left, seen = [node], {node}
    while left:
        for below, _ in left.pop().next_functions:
            if below is None or below in dead or below in seen:
                continue
            if below in alive or _leaf_of(below) in leaves:
                alive.add(node)
                return True
            seen.add(below)
            left.append(below)
    dead |= seen
    return False
