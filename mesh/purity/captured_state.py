"""The Python objects that a function captures, and warnings of bodies that change them.

A driver's rank has copies of them: `losses.append(loss)`, `count += 1` or a draw from a captured generator would be
lost silently, and have another effect when a call runs again. (A launched rank runs the script itself, where the change
is seen.) Invariant: changes that memos usually make pass: a new key, a new member of a set, a new value for what was
None or a flag.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import inspect
import itertools
import operator
import pickle
import random
import sys
import types
import warnings
from collections import Counter, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels import torch_private
from ...kernels.errors import message
from ...kernels.torch_private import version
from ..pickling.references import DEPTH, LOOKED_INTO, OF_MODULES, SCALARS, attributes_of, bytes_of_array, used_by
from ..pickling.reloading import is_programs
from .generators import is_seeded, random_state

_LOOKED_AT = 4096  # objects at most, and values of an array
_BUILT_IN = (list, tuple, dict, set, deque)
_PLAIN = (*SCALARS, np.generic, enum.Enum)
_OF_ONE_LEVEL = (types.FunctionType, types.MethodType, functools.partial, nn.Module, torch.utils.data.Dataset)
_OF_THE_PROGRAM = (  # although their classes are not
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    types.SimpleNamespace,
    argparse.Namespace,
    UserDict,
    UserList,
)
WAY = "pass it as an argument, and return its new value"
_METRIC = (
    "make its state in the step, part = metric.clone(); part.update(out, y), and return "
    'psum(part.metric_state, "data") (docs/data.md)'
)
_OF_MODULE = (
    "return it from forward and the step; or make it a buffer, register_buffer(name, tensor), whose new values come "
    "out of the apply of functional_with_buffers(model)"
)
_FOR_RANDOM = "torch.rand and its like draw from the generator that each step seeds; or make a generator in the step"

_Change = tuple[str, str]  # what has changed, and the remedy
_Look = Callable[[], _Change | None]


class CapturedState:
    """The state of containers, numbers, objects, modules, arrays and generators that functions refer to.

    Args:
        functions: may be wrapped, bound or partial, or what they refer to; each with its name in the program.
        whole: types whose instances are not looked into.
        buffers: whether to look at modules' buffers, too.
    """

    def __init__(self, functions: Sequence[tuple[Any, str]], whole: tuple[type, ...], *, buffers: bool = True):
        self._looks: list[tuple[Any, _Look]] = []
        for obj, name in reached(functions, whole):
            looks = _looks_at(obj, name)
            if isinstance(obj, nn.Module):
                own = [_attributes_of_module(obj, name, buffers)] if is_programs(type(obj)) else []
                looks = [*_looks_at_metrics(obj, name), *own, *looks]
            self._looks += [(obj, look) for look in looks]

    def check(self, name: str, function: Any) -> None:
        """Warn, at a function's first line, if its body has changed any of it. No error: some do it on purpose."""
        change = self.first_change()
        if change is not None:
            problem = f"{name} changes what it captures: the change stays on its rank, and the caller never sees it"
            warn_at(function, problem, got=change[0], remedy=change[1])

    def first_change(self, apart: Set[int] = frozenset()) -> _Change | None:
        """What has changed, and the remedy; None if nothing has, except objects with the ids in `apart`."""
        looks = (look for obj, look in self._looks if id(obj) not in apart)
        return next((change for look in looks if (change := look()) is not None), None)


class OwnGenerators:
    """The generators of random numbers that what reads samples keeps or refers to, in objects of packages, too.

    Args:
        roots: datasets and functions, each with its name in the program.
        reads: a function of the user's that reads samples, if there is one.
    """

    def __init__(self, roots: Sequence[tuple[Any, str]], reads: Any):
        found = reached(roots, (), _inside_of_dataset)
        self._looks = [look for obj, name in found for look in _looks_at_generator(obj, name)]
        self._reads = reads

    def check(self, problem: str, remedy: str) -> None:
        """Warn, where samples are read, if numbers were drawn from one of them."""
        change = next((change for look in self._looks if (change := look()) is not None), None)
        if change is not None:
            warn_at(self._reads, problem, got=change[0], remedy=remedy)


