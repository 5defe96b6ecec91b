"""Trees as a manifest tells of them: structure, names and everything that is no tensor, in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from . import _checkpoint_pieces as pieces
from . import _checkpoint_structure as structure
from ._loader import Loader
from .kernels.errors import SpecError, message
from .mesh import trees
from .mesh.array import Array
from .mesh.placing import as_tensor, is_array
from .transforms import Sampler

PLAIN = (bool, int, float, str, type(None))
_LONG = 1024  # bits of the longest number that is written in decimal, which Python refuses to do with very long ones


def describe(tree: Any) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """(structure, an entry for each leaf, its tensors by key)."""
    leaves, _ = trees.flatten(tree, is_leaf=is_array)
    keys = _keys(tree)
    entries, tensors = [], {}
    for key, path, leaf in zip(keys, trees.paths(tree, is_leaf=is_array), leaves, strict=True):
        leaf = as_tensor(leaf)
        entry: dict[str, Any] = {"key": key, "path": path}
        if isinstance(leaf, np.generic):
            leaf = leaf.item()
        if isinstance(leaf, torch.Tensor | Array):
            _check_storable(leaf, path)
            entry |= {"tensor": True, "dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)}
            entry |= pieces.cut(leaf) if isinstance(leaf, Array) else {"spec": []}
            tensors[key] = leaf
        elif isinstance(leaf, Loader):
            entry["loader"], entry["deals"] = leaf.state_dict(), leaf.settings
        elif isinstance(leaf, Sampler):
            fields = [field.name for field in dataclasses.fields(leaf) if field.name != "_"]
            entry["sampler"] = {name: getattr(leaf, name) for name in fields}
        elif isinstance(leaf, int) and leaf.bit_length() > _LONG:
            entry["hex"] = hex(leaf)
        elif isinstance(leaf, PLAIN):
            entry["value"] = leaf
        else:
            raise SpecError(
                message(
                    f"save got a leaf that it cannot write, {path or 'the whole'}",
                    got=type(leaf).__name__,
                    expected="a tensor, an Array, a number, a string, None, a Loader or a Sampler",
                )
            )
        entries.append(entry)
    return structure.of(tree), entries, tensors


def _check_storable(leaf: Any, path: str) -> None:
    if not isinstance(leaf, torch.Tensor):
        return
    if leaf.is_meta:
        found, remedy = "a tensor without data", "give it values"
    elif leaf.is_quantized:
        found, remedy = "a quantized tensor", "save what dequantize() gives, and its scale"
    elif leaf.is_nested:
        found, remedy = "a nested tensor", "save what unbind() gives"
    elif leaf.layout is not torch.strided:
        found, remedy = f"a tensor of layout {leaf.layout}", "save what to_dense() gives"
    else:
        return
    raise SpecError(
        message(
            f"save got a leaf that it cannot write, {path or 'the whole'}",
            got=found,
            expected="a dense tensor",
            remedy=remedy,
        )
    )


def _keys(tree: Any) -> list[str]:
    """Names as of a state dictionary: `0.layers.weight`."""
    paths, _, _ = trees.optree.tree_flatten_with_path(tree, is_array, none_is_leaf=True, namespace=trees.NAMESPACE)
    keys: list[str] = []
    for path in paths:
        key = name = ".".join(map(str, path)) or "value"
        number = len(keys)
        while key in keys or key == "__metadata__":  # which means something else in a file of safetensors
            key, number = f"{name}#{number}", number + 1
        keys.append(key)
    return keys


def rebuild(saved_as: Any, entries: Sequence[dict[str, Any]], like: Any, value: Callable[..., Any]) -> Any:
    """The tree; `value(key, entry, like's leaf)` gives a tensor.

    Args:
        saved_as: its structure; None in older checkpoints that had other classes than dicts, lists and tuples.
    """
    if like is None and (saved_as is None or structure.has_classes(saved_as)):
        raise SpecError(
            message("restore cannot make this tree alone", remedy="pass like=, a tree of the classes that were saved")
        )
    saved = {entry["path"]: entry for entry in entries}
    leaves_like, treedef = trees.flatten(like, is_leaf=is_array)
    wanted = {} if like is None else dict(zip(trees.paths(like, is_leaf=is_array), leaves_like, strict=True))
    missing = [path for path, leaf in wanted.items() if path not in saved and not _stands_for(path, leaf, saved)]
    extra = [path for path in saved if path not in wanted] if saved_as is None else []
    if missing or extra:
        raise SpecError(
            message(
                "like is of another structure than what was saved",
                got=f"{missing[:5]} not in the checkpoint, {extra[:5]} only there",
                remedy="pass a tree like the one given to save",
            )
        )
    if saved_as is None:
        return trees.unflatten(treedef, [_leaf(saved[path], leaf, value) for path, leaf in wanted.items()])
    structure.check(saved_as, like)  # before a Loader is set
    leaves = [_leaf(entry, wanted.get(entry["path"]), value) for entry in entries]
    return structure.build(saved_as, iter(leaves), like)


def _stands_for(path: str, leaf: Any, saved: Iterable[str]) -> bool:
    """Whether a leaf of `like` is None in the place of a whole tree that was saved."""
    return leaf is None and any(other.startswith((f"{path}[", f"{path}.")) for other in saved)


def deals(entries: Sequence[dict[str, Any]], like: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(before, now): what the batches depend on, of the `Loader`s that were saved and of those in `like`."""
    before, now = {}, {}
    for path, leaf in zip(trees.paths(like, is_leaf=is_array), trees.leaves(like, is_leaf=is_array), strict=True):
        saved = next((entry.get("deals") for entry in entries if entry["path"] == path), None)
        if isinstance(leaf, Loader) and saved is not None:
            before.update({f"{name} of the Loader {path}": value for name, value in saved.items()})
            now.update({f"{name} of the Loader {path}": value for name, value in leaf.settings.items()})
    return before, now


def _leaf(entry: dict[str, Any], wanted: Any, value: Callable[..., Any]) -> Any:
    if entry.get("tensor"):
        return value(entry["key"], entry, wanted)
    if "loader" in entry:
        if not isinstance(wanted, Loader):
            return entry["loader"]
        wanted.load_state_dict(entry["loader"])
        return wanted
    if "sampler" in entry:
        return Sampler(**entry["sampler"])
    return int(entry["hex"], 16) if "hex" in entry else entry["value"]
