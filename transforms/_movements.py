"""The named-axis collectives that move data, with `jax.lax`'s semantics: functions of a tree of tensors, leaf by leaf.

Each moves the dimension with one entry for each rank to the front, where the operation works, and then to its place.
Invariant: all ranks of the axis make the same calls in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..kernels.arguments import checked_flag, whole
from ..kernels.callsite import public
from ..kernels.errors import SpecError
from ..mesh.replication.net import Varying, active
from ._named_axes import Axis, axis_size, check_dim, each_leaf, group, known
from ._operations import Broadcast, Exchange, Gather, Permute, Scatter
from ._reductions import counted
from ._tokens import run
from .compiled.tracing import each, traceable


@public
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
        The stacked tensor (one dimension more), or the joined one (`dim` is longer by a factor of the number of ranks).

    Raises:
        as `psum`, and SpecError for a bad `dim` or `tiled`.
    """
    tiled = checked_flag("all_gather", "tiled", tiled)

    def along(leaf: Tensor) -> str:
        return f"dim={check_dim('all_gather', 'dim', dim, leaf.dim() + (not tiled))} tiled={tiled}"

    def lined_up(stacked: Tensor) -> Tensor:
        return _united(stacked, check_dim("all_gather", "dim", dim, stacked.dim() - tiled), tiled)

    def fits(leaf: Tensor, size: int) -> bool:
        return isinstance(dim, int) and -leaf.dim() - (not tiled) <= dim < leaf.dim() + (not tiled)

    if is_dynamo_compiling() and traceable(x, axis, replicates=True, fits=fits):
        return each("all_gather", x, axis, along=along, after=lined_up)
    axes, comm = group("all_gather", axis)

    def one(leaf: Tensor) -> Tensor:
        return known(leaf, lined_up(run(Gather(comm, along(leaf)), leaf)), same=axes)

    return each_leaf("all_gather", one, x)


@public
def psum_scatter(x: Any, axis: Axis, *, dim: int = 0, tiled: bool = False) -> Any:
    """Sum over the ranks along `axis`; each rank keeps one part of the sum.

    On two ranks that hold [1, 2] and [3, 4], `psum_scatter(x, "data")` is 4 on the first and 6 on the second.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them (first name major).
        dim: the dimension to divide; without `tiled` its size must be the number of ranks, and it is removed.
        tiled: keep `dim`, shorter by a factor of the number of ranks.

    Returns:
        This rank's part of the sum: without `dim`, or with `tiled` one slice along `dim`.

    Raises:
        as `psum`, and SpecError where the size of `dim` does not fit.
    """
    tiled = checked_flag("psum_scatter", "tiled", tiled)

    def along(leaf: Tensor) -> str:
        return f"dim={check_dim('psum_scatter', 'dim', dim, leaf.dim())} tiled={tiled}"

    def pieces(leaf: Tensor, size: int) -> Tensor:
        at = check_dim("psum_scatter", "dim", dim, leaf.dim())
        return _divide("psum_scatter", counted(leaf), at, size, tiled)

    if is_dynamo_compiling() and traceable(x, axis, replicates=False, fits=_divisible(dim, tiled)):
        size = axis_size(axis)
        return each("psum_scatter", x, axis, along=along, before=lambda leaf: pieces(leaf, size))
    axes, comm = group("psum_scatter", axis)

    def one(leaf: Tensor) -> Tensor:
        return known(leaf, run(Scatter(comm, along(leaf)), pieces(leaf, comm.size)), differs=axes)

    return each_leaf("psum_scatter", one, x)


def _divisible(dim: Any, tiled: bool) -> Callable[[Tensor, int], bool]:
    """Whether `_divide` takes a leaf."""

    def fits(leaf: Tensor, size: int) -> bool:
        if not isinstance(dim, int) or not -leaf.dim() <= dim < leaf.dim():
            return False
        return leaf.shape[dim] % size == 0 if tiled else leaf.shape[dim] == size

    return fits


def _united(parts: Tensor, dim: int, tiled: bool) -> Tensor:
    """The first dimension put at `dim`; if `tiled`, the parts are joined along that dimension."""
    result = parts.movedim(0, dim)
    return result.flatten(dim, dim + 1) if tiled else result


