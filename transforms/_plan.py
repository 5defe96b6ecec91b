"""The plan of a step: what `data_parallel` decided about it, as one frozen value that its gradients read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from ..mesh.region import Region, current
from .exact.shards import VirtualShards


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How much this rank's samples weigh, and how gradients travel.

    Attributes:
        samples: axis -> (samples on this rank, samples in the whole batch), where a batch is split over the axis.
        bucket_mb: largest bucket of gradients, in MiB.
        wire_dtype: dtype in which gradients travel; None for their own.
        virtual: the virtual shards of the step; None if it has none.
        shard: the virtual shard that is running; None outside of shards.
        batch: this rank's part of the batch, leaf by leaf.
        in_shard: whether a virtual shard is running. Code that torch compiles asks for this alone: if it asked for the
            shard's number, it would be compiled for each.
    """

    samples: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    bucket_mb: float = 25.0
    wire_dtype: torch.dtype | None = None
    virtual: VirtualShards | None = None
    shard: int | None = None
    batch: tuple[Tensor, ...] = ()
    in_shard: bool = False

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * (1 << 20))

    @property
    def without_samples(self) -> bool:
        """Whether this rank has no samples of a batch, so that what it computes from the batch means nothing."""
        return any(here == 0 for here, _ in self.samples.values())

    def weight(self, axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[float, bool]:
        """This rank's share in a mean over `axes`, of these `sizes`, and whether it has any samples at all."""
        weight, any_samples = 1.0, True
        for name in axes:
            here, total = self.samples.get(name, (1, sizes[name]))
            weight *= here / total if total else 0.0
            any_samples = any_samples and here > 0
        return weight, any_samples

    def leaves_ranks_out(self, region: Region | None, over: tuple[str, ...]) -> bool:
        """Whether some rank along `over` may have no samples; the same answer on all ranks."""
        if region is None:
            return False
        sizes = region.session.layout.axes
        if region.batch.axis in over and region.batch.sizes is not None:
            return True  # in a stream's batch a rank may have no samples even if there are as many as ranks
        return any(total < sizes[name] for name, (_, total) in self.samples.items() if name in over)

    def of_batch(
        self, samples: Mapping[str, tuple[int, int]], virtual: VirtualShards | None, batch: tuple[Tensor, ...]
    ) -> Plan:
        """This plan with a batch. (`dataclasses.replace` takes four times as long.)"""
        return Plan(samples, self.bucket_mb, self.wire_dtype, virtual, None, batch)

    def splitting(self, axis: str, here: int, total: int) -> Mapping[str, tuple[int, int]]:
        """`samples` with one more axis."""
        return {**self.samples, axis: (here, total)}


_NO_STEP = Plan()


def plan_of(region: Region | None) -> Plan:
    """The plan of the step that runs in a region; without a step, one in which all ranks have the same weight."""
    plan = None if region is None else region.plan
    return plan if isinstance(plan, Plan) else _NO_STEP


def current_plan() -> Plan:
    """The plan of the region that runs on this thread."""
    return plan_of(current())
