"""When a function must be sent to the ranks again: a cheap check of what it refers to.

Pickling a function at every call would cost more than a small step. So a function is pickled once, and again only
when something it refers to was rebound or changed: its code, defaults, closure cells, the globals it names, and six
levels into what those hold (a dict's entries, an object's attributes), tensors with their versions, modules with
their parameters and hooks, and deeper or larger containers of data alone: numbers, texts, members of an Enum,
dataclasses, tensors, arrays. Of anything else deeper than that, or in a large container, some entries are compared, and
of a NumPy array of more than 16 MiB some values.
The snapshot records where it read something, so that later checks read the same places again.
Invariant: a snapshot keeps nothing alive except small built-in values and containers too deep to look into.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import operator
import types
import weakref
from typing import Any

import numpy as np
import torch

from ..array import Array
from ..pickling.attributes import Attributes, readers_in_step
from ..pickling.containers import ENTRIES, look_through, some_of
from ..pickling.references import (
    CONTAINERS,
    DEPTH,
    LOOKED_INTO,
    OWN,
    SCALARS,
    Reader,
    bytes_of_array,
    readers_of,
    used_by,
)
from ..pickling.settings import Settings
from ..pickling.tensor_changes import changes_of, plain_state_of, state_of, state_of_tensors, tensors_in
from ..spec import RAGGED

_LOOKED_AT = 4096  # values at most
_OF_TENSORS = (dict, collections.OrderedDict, list, tuple)


class Snapshot:
    """The state of what a function refers to.

    Args:
        whole: types whose instances are not looked into.
        exchanges: whether Arrays may be exchanged for others of the same shape, dtype and spec: they are passed with
            each call.

    Attributes:
        size: how many values it has looked at.
        kind: a hash of the code, the classes and the kinds of Arrays among them, whatever the data are.
        settings: those of the program's modules that it reads.
    """

    def __init__(self, function: Any, whole: tuple[type, ...] = (), *, exchanges: bool = False):
        # Where to read: the index of an object found so far, its type, how to read it, and how many parts that gives.
        self._reads: list[tuple[int, weakref.ref[type], Reader, int]] = []
        # What was found again of these: its index, and the index where they were read.
        self._again: list[tuple[int, int]] = []
        found, depths = [function], [0]
        seen: dict[int, tuple[int, int]] = {}  # id -> the least depth at which it was found, and its index there
        into: set[int] = set()  # what has its entries compared, so that its identity does not matter
        at, plain = 0, _LOOKED_AT  # numbers and texts that may still be looked through, where nothing else is
        while at < len(found):
            obj, depth = found[at], depths[at]
            at += 1
            if isinstance(obj, whole) or len(found) > _LOOKED_AT:
                continue
            if isinstance(obj, SCALARS) and type(obj).__module__ != "__main__":  # else it has a class to look at
                continue
            readers, whole_read = _readers_of(obj, depth, in_step=exchanges), True
            if not readers and (isinstance(obj, CONTAINERS) or dataclasses.is_dataclass(type(obj))):
                reader, count = look_through(obj, plain)
                plain -= count
                whole_read = reader is not None or not isinstance(obj, CONTAINERS)
                reader = reader if whole_read else some_of
                readers = [(reader, DEPTH)] if reader else []
            is_read = bool(readers) and whole_read and (isinstance(obj, CONTAINERS) or _is_its_parts(obj, readers))
            if is_read:
                into.add(at - 1)
            least, first = seen.get(id(obj), (depth + 1, at - 1))
            if least <= depth:
                if is_read:
                    self._again.append((at - 1, first))
                continue
            seen[id(obj)] = depth, at - 1
            for read, level in readers:
                parts = read(obj)
                self._reads.append((at - 1, weakref.ref(type(obj)), read, len(parts)))
                found += parts
                depths += [level] * len(parts)
        self.size = len(found)
        # Where Arrays were found that may be exchanged, each with a number, and the hint of each number.
        self._arrays: list[tuple[int, int]] = []
        self._hints: list[Any] = []
        self._fixed: list[tuple[int, weakref.ref[Array]]] = []  # numbers of those that may not after all
        self._compared(found, into, exchanges)
        self.settings = Settings(function)
        self.kind = hash((frozenset(map(_kind_of, found)), *self._hints))

    def _compared(self, found: list[Any], into: set[int], exchanges: bool) -> None:
        """Keep what is needed to compare what was found: references, values or identities."""
        numbers: dict[int, int] = {}
        referred: list[int] = []
        equal: list[int] = []
        same: list[int] = []
        self._references: list[weakref.ref[Any]] = []
        for at, obj in enumerate(found):
            if isinstance(obj, SCALARS):
                equal.append(at)
            elif exchanges and type(obj) is Array and _is_exchanged(obj):
                number = numbers.setdefault(id(obj), len(numbers))
                self._arrays.append((at, number))
                if number == len(self._hints):
                    self._hints.append(obj.hint())
            elif at not in into:
                try:
                    self._references.append(weakref.ref(obj))
                    referred.append(at)
                except TypeError:
                    same.append(at)
        # With two extra indices, so that each always gives a tuple.
        self._referred = operator.itemgetter(0, 0, *referred)
        self._equal, self._same = operator.itemgetter(0, 0, *equal), operator.itemgetter(0, 0, *same)
        self._values, self._objects = self._equal(found)[2:], self._same(found)[2:]
        self._types = tuple(map(type, self._values))
        # Numbers that equal another one: 0.0 and -0.0.
        self._signed = [at for at, one in enumerate(self._values) if isinstance(one, float | complex) and not one]

    def _found_now(self, function: Any) -> tuple[list[Any], int | None]:
        """What lies now where something was found, as far as the number of parts is as it was; what has other parts."""
        found = [function]
        for at, kind, read, count in self._reads:
            obj = found[at]
            if type(obj) is not kind():
                return found, at
            parts = read(obj)
            if len(parts) != count:
                return found, at
            found += parts
        return found, None

    def arrays(self, function: Any) -> list[Array] | None:
        """If all else is as it was, the Arrays that may be exchanged as they are now, by number; else None."""
        found = self._as_before(function)
        return None if found is None else self._arrays_in(found)

    def _as_before(self, function: Any) -> list[Any] | None:
        """What lies where something was found, if all but the Arrays that may be exchanged is as it was."""
        found, other = self._found_now(function)
        if other is not None or not self._is_as_before(found) or not self.settings.are_as_before():
            return None
        return found

    def _arrays_in(self, found: list[Any]) -> list[Array] | None:
        arrays: list[Array] = []
        for at, number in self._arrays:
            array = found[at]
            if number < len(arrays):
                alike = array is arrays[number]
            else:
                alike = type(array) is Array and array.hint() is self._hints[number] and array.deal is None
                arrays.append(array)
            if not alike:
                return None
        if not all(refer() is arrays[number] for number, refer in self._fixed):
            return None
        return arrays

    def fix(self, function: Any, held: list[Array], sent: list[int]) -> bool:
        """Don't exchange Arrays that were also sent from where this does not look, and may stay there.

        Args:
            held: as `arrays` gave them.
            sent: their numbers, one for each place that they were sent from.

        Returns:
            Whether all is as it was; else another thread has changed something.
        """
        found = self._as_before(function)
        now = None if found is None else self._arrays_in(found)
        if found is None or now is None or any(map(operator.is_not, now, held)):
            return False
        owners = self._owners()
        places = {(number, _place(found[owners[at][0]], at - owners[at][1])) for at, number in self._arrays}
        seen, times = collections.Counter(number for number, _ in places), collections.Counter(sent)
        self._fixed = [(number, weakref.ref(held[number])) for number in times if times[number] > seen[number]]
        return True

    def _owners(self) -> list[tuple[int, int]]:
        """Of each that was found what it is part of, and where the parts of that begin."""
        owners = [(0, 0)]
        for at, _, _, count in self._reads:
            owners += [(at, len(owners))] * count
        return owners

    def changed_part(self, function: Any) -> str:
        """What has changed first, for messages; empty if it has no name."""
        found, changed = self._found_now(function)
        if changed is None:
            now = zip(self._equal(range(len(found)))[2:], self._values, strict=True)
            there = zip(self._referred(range(len(found)))[2:], self._references, strict=True)
            changed = next((at for at, value in now if not _alike(found[at], value)), None)
            changed = (
                next((at for at, refer in there if refer() is not found[at]), None) if changed is None else changed
            )
        owners = self._owners()
        while changed:
            owner, first = owners[changed]
            if name := _name_in(found[owner], changed - first):
                return name
            changed = owner
        return ""

    def _is_as_before(self, found: list[Any]) -> bool:
        values = self._equal(found)[2:]
        return (
            tuple(map(type, values)) == self._types
            and (values == self._values or all(map(_alike, values, self._values)))
            and all(repr(values[at]) == repr(self._values[at]) for at in self._signed)
            and all(found[at] is found[first] for at, first in self._again)
            and all(map(operator.is_, self._objects, self._same(found)[2:]))
            and all(map(operator.is_, [refer() for refer in self._references], self._referred(found)[2:]))
        )


def _name_in(owner: Any, part: int) -> str:
    """What the part of an object or a function with this number is called."""
    if isinstance(owner, types.FunctionType):
        names = list(used_by(owner))
        return f"{names[part - 3]!r}, used in {owner.__qualname__}" if 3 <= part < 3 + len(names) else ""
    cls = owner.of if isinstance(owner, Attributes) else type(owner)
    names = list(owner if isinstance(owner, Attributes) else getattr(owner, "__dict__", ()))
    is_object = not issubclass(cls, CONTAINERS) and not isinstance(owner, types.MethodType)
    return f"{names[part % len(names)]!r} of an object of {cls.__name__}" if names and is_object else ""


def _place(owner: Any, part: int) -> Any:
    """Tells apart where objects have their parts: a cell may be that of several functions, and a module has what its
    children have."""
    if isinstance(owner, torch.nn.Module):
        return torch.nn.Module
    if isinstance(owner, types.FunctionType):
        cells = dict(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=False))
        names = ["", "", "", *used_by(owner)]
        if part < len(names) and names[part] in cells:
            return id(cells[names[part]])
    return id(owner), part


def _is_its_parts(obj: Any, readers: list[tuple[Reader, int]]) -> bool:
    """Whether an object with slots can't be referred to weakly: its parts are compared, and it is not kept alive.

    One of a class derived from a built-in one, a Decimal for instance, has a value besides them.
    """
    in_slots = all("__slots__" in vars(cls) for cls in type(obj).__mro__[:-1])
    return not type(obj).__weakrefoffset__ and in_slots and bool(readers[0][0](obj))


def _is_exchanged(array: Array) -> bool:
    """Whether ranks can know its part of a value from the shape: it is no batch, and is cut evenly."""
    about = array.hint()
    return array.deal is None and about.shards is None and RAGGED not in about.shape


def _kind_of(obj: Any) -> Any:
    if isinstance(obj, types.FunctionType | types.CodeType):
        return getattr(obj, "__code__", obj)
    cls = obj if isinstance(obj, type) else type(obj)
    return cls.__module__, cls.__qualname__


def _alike(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b)


def _readers_of(obj: Any, depth: int, *, in_step: bool) -> list[tuple[Reader, int]]:
    """The ways to look at an object and inside it, each with the depth of what it finds.

    Args:
        in_step: a step captures it, which may not ask for a Loader's position, and is sent with what it reads.
    """
    if in_step and (readers := readers_in_step(obj)):
        return readers
    if in_step and type(obj).__module__.startswith(OWN) and hasattr(type(obj), "_in_steps"):
        return [(type(obj)._in_steps, depth + 1)]
    if type(obj) in _OF_TENSORS and 1 < len(obj) <= _LOOKED_AT and tensors_in(obj):
        return [(state_of_tensors, DEPTH)]
    readers = readers_of(obj, depth)
    if isinstance(obj, torch.Tensor):
        readers.append((changes_of, DEPTH))
    elif isinstance(obj, torch.nn.Module):
        readers.append((state_of, DEPTH))
        readers.append((plain_state_of(obj), depth))
    elif isinstance(obj, torch.Generator):
        readers.append((lambda generator: [generator.initial_seed()], DEPTH))
    elif isinstance(obj, np.ndarray) and not isinstance(obj, np.memmap):  # which travels as its path
        if not obj.dtype.hasobject:
            readers.append((_bytes_in, DEPTH))
        elif obj.size <= LOOKED_INTO and depth < DEPTH:
            readers.append((lambda array: array.ravel().tolist(), depth + 1))
    elif isinstance(obj, bytearray | array.array):
        readers.append((lambda buffer: _bytes_in(np.asarray(memoryview(buffer).cast("B"))), DEPTH))
    return readers


def _bytes_in(array: Any) -> list[Any]:
    return [bytes_of_array(array, ENTRIES)]
