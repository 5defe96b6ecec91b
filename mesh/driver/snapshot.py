"""When a function must be sent to the ranks again: a cheap check of what it refers to.

Pickling a function at every call would cost more than a small step. So a function is pickled once, and again only
when something it refers to was rebound or changed: its code, defaults, closure cells, the globals it names, and six
levels into what those hold (a dict's entries, an object's attributes), tensors with their versions, modules with
their parameters and hooks, and deeper or larger containers of data alone: numbers, texts, members of an Enum,
dataclasses, tensors, arrays. A change of anything else deeper than that, or in a large container, is not noticed, and
of a large NumPy array some values are compared.
The snapshot records where it read something, so that later checks read the same places again.
Invariant: a snapshot keeps nothing alive except small built-in values and containers too deep to look into.
"""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import linecache
import marshal
import operator
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import torch_private
from ..pickling.references import (
    CONTAINERS,
    DEPTH,
    LOOKED_INTO,
    SCALARS,
    Reader,
    bytes_of_array,
    functions_of,
    parts_of_data,
    plain_state_of,
    readers_of,
    used_by,
)

_LOOKED_AT = 4096  # values at most
_MARSHALLED = (dict, list, tuple, set, *SCALARS)
_OF_TENSORS = (dict, collections.OrderedDict, list, tuple)
_TEXT = 16  # characters of a text that count as a value
_BUFFER_BYTES = 1 << 16  # bytearrays and arrays of Python up to this size are compared
_COMPARED = 64  # values of a large array of NumPy
_WORD = 8  # bytes
_word_at = ctypes.c_uint64.from_address


class Snapshot:
    """The state of what a function refers to.

    Args:
        whole: types whose instances are not looked into.

    Attributes:
        size: how many values it has looked at.
    """

    def __init__(self, function: Any, whole: tuple[type, ...] = ()):
        # Where to read: the index of an object found so far, its type, how to read it, and how many parts that gives.
        self._reads: list[tuple[int, weakref.ref[type], Reader, int]] = []
        # Containers that were found again: their index, and the index where they were read.
        self._again: list[tuple[int, int]] = []
        found, depths = [function], [0]
        seen: dict[int, tuple[int, int]] = {}  # id -> the least depth at which it was found, and its index there
        into: set[int] = set()  # containers whose entries are compared, so that their identity does not matter
        at, plain = 0, _LOOKED_AT  # numbers and texts that may still be looked through, where nothing else is
        while at < len(found):
            obj, depth = found[at], depths[at]
            at += 1
            if isinstance(obj, (*SCALARS, *whole)) or len(found) > _LOOKED_AT:
                continue
            readers = _readers_of(obj, depth)
            if not readers and (isinstance(obj, CONTAINERS) or dataclasses.is_dataclass(type(obj))):
                reader, count = _look_through(obj, plain)
                plain -= count
                readers = [(reader, DEPTH)] if reader else []
            is_read = bool(readers) and isinstance(obj, CONTAINERS)
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
        self._compared(found, into)

    def _compared(self, found: list[Any], into: set[int]) -> None:
        """Keep what is needed to compare what was found: references, values or identities."""
        referred: list[int] = []
        equal: list[int] = []
        same: list[int] = []
        self._references: list[weakref.ref[Any]] = []
        for at, obj in enumerate(found):
            if isinstance(obj, SCALARS):
                equal.append(at)
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

    def unchanged(self, function: Any) -> bool:
        """Whether everything is as it was."""
        found = [function]
        for at, kind, read, count in self._reads:
            obj = found[at]
            if type(obj) is not kind():
                return False
            parts = read(obj)
            if len(parts) != count:
                return False
            found += parts
        values = self._equal(found)[2:]
        return (
            tuple(map(type, values)) == self._types
            and (values == self._values or all(map(_alike, values, self._values)))
            and all(repr(values[at]) == repr(self._values[at]) for at in self._signed)
            and all(found[at] is found[first] for at, first in self._again)
            and all(map(operator.is_, self._objects, self._same(found)[2:]))
            and all(map(operator.is_, [refer() for refer in self._references], self._referred(found)[2:]))
        )


def _alike(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b)


def _readers_of(obj: Any, depth: int) -> list[tuple[Reader, int]]:
    """The ways to look at an object and inside it, each with the depth of what it finds."""
    if type(obj) in _OF_TENSORS and 1 < len(obj) <= _LOOKED_AT and _tensors_in(obj):
        return [(_state_of_tensors, DEPTH)]
    readers = readers_of(obj, depth)
    if isinstance(obj, torch.Tensor):
        readers.append((_changes_of_one, DEPTH))
    elif isinstance(obj, torch.nn.Module):
        readers.append((_state_of, DEPTH))
        readers.append((plain_state_of(obj), depth))
    elif isinstance(obj, np.ndarray):
        if isinstance(obj, np.memmap):
            pass  # it travels as its path
        elif not obj.dtype.hasobject:
            readers.append((_bytes_in, DEPTH))
        elif obj.size <= LOOKED_INTO and depth < DEPTH:
            readers.append((_objects_in, depth + 1))
    elif isinstance(obj, bytearray | array.array) and memoryview(obj).nbytes <= _BUFFER_BYTES:
        readers.append((_bytes_of_buffer, DEPTH))
    return readers


