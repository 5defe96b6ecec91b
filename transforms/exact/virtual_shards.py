"""Virtual shards: a batch that is computed in V parts of fixed shape, one after another, on however many ranks.

Which samples share a shard, the shape it runs at and its random numbers depend on the batch and V alone. Invariant:
no result is computed from a rank's part of the batch before it is cut into shards: a step gets `Tracked` tensors, whose
only use is as arguments of `value_and_grad`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random as python_random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.arguments import whole
from ...kernels.call import word_key
from ...kernels.errors import SpecError
from ...kernels.torch_private import graph_for_each_batch_size
from ...mesh import trees
from ...mesh.region import Region, generators, reseed, restore_generators, seed_others
from ...mesh.replication.net import mark
from ...mesh.spec import Sharded, is_sharded
from .._plan import plan_of
from .shards import VirtualShards
from .tracked import Tracked, plain

MOST_SHARDS = 1 << 20  # a step keeps the size of each, also of empty ones


def cut(virtual: VirtualShards, leaf: Tracked, name: str, path: str) -> list[Tensor]:
    """A leaf of the batch as this rank's shards (those with samples), each in memory of its own."""
    if not any(leaf is one for one in virtual.batch):
        raise SpecError(
            f"argument {path} of {name} was computed from the batch before data_parallel(shards=) cut it, so "
            "that its bits would depend on the number of ranks",
            got=f"{leaf.dtype} {tuple(leaf.shape)}",
            remedy=f"pass the batch itself, and compute from it in {name}",
        )
    parts = plain(leaf).split([virtual.sizes[shard] for shard in virtual.filled(virtual.position)])
    # The order in which a kernel adds may depend on the alignment of its memory.
    return [mark(part.clone(), frozenset({virtual.axis}), "the batch") for part in parts]


def agreed(outer: VirtualShards, axis: str, count: Any) -> bool:
    """Whether a step shares the virtual shards of the step around it; refuses one that can't run inside it.

    Raises:
        SpecError: the two disagree.
    """
    if outer.axis == axis and count in (None, len(outer.sizes)):
        return True
    if count is None:
        return False
    raise SpecError(
        "a data_parallel step runs in another with other virtual shards",
        got=f"shards={count} over {axis!r} in shards={len(outer.sizes)} over {outer.axis!r}",
        remedy="give shards= to the outermost one only",
    )


def check_count(count: Any) -> int | None:
    """`shards` as a whole number of at least 1, or None."""
    if count is None:
        return None
    number = whole(count)
    if number is None or not 1 <= number <= MOST_SHARDS:
        expected = f"1 to {MOST_SHARDS}, or None"
        raise SpecError("data_parallel got a bad shards", got=repr(count), expected=expected)
    return number


@contextlib.contextmanager
def stepping(region: Region, virtual: VirtualShards) -> Iterator[None]:
    """Run a step over virtual shards: outside the shards all ranks of the axis compute and draw the same."""
    threads, wanted = torch.get_num_threads(), getattr(region.mesh, "pinned_threads", 1)
    state, random = generators(), (region.random, region.alike)
    others = np.random.get_state(), python_random.getstate()
    coords = region.session.layout.coords(region.session.rank)
    others_here = [index for name, index in coords.items() if name != virtual.axis]
    _reseed(region, "step", *others_here, alike=frozenset({virtual.axis}))
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
        region.random, region.alike = random


def _reseed(region: Region, *more: Any, alike: frozenset[str] = frozenset()) -> None:
    """Seed the generators of torch, NumPy and Python: models and losses draw from all of them."""
    reseed(region, *more, alike=alike)
    seed_others(word_key("rng", *region.random))


def after_shards(region: Region, virtual: VirtualShards, state: Any) -> None:
    """Restore torch's generators from a state, and reseed NumPy's and Python's from the number of gradients.

    The shards left them in another state on every rank; saving the latter would cost more than seeding them.
    """
    restore_generators(state)
    seed_others(word_key("rng", *region.random, "after", virtual.calls))


@contextlib.contextmanager
def running(region: Region, virtual: VirtualShards, shard: int) -> Iterator[None]:
    """Run one virtual shard, with random numbers of its own; `after_shards` restores the generators."""
    plan = plan_of(region)
    coords = region.session.layout.coords(region.session.rank)
    random = region.random, region.alike
    others = [index for name, index in coords.items() if name != virtual.axis]
    again = [virtual.calls] if virtual.calls else []
    _reseed(region, "shard", shard, *others, *again)
    samples = plan.splitting(virtual.axis, virtual.sizes[shard], virtual.total)
    region.plan = dataclasses.replace(plan, samples=samples, shard=shard, in_shard=True)
    try:
        with graph_for_each_batch_size():
            yield
    finally:
        region.plan, (region.random, region.alike) = plan, random


def without_batch(result: Any, name: str) -> Any:
    """A step's results; refuses those that were computed from the batch and are not `Sharded`."""

    def one(node: Any) -> Any:
        if is_sharded(node):
            return Sharded(trees.map(plain, node.local), node.spec)
        if isinstance(node, Tracked):
            raise SpecError(
                f"{name} returns what it computed from the batch outside value_and_grad, whose bits depend on the "
                "number of ranks",
                got=f"{node.dtype} {tuple(node.shape)}",
                remedy="return it as aux of the function that is differentiated (has_aux=True)",
            )
        return node

    return trees.map(one, result, is_leaf=is_sharded)
