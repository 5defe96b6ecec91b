"""The shards of a call's values that a rank holds: the source of an `Array` that is not in a driver."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ...kernels.call import labelled, labels
from ...kernels.communicator import Communicator
from ...kernels.errors import MeshError
from .. import donation, strides
from ..array import Array, Meta
from ..batch import Deal, refuse_ragged
from ..launch import launched
from ..region import current
from ..spec import RAGGED, ragged_shape
from ..strides import frozen_as


def shapes_over(comm: Communicator, shard: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of the shards of all ranks of a communicator."""
    sizes = [torch.empty(shard.dim(), dtype=torch.int64, device="cpu") for _ in range(comm.size)]
    comm.all_gather(sizes, torch.tensor(shard.shape, device="cpu"))
    return [tuple(size.tolist()) for size in sizes]


class LocalValues:
    """This rank's shards of a call's values; see `Source`.

    Args:
        shapes: for each value the shapes of all ranks' shards; None if they are cut as by `Layout.slices`.
        hints: what all ranks know of the values, if `metas` says more that only this rank knows; calls are compiled
            for these.
        name: the driver's name for the value, if there is only one: (number of its call, index).
        region: on launched ranks, in which region all made the values, or 0: they check that all gather the same one
            (and of a batch, the same batch).
    """

    __slots__ = (
        "_arrays",
        "_metas",
        "_session",
        "_shapes",
        "_tensors",
        "deal",
        "donated",
        "hints",
        "name",
        "region",
        "sure",
    )

    def __init__(
        self,
        session: Any,
        tensors: Sequence[torch.Tensor],
        metas: Sequence[Meta],
        shapes: Sequence[Sequence[tuple[int, ...]] | None] | None = None,
        *,
        hints: Sequence[Meta] | None = None,
        deal: Deal | None = None,
        name: tuple[int, int] | None = None,
        region: int = 0,
    ):
        self._session, self._shapes, self._metas = session, shapes, metas
        self._tensors = list(tensors)  # until there are Arrays, which hold them from then on
        self._arrays: list[Any] = []
        self.hints, self.deal, self.name, self.region = metas if hints is None else hints, deal, name, region
        self.donated: dict[int, str] = {}
        self.sure = True

    def arrays(self, mesh: Any) -> list[Array]:
        """An Array for each value; to be called once."""
        arrays = [Array(mesh, self, index, tensor) for index, tensor in enumerate(self._tensors)]
        self._arrays = list(map(weakref.ref, arrays))
        self._tensors.clear()
        return arrays

    def hold(self, array: Array) -> None:
        """Take an Array that is there already for the only value."""
        self._arrays = [weakref.ref(array)]

    @property
    def ids(self) -> list[int]:
        return []

    def origin(self, index: int) -> str:
        """In words, which value this is: the same on all launched ranks. Empty if they did not make it together."""
        if self.deal is not None:
            whose = "batch {1} of epoch {0}, Loader({2})".format(*self.deal.position, self.deal.source)
        else:
            whose = f"call {self.region}" if self.region else ""
        return f"value {index} of {whose}" if whose else ""

    def meta(self, index: int) -> Meta:
        return self._metas[index]

    def local(self, index: int) -> torch.Tensor:
        return donation.disown(self.value(index))

    def value(self, index: int) -> torch.Tensor:
        """As `local`, for a caller that does not hand the tensor out."""
        tensor: torch.Tensor = self._arrays[index]()._shard
        return tensor

    def full(self, indexes: Sequence[int]) -> list[torch.Tensor]:
        return [self._whole(index) for index in indexes]

    def _whole(self, index: int) -> torch.Tensor:
        mine, spec = self.value(index), self.hints[index].spec
        if not spec.entries:
            # A copy: what the caller does to it must not change the value.
            whole = mine.detach()
            return frozen_as(mine, whole.cpu() if whole.is_cuda else strides.copied(whole))
        shards = self.shards(index)
        if RAGGED in self.hints[index].shape:
            refuse_ragged(ragged_shape(mine.shape, [shard.shape for shard in shards], spec))
        return self._session.layout.join(shards, spec)

    def shards(self, index: int) -> list[torch.Tensor]:
        layout, about, mine = self._session.layout, self.hints[index], self.value(index)
        known = self._shapes[index] if self._shapes is not None else None
        origin = self.origin(index)

        def gather() -> list[torch.Tensor]:
            comm = self._session.comm()
            if RAGGED in about.shape:
                shapes: Any = shapes_over(comm, mine)
            else:
                ranks = range(layout.size)
                shapes = known or [layout.shard_shape(about.shape, about.spec, rank) for rank in ranks]
            out = [torch.empty(shape, dtype=mine.dtype, device="cpu") for shape in shapes]
            with labelled(f"of {origin}" if origin else labels.current):
                comm.all_gather(out, mine.detach().cpu())
            return out

        if self._session.launched and current() is None:
            if self._session.closed:
                problem = "this mesh is closed, and a value that is cut can't be put together"
                raise MeshError(problem, remedy="fetch values before the mesh closes")
            out = launched.call(self._session, gather, "the value of an Array")
        else:
            out = gather()
        if not strides.is_standard(mine):
            order = tuple(mine.shape), strides.dense(mine.shape, mine.stride())
            out = [strides.copied(shard, strides.joined(shard.shape, *order)) for shard in out]
        return [frozen_as(mine, shard) for shard in out]
