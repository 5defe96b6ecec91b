"""Gradients of linear layers' weights in graphs that Inductor compiles, computed where they are summed.

What `_linear_weights` does with a tape, for a graph, which is one node of it: in the graph of forward and backward the
product that is a large weight's gradient becomes an operator, `weight_gradient`. When it runs, it gives the factors to
the sum over ranks that wants them. Which gradients of a graph such operators make is noted when its backward first
runs; from the next time on torch is not asked for them. Invariants: factors are given to a sum only where the tape
shows that the graph is all that uses the leaf; everywhere else, and the first time, the operator is the product that it
stands for.
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

from ...kernels import torch_compiled, torch_private
from ...kernels.torch_private import Node

Fill = Callable[..., None]
"""`fill(left, right, borrowed=True)`: whose memory the graph uses again when the call is over."""

NODE = "CompiledFunctionBackward"  # a compiled graph on the tape
_SOURCE = Path(__file__)
LARGE = 1 << 17  # bytes of a weight; below, a copy costs less than finding out

_made: weakref.WeakKeyDictionary[type, set[int]] = weakref.WeakKeyDictionary()
"""By the type of a graph's node, of which each has its own, the edges to leaves whose gradients operators make."""


class _Running(threading.local):
    """Of the graph whose backward runs on this thread, by the `id` of weights: what takes factors, and what was met."""

    def __init__(self) -> None:
        self.fills: dict[int, Fill] = {}
        self.met: set[int] = set()


_running = _Running()


# -- in the graph ------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Have graphs rewritten from now on, in a program that has imported Inductor."""
    torch_compiled.rewrite_graphs(_rewrite, _SOURCE)
    _operator()


@functools.cache
def _operator() -> Any:
    """The operator, registered when it is first wanted, which takes milliseconds on every rank."""
    name, schema = "spmd::weight_gradient", "(Tensor left, Tensor right, Tensor weight) -> Tensor"
    registered = torch.library.custom_op(name, _weight_gradient, mutates_args=(), schema=schema)
    registered.register_fake(lambda left, right, weight: torch.empty_like(weight))
    return registered


def _weight_gradient(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """`left.t() @ right`, or memory that nobody looks at where a sum has taken the factors.

    Args:
        weight: the very leaf that the graph was given, of which torch keeps no copy.
    """
    _running.met.add(id(weight))
    fill = _running.fills.pop(id(weight), None)
    if fill is None:
        return left.t() @ right
    fill(left, right, borrowed=True)
    return torch.empty_like(weight)


def _rewrite(graph: fx.Graph) -> None:
    """Put the operator where a product is all of the gradient of a large matrix that the graph is given."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    primals = [node for node in inputs if str(node.target).startswith("primals")]
    tangents = [node for node in inputs if str(node.target).startswith("tangents")]
    if not primals or not tangents or len(primals) + len(tangents) < len(inputs):  # not what torch differentiates
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
    """What a gradient is the product of, `left.t() @ right`, if it is one and nothing else wants it."""
    aten, turned, product = torch.ops.aten, False, cast(Any, gradient)
    while product.target is aten.permute.default and len(product.users) == 1:
        product, turned = product.args[0], not turned  # of two dimensions, or it would not be a matrix
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
    """A leaf whose gradient an operator of a graph makes, and nothing else; `node` is the graph's."""

    leaf: Tensor
    node: Node

    def hook(self, fill: Fill) -> Any:
        """Have the backward pass give the factors of the gradient to `fill(left, right)`; the handle that ends it."""
        key = id(self.leaf)

        def begin(_: Any) -> None:
            # A backward of the function's own, within this one and over the same tape, has to keep it.
            if not torch_private.backward_keeps_tape():
                _running.fills[key] = fill

        def end(*_: Any) -> None:
            if _running.fills.pop(key, None) is not None:  # else the gradient would silently be zero
                raise RuntimeError("a compiled graph that made a weight's gradient by an operator does so no more")

        return _Hook(self.node.register_prehook(begin), self.node.register_hook(end), key)


def graph_weights(node: Node, leaves: dict[int, Tensor]) -> list[GraphWeight]:
    """Those of the leaves, by the edge of the graph's node that alone leads to each, of which it is known."""
    known = _made.get(type(node), ())
    return [GraphWeight(leaf, node) for edge, leaf in leaves.items() if edge in known]


def learn(node: Node, leaves: dict[int, Tensor]) -> list[Any]:
    """Note which leaves' gradients operators make when this node runs, if it is not known; the handles that end it."""
    if type(node) in _made:
        return []

    def begin(_: Any) -> None:
        _running.met.clear()

    def end(*_: Any) -> None:
        _made[type(node)] = {edge for edge, leaf in leaves.items() if id(leaf) in _running.met}

    return [node.register_prehook(begin), node.register_hook(end)]


class _Hook:
    """Torch's handles of what a node does for a leaf, and what is left of that if the node has failed."""

    def __init__(self, before: Any, after: Any, key: int):
        self._before, self._after, self._key = before, after, key

    def remove(self) -> None:
        self._before.remove()
        self._after.remove()
        _running.fills.pop(self._key, None)
