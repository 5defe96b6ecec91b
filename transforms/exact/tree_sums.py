"""Sums of many leaves over virtual shards, in the order of the tree: `_sums.Sums` for exact steps.

If the ranks fill one node of the tree each, the first nodes of one level in their order, these travel in the buckets of
an all-reduce that adds neighbours, while the last shard's backward pass runs. Otherwise each rank receives one slice of
all nodes, adds them by position, and sends the sums to all. Invariant: both give the bits that one rank gives.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...kernels.bucket import Buckets, Leaf
from ...kernels.call import labelled
from ...kernels.reduction import Pairwise, slice_length
from ...mesh.region import Region
from ...mesh.replication.net import NOWHERE, Varying, active, joined, unfollowed
from .._plan import Plan, plan_of
from .._sums import summed
from .shards import VirtualShards
from .tree import Node, Partials, combine, maximal_nodes

HALVES = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(slots=True)
class _Sum:
    like: Leaf  # in the dtype that the tree adds in
    dtype: torch.dtype
    scale: float
    others: tuple[str, ...]
    partials: Partials = dataclasses.field(default_factory=Partials)
    in_group: int = 0
    axes: tuple[str, ...] = ()
    varying: Varying = NOWHERE  # with a net, how this rank's values may differ

    def alone(self) -> Tensor:
        """The root's sum, scaled. Frees the partial sums at once, so that memory holds both for one leaf only."""
        total = combine(dict(self.partials.nodes))
        self.partials.nodes.clear()
        return total * self.scale


