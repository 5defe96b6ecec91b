"""Gradients of linear layers' weights, computed in their buckets instead of being copied there.

torch computes a weight's gradient, `gradient.t() @ x`, in memory of its own, and copying it into a bucket costs as much
memory traffic as reducing it. Where the autograd graph shows that a leaf is the weight of one linear layer and nothing
else, torch is not asked for its gradient: a hook on the layer's node computes the same product with `out=` the leaf's
place in the bucket. Invariants: the bits are those of torch's own gradient; a node is used only if it also runs for
another leaf, since else torch would not call its hook; nothing is done where the function registered hooks
(`hooks_made`), since these may read or change the gradient that torch would have computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..kernels.torch_private import Node, backward_keeps_tape, order, saves_itself, scales
from ..kernels.torch_private import saved as saved_by
from .compiled import weight_gradients
from .compiled.weight_gradients import GraphWeight

_PLAIN = (Tensor, torch.nn.Parameter)
# The nodes of `x @ weight.t()`, with and without a bias; the weight is what their last edge leads to.
_INPUTS = {"AddmmBackward0": "mat1", "MmBackward0": "self"}


@dataclasses.dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight, the node whose backward computes its gradient, and the name under which the node saved its input."""

    leaf: Tensor
    node: Node
    saved: str

    def hook(self, fill_product: Callable[[Tensor, Tensor], None]) -> Any:
        """Have the backward pass call `fill_product(left, right)` with the factors of the gradient `left.t() @ right`.

        Returns the hook's handle.
        """

        def compute(gradients: tuple[Tensor | None, ...]) -> None:
            # A backward pass that the function itself runs inside this one, over the same graph, retains the graph.
            within_another = backward_keeps_tape()
            if gradients[0] is not None and not within_another:
                fill_product(gradients[0], saved_by(self.node, self.saved))

        return self.node.register_prehook(compute)


def linear_weights(
    ends: Iterable[Tensor], leaves: Iterable[Tensor], wanted: Iterable[Tensor], handles: list[Any]
) -> list[LinearWeight | GraphWeight]:
    """Those of the leaves `wanted` that are used as the weight of one linear layer, and for nothing else.

    Args:
        ends: where the backward pass begins; its `inputs` will be the rest of `leaves`.
        handles: to this list the handles of hooks are added that note what compiled graphs do.
    """
    if torch.is_anomaly_enabled():  # anomaly mode checks what nodes return
        return []
    weights = {id(leaf): leaf for leaf in wanted if _is_writable(leaf)}
    if not weights:
        return []
    uses = _uses(end.grad_fn for end in ends)
    found: list[LinearWeight | GraphWeight] = []
    for node in uses:
        kind = type(node).__name__
        if kind == weight_gradients.NODE:
            edges = {
                edge: weights[_leaf_of(below)]
                for edge, (below, _) in enumerate(node.next_functions)
                if below is not None and uses[below] == 1 and _leaf_of(below) in weights
            }
            found += weight_gradients.graph_weights(node, edges)
            handles += weight_gradients.learn(node, edges)
            continue
        saved = _INPUTS.get(kind)
        if saved is None:
            continue
        transposed = node.next_functions[-1][0]
        if type(transposed).__name__ != "TBackward0" or uses[transposed] > 1:
            continue
        below = transposed.next_functions[0][0]
        leaf = weights.get(_leaf_of(below))
        if leaf is not None and uses[below] == 1 and _as_it_was(node, saved):
            found.append(LinearWeight(leaf, node, saved))
    taken = {id(weight.leaf) for weight in found}
    others = {id(leaf) for leaf in leaves} - taken
    alive: set[Node] = set()
    dead: set[Node] = set()
    # In the order of the layers, so that each search ends at the layer below.
    found.sort(key=lambda weight: order(weight.node))
    return [weight for weight in found if _leads_to(weight.node, others, alive, dead)]


def _is_writable(leaf: Tensor) -> bool:
    """Whether a matrix product can be written directly into memory laid out like this leaf."""
    return (
        type(leaf) in _PLAIN
        and leaf.is_cpu
        and leaf.dim() == 2
        and min(leaf.shape) > 1
        and leaf.dtype.is_floating_point
        and leaf.is_contiguous()
    )


def _uses(ends: Iterable[Node]) -> dict[Node, int]:
    """Every node of the autograd graph, and how many edges lead to it."""
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
    """Whether the node computes the product alone, without a scale, and itself holds its input, a plain matrix.

    An input that is recomputed or lies elsewhere (`torch.utils.checkpoint`, `save_on_cpu`) may be read only once.
    """
    x: Any = None if scales(node) else saves_itself(node, saved)
    return type(x) in _PLAIN and x.layout == torch.strided


def _leaf_of(node: Node) -> int:
    """The `id` of the leaf whose gradient a node accumulates, else 0; nodes of users may have any attributes."""
    return id(node.variable) if type(node).__name__ == "AccumulateGrad" else 0


def _leads_to(node: Node, leaves: set[int], alive: set[Node], dead: set[Node]) -> bool:
    """Whether one of the leaves lies below the node; `alive` nodes are known to lead to one, `dead` nodes to none."""
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
