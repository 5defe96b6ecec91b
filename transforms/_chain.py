"""How a collective takes part in torch's autograd: gradients by its transpose, tangents by itself, batches as one
more dimension.

Autograd runs the transpose of a collective on those ranks only whose value depends on its result; on the others it
would be missing, and their peers would wait for it (think of the first stage of a pipeline, whose loss is a constant).
So inside a function that is being differentiated every collective also takes and gives a *link*, a tensor without a
value. The links make a chain in the order of the program, and the gradient is taken along the chain too.
A backward pass may run in another thread; what it does there is part of the function's region and chain.
Invariant: every rank runs the transposes of all its collectives, in reverse order, whatever its value depends on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..mesh.region import Region, current, inside


class _State:
    """The newest link of a thread's chain (None outside of one), and how many collectives it has started."""

    __slots__ = ("count", "link")

    def __init__(self) -> None:
        self.link: Tensor | None = None
        self.count = 0


_threads = threading.local()


def _here() -> _State:
    """This thread's state, or the one that it works for."""
    state = getattr(_threads, "state", None)
    if state is None:
        state = _threads.state = _State()
    return state


@contextlib.contextmanager
def _working_for(region: Region | None, state: _State) -> Iterator[None]:
    """Be where a forward pass was: in a thread of torch's own, or another one that is in no region."""
    if region is None or current() is not None:
        yield
        return
    own, _threads.state = _here(), state
    try:
        with inside(region):
            yield
    finally:
        _threads.state = own


class Operation(Protocol):
    """What the ranks of a group do with one tensor.

    Attributes:
        saves: whether `pull` and `push` need the input and the output; those of a linear operation do not.
    """

    saves: ClassVar[bool]

    def forward(self, x: Tensor) -> Tensor: ...
    def pull(self, gradient: Tensor, *saved: Tensor) -> Tensor: ...  # the transpose, by `run`
    def push(self, tangent: Tensor, *saved: Tensor) -> Tensor: ...  # the tangent of the result, by `run`


class Chain:
    """The collectives of one function: `first` is the link before them, `end` lists the one after them."""

    __slots__ = ("end", "first")

    def __init__(self, first: Tensor):
        self.first = first
        self.end: list[Tensor] = []

    def stop(self) -> None:
        """The function is over; the end is what to take the gradient of, besides its value."""
        link = _here().link
        self.end = [] if link is None or link is self.first else [link]


@contextlib.contextmanager
def chain() -> Iterator[Chain]:
    """Link the collectives of a `with` block; within another chain they stay part of that one as well."""
    here = _here()
    outer = here.link
    first = here.link = torch.zeros((), requires_grad=True) if outer is None else outer
    try:
        yield Chain(first)
    finally:
        if outer is None:
            here.link = None


def linked() -> bool:
    """Whether a function is being differentiated on this thread."""
    return _here().link is not None


def started() -> int:
    """How many collectives this thread has started."""
    return _here().count


def in_torch_func() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, jvp, ...) is at work."""
    return torch._C._are_functorch_transforms_active()


def run(operation: Operation, x: Tensor) -> Tensor:
    """Do a collective, recorded for whatever differentiates it."""
    here = _here()
    here.count += 1
    if in_torch_func() or unpack_dual(x).tangent is not None:
        return _Apply.apply(x, None, operation)[0]
    link = here.link if torch.is_grad_enabled() else None
    wanted = link is not None or (x.requires_grad and torch.is_grad_enabled())
    if not wanted or not (x.dtype.is_floating_point or x.dtype.is_complex):
        # torch needs 20 us to find out that it has nothing to record.
        return operation.forward(x.detach())
    result, new_link = _Apply.apply(x, link, operation)
    if link is not None:
        here.link = new_link
    return result


def forget_undefined(gradient: Tensor, region: Region | None) -> Tensor:
    """On a rank without samples, a gradient with zeros for NaNs: there they come of 0/0, and mean nothing.

    The region is asked for since torch computes gradients of a GPU in a thread of its own, which knows of none.
    """
    if not may_be_undefined(region):
        return gradient
    return torch.where(gradient.isnan(), torch.zeros_like(gradient), gradient)


def may_be_undefined(region: Region | None) -> bool:
    """Whether this rank has no samples of a batch."""
    return region is not None and any(local == 0 for local, _ in region.totals.values())


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, link: Tensor | None, operation: Operation) -> tuple[Tensor, Tensor]:
        return operation.forward(x), torch.zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        x, _, ctx.operation = inputs
        ctx.region, ctx.state = current(), _here()
        if ctx.operation.saves:
            ctx.save_for_backward(x, output[0])
            ctx.save_for_forward(x, output[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        with _working_for(ctx.region, ctx.state):
            return ctx.operation.pull(forget_undefined(gradient, ctx.region), *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return ctx.operation.push(tangent, *ctx.saved_tensors), torch.zeros(())

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, link: None, operation: Operation) -> Any:
        # Operations look at first dimensions only; the batch goes last.
        result, last = _Apply.apply(x.movedim(in_dims[0], -1), link, operation)
        return (result, last), (result.dim() - 1, None)
