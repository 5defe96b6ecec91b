"""`data_parallel`: split the batch over an axis, and make the step mean what it says on one device.

All it does is to cut the argument called `batch` (unless that was done on the way in) and to say how much this
rank's samples weigh; `grad` does the rest.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..kernels.errors import SpecError, message
from ..mesh import trees
from ..mesh.region import Region, mark, marked, require
from ..mesh.spec import split_sizes
from ._dealt import as_dealt
from ._reductions import psum
from ._virtual_shards import VirtualShards, agreed, check_count, stepping, without_batch


def data_parallel(
    f: Callable | None = None,
    *,
    axis: str = "data",
    batch: str = "batch",
    shards: int | None = None,
    bucket_mb: float = 25.0,
    wire_dtype: torch.dtype | None = None,
) -> Any:
    """Run a step on each rank's part of the batch; its gradients are those of the whole batch on one device.

    Uneven and empty parts are exact: means are weighted by the number of samples. A function that can't run on no
    samples at all contributes nothing on a rank that has none, unless it communicates. The step's values that are not
    results of `value_and_grad` are local: `psum` or `pmean` what is to be returned.

    Args:
        f: the step; one of its arguments is the batch.
        axis: the mesh axis to split over.
        batch: the name of the argument to split, each leaf along dimension 0 (all leaves of one length).
        shards: cut the global batch into this many virtual shards, and compute the same bits at any number of ranks:
            `value_and_grad` runs the shards of a rank one after another, each at its own fixed shape with random
            numbers of its own, and sums in a binary tree over all of them. More shards than ranks is gradient
            accumulation. Metrics come out as aux (`has_aux=True`); the step does nothing else with the batch. A
            batch is dealt by `Loader(shards=)` of the same number, or passed whole.
        bucket_mb: largest gradient bucket, in MiB.
        wire_dtype: dtype in which gradients travel, such as torch.bfloat16; None is their own.

    Returns:
        A function of the same arguments, to be called in a region or wrapped by `spmd`. Works bare and with arguments.

    Raises:
        SpecError: `f` has no such argument, or the batch's leaves differ in length.
    """
    if f is None:
        return functools.partial(
            data_parallel, axis=axis, batch=batch, shards=shards, bucket_mb=bucket_mb, wire_dtype=wire_dtype
        )
    shards = check_count(shards)
    if not bucket_mb > 0:
        raise SpecError(message("data_parallel got a bad bucket_mb", got=bucket_mb, expected="MiB, more than 0"))
    step = f
    signature = inspect.signature(step)
    which = _position(signature, batch, getattr(step, "__name__", "the step"))

    @functools.wraps(step)
    def parallel(*args: Any, **kwargs: Any) -> Any:
        region = require("a data_parallel function")
        region.session.axes(axis, what="data_parallel")
        bound = signature.bind(*args, **kwargs)
        if batch not in bound.arguments:
            raise SpecError(
                message(f"{parallel.__name__} was called without its batch", expected=f"an argument named {batch!r}")
            )
        if agreed(region, axis, shards):
            return step(*bound.args, **bound.kwargs)
        if shards is not None and region.session.device.type != "cpu":
            raise SpecError(
                message(
                    "data_parallel(shards=) computes on CPUs only",
                    got=f"a mesh of device {region.session.device.type!r}",
                    where=region.session.where(),
                    remedy='leave shards= out, or use Mesh(device="cpu")',
                )
            )
        virtual = None if shards is None else _deal(region, bound.arguments[batch], axis, shards)
        part, local, total = _split(region, bound.arguments[batch], axis, virtual)
        bound.arguments[batch] = part
        before = region.totals, region.bucket_mb, region.wire_dtype
        region.totals = {**region.totals, axis: (local, total)}
        region.bucket_mb, region.wire_dtype = bucket_mb, wire_dtype
        try:
            if virtual is None:
                return step(*bound.args, **bound.kwargs)
            with stepping(region, virtual):
                return without_batch(step(*bound.args, **bound.kwargs), parallel.__name__)
        finally:
            region.totals, region.bucket_mb, region.wire_dtype = before

    def lift(transform: Callable, argnums: Any, with_value: bool, has_aux: bool) -> Callable:
        """A transform of the parallel function is the parallel function of the transform."""
        return data_parallel(
            transform(step), axis=axis, batch=batch, shards=shards, bucket_mb=bucket_mb, wire_dtype=wire_dtype
        )

    parallel._spmd_batch = (which, batch, axis, shards)  # type: ignore[attr-defined]
    parallel._spmd_settings = {"shards": shards, "wire dtype": None if wire_dtype is None else str(wire_dtype)}  # type: ignore[attr-defined]
    parallel._spmd_lift = lift  # type: ignore[attr-defined]
    return parallel


def _position(signature: inspect.Signature, batch: str, name: str) -> int | None:
    """Where the batch comes among the positional arguments; None if it is keyword-only."""
    for index, parameter in enumerate(signature.parameters.values()):
        if parameter.name == batch:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                break
            return None if parameter.kind is parameter.KEYWORD_ONLY else index
    raise SpecError(
        message(
            f"{name} has no argument named {batch!r} to split",
            got=f"({', '.join(signature.parameters)})",
            remedy='name the batch with data_parallel(batch="...")',
        )
    )


def _deal(region: Region, tree: Any, axis: str, shards: int) -> VirtualShards:
    """The virtual shards of a batch, of which some leaves may have been dealt already."""
    here, total = None, None
    for leaf in trees.leaves(tree):
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            continue
        if axis not in (marked(leaf) or ()):
            total = leaf.shape[0]
        elif region.dealt != shards:
            raise SpecError(
                message(
                    f"a batch was cut before data_parallel(shards={shards}), and not over as many virtual shards",
                    got="ranks' parts" if region.dealt is None else f"a batch of Loader(shards={region.dealt})",
                    remedy="give the same shards= to Loader and data_parallel, or pass the whole batch",
                )
            )
        else:
            here = leaf.shape[0]
    if here is not None:
        known = region.batch_total if region.batch_axis == axis else None
        total = int(psum(torch.tensor(here), axis)) if known is None else known
    return VirtualShards.of(region, axis, shards, total or 0)


def _split(region: Region, tree: Any, axis: str, virtual: VirtualShards | None) -> tuple[Any, int, int]:
    """This rank's part of the batch, its number of samples, and that of the whole batch."""
    session = region.session
    parts, mine = session.layout.axes[axis], session.layout.coords(session.rank)[axis]
    lengths: set[int] = set()
    already = False

    def cut(leaf: Any) -> Any:
        nonlocal already
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dim() == 0:
            raise SpecError(
                message("a leaf of the batch has no dimension to split", remedy="pass it in another argument")
            )
        if axis in (marked(leaf) or ()):
            already = True
            lengths.add(leaf.shape[0])
            return dealt(leaf)
        if virtual is not None:
            part = virtual.deal(leaf)
            lengths.add(part.shape[0])
            return dealt(mark(part, (marked(leaf) or frozenset()) | {axis}))
        sizes = split_sizes(leaf.shape[0], parts)
        part = leaf[sum(sizes[:mine]) : sum(sizes[: mine + 1])]
        lengths.add(part.shape[0])
        return mark(part, (marked(leaf) or frozenset()) | {axis})

    def dealt(leaf: torch.Tensor) -> torch.Tensor:
        if virtual is None:
            return leaf
        part = mark(as_dealt(leaf), marked(leaf) or frozenset())
        virtual.batch.append(part)
        return part

    wholes = {leaf.shape[0] for leaf in trees.leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    tree = trees.map(cut, tree)
    if virtual is not None:
        virtual.tree = tree
    if len(lengths) > 1 or len(wholes) > 1:
        raise SpecError(
            message("the leaves of the batch differ in dimension 0", got=sorted(wholes), remedy="make them agree")
        )
    local = next(iter(lengths), 0)
    if virtual is not None:
        if local != sum(virtual.sizes[shard] for shard in virtual.owners[virtual.place]) and lengths:
            raise SpecError(
                message(
                    "a batch's parts are not those of its virtual shards",
                    got=f"{local} samples of {virtual.total}",
                    where=session.where(),
                    remedy="pass the batch as the Loader gave it, or whole",
                )
            )
        return tree, local, virtual.total
    if not already:
        return tree, local, next(iter(wholes), 0)
    if region.batch_total is not None and region.batch_axis == axis:
        return tree, local, region.batch_total
    return tree, local, int(psum(torch.tensor(local), axis))
