"""The named-axis collectives: functions of a tree of tensors, differentiable, with `jax.lax`'s semantics.

Each leaf is handled alone. A tensor that takes part in a gradient goes through an autograd function whose backward is
the collective's transpose (the table in DESIGN section 4), itself one of these functions, so that gradients of
gradients follow. Invariant: all ranks of the axis make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.communicator import Communicator
from ..kernels.errors import SpecError, message
from ..mesh import trees
from ..mesh.rank import RankSession
from ..mesh.region import mark, marked, require

Axis = str | tuple[str, ...]


def _group(what: str, axis: Axis) -> tuple[RankSession, tuple[str, ...], Communicator]:
    session = require(what).session
    if not isinstance(axis, str | tuple | list) or not axis:
        raise SpecError(message(f'{what} got a bad "axis"', got=repr(axis), expected="an axis name or a tuple of them"))
    axes = session.axes(axis if isinstance(axis, str) else tuple(axis), what=what)
    return session, axes, session.comm(axes)


def _leaf(what: str, x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, int | float | complex):
        return torch.tensor(x)
    raise SpecError(
        message(
            f'{what} got unexpected type for argument "x"',
            expected="a tensor, a number or a tree of them",
            got=type(x).__name__,
        )
    )


def _map(what: str, f: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    return trees.map(lambda leaf: f(_leaf(what, leaf)), x)


def _known(source: torch.Tensor, result: torch.Tensor, *, without: Sequence[str] = (), plus: Sequence[str] = ()) -> Any:
    """Carry over what is known of the axes that a tensor differs over."""
    axes = marked(source)
    if axes is not None:
        mark(result, (axes - set(without)) | set(plus))
    return result


# -- reductions --------------------------------------------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """Transpose: the sum of the cotangents of all ranks."""

    @staticmethod
    def forward(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        return comm.all_reduced(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.comm = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Sum.apply(gradient, ctx.comm), None


class _Extreme(torch.autograd.Function):
    """Transpose: to the ranks that hold the extreme, shared evenly among ties."""

    @staticmethod
    def forward(x: torch.Tensor, comm: Communicator, op: str) -> torch.Tensor:
        return comm.all_reduced(x, op)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        x, ctx.comm, _ = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, extreme = ctx.saved_tensors
        holds = (x == extreme).to(x.dtype)
        share = holds / ctx.comm.all_reduced(holds)
        return _Sum.apply(gradient, ctx.comm) * share, None, None


def psum(x: Any, axis: Axis) -> Any:
    """Sum over the ranks along `axis`.

    On two ranks that hold 1.0 and 2.0, `psum(x, "data")` is 3.0 on both.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis; booleans are counted (int64).
        axis: mesh axis, or a tuple of them.

    Returns:
        The sum, same shape, on every rank of the axis; ranks are added in rank order.

    Raises:
        SpecError: no such axis. MeshError: outside a region. CollectiveMismatch: ranks disagree.
    """
    _, axes, comm = _group("psum", axis)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        source = leaf
        if leaf.dtype is torch.bool:
            leaf = leaf.to(torch.int64)
        result = _Sum.apply(leaf, comm) if leaf.requires_grad else comm.all_reduced(leaf)
        return _known(source, result, without=axes)

    return _map("psum", one, x)


def pmean(x: Any, axis: Axis) -> Any:
    """Mean over the ranks along `axis`; of integers and booleans it is a float.

    On two ranks that hold 1.0 and 2.0, `pmean(x, "data")` is 1.5 on both.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them.

    Returns:
        The mean, same shape, on every rank of the axis. Each rank counts alike, whatever its share of a batch.

    Raises:
        as `psum`.
    """
    _, _, comm = _group("pmean", axis)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            axes = marked(leaf)
            leaf = leaf.to(torch.get_default_dtype())
            if axes is not None:
                mark(leaf, axes)
        total = psum(leaf, axis)
        return _known(total, total / comm.size)

    return _map("pmean", one, x)


def _extreme(what: str, op: str, x: Any, axis: Axis) -> Any:
    _, axes, comm = _group(what, axis)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        result = _Extreme.apply(leaf, comm, op) if leaf.requires_grad else comm.all_reduced(leaf, op)
        return _known(leaf, result, without=axes)

    return _map(what, one, x)


def pmax(x: Any, axis: Axis) -> Any:
    """Elementwise maximum over the ranks along `axis`.

    Args, Returns, Raises: as `psum`. The gradient goes to the ranks that hold the maximum, shared among ties.
    """
    return _extreme("pmax", "max", x, axis)


def pmin(x: Any, axis: Axis) -> Any:
    """Elementwise minimum over the ranks along `axis`.

    Args, Returns, Raises: as `psum`. The gradient goes to the ranks that hold the minimum, shared among ties.
    """
    return _extreme("pmin", "min", x, axis)


# -- gathering and scattering --------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """Stacks the ranks' tensors along a new first dimension. Transpose: `_Scatter`."""

    @staticmethod
    def forward(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        out = torch.empty((comm.size, *x.shape), dtype=x.dtype)
        comm.all_gather(list(out.unbind(0)), x)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.comm = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Scatter.apply(gradient, ctx.comm), None


class _Scatter(torch.autograd.Function):
    """Sums over ranks and keeps this rank's entry of the first dimension. Transpose: `_Gather`."""

    @staticmethod
    def forward(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        out = torch.empty(x.shape[1:], dtype=x.dtype)
        comm.reduce_scatter(out, list(x.unbind(0)))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.comm = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Gather.apply(gradient, ctx.comm), None


class _Exchange(torch.autograd.Function):
    """Entry i of the first dimension goes to rank i. Transpose: itself."""

    @staticmethod
    def forward(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        comm.all_to_all(list(out.unbind(0)), list(x.unbind(0)))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.comm = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Exchange.apply(gradient, ctx.comm), None


class _Permute(torch.autograd.Function):
    """Sends along pairs; a rank that receives nothing gets zeros. Transpose: along the inverse pairs."""

    @staticmethod
    def forward(x: torch.Tensor, comm: Communicator, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        empty = torch.empty((0, *x.shape), dtype=x.dtype)
        targets = {dst for src, dst in pairs if src == comm.rank}
        sources = {src for src, dst in pairs if dst == comm.rank}
        sends = [x if rank in targets else empty for rank in range(comm.size)]
        out = torch.zeros(x.shape, dtype=x.dtype)
        recvs = [out if rank in sources else torch.empty_like(empty) for rank in range(comm.size)]
        comm.all_to_all(recvs, sends)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, ctx.comm, ctx.pairs = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Permute.apply(gradient, ctx.comm, tuple((dst, src) for src, dst in ctx.pairs)), None, None


class _Broadcast(torch.autograd.Function):
    """The source's tensor on all ranks. Transpose: the sum at the source, zero elsewhere."""

    @staticmethod
    def forward(x: torch.Tensor, comm: Communicator, source: int) -> torch.Tensor:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        comm.broadcast(out, src=source)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, ctx.comm, ctx.source = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        total = _Sum.apply(gradient, ctx.comm)
        return (total if ctx.comm.rank == ctx.source else torch.zeros_like(total)), None, None


def _dim(what: str, name: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise SpecError(message(f'{what} got a bad "{name}"', got=dim, expected=f"{-ndim} to {ndim - 1}"))
    return dim % ndim


def all_gather(x: Any, axis: Axis, *, dim: int = 0, tiled: bool = False) -> Any:
    """The tensors of all ranks along `axis`, on each of them.

    On two ranks that hold [1, 2] and [3, 4], `all_gather(x, "data")` is [[1, 2], [3, 4]], and with `tiled=True`
    it is [1, 2, 3, 4].

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them (first name major).
        dim: where the new dimension goes, or with `tiled` the dimension along which the tensors are joined.
        tiled: join along an existing dimension instead of stacking along a new one.

    Returns:
        The stacked (one dimension more) or joined (`dim` as many times longer as there are ranks) tensor.

    Raises:
        as `psum`, and SpecError for a bad `dim`.
    """
    _, axes, comm = _group("all_gather", axis)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        at = _dim("all_gather", "dim", dim, leaf.dim() + (not tiled))
        stacked = _Gather.apply(leaf, comm)
        result = stacked.movedim(0, at)
        if tiled:
            result = result.flatten(at, at + 1)
        return _known(leaf, result, without=axes)

    return _map("all_gather", one, x)


def psum_scatter(x: Any, axis: Axis, *, dim: int = 0, tiled: bool = False) -> Any:
    """Sum over the ranks along `axis`, of which each keeps one part.

    On two ranks that hold [1, 2] and [3, 4], `psum_scatter(x, "data")` is 4 on the first and 6 on the second.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them (first name major).
        dim: the dimension that is divided: without `tiled` its size is the number of ranks, and it goes.
        tiled: keep `dim`, as many times shorter as there are ranks.

    Raises:
        as `psum`, and SpecError where the size of `dim` does not fit.
    """
    _, axes, comm = _group("psum_scatter", axis)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        source = leaf
        if leaf.dtype is torch.bool:
            leaf = leaf.to(torch.int64)
        at = _dim("psum_scatter", "dim", dim, leaf.dim())
        pieces = _divide("psum_scatter", leaf, at, comm.size, tiled)
        return _known(source, _Scatter.apply(pieces.contiguous(), comm), plus=axes)

    return _map("psum_scatter", one, x)


def _divide(what: str, leaf: torch.Tensor, dim: int, size: int, tiled: bool) -> torch.Tensor:
    """`leaf` with a new first dimension of `size` parts of `dim` (which goes, unless `tiled`)."""
    length = leaf.shape[dim]
    if (tiled and length % size) or (not tiled and length != size):
        expected = f"a multiple of {size}" if tiled else f"{size}, the size of the axis (or tiled=True)"
        raise SpecError(
            message(f"{what}: dimension {dim} does not fit the axis", got=f"size {length}", expected=expected)
        )
    if tiled:
        return leaf.unflatten(dim, (size, length // size)).movedim(dim, 0)
    return leaf.movedim(dim, 0)


def all_to_all(x: Any, axis: Axis, split_dim: int, concat_dim: int, *, tiled: bool = False) -> Any:
    """Give part i of `split_dim` to rank i of the axis, and line up what comes along `concat_dim`.

    On two ranks that hold [[1, 2]] and [[3, 4]], `all_to_all(x, "data", 1, 0, tiled=True)` is [[1], [3]] and [[2], [4]].

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them (first name major).
        split_dim: the dimension that is divided: without `tiled` its size is the number of ranks, and it goes.
        concat_dim: where the parts line up: without `tiled` a new dimension of the result.
        tiled: keep both dimensions, one shorter, the other longer.

    Raises:
        as `psum`, and SpecError where the sizes do not fit.
    """
    _, axes, comm = _group("all_to_all", axis)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        split = _dim("all_to_all", "split_dim", split_dim, leaf.dim())
        concat = _dim("all_to_all", "concat_dim", concat_dim, leaf.dim())
        pieces = _divide("all_to_all", leaf, split, comm.size, tiled)
        result = _Exchange.apply(pieces.contiguous(), comm).movedim(0, concat)
        if tiled:
            result = result.flatten(concat, concat + 1)
        return _known(leaf, result, plus=axes)

    return _map("all_to_all", one, x)


def ppermute(x: Any, axis: Axis, perm: Sequence[tuple[int, int]]) -> Any:
    """Send along pairs (source, destination) of indices on `axis`; a rank that nothing is sent to gets zeros.

    On two ranks that hold 1 and 2, `ppermute(x, "data", [(0, 1)])` is 0 on the first and 1 on the second.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them (first name major).
        perm: pairs; no source and no destination may appear twice.

    Raises:
        as `psum`, and SpecError for pairs that are not such.
    """
    _, axes, comm = _group("ppermute", axis)
    pairs = tuple((int(src), int(dst)) for src, dst in perm)
    for which, side in (("source", [src for src, _ in pairs]), ("destination", [dst for _, dst in pairs])):
        if len(set(side)) < len(side) or any(not 0 <= index < comm.size for index in side):
            raise SpecError(
                message(f'ppermute got a bad "perm": each {which} at most once, 0 to {comm.size - 1}', got=list(pairs))
            )
    return _map("ppermute", lambda leaf: _known(leaf, _Permute.apply(leaf, comm, pairs), plus=axes), x)


def pbroadcast(x: Any, axis: Axis, source: int) -> Any:
    """The value of the rank with index `source` on `axis`, on every rank of the axis.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them (first name major).
        source: index on the axis.

    Raises:
        as `psum`, and SpecError for a bad `source`.
    """
    _, axes, comm = _group("pbroadcast", axis)
    if not 0 <= source < comm.size:
        raise SpecError(message('pbroadcast got a bad "source"', got=source, expected=f"0 to {comm.size - 1}"))
    return _map("pbroadcast", lambda leaf: _known(leaf, _Broadcast.apply(leaf, comm, source), without=axes), x)


# -- places ------------------------------------------------------------------------------------------------------------------


def axis_index(axis: Axis) -> int:
    """This rank's index along `axis` (over a tuple: first name major).

    Raises:
        SpecError: no such axis. MeshError: outside a region.
    """
    session, axes, _ = _place("axis_index", axis)
    return session.layout.part(session.rank, axes)


def axis_size(axis: Axis) -> int:
    """The number of ranks along `axis`.

    Raises:
        SpecError: no such axis. MeshError: outside a region.
    """
    session, axes, _ = _place("axis_size", axis)
    return session.layout.parts(axes)


def _place(what: str, axis: Axis) -> tuple[RankSession, tuple[str, ...], None]:
    session = require(what).session
    return session, session.axes(axis if isinstance(axis, str) else tuple(axis), what=what), None


def barrier(axis: Axis | None = None) -> None:
    """Wait until every rank along `axis` (None: of the mesh) is here.

    Raises:
        SpecError: no such axis. MeshError: outside a region.
    """
    session = require("barrier").session
    session.comm(session.axes(axis if axis is None or isinstance(axis, str) else tuple(axis), what="barrier")).barrier()
