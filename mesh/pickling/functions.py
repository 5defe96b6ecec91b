"""How functions and modules travel to another process, where cloudpickle alone would lose something.

Invariant: what the receiver can import travels by name, all else by value.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import functools
import importlib
import inspect
import operator
import sys
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils import parametrize

from ...kernels import torch_private
from ...kernels.errors import MeshError
from ...kernels.torch_private import is_exported

_Cached = type(functools.lru_cache(lambda: None))
_OF_WEAK_REFERENCES = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_ENTERED_BY: Any = type(contextlib.contextmanager(lambda: iter(()))())
_DISPATCHER: Any = functools.singledispatch(lambda obj: None)
_KINDS = (
    ctypes.Array,
    ctypes.Structure,
    ctypes.Union,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int),
    ctypes.CFUNCTYPE(None),
)
_OF_CTYPES = frozenset(map(type, _KINDS))
# Where transformers keeps, by str(class), which modules' outputs a model records, and the model's attribute for it.
_RECORDING, _RECORDED, _RECORDS = "transformers.utils.output_capturing", "_CAN_RECORD_REGISTRY", "_can_record_outputs"


def travels_by_name(obj: Any) -> bool:
    """Whether cloudpickle sends a function or a class as a name, which the receiver imports."""
    module = sys.modules.get(obj.__module__ or "")
    if module is None or obj.__module__ in ("__main__", "__mp_main__"):
        return False
    return named_in(module, obj.__qualname__) is obj


def named_in(module: types.ModuleType, name: str) -> Any:
    """What a module has under a qualified name; None if there is nothing."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def with_globals_of_classes(function: types.FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """What cloudpickle's `__reduce__` returns for a function, with the globals that bodies of classes in it name."""
    names, around = _named_in_classes(function.__code__), function.__globals__
    if not names or not isinstance(reduced[2], tuple):
        return reduced
    make, arguments, (attributes, state), *others = reduced
    more = {name: around[name] for name in names if name in around}
    return make, arguments, (attributes, {**state, "__globals__": {**more, **state["__globals__"]}}), *others


@functools.lru_cache(maxsize=4096)
def _named_in_classes(code: types.CodeType) -> tuple[str, ...]:
    found = dict[str, None]()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            own = {"__name__"}
            for step in dis.get_instructions(inner):
                if step.opname == "STORE_NAME":
                    own.add(step.argval)
                elif step.opname == "LOAD_NAME" and step.argval not in own:
                    found[step.argval] = None
            found |= dict.fromkeys(_named_in_classes(inner))
    return tuple(found)


def reduced(obj: Any) -> tuple[Any, ...] | None:
    """How to pickle an object; None for most, which cloudpickle pickles well. The exceptions:

    - A `functools.cache` or `lru_cache` of a function that travels by value: it arrives with an empty cache. Python
      pickles it by name, which the receiver's `__main__` does not have.
    - A `functools.cached_property`, which has a lock (before Python 3.12), and a `singledispatch` function, which has
      weak references: without these.
    - A dictionary of weak references: with the objects.
    - What a `contextlib.contextmanager` function has returned, a decorator for instance, if not entered: made again.
    - Code: with the name of its file, for errors and tracebacks of ranks; cloudpickle leaves it out since 3.1.3.
    - A `typing.NewType`: by its name and its supertype. Python pickles it by name, as the cached function.
    - A module object of a class of its own, such as `torch.backends.cudnn`: by name.
    - An array type of ctypes: by its element type and length. Other ctypes classes are refused, since what cloudpickle
      makes of them can't be read.
    - A parametrized module, which torch refuses to pickle: as one of its original class, parametrized again on arrival.
    - What `torch.export` made: refused, as torch can only write the program, to a file.
    - A model of transformers: with what its class registers when one is made, without which it gives no hidden states.
    """
    if isinstance(obj, nn.Module) and not vars(type(obj)).keys().isdisjoint(_parametrizations(obj)):
        cls = parametrize.type_before_parametrizations(obj)
        return cls.__new__, (cls,), vars(obj).copy(), None, None, _parametrized
    if is_exported(obj):
        what = "module" if isinstance(obj, nn.Module) else "program"
        raise MeshError(
            f"a {what} that torch.export made cannot be sent to another process",
            remedy="export the model after it was trained; or call torch.export.load in a module that the step imports",
        )
    if isinstance(obj, nn.Module) and str(type(obj)) in getattr(sys.modules.get(_RECORDING), _RECORDED, ()):
        return (*obj.__reduce_ex__(4)[:3], None, None, _registered)
    if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
        return _imported(obj)
    if type(obj) is _Cached and not travels_by_name(obj):
        return _cached, (obj.__wrapped__, dict(obj.cache_parameters()))
    if type(obj) is functools.cached_property:
        return functools.cached_property, (obj.func,), {key: one for key, one in vars(obj).items() if key != "lock"}
    if type(obj) is types.FunctionType and obj.__code__ is _DISPATCHER.__code__ and not travels_by_name(obj):
        return _dispatcher, (), dict(vars(obj)["registry"]), None, None, _registering
    if type(obj) in _OF_WEAK_REFERENCES:
        return type(obj), (dict(obj),)
    if type(obj) is typing.NewType and not travels_by_name(obj):
        return typing.NewType, (obj.__name__, obj.__supertype__), {"__module__": obj.__module__}
    if type(obj) is _ENTERED_BY and inspect.getgeneratorstate(obj.gen) == inspect.GEN_CREATED:
        return type(obj), (obj.func, obj.args, obj.kwds)
    if type(obj) is types.CodeType:
        made, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](obj)
        return made, tuple(obj.co_filename if one == "<dynamic-code>" else one for one in arguments)
    return _of_ctypes(obj) if type(obj) in _OF_CTYPES and not travels_by_name(obj) else None


def _of_ctypes(cls: Any) -> tuple[Any, ...]:
    if issubclass(cls, ctypes.Array):
        return operator.mul, (cls._type_, cls._length_)
    raise TypeError(f"cannot pickle {cls.__name__!r}, a class of ctypes that can't be imported")


def _imported(module: types.ModuleType) -> tuple[Any, ...] | None:
    name = module.__name__
    if sys.modules.get(name) is module:
        return importlib.import_module, (name,)
    parent, _, last = name.rpartition(".")  # it may be an attribute that is made on demand
    found = getattr(sys.modules.get(parent), last, None) if last else None
    return (getattr, (sys.modules[parent], last)) if found is module else None


def _parametrizations(module: nn.Module) -> set[str]:
    """Names of a module's parametrized tensors; torch has made a class for it that has a property for each."""
    found = dict(module.named_children()).get("parametrizations")
    return set(found) if isinstance(found, nn.ModuleDict) else set()


def _parametrized(module: nn.Module, state: dict[str, Any]) -> None:
    module.__setstate__(state)
    torch_private.inject_parametrizations(module, _parametrizations(module))


def _registered(module: nn.Module, state: dict[str, Any]) -> None:
    module.__setstate__(state)
    registry = getattr(importlib.import_module(_RECORDING), _RECORDED)
    dict.__setitem__(registry, str(type(module)), getattr(module, _RECORDS))


def _cached(function: Callable, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _dispatcher() -> Any:
    return functools.singledispatch(lambda *arguments: None)


def _registering(dispatcher: Any, functions: dict[type, Callable]) -> None:
    """Afterwards, since the functions may refer to their dispatcher."""
    functools.update_wrapper(dispatcher, functions[object])
    for cls, function in functions.items():
        dispatcher.register(cls, function)