def warn_at(function: Any, problem: str, **parts: Any) -> None:
    """Warn at a function's first line; the parts are those of `errors.message`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file, line = ("spmd", 1) if code is None else (code.co_filename, code.co_firstlineno)
    warnings.warn_explicit(message(problem, **parts), UserWarning, file, line)


def reached(
    roots: Sequence[tuple[Any, str]],
    whole: tuple[type, ...],
    inside: Callable[[Any, str], Iterator[tuple[Any, str]]] | None = None,
) -> Iterator[tuple[Any, str]]:
    """Objects and what they refer to, as far as one looks, each once and with its name in the program."""
    seen: set[int] = set()
    held: list[Any] = []  # alive, since ids are unique only among live objects
    todo: list[tuple[Any, str, int]] = [(one, name, 0) for one, name in roots]
    most = _LOOKED_AT  # entries of long containers
    while todo and len(held) < _LOOKED_AT:
        obj, name, depth = todo.pop()
        if id(obj) in seen or isinstance(obj, (*SCALARS, *whole, Tensor, types.ModuleType)):
            continue
        seen.add(id(obj))
        held.append(obj)
        yield obj, name
        limit = max(most, LOOKED_INTO)
        found = list(itertools.islice((inside or _inside)(obj, name), limit + 1)) if depth < DEPTH else []
        if len(found) <= limit:
            most -= len(found) if len(found) > LOOKED_INTO else 0
            level = depth if isinstance(obj, _OF_ONE_LEVEL) else depth + 1
            todo += [(item, its, level) for item, its in found]


def _inside_of_dataset(obj: Any, name: str) -> Iterator[tuple[Any, str]]:
    yield from _inside(obj, name)
    if not isinstance(obj, (types.FunctionType, type)):
        yield from ((value, f"{name}.{key}") for key, value in attributes_of(obj).items())
        for method in ("__getitem__", "__call__"):
            if isinstance(function := getattr(type(obj), method, None), types.FunctionType):
                yield function, name


def _inside(obj: Any, name: str) -> Iterator[tuple[Any, str]]:
    """What to look at inside an object, each with its name in the program."""
    if isinstance(obj, types.FunctionType):
        compiled = torch_private.uncompiled(obj)
        if compiled is not None:
            yield compiled, name
        elif is_programs(obj):
            yield from ((value, named) for named, value in used_by(obj).items())
            defaults = (*(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values())
            yield from ((value, f"a default argument of {obj.__qualname__}") for value in defaults)
    elif isinstance(obj, functools.partial):
        yield obj.func, name
        yield from ((value, "an argument of a partial") for value in (*obj.args, *obj.keywords.values()))
    elif isinstance(obj, types.MethodType):
        yield obj.__func__, name
        yield obj.__self__, "self"
    elif "__wrapped__" in getattr(obj, "__dict__", {}):  # one that `functools.update_wrapper` made
        yield obj.__wrapped__, name
    elif isinstance(obj, dict):
        yield from ((value, f"{name}[{key!r}]") for key, value in obj.items())
    elif isinstance(obj, _BUILT_IN):
        yield from ((value, f"{name}[{index}]") for index, value in enumerate(obj))
    elif isinstance(obj, nn.Module):
        yield from ((child, f"{name}.{key}") for key, child in obj.named_children())
        if is_programs(type(obj)):
            yield from ((value, f"{name}.{key}") for key, value in vars(obj).items() if key not in OF_MODULES)
    elif is_programs(type(obj)) or isinstance(obj, _OF_THE_PROGRAM):
        yield from ((value, f"{name}.{key}") for key, value in attributes_of(obj).items())


def _looks_at(obj: Any, name: str) -> list[_Look]:
    """Functions that tell later whether the object itself has changed."""
    if isinstance(obj, types.FunctionType):
        return [_names_of(lambda: {**used_by(obj), **vars(obj)}, "{}")] if is_programs(obj) else []
    if isinstance(obj, list | deque):
        return [_items_of(obj, name)] if len(obj) <= _LOOKED_AT else []
    if isinstance(obj, Counter):
        return [_value_of(functools.partial(dict, obj), f"a count of {name}", WAY)]
    if isinstance(obj, dict):
        return [_names_of(lambda: obj, name + "[{!r}]")] if len(obj) <= _LOOKED_AT else []
    if isinstance(obj, np.ndarray):
        if obj.dtype.hasobject:
            return []
        return [_value_of(functools.partial(bytes_of_array, obj, _LOOKED_AT), f"an element of {name}", WAY)]
    if found := _looks_at_generator(obj, name):
        return found
    if hasattr(type(obj), "__next__") and (hasattr(type(obj), "__length_hint__") or not is_programs(type(obj))):
        return [_value_of(functools.partial(_position_of, obj), f"items taken from {name}", WAY)]
    if (is_programs(type(obj)) or isinstance(obj, _OF_THE_PROGRAM)) and not isinstance(obj, nn.Module):
        return [_names_of(functools.partial(_attributes_of, obj), name + ".{}")]
    return []


def _looks_at_generator(obj: Any, name: str) -> list[_Look]:
    if isinstance(obj, torch.Generator):
        seed, before = obj.initial_seed(), bytes(obj.get_state().numpy())

        def drawn() -> bytes:
            return bytes(obj.get_state().numpy()) if obj.initial_seed() == seed else before  # seeded for each sample

        return [_value_of(drawn, f"numbers drawn from {name}", _FOR_RANDOM)]
    if isinstance(obj, np.random.Generator | np.random.RandomState):
        return [_drawn_from(obj.bit_generator if isinstance(obj, np.random.Generator) else obj, name)]
    return [_drawn_from(obj, name)] if isinstance(obj, random.Random) else []


def _position_of(iterator: Any) -> Any:
    """What is another after items were taken: how many are left or, if it can't tell, its pickle; None if neither."""
    if hasattr(type(iterator), "__length_hint__"):
        return operator.length_hint(iterator)
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")  # Python is about to drop the pickles of itertools
        return pickle.dumps(iterator)
    return None


