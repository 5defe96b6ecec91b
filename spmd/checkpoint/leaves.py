"""Leaves: the pieces of a value that ranks write, how they are joined and cut again, and what `like` may have there.

Invariants: a value is cut again only if every part is what it was when it was saved, or if the program says how;
otherwise it is whole on all ranks. A value only takes the place of one that it can stand in for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.loader import Loader
from ..kernels.errors import SpecError, dtype_name
from ..kernels.reduction import ALIGNED
from ..mesh import strides
from ..mesh.array import Array
from ..mesh.mesh import Mesh
from ..mesh.spec import Layout, P
from ..transforms import Sampler
from .manifest import numbers_of, parts_of

Entry = Mapping[str, Any]  # what a manifest says of a leaf

# -- written ----------------------------------------------------------------------------------------------------------


def cut(array: Array) -> dict[str, Any]:
    """What a manifest says of how an Array is cut: its spec, and the sizes of the axes that cut each dimension."""
    spec = array.spec
    if not spec.entries:
        return {"spec": []}
    return {"spec": list(spec.entries), "parts": _sizes(array.mesh.layout, spec)}


def position_of(layout: Layout, spec: P, rank: int) -> int | list[int]:
    """Which piece a rank holds: its number in every dimension, or, if only the first is cut, in that."""
    position = [layout.part(rank, spec.dim_axes(dim)) for dim in range(len(spec.entries))]
    return position[0] if len(position) == 1 else position


def about(value: Tensor, whole: Sequence[int]) -> dict[str, Any]:
    """What else a manifest says of a value, known to ranks that hold a part: strides, and whether it is trained."""
    found: dict[str, Any] = {}
    if not strides.is_standard(value):
        layout = strides.joined(whole, value.shape, strides.dense(value.shape, value.stride()))
        if layout != strides.standard(whole):
            found["strides"] = list(layout)
    if isinstance(value, torch.nn.Parameter) and not value.requires_grad:
        found["frozen"] = True
    elif value.requires_grad and value.is_leaf:
        found["trainable"] = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
    return found


# -- put together -----------------------------------------------------------------------------------------------------


def whole(entry: Entry, pieces: Sequence[tuple[int | list[int], Tensor]]) -> Tensor:
    """The value of a leaf, joined from its pieces, each given with its position."""
    if entry["dtype"].startswith("complex"):
        pieces = [(position, torch.view_as_complex(piece)) for position, piece in pieces]
    if len(pieces) == 1 and "strides" not in entry:
        return pieces[0][1]
    shape = entry["shape"]
    extents: list[dict[int, int]] = [{} for _ in shape]
    for position, piece in pieces:
        for known, number, size in zip(extents, numbers_of(position), piece.shape, strict=False):
            known[number] = size
    out = torch.empty_strided(
        shape, entry.get("strides") or strides.standard(shape), dtype=pieces[0][1].dtype, device="cpu"
    )
    for position, piece in pieces:
        starts = [
            sum(map(known.__getitem__, range(n))) for known, n in zip(extents, numbers_of(position), strict=False)
        ]
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


# -- cut again --------------------------------------------------------------------------------------------------------


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
    return _sizes(mesh.layout, saved) == entry.get("parts", [])


def _sizes(layout: Layout, spec: P) -> list[list[int]]:
    axes = layout.axes
    return [[axes[name] for name in spec.dim_axes(dim)] for dim in range(len(spec.entries))]


# -- compared with `like` ---------------------------------------------------------------------------------------------


def check_alike(path: str, entry: Entry, leaf: Any, ranks: int) -> None:
    """Compare a manifest's entry for a leaf with the leaf of `like`; `ranks` is the most that the saving mesh has had.

    Raises:
        SpecError: they differ in shape, dtype or kind.
    """
    here, there = _kind(leaf), _kind_saved(entry)
    if "tensor" in (here, there) and {here, there} <= {"tensor", "number"}:
        # A count or a loss is a number before the first step, and a tensor after it.
        if here == there or (tuple(leaf.shape) if here == "tensor" else tuple(entry["shape"])) == ():
            return _check_tensor(path, entry, leaf, ranks) if here == there else None
    elif here == there or (there == "None" and here in ("number", "string")):
        return None
    what = f"{there} of shape {tuple(entry['shape'])}" if there == "tensor" else there
    raise _differs("kind", path, what, f"{here} of shape {tuple(leaf.shape)}" if here == "tensor" else here)


def _check_tensor(path: str, entry: Entry, leaf: Any, ranks: int) -> None:
    if tuple(entry["shape"]) != tuple(leaf.shape) and not _is_padded_alike(entry, leaf, ranks):
        raise _differs("shape", path, tuple(entry["shape"]), tuple(leaf.shape))
    dtype = dtype_name(leaf.dtype)
    if entry["dtype"] != dtype:
        raise _differs("dtype", path, entry["dtype"], dtype)


def _is_padded_alike(entry: Entry, leaf: Any, ranks: int) -> bool:
    """Whether both may be the same state of a sharded optimizer, padded for different numbers of ranks.

    On a mesh that was resized, values keep their length.
    """
    if len(entry["shape"]) != 1 or len(leaf.shape) != 1:
        return False
    is_cut = isinstance(leaf, Array) and bool(leaf.spec.entries)
    if not entry["spec"] and not is_cut:
        return False
    one, other = entry["shape"][0], leaf.shape[0]
    if one % ALIGNED or other % ALIGNED:
        return False
    padding = ALIGNED * max(ranks, math.prod(parts_of(entry)))
    padding_here = ALIGNED * (leaf.mesh.most_ranks if is_cut else 1)
    return one - padding < other and other - padding_here < one  # there is a length that both are padded from


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor | Array):
        return "tensor"
    if isinstance(leaf, str):  # first: NumPy's are scalars of its, too
        return "string"
    return "number" if isinstance(leaf, bool | int | float | np.generic) else type(leaf).__name__


def _kind_saved(entry: Entry) -> str:
    kinds = {"tensor": "tensor", "loader": Loader.__name__, "sampler": Sampler.__name__}
    found = next((kind for name, kind in kinds.items() if name in entry), None)
    if found is not None:
        return found
    return "None" if entry["value"] is None else _kind(entry["value"])


def _differs(what: str, path: str, saved: Any, wanted: Any) -> SpecError:
    return SpecError(
        f"like has another {what} than the checkpoint for {path}",
        got=f"{saved} in the checkpoint",
        expected=wanted,
        remedy="make the program's state as it was when it was saved, or leave this out of like",
    )
