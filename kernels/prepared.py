"""All-reductions with everything worked out beforehand: the way of a blocking call that has been made before.

The general path of `ShmCommunicator` builds its views and conditions anew for each operation, which costs more than a
small reduction. Here they are made once for a kind of tensor (and, for large ones, a place). Invariant: the words
written, their order and the order of additions are those of the general path, so that ranks may mix the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .communicator import ONE_PHASE_BYTES, Call
from .reduction import check_op, reduce_in_order, slice_bounds

if TYPE_CHECKING:
    from .shm import ShmCommunicator

SPINS = 400
Reduction = Callable[[torch.Tensor], torch.Tensor]
Key = tuple[Any, ...]


def key_of(comm: ShmCommunicator, tensor: torch.Tensor, op: str) -> Key | None:
    """What a prepared reduction is kept under: the kind of tensor, and of a large one the place.

    None where the general path must do it: the tensor is empty, or is large and doesn't lie in the arena as it reads.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0 or tensor.is_conj() or tensor.is_neg():
        return None
    if nbytes <= ONE_PHASE_BYTES:
        return tensor.shape, tensor.dtype, op
    offset = comm.arena.offset_of(tensor)
    return None if offset is None else (tensor.shape, tensor.dtype, op, offset)


def prepare(comm: ShmCommunicator, tensor: torch.Tensor, op: str) -> Reduction:
    """A function that all-reduces tensors with the key of this one."""
    check_op(op, tensor.dtype)
    call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), op)
    offset = comm.arena.offset_of(tensor)
    if tensor.numel() * tensor.element_size() <= ONE_PHASE_BYTES or offset is None:
        return _small(comm, tensor.shape, tensor.dtype, op, call)
    return _resident(comm, tensor, offset, op, call)


def _combination(op: str, size: int, dtype: torch.dtype) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Into a new tensor; two float32 parts, by far the most common case, with a single call."""
    if op == "sum" and size == 2 and dtype in (torch.float32, torch.float64):
        return lambda parts: torch.add(parts[0], parts[1])
    return lambda parts: reduce_in_order(parts, op, torch.empty_like(parts[0]))


def _small(comm: ShmCommunicator, shape: torch.Size, dtype: torch.dtype, op: str, call: Call) -> Reduction:
    words, signature, others = comm.words, call.signature, [r for r in range(comm.size) if r != comm.rank]
    views = [
        [comm.arena.tensor(comm.stage(slot, rank), shape.numel(), dtype).view(shape) for rank in range(comm.size)]
        for slot in range(comm.slots)
    ]
    mine = [slot_views[comm.rank] for slot_views in views]
    said = [comm.word_of_signature(comm.rank, slot) for slot in range(comm.slots)]
    peers = [
        [(comm.word_posted(rank), comm.word_of_signature(rank, slot)) for rank in others] for slot in range(comm.slots)
    ]
    offsets = [comm.stage(slot, comm.rank) for slot in range(comm.slots)]
    posted, reduced, read = comm.word_posted(comm.rank), comm.word_reduced(comm.rank), comm.word_read(comm.rank)
    combine, slots = _combination(op, comm.size, dtype), comm.slots

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        sequence = comm.begin(call.text)
        slot = sequence % slots
        mine[slot].copy_(tensor)
        words[said[slot]] = signature
        words[said[slot] + 1] = offsets[slot]
        words[posted] = sequence
        for word, sign in peers[slot]:
            if words[word] < sequence:
                comm.await_word(word, sequence, call)
            if words[sign] != signature:
                raise comm.disagreement(sequence, call)
        result = combine(views[slot])
        words[reduced] = sequence
        words[read] = sequence
        return result

    return reduce


def _resident(comm: ShmCommunicator, tensor: torch.Tensor, offset: int, op: str, call: Call) -> Reduction:
    arena, words, signature, size = comm.arena, comm.words, call.signature, comm.size
    numel, dtype, shape = tensor.numel(), tensor.dtype, tensor.shape
    bounds = slice_bounds(numel, size)
    start, end = bounds[comm.rank], bounds[comm.rank + 1]
    first, count = start * dtype.itemsize, end - start
    others = [rank for rank in range(size) if rank != comm.rank]
    sources: dict[tuple[int, ...], list[torch.Tensor]] = {}
    targets: dict[int, torch.Tensor] = {}
    posted, reduced, read = comm.word_posted(comm.rank), comm.word_reduced(comm.rank), comm.word_read(comm.rank)
    theirs = [(comm.word_posted(rank), rank) for rank in others]
    done = [comm.word_reduced(rank) for rank in others]

    def reduce(_: torch.Tensor) -> torch.Tensor:
        sequence = comm.begin(call.text)
        slot = sequence % comm.slots
        if comm.rank == 0:
            where = comm.word_of_signature(0, slot)
            words[where + 2], words[where + 3] = arena.result_block(numel * dtype.itemsize, size)
        here = comm.word_of_signature(comm.rank, slot)
        words[here] = signature
        words[here + 1] = offset
        words[posted] = sequence
        for word, rank in theirs:
            if words[word] < sequence:
                comm.await_word(word, sequence, call)
            if words[comm.word_of_signature(rank, slot)] != signature:
                raise comm.disagreement(sequence, call)
        offsets = tuple(words[comm.word_of_signature(rank, slot) + 1] for rank in range(size))
        leader = comm.word_of_signature(0, slot)
        block, release = words[leader + 2], words[leader + 3]
        parts = sources.get(offsets)
        if parts is None:
            parts = sources[offsets] = [arena.tensor(at + first, count, dtype) for at in offsets]
        target = targets.get(block)
        if target is None:
            target = targets[block] = arena.tensor(block + first, count, dtype)
        if count:
            reduce_in_order(parts, op, target)
        result = arena.lease(block, numel, dtype, release + comm.rank, size)
        words[reduced] = sequence
        for word in done:
            if words[word] < sequence:
                comm.await_word(word, sequence, call)
        words[read] = sequence
        return result.view(shape)

    return reduce
