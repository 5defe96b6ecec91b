"""Batches of which every rank reads its own part; lengths are known before (`fill`) or after reading (`fill_streams`).

Invariant: all processes agree on how many samples each part has.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any

from .. import trees
from ..array import Meta, meta
from ..batch import Deal
from ..launch import launched
from ..mesh import Mesh
from ..rank.local_values import LocalValues
from ..replication import agreement
from ..replication.reports import OutputMeta, tensors_among
from ..spec import RAGGED, Layout, split_sizes
from .asking import Asked, Reader, ask

Found = dict[int, tuple[int, Any]]
"""Virtual stream -> how many samples it gave, and where it is now."""


def fill(
    mesh: Mesh,
    name: str,
    reader: Reader,
    requests: Sequence[tuple[tuple, Deal | None]],
    *,
    ragged: bool = False,
    collated: bool = False,
    remedies: agreement.Remedies,
) -> list[Callable[[], Any]]:
    """Have every rank read its part of batches; for each a function that waits for it and gives the tree of Arrays.

    Args:
        name: what is read, for messages.
        reader: a function `reader(session, *arguments) -> (treedef, leaves, OutputMeta of each)`, called on every rank.
        requests: for each batch the arguments, and how it was dealt.
        ragged: the parts may differ in more than dimension 0.
        collated: a part may have another number of rows than of samples.
        remedies: for the error if they do and may not.
    """

    def there(asked: Asked, deal: Deal | None) -> Any:
        descriptions, _ = asked.descriptions()
        return asked.tree(descriptions, deal, name=name, ragged=ragged, remedies=remedies)

    return _asked(mesh, reader, requests, there, functools.partial(_read_here, mesh, reader.obj, ragged, collated))


def fill_streams(
    mesh: Mesh, reader: Reader, requests: Sequence[tuple[tuple, Deal]], remedies: agreement.Remedies
) -> list[Callable[[], tuple[Any, Found]]]:
    """As `fill`, from virtual streams: each function gives the tree of Arrays, or None, and what was found.

    Args:
        reader: a function `reader(session, *arguments) -> (treedef, leaves, OutputMeta of each, Found)`, called on
            every rank.
        requests: for each batch the arguments, and its `Deal`, as far as it is known beforehand.
    """

    def there(asked: Asked, known: Deal) -> tuple[Any, Found]:
        descriptions, parts = asked.descriptions()
        found = {stream: its for (part,) in parts for stream, its in part.items()}
        if not any(count for count, _ in found.values()):
            return None, found
        deal = _deal(asked.layout, found, known)
        return asked.tree(descriptions, deal, name="the Loader's Stream", remedies=remedies), found

    return _asked(mesh, reader, requests, there, functools.partial(_stream_here, mesh, reader.obj))


def _asked(
    mesh: Mesh, reader: Reader, requests: Sequence[tuple[tuple, Any]], there: Callable[..., Any], here: Callable
) -> list[Callable[[], Any]]:
    """For each batch a function that waits for it: `there`, in a driver, after asking its ranks; `here`, on a rank."""
    if not mesh.is_driver:
        return [functools.partial(here, *request) for request in requests]
    asked = ask(mesh, reader, [arguments for arguments, _ in requests])
    return [functools.partial(there, one, dealt) for one, (_, dealt) in zip(asked, requests, strict=True)]


# -- on a launched rank ------------------------------------------------------------------------------------------------


def _read_here(mesh: Mesh, reader: Any, ragged: bool, collated: bool, arguments: tuple, deal: Deal | None) -> Any:
    """This rank's part of a batch, as Arrays."""
    treedef, leaves, outputs = reader(mesh.session, *arguments)
    of_tensors = [about for about in outputs if about.spec is not None]
    shards = None if deal is None else deal.shards
    shapes = [None if shards is None else _shapes(mesh.layout, about, shards) for about in of_tensors]
    wholes = [_whole(mesh, about) if collated else about.whole for about in of_tensors]
    metas = [_meta(mesh.layout, *its) for its in zip(of_tensors, wholes, shapes, strict=True)]
    hints = [_unsure(about, collated) for about in metas] if ragged and mesh.layout.size > 1 else metas
    return _as_arrays(mesh, treedef, leaves, outputs, metas, shapes, hints=hints, deal=deal)


