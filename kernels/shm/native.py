"""Small sums by a few hundred lines of C, where these could be compiled when the library was installed.

They take the place of most of the Python of a small all-reduction, which costs several times what is done. Nothing
needs them: the bits are the same, ranks with and without may sum together, and `SPMD_NATIVE=0` leaves them out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from ..call import Call
from ..reduction import Op
from ..waiting import SAVED_SECONDS, YIELDS, cores
from .all_reduce import AllReduce
from .slots import Slots

try:
    from . import _small
except ImportError:  # there was no compiler
    _small = None  # type: ignore[assignment]

SPINS = 1000
_KINDS = {torch.float32: "f", torch.float64: "d", torch.int64: "q"}


def all_reduction(slots: Slots, call: Call, shape: Sequence[int], dtype: torch.dtype, op: Op) -> AllReduce:
    """What makes the all-reductions of one kind."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    compiled = _small is not None and os.environ.get("SPMD_NATIVE", "") != "0"
    if compiled and op == "sum" and dtype in _KINDS and 0 < nbytes <= slots.small_bytes:
        return NativeSum(slots, call, shape, dtype, op)
    return AllReduce(slots, call, shape, dtype, op)


class NativeSum(AllReduce):
    """Small sums, of tensors whose bytes can be read where they lie."""

    def __init__(self, slots: Slots, call: Call, shape: Sequence[int], dtype: torch.dtype, op: Op):
        super().__init__(slots, call, shape, dtype, op)
        self._small_sum = _small.Small(
            slots.words,
            slots.offsets(),
            slots.rank,
            call.signature,
            _KINDS[dtype],
            self._numel,
            slots.strides(),
            SPINS if slots.spins else 0,
        )

    def __call__(self, tensor: torch.Tensor, *, in_place: bool = False) -> torch.Tensor | None:
        plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
        source = tensor.data_ptr() if plain else 0
        if not source:  # it may also be a tensor of zeros that has no memory
            return super().__call__(tensor, in_place=in_place)
        result = tensor if in_place else torch.empty_like(tensor)
        target = result.data_ptr()
        slots, small = self._slots, self._small_sum
        sequence = slots.begin(self._call.text)
        began = time.monotonic()
        flags = small.run(sequence, source, target, 0 if slots.spins or cores.wanted(began) else YIELDS)
        if not flags:
            cores.lost -= SAVED_SECONDS
        elif flags & _small.KEPT:
            cores.kept(began, time.monotonic())
        if flags & _small.UNREADY:
            if flags & _small.ASLEEP:
                slots.wake()
            slots.await_posted(sequence, self._call)
            small.finish(sequence, target)
        if not in_place:
            return result
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        return None
