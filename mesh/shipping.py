"""When a function must be sent to the ranks again: a cheap look at what it refers to.

Pickling a function at every call would cost more than a small step. So a function is pickled once, and again only
when something it refers to was rebound or changed: its code, defaults, closure cells, the globals it names, and four
levels into what those hold (a dict's entries, an object's attributes), tensors with their versions, modules with
their parameters. A change deeper than that, or in a large container or NumPy array, is not noticed.
Invariant: a snapshot keeps nothing alive, but for small built-in values and containers too deep to look into.
"""

from __future__ import annotations

import dis
import functools
import linecache
import types
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from . import wire
from .wire import travels_by_name

_SCALARS = (int, float, complex, str, bytes, bool, type(None))
_DEPTH = 4
_LOOKED_INTO = 256  # entries of a container, attributes of an object
_LOOKED_AT = 4096  # values in all
_ARRAY_BYTES = 1 << 16  # of a NumPy array that is compared by content


def snapshot(function: Any, whole: tuple[type, ...] = ()) -> list[Any]:
    """What `function` refers to, as a flat list; two snapshots are compared by `unchanged`.

    Args:
        whole: types whose instances are not looked into.
    """
    found: list[Any] = []
    seen: dict[int, int] = {}  # id -> the least depth at which it was met
    kept: list[Any] = []  # ids stay unique only while the objects live
    todo: list[tuple[Any, int]] = [(function, 0)]
    while todo:
        obj, depth = todo.pop()
        if isinstance(obj, _SCALARS):
            found.append(obj)
            continue
        inside = None if isinstance(obj, whole) or len(found) > _LOOKED_AT else _inside(obj, depth)
        if isinstance(obj, list | tuple | dict | set) and inside is not None:
            # Its entries are compared, so it does not matter which object holds them.
            found.append(f"{type(obj).__qualname__} of {len(obj)}")
        else:
            found.append(_identity(obj))
        if seen.get(id(obj), depth + 1) <= depth:
            continue
        seen[id(obj)] = depth
        kept.append(obj)
        todo.extend(inside or ())
        if isinstance(obj, torch.Tensor):
            found.extend(_changes_of(obj))
        elif isinstance(obj, torch.nn.Module):
            found.extend(_state_of(obj))
        elif isinstance(obj, np.ndarray) and obj.nbytes <= _ARRAY_BYTES and not obj.dtype.hasobject:
            found.append(obj.tobytes())
    return found


def unchanged(old: list[Any], new: list[Any]) -> bool:
    return len(old) == len(new) and all(
        a is b or (type(a) is type(b) and isinstance(a, _SCALARS) and (a == b or (a != a and b != b)))
        for a, b in zip(old, new, strict=True)
    )


def _identity(obj: Any) -> Any:
    """Something that is the same object for as long as `obj` is: a weak reference, where there can be one."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return obj


def _inside(obj: Any, depth: int) -> list[tuple[Any, int]] | None:
    """What to look at inside an object, and how deep that is; None if it counts as a whole."""
    if isinstance(obj, types.FunctionType):
        if travels_by_name(obj):
            return None
        return [(item, 0) for item in (obj.__code__, obj.__defaults__, obj.__kwdefaults__, *_used_by(obj).values())]
    if isinstance(obj, functools.partial):
        return [(item, 0) for item in (obj.func, obj.args, obj.keywords)]
    if isinstance(obj, types.MethodType):
        return [(obj.__func__, 0), (obj.__self__, 0)]
    by_value = type(obj).__module__ == "__main__"  # a class that travels with its instances
    inside: list[Any]
    if isinstance(obj, torch.Tensor | torch.nn.Module):
        inside = []
    elif isinstance(obj, type):
        inside = list(vars(obj).values()) if obj.__module__ == "__main__" else []
    elif isinstance(obj, types.ModuleType | types.CodeType) or depth >= _DEPTH:
        return None
    elif isinstance(obj, dict):
        inside = [item for pair in obj.items() for item in pair]
    elif isinstance(obj, list | tuple | set):
        inside = list(obj)
    else:
        inside = list(getattr(obj, "__dict__", {}).values())
    if len(inside) > _LOOKED_INTO * (1 + isinstance(obj, dict)):
        return None
    return [(item, depth + 1) for item in inside] + ([(type(obj), depth)] if by_value else [])


def _changes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a change by torch makes different: its count misses `tensor.data = other` and `module.double()`."""
    return tensor._version, tensor.data_ptr() if tensor.layout is torch.strided else 0, tensor.dtype


