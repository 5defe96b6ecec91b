"""All-reductions with everything worked out beforehand: the way of a blocking call that has been made before.

The general path of `ShmCommunicator` builds its views and conditions anew for each operation, which costs more than a
small reduction. Here they are made once for a kind of tensor. Invariant: the words written, their order and the order
of additions are those of the general path, so that ranks may mix the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .communicator import ONE_PHASE_BYTES, Call, Ready
from .reduction import check_op, reduce_in_order
from .shared_result import all_reduce

if TYPE_CHECKING:
    from .shm import ShmCommunicator

SPINS = 400
Reduction = Callable[..., Any]  # (tensor, in_place=False) -> the result, or None if the tensor was overwritten
Key = tuple[torch.Size, torch.dtype, str]  # what a reduction is prepared for: shape, dtype, op


def prepare(comm: ShmCommunicator, tensor: torch.Tensor, op: str) -> Reduction:
    """A function that all-reduces tensors with the key of this one."""
    check_op(op, tensor.dtype)
    call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), op)
    if tensor.numel() * tensor.element_size() <= ONE_PHASE_BYTES:
        with torch.inference_mode(False):  # views that are kept must serve calls outside of it, too
            return _small(comm, tensor.shape, tensor.dtype, op, call)
    return _large(comm, tensor.shape, op, call)


def _reached(words: memoryview, word: int, value: int) -> Ready:
    return lambda: words[word] >= value


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
    combine, slots, spins = _combination(op, comm.size, dtype), comm.slots, range(1 if comm.crowded else SPINS)

    def reduce(tensor: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        sequence = comm.begin(call.text)
        slot = sequence % slots
        mine[slot].copy_(tensor.detach() if tensor.requires_grad else tensor)
        words[said[slot]] = signature
        words[said[slot] + 1] = offsets[slot]
        words[posted] = sequence
        for word, sign in peers[slot]:
            for _ in spins:
                if words[word] >= sequence:
                    break
            else:
                comm.await_ready(_reached(words, word, sequence), call)
            if words[sign] != signature:
                raise comm.disagreement(sequence, call)
        result = combine(views[slot])
        words[reduced] = sequence
        words[read] = sequence
        return result

    return reduce


def _large(comm: ShmCommunicator, shape: torch.Size, op: str, call: Call) -> Reduction:
    """The general algorithm, without the queue."""
    is_flat = len(shape) == 1

    def reduce(tensor: torch.Tensor, in_place: bool = False) -> torch.Tensor | None:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        flat = plain if is_flat else plain.view(-1)
        its_own = in_place and plain.data_ptr() == tensor.data_ptr()
        steps = all_reduce(comm, call, flat, op, in_place=its_own, patient=True)
        try:
            while True:
                ready = next(steps)
                if not ready():
                    comm.await_ready(ready, call)
        except StopIteration as end:
            return end.value if is_flat or end.value is None else end.value.view(shape)

    return reduce
