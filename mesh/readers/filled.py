"""Batches that every rank reads from its own virtual streams, whose lengths are known only once they are read.

Beside `sized`, for those of which they are known beforehand. Invariant: all processes agree on how many samples each
stream gave.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from .. import agreement, trees
from ..array import meta
from ..batch import Deal
from ..launch import launched
from ..mesh import Mesh
from ..rank.local_values import LocalValues
from ..spec import Layout, split_sizes, strided_sizes
from .asking import Asked, Reader, ask

Found = dict[int, tuple[int, Any]]
"""By virtual stream: how many samples it gave, and where it is now."""


def fill_streams(
    mesh: Mesh,
    name: str,
    reader: Reader,
    requests: Sequence[tuple[tuple, tuple[int, int]]],
    shards: int | None,
    remedy: str,
) -> list[Callable[[], tuple[Any, Found]]]:
    """Have every rank read its part of batches; for each a function that waits for it and gives the tree of Arrays, or
    None, and what was found.

    Args:
        name: what is read, for messages.
        reader: of `reader(session, *arguments) -> (treedef, leaves, OutputMeta of each, Found)`, called on every rank.
        requests: for each batch the arguments, and the position of its `Deal`.
        shards: of the `Deal`.
        remedy: what to do where the ranks' parts do not fit together.
    """
    if not mesh.is_driver:
        return [functools.partial(_here, mesh, reader.obj, *request, shards) for request in requests]

    def there(asked: Asked, position: tuple[int, int]) -> tuple[Any, Found]:
        descriptions, parts = asked.descriptions()
        found = {stream: its for (part,) in parts for stream, its in part.items()}
        if not any(count for count, _ in found.values()):
            return None, found
        deal = _deal(asked.layout, found, position, shards)
        return asked.tree(descriptions, deal, name=name, remedy=remedy), found

    asked = ask(mesh, reader, [arguments for arguments, _ in requests])
    return [functools.partial(there, one, position) for one, (_, position) in zip(asked, requests, strict=True)]


def _here(
    mesh: Mesh, reader: Any, arguments: tuple, position: tuple[int, int], shards: int | None
) -> tuple[Any, Found]:
    session, layout = mesh.session, mesh.layout

    def read() -> tuple[Any, list[Any], list[agreement.OutputMeta], Found]:
        treedef, leaves, outputs, mine = reader(session, *arguments)
        everyone = session.comm().all_gather_bytes(json.dumps(list(mine.items())).encode())
        return treedef, leaves, outputs, {v: (n, at) for each in everyone for v, (n, at) in json.loads(each)}

    treedef, leaves, outputs, found = launched.call(session, read)
    total = sum(count for count, _ in found.values())
    if not total:
        return None, found
    held: dict[tuple[str, ...], list[int]] = {}  # by the axes that a leaf is cut along
    metas, tensors, shapes = [], [], []
    for leaf, about in zip(leaves, outputs, strict=True):
        if about.spec is None:
            continue
        shape, each = about.shape, None
        if about.spec.entries:
            axes, shape = about.spec.dim_axes(0), (total, *about.shape[1:])
            if axes not in held:
                held[axes] = _held(layout, axes, found)
            each = tuple((count, *about.shape[1:]) for count in held[axes])
        metas.append(meta(shape, about.dtype, about.spec))
        tensors.append(leaf)
        shapes.append(each)
    deal = _deal(layout, found, position, shards)
    arrays = iter(LocalValues(session, tensors, metas, shapes, deal=deal).arrays(mesh))
    made = [leaf if about.spec is None else next(arrays) for leaf, about in zip(leaves, outputs, strict=True)]
    return trees.unflatten(treedef, made), found


def _held(layout: Layout, axes: tuple[str, ...], found: Found) -> list[int]:
    """How many samples each rank has of a batch that is cut along some axes."""
    ends = list(itertools.accumulate(split_sizes(len(found), layout.parts(axes)), initial=0))
    parts = [sum(found[v][0] for v in range(begin, end)) for begin, end in itertools.pairwise(ends)]
    return [parts[layout.part(rank, axes)] for rank in range(layout.size)]


def _deal(layout: Layout, found: Found, position: tuple[int, int], shards: int | None) -> Deal:
    """How it was dealt; without `shards` sizes are said where a rank has no samples, which steps have to know of."""
    sizes = [found[v][0] for v in sorted(found)]
    if shards is None:
        ends = list(itertools.accumulate(split_sizes(len(sizes), layout.axes[layout.batch_axis])))
        usual = all(sum(sizes[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))
    else:
        usual = sizes == strided_sizes(sum(sizes), shards)
    return Deal(position, shards, None if usual else tuple(sizes))
