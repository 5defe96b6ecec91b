"""How a collective takes part in torch's autograd: gradients by its transpose, tangents by the collective itself,
`vmap`'s batches as one more dimension.

Autograd runs the transpose of a collective only on ranks whose value depends on its result. On the other ranks it would
be missing, and their peers would wait for it (think of the first stage of a pipeline, whose loss is a constant).
So inside a function that is being differentiated every collective also takes and gives a *token*, a tensor without
content. The tokens form a chain in the order of the program, and the gradient is taken along this chain too.
A backward pass may run in another thread; what it does there belongs to the function's region and chain.
Invariant: every rank runs the transposes of all its collectives, in reverse order, whatever its value depends on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..kernels.communicator import Communicator
from ..kernels.errors import SpecError
from ..kernels.torch_private import being_recorded, in_torch_func, is_batch_of_gradients, run_as_written
from ..mesh.region import Region, current, inside
from ..mesh.replication.net import Varying, active, joined
from ._plan import Plan, current_plan


class _State:
    """The newest token of a thread's chain (None outside of one), and how many collectives the thread has started.

    `order` is the token of the last compiled collective outside of a chain; the next one takes it, to stay in order.
    `crossed` collects the axes that differentiated collectives communicate over; None if nobody wants to know.
    """

    __slots__ = ("afterwards", "count", "crossed", "order", "token")

    def __init__(self) -> None:
        self.token: Tensor | None = None
        self.order: Tensor | None = None
        self.crossed: set[str] | None = None
        self.count = 0
        self.afterwards: list[Callable[[], None]] = []  # to be called when the outermost gradient is done


class _Threads(threading.local):
    def __init__(self) -> None:
        self.state = _State()


_threads = _Threads()


def state() -> _State:
    """This thread's state, or that of the thread it works for."""
    return _threads.state


@contextlib.contextmanager
def _working_for(region: Region | None, its: _State) -> Iterator[None]:
    """Enter the region and state of the forward pass, if this thread is in no region (torch's backward threads)."""
    if region is None or current() is not None:
        yield
        return
    own, _threads.state = state(), its
    try:
        with inside(region):
            yield
    finally:
        _threads.state = own


class Operation(Protocol):
    """What the ranks of a group do with one tensor.

    Attributes:
        saves: whether `vjp` and `jvp` need the input and the output; a linear operation needs neither.
        name: for messages.
        replicates: whether the result is the same on all ranks of the group.
    """

    @property
    def comm(self) -> Communicator: ...
    @property
    def name(self) -> str: ...

    saves: ClassVar[bool]
    replicates: ClassVar[bool]

    def forward(self, x: Tensor) -> Tensor: ...
    def vjp(self, gradient: Tensor, *saved: Tensor) -> Tensor: ...  # the transpose, by `run`
    def jvp(self, tangent: Tensor, *saved: Tensor) -> Tensor: ...  # the tangent of the result, by `run`


class Tokens:
    """The collectives of one function: `first` is the token before them, `end` lists the one after them."""

    __slots__ = ("end", "first")

    def __init__(self, first: Tensor):
        self.first = first
        self.end: list[Tensor] = []

    def stop(self) -> None:
        """Call this after the function: its gradient is taken of `end` too, besides its value."""
        token = state().token
        self.end = [] if token is None or token is self.first else [token]


class tokens:
    """Link the collectives of a `with` block into a chain; within another chain they become part of that one."""

    __slots__ = ("_is_outermost", "_region", "_state")

    def __enter__(self) -> Tokens:
        here = self._state = state()
        self._is_outermost = here.token is None
        if here.token is None:
            here.token = torch.zeros((), requires_grad=True, device="cpu")
            self._region = current()
            if self._region is not None:
                self._region.in_gradient = True
        return Tokens(here.token)

    def __exit__(self, *_: object) -> None:
        if self._is_outermost:
            self._state.token = None
            if self._region is not None:
                self._region.in_gradient = False
            while self._state.afterwards:
                self._state.afterwards.pop()()


def after_gradient(callback: Callable[[], None]) -> bool:
    """Call `callback` when the gradient that is being taken on this thread is done; False if there is none."""
    here = state()
    if here.token is None:
        return False
    here.afterwards.append(callback)
    return True


def in_gradient() -> bool:
    """Whether a function is being differentiated on this thread."""
    return state().token is not None


def started() -> int:
    """How many collectives this thread has started."""
    return state().count


