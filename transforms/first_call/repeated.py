"""A function again, with every sample several times: a mean stays what it is, a sum grows, and rows become more.

Invariant: nothing of it is seen outside. What it prints and warns of has been said before, random numbers go on as if
there had been no second time, and repeated samples get those that the samples had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import sys
import types
import warnings
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ...kernels.torch_compiled import eagerly
from ...kernels.torch_private import DispatchMode
from ...mesh import trees
from ...mesh.rank.references import content_of
from ...mesh.region import generators, restore_generators
from ...mesh.replication.net import active
from .._call import Call, Output


class Repeated:
    """What a function returns for every sample so many times.

    Args:
        call: of which function.
        args, kwargs: what it was called with.
        rows: tensors among these, or leaves to differentiate by, with a row for each sample. Others with as many have
            them, too, if they are known to be computed of the batch.
        split: the axes that the batch is cut over.
    """

    def __init__(self, call: Call, args: Any, kwargs: Any, rows: Sequence[Tensor], split: Set[str]):
        self._call, self._args, self._kwargs, self._rows, self._split = call, tuple(args), kwargs, rows, split
        self._state = generators()
        self._drawn: list[Tensor] = []

    def times(self, count: int, more: Sequence[Tensor] = ()) -> Output | None:
        """For every sample so many times, at first once; None if that can't be had.

        Args:
            more: leaves to differentiate by that have a row for each, too.
        """
        rows = {id(leaf) for leaf in (*self._rows, *more)}
        rows |= {id(argument.primal) for argument in self._call.arguments if id(argument.leaf) in rows}
        net = active()
        used: set[int] = set()

        def replace(leaf: Any) -> Any:
            if id(leaf) not in rows:
                has_rows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self._rows[0].shape[0]
                if net is None or not has_rows or not net.of(leaf).axes & self._split:
                    return leaf
            used.add(id(leaf))
            return torch.cat([leaf.detach()] * count)

        args, kwargs = trees.map(replace, (self._args, self._kwargs))
        function = holding(self._call.function, replace)
        if not used:
            return None
        ask = sys.breakpointhook
        sys.breakpointhook = lambda *_, **__: None
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with eagerly(), _Draws(self._drawn, count):
                    call = dataclasses.replace(self._call, function=function)
                    return call.evaluate(list(args), kwargs, grad=False)
        except Exception:  # it may well want so many samples and no others
            return None
        finally:
            sys.breakpointhook = ask
            restore_generators(self._state)


class _Draws(DispatchMode):
    """Gives repeated samples the random numbers that the samples have.

    Args:
        drawn: what random operations gave, in their order; filled in while every sample is there once.
        times: how often it is.
    """

    def __init__(self, drawn: list[Tensor], times: int):
        super().__init__()
        if times == 1:
            drawn.clear()
        self._drawn, self._times, self._next = drawn, times, iter(drawn)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            for one in result if isinstance(result, list | tuple) else [result]:
                if isinstance(one, Tensor) and self._times == 1:
                    self._drawn.append(one.clone())
                elif isinstance(one, Tensor):
                    before = next(self._next)
                    sizes = zip(one.shape, before.shape, strict=True)
                    one.copy_(before.repeat([now // once for now, once in sizes]))
        return result


def holding(function: Any, replace: Callable[[Any], Any], depth: int = 4) -> Any:
    """A function that holds other tensors: of functools.partial, and those that a nested function captures.

    Args:
        depth: how many functions that hold each other are gone through; two may do so in a circle.
    """

    def replaced(value: Any) -> Any:
        return holding(value, replace, depth - 1) if callable(value) else trees.map(replace, value)

    if not depth:
        return function

    if isinstance(function, functools.partial):
        function, args, kwargs = function.func, function.args, function.keywords
        return functools.partial(replaced(function), *map(replaced, args), **trees.map(replace, kwargs))
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    cells = tuple(types.CellType(replaced(content_of(cell))) for cell in function.__closure__)
    again = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    again.__kwdefaults__ = function.__kwdefaults__
    return again
