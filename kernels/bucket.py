"""Gradient buckets: many leaves, few reductions.

Leaves are packed by dtype into flat buffers, in reverse order of use (the backward pass computes the last leaf first).
The first buffer is small, so that a reduction starts early. A buffer is reduced once all its leaves are in, and all
ranks reduce their buffers in the same order, whatever the order in which these fill. Buffers lie where the communicator
reduces fastest. A reduction consumes its buffer, and its result may take the buffer's place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from . import torch_private
from .call import labelled
from .communicator import Communicator
from .copying import copy
from .flat import is_dense
from .operations import Work
from .reduction import ALIGNED, Op

FIRST_BYTES = 1 << 20
_LEAF_BYTES = 1 << 16  # for smaller leaves, a hook for each costs more than it gains that their sum starts early
_GAP_BYTES = 1 << 14  # zeroing so many bytes takes about as long as making a view
_ALIGN = 64  # bytes; leaves start at cache lines
_PLANS = 256


class Leaf(NamedTuple):
    """Shape, dtype and strides of one leaf; `of` reads them off a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Leaf:
        return _leaf(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def elements(leaf: Leaf) -> int:
    """How many real numbers a leaf travels as; a complex number counts as two."""
    return leaf.numel * (2 if leaf.dtype.is_complex else 1)


@functools.lru_cache(maxsize=4096)
def _leaf(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Leaf:
    if is_dense(shape, stride):
        return Leaf(shape, stride, dtype)
    # Dense strides, in the tensor's order of dimensions. Device "meta" is used only where it must be, since torch then
    # imports SymPy (a third of a second): for empty leaves, whose strides differ from those on the CPU, and where torch
    # fills new tensors. Elsewhere new tensors on the CPU are not filled, and so touch no memory.
    device = "meta" if 0 in shape or torch.are_deterministic_algorithms_enabled() else "cpu"
    primal = torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device=device))
    return Leaf(shape, tuple(primal.stride()), dtype)