def _tensors_in(container: Any) -> list[torch.Tensor]:
    """The tensors of a container that has nothing else; none of others."""
    entries = list(container.values() if isinstance(container, dict) else container)
    return entries if all(isinstance(one, torch.Tensor) for one in entries) else []


def _state_of_tensors(container: Any) -> list[Any]:
    tensors = _tensors_in(container)
    keys = container if isinstance(container, dict) else ()
    return [*keys, *map(weakref.ref, tensors), _changes_of(tensors)] if tensors else []


def _changes_of_one(tensor: Any) -> list[Any]:
    return [_changes_of([tensor])]


def _look_through(container: Any, most: int) -> tuple[Reader | None, int]:
    """How to read a container of data, tensors and arrays alone, at any depth, and how many values tell that it is;
    `most` at most."""
    left, count, read = [container], 0, _content_of
    while left and count + len(left) <= most:
        one = left.pop()
        count += 1 + (len(one) // _TEXT if isinstance(one, str | bytes) else 0)
        parts = parts_of_data(one)
        if parts is None:
            return None, count
        left += parts
        if type(one) not in _MARSHALLED and not isinstance(one, np.number):  # of which marshal takes the bytes
            read = _parts_of
    return None if left else read, count


def _parts_of(container: Any) -> list[Any]:
    return parts_of_data(container) or []


def _content_of(container: Any) -> list[Any]:
    """The bytes of such a container; none if it has something else by now."""
    try:
        return [marshal.dumps(container, 2)]  # the last version that does not depend on who else refers to an entry
    except ValueError:
        return []


def _bytes_in(array: Any) -> list[Any]:
    return [bytes_of_array(array, _COMPARED)]


def _objects_in(array: Any) -> list[Any]:
    return array.ravel().tolist()


def _bytes_of_buffer(buffer: Any) -> list[Any]:
    return [bytes(buffer)]


def _changes_of(tensors: Sequence[torch.Tensor]) -> bytes:
    """Numbers that differ after a change: versions, addresses, dtypes, whether gradients are wanted, and the first and
    last word of each tensor.

    Torch's version misses `tensor.data = other` and `module.double()`. It also misses `tensor.data.mul_(0.99)`, as in
    an average of weights, which the words show.
    """
    numbers = torch_private.versions(tensors)
    try:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # one has no memory of its own
        addresses = list(map(_address_of, tensors))
    numbers += addresses
    numbers += [id(tensor.dtype) for tensor in tensors]
    numbers += [tensor.requires_grad for tensor in tensors]
    for tensor, address in zip(tensors, addresses, strict=True):
        if address and tensor.is_cpu:
            nbytes = tensor.nbytes if tensor.is_contiguous() else _extent_of(tensor)
            if nbytes >= _WORD:
                numbers += (_word_at(address).value, _word_at(address + nbytes - _WORD).value)
            else:
                numbers.append(int.from_bytes(ctypes.string_at(address, nbytes), sys.byteorder))
    return array.array("Q", numbers).tobytes()


def _extent_of(tensor: torch.Tensor) -> int:
    """The bytes from the first to the last element in memory, of a tensor with gaps or another order of dimensions."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _address_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _state_of(module: Any) -> list[Any]:
    """Everything of a module and its children that is likely to change: tensors, versions, the training flags."""
    modules, seen = [module], {id(module)}
    tensors: list[Any] = []
    for one in modules:
        for child in torch_private.children(one):
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
        tensors += torch_private.parameters(one).values()
        tensors += torch_private.buffers(one).values()
    there = [tensor for tensor in tensors if tensor is not None]
    which = [None if tensor is None else weakref.ref(tensor) for tensor in tensors]
    training = bytes(one.training for one in modules)
    return [*map(weakref.ref, modules), *which, training, _changes_of(there)]


# -- what goes with a function -----------------------------------------------------------------------------------------


def typed_sources(function: Any) -> dict[str, list[str]]:
    """Source lines of functions that come from no file (a REPL, a notebook), for tracebacks on the ranks."""
    sources: dict[str, list[str]] = {}
    for one in functions_of(function):
        entry = linecache.cache.get(one.__code__.co_filename)
        if entry is not None and len(entry) == 4 and entry[1] is None:
            sources[one.__code__.co_filename] = list(entry[2])
    return sources


def remember_sources(sources: dict[str, list[str]]) -> None:
    """Keep such source lines on a rank, for tracebacks."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def largest_part(function: Any) -> str:
    """The largest object that travels with a function, by name and size; empty if no tensor or array does."""
    sizes = [
        (_bytes_of(value), f"{name!r}, used in {one.__qualname__}")
        for one in functions_of(function)
        for name, value in used_by(one).items()
    ]
    nbytes, what = max(sizes, default=(0, ""))
    return f"{what} ({nbytes / 1e6:.0f} MB)," if nbytes else ""


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.nn.Module):
        value = [*value.parameters(), *value.buffers()]
    if isinstance(value, dict | list | tuple):
        return sum(map(_bytes_of, value.values() if isinstance(value, dict) else value))
    return value.nbytes if isinstance(value, torch.Tensor | np.ndarray) and not isinstance(value, np.memmap) else 0
