"""Trees as the library sees them: optree with the namespace in which users register their nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

NAMESPACE = "spmd"
# `None` is a leaf, and dictionaries keep their order, as long as spmd is imported.
_CHOICES: dict[str, Any] = {"none_is_leaf": True, "namespace": NAMESPACE}


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    leaves, treedef = optree.tree_flatten(tree, **_CHOICES)
    return leaves, treedef


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    return optree.tree_leaves(tree, is_leaf, **_CHOICES)


def map(f: Callable, tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    return optree.tree_map(f, tree, *rest, is_leaf=is_leaf, **_CHOICES)


def paths(tree: Any) -> list[str]:
    """The place of every leaf, as Python writes it."""
    return [accessor.codify("") for accessor in optree.tree_accessors(tree, **_CHOICES)]
