"""Gradient buckets on a GPU: packed, reduced and unpacked beside the backward pass that fills them.

A bucket whose leaves are all there is packed by one launch and reduced at once, both on a side stream; the stream of
the backward pass goes on, and waits for the side stream's event where the sums are used. The host waits for nothing.
Invariant: buckets are reduced in the same order on all ranks, whatever the order in which they fill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .bucket import FIRST_BYTES, Leaf
from .cuda_pack import DTYPES, Table
from .nccl import NcclCommunicator

_ALIGN = 512  # bytes; leaves begin where torch's own allocations would
STREAM = "buckets"


@dataclasses.dataclass(slots=True)
class _Members:
    """The leaves of one dtype in a bucket, and where they lie; no table where torch copies them."""

    dtype: torch.dtype
    leaves: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)
    table: Table | None = None
    back: Table | None = None


@dataclasses.dataclass(slots=True)
class _Bucket:
    dtype: torch.dtype
    size: int = 0
    members: dict[torch.dtype, _Members] = dataclasses.field(default_factory=dict)


class CudaBuckets:
    """One use of a set of buckets: `fill` each leaf that has a value, then `finish`; as `bucket.Buckets`.

    Args:
        comm: the group to sum over.
        leaves: what will come, in order of use.
        bucket_bytes: how large a bucket may grow.
        wire_dtype: travel as this dtype (floating-point leaves only).
    """

    def __init__(
        self,
        comm: NcclCommunicator,
        leaves: Sequence[Leaf],
        *,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None = None,
    ):
        self._comm, self._leaves = comm, leaves
        key = ("cuda", tuple(leaves), bucket_bytes, wire_dtype)
        plan = comm.plans.get(key)
        if plan is None:
            plan = comm.plans[key] = _plan(leaves, bucket_bytes, wire_dtype, comm.launch)
        self._buckets: list[_Bucket] = plan
        self._bucket_of = {
            index: number
            for number, bucket in enumerate(plan)
            for members in bucket.members.values()
            for index in members.leaves
        }
        self._left = [sum(len(members.leaves) for members in bucket.members.values()) for bucket in plan]
        self._values: dict[int, Tensor | None] = {}
        self._started: list[tuple[Tensor, Any]] = []  # sums, and the event after which they are there

    def fill(self, index: int, value: Tensor | None) -> None:
        """Take a leaf's value (None: zeros); starts every reduction that is now complete, in order."""
        leaf = self._leaves[index]
        if value is not None and (value.stride() != leaf.stride or value.is_conj() or value.is_neg()):
            value = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=self._comm.device).copy_(
                value
            )
        self._values[index] = value
        self._left[self._bucket_of[index]] -= 1
        while len(self._started) < len(self._left) and self._left[len(self._started)] == 0:
            self._start(self._buckets[len(self._started)])

    def _start(self, bucket: _Bucket) -> None:
        comm = self._comm
        with comm.streams.beside(STREAM):
            buffer = torch.empty(bucket.size, dtype=bucket.dtype, device=comm.device)
            for members in bucket.members.values():
                values = [self._values.pop(index) for index in members.leaves]
                for value in values:
                    if value is not None:
                        comm.streams.hold(value)
                if members.table is not None:
                    members.table.pack(values, buffer)
                    continue
                for view, value in zip(self._views(buffer, members), values, strict=True):
                    view.zero_() if value is None else view.copy_(value)
            comm.all_reduce(buffer)
            self._started.append((buffer, comm.streams.event()))

    def _views(self, buffer: Tensor, members: _Members) -> list[Tensor]:
        """The places of leaves in a buffer, shaped as they are."""
        views = []
        for index, start, length in zip(members.leaves, members.starts, members.lengths, strict=True):
            leaf, part = self._leaves[index], buffer[start : start + length]
            if leaf.dtype.is_complex:
                part = torch.view_as_complex(part.view(-1, 2))
            views.append(part.as_strided(leaf.shape, leaf.stride, part.storage_offset()))
        return views

    def finish(self) -> list[Tensor]:
        """Fill what is missing with zeros, and return the sums, shaped as the leaves; the current stream waits."""
        for index in range(len(self._leaves)):
            if index not in self._values and self._bucket_of[index] >= len(self._started):
                self.fill(index, None)
        out: dict[int, Tensor] = {}
        for bucket, (buffer, event) in zip(self._buckets, self._started, strict=True):
            self._comm.streams.wait(event)
            self._comm.streams.hold(buffer)
            for members in bucket.members.values():
                views = self._views(buffer, members)
                if members.back is not None:
                    cast = torch.empty(bucket.size, dtype=members.dtype, device=buffer.device)
                    views = self._views(cast, members)
                    members.back.unpack(buffer, views)
                elif members.dtype.to_real() != bucket.dtype:
                    views = [view.to(members.dtype) for view in views]
                out.update(zip(members.leaves, views, strict=True))
        return [out[index] for index in range(len(self._leaves))]


def _plan(leaves: Sequence[Leaf], bucket_bytes: int, wire_dtype: torch.dtype | None, launch: Any) -> list[_Bucket]:
    """Where each leaf goes: in reverse order of use, by dtype on the wire, the first bucket of each small."""
    buckets: list[_Bucket] = []
    last: dict[torch.dtype, _Bucket] = {}
    for index in reversed(range(len(leaves))):
        leaf = leaves[index]
        dtype = leaf.dtype.to_real()
        if wire_dtype is not None and leaf.dtype.is_floating_point and dtype.itemsize > wire_dtype.itemsize:
            dtype = wire_dtype
        length = leaf.numel * (2 if leaf.dtype.is_complex else 1)
        bucket = last.get(dtype)
        limit = FIRST_BYTES if bucket is not None and bucket is buckets[0] else bucket_bytes
        if bucket is None or (bucket.size and (bucket.size + length) * dtype.itemsize > limit):
            bucket = last[dtype] = _Bucket(dtype)
            buckets.append(bucket)
        members = bucket.members.setdefault(leaf.dtype, _Members(leaf.dtype))
        members.leaves.append(index)
        members.starts.append(bucket.size)
        members.lengths.append(length)
        step = _ALIGN // dtype.itemsize
        bucket.size += -(-length // step) * step
    for bucket in buckets:
        for members in bucket.members.values():
            kinds = members.dtype.to_real(), bucket.dtype
            if kinds[0] in DTYPES and kinds[1] in DTYPES:
                members.table = Table(members.starts, members.lengths, *kinds, launch)
                if kinds[0] != kinds[1]:
                    members.back = Table(members.starts, members.lengths, *kinds, launch)
    return buckets
