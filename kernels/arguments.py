"""Checks of what a program passes to the library: functions, numbers, what collectives take."""

from __future__ import annotations

import inspect
import numbers
import operator
import os
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import MeshError, SpecError
from .flat import repeats


def is_number(x: Any) -> bool:
    """Whether it is a real number; True and False don't count."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def is_whole(x: Any) -> bool:
    """Whether it is an integer; True and False don't count."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def whole(x: Any) -> int | None:
    """The integer that a number or a tensor is, as Python's; None if it is none. True and False don't count."""
    if isinstance(x, bool) or getattr(x, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(x)
    except (TypeError, RuntimeError):  # a tensor without values raises the second
        return None


def plain_text(text: str) -> str:
    """A string of Python's own class, of one of another: that of a program's enum can't be read where ranks begin."""
    return text if type(text) is str else str.__str__(text)


def integer(caller: str, name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """`value` as a Python integer, checked; `low` and `high` are the first and last allowed."""
    number = whole(value)
    if number is not None and (low is None or low <= number) and (high is None or number <= high):
        return number
    span = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
    raise SpecError(
        f'{caller} got an unexpected value for argument "{name}"',
        expected=f"an integer{span}",
        got=repr(value),
        remedy=f"pass {name} as a whole number in that range",
    )


def checked_flag(what: str, name: str, value: Any, remedy: str = "") -> bool:
    """True or False, also where they are written as 1, 0 or None; refuses others, such as "no", which would be true."""
    if type(value) is bool:
        return value
    is_one = isinstance(value, int | np.bool_ | np.integer) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    if value is None or (is_one and value in (False, True)):
        return bool(value)
    raise SpecError(f"{what} got a bad {name}", got=repr(value), expected="True or False", remedy=remedy)


_UNFINISHED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


def check_function(what: str, f: Any, remedy: str) -> None:
    """Refuse what isn't a function, such as the result of one, and async functions and generators."""
    if type(f) is types.FunctionType and not f.__code__.co_flags & _UNFINISHED:  # the common case, at every step
        return
    if not callable(f):
        got = f"a tensor of shape {tuple(f.shape)}" if isinstance(f, torch.Tensor) else type(f).__name__
        raise SpecError(f"{what} takes a function", got=got, expected="a callable", remedy=f"write {remedy}")
    called = (f, type(f).__call__)  # a function (maybe in a partial), or an object that can be called
    generates = any(map(inspect.isgeneratorfunction, called))
    if generates or any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in called):
        problem = f"{what} takes a function that has run when it returns"
        name = getattr(f, "__qualname__", type(f).__qualname__)
        got = f"{name}, which is {'a generator' if generates else 'async'}"
        raise SpecError(problem, got=got, remedy="write def, without async or yield, and return the results")


def checked_path(what: str, path: Any, remedy: str) -> Path:
    """A directory's path, whole, with the user's own for `~`; refuses what is none."""
    if not isinstance(path, str | os.PathLike):
        raise SpecError(f"{what} got a bad path", got=f"a {type(path).__name__}", remedy=remedy)
    if not os.fspath(path):  # of which `Path` makes the current directory
        raise SpecError(f"{what} got an empty path", remedy='name a directory; the current one is "."')
    return Path(path).expanduser().absolute()


def checked_rank(what: str, rank: Any, size: int) -> int:
    """A rank of a mesh of `size` ranks as a Python integer; refuses anything else."""
    number = whole(rank)
    if number is None or not 0 <= number < size:
        remedy = "ranks count from 0; mesh.size is how many there are"
        raise MeshError("there is no such rank", got=repr(rank), expected=f"0 to {size - 1}", where=what, remedy=remedy)
    return number


def checked_ranks(what: str, ranks: Any, size: int) -> list[int]:
    """A list of ranks, each as by `checked_rank`; refuses what isn't a list, and ranks that are named twice."""
    if not isinstance(ranks, Iterable) or isinstance(ranks, str) or getattr(ranks, "ndim", 1) == 0:
        remedy = f"write ranks=[{ranks!r}]"
        raise MeshError("this is no list of ranks", got=f"ranks={ranks!r}", where=what, remedy=remedy)
    ranks = list(ranks)
    found = [checked_rank(what, rank, size) for rank in ranks]
    if len(set(found)) < len(found):
        raise MeshError("a rank is named twice", got=ranks, where=what, remedy="name each rank once")
    return found


def check_rank(name: str, argument: str, rank: int, size: int) -> None:
    """Refuse a rank that is not in the group."""
    if (type(rank) is not int and not is_whole(rank)) or not 0 <= rank < size:
        raise SpecError(
            f'{name} got a bad "{argument}"', got=repr(rank), expected=f"a rank of the group, 0 to {size - 1}"
        )


_TAGS = 1 << 62  # a transport has 64 bits for a tag, and NCCL's uses one of them


def check_message(
    name: str, argument: str, rank: int, size: int, tensor: Any, tag: int = 0, *, written: bool = False
) -> None:
    """Refuse a bad tensor or tag of a message, and a peer that is not in the group."""
    check_tensor(name, "tensor", tensor, written=written)
    if (type(tag) is not int and not is_whole(tag)) or not -_TAGS <= tag < _TAGS:
        raise SpecError(f'{name} got a bad "tag"', got=repr(tag), expected="a whole number of up to 62 bits")
    check_rank(name, argument, rank, size)


def arrived(x: torch.Tensor) -> torch.Tensor:
    """A tensor itself; of what torch's functional collectives return, which may be under way, the result."""
    return x if type(x) is torch.Tensor or not hasattr(x, "trigger_wait") else x.trigger_wait()


def _wraps_others(x: torch.Tensor) -> bool:
    """Whether the values are those of tensors that it is made of, such as a `DTensor`."""
    return type(x) is not torch.Tensor and hasattr(x, "__tensor_flatten__") and x.layout is torch.strided


_INNER = "pass what is in it: from_dtensor(x) or x.to_local() of a DTensor, x.wait() of an AsyncCollectiveTensor"


def check_tensor(name: str, argument: str, x: Any, *, written: bool = False) -> None:
    """Refuse what has no dense bytes to communicate; to be `written`, a tensor needs memory for each element."""
    expected = "a dense tensor"
    if not isinstance(x, torch.Tensor):
        got, remedy = type(x).__name__, "make a tensor of it"
    elif x.is_meta:
        got, remedy = "a tensor on torch's meta device", "give it values"
    elif x.layout is not torch.strided:
        got, remedy = f"a tensor of layout {x.layout}", "move its indices and values by themselves"
    elif _wraps_others(x):
        got, remedy = type(x).__name__, _INNER
    elif written and repeats(x):
        got, expected = f"an expanded one, with strides {x.stride()}", "a tensor with memory for each element"
        remedy = "clone() it"
    else:
        return
    raise SpecError(f'{name} got a bad "{argument}"', got=got, expected=expected, remedy=remedy)


def check_value(x: torch.Tensor, called: Callable[[], str], *, cut: bool) -> None:
    """Refuse a tensor that can't travel to or from ranks: without values, or (`cut`) without rows that can be cut.

    Args:
        called: gives the tensor's name, for the message.
    """
    if x.is_meta:
        problem, got = "has no values", "a tensor on torch's meta device"
        remedy = "give it values, or pass its shape and dtype"
    elif x.is_nested and x.layout is torch.strided:
        problem, got = "can't be sent", "a nested tensor of torch's older kind"
        remedy = "make it with layout=torch.jagged, or pad it"
    elif _wraps_others(x):
        problem, got, remedy = "is no plain tensor", type(x).__name__, _INNER
    elif cut and x.layout is not torch.strided:
        problem, got = "can't be cut", f"a tensor of layout {x.layout}"
        remedy = (
            "leave it whole, P(), or pass what to_dense() gives, or torch.nested.to_padded_tensor() and the lengths"
        )
    else:
        return
    raise SpecError(f"{called()} {problem}", got=got, remedy=remedy)


def checked_kind(name: str, shape: Any, dtype: Any) -> tuple[torch.Size, torch.dtype]:
    """A tensor's shape, also given as one number, and its dtype (None: the default one)."""
    try:
        sizes = torch.Size((shape,) if isinstance(shape, int) else shape)
    except TypeError:
        sizes = torch.Size((-1,))
    if min(sizes, default=0) < 0:
        raise SpecError(f"{name} got a bad shape", got=repr(shape), expected="whole numbers of at least 0")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise SpecError(f"{name} got a bad dtype", got=repr(dtype), expected="a torch.dtype, as torch.float32")
    return sizes, dtype or torch.get_default_dtype()


def check_list(
    name: str,
    argument: str,
    tensors: list[torch.Tensor] | None,
    size: int,
    *,
    dtype: torch.dtype | None = None,
    wanted: bool = True,
    written: bool = False,
) -> list[torch.Tensor]:
    """A checked list with one tensor per rank, all of one dtype (None: that of the first); empty if not `wanted`."""
    if not wanted:
        return []
    if tensors is None or len(tensors) != size:
        got = "None" if tensors is None else f"{len(tensors)} tensors"
        raise SpecError(f'{name} got a bad "{argument}"', got=got, expected=f"{size} tensors, one per rank")
    for index, tensor in enumerate(tensors):
        check_tensor(name, f"{argument}[{index}]", tensor, written=written)
        dtype = tensor.dtype if dtype is None else dtype
        if tensor.dtype != dtype:
            raise SpecError(f'{name} got a bad "{argument}"', got=f"{tensor.dtype} at {index}", expected=f"{dtype}")
    if written:
        _check_apart(name, argument, [tensor.data_ptr() for tensor in tensors if tensor.numel()])
    return list(tensors)


def _check_apart(name: str, argument: str, addresses: list[int]) -> None:
    """Refuse outputs of which one would overwrite another."""
    if len(set(addresses)) < len(addresses):
        raise SpecError(
            f'{name} got a bad "{argument}"',
            got="the same memory several times",
            expected="memory for each rank's tensor",
            remedy="write [torch.empty_like(x) for _ in range(size)] for [torch.empty_like(x)] * size",
        )
