"""A gradient to be taken: which function, at which arguments, in which step; and what the function returned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.errors import SpecError
from ..kernels.torch_private import in_forward_mode
from ..mesh import trees
from ..mesh.ambient import has_tangent
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

    @property
    def in_shards(self) -> bool:
        """Whether the function runs once for each virtual shard, and not once on each rank."""
        return self.plan.virtual is not None and self.plan.virtual.axis in self.over

    @property
    def runs_on(self) -> str:
        """What has a part of the samples, as messages call it."""
        return "virtual shard" if self.in_shards else "rank"

    def evaluate(self, args: list[Any], kwargs: dict[str, Any], *, grad: bool = True) -> Output:
        """Call the function with `args` and `kwargs`, which stand for its own arguments."""
        with torch.set_grad_enabled(grad):
            out = self.function(*args, **kwargs)
            refuse_tangents(self.name, out)
            return self._output(out)

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


def inverse(count: Tensor) -> float:
    """What a total is multiplied by to give a mean; infinite for a count of 0, so that the mean of nothing is NaN."""
    return 1.0 / float(count) if count else math.inf


def refuse_tangents(name: str, tree: Any) -> None:
    """Refuse arguments and results with tangents. To be in forward mode is no mistake: it is one for all threads."""
    if in_forward_mode() and any(map(has_tangent, trees.leaves(tree))):
        raise SpecError(
            f"spmd's grad of {name}, inside torch.autograd.forward_ad.dual_level, met a tensor with a tangent, which "
            "it would drop",
            remedy="use torch.func.grad there, and psum or pmean what comes out",
        )


Solution = tuple[Tensor, list[Any], Any]  # the mean value, a gradient for each argument, aux


class Strategy(Protocol):
    """How a gradient is taken; chosen once, at its beginning."""

    def primals(self, arguments: Sequence[Argument]) -> list[Tensor]:
        """What the function is given in place of the leaves that it is differentiated by."""

    def solve(self, call: Call) -> Solution: ...
