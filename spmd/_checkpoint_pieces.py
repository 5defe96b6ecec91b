"""Values as the pieces that ranks write of them: how they were cut, how they are put together, how they are cut again.

Invariant: a value is cut again only where every part is what it was when it was saved, or where the program says how;
everywhere else it is whole on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .kernels.errors import SpecError
from .mesh import strides
from .mesh.array import Array
from .mesh.mesh import Mesh
from .mesh.spec import Layout, P

Entry = Mapping[str, Any]


def cut(array: Array) -> dict[str, Any]:
    """What a manifest says of how an Array is cut: its spec, and for every dimension the sizes of the axes that do."""
    spec = array.spec
    if not spec.entries:
        return {"spec": []}
    return {"spec": list(spec.entries), "parts": _sizes(array.mesh.layout, spec)}


def parts_of(entry: Entry) -> list[int]:
    """Into how many parts each dimension was cut, as far as any is."""
    parts = entry.get("parts", [])
    return [parts] if isinstance(parts, int) else [math.prod(sizes) for sizes in parts]  # once, of the first alone


def place_of(layout: Layout, spec: P, rank: int) -> int | list[int]:
    """Which piece a rank holds: its number in every dimension, or, if only the first is cut, in that."""
    place = [layout.part(rank, spec.dim_axes(dim)) for dim in range(len(spec.entries))]
    return place[0] if len(place) == 1 else place


def about(value: Tensor, whole: Sequence[int]) -> dict[str, Any]:
    """What a manifest says of a value of this shape besides, which those know who hold (a part of) it."""
    said: dict[str, Any] = {}
    if not strides.is_standard(value):
        layout = strides.joined(whole, value.shape, strides.dense(value.shape, value.stride()))
        if layout != strides.standard(whole):
            said["strides"] = list(layout)
    if isinstance(value, torch.nn.Parameter) and not value.requires_grad:
        said["frozen"] = True
    elif value.requires_grad and value.is_leaf:
        said["trainable"] = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
    return said


def whole(entry: Entry, pieces: Sequence[tuple[Any, Tensor]]) -> Tensor:
    """The value of a leaf, from its pieces and their places."""
    if entry["dtype"].startswith("complex"):
        pieces = [(place, torch.view_as_complex(piece)) for place, piece in pieces]
    if len(pieces) == 1 and "strides" not in entry:
        return pieces[0][1]
    shape = entry["shape"]
    places = [place if isinstance(place, list) else [place] for place, _ in pieces]
    extents: list[dict[int, int]] = [{} for _ in places[0]]
    for place, (_, piece) in zip(places, pieces, strict=True):
        for dim, number in enumerate(place[: piece.dim()]):
            extents[dim][number] = piece.shape[dim]
    out = torch.empty_strided(shape, entry.get("strides") or strides.standard(shape), dtype=pieces[0][1].dtype)
    for place, (_, piece) in zip(places, pieces, strict=True):
        starts = [sum(extents[dim][before] for before in range(number)) for dim, number in enumerate(place)]
        index = [slice(start, start + size) for start, size in zip(starts, piece.shape, strict=False)]
        out[tuple(index)].copy_(piece)
    return out


def marked(entry: Entry, tensor: Tensor) -> Tensor:
    """The tensor as the parameter that it was, if it was one."""
    if entry.get("frozen"):
        return torch.nn.Parameter(tensor, requires_grad=False)
    if trainable := entry.get("trainable"):
        return torch.nn.Parameter(tensor) if trainable == "parameter" else tensor.requires_grad_()
    return tensor


def spec_on(mesh: Mesh, entry: Entry, wanted: Any) -> P:
    """How to cut a value on this mesh: as `like`'s Array is, or else as it was, if that makes the same parts there."""
    saved = P(*[tuple(one) if isinstance(one, list) else one for one in entry["spec"]])
    if isinstance(wanted, Array) and _suits(mesh, entry, wanted.spec, saved, wanted):
        return wanted.spec
    # Slices of a sharded optimizer are of no use to another number of ranks.
    return saved if _fits(mesh, entry, saved) and _is_cut_alike(mesh, entry, saved) else P()


def _suits(mesh: Mesh, entry: Entry, spec: P, saved: P, wanted: Array) -> bool:
    """Whether to cut a value as an Array of `like` is cut: if it is cut into the same parts here."""
    if tuple(entry["shape"]) != tuple(wanted.shape) or not _fits(mesh, entry, spec):
        return False
    if _sizes(mesh.layout, spec) != _sizes(wanted.mesh.layout, spec):
        return False
    # Over several axes a sharded optimizer lays out its state by their sizes, whatever the length of the whole.
    several = any(len(spec.dim_axes(dim)) > 1 for dim in range(len(spec.entries)))
    return spec != saved or not several or _is_cut_alike(mesh, entry, saved)


def _fits(mesh: Mesh, entry: Entry, spec: P) -> bool:
    try:
        mesh.layout.check_shape(tuple(entry["shape"]), spec)
    except SpecError:
        return False
    return True


def _is_cut_alike(mesh: Mesh, entry: Entry, saved: P) -> bool:
    parts, here = entry.get("parts", []), _sizes(mesh.layout, saved)
    return [math.prod(sizes) for sizes in here] == [parts] if isinstance(parts, int) else here == parts


def _sizes(layout: Layout, spec: P) -> list[list[int]]:
    axes = layout.axes
    return [[axes[name] for name in spec.dim_axes(dim)] for dim in range(len(spec.entries))]
