"""What a function refers to: code, defaults, attributes, closure, the globals it names, and some levels into these.

`driver.snapshot` uses this to find what has changed since the function was sent, `purity` to find what a body must not
change. Invariant: functions and classes that other processes import by name are not looked into.
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import enum
import functools
import logging
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...kernels import torch_private
from .functions import named_in, travels_by_name
from .operators import named_among

SCALARS = (int, float, complex, str, bytes, bool, type(None))
# Tuples, made once: this is used in every step, where unions would be made anew each time.
CONTAINERS = (list, tuple, set, frozenset, dict, types.MappingProxyType, collections.deque)
_PLAIN_CONTAINERS = (list, tuple, set, frozenset)
SINGLE = (*SCALARS, np.generic, enum.Enum, torch.dtype, torch.device)  # nothing in them can change
_OF_TORCH = (torch.Tensor, torch.nn.Module)
_WHOLE_DATA = (*SINGLE, *_OF_TORCH, np.ndarray, types.FunctionType, types.BuiltinFunctionType)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)  # `table.get`, also all functions that are built in
_OF_CLASSES = (property, staticmethod, classmethod)
_AS_A_WHOLE = (
    types.ModuleType,
    types.CodeType,
    logging.Logger,
)  # a logger refers to all others, and is sent as its name
OF_MODULES = frozenset(vars(torch.nn.Module()))
DEPTH = 6  # levels of objects and containers: a subset, its dataset, the transform, its list, one of these, a number
OWN = __name__.partition(".")[0] + "."  # of the library's own objects with slots, dataclasses are looked into
LOOKED_INTO = 256  # at most so many entries of a container, or attributes of an object
_ARRAY_BYTES = 1 << 16  # arrays up to this size are read whole
_SUMMED_BYTES, _ROW = 1 << 24, 1 << 12  # larger ones up to this size, if contiguous, as sums of rows of so many bytes


Reader = Callable[[Any], list[Any]]
"""Gives what lies inside an object, and keeps no reference to it."""


def _reader_of(obj: Any, depth: int) -> tuple[Reader, int] | None:
    """How to look inside an object, and the depth of what lies there; None if it is not looked into."""
    if isinstance(obj, types.FunctionType):
        if travels_by_name(obj):
            return None
        if torch_private.uncompiled(obj) is not None:
            return _compiled_parts, 0
        return _function_parts, 0
    if isinstance(obj, functools.partial):
        return _partial_parts, 0
    if isinstance(obj, types.MethodType):
        return _method_parts, 0
    if isinstance(obj, _BOUND):
        return _object_of_method, 0
    if isinstance(obj, _OF_CLASSES):
        return _functions_in, 0
    read: Reader
    if isinstance(obj, _OF_TORCH):
        read = _no_parts
    elif isinstance(obj, type):
        read = _class_parts if is_looked_into(obj) else _no_parts
    elif (isinstance(obj, _AS_A_WHOLE) and not _is_module_by_value(obj)) or depth >= DEPTH:
        return None
    elif isinstance(obj, types.ModuleType):
        read = _module_parts
    elif type(obj).__module__.startswith(OWN) and hasattr(type(obj), "_changing"):
        read = type(obj)._changing
    elif isinstance(obj, CONTAINERS):
        read = list if type(obj) in _PLAIN_CONTAINERS else _items
        read = _items_and_factory if isinstance(obj, collections.defaultdict) else read
    else:
        slots = _slots_of(type(obj))
        is_read = dataclasses.is_dataclass(type(obj)) or not type(obj).__module__.startswith(OWN)
        read = _reader_of_slots(slots) if slots and is_read else _own_attributes
    if len(read(obj)) > LOOKED_INTO * (1 + (read is not list)):  # others give names as well
        return None
    return read, depth + 1


def readers_of(obj: Any, depth: int) -> list[tuple[Reader, int]]:
    """The ways to look inside an object, each with the depth of what it finds; none if it is not looked into."""
    inside = _reader_of(obj, depth)
    if inside is None:
        return []
    return [inside, (_class_of, depth)] if is_looked_into(type(obj)) else [inside]


def is_looked_into(cls: type) -> bool:
    """Whether a class is looked into: one of the main script, or in whose place its module has another by now."""
    if cls.__module__ == "__main__":
        return True
    module = sys.modules.get(cls.__module__)
    found = None if module is None else named_in(module, cls.__qualname__)
    return isinstance(found, type) and found is not cls and "__module__" in vars(cls)


def inside_of(obj: Any, depth: int) -> list[tuple[Any, int]] | None:
    """What to look at inside an object, with its depth; None if it is not looked into."""
    readers = readers_of(obj, depth)
    return [(item, level) for read, level in readers for item in read(obj)] if readers else None


def _function_parts(function: Any) -> list[Any]:
    return parts_of_function(function, used_by(function))


def parts_of_function(function: Any, used: dict[str, Any]) -> list[Any]:
    code = function.__code__
    operators = named_among(names) if "ops" in (names := names_in(code)) else ()
    held = (*used.values(), *_own_attributes(function))
    return [code, function.__defaults__, function.__kwdefaults__, *held, *operators]


def _compiled_parts(function: Any) -> list[Any]:
    return [torch_private.uncompiled(function)]


def _partial_parts(partial: Any) -> list[Any]:
    return [partial.func, partial.args, partial.keywords, *_own_attributes(partial)]


def _method_parts(method: Any) -> list[Any]:
    return [method.__func__, method.__self__]


def _object_of_method(method: Any) -> list[Any]:
    return [method.__self__]


def _functions_in(obj: Any) -> list[Any]:
    return [obj.fget, obj.fset, obj.fdel] if isinstance(obj, property) else [obj.__func__]


def _is_module_by_value(obj: Any) -> bool:
    """Whether it is a module that nobody can import: one of `importlib.util.module_from_spec`, for instance."""
    return type(obj) is types.ModuleType and obj.__name__ not in sys.modules


def _module_parts(module: Any) -> list[Any]:
    return _entries({name: value for name, value in vars(module).items() if name != "__builtins__"})


def _class_parts(cls: type) -> list[Any]:
    return [*_own_attributes(cls), *cls.__bases__]


def _class_of(obj: Any) -> list[Any]:
    return [type(obj)]  # it travels with its instances


def _no_parts(obj: Any) -> list[Any]:
    return []


def _own_attributes(obj: Any) -> list[Any]:
    if not type(obj).__dictoffset__:  # without asking a `__getattr__` of its own
        return []
    try:
        return _entries(obj.__dict__)
    except Exception:  # a Task of asyncio hides its own, and that of a proxy is another object's
        return []


def _reader_of_slots(slots: list[str]) -> Reader:
    get = operator.attrgetter(slots[0], *slots)  # with an extra name, so that it always gives a tuple

    def read(obj: Any) -> list[Any]:
        try:
            return [*get(obj)[1:], *_own_attributes(obj)]
        except AttributeError:  # one is empty
            return _entries(attributes_of(obj))

    return read


def attributes_of(obj: Any) -> dict[str, Any]:
    """An object's attributes, those in slots, too."""
    own = getattr(obj, "__dict__", {})
    slots = _slots_of(type(obj))
    return {**own, **{name: getattr(obj, name) for name in slots if hasattr(obj, name)}} if slots else own


