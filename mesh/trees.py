"""Trees: optree with this library's choices, made once.

Invariant: one namespace, `None` is a leaf, dictionaries keep their insertion order.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree

from ..kernels.call import word_key
from . import containers
from .pickling.functions import travels_by_name

NAMESPACE = "spmd"
_PLAIN_KEYS = (str, int, float, bytes, type(None))
_SHOWN = 100  # characters of a tree's keys
# optree sorts dictionary keys by default; this object keeps insertion order for as long as it lives.
_insertion_order = optree.dict_insertion_ordered(True, namespace=NAMESPACE)
_insertion_order.__enter__()


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    leaves, treedef = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    if len(containers.torch_nodes) != containers.counted:
        containers.keep_up()
    # Usually all types are known leaves, which this check finds out fast: a step flattens trees many times.
    while not containers.leaf_types.issuperset(builtins.map(type, leaves)) and containers.adopt(
        leaves, NAMESPACE, is_leaf
    ):
        leaves, treedef = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    return leaves, treedef


class Structure:
    """The structure of a tree: it finds the leaves of trees with this structure ten times as fast as `flatten`.

    >>> like = Structure.of({"w": (1, 2.0)})
    >>> like.leaves({"w": (3, 4.0)}), like.leaves({"v": (3, 4.0)}), like.leaves({"w": [3, 4.0]})
    ([3, 4.0], None, None)
    """

    __slots__ = ("_leaf_types", "_root", "treedef")

    def __init__(self, treedef: optree.PyTreeSpec, root: _Node | None, leaf_types: frozenset[type]):
        self.treedef, self._root, self._leaf_types = treedef, root, leaf_types

    @staticmethod
    def of(tree: Any) -> Structure | None:
        """The structure of a tree; None if it has nodes of rare kinds."""
        found, treedef = flatten(tree)
        leaf_types = frozenset(map(type, found))
        if not containers.are_leaves(leaf_types):
            return None
        try:
            return Structure(treedef, _node_of(tree, leaf_types), leaf_types)
        except _Rare:
            return None

    def leaves(self, tree: Any) -> list[Any] | None:
        """The leaves of a tree; None if it has another structure, or its leaves have other types."""
        found: list[Any] = []
        if self._root is None:
            found.append(tree)
        elif not self._root.take(tree, found):
            return None
        return found if self._leaf_types.issuperset(builtins.map(type, found)) else None


class _Rare(Exception):
    """A node of a kind that `Structure` does not know."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """A node of a structure.

    Attributes:
        kind: its class.
        keys: of a dictionary, in order; of another node, how many parts it has.
        parts: the nodes below, with None for a leaf; empty if all parts are leaves.
        flatten: of a registered class: takes a node apart into its parts and its data.
        data: the node's data.
    """

    kind: type
    keys: tuple[Any, ...] | int
    parts: tuple[_Node | None, ...]
    flatten: Callable | None = None
    data: Any = None

    def take(self, tree: Any, found: list[Any]) -> bool:
        """Add the leaves of a tree to `found` if it has this structure; whether it has."""
        parts: Any = tree
        if type(tree) is not self.kind:
            return False
        if self.flatten is not None:
            made, data, *_ = self.flatten(tree)
            parts = tuple(made)
            if data != self.data:
                return False
        if isinstance(self.keys, tuple):
            if tuple(parts) != self.keys:
                return False
            parts = parts.values()
        elif len(parts) != self.keys:
            return False
        if not self.parts:
            found.extend(parts)
            return True
        for node, part in zip(self.parts, parts, strict=True):
            if node is None:
                found.append(part)
            elif not node.take(part, found):
                return False
        return True


def _node_of(tree: Any, leaf_types: frozenset[type]) -> _Node | None:
    kind, flatten_node, data = type(tree), None, None
    if kind in leaf_types:
        return None
    keys: tuple[Any, ...] | int
    parts: Sequence[Any]
    if kind is dict:
        keys, parts = tuple(tree), tuple(tree.values())
    elif kind in (tuple, list) or optree.is_namedtuple_class(kind):
        keys, parts = len(tree), tuple(tree)
    else:
        entry = optree.register_pytree_node.get(kind, namespace=NAMESPACE)
        if entry is None or entry.kind != optree.PyTreeKind.CUSTOM:
            raise _Rare
        flatten_node = entry.flatten_func
        found, data, *_ = flatten_node(tree)
        parts = tuple(found)
        keys = len(parts)
    below = tuple(_node_of(part, leaf_types) for part in parts)
    return _Node(kind, keys, below if any(below) else (), flatten_node, data)


def unflatten(treedef: optree.PyTreeSpec, leaves: list[Any]) -> Any:
    return optree.tree_unflatten(treedef, leaves)


def map(f: Callable, tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    found, treedef = flatten(tree, is_leaf)
    others = [treedef.flatten_up_to(one) for one in rest]
    return unflatten(treedef, [f(*those) for those in zip(found, *others, strict=True)])


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    return flatten(tree, is_leaf)[0]


def paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The place of every leaf, as Python would index the tree: `['layer']['w'][0]`; `''` for a bare leaf."""
    flatten(tree, is_leaf)  # so that all its classes are known
    accessors, _, _ = optree.tree_flatten_with_accessor(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    return [accessor.codify("") for accessor in accessors]


def places(treedef: optree.PyTreeSpec) -> list[str]:
    """As `paths`, for a structure; found once, since a call with many leaves may ask for each of them."""
    try:
        return _places(treedef)
    except TypeError:  # the data of a user's own node class may not be hashable
        return _places.__wrapped__(treedef)


@functools.lru_cache(maxsize=64)
def _places(treedef: optree.PyTreeSpec) -> list[str]:
    return [accessor.codify("") for accessor in treedef.accessors()]


def keys_text(treedef: optree.PyTreeSpec) -> str:
    """Where the leaves are in a tree, for messages and for ranks to compare; `''` for a bare leaf.

    >>> keys_text(flatten({"w": (1, 2.0)})[1])
    "['w'][0], ['w'][1]"
    """
    try:
        return _keys_text(treedef)
    except TypeError:  # the data of a user's own node class may not be hashable
        return _keys_text.__wrapped__(treedef)


@functools.lru_cache(maxsize=1024)
def _keys_text(treedef: optree.PyTreeSpec) -> str:
    return joined_keys(["".join(f"[{key_text(entry)}]" for entry in path) for path in treedef.paths()])


def joined_keys(keys: Sequence[str]) -> str:
    """The keys of all leaves in one text; if that is long, its beginning, and a hash of the whole."""
    text = ", ".join(keys)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(keys)} leaves, {word_key(text):x})"


