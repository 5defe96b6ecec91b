"""Trees as a manifest tells of them: structure, names and everything that is no tensor, in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ._loader import Loader
from .kernels.errors import SpecError, message
from .mesh import trees
from .mesh.array import Array
from .mesh.placing import as_tensor, is_array
from .transforms import Sampler

PLAIN = (bool, int, float, str, type(None))


def describe(tree: Any) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """(structure, an entry for each leaf, its tensors by key).

    The structure of anything but dicts, lists and tuples is None: it takes `like` to rebuild.
    """
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
            spec = leaf.spec.entries if isinstance(leaf, Array) else ()
            if isinstance(leaf, Array) and any(entry is not None for entry in spec[1:]):
                leaf, spec = leaf.full(), ()  # files hold rows; a value cut in other dimensions is written whole
            entry |= {"tensor": True, "dtype": str(leaf.dtype).removeprefix("torch."), "spec": list(spec)}
            entry["shape"] = list(leaf.shape)
            if spec and isinstance(leaf, Array):
                entry["parts"] = leaf.mesh.layout.parts(leaf.spec.dim_axes(0))
            if isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad:
                entry["frozen"] = True
            tensors[key] = leaf
        elif isinstance(leaf, Loader):
            entry["loader"], entry["deals"] = leaf.state_dict(), leaf.settings
        elif isinstance(leaf, Sampler):
            fields = [field.name for field in dataclasses.fields(leaf) if field.name != "_"]
            entry["sampler"] = {name: getattr(leaf, name) for name in fields}
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
    return _structure(tree), entries, tensors


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


def _structure(node: Any) -> Any:
    if type(node) is dict:
        parts = [_structure(value) for value in node.values()]
        plain = all(isinstance(key, str | int) and not isinstance(key, bool) for key in node)
        return None if None in parts or not plain else {"dict": list(node), "of": parts}
    if type(node) in (list, tuple):
        parts = [_structure(value) for value in node]
        return None if None in parts else {type(node).__name__: parts}
    found = trees.leaves([node], is_leaf=is_array)
    return "leaf" if len(found) == 1 and found[0] is node else None


def rebuild(structure: Any, entries: Sequence[dict[str, Any]], like: Any, value: Callable[..., Any]) -> Any:
    """The tree; `value(key, entry, like's leaf)` gives a tensor."""
    if like is None and structure is None:
        raise SpecError(
            message("restore cannot make this tree alone", remedy="pass like=, a tree of the classes that were saved")
        )
    saved = {entry["path"]: entry for entry in entries}
    leaves_like, treedef = trees.flatten(like, is_leaf=is_array)
    wanted = {} if like is None else dict(zip(trees.paths(like, is_leaf=is_array), leaves_like, strict=True))
    missing = [path for path in wanted if path not in saved]
    # State that an optimizer has from the first step on is in the checkpoint, and not in what `init` gave.
    extra = [path for path in saved if path not in wanted] if structure is None else []
    if missing or extra:
        raise SpecError(
            message(
                "like is of another structure than what was saved",
                got=f"{missing[:5]} not in the checkpoint, {extra[:5]} only there",
                remedy="pass a tree like the one given to save",
            )
        )
    if structure is None:
        return trees.unflatten(treedef, [_leaf(saved[path], leaf, value) for path, leaf in wanted.items()])
    return _build(structure, iter([_leaf(entry, wanted.get(entry["path"]), value) for entry in entries]))


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
    return entry["value"]


def _build(structure: Any, leaves: Any) -> Any:
    if structure == "leaf":
        return next(leaves)
    if "dict" in structure:
        return {key: _build(part, leaves) for key, part in zip(structure["dict"], structure["of"], strict=True)}
    if "list" in structure:
        return [_build(part, leaves) for part in structure["list"]]
    return tuple(_build(part, leaves) for part in structure["tuple"])
