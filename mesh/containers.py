"""Containers that are registered as tree nodes when first met: mappings, dataclasses, and those that torch knows.

A tokenizer's batch is a `UserDict`, a model's output a class registered with torch, a user's batch a dataclass. As
leaves they would be neither split nor gathered. Invariant: a class becomes a node only if the object met can be rebuilt
from its parts, and holds tensors; any other object (options, say) stays a leaf.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch

from ..kernels.torch_private import tree_nodes

# Types that need no look: what is no container, and what optree knows by itself.
leaf_types: set[type] = {torch.Tensor, torch.nn.Parameter, int, float, complex, bool, str, bytes, type(None), object}
adopted: set[type] = set()  # the classes registered here
torch_nodes = tree_nodes()
_found_leaves: set[type] = set()  # of `leaf_types` those that may yet be registered with torch
# The same of the main program, which a notebook defines anew with each run of a cell: the old ones are to go.
_main_leaves: weakref.WeakSet[type] = weakref.WeakSet()
counted = 0  # the classes that torch knew when `keep_up` was last called


def keep_up() -> None:
    """Let what was a leaf become a container if its class has been registered with torch since."""
    global counted
    counted = len(torch_nodes)
    leaf_types.difference_update(_found_leaves)
    _found_leaves.clear()
    _main_leaves.clear()


def are_leaves(types: Iterable[type]) -> bool:
    """Whether these are known to be no containers."""
    return all(cls in leaf_types or cls in _main_leaves for cls in types)


def adopt(found: Iterable[Any], namespace: str, is_leaf: Callable[[Any], bool] | None = None) -> bool:
    """Register the classes among these leaves that are containers; whether there were any.

    If all types are in `leaf_types`, there is no need to call this.

    Args:
        found: leaves of a tree.
        namespace: optree's, where they become nodes.
        is_leaf: says what is a leaf even if its class is a container.
    """
    new = set(map(type, found)).difference(leaf_types, _main_leaves)
    any_adopted = False
    for leaf in found:
        cls = type(leaf)
        if cls not in new or (is_leaf is not None and is_leaf(leaf)):
            continue
        new.discard(cls)
        way = None if cls in adopted else _way(leaf)
        if way is None:
            if cls not in adopted and not _may_be_container(cls):
                if cls.__module__ == "__main__":
                    _main_leaves.add(cls)
                else:
                    leaf_types.add(cls)
                    _found_leaves.add(cls)
            continue
        register(cls, *way, namespace=namespace)
        any_adopted = True
    return any_adopted


def register(cls: type, flatten: Callable, unflatten: Callable, *, namespace: str) -> None:
    """Make a class a node: in this process, or in one that has received a structure with this class."""
    if optree.register_pytree_node.get(cls, namespace=namespace) is None:
        optree.register_pytree_node(cls, flatten, unflatten, namespace=namespace)
    adopted.add(cls)


def _may_be_container(cls: type) -> bool:
    """Whether an object of a class may be a container though another is none (one with extra attributes, say)."""
    return dataclasses.is_dataclass(cls) or issubclass(cls, collections.abc.Mapping)


def _way(obj: Any) -> tuple[Callable, Callable] | None:
    """How to take objects of this class apart and rebuild them; None if this is no container."""
    cls = type(obj)
    if cls.__module__.partition(".")[0] == "spmd" or isinstance(obj, torch.Tensor | torch.nn.Module):
        return None
    way: tuple[Callable, Callable]
    node = torch_nodes.get(cls)
    if node is not None:  # its functions are sent along: torch may not know the class in another process
        way = functools.partial(_by_torch, node.flatten_fn), functools.partial(_made_by_torch, node.unflatten_fn)
    elif issubclass(cls, collections.abc.Mapping):
        way = _items, functools.partial(_mapping, cls)
    elif dataclasses.is_dataclass(cls):
        names = tuple(field.name for field in dataclasses.fields(cls))
        way = functools.partial(_fields, names), functools.partial(_dataclass, cls)
    else:
        return None
    return way if _comes_back(obj, *way) else None


def _comes_back(obj: Any, flatten: Callable, unflatten: Callable) -> bool:
    try:
        parts, data, _ = flatten(obj)
        again = unflatten(data, parts)
        if type(again) is not type(obj) or hash(data) != hash(flatten(again)[1]) or _has_more(obj, again):
            return False
        return any(map(_is_data, optree.tree_leaves(parts, none_is_leaf=True))) or any(map(_way, parts))
    except Exception:
        return False


def _is_data(leaf: Any) -> bool:
    """A tensor, an array, a value on a mesh, or what stands for one in a tree of specs."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or type(leaf).__module__.startswith("spmd.")


def _has_more(obj: Any, again: Any) -> bool:
    """Whether an object has attributes that would be lost."""
    return not set(getattr(obj, "__dict__", ())) <= set(getattr(again, "__dict__", ()))


def _items(obj: Any) -> tuple[tuple, tuple, tuple]:
    keys = tuple(obj.keys())
    return tuple(obj[key] for key in keys), keys, keys


def _mapping(cls: type, keys: tuple, values: Iterable[Any]) -> Any:
    return cls(dict(zip(keys, values, strict=True)))


def _fields(names: tuple[str, ...], obj: Any) -> tuple[tuple, tuple, tuple]:
    return tuple(getattr(obj, name) for name in names), names, names


def _dataclass(cls: type, names: tuple[str, ...], values: Iterable[Any]) -> Any:
    """Without its constructor, which may check what its parts are: trees are also made of specs and of paths."""
    made: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _by_torch(flatten: Callable, obj: Any) -> tuple[tuple, Any, tuple]:
    parts, context = flatten(obj)
    parts = tuple(parts)
    frozen = tuple(context) if isinstance(context, list) else context
    keys = tuple(context) if isinstance(context, list | tuple) and len(context) == len(parts) else range(len(parts))
    return parts, (isinstance(context, list), frozen), tuple(keys)


def _made_by_torch(unflatten: Callable, data: tuple[bool, Any], parts: Iterable[Any]) -> Any:
    was_list, context = data
    return unflatten(list(parts), list(context) if was_list else context)
