"""Gradient buckets on a GPU: packed, reduced and unpacked beside the backward pass that fills them.

A bucket has leaves of one dtype. Once all are in, it is packed by one kernel launch and reduced at once, both on a side
stream. The stream of the backward pass goes on, and waits for the side stream's event only where the sums are used.
The resulting leaves are views of the sums, or, if they travelled as another dtype, are unpacked by one more launch. The
host waits for nothing. Invariant: buckets are the same on all ranks, since they depend only on shapes, dtypes and the
order of use, and are reduced in the same order, whatever the order in which they fill.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..bucket import Leaf, Packed, kept_plan, packed
from ..call import labelled
from ..errors import SpecError
from .nccl import NcclCommunicator
from .pack import DTYPES, Table, has_kernel

_ALIGN = 512  # bytes; leaves begin where torch's own allocations would
STREAM = "buckets"


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """The buckets, in the order in which they are reduced, each with a table for packing and one for unpacking."""

    buckets: list[Packed]
    tables: list[tuple[Table, Table]]
    bucket_of: dict[int, int]  # of every leaf


class CudaBuckets:
    """A set of buckets, for one use: `fill` each leaf that has a value, then `finish`; like `bucket.Buckets`.

    Args:
        comm: the group to sum over.
        leaves: the leaves that will come, in order of use.
        bucket_bytes: how large a bucket may grow.
        wire_dtype: travel as this dtype (floating-point leaves only).
        early: start each reduction as soon as its leaves are in; if False, start all of them in `finish`.
        label: what the leaves belong to; ranks compare it at the first bucket.
    """

    def __init__(
        self,
        comm: NcclCommunicator,
        leaves: Sequence[Leaf],
        *,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None = None,
        early: bool = True,
        label: str = "",
    ):
        self._comm, self._leaves, self._early, self._label = comm, leaves, early, label
        key = ("cuda", tuple(leaves), bucket_bytes, wire_dtype)
        make = functools.partial(_plan, leaves, bucket_bytes, wire_dtype, comm.launch)
        plan: _Plan = kept_plan(comm, key, make)
        self._plan = plan
        self._left = [len(bucket.leaves) for bucket in plan.buckets]
        self._values: dict[int, Tensor | None] = {}
        self._started: list[tuple[Tensor, Any]] = []  # sums, and the event after which they are ready

    def fill(self, index: int, value: Tensor | None) -> None:
        """Take a leaf's value (None: zeros); starts every reduction that is now complete, in order."""
        leaf = self._leaves[index]
        if value is not None and (value.stride() != leaf.stride or value.is_conj() or value.is_neg()):
            value = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=self._comm.device).copy_(
                value
            )
        self._values[index] = value
        self._left[self._plan.bucket_of[index]] -= 1
        if self._early:
            self._start_full()

    def _start_full(self) -> None:
        while len(self._started) < len(self._left) and self._left[len(self._started)] == 0:
            self._start(len(self._started))

    def _start(self, number: int) -> None:
        comm, bucket = self._comm, self._plan.buckets[number]
        with comm.streams.beside(STREAM):
            buffer = torch.empty(bucket.size, dtype=bucket.wire, device=comm.device)
            values = [self._values.pop(index) for index in bucket.leaves]
            for value in values:
                if value is not None:
                    comm.streams.hold(value)
            self._plan.tables[number][0].pack(values, buffer)
            with labelled(self._label if number == 0 else ""):
                comm.all_reduce(buffer)
            self._started.append((buffer, comm.streams.event()))

    def _views(self, buffer: Tensor, bucket: Packed) -> list[Tensor]:
        """Views of the leaves in a buffer, with their shapes and strides."""
        views = []
        for index, start, length in zip(bucket.leaves, bucket.starts, bucket.lengths, strict=True):
            leaf, part = self._leaves[index], buffer[start : start + length]
            if leaf.dtype.is_complex:
                part = torch.view_as_complex(part.view(-1, 2))
            views.append(part.as_strided(leaf.shape, leaf.stride, part.storage_offset()))
        return views

    def finish(self) -> list[Tensor]:
        """Fill missing leaves with zeros, and return the sums, shaped like the leaves; the current stream waits."""
        for index in range(len(self._leaves)):
            if index not in self._values and self._plan.bucket_of[index] >= len(self._started):
                self.fill(index, None)
        self._start_full()
        out: dict[int, Tensor] = {}
        for bucket, (_, back), (sums, event) in zip(self._plan.buckets, self._plan.tables, self._started, strict=True):
            self._comm.streams.wait(event)
            self._comm.streams.hold(sums)
            if bucket.dtype == bucket.wire:
                views = self._views(sums, bucket)
            else:
                views = self._views(torch.empty(bucket.size, dtype=bucket.dtype, device=sums.device), bucket)
                back.unpack(sums, views)
            out.update(zip(bucket.leaves, views, strict=True))
        return [out[index] for index in range(len(self._leaves))]


def _plan(leaves: Sequence[Leaf], bucket_bytes: int, wire_dtype: torch.dtype | None, launch: Any) -> _Plan:
    """Where each leaf goes: in reverse order of use, by dtype (complex ones as pairs), the first bucket small."""
    order = reversed(range(len(leaves)))
    dtypes = [_dtypes(leaf, wire_dtype) for leaf in leaves]
    buckets = packed(leaves, order, dtypes, bucket_bytes=bucket_bytes, align_bytes=_ALIGN)
    bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.leaves}
    return _Plan(buckets, [(_table(bucket, launch), _table(bucket, launch)) for bucket in buckets], bucket_of)


def _table(bucket: Packed, launch: Any) -> Table:
    return Table(bucket.starts, bucket.lengths, bucket.dtype, bucket.wire, launch)


def _dtypes(leaf: Leaf, wire_dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of a leaf's elements, in memory and on the wire."""
    dtype = leaf.dtype.to_real()
    if wire_dtype is None or not leaf.dtype.is_floating_point or dtype.itemsize <= wire_dtype.itemsize:
        return dtype, dtype
    if not has_kernel(dtype, wire_dtype):
        raise SpecError(
            "wire_dtype got a dtype that gradients on GPUs cannot travel as",
            got=str(wire_dtype),
            expected="one of " + ", ".join(map(str, DTYPES)),
        )
    return dtype, wire_dtype
