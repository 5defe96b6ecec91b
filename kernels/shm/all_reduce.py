"""All-reductions on one host: one state machine, over the slots of a group.

Small: every rank copies its tensor into its slot, and adds all of them for itself once all ranks have posted. Large:
every rank adds one slice, and writes it into one block of the first rank that everyone then reads. A tensor that lies
in the arena is read where it is. Of any other tensor, a rank copies only the slices that other ranks add. Of a slice,
one rank's copy may go straight into the block, to be added to in place: memory that has just been read is cheaper to
write than other memory. If all ranks reduce in place in the arena, each adds its slice in its own tensor, and copies
the other slices. Invariant: contributions are combined in rank order, wherever they lie.

What depends only on the kind of a reduction is computed once: views of the slots, bounds of the slices, operands. A
blocking call then goes through all states at once; any other call is driven step by step, after those before it. Both
write the same words, so some ranks may block while others don't.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..call import Call
from ..copying import copy
from ..flat import contiguous
from ..operations import Steps
from ..reduction import Op, reduce_in_order, slice_bounds
from .blocks import Result
from .slots import SLOTS, Part, Slots

_OPERANDS = 256  # how many are cached for each kind of reduction
_BLOCK = 1 << 16  # elements; sums that can't be formed in place are formed in the processor's cache
# For less, waiting until all ranks have copied costs more than the block that all read, and a copy of it.
_IN_PLACE_BYTES = 1 << 20

Operands = tuple[list[torch.Tensor | None], torch.Tensor]  # every rank's slice (None: of the tensor), the result's


class AllReduce:
    """The all-reductions of one kind: one call signature, op, shape and dtype."""

    def __init__(self, slots: Slots, call: Call, shape: Sequence[int], dtype: torch.dtype, op: Op):
        self._slots, self._call, self._op, self._dtype = slots, call, op, dtype
        self._shape = torch.Size(shape)
        self._numel, self._is_flat = self._shape.numel(), len(self._shape) == 1
        self._small = self._numel * dtype.itemsize <= slots.small_bytes
        self._views: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]  # by slot, then rank
        self._combined = _combination(op, slots.size, dtype)
        self._may_be_in_place = self._numel * dtype.itemsize >= _IN_PLACE_BYTES
        self._bounds = slice_bounds(self._numel, slots.size)
        self._start, self._end = self._bounds[slots.rank], self._bounds[slots.rank + 1]
        self._operands: dict[tuple, Operands] = {}

    def __call__(self, tensor: torch.Tensor, *, in_place: bool = False) -> torch.Tensor | None:
        """Reduce a tensor of this kind and wait; returns the result, or None if it was written to the tensor."""
        if self._small:
            slots, call = self._slots, self._call
            sequence = slots.begin(call.text)
            parts = self._views[sequence % SLOTS] or self._new_views(sequence % SLOTS)
            parts[slots.rank].copy_(tensor.detach() if tensor.requires_grad else tensor)
            slots.post(sequence, call)
            slots.await_posted(sequence, call)
            result = self._combined(parts)
            slots.finish_small(sequence)
            return result
        plain = contiguous(tensor)
        flat = plain if self._is_flat else plain.view(-1)
        steps = self._large(flat, in_place and plain.data_ptr() == tensor.data_ptr(), alone=True)
        try:
            while True:
                self._slots.await_ready(next(steps), self._call)
        except StopIteration as end:
            return end.value if self._is_flat or end.value is None else end.value.view(self._shape)

    def steps(self, tensor: torch.Tensor, *, in_place: bool = False) -> Steps:
        """The same for a flat tensor, as steps; later operations may begin before these are over."""
        if not self._small:
            return (yield from self._large(tensor, in_place, alone=False))
        slots = self._slots
        sequence = slots.begin(self._call.text)
        parts = self._views[sequence % SLOTS] or self._new_views(sequence % SLOTS)
        parts[slots.rank].copy_(tensor)
        slots.post(sequence, self._call)
        yield slots.posted(sequence, self._call)
        result = self._combined(parts)
        slots.finish_small(sequence)
        return result

    def _new_views(self, slot: int) -> list[torch.Tensor]:
        slots = self._slots
        with torch.inference_mode(False):  # cached views must work in calls outside of inference mode, too
            self._views[slot] = [
                slots.arena.tensor(slots.inline(rank, slot), self._numel, self._dtype).view(self._shape)
                for rank in range(slots.size)
            ]
        return self._views[slot]

    # -- large ---------------------------------------------------------------------------------------------------------

    def _large(self, flat: torch.Tensor, in_place: bool, *, alone: bool) -> Steps:
        """Reduce a flat tensor; returns a view of the result, or None if it has been written to `flat`.

        Args:
            alone: no other operation begins before this one is over, so it may wait for the first rank before it posts
                its own part.
        """
        slots, call = self._slots, self._call
        resident = slots.arena.offset_of(flat)
        sequence = slots.begin(call.text)
        result = slots.staging.consume(sequence, resident, self._numel * self._dtype.itemsize)
        if result is not None:
            slots.announce(sequence, call, result)
        if resident is not None:
            part = Part(tensor=resident, in_place=int(in_place and self._may_be_in_place))
        elif slots.rank == 1:
            announced = slots.announced(sequence, call)
            if alone:
                yield announced
            part = self._copied(sequence, flat, slots.result(sequence) if alone or announced() else None)
        else:
            part = self._copied(sequence, flat, result)
        slots.post_part(sequence, call, part)
        yield slots.posted(sequence, call)
        result = result or slots.result(sequence)
        view = slots.arena.views.take(result, self._numel, self._dtype, user=slots.rank, users=slots.size)
        parts = slots.parts(sequence)
        if part.in_place and all(parts[1::4]):  # each part's `in_place`
            yield from self._in_own_memory(sequence, flat, parts[::4])
            return None
        if self._start < self._end:
            operands, target = self._operands.get((result.block, *parts)) or self._new_operands(result.block, parts)
            mine = flat[self._start : self._end] if resident is None else target
            reduce_in_order([mine if operand is None else operand for operand in operands], self._op, target)
        slots.reduced(sequence)
        yield slots.all_reduced_by(sequence)
        slots.read(sequence)
        return view

    def _copied(self, sequence: int, flat: torch.Tensor, result: Result | None) -> Part:
        """Copy the slices that others add; the first two ranks copy into the result block, if they know it by now."""
        slots = self._slots
        if slots.rank == 0 and result is not None:
            self._copy(result.block, flat, range(1, slots.size))
            return Part()
        if result is not None:
            self._copy(result.block, flat, [0])
        others = [peer for peer in range(0 if result is None else 2, slots.size) if peer != slots.rank]
        staged = slots.staging.stage(sequence, self._numel * self._dtype.itemsize) if others else 0
        self._copy(staged, flat, others)
        return Part(staged=staged, direct=int(result is not None))

    def _copy(self, block: int, flat: torch.Tensor, slices: Sequence[int]) -> None:
        """Copy some slices to their places in a block."""
        for first, last in _runs(slices):
            start, end = self._bounds[first], self._bounds[last + 1]
            if start < end:
                copy(self._view(block, start, end), flat[start:end])

    def _view(self, block: int, start: int, end: int) -> torch.Tensor:
        return self._slots.arena.tensor(block + start * self._dtype.itemsize, end - start, self._dtype)

    def _new_operands(self, block: int, parts: list[int]) -> Operands:
        """This rank's slice of every rank's part, and of the result."""
        if len(self._operands) >= _OPERANDS:
            self._operands.clear()
        with torch.inference_mode(False):  # cached views must work in calls outside of inference mode, too
            target = self._view(block, self._start, self._end)
            operands = [
                self._operand(peer, Part(*parts[4 * peer : 4 * peer + 4]), target) for peer in range(self._slots.size)
            ]
        found = self._operands[(block, *parts)] = operands, target
        return found

    def _operand(self, peer: int, part: Part, target: torch.Tensor) -> torch.Tensor | None:
        if part.tensor:
            return self._view(part.tensor, self._start, self._end)
        if peer == self._slots.rank:
            return None
        in_block = peer == 0 if self._slots.rank else part.direct
        return target if in_block else self._view(part.staged, self._start, self._end)

    def _in_own_memory(self, sequence: int, flat: torch.Tensor, tensors: list[int]) -> Steps:
        """Every rank adds its slice in its own tensor, then copies those of the others."""
        slots, start, end, bounds = self._slots, self._start, self._end, self._bounds
        parts = [self._view(at, start, end) for at in tensors]
        if slots.rank < 2:
            if start < end:
                reduce_in_order(parts, self._op, parts[slots.rank])
        else:
            for begin in range(0, end - start, _BLOCK):
                pieces = [part[begin : begin + _BLOCK] for part in parts]
                pieces[slots.rank].copy_(reduce_in_order(pieces, self._op, torch.empty_like(pieces[0])))
        slots.reduced(sequence)
        yield slots.all_reduced_by(sequence)
        for peer, at in enumerate(tensors):
            first, last = bounds[peer], bounds[peer + 1]
            if peer != slots.rank and first < last:
                copy(flat[first:last], self._view(at, first, last))
        slots.read(sequence)
        yield slots.all_read(sequence)  # now no rank reads another's tensor any more


def _combination(op: Op, size: int, dtype: torch.dtype) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """How to combine small parts into a new tensor; the most common case, a sum of two, takes a single call."""
    if op == "sum" and size == 2 and dtype in (torch.float32, torch.float64):
        return lambda parts: torch.add(parts[0], parts[1])
    return lambda parts: reduce_in_order(parts, op, torch.empty_like(parts[0]))


def _runs(slices: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of neighbours.

    >>> _runs([0, 1, 3])
    [(0, 1), (3, 3)]
    """
    runs: list[tuple[int, int]] = []
    for index in slices:
        if runs and runs[-1][1] == index - 1:
            runs[-1] = runs[-1][0], index
        else:
            runs.append((index, index))
    return runs
