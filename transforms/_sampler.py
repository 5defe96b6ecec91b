"""The sampler: which samples make up the minibatch of a step, as a pure function of (seed, epoch, step).

It keeps no position, so any rank can ask for any step at any time: to resume, one only needs (epoch, step), and a step
that runs again after a failure gets the same samples. Invariant: within an epoch every id comes exactly once (at most
once with `drop_last`), and the ranks' shards of a step together are the minibatch, whatever the number of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import torch

from ..kernels.arguments import checked_flag, integer
from ..kernels.callsite import public
from ..kernels.errors import SpecError, no_attribute
from ..mesh.display import drawing
from ..mesh.mesh import nearest
from ..mesh.spec import Layout, block_of
from ._feistel import derive_key, permute

_LONGEST = 2**63 - 1  # ids are torch.int64
_ORDERS = ("feistel", "torch")
_STEPS_DRAWN = 5
_AT_ONCE, _MOST_STEPS = 16384, 256  # how many ids a rank computes together, and of how many steps at most


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Sampler:
    """Deals out the ids 0..length-1 of a data set in minibatches: shuffled, stateless, nothing padded or repeated.

    >>> sampler = Sampler(10, 4, seed=1)
    >>> len(sampler), [sampler.batch(0, step).tolist() for step in range(len(sampler))]
    (3, [[5, 3, 1, 6], [9, 7, 2, 4], [0, 8]])
    >>> [sampler.shard(0, 0, rank, 3).tolist() for rank in range(3)]
    [[5, 6], [3], [1]]
    >>> Sampler(10**12, 3).batch(epoch=3, step=10**11)
    tensor([398702311439, 434228383181, 714206749297])

    Args:
        length: number of samples in the data set; 0 is allowed and gives no steps.
        batch_size: number of samples in a minibatch, over all ranks together; at least 1.
        seed: any integer; with the epoch it determines the order.
        shuffle: False gives the ids in sequence, in every epoch.
        drop_last: leave out the last minibatch if it is short.
        order: "feistel" computes the order index by index, in O(batch) time and memory at any length, and gives every
            (seed, epoch) its own. "torch" is the order of `torch.utils.data.DistributedSampler`: it takes O(length)
            memory, keeps the last permutation, and is seeded with `seed + epoch` (so seed 0 in epoch 1 gives the order
            of seed 1 in epoch 0).

    Raises:
        SpecError: an argument is out of its range.

    Source:
        `_feistel.permute` for the order; `torch.utils.data.DistributedSampler` for order="torch".
    """

    length: int
    batch_size: int
    _: dataclasses.KW_ONLY
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    order: str = "feistel"

    @public
    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, {"set_epoch": "an epoch is an argument, sampler.batch(epoch, step)"}) from None

    def __post_init__(self) -> None:
        # object.__setattr__: the fields are frozen; NumPy integers become Python's, which never overflow.
        object.__setattr__(self, "length", integer("Sampler", "length", self.length, 0, _LONGEST))
        object.__setattr__(self, "batch_size", integer("Sampler", "batch_size", self.batch_size, 1))
        object.__setattr__(self, "seed", integer("Sampler", "seed", self.seed))
        object.__setattr__(self, "shuffle", checked_flag("Sampler", "shuffle", self.shuffle))
        object.__setattr__(self, "drop_last", checked_flag("Sampler", "drop_last", self.drop_last))
        if self.order not in _ORDERS:
            raise SpecError(
                'Sampler got an unknown value for argument "order"',
                expected=f"one of {_ORDERS}",
                got=repr(self.order),
                remedy='"feistel" for any length, "torch" for the order of DistributedSampler',
            )

    def __len__(self) -> int:
        """Steps per epoch. A short minibatch at the end counts, unless it is left out by `drop_last`."""
        steps, rest = divmod(self.length, self.batch_size)
        return steps + (rest > 0 and not self.drop_last)

    @public
    def batch(self, epoch: int, step: int) -> torch.Tensor:
        """The ids of one minibatch, over all ranks.

        >>> Sampler(6, 4, shuffle=False).batch(0, 1)
        tensor([4, 5])

        Args:
            epoch: 0 or more; every epoch has its own order.
            step: 0 to len(self) - 1.

        Returns:
            torch.int64 of shape [batch_size], or shorter at the end of the epoch; a new tensor at every call.

        Raises:
            SpecError: `epoch` or `step` is out of its range.
        """
        epoch, first, count = self._span("batch", epoch, step)
        return self._ids(epoch, np.arange(first, first + count, dtype=np.uint64))

    @public
    def shard(self, epoch: int, step: int, rank: int, size: int, shards: int | None = None) -> torch.Tensor:
        """The part of `batch(epoch, step)` that belongs to one rank: `batch[rank::size]`.

        With `shards=V` the minibatch is dealt to V virtual shards, `batch[v::V]`, and each rank gets a contiguous block
        of shards, laid end to end. Where `size` does not divide V the first ranks get one shard more, and where
        V < size the last ranks get none. Which samples share a shard does not depend on the number of ranks.

        >>> sampler = Sampler(8, 8, shuffle=False)
        >>> [sampler.shard(0, 0, rank, 2).tolist() for rank in range(2)]
        [[0, 2, 4, 6], [1, 3, 5, 7]]
        >>> [sampler.shard(0, 0, rank, 2, shards=4).tolist() for rank in range(2)]
        [[0, 4, 1, 5], [2, 6, 3, 7]]

        Args:
            epoch: 0 or more.
            step: 0 to len(self) - 1.
            rank: 0 to size - 1.
            size: number of ranks that share the minibatch, at least 1.
            shards: number of virtual shards, at least 1; None for one per rank.

        Returns:
            torch.int64 of one dimension; it may be empty, and its length may differ between ranks.

        Raises:
            SpecError: an argument is out of its range.
        """
        epoch, first, _ = self._span("shard", epoch, step)
        size = integer("shard", "size", size, 1)
        rank = integer("shard", "rank", rank, 0, size - 1)
        shards = None if shards is None else integer("shard", "shards", shards, 1)
        step = first // self.batch_size
        if not self.shuffle or self.order != "feistel":
            return self._ids(epoch, self._positions(step, rank, size, shards))
        # Computing a few ids takes as long as computing thousands: the ids of a block of steps are computed and kept.
        together = max(1, min(_AT_ONCE * size // self.batch_size, _MOST_STEPS))
        found, ends = _parts_of(self, epoch, step // together, together, rank, size, shards)
        at = step % together
        return torch.from_numpy(found[ends[at] : ends[at + 1]].copy())

    def _positions(self, step: int, rank: int, size: int, shards: int | None) -> np.ndarray:
        """Where a rank's part of a minibatch is in the epoch's order."""
        first = step * self.batch_size
        count = min(self.batch_size, self.length - first)
        if shards is None:
            return _strided(first, count, rank, size)
        owned = block_of(shards, size, rank)
        # Shards from `count` on are empty: `shards` may be any number.
        mine = [_strided(first, count, shard, shards) for shard in range(owned.start, min(owned.stop, count))]
        return np.concatenate([np.empty(0, dtype=np.uint64), *mine])

    def grids(self, layout: Layout | None, epoch: int, shards: int | None = None) -> tuple[list[drawing.Grid], int]:
        """Pictures of which rank takes which sample in the first steps of an epoch, and the number of ranks."""
        grid = drawing.batch_grid(
            layout,
            min(len(self), _STEPS_DRAWN),
            lambda step, part, parts: self.shard(epoch, step, part, parts, shards).tolist(),
            f"{self!r}, epoch {epoch}, {len(self)} steps",
        )
        return [grid], layout.size if layout is not None else 1

    def _repr_html_(self) -> str:
        mesh = nearest()
        return drawing.html(*self.grids(None if mesh is None else mesh.layout, 0))

    def _span(self, caller: str, epoch: int, step: int) -> tuple[int, int, int]:
        """The checked epoch, the first position of the step in the epoch's order, and the number of positions."""
        epoch = integer(caller, "epoch", epoch, 0)
        step, steps = integer(caller, "step", step), len(self)
        if not 0 <= step < steps:
            raise SpecError(
                f"{caller} got a step outside the epoch",
                expected=f"0 <= step < {steps}" if steps else "no step at all: the epoch is empty",
                got=f"step={step} of {self}",
                remedy="go on with step 0 of the next epoch; len(sampler) is the number of steps",
            )
        first = step * self.batch_size
        return epoch, first, min(self.batch_size, self.length - first)

    def _ids(self, epoch: int, positions: np.ndarray) -> torch.Tensor:
        """The ids at `positions` (uint64) of the epoch's order."""
        if self.shuffle and self.order == "feistel":
            positions = permute(positions, self.length, derive_key(self.seed, epoch))
        ids = torch.from_numpy(positions.astype(np.int64))
        # Indexing with a tensor copies, so nobody can write into the cached permutation.
        return _torch_order(self.length, self.seed + epoch)[ids] if self.shuffle and self.order == "torch" else ids


