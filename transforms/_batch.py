"""The batch of a step within a region: this rank's part of every leaf, and how many samples there are.

A leaf that was cut on the way into the region is this rank's part already; a whole leaf is cut here.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.errors import SpecError, add_note
from ..mesh import trees
from ..mesh.batch import BatchArgument, common_length, refuse_lists
from ..mesh.failure import text_of
from ..mesh.region import Region, planned_session
from ..mesh.replication.net import mark, marked
from ..mesh.spec import REPLICATED, P, block_of
from ._reductions import psum
from .exact.shards import VirtualShards
from .exact.tracked import as_tracked


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a batch: the tree, its tensors, the number of samples here and in the whole batch."""

    tree: Any
    leaves: tuple[Tensor, ...]
    here: int
    total: int
    virtual: VirtualShards | None


def part_of(region: Region, tree: Any, argument: BatchArgument, name: str) -> Part:
    """This rank's part of the batch `tree`.

    Raises:
        SpecError: a leaf has no dimension to split, leaves differ in length, or the batch was dealt in another way.
    """
    axis, session, called = argument.axis, region.session, functools.partial(_called, tree)
    if argument.shards is not None and planned_session() is not None:
        problem = f"check cannot follow {name} through the virtual shards of data_parallel(shards={argument.shards})"
        raise SpecError(problem, remedy="check it without shards=, whose results have the same shapes and specs")
    leaves, treedef = trees.flatten(tree)
    cut, whole = _lengths(region, leaves, argument, name, called)
    here, total = next(iter(cut.values()), None), next(iter(whole.values()), None)
    if here is not None:
        # A leaf that is cut over other axes as well has fewer samples along this one.
        along = {name for i in cut for name in getattr(leaves[i], "_spmd_spec", REPLICATED).dim_axes(0)}
        known = region.total if region.batch.axis == axis and along <= {axis} else None
        total = int(psum(torch.tensor(here, device="cpu"), axis)) if known is None else known
    if len(cut) + len(whole) < len(leaves):
        refuse_lists(tree, total or 0, name)
    mine = block_of(total or 0, session.layout.axes[axis], session.layout.coords(session.rank)[axis])
    virtual = None if argument.shards is None else _virtual(region, argument, here, total or 0)
    if here is None:
        here = len(mine) if virtual is None else virtual.here

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        axes = marked(leaf) or frozenset()
        if axis not in axes:
            leaf = leaf[mine.start : mine.stop] if virtual is None else virtual.deal(leaf)
            mark(leaf, axes | {axis}, "the batch")
        if virtual is not None:
            leaf = mark(as_tracked(leaf), axes | {axis})
            virtual.batch.append(leaf)
        return leaf

    if whole or virtual is not None:
        leaves = [part(leaf) for leaf in leaves]
        tree = trees.unflatten(treedef, leaves)
    if virtual is not None:
        virtual.tree = tree
    tensors = tuple([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    return Part(tree, tensors, here, total or 0, virtual)


def _virtual(region: Region, argument: BatchArgument, here: int | None, total: int) -> VirtualShards:
    """The virtual shards of a batch of which this rank has `here` samples already, or that is whole."""
    session = region.session
    assert argument.shards is not None
    sizes = None if here is None else region.batch.sizes
    virtual = VirtualShards.of(session.layout, session.rank, argument.axis, argument.shards, total, sizes)
    if here not in (None, virtual.here):
        raise SpecError(
            "a batch's parts are not those of its virtual shards",
            got=f"{here} samples of {total}",
            where=session.where(),
            remedy="pass the batch as the Loader gave it, or whole; let a collate_fn make one row of each sample",
        )
    return virtual


def _lengths(
    region: Region, leaves: list[Any], argument: BatchArgument, name: str, called: Callable[[int], str]
) -> tuple[dict[int, int], dict[int, int]]:
    """The lengths, by index, of the leaves that are this rank's part already, and of those that are whole."""
    axis, session = argument.axis, region.session
    cut: dict[int, int] = {}
    whole: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if not leaf.dim():
                problem = f"{called(index)} of {name} has no dimension to split"
                raise SpecError(problem, remedy="pass scalars in another argument")
            spec: P = getattr(leaf, "_spmd_spec", REPLICATED)
            if axis in spec.axes and axis not in spec.dim_axes(0):
                raise SpecError(
                    f"{called(index)} of {name} is cut over {axis!r} along another dimension than its samples",
                    got=repr(spec),
                    expected=f"P({axis!r}), or a batch that is not cut",
                    where=session.where(),
                    remedy=f"put(array.full(), P({axis!r})), or leave the batch out of in_specs",
                )
            (cut if axis in (marked(leaf) or ()) else whole)[index] = leaf.shape[0]
    if cut and argument.shards is not None and region.batch.shards != argument.shards:
        batch_shards = region.batch.shards
        raise SpecError(
            f"a batch was cut before data_parallel(shards={argument.shards}), and not over as many virtual shards",
            got="ranks' parts" if batch_shards is None else f"a batch of Loader(shards={batch_shards})",
            remedy="give the same shards= to Loader and data_parallel, or pass the whole batch",
        )
    if cut and whole and session.layout.axes[axis] > 1:
        parts, others = (", ".join(map(called, some)) for some in (cut, whole))
        raise SpecError(
            f"the batch of {name} has leaves that are each rank's part already beside whole ones, whose rows would "
            "be of different samples",
            got=f"parts: {parts}; whole: {others}",
            where=session.where(),
            remedy="give all of it to the Loader's dataset, or pass all of it whole",
        )
    common_length({**cut, **whole}, called, name)
    return cut, whole


def _called(batch: Any, index: int) -> str:
    """What a leaf of a batch is called."""
    return f"batch{trees.paths(batch)[index]}"


def note_samples(error: Exception, arguments: Any, part: Part) -> None:
    """Add a hint to an error that the split may have caused: no samples here, or an argument with a row for all.

    Args:
        arguments: all arguments of the step, with this rank's part of the batch among them.
    """
    if part.here == part.total:
        return
    if not part.here and isinstance(error, RuntimeError | ValueError | IndexError):
        add_note(
            error,
            f"[this rank has none of the {part.total} samples, and the step may be unable to run on none: have batches "
            "of at least as many samples as ranks, or return an empty result of the same shape where len(batch) is 0]",
        )
        return
    if not {str(part.here), str(part.total)} <= set(re.findall(r"\d+", text_of(error))):  # sizes that the error names
        return
    split = {id(leaf) for leaf in part.leaves}
    for leaf in trees.leaves(arguments):
        if isinstance(leaf, Tensor) and part.total in leaf.shape and id(leaf) not in split:
            add_note(
                error,
                f"[this rank has {part.here} of {part.total} samples, and an argument besides the batch is whole, of "
                f"shape {list(leaf.shape)}: what belongs to samples is part of the batch, with these in dimension 0]",
            )
            return
