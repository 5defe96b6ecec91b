"""Whether a tree given as `like` is of the shapes, dtypes and kinds that were saved.

Invariant: a value never takes the place of one that the program could not use instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ._checkpoint_pieces import parts_of
from ._loader import Loader
from .kernels.errors import SpecError, message
from .mesh import trees
from .mesh.array import Array
from .mesh.placing import as_tensor, is_array
from .transforms import Sampler

_ALIGNED = 64  # a sharded optimizer's slices begin and end at multiples of this


def check(entries: Sequence[Mapping[str, Any]], like: Any) -> None:
    """Compare what a manifest says of the leaves with those of `like`, where both have one.

    Raises:
        SpecError: one differs.
    """
    saved = {entry["path"]: entry for entry in entries}
    leaves = trees.leaves(like, is_leaf=is_array)
    for path, leaf in zip(trees.paths(like, is_leaf=is_array), leaves, strict=True):
        if leaf is not None and path in saved:
            _check_leaf(path or "the whole", saved[path], as_tensor(leaf))


def _check_leaf(path: str, entry: Mapping[str, Any], leaf: Any) -> None:
    here, there = _kind(leaf), _kind_saved(entry)
    if "tensor" in (here, there) and {here, there} <= {"tensor", "number"}:
        # A count or a loss is a number before the first step, and a tensor after it.
        if here == there or (tuple(leaf.shape) if here == "tensor" else tuple(entry["shape"])) == ():
            return _check_tensor(path, entry, leaf) if here == there else None
    elif here == there or (there == "None" and here in ("number", "string")):
        return None
    what = f"{there} of shape {tuple(entry['shape'])}" if there == "tensor" else there
    raise _differs("kind", path, what, f"{here} of shape {tuple(leaf.shape)}" if here == "tensor" else here)


def _check_tensor(path: str, entry: Mapping[str, Any], leaf: Any) -> None:
    if tuple(entry["shape"]) != tuple(leaf.shape) and not _is_padded_alike(entry, leaf):
        raise _differs("shape", path, tuple(entry["shape"]), tuple(leaf.shape))
    dtype = str(leaf.dtype).removeprefix("torch.")
    if entry["dtype"] != dtype:
        raise _differs("dtype", path, entry["dtype"], dtype)


def _is_padded_alike(entry: Mapping[str, Any], leaf: Any) -> bool:
    """Whether both may be the same state of a sharded optimizer, padded for different numbers of ranks."""
    if len(entry["shape"]) != 1 or len(leaf.shape) != 1:
        return False
    cut = isinstance(leaf, Array) and bool(leaf.spec.entries)
    if not entry["spec"] and not cut:
        return False
    one, other = entry["shape"][0], leaf.shape[0]
    if one % _ALIGNED or other % _ALIGNED:
        return False
    padding = _ALIGNED * math.prod(parts_of(entry))
    padding_here = _ALIGNED * (leaf.mesh.layout.parts(leaf.spec.dim_axes(0)) if cut else 1)
    return one - padding < other and other - padding_here < one  # there is a length that both are padded from


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor | Array):
        return "tensor"
    if isinstance(leaf, bool | int | float | np.generic):
        return "number"
    return "string" if isinstance(leaf, str) else type(leaf).__name__


def _kind_saved(entry: Mapping[str, Any]) -> str:
    if entry.get("tensor"):
        return "tensor"
    for kind in (Loader, Sampler):
        if kind.__name__.lower() in entry:
            return kind.__name__
    if "hex" in entry:
        return "number"
    return "None" if entry["value"] is None else _kind(entry["value"])


def _differs(what: str, path: str, saved: Any, wanted: Any) -> SpecError:
    return SpecError(
        message(
            f"like has another {what} than the checkpoint for {path}",
            got=f"{saved} in the checkpoint",
            expected=wanted,
            remedy="make the program's state as it was when it was saved, or leave this out of like",
        )
    )
