"""The named-axis collectives as `torch.compile` traces them: one operator of `operators` for each leaf.

What the eager functions use can't be traced: communicators, locks, memory of other processes. While a compiler traces,
they call this file instead, and the graph goes on; its guards hold the axis size that it was compiled for. Calls that
are not `traceable`, and all errors, are left to the eager function, before which the graph breaks.
Invariant: before and after a graph the state of `_tokens` is as if its collectives had run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.torch_private import being_exported, in_forward_mode, in_torch_func
from ...mesh import trees
from ...mesh.region import current
from .._tokens import state

_PLAIN = (Tensor, nn.Parameter)


def traceable(x: Any, axis: Any, *, replicates: bool, fits: Callable[[Tensor, int], bool] | None = None) -> bool:
    """Whether the compiler can trace this collective.

    Args:
        replicates: whether the result is the same on all ranks of the axis.
        fits: whether the collective accepts a leaf, on this number of ranks.
    """
    region = current()
    if region is None or in_torch_func() or in_forward_mode() or being_exported():
        return False
    names = (axis,) if isinstance(axis, str) else axis
    if type(names) is not tuple or not names or len(set(names)) < len(names):
        return False
    sizes = dict(region.session.layout.sizes)
    for name in names:
        if name not in sizes:
            return False
    size = _size(names)
    in_gradient = state().token is not None
    for leaf in _leaves(x):
        if type(leaf) not in _PLAIN or leaf.is_sparse or leaf.device.type == "meta":
            return False
        # The result would need a mark of the axes that it differs over, which a traced tensor can't carry.
        marked = None if replicates and in_gradient else getattr(leaf, "_spmd_axes", None)
        if marked is not None and (not replicates or marked - set(names)):
            return False
        if fits is not None and not fits(leaf, size):
            return False
    return True


def each(operator: str, x: Any, axis: Any, *rest: Any, along: Any = None, before: Any = None, after: Any = None) -> Any:
    """Call an operator for each leaf of a tree; `before` is applied to the leaf, and `after` to the result.

    Args:
        rest: further arguments of the operator.
        along: gives one more for each leaf: what ranks compare of its dimensions.
    """
    names = [axis] if isinstance(axis, str) else list(axis)
    keys = _keys(x, "") if type(x) in (dict, list, tuple) else []  # sent along with the first leaf

    def one(leaf: Any) -> Any:
        nonlocal keys
        if type(leaf) is dict:
            return {key: one(below) for key, below in leaf.items()}
        if type(leaf) in (list, tuple):
            return type(leaf)([one(below) for below in leaf])
        mine, keys = keys, []
        more = rest if along is None else (*rest, along(leaf))
        result = _call(operator, leaf if before is None else before(leaf), names, mine, *more)
        return result if after is None else after(result)

    return one(x)


def _keys(x: Any, path: str) -> list[str]:
    """The path of each leaf in a tree, written as by `trees.keys_text`."""
    if type(x) is dict:
        return [key for name, one in x.items() for key in _keys(one, f"{path}[{trees.key_text(name)}]")]
    if type(x) in (list, tuple):
        return [key for index, one in enumerate(x) for key in _keys(one, f"{path}[{index}]")]
    return [path]


def _call(name: str, x: Tensor, names: list[str], keys: list[str], *rest: Any) -> Tensor:
    from . import operators  # here, since registering them takes milliseconds on every rank

    operator, here = getattr(operators, name), state()
    size = _size(names)
    if here.token is None:
        before = torch.zeros((), device="cpu") if here.order is None else here.order
        result, token = operator(x, before, names, size, False, keys, *rest)
        here.order = token.detach()
    elif torch.is_grad_enabled():
        result, here.token = operator(x, here.token, names, size, False, keys, *rest)
    else:  # under no_grad: the chain must still go on
        result, token = operator(x, here.token, names, size, False, keys, *rest)
        with torch.enable_grad():
            here.token = here.token + token
    return result


def _size(names: Any) -> int:
    region = current()
    assert region is not None
    return region.session.layout.parts(names)


def _leaves(x: Any) -> list[Any]:
    if type(x) is dict:
        return [leaf for one in x.values() for leaf in _leaves(one)]
    if type(x) in (list, tuple):
        return [leaf for one in x for leaf in _leaves(one)]
    return [x]