def _slots_of(cls: type) -> list[str]:
    """The names of a class's slots, with those of its bases; none of classes without `__slots__`, as those in C are."""
    return [
        name
        for one in cls.__mro__
        if "__slots__" in vars(one)
        for name, value in vars(one).items()
        if isinstance(value, types.MemberDescriptorType)
    ]


def _entries(entries: Any) -> list[Any]:
    return [*entries, *entries.values()]


def _items(container: Any) -> list[Any]:
    """Its entries, and the attributes of an object whose class is derived from a built-in container."""
    is_mapping = isinstance(container, (dict, types.MappingProxyType))
    return [*(_entries(container) if is_mapping else container), *_own_attributes(container)]


def _items_and_factory(container: Any) -> list[Any]:
    return [*_items(container), container.default_factory]


def parts_of_data(obj: Any) -> list[Any] | None:
    """What lies in a container or a dataclass; nothing in a number, a text, an Enum's member, a tensor, an array, a
    module or a function.

    None of other objects.
    """
    if isinstance(obj, _WHOLE_DATA):
        return []
    if isinstance(obj, CONTAINERS):
        return list(obj) if type(obj) in _PLAIN_CONTAINERS else _items(obj)
    return list(attributes_of(obj).values()) if dataclasses.is_dataclass(type(obj)) else None


def bytes_of_array(array: np.ndarray, most: int) -> bytes:
    """The bytes of an array of numbers or texts.

    Of a large one the sums of the rows and of the columns of a table that has its bytes; and of a still larger one the
    bytes of `most` values, or some more, at equal distances, the first and the last among them.
    """
    if array.nbytes <= _ARRAY_BYTES:
        return array.tobytes()
    if array.nbytes <= _SUMMED_BYTES and array.flags.forc:
        data = array.ravel("K").view(np.uint8)
        rows = data[: len(data) // _ROW * _ROW].view(np.uint64).reshape(-1, _ROW // 8)
        return rows.sum(0).tobytes() + rows.sum(1).tobytes() + data[rows.nbytes :].tobytes()
    step = max(1, (array.size - 1) // (most - 1))
    return array.flat[::step].tobytes() + array.flat[-1:].tobytes()


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes, including those of inner functions."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))


def function_of(attribute: Any) -> Any:
    """The function of a class's method or property; anything else as it is."""
    if isinstance(attribute, _OF_CLASSES):
        return attribute.fget if isinstance(attribute, property) else attribute.__func__
    return attribute


def content_of(cell: Any) -> Any:
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


def used_by(function: types.FunctionType) -> dict[str, Any]:
    """The names that a function takes from around it, with their values."""
    cells = zip(function.__code__.co_freevars, map(content_of, function.__closure__ or ()), strict=False)
    names = _global_names(function.__code__)
    return {**{name: function.__globals__[name] for name in names if name in function.__globals__}, **dict(cells)}


def functions_of(function: Any) -> list[types.FunctionType]:
    """`function` and the functions it uses that travel by value."""
    found: list[types.FunctionType] = []
    todo = [function]
    while todo:
        one = todo.pop()
        one = _called(one)
        if isinstance(one, types.FunctionType) and one not in found and not travels_by_name(one):
            found.append(one)
            todo.extend(used_by(one).values())
    return found


def _called(function: Any) -> Any:
    """The function that a partial, a method or an object made by `functools.update_wrapper` calls."""
    while not isinstance(function, types.FunctionType):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            break
    return function
