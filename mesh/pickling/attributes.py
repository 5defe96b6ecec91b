"""Which attributes a step reads of an object: it is sent with these alone.

A trainer also has histories, counters, progress bars and files, which change with each step, or can't be pickled. If
a step that is one of its methods, or refers to it, were sent with all of them, it would be sent again for each call.
Invariant: an attribute is left out only if the code shows that it is not read. An object that is passed on or assigned
to, or whose class has ways of its own to find or pickle attributes, is sent as a whole; and so is one that something
else that is sent has as a whole, since that may change it: a hook that notes an output in `self`.
"""

from __future__ import annotations

import abc
import copyreg
import dis
import functools
import types
import weakref
from collections.abc import Container
from typing import Any, NamedTuple

from ...kernels import torch_private
from .functions import travels_by_name
from .references import OWN, Reader, content_of, function_of, parts_of_function, used_by

_METACLASSES = (type, abc.ABCMeta)
# What a class must have as `object` has it. A module's has not, and is told apart from its copies by `functional`.
_AS_OBJECT = (
    "__new__",
    "__getattribute__",
    "__getattr__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
)
_BESIDE = frozenset({"super", "locals", "vars", "eval", "exec"})  # which find a variable without being given it
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_OF_NAMES = frozenset((*dis.hasname, *dis.hasconst))  # of attributes, globals and constants, not of variables


class Attributes(dict[str, Any]):
    """Some attributes of an object of the class `of`."""

    __slots__ = ("of",)

    def __init__(self, of: type, entries: dict[str, Any]):
        super().__init__(entries)
        self.of = of


class Reads(NamedTuple):
    """The names that are read from an object, and whether its class travels by value."""

    names: tuple[str, ...]
    by_value: bool

    def attributes(self, obj: Any) -> Attributes:
        """The attributes that the object itself has by these names."""
        own = getattr(obj, "__dict__", {})
        return Attributes(type(obj), {name: own[name] for name in self.names if name in own})

    def of_class(self, cls: type) -> dict[str, Any]:
        """What its class has by these names."""
        found = ((name, _in_class(cls, name)) for name in self.names)
        return {name: holder[name] for name, holder in found if holder is not None}

    def parts(self, obj: Any) -> list[Any]:
        """What is read, the class as such, and all code in which the names were found, as it is now."""
        of_class = self.of_class(type(obj))
        codes = (getattr(function_of(one), "__code__", None) for one in of_class.values())
        parts = [self.attributes(obj), weakref.ref(type(obj)), *codes]
        return [*parts, of_class] if self.by_value else parts


class Part:
    """Arrives as an object that has what is read of one.

    If its class travels by value, it arrives as a class for this object alone, which has what is read of it: the other
    methods of a trainer may refer to anything. If that class is sent anyway, it is of this class, which may be changed.
    """

    def __init__(self, reads: Reads, obj: Any):
        cls, attributes = type(obj), dict(reads.attributes(obj))
        self._made: tuple[Any, ...] = _with_class, (cls,), attributes
        if reads.by_value:
            name = cls.__name__, cls.__qualname__, cls.__module__
            self._made = _with_new_class, name, (attributes, reads.of_class(cls)), None, None, _fill

    def __reduce__(self) -> Any:
        return self._made


class Parts:
    """What is sent of the objects that a step refers to."""

    def __init__(self) -> None:
        self._methods: dict[int, tuple[types.MethodType, Part]] = {}
        self._objects: dict[int, Any] = {}  # of which there are parts, and their classes that travel by value
        self._whole: dict[int, Any] = {}

    def suffice(self, sent: Container[int]) -> bool:
        """Whether nothing of which there is a part was also sent as a whole; if not, all has to be sent again.

        Args:
            sent: the ids of what was sent, apart from parts.
        """
        whole = {key: obj for key, obj in self._objects.items() if key in sent and key not in self._whole}
        self._whole.update(whole)
        self._methods.clear()
        return not whole

    def of_method(self, method: types.MethodType) -> Part | None:
        """What travels of a method's object, if that is enough."""
        if id(method) not in self._methods:  # what it reads may refer to it again
            reads = _read_by_method(method)
            if reads is None or id(method.__self__) in self._whole:
                return None
            self._methods[id(method)] = method, self._part(reads, method.__self__)
        return self._methods[id(method)][1]

    def of_function(self, function: types.FunctionType) -> types.FunctionType:
        """A function with parts of the objects in its closure, where that is enough."""
        cells = _cells(function)
        objects = [(name, reads, content_of(cells[name])) for name, reads in _read_from_closure(function).items()]
        parts = {name: self._part(reads, obj) for name, reads, obj in objects if id(obj) not in self._whole}
        if not parts:
            return function
        closure = tuple(types.CellType(parts[name]) if name in parts else cell for name, cell in cells.items())
        code, names = function.__code__, function.__globals__
        part = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
        functools.update_wrapper(part, function)
        part.__dict__ = dict(vars(function))
        part.__kwdefaults__ = function.__kwdefaults__
        return part

    def _part(self, reads: Reads, obj: Any) -> Part:
        self._objects[id(obj)], cls = obj, type(obj)
        if reads.by_value and not hasattr(cls, "__del__"):
            self._objects[id(cls)] = cls
            reads = reads._replace(by_value=id(cls) not in self._whole)
        return Part(reads, obj)


