"""Large all-reductions on one host: every rank adds one slice, all into one block that everyone then reads.

The block is the first rank's. What lies in the arena already is read where it is. Of any other tensor a rank copies
only the slices that others add, and one rank's copies go straight into the block, where they are then added to in
place: memory that has just been read is cheaper to write than memory that has not. Where all ranks reduce in place in
the arena, each adds its slice in its own tensor and copies the others'. Invariant: contributions are combined in rank
order, whoever holds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .communicator import Call, Steps
from .copying import copy
from .reduction import reduce_in_order, slice_bounds

if TYPE_CHECKING:
    from .shm import ShmCommunicator

_PLANS = 256  # kept ready, and places for each
_BLOCK = 1 << 16  # elements; sums that can't be formed in place are formed in the cache

# Places in the arena leave the highest bits free to say more.
_IN_PLACE = 1 << 62  # of the tensor's place: it is to be overwritten
_DIRECT = 1 << 62  # of the staging's place: the first slice is in the result block


@dataclasses.dataclass(slots=True)
class Plan:
    """What depends on the size and dtype of a reduction only, and the views that it has made."""

    numel: int
    dtype: torch.dtype
    bounds: list[int]
    start: int
    end: int
    operands: dict[tuple[int, ...], tuple[list[torch.Tensor | None], torch.Tensor]]


def _plan(comm: ShmCommunicator, numel: int, dtype: torch.dtype) -> Plan:
    plan = comm.reductions.get((numel, dtype))
    if plan is None:
        if len(comm.reductions) >= _PLANS:
            comm.reductions.clear()
        bounds = slice_bounds(numel, comm.size)
        start, end = bounds[comm.rank], bounds[comm.rank + 1]
        plan = comm.reductions[numel, dtype] = Plan(numel, dtype, bounds, start, end, {})
    return plan


def all_reduce(
    comm: ShmCommunicator, call: Call, flat: torch.Tensor, op: str, *, in_place: bool = False, patient: bool = False
) -> Steps:
    """Reduce a flat tensor; returns a lease of the result, or None if it has been written to `flat`.

    Args:
        in_place: the result may be written to `flat`, if it lies in the arena.
        patient: may wait for the first rank before it tells the others of its part. Not for an operation that others
            may follow before it is over.
    """
    plan = _plan(comm, flat.numel(), flat.dtype)
    resident = comm.arena.offset_of(flat)
    sequence = comm.begin(call.text)
    block, release = comm.spend(sequence, resident, plan.numel * plan.dtype.itemsize)
    if comm.rank == 0:
        comm.announce(sequence, call, block, release)
    if resident is not None:
        comm.post(sequence, call, resident | _IN_PLACE if in_place else resident)
    elif comm.rank == 1:
        announced = comm.announced(sequence, call)
        if patient:
            yield announced
        direct = patient or announced()
        if direct:
            _stage(comm, comm.announced_block(sequence)[0], flat, plan, [0])
        staging = _staged(comm, sequence, flat, plan, range(2 if direct else 0, comm.size))
        comm.post(sequence, call, 0, staging | _DIRECT if direct else staging)
    else:
        staging = 0
        if comm.rank == 0:
            _stage(comm, block, flat, plan, range(1, comm.size))
        else:
            staging = _staged(comm, sequence, flat, plan, range(comm.size))
        comm.post(sequence, call, 0, staging)
    yield comm.posted(sequence, call)
    block, release = comm.announced_block(sequence)
    result = comm.arena.lease(block, plan.numel, plan.dtype, release + comm.rank, comm.size)
    places = comm.posted_places(sequence)
    if in_place and all(place & _IN_PLACE for place in places[::2]):
        yield from _in_own_places(comm, sequence, flat, op, plan, [place & ~_IN_PLACE for place in places[::2]])
        return None
    if plan.start < plan.end:
        parts, target = _operands(comm, plan, block, places)
        mine = flat[plan.start : plan.end] if resident is None else target
        reduce_in_order([mine if part is None else part for part in parts], op, target)
    comm.reduced(sequence)
    yield comm.all_reduced_by(sequence)
    comm.over(sequence)
    return result


def _operands(
    comm: ShmCommunicator, plan: Plan, block: int, places: tuple[int, ...]
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """This rank's slice of every rank's part (None: of its own tensor, wherever that is) and of the result."""
    key = (block, *places)
    found = plan.operands.get(key)
    if found is None:
        if len(plan.operands) >= _PLANS:
            plan.operands.clear()
        with torch.inference_mode(False):  # views that are kept must serve calls outside of it, too
            found = plan.operands[key] = _new_operands(comm, plan, block, places)
    return found


def _new_operands(
    comm: ShmCommunicator, plan: Plan, block: int, places: tuple[int, ...]
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    def view(at: int) -> torch.Tensor:
        return _view(comm, at, plan, plan.start, plan.end)

    target = view(block)
    parts: list[torch.Tensor | None] = []
    for peer, (at, staged) in enumerate(zip(places[::2], places[1::2], strict=True)):
        if at:
            parts.append(view(at & ~_IN_PLACE))
        elif peer == comm.rank:
            parts.append(None)
        elif (peer == 0) if comm.rank else (staged & _DIRECT):
            parts.append(target)
        else:
            parts.append(view(staged & ~_DIRECT))
    return parts, target


def _in_own_places(
    comm: ShmCommunicator, sequence: int, flat: torch.Tensor, op: str, plan: Plan, places: list[int]
) -> Steps:
    """Every rank adds its slice in its own tensor, then copies those of the others."""
    start, end, bounds = plan.start, plan.end, plan.bounds
    parts = [_view(comm, at, plan, start, end) for at in places]
    if comm.rank < 2:
        if start < end:
            reduce_in_order(parts, op, parts[comm.rank])
    else:
        for begin in range(0, end - start, _BLOCK):
            pieces = [part[begin : begin + _BLOCK] for part in parts]
            pieces[comm.rank].copy_(reduce_in_order(pieces, op, torch.empty_like(pieces[0])))
    comm.reduced(sequence)
    yield comm.all_reduced_by(sequence)
    for peer, at in enumerate(places):
        first, last = bounds[peer], bounds[peer + 1]
        if peer != comm.rank and first < last:
            copy(flat[first:last], _view(comm, at, plan, first, last))
    comm.over(sequence)
    yield comm.all_over(sequence)  # the tensors are their owners' again


def _stage(comm: ShmCommunicator, block: int, flat: torch.Tensor, plan: Plan, slices: Sequence[int]) -> None:
    """Copy some slices to their places in a block."""
    for first, last in _runs(slices):
        start, end = plan.bounds[first], plan.bounds[last + 1]
        if start < end:
            copy(_view(comm, block, plan, start, end), flat[start:end])


def _staged(comm: ShmCommunicator, sequence: int, flat: torch.Tensor, plan: Plan, slices: Sequence[int]) -> int:
    """Copy some slices into memory of this rank's, which is free again once all have read it; where it is."""
    slices = [peer for peer in slices if peer != comm.rank]
    if not slices:
        return 0
    staging = comm.staging(sequence, plan.numel * plan.dtype.itemsize)
    _stage(comm, staging, flat, plan, slices)
    return staging


def _view(comm: ShmCommunicator, at: int, plan: Plan, start: int, end: int) -> torch.Tensor:
    return comm.arena.tensor(at + start * plan.dtype.itemsize, end - start, plan.dtype)


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