def _stream_here(mesh: Mesh, reader: Any, arguments: tuple, known: Deal) -> tuple[Any, Found]:
    session, layout = mesh.session, mesh.layout

    def read() -> tuple[Any, list[Any], list[OutputMeta], Found]:
        treedef, leaves, outputs, mine = reader(session, *arguments)
        everyone = session.comm().all_gather_bytes(json.dumps(list(mine.items()), default=operator.index).encode())
        return treedef, leaves, outputs, {v: (n, at) for each in everyone for v, (n, at) in json.loads(each)}

    treedef, leaves, outputs, found = launched.call(session, read, "the next batch of a Stream")
    sizes = [found[v][0] for v in sorted(found)]
    if not any(sizes):
        return None, found
    metas, shapes = [], []
    for about in outputs:
        if about.spec is None:
            continue
        shape, each = about.shape, None
        if about.spec.entries:
            shape = (sum(sizes), *about.shape[1:])
            each = tuple((count, *about.shape[1:]) for count in _held(layout, about.spec.dim_axes(0), sizes))
        metas.append(_meta(layout, about, shape, each))
        shapes.append(each)
    deal = _deal(layout, found, known)
    return _as_arrays(mesh, treedef, leaves, outputs, metas, shapes, deal=deal), found


def _as_arrays(mesh: Mesh, treedef: Any, leaves: list[Any], outputs: list[OutputMeta], *about: Any, **more: Any) -> Any:
    """The tree that a rank has read, with Arrays for tensors; the other arguments are those of `LocalValues`."""
    tensors = tensors_among(leaves, outputs)
    arrays = iter(LocalValues(mesh.session, tensors, *about, **more).arrays(mesh))
    made = [leaf if output.spec is None else next(arrays) for leaf, output in zip(leaves, outputs, strict=True)]
    return trees.unflatten(treedef, made)


def _parts(layout: Layout, axes: tuple[str, ...], sizes: Sequence[int]) -> list[int]:
    """How many samples each part has if a batch with virtual shards of these sizes is cut along some axes."""
    ends = itertools.accumulate(split_sizes(len(sizes), layout.parts(axes)), initial=0)
    return [sum(sizes[begin:end]) for begin, end in itertools.pairwise(ends)]


def _held(layout: Layout, axes: tuple[str, ...], sizes: Sequence[int]) -> list[int]:
    """How many samples each rank has."""
    parts = _parts(layout, axes, sizes)
    return [parts[layout.part(rank, axes)] for rank in range(layout.size)]


def _shapes(layout: Layout, about: OutputMeta, shards: int) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of all ranks' parts, which need not be even with virtual shards."""
    if about.whole is None or about.spec is None:
        return None
    held = _held(layout, about.spec.dim_axes(0), split_sizes(about.whole[0], shards))
    return tuple((count, *about.whole[1:]) for count in held)


def _meta(layout: Layout, about: OutputMeta, whole: Any, shapes: tuple[tuple[int, ...], ...] | None) -> Meta:
    """What an Array shows, of this shape as a `whole` (None: that of each part), with parts of these `shapes`."""
    assert about.spec is not None and about.dtype is not None
    shape = about.shape if whole is None else whole
    return meta(shape, about.dtype, about.spec, shapes and agreement.unusual(layout, shapes, shape, about.spec))


def _whole(mesh: Mesh, about: OutputMeta) -> tuple[int, ...] | None:
    """The global shape, as far as a rank knows it whose samples may have become another number of rows."""
    if about.whole is None or about.spec is None:
        return None
    if about.shape[0] == mesh.layout.shard_shape(about.whole, about.spec, mesh.session.rank)[0]:
        return about.whole
    return (about.shape[0] if mesh.layout.size == 1 else RAGGED, *about.whole[1:])


def _unsure(about: Meta, collated: bool) -> Meta:
    """What all ranks know of a batch that may be padded, without asking each other."""
    rows = RAGGED if collated else about.shape[0]
    shape = (rows, *(RAGGED for _ in about.shape[1:])) if about.spec.entries else about.shape
    return meta(shape, about.dtype, about.spec)


def _deal(layout: Layout, found: Found, known: Deal) -> Deal:
    """How it was dealt; without `shards`, sizes are given only if a rank has no samples, which steps have to know."""
    sizes = [found[v][0] for v in sorted(found)]
    if known.shards is None:
        usual = all(_parts(layout, (layout.batch_axis,), sizes))
    else:
        usual = sizes == split_sizes(sum(sizes), known.shards)
    return known if usual else dataclasses.replace(known, sizes=tuple(sizes))