def _state_of(module: torch.nn.Module) -> list[Any]:
    """Everything of a module and its children that is likely to change: tensors, versions, the training flags."""
    found: list[Any] = []
    todo, seen = [module], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found.extend((weakref.ref(one), one.training))
        for tensor in (*one._parameters.values(), *one._buffers.values()):
            found.extend((None,) if tensor is None else (weakref.ref(tensor), *_changes_of(tensor)))
        todo.extend(child for child in one._modules.values() if child is not None)
    return found


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: a name not bound yet
        return None


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))


def _used_by(function: types.FunctionType) -> dict[str, Any]:
    """The names that a function takes from around it, with their values."""
    cells = zip(function.__code__.co_freevars, map(_contents, function.__closure__ or ()), strict=False)
    names = _global_names(function.__code__)
    return {**{name: function.__globals__[name] for name in names if name in function.__globals__}, **dict(cells)}


# -- what goes with a function, and what is wrong with it --------------------------------------------------------------


def functions_of(function: Any) -> list[types.FunctionType]:
    """`function` and the functions it uses, as far as they travel by value."""
    found: list[types.FunctionType] = []
    todo = [function]
    while todo:
        one = todo.pop()
        while isinstance(one, functools.partial | types.MethodType):
            one = one.func if isinstance(one, functools.partial) else one.__func__
        if isinstance(one, types.FunctionType) and one not in found and not travels_by_name(one):
            found.append(one)
            todo.extend(_used_by(one).values())
    return found


def typed_sources(function: Any) -> dict[str, list[str]]:
    """Source lines of functions that come from no file (a REPL, a notebook), for tracebacks on the ranks."""
    sources: dict[str, list[str]] = {}
    for one in functions_of(function):
        entry = linecache.cache.get(one.__code__.co_filename)
        if entry is not None and len(entry) == 4 and entry[1] is None:
            sources[one.__code__.co_filename] = list(entry[2])
    return sources


def unpicklable_part(function: Any, whole: tuple[type, ...] = ()) -> str:
    """Which of the things that a function refers to can't be pickled, for the message; empty if none is found.

    Args:
        whole: types that travel as names.
    """
    parts: list[tuple[str, Any]] = []
    target = function
    while isinstance(target, functools.partial | types.MethodType):
        if isinstance(target, types.MethodType):
            parts.append((f"the object of the method {target.__func__.__qualname__}", target.__self__))
            target = target.__func__
        else:
            parts.extend((f"argument {index} of the partial", arg) for index, arg in enumerate(target.args))
            parts.extend((f"argument {name!r} of the partial", arg) for name, arg in target.keywords.items())
            target = target.func
    for one in functions_of(target):
        used = [(f"{name!r}, used in {one.__qualname__}", value) for name, value in _used_by(one).items()]
        used += [(f"a default argument of {one.__qualname__}", value) for value in one.__defaults__ or ()]
        parts += [(what, value) for what, value in used if not isinstance(value, types.FunctionType)]
    return unpicklable_among(parts, whole)


def unpicklable_among(parts: Iterable[tuple[str, Any]], whole: tuple[type, ...] = ()) -> str:
    """The first of some named values that can't be pickled, and why; empty if all can."""
    for what, value in parts:
        try:
            wire.dumps(value, lambda obj: "a name" if isinstance(obj, whole) else None).close()
        except Exception as error:
            return f"{what} ({type(value).__name__}): {error}"
    return ""
