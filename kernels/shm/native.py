"""Small sums by a few hundred lines of C, if these could be compiled when the library was installed.

They replace most of the Python of a small all-reduction, which takes several times as long as the sum itself. They are
optional: the bits are the same, ranks with and without them can sum together, and `SPMD_NATIVE=0` turns them off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from ..call import Call, labels
from ..reduction import Op, check_op
from ..waiting import SAVED_SECONDS, YIELDS, cores
from .all_reduce import AllReduce
from .slots import Slots

try:
    from . import _small
except ImportError:  # there was no compiler
    _small = None  # type: ignore[assignment]

SPINS = 1000
_KINDS = {torch.float32: "f", torch.float64: "d", torch.int64: "q"}


def all_reduction(slots: Slots, shape: Sequence[int], dtype: torch.dtype, op: Op) -> AllReduce:
    """The object that does the all-reductions of one kind.

    Raises:
        SpecError: there is no such op, or not of this dtype.
    """
    check_op(op, dtype)
    call = Call("all_reduce", dtype, tuple(shape), op)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    compiled = _small is not None and os.environ.get("SPMD_NATIVE", "") != "0"
    if compiled and op == "sum" and dtype in _KINDS and 0 < nbytes <= slots.small_bytes:
        return NativeSum(slots, call, shape, dtype, op)
    return AllReduce(slots, call, shape, dtype, op)


class NativeSum(AllReduce):
    """Small sums of tensors whose bytes can be read in place.

    Attributes:
        address: function of (tensor, op, label of the call): the address of the tensor's bytes if this is the kind of
            sum for it, else 0.
    """

    def __init__(self, slots: Slots, call: Call, shape: Sequence[int], dtype: torch.dtype, op: Op):
        super().__init__(slots, call, shape, dtype, op)
        self._label = labels.current
        self._small_sum = _small.Small(
            slots.words,
            slots.begun,
            slots.offsets(),
            slots.rank,
            call.signature,
            _KINDS[dtype],
            self._numel,
            slots.strides(),
            SPINS if slots.spins else 0,
            torch.Tensor,
            self._shape,
            dtype,
            op,
            self._label,
        )
        self.address = self._small_sum.address

    def __call__(self, tensor: torch.Tensor, *, in_place: bool = False) -> torch.Tensor | None:
        source = self.address(tensor, self._op, self._label)
        if not source:  # for example a tensor of zeros without memory
            return super().__call__(tensor, in_place=in_place)
        return self.summed(tensor, source, in_place)

    def summed(self, tensor: torch.Tensor, source: int, in_place: bool) -> torch.Tensor | None:
        """Like a call, for a tensor whose bytes are at address `source`."""
        result = tensor if in_place else torch.empty_like(tensor)
        target = source if in_place else result.data_ptr()
        slots, small = self._slots, self._small_sum
        if slots.spins:
            flags = small.run(source, target, 0)
        else:
            began = time.monotonic()
            flags = small.run(source, target, 0 if cores.wanted(began) else YIELDS)
            if flags & _small.KEPT:
                cores.kept(began, time.monotonic())
        if not flags:
            cores.lost -= SAVED_SECONDS
        elif flags & _small.FULL:
            return super().__call__(tensor, in_place=in_place)
        elif flags & _small.UNREADY:
            if flags & _small.ASLEEP:
                slots.wake()
            sequence = slots.begun[0]
            slots.await_posted(sequence, self._call)
            small.finish(sequence, target)
        if not in_place:
            return result
        increment_version(tensor)
        return None