def refuse_recording(what: str) -> None:
    """Refuse to communicate while torch records operations: it would record the result as a constant.

    Also in functions that only the first call runs as they are, and that torch then compiles by themselves.
    """
    region = current()
    if region is not None and region.within:
        raise SpecError(
            f"{what} was called in a function given to {region.within}, which torch compiles: it can't communicate",
            where=region.session.where(),
            remedy="communicate before it or after it; or write Python's if and for, on numbers that all ranks "
            'have alike, as in if float(psum(x.sum(), "data")) > 0',
        )
    if being_recorded():
        raise SpecError(
            f"{what} was called while torch records operations (make_fx, torch.func.linearize, torch.jit.trace, "
            "torch.export), which would keep its result as a constant",
            remedy="record what lies between the collectives; torch.func.jvp and vjp go through them, and "
            "so does torch.compile",
        )


def run(operation: Operation, x: Tensor) -> Tensor:
    """Do a collective, recorded for autograd, `torch.func` and forward-mode differentiation."""
    here = state()
    here.count += 1
    if in_torch_func() or unpack_dual(x).tangent is not None:
        return _Apply.apply(x, None, operation)[0]
    token = here.token if torch.is_grad_enabled() else None
    wanted = token is not None or (x.requires_grad and torch.is_grad_enabled())
    if not wanted or not (x.dtype.is_floating_point or x.dtype.is_complex):
        # torch needs 20 us to find out that it has nothing to record.
        return _forward(operation, x.detach())
    result, new_token = _Apply.apply(x, token, operation)
    region = None if here.crossed is None else current()
    if here.crossed is not None and region is not None and x.requires_grad:
        here.crossed.update(region.session.layout.axes_of(operation.comm.ranks))
    if token is not None:
        here.token = new_token
    return result


def perform(operation: Operation, x: Tensor) -> Tensor:
    """Do a collective without recording it: the caller takes care of its gradient."""
    state().count += 1
    return operation.forward(x)


run_as_written([run, perform])  # torch.compile doesn't trace these; what it can trace is in `compiled`


def _forward(operation: Operation, x: Tensor) -> Tensor:
    """Run an operation; with a net, note along which axes its result differs."""
    net, region = active(), current()
    if net is None or region is None:
        return operation.forward(x)
    over = region.session.layout.axes_of(operation.comm.ranks)
    varying = net.of(x).without(over)
    if not operation.replicates:
        varying = joined([varying, Varying(dict.fromkeys(over, operation.name))])
    with net.pause():
        result = operation.forward(x)
    net.result(result, varying)
    return result


def forget_undefined(gradient: Tensor, plan: Plan) -> Tensor:
    """On a rank without samples, replace NaNs in a gradient by zeros: there they come from 0/0, and mean nothing.

    The plan is an argument because torch computes gradients on a GPU in its own thread, which is in no region.
    """
    if not plan.without_samples:
        return gradient
    return torch.where(gradient.isnan(), torch.zeros_like(gradient), gradient)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, token: Tensor | None, operation: Operation) -> tuple[Tensor, Tensor]:
        return _forward(operation, x), torch.zeros((), device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        x, _, ctx.operation = inputs
        ctx.region, ctx.plan, ctx.state = current(), current_plan(), state()
        # A layer that is computed again (torch.utils.checkpoint) is so when something asks for what it saved. Its last
        # collective does, before it communicates: so all ranks communicate again, and at the same place in the chain.
        ctx.save_for_backward(*((x, output[0]) if ctx.operation.saves else output[1:]))
        if ctx.operation.saves:
            ctx.save_for_forward(x, output[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        if is_batch_of_gradients(gradient):
            raise SpecError(
                f"the gradient of {ctx.operation.name} was asked for many rows at once, by "
                "torch.autograd.grad(is_grads_batched=True) or jacobian(vectorize=True), which it can't take",
                remedy="use torch.func.jacfwd or jacrev, or a loop over the rows",
            )
        with _working_for(ctx.region, ctx.state):
            return ctx.operation.vjp(forget_undefined(gradient, ctx.plan), *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return ctx.operation.jvp(tangent, *ctx.saved_tensors), torch.zeros((), device="cpu")

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, token: None, operation: Operation) -> Any:
        # Operations use the first dimension, so the batch dimension goes last.
        result, last = _Apply.apply(x.movedim(in_dims[0], -1), token, operation)
        return (result, last), (result.dim() - 1, None)
