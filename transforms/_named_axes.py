"""Axis names inside a region: the group of ranks that a name stands for, and this rank's place in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..kernels.communicator import Communicator
from ..kernels.errors import SpecError, message
from ..mesh import trees
from ..mesh.placing import as_tensor
from ..mesh.rank import RankSession
from ..mesh.region import mark, require
from ._dealt import Dealt

Axis = str | tuple[str, ...]


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
    session, axes = place("axis_index", axis)
    return session.layout.part(session.rank, axes)


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
    session, axes = place("axis_size", axis)
    return session.layout.parts(axes)


def barrier(axis: Axis | None = None) -> None:
    """Wait until every rank along `axis` (None: of the mesh) is here.

    Args:
        axis: mesh axis, or a tuple of them.

    Raises:
        SpecError: no such axis. MeshError: outside a region.
    """
    session = require("barrier").session
    comm = session.comm(session.layout.names if axis is None else place("barrier", axis)[1])
    with temporarily_clear_interpreter_stack():  # torch.func has nothing to transform here
        comm.barrier()


def place(what: str, axis: Axis) -> tuple[RankSession, tuple[str, ...]]:
    """This rank's session, and `axis` as a checked tuple of names."""
    region = require(what)
    session = region.session
    if not isinstance(axis, str | tuple | list) or not axis:
        raise SpecError(message(f'{what} got a bad "axis"', got=repr(axis), expected="an axis name or a tuple of them"))
    axes = session.axes(axis if isinstance(axis, str) else tuple(axis), what=what)
    if region.shard is not None and region.virtual.axis in axes:
        raise SpecError(
            message(
                f"{what} over {region.virtual.axis!r} in a virtual shard, which runs alone, one after another",
                where=session.where(),
                remedy="return it as aux (has_aux=True), or leave shards= out of data_parallel",
            )
        )
    return session, axes


def group(what: str, axis: Axis) -> tuple[tuple[str, ...], Communicator]:
    """The checked names of `axis`, and the communicator of the ranks along it."""
    session, axes = place(what, axis)
    return axes, session.comm(axes)


def each_leaf(what: str, f: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Map over the leaves of a tree: tensors, NumPy arrays and numbers."""

    def one(leaf: Any) -> Tensor:
        if isinstance(leaf, Dealt):
            raise SpecError(
                message(
                    f"{what} of what was computed from the batch under data_parallel(shards=) outside value_and_grad, "
                    "whose bits depend on the number of ranks",
                    remedy="return it as aux of the function that is differentiated (has_aux=True)",
                )
            )
        leaf = as_tensor(leaf)
        if isinstance(leaf, int | float | complex):
            leaf = torch.tensor(leaf)
        if not isinstance(leaf, Tensor):
            raise SpecError(
                message(
                    f'{what} got unexpected type for argument "x"',
                    expected="a tensor, a number or a tree of them",
                    got=type(leaf).__name__,
                )
            )
        return f(leaf)

    return trees.map(one, x)


def differs_over(tensor: Any) -> frozenset[str] | None:
    """The axes along which a tensor is known to differ; None if nothing is known.

    So it is of a view of a tensor of which something is known, and of one that was changed in place since.
    """
    axes = getattr(tensor, "_spmd_axes", None)
    return axes if axes is None or getattr(tensor, "_spmd_version", None) in (None, _version(tensor)) else None


def note(tensor: Tensor, axes: frozenset[str]) -> Tensor:
    """Note that a tensor differs along `axes`, and is the same along all others."""
    tensor._spmd_version = _version(tensor)  # type: ignore[attr-defined]
    return mark(tensor, axes)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def known(source: Tensor, result: Tensor, *, same: tuple[str, ...] = (), differs: tuple[str, ...] = ()) -> Tensor:
    """Carry over what is known of the axes along which a tensor differs; along `same` it no longer does."""
    axes = differs_over(source)
    if axes is not None:
        note(result, (axes - set(same)) | set(differs))
    return result


def check_dim(what: str, name: str, dim: Any, ndim: int) -> int:
    """A dimension counted from the front."""
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        expected = f"{-ndim} to {ndim - 1}" if ndim else "a tensor with at least one dimension"
        raise SpecError(message(f'{what} got a bad "{name}"', got=dim, expected=expected))
    return dim % ndim
