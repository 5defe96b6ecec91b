"""What shows that tensors and modules have changed since a function that refers to them was sent.

Torch counts changes of a tensor in its version, but not all: `tensor.data.mul_(0.99)` and `module.double()` are missed.
Invariant: a reader keeps nothing alive.
"""

from __future__ import annotations

import array
import ctypes
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels import torch_private
from ...kernels.flat import extent_bytes
from .references import LOOKED_INTO, OF_MODULES, SINGLE, Reader, is_looked_into

_WORD = 8  # bytes
_word_at = ctypes.c_uint64.from_address


def tensors_in(container: Any) -> list[torch.Tensor]:
    """The tensors of a container that has nothing else; none of others."""
    entries = list(container.values() if isinstance(container, dict) else container)
    return entries if all(isinstance(one, torch.Tensor) for one in entries) else []


def state_of_tensors(container: Any) -> list[Any]:
    tensors = tensors_in(container)
    keys = container if isinstance(container, dict) else ()
    return [*keys, *map(weakref.ref, tensors), _changes_of_all(tensors)] if tensors else []


def changes_of(tensor: Any) -> list[Any]:
    return [_changes_of_all([tensor])]


def _changes_of_all(tensors: Sequence[torch.Tensor]) -> bytes:
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
    return extent_bytes(tensor.shape, tensor.stride(), tensor.element_size())


def _address_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def state_of(module: Any) -> list[Any]:
    """Everything of a module and its children that is likely to change: tensors, versions, the training flags."""
    modules, seen = [module], {id(module)}
    tensors: list[Any] = []
    for one in modules:
        for child in torch_private.children(one).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
        tensors += torch_private.parameters(one).values()
        tensors += torch_private.buffers(one).values()
    there = [tensor for tensor in tensors if tensor is not None]
    which = [None if tensor is None else weakref.ref(tensor) for tensor in tensors]
    training = bytes(one.training for one in modules)
    return [*map(weakref.ref, modules), *which, training, _changes_of_all(there)]


def plain_state_of(module: torch.nn.Module) -> Reader:
    """A reader of what a module and its children have besides parameters and buffers.

    It tells whether numbers and texts in their attributes are as now, and gives what else may change: hooks, other
    attributes, and those of their classes that travel with the module, methods and all. What to read is found once:
    whether a child is another is for others to see.
    """
    modules = list(module.modules())
    classes = set(filter(is_looked_into, map(type, modules))) - {type(module)}
    held = [weakref.ref(one) for one in classes]
    hooks = [weakref.ref(table) for one in modules for table in torch_private.hooks(one)]
    plain: list[tuple[weakref.ref[torch.nn.Module], int, Callable[[dict], tuple], tuple, tuple]] = []
    parts: list[tuple[weakref.ref[torch.nn.Module], str]] = []
    for one in modules:
        attributes, refer = vars(one), weakref.ref(one)
        own = {name: value for name, value in attributes.items() if name not in OF_MODULES}
        names = [name for name, value in own.items() if _is_plain(value)]
        parts += [(refer, name) for name in own.keys() - set(names)]
        # With an extra name, so that it always gives a tuple.
        get = operator.itemgetter(names[0], *names) if names else _nothing
        before = get(attributes)
        plain.append((refer, len(attributes), get, tuple(map(type, before)), before))

    def as_before() -> bool:
        for refer, count, get, kinds, before in plain:
            one = refer()
            if one is None or len(attributes := vars(one)) != count:
                return False
            now = get(attributes)
            if tuple(map(type, now)) != kinds or now != before:  # an array, of another type, is not compared
                return False
        return True

    def read(_: Any) -> list[Any]:
        try:
            if as_before():
                hooked = [entry for refer in hooks if (table := refer()) for entry in table.items()]
                inside = (vars(refer())[name] for refer, name in parts)
                return [True, *(refer() for refer in held), *itertools.chain(*hooked), *inside]
        except (KeyError, TypeError, ValueError, RuntimeError):  # an attribute is gone, a tuple has tensors now, ...
            pass
        return []

    return read


def _nothing(attributes: dict[str, Any]) -> tuple:
    return ()


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a text, an Enum's member and the like, or a tuple of these."""
    if type(value) is tuple:
        return len(value) <= LOOKED_INTO and all(map(_is_plain, value))
    return isinstance(value, SINGLE)
