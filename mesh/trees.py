"""Trees: optree with this library's fixed choices, so that no caller states them twice.

Invariant: one namespace, `None` is a leaf, dictionaries keep their insertion order.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import optree

from .wire import travels_by_name

NAMESPACE = "spmd"
# optree sorts dictionary keys unless told otherwise; the choice holds for as long as this object is alive.
_insertion_order = optree.dict_insertion_ordered(True, namespace=NAMESPACE)
_insertion_order.__enter__()


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    leaves, treedef = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    return leaves, treedef


def unflatten(treedef: optree.PyTreeSpec, leaves: list[Any]) -> Any:
    return optree.tree_unflatten(treedef, leaves)


def map(f: Callable, tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    return optree.tree_map(f, tree, *rest, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    return optree.tree_leaves(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The place of every leaf as a Python expression behind the tree: `['layer']['w'][0]`; `''` for a bare leaf."""
    accessors, _, _ = optree.tree_flatten_with_accessor(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    return [accessor.codify("") for accessor in accessors]


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """One entry of `prefix` for every leaf of `tree`; `is_leaf` marks the leaves of the prefix."""
    return optree.broadcast_prefix(prefix, tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A treedef on its way to another process, with the node classes that must be known there before it is read."""

    nodes: list[tuple[type, Callable, Callable, str]]
    data: bytes

    def unpack(self) -> optree.PyTreeSpec:
        for cls, flatten_node, unflatten_node, namespace in self.nodes:
            if optree.register_pytree_node.get(cls, namespace=NAMESPACE) is None:
                optree.register_pytree_node(cls, flatten_node, unflatten_node, namespace=namespace or NAMESPACE)
        return pickle.loads(self.data)


def pack(treedef: optree.PyTreeSpec) -> Packed:
    """Make a treedef ready to travel; classes that can't be imported there travel with it."""
    classes: dict[type, Any] = {}
    todo = [treedef]
    while todo:
        node = todo.pop()
        if isinstance(node.type, type) and not travels_by_name(node.type):
            entry = optree.register_pytree_node.get(node.type, namespace=NAMESPACE)
            if entry is not None and entry.kind == optree.PyTreeKind.CUSTOM:
                classes[node.type] = (node.type, entry.flatten_func, entry.unflatten_func, entry.namespace)
        todo.extend(node.children())
    return Packed(list(classes.values()), cloudpickle.dumps(treedef))
