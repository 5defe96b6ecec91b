"""Settings of the program's own modules that it has changed since it imported them: `config.rate = 2`.

Ranks import modules for themselves, and find there what the files say. A function that reads such a setting would
compute with another value on them, without a word; so the values travel with it, and ranks compare.
Invariant: of a module or a class, only what a file gives as a literal counts: what it computes (a path, a time, a rank)
may differ by process. Of an object, such as `config.args`, all that is read does.
"""

from __future__ import annotations

import argparse
import copy
import dis
import functools
import importlib
import inspect
import operator
import sys
import types
from typing import Any, NamedTuple

import torch

from ...kernels.errors import SpecError
from .functions import named_in, travels_by_name
from .literals import literals_of
from .references import OWN, SINGLE, attributes_of, function_of, names_in, used_by
from .reloading import is_own, is_programs

_CONTAINERS = (tuple, list, dict, set)
_LITERALS = (*SINGLE, *_CONTAINERS)
_MAKING = ("__new__", "__init__", "__post_init__")  # called where a class is named
_READING = frozenset((*dir(tuple), *dir(frozenset), *dir(types.MappingProxyType)))  # methods that change nothing
_MISSING = object()
_LOOKED_AT = 4096  # functions, classes and objects at most


class _Checked:
    def __init__(self, obj: Any, settings: dict[tuple[str, str], Any]):
        self._obj, self._settings = obj, settings

    def __reduce__(self) -> Any:
        return _read, (self._settings, self._obj)


def checked(obj: Any, settings: Settings | None = None) -> Any:
    """An object in a form that can be read where the settings that it has are as they are here, and only there.

    Args:
        settings: those of the function that it was made of; without, its own.
    """
    changed = (settings or Settings(obj)).changed
    return _Checked(obj, changed) if changed else obj


def _read(settings: dict[tuple[str, str], Any], obj: Any) -> Any:
    for (module, name), value in settings.items():
        theirs = named_in(importlib.import_module(module), name)
        if not _is_same(theirs, value):
            raise SpecError(
                f"{module}.{name} is not the same in the program and on ranks, which import {module} for themselves",
                got=f"{value!r:.80} in the program, {theirs!r:.80} on the rank",
                remedy="pass it as an argument, take it into a name of the program's own first "
                f"({name.rpartition('.')[2]} = {module}.{name}), or write it into the file",
            )
    return obj


class Settings:
    """The settings that a function, or what it calls, reads and does not write, where a file or an object has them.

    Looked through are functions, those of the program's own modules too, and of the classes of what they use those
    methods that code there names, or that others call: `__getitem__`, and what an installed base has, as `forward`. Of
    a class that is sent itself, as that of a remote object, all are.

    Attributes:
        changed: those that may have another value than a rank finds: (module, qualified name) -> value.
    """

    def __init__(self, function: Any):
        read: dict[tuple[str, str], Any] = {}
        written, filled, objects = set[tuple[str, str]](), set[tuple[str, str]](), set[tuple[str, str]]()
        assigned, names, seen = set[str](), set[str](), set[int]()
        waiting: dict[str, list[Any]] = {}  # methods that no code names so far
        left = [function]
        while isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, type):
            names.update(*map(vars, function.__mro__))
        while left and len(seen) < _LOOKED_AT:
            one = left.pop()
            if id(one) in seen or isinstance(one, _LITERALS):
                continue
            seen.add(id(one))
            if isinstance(one, types.FunctionType):
                if is_programs(one):
                    named = _named_by(one)
                    read.update((place, value) for place, value in named if isinstance(value, _LITERALS))
                    objects.update(place for place, value in named if _is_plain_object(value))
                    for _, value in named:
                        left += [value, *(getattr(value, name, None) for name in _MAKING if isinstance(value, type))]
                    paths = _paths(one.__code__)
                    written |= _places(one, paths.written)
                    filled |= _places(one, paths.filled)
                    assigned |= paths.assigned
                    more = names_in(one.__code__) - names
                    names |= more
                    for name in more & waiting.keys():
                        left += waiting.pop(name)
            elif isinstance(one, type):
                if _is_programs_class(one):
                    left += one.__bases__
                    for name, value in vars(one).items():
                        waits = name not in names and _waits(one, name, value)
                        (waiting.setdefault(name, []) if waits else left).append(function_of(value))
            else:
                left += _parts_of(one)
        literals = {module: literals_of(module) for module in {module for module, _ in read}}
        values: dict[tuple[str, bool], dict[str, Any]] = {}
        self.changed: dict[tuple[str, str], Any] = {}
        for (module, name), value in read.items():
            owner, of_class, last = name.rpartition(".")
            of_object = (module, owner) in objects
            if not of_object and name not in literals[module]:
                continue
            is_written = (module, name) in written or (of_class and last in assigned)
            is_filled = isinstance(value, _CONTAINERS) and ((module, name) in filled or not _is_literal(value))
            if not is_written and not is_filled:
                values.setdefault((module, isinstance(value, _CONTAINERS)), {})[name] = copy.deepcopy(value)
                if of_object or not _is_same(value, literals[module][name]):
                    self.changed[module, name] = value
        # Of each module, those that can't change and containers: how to read them (with an extra name, so that it
        # always gives a tuple), and their values.
        self._values = []
        for (module, _), group in values.items():
            first = next(iter(group))
            self._values.append(
                (sys.modules[module], operator.attrgetter(first, *group), [group[first], *group.values()])
            )

    def are_as_before(self) -> bool:
        """Whether all have the values that they had when this was made."""
        try:
            return all(_are_same(get(module), values) for module, get, values in self._values)
        except AttributeError:
            return False


