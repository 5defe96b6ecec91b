"""Axis names inside a region: the group of ranks that a name stands for, and this rank's place in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..kernels.arguments import check_tensor, is_whole
from ..kernels.call import labelled
from ..kernels.callsite import public
from ..kernels.communicator import Communicator
from ..kernels.errors import SpecError
from ..kernels.torch_private import break_graph, outside_torch_func
from ..mesh import trees
from ..mesh.array import Array
from ..mesh.put import as_tensor
from ..mesh.rank.session import RankSession
from ..mesh.region import require
from ..mesh.replication.net import differs_over, mark, varying_number
from ._plan import plan_of
from ._tokens import refuse_recording
from .exact.tracked import Tracked

Axis = str | tuple[str, ...]


@public
def axis_index(axis: Axis) -> int:
    """This rank's index along `axis` (over a tuple: first name major).

    On four ranks of a mesh {"data": 2, "model": 2}, `axis_index(("data", "model"))` is 0, 1, 2 and 3.

    Args:
        axis: mesh axis, or a tuple of them.

    Returns:
        An integer, 0 to `axis_size(axis)` - 1.

    Raises:
        SpecError: no such axis. MeshError: outside a region.
    """
    session, axes = check_axis("axis_index", axis)
    return varying_number(session.layout.part(session.rank, axes), axes)


@public
def axis_size(axis: Axis) -> int:
    """The number of ranks along `axis`.

    On a mesh {"data": 2, "model": 2}, `axis_size(("data", "model"))` is 4.

    Args:
        axis: mesh axis, or a tuple of them.

    Returns:
        An integer.

    Raises:
        SpecError: no such axis. MeshError: outside a region.
    """
    session, axes = check_axis("axis_size", axis)
    return session.layout.parts(axes)


@public
def barrier(axis: Axis | None = None) -> None:
    """Wait until every rank along `axis` (None: of the mesh) is here.

    Args:
        axis: mesh axis, or a tuple of them.

    Raises:
        SpecError: no such axis. MeshError: outside a region.
    """
    session = require("barrier").session
    comm = session.comm(session.layout.names if axis is None else check_axis("barrier", axis)[1])
    with outside_torch_func():  # torch.func has nothing to transform here
        comm.barrier()


def check_axis(what: str, axis: Axis) -> tuple[RankSession, tuple[str, ...]]:
    """This rank's session, and `axis` as a checked tuple of names."""
    region = require(what)
    session = region.session
    if not isinstance(axis, str | tuple | list) or not axis:
        raise SpecError(f'{what} got a bad "axis"', got=repr(axis), expected="an axis name or a tuple of them")
    axes = session.axes(axis if isinstance(axis, str) else tuple(axis), what=what)
    plan = plan_of(region)
    if plan.in_shard and plan.virtual is not None and plan.virtual.axis in axes:
        raise SpecError(
            f"{what} over {plan.virtual.axis!r} in a virtual shard, which runs alone, one after another",
            where=session.where(),
            remedy="leave shards= out of data_parallel if a loss needs all samples (a contrast); return what is only "
            "reported as aux (has_aux=True)",
        )
    return session, axes


def group(what: str, axis: Axis) -> tuple[tuple[str, ...], Communicator]:
    """The checked names of `axis`, and the communicator of the ranks along it."""
    if is_dynamo_compiling():
        remedy = "call it outside of what is compiled"
        break_graph(f"{what} of this value can't be part of a graph (docs/compile.md): {remedy}")
    refuse_recording(what)
    session, axes = check_axis(what, axis)
    return axes, session.comm(axes)


def each_leaf(what: str, f: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Map over the leaves of a tree: tensors, NumPy arrays and numbers; None, which `grad` gives for a string, stays.

    Ranks pair leaves by their order. At the first leaf they compare the keys of the whole tree.
    """

    def one(leaf: Any) -> Tensor:
        if isinstance(leaf, Tracked):
            raise SpecError(
                f"{what} of what was computed from the batch under data_parallel(shards=) outside value_and_grad, "
                "whose bits depend on the number of ranks",
                remedy="return it as aux of the function that is differentiated (has_aux=True)",
            )
        leaf = as_tensor(leaf)
        if isinstance(leaf, Array) and not leaf.spec.entries:  # that a step refers to
            leaf = leaf.local
        if isinstance(leaf, int | float | complex | np.number | np.bool_):
            leaf = torch.tensor(leaf, device="cpu")
        if not isinstance(leaf, Tensor):
            raise SpecError(
                f'{what} got unexpected type for argument "x"',
                expected="a tensor, a number or a tree of them",
                got=type(leaf).__name__,
                remedy="pass its .local, this rank's part" if isinstance(leaf, Array) else "",
            )
        check_tensor(what, "x", leaf)
        return f(leaf)

    leaves, treedef = trees.flatten(x)
    if not leaves or leaves[0] is x:
        return trees.unflatten(treedef, [one(leaf) for leaf in leaves])
    present = [number for number, leaf in enumerate(leaves) if leaf is not None]
    keys = trees.keys_text(treedef) + ("" if len(present) == len(leaves) else f", None but for {present}")
    for number in present:
        with labelled(f"of {keys}") if number == present[0] else nullcontext():
            leaves[number] = one(leaves[number])
    return trees.unflatten(treedef, leaves)


def known(source: Tensor, result: Tensor, *, same: tuple[str, ...] = (), differs: tuple[str, ...] = ()) -> Tensor:
    """Mark a result as its source is marked, but as equal along `same` and different along `differs`."""
    axes = differs_over(source)
    if axes is not None:
        mark(result, (axes - set(same)) | set(differs))
    return result


def check_dim(what: str, name: str, dim: Any, ndim: int) -> int:
    """A checked dimension, counted from the front."""
    if not is_whole(dim) or not -ndim <= dim < ndim:
        expected = f"{-ndim} to {ndim - 1}" if ndim else "a tensor with at least one dimension"
        raise SpecError(f'{what} got a bad "{name}"', got=repr(dim), expected=expected)
    return dim % ndim