class Buckets:
    """A set of buckets, for one use: `fill` each leaf that has a value, then `finish`.

    Args:
        comm: the group to sum over; its `scratch` makes the buffers.
        leaves: the leaves that will come, in order of use.
        bucket_bytes: how large a bucket may grow.
        wire_dtype: travel as this dtype (floating-point leaves only).
        op: how contributions are combined.
        products: indexes of matrices that may come as factors, on ranks of one host; each has a bucket of its own.
        label: what the leaves belong to; ranks compare it at the first bucket.
    """

    def __init__(
        self,
        comm: Communicator,
        leaves: Sequence[Leaf],
        *,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None = None,
        op: Op = "sum",
        products: frozenset[int] = frozenset(),
        label: str = "",
    ):
        self._op, self._label = op, label
        self._comm, self._leaves = comm, leaves
        self._plan = _plan(comm, tuple(leaves), bucket_bytes, wire_dtype, products)
        self._buffers: dict[int, torch.Tensor] = {}  # of the buckets that are being filled
        self._left = [len(bucket.leaves) for bucket in self._plan.buckets]
        self._ready = [False] * len(leaves)
        self._works: list[Work] = []
        self._factors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of buckets whose leaf came as factors

    def fill(self, index: int, value: torch.Tensor) -> None:
        """Copy a leaf's value in; starts every reduction that is now complete, in order."""
        target = self.grad_view(index)
        if (
            value.dtype == target.dtype
            and value.shape == target.shape
            and value.is_contiguous()
            and target.is_contiguous()
        ):
            copy(target, value)
        else:
            target.copy_(value)
        self.mark_ready(index)

    @property
    def is_single(self) -> bool:
        """Whether there is only one bucket, so that nothing can be reduced before all leaves are in."""
        return len(self._left) == 1 and not self._plan.matrices

    def fill_all(self, indexes: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        """`fill` for several leaves of a single bucket at once; `finish` then reduces it."""
        if not indexes:
            return
        its, views = self._plan.buckets[0].leaves, self._plan.views(0, self._buffer(0))
        if its != indexes:
            places = dict(zip(its, views, strict=True))
            views = [places[index] for index in indexes]
        torch_private.copy_each(views, list(values))
        for index in indexes:
            self._ready[index] = True
        self._left[0] -= len(indexes)

    def grad_view(self, index: int) -> torch.Tensor:
        """A leaf's place in its bucket, in the leaf's shape and the wire dtype: write there, then `mark_ready`."""
        return self._plan.view(index, self._buffer(self._plan.slots[index][0]))

    def _buffer(self, bucket: int) -> torch.Tensor:
        buffer = self._buffers.get(bucket)
        if buffer is None:
            self._comm.progress()  # reductions that are over give their memory back
            its = self._plan.buckets[bucket]
            buffer = self._buffers[bucket] = self._comm.scratch(its.size, dtype=its.wire)
            self._plan.fill_gaps(buffer)
        return buffer

    def mark_ready(self, index: int) -> None:
        """Call this when a leaf's value is in its gradient view; starts every reduction that is complete, in order."""
        self._ready[index] = True
        self._left[self._plan.slots[index][0]] -= 1
        self._start()

    def fill_product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Fill a leaf of `products` with `left.t() @ right`, which the ranks compute together."""
        self._comm.progress()  # sums to which all ranks have contributed by now
        self._factors[self._plan.slots[index][0]] = left, right
        self.mark_ready(index)

    def _start(self) -> None:
        while len(self._works) < len(self._left) and self._left[len(self._works)] == 0:
            bucket = len(self._works)
            matrix = self._plan.matrices.get(bucket)
            with labelled(self._label if bucket == 0 else ""):
                if matrix is not None:
                    comm: Any = self._comm  # with `products`, a communicator that has this method
                    given = self._factors.pop(bucket, None) or self._buffers.pop(bucket)
                    work = comm.sum_of_products(*matrix.shape, matrix.dtype, given, async_op=True)
                else:
                    work = self._comm.all_reduced(self._buffers.pop(bucket), self._op, async_op=True)
            self._works.append(work)

    def finish(self) -> list[torch.Tensor]:
        """Fill missing leaves with zeros, wait, and return the sums, shaped like the leaves."""
        for index, ready in enumerate(self._ready):
            if not ready:
                self.fill(index, torch.zeros((), dtype=self._leaves[index].dtype, device="cpu"))
        if self._buffers:  # filled by `fill_all`; a blocking call costs less than starting one and waiting for it
            with labelled(self._label):
                totals = [self._comm.all_reduced(self._buffers.pop(0), self._op)]
        else:
            totals = [work.wait() for work in self._works]
        found: dict[int, torch.Tensor] = {}
        for number, bucket in enumerate(self._plan.buckets):
            found.update(zip(bucket.leaves, self._plan.views(number, totals[number]), strict=True))
        values = [found[index] for index in range(len(found))]
        if self._plan.converts:
            return [value.to(leaf.dtype) for value, leaf in zip(values, self._leaves, strict=True)]
        return values


@dataclasses.dataclass(slots=True)
class Packed:
    """A bucket: its leaves, and where each begins and how long it is, in elements (complex ones count twice).

    Attributes:
        dtype: the leaves' dtype; on CPUs the same as `wire`, since leaves of several dtypes may share a bucket.
        wire: the bucket's dtype.
    """

    dtype: torch.dtype
    wire: torch.dtype
    size: int = 0
    leaves: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)

    def add(self, index: int, length: int, align_bytes: int) -> None:
        self.leaves.append(index)
        self.starts.append(self.size)
        self.lengths.append(length)
        self.size += _padded(length, max(1, align_bytes // self.wire.itemsize))


def packed(
    leaves: Sequence[Leaf],
    order: Iterable[int],
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]],
    *,
    bucket_bytes: int,
    first_bytes: int = FIRST_BYTES,
    align_bytes: int,
) -> list[Packed]:
    """Pack leaves into buckets, in an order, by dtype and wire dtype (`dtypes`); the first bucket is small."""
    found: list[Packed] = []
    last: dict[tuple[torch.dtype, torch.dtype], int] = {}
    for index in order:
        kind, length = dtypes[index], elements(leaves[index])
        number = last.get(kind)
        limit = first_bytes if number == 0 else bucket_bytes
        if number is None or (found[number].size and (found[number].size + length) * kind[1].itemsize > limit):
            number = last[kind] = len(found)
            found.append(Packed(*kind))
        found[number].add(index, length, align_bytes)
    return found


class _Plan:
    """Where each leaf goes; cached by the communicator from step to step."""

    def __init__(
        self,
        leaves: tuple[Leaf, ...],
        bucket_bytes: int,
        wire_dtype: torch.dtype | None,
        products: frozenset[int],
    ):
        self.leaves = leaves
        dtypes = [_on_wire(leaf, wire_dtype) for leaf in leaves]
        nbytes = sum(
            _padded(elements(leaf), ALIGNED) * dtype.itemsize for leaf, dtype in zip(leaves, dtypes, strict=True)
        )
        # Leaves that fit one bucket lie in their own order, as an optimizer wants them: it then needs no copy.
        single = min(max(FIRST_BYTES, len(leaves) * _LEAF_BYTES), bucket_bytes)
        in_order = len(set(dtypes)) == 1 and nbytes <= single and not products
        buckets = packed(
            leaves,
            range(len(leaves)) if in_order else [i for i in reversed(range(len(leaves))) if i not in products],
            [(dtype, dtype) for dtype in dtypes],
            bucket_bytes=bucket_bytes,
            first_bytes=bucket_bytes if in_order else FIRST_BYTES,
            align_bytes=ALIGNED * dtypes[0].itemsize if in_order else _ALIGN,
        )
        for index in products:
            alone = Packed(dtypes[index], dtypes[index])
            alone.add(index, elements(leaves[index]), 1)
            buckets.append(alone)
        if products:  # in the order in which buckets get full when the leaves come last to first
            buckets.sort(key=lambda bucket: -min(bucket.leaves))
        self.buckets = buckets
        self._has_complex, self.converts = any(leaf.dtype.is_complex for leaf in leaves), wire_dtype is not None
        # For each bucket, the arguments of `as_strided` for each of its leaves.
        self._layouts = [
            [(*leaves[index][:2], start) for index, start in zip(bucket.leaves, bucket.starts, strict=True)]
            for bucket in buckets
        ]
        # By bucket, the leaves that may come as factors.
        firsts = [bucket.leaves[0] for bucket in buckets]
        self.matrices = {number: leaves[index] for number, index in enumerate(firsts) if index in products}
        self.slots = {  # of every leaf
            index: (number, start)
            for number, bucket in enumerate(buckets)
            for index, start in zip(bucket.leaves, bucket.starts, strict=True)
        }
        # The padding behind leaves; an optimizer that updates the whole buffer updates these elements, too.
        self._gaps = [
            (start + length, start + _padded(length, ALIGNED))
            for bucket in buckets
            for start, length in zip(bucket.starts, bucket.lengths, strict=True)
            if in_order and length % ALIGNED
        ]

    def fill_gaps(self, buffer: torch.Tensor) -> None:
        """Zero the gaps between leaves, or the whole buffer if there are so many gaps that this is faster."""
        if len(self._gaps) * _GAP_BYTES > buffer.nbytes:
            buffer.zero_()
        else:
            for start, stop in self._gaps:
                buffer[start:stop].zero_()

    def view(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """A leaf in its bucket's buffer."""
        leaf, start = self.leaves[index], buffer.storage_offset() + self.slots[index][1]
        if leaf.dtype.is_complex:
            part = torch.view_as_complex(buffer.as_strided((leaf.numel, 2), (2, 1), start))
            return part.as_strided(leaf.shape, leaf.stride)
        return buffer.as_strided(leaf.shape, leaf.stride, start)

    def views(self, bucket: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """A bucket's leaves in its buffer."""
        if self._has_complex:
            return [self.view(index, buffer) for index in self.buckets[bucket].leaves]
        first = buffer.storage_offset()
        return [buffer.as_strided(shape, stride, first + start) for shape, stride, start in self._layouts[bucket]]


def _on_wire(leaf: Leaf, wire_dtype: torch.dtype | None) -> torch.dtype:
    dtype = leaf.dtype.to_real() if leaf.dtype.is_complex else leaf.dtype
    if wire_dtype is not None and leaf.dtype.is_floating_point and dtype.itemsize > wire_dtype.itemsize:
        return wire_dtype
    return dtype


def _padded(elements: int, step: int) -> int:
    return -(-elements // step) * step


def _plan(
    comm: Communicator,
    leaves: tuple[Leaf, ...],
    bucket_bytes: int,
    wire_dtype: torch.dtype | None,
    products: frozenset[int],
) -> _Plan:
    key = (leaves, bucket_bytes, wire_dtype, products)
    found: _Plan = kept_plan(comm, key, functools.partial(_Plan, *key))
    return found


def kept_plan(comm: Communicator, key: Any, make: Callable[[], Any]) -> Any:
    """A plan that the communicator keeps from step to step; those made long ago are forgotten."""
    plans = comm.plans
    found = plans.get(key)
    if found is None:
        if len(plans) >= _PLANS:
            del plans[next(iter(plans))]
        found = plans[key] = make()
    return found