def _with_class(cls: Any) -> Any:
    return cls.__new__(cls)


def _with_new_class(name: str, qualname: str, module: str) -> Any:
    return type(name, (), {"__qualname__": qualname, "__module__": module})()


def _fill(obj: Any, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, of_class = state
    vars(obj).update(attributes)
    for name, value in of_class.items():
        setattr(type(obj), name, value)


def readers_in_step(obj: Any) -> list[tuple[Reader, int]]:
    """How to look at a method or a function of a step, as `readers_of`; none if that needs nothing special."""
    if type(obj) is types.MethodType and (reads := _read_by_method(obj)) is not None:
        return [(functools.partial(_method_parts, reads), 0)]
    if type(obj) is types.FunctionType and (variables := _read_from_closure(obj)):
        return [(functools.partial(_function_parts, variables), 0)]
    return []


def attributes_read(method: types.MethodType) -> Attributes | None:
    """The attributes that a method reads from its object; None if that is not known, or may be all."""
    reads = _read_by_method(method)
    return None if reads is None else reads.attributes(method.__self__)


def _method_parts(reads: Reads, method: Any) -> list[Any]:
    return [method.__func__, method.__func__.__code__, *reads.parts(method.__self__)]


def _function_parts(variables: dict[str, Reads], function: Any) -> list[Any]:
    used, cells = used_by(function), _cells(function)
    more = []
    for name, reads in variables.items():
        used[name], *others = reads.parts(content_of(cells[name]))
        more += others
    return [*parts_of_function(function, used), *more]


def _cells(function: types.FunctionType) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _read_by_method(method: types.MethodType) -> Reads | None:
    cls, function = type(method.__self__), method.__func__
    return _reads_of(cls, [function]) if _is_plain(cls) else None


def _read_from_closure(function: types.FunctionType) -> dict[str, Reads]:
    """What a function reads from objects in its closure, where that is known, by the names there."""
    if not function.__closure__ or travels_by_name(function) or (function.__module__ or "").startswith(OWN):
        return {}
    if torch_private.uncompiled(function) is not None:
        return {}
    found = {}
    for name, cell in _cells(function).items():
        cls = type(content_of(cell))
        read = _read_from(function.__code__, name) if _is_plain(cls) else None
        reads = None if read is None else _reads_of(cls, [], read)
        if reads is not None:
            found[name] = reads
    return found


def _reads_of(cls: type, functions: list[Any], read: frozenset[str] = frozenset()) -> Reads | None:
    """What is read from an object by these methods, by the names in `read`, and by what these mean in its class."""
    names: dict[str, None] = {}
    by_value = not travels_by_name(cls)
    if not by_value and hasattr(cls, "__del__"):  # which may need what is left out
        return None
    without_object = (staticmethod,) if by_value else (staticmethod, classmethod)
    todo = list(functions)
    while True:
        for name in sorted(read - names.keys()):
            names[name] = None
            found = (_in_class(cls, name) or {}).get(name)
            if isinstance(found, types.FunctionType | property):
                todo.append(function_of(found))
            elif hasattr(type(found), "__get__") and not isinstance(found, without_object):
                return None
        if not todo:
            return Reads(tuple(names), by_value)
        method = todo.pop()
        by_method = _read_by(method.__code__) if isinstance(method, types.FunctionType) else None
        if by_method is None:
            return None
        read = by_method


def _is_plain(cls: type) -> bool:
    """Whether attributes of its objects are what lies in their `__dict__`, and they are pickled as that."""
    return (
        type(cls) in _METACLASSES
        and bool(cls.__dictoffset__)
        and all(getattr(cls, name, None) is getattr(object, name, None) for name in _AS_OBJECT)
        and not any(vars(one).get("__slots__") or one.__module__.startswith(OWN) for one in cls.__mro__)
        and cls not in copyreg.dispatch_table
    ) or cls is types.SimpleNamespace


def _in_class(cls: type, name: str) -> Any:
    """The attributes of the class among its bases that has this one; None if none has."""
    return next((vars(one) for one in cls.__mro__ if name in vars(one)), None)


def _read_by(code: types.CodeType) -> frozenset[str] | None:
    """The attributes that a function reads from its first argument."""
    return _read_from(code, code.co_varnames[0]) if code.co_argcount else None


@functools.lru_cache(maxsize=4096)
def _read_from(code: types.CodeType, variable: str) -> frozenset[str] | None:
    """The attributes that a function reads from a variable; None if it does anything else with it."""
    if not _BESIDE.isdisjoint(code.co_names):
        return None
    found: set[str] = set()
    in_cell = variable in (*code.co_cellvars, *code.co_freevars)
    steps = list(dis.get_instructions(code))
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        used = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if variable not in used or step.opcode in _OF_NAMES:
            continue
        if in_cell and step.opname.startswith(("MAKE_CELL", "LOAD_CLOSURE", "LOAD_FAST")):  # for a function within
            continue
        is_load = step.opname.startswith(_LOADS) and used[-1] == variable and variable not in used[:-1]
        if not is_load or after is None or after.opname not in _READS or after.argval.startswith("__"):
            return None
        found.add(after.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and variable in constant.co_freevars:
            inner = _read_from(constant, variable)
            if inner is None:
                return None
            found |= inner
    return frozenset(found)
