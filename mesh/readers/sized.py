"""Batches whose lengths are known before they are read: every rank reads its part of each.

Beside `filled`, for those of which nobody knows them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .. import agreement, trees
from ..array import Meta, meta
from ..batch import Deal
from ..mesh import Mesh
from ..rank.local_values import LocalValues
from ..spec import RAGGED, Layout, split_sizes, strided_sizes
from .asking import Asked, Reader, ask


def fill(
    mesh: Mesh,
    name: str,
    reader: Reader,
    requests: Sequence[tuple[tuple, Deal | None]],
    *,
    ragged: bool = False,
    remedy: str,
) -> list[Callable[[], Any]]:
    """Have every rank read its part of batches; for each a function that waits for it and gives the tree of Arrays.

    Args:
        name: what is read, for messages.
        reader: of `reader(session, *arguments) -> (treedef, leaves, OutputMeta of each)`, called on every rank.
        requests: for each batch the arguments, and how it was dealt.
        ragged: the parts may differ in more than dimension 0.
        remedy: what to do where they do and may not.
    """
    if not mesh.is_driver:
        return [functools.partial(_read_here, mesh, reader.obj, *request, ragged) for request in requests]

    def there(asked: Asked, deal: Deal | None) -> Any:
        descriptions, _ = asked.descriptions()
        return asked.tree(descriptions, deal, name=name, ragged=ragged, remedy=remedy)

    asked = ask(mesh, reader, [arguments for arguments, _ in requests])
    return [functools.partial(there, one, deal) for one, (_, deal) in zip(asked, requests, strict=True)]


def _read_here(mesh: Mesh, reader: Any, arguments: tuple, deal: Deal | None, ragged: bool) -> Any:
    """A launched rank's part of a batch, as Arrays."""
    session = mesh.session
    treedef, leaves, outputs = reader(session, *arguments)
    of_tensors = [about for about in outputs if about.spec is not None]
    metas = [meta(about.whole or about.shape, about.dtype, about.spec) for about in of_tensors]
    shards = None if deal is None else deal.shards
    shapes = None if shards is None else [_shapes(mesh.layout, about, shards) for about in of_tensors]
    hints = [_unsure(about) for about in metas] if ragged and mesh.layout.size > 1 else metas
    tensors = leaves if len(of_tensors) == len(leaves) else agreement.tensors_among(leaves, outputs)
    arrays: list[Any] = LocalValues(session, tensors, metas, shapes, hints=hints, deal=deal).arrays(mesh)
    if tensors is not leaves:
        rest = iter(arrays)
        arrays = [leaf if about.spec is None else next(rest) for leaf, about in zip(leaves, outputs, strict=True)]
    return trees.unflatten(treedef, arrays)


def _shapes(layout: Layout, about: agreement.OutputMeta, shards: int) -> tuple[tuple[int, ...], ...] | None:
    """Of all ranks' parts, which virtual shards make other than even."""
    if about.whole is None or about.spec is None:
        return None
    axes = about.spec.dim_axes(0)
    parts = layout.parts(axes)
    sizes, owned = strided_sizes(about.whole[0], shards), split_sizes(shards, parts)
    held = [sum(sizes[sum(owned[:part]) : sum(owned[: part + 1])]) for part in range(parts)]
    return tuple((held[layout.part(rank, axes)], *about.whole[1:]) for rank in range(layout.size))


def _unsure(about: Meta) -> Meta:
    """What all ranks know of a part that may be padded, without asking each other."""
    shape = (about.shape[0], *(RAGGED for _ in about.shape[1:])) if about.spec.entries else about.shape
    return meta(shape, about.dtype, about.spec)
