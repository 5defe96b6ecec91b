"""Which part of a value can't be pickled, for messages: pickle itself names only the innermost object's type."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...kernels.errors import MeshError, SpmdError
from .. import wire
from .attributes import attributes_read
from .references import functions_of, used_by

_DEEPEST = 16  # levels are searched for the cause
_ErrorOf = Callable[[Any], Exception | None]  # pickles a value


def unpicklable_part(function: Any, whole: tuple[type, ...] = (), *, in_step: bool = False) -> str:
    """Which of the objects that a function refers to can't be pickled, for the message; empty if none is found.

    Args:
        whole: types that travel as names.
        in_step: see `wire.dumps`.
    """
    parts: list[tuple[str, Any, str]] = []
    target = function
    while isinstance(target, functools.partial | types.MethodType):
        if isinstance(target, types.MethodType):
            what = f"the object of the method {target.__func__.__qualname__}"
            read = attributes_read(target) if in_step else None
            if read is None:
                parts.append((what, target.__self__, "self"))
            else:
                parts.extend((f"{name!r} of {what}", value, f"self.{name}") for name, value in read.items())
            target = target.__func__
        else:
            parts.extend((f"argument {index} of the partial", arg, "its ") for index, arg in enumerate(target.args))
            parts.extend((f"argument {name!r} of the partial", arg, "its ") for name, arg in target.keywords.items())
            target = target.func
    if not hasattr(target, "__code__"):
        parts.extend((f"its {name}", value, f"its {name}") for name, value in getattr(target, "__dict__", {}).items())
    for one in functions_of(target):
        used = [(f"{name!r}, used in {one.__qualname__}", value, name) for name, value in used_by(one).items()]
        used += [(f"a default argument of {one.__qualname__}", value, "its ") for value in one.__defaults__ or ()]
        parts += [part for part in used if not isinstance(part[1], types.FunctionType)]
    return _unpicklable(parts, functools.partial(_error_of, whole=whole, in_step=in_step))


def unpicklable_among(parts: Iterable[tuple[str, Any]], whole: tuple[type, ...] = ()) -> str:
    """The first of some named values that can't be pickled, and why; empty if all can."""
    error_of = functools.partial(_error_of, whole=whole, in_step=False)
    return _unpicklable(((what, value, "its ") for what, value in parts), error_of)


@contextlib.contextmanager
def sending_result(
    parts: Callable[[], Iterable[tuple[str, Any]]], where: Callable[[], str], whole: tuple[type, ...] = ()
) -> Iterator[None]:
    """If the block, which pickles what a function returned, fails, say which part can't be sent from its rank.

    Args:
        parts: gives the result, piece by piece, with what to call each.
        where: gives the rank, for the message.
        whole: types that travel as names.
    """
    try:
        yield
    except SpmdError:
        raise
    except Exception as error:
        problem = f"a result cannot be sent from its rank, because of {unpicklable_among(parts(), whole) or error}"
        remedy = "return what it is made of, as tensors, numbers and strings"
        raise MeshError(problem, where=where(), remedy=remedy) from None


def _unpicklable(parts: Iterable[tuple[str, Any, str]], error_of: _ErrorOf) -> str:
    for what, value, name in parts:
        error = error_of(value)
        if error is not None:
            path, error = _path_within(value, error_of, error)
            return f"{what} ({type(value).__name__}): {error}{f', which is {name}{path}' if path else ''}"
    return ""


def _error_of(value: Any, whole: tuple[type, ...], in_step: bool) -> Exception | None:
    try:
        wire.dumps(value, lambda obj: "a name" if isinstance(obj, whole) else None, in_step=in_step).close()
    except Exception as error:
        return error
    return None


def _path_within(value: Any, error_of: _ErrorOf, error: Exception) -> tuple[str, Exception]:
    """The path to the part for which a value can't be pickled, such as `.writer.lock`, and that part's error."""
    path, held = "", [value]
    while len(held) < _DEEPEST:
        for step, inside in _named_parts(value):
            found = None if any(inside is one for one in held) else error_of(inside)
            if found is not None:
                path, value, error = path + step, inside, found
                held.append(value)
                break
        else:
            break
    return path, error


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    """The parts of an object, each with how a program would access it."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, types.MethodType):
        read: dict[str, Any] = attributes_read(value) or {}
        return [*((f".__self__.{name}", item) for name, item in read.items()), (".__self__", value.__self__)]
    if isinstance(value, functools.partial):
        return [(f".{name}", getattr(value, name)) for name in ("func", "args", "keywords")]
    if isinstance(value, type):
        return []
    children = list(value.named_children()) if isinstance(value, torch.nn.Module) else []
    return [(f".{name}", item) for name, item in [*children, *getattr(value, "__dict__", {}).items()]]