@functools.lru_cache(maxsize=4)
def _parts_of(
    sampler: Sampler, epoch: int, block: int, together: int, rank: int, size: int, shards: int | None
) -> tuple[np.ndarray, list[int]]:
    """The ids of a rank's parts of successive minibatches, end to end, and where each part begins and ends."""
    steps = range(block * together, min((block + 1) * together, len(sampler)))
    positions = [sampler._positions(step, rank, size, shards) for step in steps]
    ends = [0, *itertools.accumulate(map(len, positions))]
    return sampler._ids(epoch, np.concatenate(positions)).numpy(), ends


@functools.lru_cache(maxsize=1)
def _torch_order(length: int, seed: int) -> torch.Tensor:
    """The permutation that `DistributedSampler` draws; only the last one is cached, since it is as long as the data."""
    generator = torch.Generator(device="cpu")
    # torch takes -2**63 to 2**64 - 1; what it would refuse is reduced to that range.
    generator.manual_seed(seed if -(2**63) <= seed < 2**64 else seed % 2**64)
    return torch.randperm(length, generator=generator, device="cpu")


def _strided(first: int, count: int, part: int, parts: int) -> np.ndarray:
    """The positions that part `part` gets when `count` >= 1 positions from `first` on are dealt out to `parts`."""
    # min: a stride beyond `count` gives the same positions, but could overflow in NumPy.
    return np.arange(first + min(part, count), first + count, min(parts, count), dtype=np.uint64)
