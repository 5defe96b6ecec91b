"""A gradient to be taken: which function, at which arguments, in which step; and what the function returned."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.errors import SpecError
from ..mesh.array import Array, refuse_gradients
from ..mesh.region import Region
from ._arguments import Argument
from ._mean_of import MeanOf
from ._plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What the differentiated function returned.

    Attributes:
        value: this rank's value, 0-dim; with a `count`, the total that is still to be divided.
        count: float64, 0-dim; None where the value is a mean already.
        aux: the second result; an empty tree without `has_aux`.
    """

    value: Tensor
    count: Tensor | None
    aux: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What is differentiated.

    Attributes:
        function, name: the function, and what messages call it.
        has_aux: whether it returns a pair.
        args, kwargs: its arguments, with `Argument.primal` in place of the leaves to differentiate by.
        arguments: these leaves.
        keys: where these leaves are in the arguments; ranks sum their gradients in this order.
        region: the running region; None outside of one.
        plan: the plan of the step.
        over: the axes of the mean.
        nested: whether the result is part of another gradient's graph.
    """

    function: Callable
    name: str
    has_aux: bool
    args: list[Any]
    kwargs: dict[str, Any]
    arguments: list[Argument]
    keys: str
    region: Region | None
    plan: Plan
    over: tuple[str, ...]
    nested: bool

    def evaluate(self, args: list[Any], kwargs: dict[str, Any], *, grad: bool = True) -> Output:
        """Call the function with `args` and `kwargs`, which stand for its own arguments."""
        with torch.set_grad_enabled(grad):
            return self._output(self.function(*args, **kwargs))

    def _output(self, out: Any) -> Output:
        value, aux = out, ()
        if self.has_aux:
            if not isinstance(out, tuple | list) or len(out) != 2:
                problem = f"{self.name} must return (value, aux) under has_aux=True"
                raise SpecError(problem, got=type(out).__name__, expected="a pair")
            value, aux = out
        if isinstance(value, MeanOf):
            return Output(value.total, value.count, aux)
        if isinstance(value, Array):
            refuse_gradients(f"{self.name} gave an Array")
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise SpecError(
                f"{self.name} must return a scalar to be differentiated",
                expected="a floating-point tensor with one element",
                got=got,
                remedy="reduce it with .mean(), or return mean_of(total, count); with auxiliary values use "
                "has_aux=True",
            )
        return Output(value.reshape(()), None, aux)

    def key(self, leaves: int) -> tuple[Any, ...]:
        """What checks of the first call depend on that may be another thing in a later one, with this many in aux."""
        return *code_of(self.function), self.nested, self.over, leaves, *self.plan.samples.items()

    @property
    def where(self) -> str:
        """On which rank the gradient is taken, for messages."""
        return "" if self.region is None else self.region.session.where()

    def weight(self, axes: tuple[str, ...]) -> tuple[float, bool]:
        """This rank's share in a mean over `axes`, and whether it has any samples."""
        return (1.0, True) if self.region is None else self.plan.weight(axes, self.region.session.layout.axes)

    def share(self, count: Tensor | None) -> float | Tensor:
        """The weight of this rank's value in the mean over the mesh; a count is first summed over the ranks."""
        if count is None:
            return self.weight(self.over)[0]
        if self.region is not None and self.over:
            comm = self.region.session.comm(self.over)
            count = comm.all_reduced(count) if comm.size > 1 else count
        # Reading it from a GPU would wait for all of the GPU's work.
        return inverse(count) if count.is_cpu else count.reciprocal()


def code_of(function: Any) -> tuple[Any, ...]:
    """A key of what a function computes: its code, and the strings, flags and functions that it or its object holds."""
    held: list[Any] = []
    while isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.values()]
        function = function.func
    if isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                held.append(cell.cell_contents)
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    else:
        owner = function.__self__ if isinstance(function, types.MethodType) else function
        held += [function, *getattr(owner, "__dict__", {}).values()]
    words = tuple(word for word in map(_word, held) if isinstance(word, _WORDS))
    return getattr(function, "__code__", type(function)), words


_FUNCTIONS = (types.FunctionType, types.MethodType)
_WORDS = (str, bool, types.CodeType)


def _word(held: Any) -> Any:
    """What a loss may depend on of what it holds; of a module like nn.MSELoss that is its `reduction`."""
    if "reduction" in getattr(held, "__dict__", ()) or hasattr(type(held), "reduction"):
        return getattr(held, "reduction", None)
    return getattr(held, "__code__", None) if isinstance(held, _FUNCTIONS) else held


def inverse(count: Tensor) -> float:
    """What a total is multiplied by to give a mean; infinite for a count of 0, so that the mean of nothing is NaN."""
    return 1.0 / float(count) if count else math.inf


Solution = tuple[Tensor, list[Any], Any]  # the mean value, a gradient for each argument, aux


class Strategy(Protocol):
    """How a gradient is taken; chosen once, at its beginning."""

    def primals(self, arguments: Sequence[Argument]) -> list[Tensor]:
        """What the function is given in place of the leaves that it is differentiated by."""

    def solve(self, call: Call) -> Solution: ...