def key_text(key: Any) -> str:
    """A key as text that is equal in every process; for most classes only their name, as a repr may have an address."""
    if isinstance(key, tuple):
        return f"({', '.join(map(key_text, key))})"
    return repr(key) if isinstance(key, _PLAIN_KEYS) else type(key).__qualname__


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """One entry of `prefix` for every leaf of `tree`; `is_leaf` marks the leaves of the prefix.

    >>> broadcast_prefix({"x": "X", "y": "Y"}, {"y": [1, 2], "x": 3})
    ['Y', 'Y', 'X']

    Raises:
        ValueError: it is no prefix of the tree.
    """
    return broadcast_to(prefix, flatten(tree)[1], is_leaf)


def broadcast_to(prefix: Any, treedef: optree.PyTreeSpec, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """`broadcast_prefix` for a tree that has been flattened."""
    if prefix is None or (is_leaf is not None and is_leaf(prefix)):
        return [prefix] * treedef.num_leaves
    entries, above = flatten(prefix, is_leaf)
    return [entries[index] for index in _positions(above, treedef)]


@functools.lru_cache(maxsize=1024)
def _positions(above: optree.PyTreeSpec, below: optree.PyTreeSpec) -> tuple[int, ...]:
    """For each leaf of a structure, which leaf of its prefix covers it."""
    if not above.is_prefix(below):
        raise ValueError(f"{above} is no prefix of {below}")
    # Not optree.broadcast_prefix, which takes dictionaries in the order of the prefix and not of the tree.
    where = {path: index for index, path in enumerate(above.paths())}
    return tuple(next(where[path[:n]] for n in range(len(path) + 1) if path[:n] in where) for path in below.paths())


def shown(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> str:
    """A tree's structure for a message, with a star for each leaf; if that is long, its beginning.

    >>> shown({"w": (1, [2])})
    "{'w': (*, [*])}"
    """
    text = repr(map(lambda _: _Star(), tree, is_leaf=is_leaf))
    return text if len(text) <= 3 * _SHOWN else f"{text[: 3 * _SHOWN]}... ({len(leaves(tree, is_leaf))} leaves)"


class _Star:
    def __repr__(self) -> str:
        return "*"


class Packed:
    """Arrives in another process as the treedef, which is read once its node classes are registered there.

    Attributes:
        by_value: its node classes that can't be imported there, and travel with it.
    """

    def __init__(self, treedef: optree.PyTreeSpec):
        classes, todo = dict[type, None](), [treedef]
        while todo:
            node = todo.pop()
            todo.extend(node.children())
            if isinstance(node.type, type):
                classes[node.type] = None
        self.by_value = [cls for cls in classes if not travels_by_name(cls)]
        self._treedef, self._nodes = treedef, list[tuple[type, Callable, Callable, str]]()
        for cls in classes:  # in this order, which is the same on all ranks
            is_sent = cls in self.by_value or cls in containers.adopted
            entry = optree.register_pytree_node.get(cls, namespace=NAMESPACE) if is_sent else None
            if entry is not None and entry.kind == optree.PyTreeKind.CUSTOM:
                self._nodes.append((cls, entry.flatten_func, entry.unflatten_func, entry.namespace or NAMESPACE))

    def __reduce__(self) -> Any:
        return _arrived, (_Registered(self._nodes), self._treedef)


@dataclasses.dataclass(frozen=True, slots=True)
class _Registered:
    """Registers node classes when it arrives."""

    nodes: list[tuple[type, Callable, Callable, str]]

    def __reduce__(self) -> Any:
        return _register, (self.nodes,)


def _register(nodes: list[tuple[type, Callable, Callable, str]]) -> None:
    for cls, flatten_node, unflatten_node, namespace in nodes:
        containers.register(cls, flatten_node, unflatten_node, namespace=namespace)


def _arrived(registered: None, treedef: optree.PyTreeSpec) -> optree.PyTreeSpec:
    return treedef
