"""Virtual shards: a batch that is computed in V parts of fixed shape, one after another, on however many ranks.

Which samples share a shard, the shape it runs at and its random numbers follow from the batch and V alone. Invariant:
between the ranks' parts and the shards nothing is computed from the batch: what a step takes of it are `Dealt` tensors
(`_dealt`), which are of use only as arguments of `value_and_grad`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import random as python_random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.arena import word_key
from ..kernels.errors import SpecError, message
from ..mesh import trees
from ..mesh.region import Region, generators, mark, reseed, restore_generators
from ..mesh.spec import Sharded, dealt_sizes, is_sharded, split_sizes
from ._dealt import Dealt, plain


@dataclasses.dataclass(slots=True)
class VirtualShards:
    """The virtual shards of one step, as one rank sees them.

    Attributes:
        axis: over which the batch is split.
        sizes: samples of every shard.
        owners: for each rank along the axis the shards that it runs, contiguous.
        place: which of the ranks this one is.
        batch: this rank's part of the batch, leaf by leaf.
        tree: the same, as the step is given it.
        calls: how many functions have been differentiated over them in this step.
    """

    axis: str
    sizes: list[int]
    owners: list[range]
    place: int
    batch: list[Dealt] = dataclasses.field(default_factory=list)
    tree: Any = None
    calls: int = 0

    @staticmethod
    def of(region: Region, axis: str, count: int, total: int) -> VirtualShards:
        session = region.session
        owners, start = [], 0
        for owned in split_sizes(count, session.layout.axes[axis]):
            owners.append(range(start, start + owned))
            start += owned
        return VirtualShards(axis, dealt_sizes(total, count), owners, session.layout.coords(session.rank)[axis])

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def scale(self) -> float:
        """What the root of the tree is multiplied by, where a shard of the full size counts as 1."""
        return self.sizes[0] / self.total if self.total else 0.0

    def weight(self, shard: int) -> float:
        return self.sizes[shard] / self.sizes[0]

    def filled(self, place: int) -> list[int]:
        """The shards of a rank that have samples."""
        return [shard for shard in self.owners[place] if self.sizes[shard]]

    def deal(self, leaf: Tensor) -> Tensor:
        """This rank's shards, end to end, of a whole leaf."""
        count = len(self.sizes)
        return torch.cat([leaf[:0], *(leaf[shard::count] for shard in self.owners[self.place])])

    def cut(self, leaf: Dealt, name: str, path: str) -> list[Tensor]:
        """A leaf of the batch as this rank's shards (those with samples), each in memory of its own."""
        if not any(leaf is one for one in self.batch):
            raise SpecError(
                message(
                    f"argument {path} of {name} was computed from the batch before data_parallel(shards=) cut it, so "
                    "that its bits would depend on the number of ranks",
                    got=f"{leaf.dtype} {tuple(leaf.shape)}",
                    remedy=f"pass the batch itself, and compute from it in {name}",
                )
            )
        parts = plain(leaf).split([self.sizes[shard] for shard in self.filled(self.place)])
        # How a kernel adds may depend on where its memory begins.
        return [mark(part.clone(), frozenset({self.axis})) for part in parts]


def agreed(region: Region, axis: str, count: Any) -> bool:
    """Whether a step runs in the virtual shards of the step around it; refuses one that can't.

    Raises:
        SpecError: the two disagree.
    """
    outer: VirtualShards | None = region.virtual
    if outer is None:
        return False
    if outer.axis == axis and count in (None, len(outer.sizes)):
        return True
    if count is None:
        return False
    raise SpecError(
        message(
            "a data_parallel step runs in another with other virtual shards",
            got=f"shards={count} over {axis!r} in shards={len(outer.sizes)} over {outer.axis!r}",
            remedy="give shards= to the outermost one only",
        )
    )


def check_count(count: Any) -> int | None:
    """`shards` as a whole number of at least 1, or None."""
    if count is None:
        return None
    try:
        number = operator.index(count)
    except TypeError:
        number = 0
    if number < 1 or isinstance(count, bool):
        raise SpecError(message("data_parallel got a bad shards", got=repr(count), expected="at least 1, or None"))
    return number


@contextlib.contextmanager
def stepping(region: Region, virtual: VirtualShards) -> Iterator[None]:
    """The body of a step over virtual shards: outside them all ranks of the axis compute, and draw, the same."""
    threads, wanted = torch.get_num_threads(), getattr(region.mesh, "pinned_threads", 1)
    state, random = generators(), region.random
    others = np.random.get_state(), python_random.getstate()
    coords = region.session.layout.coords(region.session.rank)
    region.virtual = virtual
    _reseed(region, "step", *(index for name, index in coords.items() if name != virtual.axis))
    if threads != wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if threads != wanted:
            torch.set_num_threads(threads)
        restore_generators(state)
        np.random.set_state(others[0])
        python_random.setstate(others[1])
        region.virtual, region.random = None, random


def _reseed(region: Region, *more: Any) -> None:
    """Seed the generators of torch, NumPy and Python: models and losses draw from all of them."""
    reseed(region, *more)
    _seed_others(region.random)


def _seed_others(key: tuple) -> None:
    number = word_key("rng", *key)
    np.random.seed(number & 0xFFFFFFFF)
    python_random.seed(number)


def after_shards(region: Region, state: Any) -> None:
    """Go on with torch's generator from a state, and with NumPy's and Python's from the number of gradients.

    The shards have left them elsewhere on every rank; to have saved the latter would cost more than to seed them.
    """
    restore_generators(state)
    _seed_others((*region.random, "after", region.virtual.calls))


@contextlib.contextmanager
def running(region: Region, shard: int) -> Iterator[None]:
    """One virtual shard, with random numbers of its own; `after_shards` is for those that come afterwards."""
    virtual: VirtualShards = region.virtual
    coords, totals, random = region.session.layout.coords(region.session.rank), region.totals, region.random
    others = [index for name, index in coords.items() if name != virtual.axis]
    again = [virtual.calls] if virtual.calls else []
    _reseed(region, "shard", shard, *others, *again)
    region.shard = shard
    region.totals = {**totals, virtual.axis: (virtual.sizes[shard], virtual.total)}
    try:
        yield
    finally:
        region.shard, region.totals, region.random = None, totals, random


def without_batch(result: Any, name: str) -> Any:
    """A step's results, refused where they were computed from the batch and don't say that ranks differ."""

    def one(node: Any) -> Any:
        if is_sharded(node):
            return Sharded(trees.map(plain, node.local), node.spec)
        if isinstance(node, Dealt):
            raise SpecError(
                message(
                    f"{name} returns what it computed from the batch outside value_and_grad, whose bits depend on the "
                    "number of ranks",
                    got=f"{node.dtype} {tuple(node.shape)}",
                    remedy="return it as aux of the function that is differentiated (has_aux=True)",
                )
            )
        return node

    return trees.map(one, result, is_leaf=is_sharded)
