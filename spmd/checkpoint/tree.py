"""Trees in a manifest: their structure and leaves as JSON, and back.

The checkpoint says which leaves there are, `like` gives the classes. A state often has more entries when it is saved
than when the program begins, since optimizers make theirs in the first step. Invariant: a dict comes back with the
entries that it had when it was saved, whatever classes it is nested in.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..data.loader import Loader
from ..kernels.errors import SpecError, dtype_name
from ..mesh import containers, trees
from ..mesh.array import Array
from ..mesh.put import as_tensor, is_array
from ..transforms import Sampler
from . import leaves as values
from .manifest import CODES, named_leaves
from .schema import LONGEST_NUMBER, Invalid

DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_NOTHING = object()  # stands for what `like` does not have

# -- to JSON ----------------------------------------------------------------------------------------------------------


def describe(tree: Any) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """(structure, an entry for each leaf, its tensors by key)."""
    structure = structure_of(tree)
    entries, tensors = [], {}
    named = _named(structure, "save got a tree that it cannot write")
    for (path, key), leaf in zip(named, trees.leaves(tree, is_leaf=is_array), strict=True):
        leaf = as_tensor(leaf)
        entries.append({"key": key, "path": path, **_entry(leaf, path or "the whole")})
        if isinstance(leaf, torch.Tensor | Array):
            if not _is_text(key):
                raise _unwritable(ascii(path), "a name with half of a character", "names that UTF-8 has")
            tensors[key] = leaf
    return structure, entries, tensors


def _named(structure: Any, problem: str) -> list[tuple[str, str]]:
    try:
        return _paths(json.dumps(structure))
    except Invalid as error:
        raise SpecError(problem, got=error.args[1], expected=error.args[2]) from None


@functools.lru_cache(maxsize=16)
def _paths(structure: str) -> list[tuple[str, str]]:
    """(path, key) of every leaf of a structure in JSON; cached, as the trees that a run saves are mostly alike."""
    return list(named_leaves(json.loads(structure)))


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode()) or not name
    except UnicodeEncodeError:
        return False


def structure_of(node: Any) -> Any:
    """A tree's structure.

    >>> structure_of({"w": 1, "b": (2, [])})
    {'dict': ['w', 'b'], 'of': ['leaf', {'tuple': ['leaf', {'list': []}]}]}
    """
    if type(node) in DICTS and all(isinstance(key, str | int) and not isinstance(key, bool) for key in node):
        keys = list(dict.keys(node))  # in the order of the leaves: optree does not see that of `move_to_end`
        found = {"dict": keys, "of": [structure_of(node[key]) for key in keys]}
        return found if type(node) is dict else {**found, "class": type(node).__name__}
    if type(node) in (list, tuple):
        return {type(node).__name__: [structure_of(value) for value in node]}
    if type(node) is Array or type(node) in containers.leaf_types:
        return "leaf"
    pieces, children, _ = _one_level(node)
    if len(children) == 1 and children[0] is node:
        return "leaf"
    return {"class": type(node).__name__, "at": pieces, "of": [structure_of(child) for child in children]}


def _entry(leaf: Any, path: str) -> dict[str, Any]:
    """What a manifest says of a leaf."""
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, torch.Tensor | Array):
        _check_storable(leaf, path)
        cut = values.cut(leaf) if isinstance(leaf, Array) else {"spec": []}
        return {"tensor": True, "dtype": dtype_name(leaf.dtype), "shape": list(leaf.shape), **cut}
    if isinstance(leaf, Loader):
        return {"loader": leaf.state_dict(), "deals": leaf.settings}
    if isinstance(leaf, Sampler):
        names = [field.name for field in dataclasses.fields(leaf) if field.name != "_"]
        return {"sampler": {name: getattr(leaf, name) for name in names}}
    if isinstance(leaf, bool | float | str | None) or (isinstance(leaf, int) and leaf.bit_length() <= LONGEST_NUMBER):
        return {"value": leaf}
    if isinstance(leaf, int):
        raise _unwritable(path, f"a number of {leaf.bit_length()} bits", f"at most {LONGEST_NUMBER}")
    expected = "a tensor, an Array, a number, a string, None, a Loader or a Sampler"
    remedy = "save what its state_dict() gives" if hasattr(leaf, "state_dict") else ""
    raise _unwritable(path, type(leaf).__name__, expected, remedy)


def _check_storable(leaf: Any, path: str) -> None:
    if dtype_name(leaf.dtype) not in CODES and not getattr(leaf, "is_quantized", False):
        raise _unwritable(path, f"a tensor of {leaf.dtype}", f"one of {', '.join(CODES)}")
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
    raise _unwritable(path, found, "a dense tensor", remedy)


def _unwritable(path: str, got: str, expected: str, remedy: str = "") -> SpecError:
    return SpecError(f"save got a leaf that it cannot write, {path}", got=got, expected=expected, remedy=remedy)


# -- and back ---------------------------------------------------------------------------------------------------------


def check(structure: Any, entries: Sequence[Mapping[str, Any]], like: Any, ranks: int) -> None:
    """Compare what was saved with `like`, before anything in the program changes; `ranks` as in `check_alike`.

    Raises:
        SpecError: `like` is of another structure, lacks a class, or has a leaf of another shape, dtype or kind.
    """
    if like is None:
        if _has_classes(structure):
            remedy = "pass like=, a tree of the classes that were saved"
            raise SpecError("restore cannot make this tree alone", remedy=remedy)
        return
    saved = {entry["path"]: entry for entry in entries}
    wanted = _by_path(like)
    empty = list(_empty_dicts(structure, ""))
    missing = [
        path
        for path, leaf in wanted.items()
        if path not in saved
        and not any(path.startswith(f"{where}[") for where in empty)
        and not (leaf is None and any(other.startswith((f"{path}[", f"{path}.")) for other in saved))
    ]
    if missing:
        raise SpecError(
            "like is of another structure than what was saved",
            got=f"{missing[:5]} not in the checkpoint",
            remedy="pass a tree like the one given to save, or None, which stands for anything, in place of what it "
            "has not (an optimizer's state whose parameters were trained apart, say)",
        )
    _check_classes(structure, like, "")
    for path, leaf in wanted.items():
        if leaf is not None and path in saved:
            values.check_alike(path or "the whole", saved[path], as_tensor(leaf), ranks)
            if isinstance(leaf, Loader):
                leaf.checked(_state_of_loader(saved[path]))


def rebuild(structure: Any, entries: Sequence[dict[str, Any]], like: Any, value: Callable[..., Any]) -> Any:
    """The tree, with the classes of `like`, which was checked; `value(entry, like's leaf)` gives a tensor."""
    wanted = {} if like is None else _by_path(like)
    leaves = (_leaf(entry, wanted.get(entry["path"]), value) for entry in entries)
    return _build(structure, leaves, _NOTHING if like is None else like, "")


def deals(entries: Sequence[Mapping[str, Any]], like: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(before, now): what the batches depend on, of the `Loader`s that were saved and of those in `like`."""
    before, now = {}, {}
    saved = {entry["path"]: entry["deals"] for entry in entries if "deals" in entry}
    for path, leaf in _by_path(like).items():
        if isinstance(leaf, Loader) and path in saved:
            before.update({f"{name} of the Loader {path}": value for name, value in saved[path].items()})
            now.update({f"{name} of the Loader {path}": value for name, value in leaf.settings.items()})
    return before, now