def _drawn_from(obj: Any, name: str) -> _Look:
    """Looks at a generator of NumPy or Python; one that was seeded anew, for each sample, is right."""
    before, words = random_state(obj)

    def look() -> _Change | None:
        now, others = random_state(obj)
        return None if now == before or is_seeded(words, others) else (f"numbers drawn from {name}", _FOR_RANDOM)

    return look


def _looks_at_metrics(module: nn.Module, name: str) -> list[_Look]:
    """Of a module that is a metric of torchmetrics: how often it was updated."""
    package = sys.modules.get("torchmetrics")
    if not isinstance(module, getattr(package, "Metric", ())):
        return []
    return [_value_of(functools.partial(getattr, module, "update_count"), f"an update of {name}", _METRIC)]


def _attributes_of(obj: Any) -> dict[str, Any]:
    """An object's attributes, and its class's, which an assignment would hide."""
    found: dict[str, Any] = {}
    for cls in reversed(type(obj).__mro__):
        found.update(vars(cls))
    return {**found, **attributes_of(obj)}


def _value_of(state: Callable[[], Any], what: str, remedy: str) -> _Look:
    before = state()
    return lambda: None if state() == before else (what, remedy)


def _items_of(items: list[Any] | deque[Any], name: str) -> _Look:
    before = list(items)
    versions = _versions(enumerate(before))

    def look() -> _Change | None:
        if len(items) != len(before):
            return f"{name} with {len(before)} entries before, and {len(items)} after", WAY
        changed = [index for index, (old, new) in enumerate(zip(before, items, strict=True)) if _is_other(old, new)]
        changed = changed or [index for index, count in versions.items() if count != version(before[index])]
        return (f"another {name}[{changed[0]}]", WAY) if changed else None

    return look


def _names_of(names: Callable[[], dict[Any, Any]], shown: str) -> _Look:
    """Finds a name that had a number, a string, a member of an Enum or a tensor, and now has another or is gone."""
    before: dict[Any, Any] = {
        key: value for key, value in names().items() if isinstance(value, (*SCALARS, enum.Enum, Tensor))
    }
    versions = _versions(before.items())

    def look() -> _Change | None:
        now = names()
        for key, old in before.items():
            if key not in now or _is_other(old, now[key]) or (key in versions and version(old) != versions[key]):
                return f"another {shown.format(key)}", WAY
        return None

    return look


def _attributes_of_module(module: nn.Module, name: str, with_buffers: bool) -> _Look:
    """Finds a number, a text or a tensor of a module that has another value now, if this is no cache or activation.

    A cache is a tensor of another shape, or the first one. What `forward` leaves for its caller, such as a loss, has a
    gradient, or takes a number's place. Of whole numbers only those count that have gone up by one, as what counts
    does: others are sizes, of a cache or of what the module was given.
    """
    buffers = torch_private.buffers(module)

    def attributes() -> dict[str, Any]:
        return {**vars(module), **buffers}

    def shape(value: Any) -> Any:
        return (value.shape, value.dtype) if isinstance(value, Tensor) else None

    before = {key: value for key, value in attributes().items() if isinstance(value, (*_PLAIN, Tensor))}
    versions = _versions(before.items())
    compared = [key for key in before if with_buffers or key not in buffers]

    def look() -> _Change | None:
        now = attributes()
        for key in compared:
            old, new = before[key], now.get(key)
            if new is old and isinstance(old, Tensor):
                changed = version(old) != versions[key]
            elif isinstance(old, Tensor):
                changed = isinstance(new, Tensor) and shape(new) == shape(old) and not new.requires_grad
            else:
                is_size = isinstance(old, int) and isinstance(new, int) and new != old + 1
                changed = _is_other(old, new) and isinstance(new, _PLAIN) and not is_size
            if changed:
                return f"another {name}.{key}", _OF_MODULE
        return None

    return look


def _versions(items: Iterable[tuple[Any, Any]]) -> dict[Any, int]:
    """Torch's counts of the changes of the tensors among them."""
    return {key: version(value) for key, value in items if isinstance(value, Tensor)}


def _is_other(old: Any, new: Any) -> bool:
    """Whether a value was replaced; not if it was None or a flag, as lazy values and one-time warnings begin."""
    if old is new or old is None or isinstance(old, bool):
        return False
    return not (isinstance(old, _PLAIN) and type(old) is type(new) and (old == new or (old != old and new != new)))
