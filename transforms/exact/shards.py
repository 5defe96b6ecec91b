"""Virtual shards as data: how a batch is dealt to them, and which of them a rank runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...mesh.spec import Layout, split_sizes


@dataclasses.dataclass(slots=True)
class VirtualShards:
    """The virtual shards of one step, as one rank sees them.

    Attributes:
        axis: the axis over which the batch is split.
        sizes: number of samples of every shard.
        owners: for each rank along the axis, the contiguous range of shards that it runs.
        position: this rank's index along the axis.
        batch: this rank's part of the batch, leaf by leaf.
        tree: the same, as the step is given it.
        calls: how many functions have been differentiated over them in this step.
    """

    axis: str
    sizes: list[int]
    owners: list[range]
    position: int
    batch: list[Tensor] = dataclasses.field(default_factory=list)
    tree: Any = None
    calls: int = 0

    @staticmethod
    def of(
        layout: Layout, rank: int, axis: str, count: int, total: int, sizes: Sequence[int] | None = None
    ) -> VirtualShards:
        """The shards of a batch of `total` samples on a mesh; `sizes` if samples are not dealt to shards one by one."""
        owners, start = [], 0
        for owned in split_sizes(count, layout.axes[axis]):
            owners.append(range(start, start + owned))
            start += owned
        return VirtualShards(axis, [*sizes] if sizes else split_sizes(total, count), owners, layout.coords(rank)[axis])

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def here(self) -> int:
        """Samples of the shards that this rank runs."""
        return sum(self.sizes[shard] for shard in self.owners[self.position])

    @property
    def scale(self) -> float:
        """What the root of the tree is multiplied by to give a mean; a shard of full size has weight 1 in the tree."""
        return max(self.sizes) / self.total if self.total else 0.0

    def weight(self, shard: int) -> float:
        return self.sizes[shard] / max(self.sizes)

    def filled(self, position: int) -> list[int]:
        """The shards of a rank that have samples."""
        return [shard for shard in self.owners[position] if self.sizes[shard]]

    def deal(self, leaf: Tensor) -> Tensor:
        """This rank's shards of a whole leaf, end to end."""
        count = len(self.sizes)
        return torch.cat([leaf[:0], *(leaf[shard::count] for shard in self.owners[self.position])])
