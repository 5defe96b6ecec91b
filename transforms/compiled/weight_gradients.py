"""Gradients of linear layers' weights in graphs that Inductor compiles, computed in their buckets.

`_linear_weights` does this for the nodes of an autograd graph; a graph that Inductor compiled is a single node there.
So in the compiler's joint graph of forward and backward, the product that is a large weight's gradient is replaced by
an operator, `weight_gradient`. When it runs, it gives its factors to the sum over ranks that asked for them. Which
gradients of a graph come from such operators is noted when its backward first runs; from then on torch is not asked for
them. Invariants: factors go to a sum only where the autograd graph shows that nothing else uses the leaf; otherwise,
and the first time, the operator computes the product itself.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from ...kernels import torch_private
from ...kernels.torch_private import Node

Fill = Callable[..., None]
"""`fill(left, right, borrowed=True)`: the graph reuses the factors' memory as soon as the call returns."""

NODE = "CompiledFunctionBackward"  # the autograd node of a compiled graph
_SOURCE = Path(__file__)
LARGE = 1 << 17  # bytes of a weight; a smaller gradient is copied faster than its node is looked for

_made: weakref.WeakKeyDictionary[type, set[int]] = weakref.WeakKeyDictionary()
"""For the type of a graph's node (each graph has its own), the edges to leaves whose gradients operators compute."""


class _Running(threading.local):
    """For the backward of a graph that runs on this thread: who takes a weight's factors, and which weights were met.

    Weights are named by their `id`.
    """

    def __init__(self) -> None:
        self.fills: dict[int, Fill] = {}
        self.met: set[int] = set()


_running = _Running()


# -- in the graph ------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Rewrite all graphs that Inductor compiles from now on, in a program that has imported it."""
    if torch_private.has_inductor():
        torch_private.rewrite_graphs(_rewrite, _SOURCE)
        _operator()


@functools.cache
def _operator() -> Any:
    """The operator, registered only when it is first needed: that takes milliseconds on every rank."""
    name, schema = "spmd::weight_gradient", "(Tensor left, Tensor right, Tensor weight) -> Tensor"
    registered = torch.library.custom_op(name, _weight_gradient, mutates_args=(), schema=schema)
    registered.register_fake(lambda left, right, weight: torch.empty_like(weight))
    return registered


def _weight_gradient(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """`left.t() @ right`; if a sum has taken the factors, uninitialized memory that nobody reads.

    Args:
        weight: the very leaf that the graph was given, since torch passes it on without a copy.
    """
    _running.met.add(id(weight))
    fill = _running.fills.pop(id(weight), None)
    if fill is None:
        return left.t() @ right
    fill(left, right, borrowed=True)
    return torch.empty_like(weight)


def _rewrite(graph: fx.Graph) -> None:
    """Replace products that are the whole gradient of a large matrix among the graph's inputs by the operator."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    primals = [node for node in inputs if str(node.target).startswith("primals")]
    tangents = [node for node in inputs if str(node.target).startswith("tangents")]
    if not primals or not tangents or len(primals) + len(tangents) < len(inputs):  # no joint graph
        return
    (results,) = next(node for node in graph.nodes if node.op == "output").args
    for primal, gradient in zip(primals, results[-len(primals) :], strict=True):
        if isinstance(gradient, fx.Node) and _is_large_matrix(primal) and results.count(gradient) == 1:
            factors = _factors(gradient)
            if factors is not None:
                with graph.inserting_before(gradient):
                    made = graph.call_function(torch.ops.spmd.weight_gradient.default, (*factors, primal))
                made.meta["val"] = torch.empty_like(primal.meta["val"])
                gradient.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _is_large_matrix(node: fx.Node) -> bool:
    like = node.meta.get("val")
    return (
        isinstance(like, Tensor)
        and like.device.type == "cpu"
        and like.dim() == 2
        and all(type(size) is int and size > 1 for size in like.shape)
        and like.dtype.is_floating_point
        and like.is_contiguous()
        and like.numel() * like.element_size() >= LARGE
    )


def _factors(gradient: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The factors of a gradient that is a product `left.t() @ right`, if nothing else uses this product."""
    aten, turned, product = torch.ops.aten, False, cast(Any, gradient)
    while product.target is aten.permute.default and len(product.users) == 1:
        product, turned = product.args[0], not turned  # a transpose: the matrix has only two dimensions
    if product.target is not aten.mm.default or len(product.users) != 1:
        return None
    left, right = product.args
    # (x.t() @ g).t() is g.t() @ x
    return (right, _transposed(left)) if turned else (_transposed(left), right)


def _transposed(matrix: fx.Node) -> fx.Node:
    if matrix.target is torch.ops.aten.permute.default:
        return cast(fx.Node, matrix.args[0])
    with matrix.graph.inserting_after(matrix):
        made = matrix.graph.call_function(torch.ops.aten.permute.default, (matrix, [1, 0]))
    made.meta["val"] = matrix.meta["val"].t()
    return made


# -- on the tape -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class GraphWeight:
    """A leaf whose gradient comes from an operator of a graph alone; `node` is the graph's autograd node."""

    leaf: Tensor
    node: Node

    def hook(self, fill: Fill) -> Any:
        """Have the backward pass call `fill` with the factors of the gradient; returns a handle to remove this."""
        key = id(self.leaf)

        def begin(_: Any) -> None:
            # A backward pass that the function itself runs inside this one, over the same graph, retains the graph.
            if not torch_private.backward_keeps_tape():
                _running.fills[key] = fill

        def end(*_: Any) -> None:
            if _running.fills.pop(key, None) is not None:  # else the gradient would silently be zero
                raise RuntimeError("a compiled graph that made a weight's gradient by an operator does so no more")

        return _Hook(self.node.register_prehook(begin), self.node.register_hook(end), key)


def graph_weights(node: Node, leaves: dict[int, Tensor]) -> list[GraphWeight]:
    """The leaves whose gradients are known to come from operators; `leaves` is keyed by the one edge to each leaf."""
    known = _made.get(type(node), ())
    return [GraphWeight(leaf, node) for edge, leaf in leaves.items() if edge in known]


def learn(node: Node, leaves: dict[int, Tensor]) -> list[Any]:
    """If it isn't known yet, note which leaves' gradients come from operators when this node runs; returns handles."""
    if type(node) in _made:
        return []

    def begin(_: Any) -> None:
        _running.met.clear()

    def end(*_: Any) -> None:
        _made[type(node)] = {edge for edge, leaf in leaves.items() if id(leaf) in _running.met}

    return [node.register_prehook(begin), node.register_hook(end)]


class _Hook:
    """Removes a node's two hooks, and the `fill` that is left over if the node has failed."""

    def __init__(self, before: Any, after: Any, key: int):
        self._before, self._after, self._key = before, after, key

    def remove(self) -> None:
        self._before.remove()
        self._after.remove()
        _running.fills.pop(self._key, None)