def _by_path(like: Any) -> dict[str, Any]:
    """The leaves by the paths that a manifest gives them: with keys as JSON writes them, of an enum's members, too."""
    paths = (path for path, _ in _named(structure_of(like), "like is a tree that no checkpoint has"))
    return dict(zip(paths, trees.leaves(like, is_leaf=is_array), strict=True))


def _leaf(entry: dict[str, Any], wanted: Any, value: Callable[..., Any]) -> Any:
    if "tensor" in entry:
        return value(entry, wanted)
    if "loader" in entry:
        if not isinstance(wanted, Loader):
            return entry["loader"]
        wanted.load_state_dict(_state_of_loader(entry))
        return wanted
    return Sampler(**entry["sampler"]) if "sampler" in entry else entry["value"]


def _state_of_loader(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the Loader's `state_dict` gave, with its settings."""
    return {**entry["loader"], "settings": entry["deals"]}


def _children(structure: Any) -> list[Any]:
    if structure == "leaf":
        return []
    return structure["of"] if "of" in structure else structure["list"] if "list" in structure else structure["tuple"]


def _has_classes(structure: Any) -> bool:
    """Whether it takes `like` to build it again."""
    if structure == "leaf":
        return False
    return ("class" in structure and not _is_ordered(structure)) or any(map(_has_classes, _children(structure)))


def _is_ordered(structure: Any) -> bool:
    """Whether it is an OrderedDict, as a module's `state_dict()` is."""
    return "dict" in structure and structure.get("class") == collections.OrderedDict.__name__


def _empty_dicts(structure: Any, path: str) -> Iterator[str]:
    """The paths of dicts without entries, as an optimizer's state is before the first step."""
    if structure != "leaf" and structure.get("dict") == []:
        yield path
    for part, _, below in _within(structure, _NOTHING, path, strict=False):
        yield from _empty_dicts(part, below)


def _check_classes(structure: Any, like: Any, path: str) -> None:
    for part, known, below in _within(structure, like, path):
        _check_classes(part, known, below)


def _build(structure: Any, leaves: Iterator[Any], like: Any, path: str) -> Any:
    if structure == "leaf":
        return next(leaves)
    made = [_build(part, leaves, known, below) for part, known, below in _within(structure, like, path)]
    if "dict" in structure:
        own = {key: key for key in like} if isinstance(like, Mapping) else {}
        items = zip((own.get(key, key) for key in structure["dict"]), made, strict=True)
        if isinstance(like, collections.defaultdict):
            return collections.defaultdict(like.default_factory, items)
        if type(like) in DICTS:
            return type(like)(items)
        return collections.OrderedDict(items) if _is_ordered(structure) else dict(items)
    if "class" in structure:
        pieces, _, treedef = _one_level(like)
        children = dict(zip(structure["at"], made, strict=True))
        return trees.unflatten(treedef, [children[piece] for piece in pieces])
    return made if "list" in structure else tuple(made)


def _within(structure: Any, like: Any, path: str, *, strict: bool = True) -> list[tuple[Any, Any, str]]:
    """The children of a structure, in the order of their leaves: each with what `like` has there, and its path."""
    parts = _children(structure)
    if structure == "leaf":
        return []
    if "dict" in structure:
        known = like if type(like) in DICTS else {}
        alone = _is_ordered(structure) and (like is None or like is _NOTHING)
        if known is not like and "class" in structure and strict and not alone:
            raise _lacks(structure, path)
        keys = structure["dict"]
        return [(part, known.get(key, _NOTHING), f"{path}[{key!r}]") for key, part in zip(keys, parts, strict=True)]
    if "class" in structure:
        pieces, children, _ = _one_level(like)
        found = dict(zip(pieces, children, strict=True))
        if strict and {*pieces} != {*structure["at"]}:
            raise _lacks(structure, path)
        return [
            (part, found.get(piece, _NOTHING), path + piece) for piece, part in zip(structure["at"], parts, strict=True)
        ]
    there = [*like] if type(like) in (list, tuple) else []
    there += [_NOTHING] * (len(parts) - len(there))
    return [(part, there[index], f"{path}[{index}]") for index, part in enumerate(parts)]


def _one_level(node: Any) -> tuple[list[str], list[Any], Any]:
    """Where a node's children are, as Python expressions after the node; the children; the treedef to rebuild it."""

    def stops(found: Any) -> bool:
        return found is not node or is_array(found)

    children, treedef = trees.flatten(node, is_leaf=stops)
    return trees.paths(node, is_leaf=stops), children, treedef


def _lacks(structure: Any, path: str) -> SpecError:
    entries = structure.get("at") or [f"[{key!r}]" for key in structure.get("dict", [])]
    return SpecError(
        f"like has no {structure['class']} as was saved, {path or 'the whole'}",
        got=f"one of {entries[:5]} in the checkpoint",
        remedy="pass a tree of the classes that were saved",
    )
