"""When a function must be sent to the ranks again: a cheap look at what it refers to.

Pickling a function at every call would cost more than a small step. So a function is pickled once, and again only
when something it refers to was rebound or changed: its code, defaults, closure cells, the globals it names, and one
level into what those hold (a dict's entries, an object's attributes, a module's parameters and their versions).
A change deeper than that in a mutable object is not noticed.
"""

from __future__ import annotations

import functools
import linecache
import sys
import types
from typing import Any

import torch

_SCALARS = (int, float, complex, str, bytes, bool, type(None))
_LOOKED_INTO = 256  # entries of a container, attributes of an object


def snapshot(function: Any) -> list[Any]:
    """What `function` refers to, as a flat list; two snapshots are compared by `unchanged`."""
    seen: set[int] = set()
    found: list[Any] = []
    todo: list[tuple[Any, int]] = [(function, 0)]
    while todo:
        obj, depth = todo.pop()
        found.append(obj)
        if isinstance(obj, _SCALARS) or id(obj) in seen:
            continue
        seen.add(id(obj))
        if isinstance(obj, types.FunctionType):
            if _by_reference(obj):
                continue
            found.append(obj.__code__)
            inner = [obj.__defaults__, obj.__kwdefaults__, *(_contents(cell) for cell in obj.__closure__ or ())]
            inner.extend(obj.__globals__[name] for name in _global_names(obj.__code__) if name in obj.__globals__)
            todo.extend((item, 0) for item in inner)
        elif isinstance(obj, functools.partial):
            todo.extend((item, 0) for item in (obj.func, obj.args, obj.keywords))
        elif isinstance(obj, types.MethodType):
            todo.extend([(obj.__func__, 0), (obj.__self__, 0)])
        elif isinstance(obj, torch.Tensor):
            found.append(obj._version)
        elif isinstance(obj, torch.nn.Module):
            found.append(obj.training)
            for tensor in (*obj.parameters(), *obj.buffers()):
                found.extend((tensor, tensor._version))
        elif isinstance(obj, types.ModuleType | type):
            continue
        elif depth < 2:
            if isinstance(obj, dict) and len(obj) <= _LOOKED_INTO:
                todo.extend((item, depth + 1) for pair in obj.items() for item in pair)
            elif isinstance(obj, list | tuple | set) and len(obj) <= _LOOKED_INTO:
                todo.extend((item, depth + 1) for item in obj)
            elif hasattr(obj, "__dict__") and len(vars(obj)) <= _LOOKED_INTO:
                todo.extend((item, depth + 1) for item in vars(obj).values())
    return found


def unchanged(old: list[Any], new: list[Any]) -> bool:
    return len(old) == len(new) and all(
        a is b or (type(a) is type(b) and isinstance(a, _SCALARS) and a == b) for a, b in zip(old, new, strict=True)
    )


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: a name not bound yet
        return None


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))


def _by_reference(function: types.FunctionType) -> bool:
    """Whether cloudpickle sends a function as a name that the ranks import."""
    module = sys.modules.get(function.__module__ or "")
    if module is None or function.__module__ == "__main__":
        return False
    found: Any = module
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def typed_sources(function: Any) -> dict[str, list[str]]:
    """Source lines of functions that come from no file (a REPL, a notebook), for tracebacks on the ranks."""
    sources: dict[str, list[str]] = {}
    for obj in snapshot(function):
        if isinstance(obj, types.CodeType):
            entry = linecache.cache.get(obj.co_filename)
            if entry is not None and len(entry) == 4 and entry[1] is None:
                sources[obj.co_filename] = list(entry[2])
    return sources


def unpicklable_part(function: Any) -> str:
    """Which of the things that a function refers to can't be pickled, for the message."""
    from .wire import dumps

    names: list[tuple[str, Any]] = []
    target = function
    while isinstance(target, functools.partial):
        names.extend((f"argument {index} of the partial", arg) for index, arg in enumerate(target.args))
        target = target.func
    todo, seen = [target], set()
    while todo:
        current = todo.pop()
        if not isinstance(current, types.FunctionType) or id(current) in seen or _by_reference(current):
            continue
        seen.add(id(current))
        inner = list(zip(current.__code__.co_freevars, map(_contents, current.__closure__ or ()), strict=False))
        inner += [(n, current.__globals__[n]) for n in _global_names(current.__code__) if n in current.__globals__]
        for name, value in inner:
            if isinstance(value, types.FunctionType):
                todo.append(value)
            else:
                names.append((f"{name!r}, used in {current.__qualname__}", value))
    for name, value in names:
        try:
            dumps(value, lambda _: None)
        except Exception as error:
            return f"{name} ({type(value).__name__}): {error}"
    return ""
