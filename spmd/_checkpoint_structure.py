"""The structure of a tree, in JSON and back: what was saved says which leaves there are, `like` gives the classes.

A state often has more entries when it is saved than when the program begins (optimizers make theirs in the first
step). Invariant: a dict comes back with all entries that it had when it was saved, within whatever classes it was.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from .kernels.errors import SpecError, message
from .mesh import trees
from .mesh.placing import is_array

DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_NOTHING = object()  # what `like` has in the place of something that it does not know of


def of(node: Any) -> Any:
    """A tree's structure.

    >>> of({"w": 1, "b": (2, [])})
    {'dict': ['w', 'b'], 'of': ['leaf', {'tuple': ['leaf', {'list': []}]}]}
    """
    plain = type(node) in DICTS and all(isinstance(key, str | int) and not isinstance(key, bool) for key in node)
    if plain:
        found = {"dict": list(node), "of": [of(value) for value in node.values()]}
        return found if type(node) is dict else {**found, "class": type(node).__name__}
    if type(node) in (list, tuple):
        return {type(node).__name__: [of(value) for value in node]}
    pieces, children, _ = _one_level(node)
    if len(children) == 1 and children[0] is node:
        return "leaf"
    return {"class": type(node).__name__, "at": pieces, "of": [of(child) for child in children]}


def has_classes(structure: Any) -> bool:
    """Whether it takes `like` to build it again."""
    if structure == "leaf":
        return False
    if "class" in structure:
        return True
    return any(map(has_classes, structure.get("of") or structure.get("list") or structure.get("tuple") or []))


def check(structure: Any, like: Any) -> None:
    """Refuse a structure whose classes `like` (None, if there is none) does not have where they were.

    Raises:
        SpecError: it lacks one.
    """
    _check(structure, _NOTHING if like is None else like, "")


def build(structure: Any, leaves: Iterator[Any], like: Any) -> Any:
    """The tree of these leaves, with the classes of `like`, which was checked."""
    return _build(structure, leaves, _NOTHING if like is None else like, "")


def _check(structure: Any, like: Any, path: str) -> None:
    for part, known, below in _within(structure, like, path):
        _check(part, known, below)


def _build(structure: Any, leaves: Iterator[Any], like: Any, path: str) -> Any:
    if structure == "leaf":
        return next(leaves)
    made = [_build(part, leaves, known, below) for part, known, below in _within(structure, like, path)]
    if "dict" in structure:
        items = zip(structure["dict"], made, strict=True)
        if isinstance(like, collections.defaultdict):
            return collections.defaultdict(like.default_factory, items)
        return type(like)(items) if type(like) in DICTS else dict(items)
    if "class" in structure:
        pieces, _, treedef = _one_level(like)
        children = dict(zip(structure["at"], made, strict=True))
        return trees.unflatten(treedef, [children[piece] for piece in pieces])
    return made if "list" in structure else tuple(made)


def _within(structure: Any, like: Any, path: str) -> list[tuple[Any, Any, str]]:
    """The structures that one consists of, in the order of their leaves, with what `like` has there, and where."""
    if structure == "leaf":
        return []
    if "dict" in structure:
        known = like if type(like) in DICTS else {}
        if known is not like and "class" in structure:
            raise _lacks(structure, path)
        return [
            (part, known.get(key, _NOTHING), f"{path}[{key!r}]")
            for key, part in zip(structure["dict"], structure["of"], strict=True)
        ]
    if "class" in structure:
        pieces, children, _ = _one_level(like)
        if {*pieces} != {*structure["at"]}:
            raise _lacks(structure, path)
        found = dict(zip(pieces, children, strict=True))
        return [
            (part, found[piece], path + piece) for piece, part in zip(structure["at"], structure["of"], strict=True)
        ]
    parts = structure["list"] if "list" in structure else structure["tuple"]
    there = [*like] if type(like) in (list, tuple) else []
    there += [_NOTHING] * (len(parts) - len(there))
    return [(part, there[index], f"{path}[{index}]") for index, part in enumerate(parts)]


def _one_level(node: Any) -> tuple[list[str], list[Any], Any]:
    """What a node consists of: where its children are, as Python expressions behind it; they; and how to make it."""

    def stops(found: Any) -> bool:
        return found is not node or is_array(found)

    children, treedef = trees.flatten(node, is_leaf=stops)
    return trees.paths(node, is_leaf=stops), children, treedef


def _lacks(structure: Any, path: str) -> SpecError:
    entries = structure.get("at") or [f"[{key!r}]" for key in structure.get("dict", [])]
    return SpecError(
        message(
            f"like has no {structure['class']} as was saved, {path or 'the whole'}",
            got=f"one of {entries[:5]} in the checkpoint",
            remedy="pass a tree of the classes that were saved",
        )
    )
