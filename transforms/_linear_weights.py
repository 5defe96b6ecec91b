"""Gradients of linear layers' weights, computed in their buckets instead of being copied there.

torch makes a weight's gradient, `gradient.t() @ x`, in memory of its own, and copying it into a bucket costs as much
traffic as reducing it. Where the tape shows that a leaf is the weight of one linear layer and nothing else, torch is
not asked for it: a hook on the layer's node computes the same product with `out=` the leaf's place. Invariants: the
same bits as torch's own gradient; only nodes that run for another leaf's sake are taken, since no other hook is called;
none where the function made hooks (see `hooks_made`), which may look at what torch would have computed or change it.

Where both factors have few rows, ranks of one host that exchange them, and each compute a part of the sum over all,
write less memory than ranks that compute all of it for their own samples and add (sufficient factors: Xie et al.,
"Distributed Machine Learning via Sufficient Factor Broadcasting", 2015). What all ranks must decide alike about that
depends on shapes and the whole batch only. Bits are then those of one product over all samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import torch_private
from ..kernels.torch_private import Node
from ._plan import Plan
from .compiled import weight_gradients
from .compiled.weight_gradients import GraphWeight

_PLAIN = (Tensor, torch.nn.Parameter)
_LEAST = 1 << 21  # elements; a smaller gradient stays in the cache from the product to the sum
_FEW = 4  # times the elements of the factors must go into those of the weight
_ROWS = 64  # of the weight, for each rank
# The nodes of `x @ weight.t()`, with and without a bias; the weight is what their last edge leads to.
_INPUTS = {"AddmmBackward0": "mat1", "MmBackward0": "self"}


@dataclasses.dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight, and the node whose backward computes its gradient; `saved` is the name of what it kept of the input."""

    leaf: Tensor
    node: Node
    saved: str

    def hook(self, fill_product: Callable[[Tensor, Tensor], None]) -> Any:
        """Have the backward pass give the factors of the gradient, `left.t() @ right`, to `fill_product(left, right)`.

        Returns the handle that ends it.
        """

        def compute(gradients: tuple[Tensor | None, ...]) -> None:
            # A backward of the function's own, within this one and over the same tape, has to keep it.
            within_another = torch_private.backward_keeps_tape()
            if gradients[0] is not None and not within_another:
                fill_product(gradients[0], torch_private.saved(self.node, self.saved))

        return self.node.register_prehook(compute)


def linear_weights(
    ends: Iterable[Tensor], leaves: Sequence[Tensor], wanted: Callable[[Tensor], bool], handles: list[Any]
) -> list[LinearWeight | GraphWeight]:
    """Those of the leaves `leaves` that are `wanted`, and nothing but the weight of one linear layer each.

    Args:
        ends: where the backward pass begins, whose `inputs` the other leaves will be.
        handles: takes those of hooks that note what compiled graphs do.
    """
    if torch.is_anomaly_enabled():  # which looks at what nodes return
        return []
    large = {id(leaf): leaf for leaf in leaves if _eligible(leaf) and wanted(leaf)}
    if not large:
        return []
    uses = _uses(end.grad_fn for end in ends)
    found: list[LinearWeight | GraphWeight] = []
    for node in uses:
        kind = type(node).__name__
        if kind == weight_gradients.NODE:
            edges = {
                edge: large[_leaf_of(below)]
                for edge, (below, _) in enumerate(node.next_functions)
                if below is not None and uses[below] == 1 and _leaf_of(below) in large
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
        leaf = large.get(_leaf_of(below))
        if leaf is not None and uses[below] == 1 and _as_it_was(node, saved):
            found.append(LinearWeight(leaf, node, saved))
    taken = {id(weight.leaf) for weight in found}
    others = {id(leaf) for leaf in leaves} - taken
    alive: set[Node] = set()
    dead: set[Node] = set()
    # From the first layer on, so that none looks further than to the one below.
    found.sort(key=lambda weight: torch_private.order(weight.node))
    return [weight for weight in found if _leads_to(weight.node, others, alive, dead)]


def is_large(leaf: Tensor) -> bool:
    """Whether it is worth it; few are."""
    return leaf.numel() * leaf.element_size() >= weight_gradients.LARGE  # a sparse one has no `nbytes`


def _eligible(leaf: Tensor) -> bool:
    """Whether it is worth it, and can be written as it is."""
    return (
        is_large(leaf)
        and type(leaf) in _PLAIN
        and leaf.is_cpu
        and leaf.dim() == 2
        and min(leaf.shape) > 1
        and leaf.dtype.is_floating_point
        and leaf.is_contiguous()
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
    x: Any = None if torch_private.scales(node) else torch_private.saves_itself(node, saved)
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


@dataclasses.dataclass(frozen=True, slots=True)
class Factors:
    """The leaves of a group that may come as factors.

    Attributes:
        leaves: their indexes.
        here, total: samples on this rank, and on all that the leaves are summed over.
    """

    leaves: frozenset[int]
    here: int
    total: int

    @staticmethod
    def of(members: Sequence[Tensor], plan: Plan, sizes: Mapping[str, int]) -> Factors:
        """Those among `members`, which are summed over axes of these `sizes`."""
        here, total, ranks = 1, 1, 1
        for name, size in sizes.items():
            some, all_of_them = plan.samples.get(name, (1, size))
            here, total, ranks = here * some, total * all_of_them, ranks * size
        leaves = frozenset(
            index
            for index, leaf in enumerate(members)
            if leaf.numel() >= _LEAST  # few are
            and leaf.dim() == 2
            and leaf.dtype in (torch.float32, torch.float64)
            and leaf.is_contiguous()
            and len(leaf) >= ranks * _ROWS
            and _are_few(total, *leaf.shape)
        )
        return Factors(leaves, here, total)

    def pay(self, index: int, left: Tensor, right: Tensor) -> bool:
        """Whether to give these, where other ranks have as many rows for each of their samples."""
        length = len(left) * self.total // max(1, self.here)
        return index in self.leaves and _are_few(length, left.shape[1], right.shape[1])


def _are_few(length: int, rows: int, columns: int) -> bool:
    return _FEW * length * (rows + columns) <= rows * columns