class TreeSums:
    """For one use: `add` every leaf, `open`; for each shard `fill` its leaves and `end_shard`; then `finish`.

    Args:
        label: what the leaves are of, for ranks to compare.
    """

    def __init__(self, region: Region, plan: Plan, virtual: VirtualShards, label: str):
        self._region, self._plan, self._virtual, self._label = region, plan, virtual, label
        self._sums: list[_Sum] = []
        self.filled: set[int] = set()
        self._buckets: dict[float, Buckets] = {}
        self._nodes = [maximal_nodes(virtual.filled(position)) for position in range(len(virtual.owners))]
        self._last = max(virtual.filled(virtual.position), default=None)

    def add(self, like: Tensor, axes: tuple[str, ...], scale: float, *, exact: bool = False) -> int:
        """Announce a leaf, to be summed over `axes` and multiplied by `scale`.

        Sixteen-bit floats are added in float32. A leaf that travels as a narrower dtype is added in that dtype, or its
        partial sums would be rounded only where they travel, which depends on the number of ranks.
        """
        dtype, wire = like.dtype, None if exact else self._plan.wire_dtype
        if wire is not None and dtype.is_floating_point and dtype.itemsize > wire.itemsize:
            dtype = wire
        elif dtype in HALVES:
            dtype = torch.float32
        sizes = self._region.session.layout.axes
        others = tuple(name for name in axes if name != self._virtual.axis and sizes[name] > 1)
        leaf = Leaf.of(like)._replace(dtype=dtype)
        self._sums.append(_Sum(leaf, like.dtype, scale, others, axes=axes))
        return len(self._sums) - 1

    def open(self) -> None:
        """Call this when all leaves are announced; they must be the same on all ranks."""
        nodes = self._nodes
        level = nodes[0][0][0] if nodes[0] else 0
        # Beside empty shards, nodes of one level need not lie in the tree as their ranks lie beside each other.
        in_order = all(its == [(level, position)] for position, its in enumerate(nodes))
        if len(nodes) == 1 or not in_order:
            return
        groups: dict[float, list[_Sum]] = {}
        for one in self._sums:
            members = groups.setdefault(one.scale, [])
            one.in_group = len(members)
            members.append(one)
        for scale, members in groups.items():
            self._buckets[scale] = Buckets(
                self._comm(),
                [one.like for one in members],
                bucket_bytes=self._plan.bucket_bytes,
                op=Pairwise(scale),
                label=self._label,
            )

    def _comm(self):
        return self._region.session.comm(self._virtual.axis, channel="buckets")

    def fill(self, slot: int, value: Tensor) -> None:
        """What the running shard contributes to a leaf."""
        net, one = active(), self._sums[slot]
        if net is not None:
            one.varying = joined([one.varying, net.of(value)])
        with unfollowed():
            self._fill(slot, one, value)

    def _fill(self, slot: int, one: _Sum, value: Tensor) -> None:
        shard = plan_of(self._region).shard
        assert shard is not None
        self.filled.add(slot)
        one.partials.push(shard, value.detach().to(one.like.dtype))
        if shard == self._last and self._buckets:
            ((_, total),) = one.partials.nodes
            self._buckets[one.scale].fill(one.in_group, total)
            one.partials.nodes.clear()

    def end_shard(self) -> None:
        """Fill leaves that the shard did not use with zeros: 0 + -0 is 0, while -0 with nothing added would stay -0."""
        for slot in set(range(len(self._sums))) - self.filled:
            leaf = self._sums[slot].like
            self.fill(slot, torch.zeros((), dtype=leaf.dtype, device="cpu").expand(leaf.shape))
        self.filled.clear()

    def finish(self) -> list[Tensor]:
        """The sums, in the order in which the leaves were announced."""
        net = active()
        with unfollowed():
            found = self._finish()
        for one, total in zip(self._sums, found, strict=True):
            if net is not None:
                net.note(total, one.varying.without(one.axes))
        return found

    def _finish(self) -> list[Tensor]:
        found: list[Tensor]
        if not any(self._nodes):
            found = [torch.zeros(one.like.shape, dtype=one.like.dtype, device="cpu") for one in self._sums]
        elif self._buckets:
            results = {scale: buckets.finish() for scale, buckets in self._buckets.items()}
            found = [results[one.scale][one.in_group] for one in self._sums]
        elif len(self._nodes) == 1:
            found = [one.alone() for one in self._sums]
        else:
            found = self._exchanged()
        found = [total.to(one.dtype) for one, total in zip(self._sums, found, strict=True)]
        # Over other axes the sums are added in rank order, as always.
        others = [one.others for one in self._sums]
        return summed(self._region, self._plan, list(zip(found, others, strict=True)))

    def _exchanged(self) -> list[Tensor]:
        groups: dict[tuple[float, torch.dtype], list[int]] = {}
        for slot, one in enumerate(self._sums):
            groups.setdefault((one.scale, one.like.dtype), []).append(slot)
        found: dict[int, Tensor] = {}
        for (scale, dtype), indexes in groups.items():
            found.update(self._exchange(indexes, dtype, scale))
        return [found[slot] for slot in range(len(self._sums))]

    def _exchange(self, indexes: list[int], dtype: torch.dtype, scale: float) -> dict[int, Tensor]:
        """Leaves of one dtype laid end to end, in slices of one length: one for each rank to add."""
        comm, nodes = self._comm(), self._nodes
        starts, numel = [], 0
        for slot in indexes:
            starts.append(numel)
            numel += -(-self._sums[slot].like.numel // 16) * 16
        length = slice_length(numel, comm.size)
        mine = torch.zeros(len(nodes[comm.rank]), comm.size * length, dtype=dtype, device="cpu")
        for slot, start in zip(indexes, starts, strict=True):
            leaf, partials = self._sums[slot].like, self._sums[slot].partials
            for row, (_, value) in zip(mine, partials.nodes, strict=True):
                _view(row, start, leaf).copy_(value)
            partials.nodes.clear()
        slices = [torch.empty(len(its), length, dtype=dtype, device="cpu") for its in nodes]
        with labelled(self._label):
            comm.all_to_all(slices, list(mine.split(length, 1)) if length else slices)

        def write(out: Tensor) -> None:
            rows: dict[Node, Tensor] = {}
            for its, part in zip(nodes, slices, strict=True):
                rows.update(zip(its, part, strict=True))
            torch.mul(combine(rows), scale, out=out)

        flat = comm.all_gathered(length, dtype, write)
        return {slot: _view(flat, start, self._sums[slot].like) for slot, start in zip(indexes, starts, strict=True)}


def _view(flat: Tensor, start: int, leaf: Leaf) -> Tensor:
    return flat.as_strided(leaf.shape, leaf.stride, flat.storage_offset() + start)