def _are_same(values: tuple[Any, ...], others: list[Any]) -> bool:
    return all(map(operator.is_, values, others)) or all(map(_is_same, values, others))


def _is_same(value: Any, other: Any) -> bool:
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:  # an array, which was put into a container
        return False


def _is_literal(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_literal, value)) and all(map(_is_literal, value.values()))
    return isinstance(value, SINGLE) or (isinstance(value, _CONTAINERS) and all(map(_is_literal, value)))


def _waits(cls: type, name: str, value: Any) -> bool:
    """Whether something in a class is code that is called only by its name."""
    if not isinstance(function_of(value), types.FunctionType):
        return False
    if name in _MAKING:
        return True
    is_special = name.startswith("__") and name.endswith("__")
    return not is_special and not any(name in vars(base) for base in cls.__mro__ if not _is_programs_class(base))


def _parts_of(obj: Any) -> list[Any]:
    """What a method, a partial, a module, an object of the program's or this library's calls, with the classes."""
    if isinstance(obj, types.MethodType):
        return [obj.__func__, obj.__self__]
    if isinstance(obj, functools.partial):
        return [obj.func, *obj.args, *obj.keywords.values()]
    if isinstance(obj, torch.nn.Module):
        return [type(obj), *obj.children()]
    if type(obj).__module__.startswith(OWN) or _is_programs_class(type(obj)):
        return [type(obj), *attributes_of(obj).values()]
    return [getattr(obj, "__dict__", {}).get("__wrapped__")]


def _is_programs_class(cls: type) -> bool:
    return cls.__module__ == "__main__" or is_own(cls.__module__)


def _is_plain_object(value: Any) -> bool:
    """Whether its attributes are settings: `types.SimpleNamespace`, argparse's, or an object of the program's."""
    cls = type(value)
    if issubclass(cls, torch.nn.Module | torch.Tensor | type) or not cls.__dictoffset__:
        return False
    return cls in (types.SimpleNamespace, argparse.Namespace) or _is_programs_class(cls)


def _named_by(function: types.FunctionType) -> list[tuple[tuple[str, str], Any]]:
    """What a function names: ((module, qualified name), value), without a place for what travels by value."""
    around = function.__module__ if travels_by_name(function) else ""
    inner = function.__code__.co_freevars
    own = [(("" if name in inner else around, name), value) for name, value in used_by(function).items()]
    return own + _attributes(function, _paths(function.__code__).read)


def _places(function: types.FunctionType, paths: frozenset[tuple[str, ...]]) -> set[tuple[str, str]]:
    """Where these paths lead from a function."""
    globals_of = ((function.__module__, path[0]) for path in paths if len(path) == 1)
    return {*globals_of, *(place for place, _ in _attributes(function, paths))}


def _attributes(function: types.FunctionType, paths: frozenset[tuple[str, ...]]) -> list[tuple[tuple[str, str], Any]]:
    """What lies at these paths in the program's own modules, in classes and objects there, from names of a function."""
    found, named = [], used_by(function) if paths else {}
    around = function.__module__ if travels_by_name(function) else ""
    for first, *names in paths:
        owner, module, inside = named.get(first), around, f"{first}."
        for name in names:
            if isinstance(owner, types.ModuleType):
                module, inside = owner.__name__, ""
            elif isinstance(owner, type) and travels_by_name(owner):
                module, inside = owner.__module__, f"{owner.__qualname__}."
            elif not module or not _is_plain_object(owner):
                break
            owner = inspect.getattr_static(owner, name, _MISSING)
            if owner is _MISSING or not is_own(module):
                break
            found.append(((module, inside + name), owner))
            inside += f"{name}."
    return found


class _Paths(NamedTuple):
    """What a function, and those in it, do with what they refer to: ("config", "rate") for `config.rate`.

    Attributes:
        filled: what may have its entries changed there, if it is a container.
        assigned: attributes of what may be a class: of `cls`, of `type(self)`.
    """

    read: frozenset[tuple[str, ...]]
    written: frozenset[tuple[str, ...]]
    filled: frozenset[tuple[str, ...]]
    assigned: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _paths(code: types.CodeType) -> _Paths:
    read, written, filled = set[tuple[str, ...]](), set[tuple[str, ...]](), set[tuple[str, ...]]()
    assigned, fills = set[str](), False
    path: tuple[str, ...] = ()
    loaded: Any = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            path = (step.argval,)
            read.add(path)
        elif path and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if step.argval not in _READING:
                filled.add(path)
            path = (*path, step.argval)
            read.add(path)
        elif step.opname not in ("PRECALL", "CACHE"):
            if step.opname == "STORE_GLOBAL":
                written.add((step.argval,))
            elif step.opname == "STORE_ATTR" and path:
                written.add((*path, step.argval))
            elif step.opname == "STORE_ATTR" and loaded != "self":
                assigned.add(step.argval)
            fills = fills or step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
            path = ()
        loaded = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
    if fills:
        filled |= read
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _paths(constant)
            read |= inner.read
            written |= inner.written
            filled |= inner.filled
            assigned |= inner.assigned
    return _Paths(frozenset(read), frozenset(written), frozenset(filled), frozenset(assigned))