def _divide(what: str, leaf: Tensor, dim: int, size: int, tiled: bool) -> Tensor:
    """`leaf` with a new first dimension of `size` parts of `dim` (which goes, unless `tiled`)."""
    length = leaf.shape[dim]
    if (tiled and length % size) or (not tiled and length != size):
        expected = f"a multiple of {size}" if tiled else f"{size}, the size of the axis (or tiled=True)"
        raise SpecError(
            f"{what}: dimension {dim} does not fit the axis",
            got=f"size {length}",
            expected=expected,
            remedy="pad it with zeros, and leave these out afterwards; a batch also divides by drop_last=True",
        )
    if tiled:
        return leaf.unflatten(dim, (size, length // size)).movedim(dim, 0)
    return leaf.movedim(dim, 0)


@public
def all_to_all(x: Any, axis: Axis, split_dim: int, concat_dim: int, *, tiled: bool = False) -> Any:
    """Send part i of `split_dim` to rank i of the axis, and join the received parts along `concat_dim`.

    On two ranks that hold [[1, 2]] and [[3, 4]], `all_to_all(x, "data", 1, 0, tiled=True)` is [[1], [3]] on the first
    and [[2], [4]] on the second.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them (first name major).
        split_dim: the dimension to divide; without `tiled` its size must be the number of ranks, and it is removed.
        concat_dim: the dimension along which parts are joined; without `tiled` it is a new one.
        tiled: keep both dimensions; the first gets shorter, the second longer.

    Returns:
        The parts, in the order of the ranks that they came from.

    Raises:
        as `psum`, and SpecError where the sizes do not fit.
    """
    tiled = checked_flag("all_to_all", "tiled", tiled)

    def along(leaf: Tensor) -> str:
        split = check_dim("all_to_all", "split_dim", split_dim, leaf.dim())
        concat = check_dim("all_to_all", "concat_dim", concat_dim, leaf.dim())
        return f"split_dim={split} concat_dim={concat} tiled={tiled}"

    def pieces(leaf: Tensor, size: int) -> Tensor:
        split = check_dim("all_to_all", "split_dim", split_dim, leaf.dim())
        return _divide("all_to_all", leaf, split, size, tiled)

    def lined_up(parts: Tensor) -> Tensor:
        return _united(parts, check_dim("all_to_all", "concat_dim", concat_dim, parts.dim() - tiled), tiled)

    def fits(leaf: Tensor, size: int) -> bool:
        divisible = _divisible(split_dim, tiled)(leaf, size)
        return divisible and isinstance(concat_dim, int) and -leaf.dim() <= concat_dim < leaf.dim()

    if is_dynamo_compiling() and traceable(x, axis, replicates=False, fits=fits):
        size = axis_size(axis)
        return each("all_to_all", x, axis, along=along, before=lambda leaf: pieces(leaf, size), after=lined_up)
    axes, comm = group("all_to_all", axis)

    def one(leaf: Tensor) -> Tensor:
        return known(leaf, lined_up(run(Exchange(comm, along(leaf)), pieces(leaf, comm.size))), differs=axes)

    return each_leaf("all_to_all", one, x)


@public
def ppermute(x: Any, axis: Axis, perm: Sequence[tuple[int, int]]) -> Any:
    """Send from source to destination, for pairs of indices on `axis`; a rank that nothing is sent to gets zeros.

    On two ranks that hold 1 and 2, `ppermute(x, "data", [(0, 1)])` is 0 on the first and 1 on the second.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them (first name major).
        perm: pairs; no source and no destination may appear twice.

    Returns:
        What was sent to this rank, in the same shape, or zeros.

    Raises:
        as `psum`, and SpecError for a bad `perm`.
    """
    if is_dynamo_compiling() and traceable(x, axis, replicates=False):
        pairs = _pairs(perm, axis_size(axis))
        return each("ppermute", x, axis, [src for src, _ in pairs], [dst for _, dst in pairs])
    axes, comm = group("ppermute", axis)
    pairs = _pairs(perm, comm.size)
    return each_leaf("ppermute", lambda leaf: known(leaf, run(Permute(comm, pairs), leaf), differs=axes), x)


def _pairs(perm: Sequence[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple((operator.index(src), operator.index(dst)) for src, dst in perm)
    except (TypeError, ValueError):
        expected = "a list of pairs (source, destination)"
        raise SpecError('ppermute got a bad "perm"', got=repr(perm), expected=expected) from None
    for which, side in (("source", [src for src, _ in pairs]), ("destination", [dst for _, dst in pairs])):
        if len(set(side)) < len(side) or any(not 0 <= index < size for index in side):
            raise SpecError(f'ppermute got a bad "perm": each {which} at most once, 0 to {size - 1}', got=list(pairs))
    return pairs


@public
def pbroadcast(x: Any, axis: Axis, source: int) -> Any:
    """The value of the rank with index `source` on `axis`, on every rank of the axis.

    Args:
        x: tensor or tree of tensors, the same shapes on all ranks of the axis.
        axis: mesh axis, or a tuple of them (first name major).
        source: index on the axis.

    Returns:
        The source's value, in the same shape, on every rank of the axis.

    Raises:
        as `psum`, and SpecError for a bad `source`.
    """
    if is_dynamo_compiling() and traceable(
        x, axis, replicates=True, fits=lambda _, size: type(source) is int and 0 <= source < size
    ):
        return each("pbroadcast", x, axis, source)
    axes, comm = group("pbroadcast", axis)
    index = whole(source)
    if index is None or not 0 <= index < comm.size:
        raise SpecError('pbroadcast got a bad "source"', got=repr(source), expected=f"0 to {comm.size - 1}")
    return each_leaf("pbroadcast", lambda leaf: known(leaf, run(Broadcast(comm, index), leaf), same=axes), x)


def gather_written(
    length: int, dtype: torch.dtype, axis: Axis, write: Callable[[Tensor], None], into: Tensor | None = None
) -> Tensor:
    """All ranks' slices along `axis`, end to end in one tensor, each written in place by its rank; not differentiable.

    The sharded optimizer makes parameters with it: on shared memory nothing is copied.

    Args:
        length: elements of each slice.
        write: fills this rank's slice.
        into: an earlier result to overwrite, if all ranks have the same one and no longer use it.
    """
    axes, comm = group("all_gather", axis)
    net = active()
    if net is None:
        return comm.all_gathered(length, dtype, write, into)
    slices: list[Varying] = []

    def write_followed(out: Tensor) -> None:
        write(out)
        slices.append(net.of(out))

    gathered = comm.all_gathered(length, dtype, write_followed, into)
    net.result(gathered, slices[0].without(axes))
    return gathered


def can_rewrite(result: Tensor | None, axis: Axis) -> bool:
    """Whether an earlier result of `gather_written` is the same on all ranks along `axis`, and may be overwritten."""
    return group("all_gather", axis)[1].can_rewrite(result)
