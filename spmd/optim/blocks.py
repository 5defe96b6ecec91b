"""New parameters and state: the old values are copied to where the new ones go, and stepped there in place.

A fused kernel goes over everything once, so it steps a whole copy. Other optimizers go over it several times and
allocate temporaries as large, so copying and stepping go block by block: temporaries stay small and in the cache.
Memory that may be overwritten (`mesh.donation`) is stepped where it is. Invariants: the old values stay intact, unless
they were donated; blocks are cut at multiples of 64 elements, so that the elements behind the last whole vector, which
torch may round differently, are the same ones as in a step on the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.copying import copy
from ..kernels.shm.arena import Arena
from ..mesh import donation, trees
from ..mesh.region import current
from ..mesh.strides import copied
from .flat import Spans, parts
from .leaves import State

# Elements: 1 MB of each array in float32. Smaller blocks save less traffic than their calls cost.
BLOCK = 1 << 18


class Lent(NamedTuple):
    """What torch steps in place."""

    param: Tensor
    grad: Tensor
    state: State


class WholeJob:
    """A parameter of any layout, with state of any kind, stepped in one block.

    Args:
        fused: stepped by a kernel that takes all tensors to have the parameter's strides, without a check.
    """

    def __init__(self, param: Tensor, grad: Tensor, state: State, *, fused: bool):
        self.param, self._grad, self.state, self._fused = param, grad, state, fused
        self.is_cpu = param.is_cpu

    def blocks(self, length: int | None) -> Iterator[tuple[int, int]]:
        yield 0, self.param.numel()

    def lend(self, start: int, stop: int) -> list[Lent]:
        shared = shared_memory()
        param, grad, state = _own(self.param, shared), self._grad, _own_all(self.state, shared)
        if self._fused:
            grad, state = _laid_as(param, grad), {name: _laid_as(param, value) for name, value in state.items()}
        return [Lent(param, grad, state)]

    def take_back(self, start: int, stop: int, lent: Sequence[Lent], after: Sequence[State]) -> None:
        self.param, self.state = lent[0].param, after[0]


class Piece(NamedTuple):
    """A part of a flat parameter, from `start` on: its gradient, and its old values unless they are in place already.

    Attributes:
        spans: the parts of it that torch steps as one parameter each; None: all of it as one.
    """

    start: int
    source: Tensor | None
    grad: Tensor
    spans: Spans | None = None

    def within(self, first: int, stop: int) -> Spans:
        """The spans between `first` and `stop`, counted from `first`; both are multiples of 64, or ends."""
        if self.spans is None:
            return ((0, stop - first),)
        if first == 0 and stop == self.grad.numel():
            return self.spans
        found = ((max(low, first) - first, min(high, stop) - first) for low, high in self.spans)
        return tuple((low, high) for low, high in found if low < high)


class FlatJob:
    """A flat parameter, made of pieces, whose optimizer treats every element alike.

    Args:
        out: where the new values go.
        pieces: in order; what lies between them is padding.
        state: of the whole; values without the parameter's shape, such as a step count, are shared by all elements.
        shape: the parameter's; None if it is flat.
    """

    def __init__(self, out: Tensor, pieces: Sequence[Piece], state: State, shape: torch.Size | None = None):
        self.out, self._pieces, self._given = out, pieces, state
        self._shape = out.shape if shape is None else shape
        shared = shared_memory()
        self._old: State = {}  # of what is copied
        self._new: State = {}
        for name, value in state.items():
            if is_laid_out_as(value, self._shape):
                new = allocate_like(value, shared)
                if new.data_ptr() != value.data_ptr():
                    self._old[name] = value.view(-1)
                self._new[name] = new.view(-1)
        self._after: State = {}
        self.is_cpu = out.is_cpu
        ends = [*(piece.start for piece in pieces[1:]), out.numel()]
        self._ends = {piece.start + piece.grad.numel(): end for piece, end in zip(pieces, ends, strict=True)}
        self._at: dict[int, tuple[Piece, int]] = {}

    def blocks(self, length: int | None) -> Iterator[tuple[int, int]]:
        for piece in self._pieces:
            size = piece.grad.numel()
            for first in range(0, size, length or max(size, 1)):
                self._at[piece.start + first] = piece, first
                yield piece.start + first, piece.start + min(first + (length or size), size)

    def lend(self, start: int, stop: int) -> list[Lent]:
        piece, first = self._at[start]
        part = slice(first, first + stop - start)
        if piece.source is not None:
            copy(self.out[start:stop], piece.source[part])
        end = self._ends.get(stop, stop)  # including the padding behind the piece
        for name, old in self._old.items():
            copy(self._new[name][start:end], old[start:end])
        spans = piece.within(part.start, part.stop)
        columns: dict[str, Sequence[Any]] = {name: parts(new[start:stop], spans) for name, new in self._new.items()}
        # Values without the parameter's shape go to every span as they were before the step.
        columns |= {name: _copies(value, len(spans)) for name, value in self._given.items() if name not in columns}
        states = [{name: columns[name][at] for name in self._given} for at in range(len(spans))]
        return list(map(Lent, parts(self.out[start:stop], spans), parts(piece.grad[part], spans), states))

    def take_back(self, start: int, stop: int, lent: Sequence[Lent], after: Sequence[State]) -> None:
        piece, first = self._at[start]
        spans = piece.within(first, first + stop - start)
        size = self.out.element_size()
        first_address = self.out.data_ptr() + start * size
        for (low, high), one, state in zip(spans, lent, after, strict=True):
            if one.param.data_ptr() != first_address + low * size:  # after `param.data = ...`
                self.out[start + low : start + high].copy_(one.param)
            for name, value in state.items():
                before = one.state.get(name)
                if value is before or not is_laid_out_as(value, one.param.shape):
                    continue
                if name not in self._new:  # torch made it in this step, the first
                    self._new[name] = value.new_zeros(len(self.out))
                if before is None or value.data_ptr() != before.data_ptr():
                    self._new[name][start + low : start + high].copy_(value)
        self._after = after[0]

    @property
    def state(self) -> State:
        """The state after the step."""
        return {
            name: self._new[name].view(self._shape) if name in self._new else value
            for name, value in self._after.items()
        }


Job = WholeJob | FlatJob
Block = tuple[Job, int, int]  # where it starts and stops


def batches(jobs: Sequence[Job], length: int | None) -> Iterator[list[Block]]:
    """The blocks of all jobs, in groups of up to `length` elements (a larger block is alone); None: all in one."""
    size, together = 0, list[Block]()
    for job in jobs:
        for start, stop in job.blocks(length):
            if together and length is not None and size + stop - start > length:
                yield together
                size, together = 0, []
            together.append((job, start, stop))
            size += stop - start
    if together:
        yield together


def shared_memory() -> Arena | None:
    """The arena in which tensors may lie that other ranks read; None outside a region."""
    region = current()
    return None if region is None else region.session.host_arena


def allocate_like(value: Tensor, shared: Arena | None) -> Tensor:
    """Memory for the tensor that replaces this one: its own, if it was donated and nobody else reads it, else new."""
    region = current()
    if donation.may_take(value) and not (shared is not None and shared.is_borrowed(value)):
        if region is not None:
            region.session.overwrite()
        return donation.take(value)
    if region is None or not value.is_contiguous():
        return torch.empty_like(value)
    return region.session.allocate(value.numel(), value).view(value.shape)


def allocate(numel: int, like: Tensor) -> Tensor:
    """New flat memory for `numel` elements of the dtype and device of `like`."""
    region = current()
    return like.new_empty(numel) if region is None else region.session.allocate(numel, like)


def is_laid_out_as(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == shape


def _laid_as(param: Tensor, value: Any) -> Any:
    """A gradient or a part of the state, with the strides of its parameter."""
    if not is_laid_out_as(value, param.shape) or value.stride() == param.stride():
        return value
    return copied(value, param.stride())


def _own_all(state: State, shared: Arena | None) -> State:
    """`_own` of each value of a state."""
    return {
        name: _own(value, shared)
        if isinstance(value, Tensor)
        else trees.map(functools.partial(_own, shared=shared), value)
        for name, value in state.items()
    }


def _own(value: Any, shared: Arena | None) -> Any:
    """A tensor with the same values that may be overwritten."""
    if not isinstance(value, Tensor):
        return value
    if not (value.is_cpu and value.is_contiguous()) and not donation.may_take(value):
        return value.clone()
    here = allocate_like(value, shared)
    return here if here.data_ptr() == value.data_ptr() else copy(here, value)


def _copies(value: Any, count: int) -> Sequence[Any]:
    """`count` copies of a value."""
    if isinstance(value, Tensor) and not value.ndim and count > 1:
        return value.expand(count).clone().unbind()  # at once: a step may need hundreds, each a launch on a GPU
    return [value.clone() if isinstance(value, Tensor) else trees.map(_clone, value) for _ in range(count)]


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
