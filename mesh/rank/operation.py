"""What a rank does when a function of torch is called with `Array`s: the function itself, on shards or whole values.

Invariant: all ranks take the same way, and have the same random numbers.
"""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ...kernels.errors import SpecError
from ...kernels.torch_private import versions
from .. import trees
from ..batch import refuse_ragged
from ..region import require, reseed
from ..spec import P, ragged_shape
from .local_values import shapes_over
from .session import RankSession

UNWRITTEN = (
    "neither an Array nor a tensor beside it is ever changed: leave out what changes one (model.eval() of a batch norm,"
    " no max_norm=), or call it in an @spmd function, on a clone"
)
KINDS = 4096  # how many kinds of arguments are remembered, for an operation and altogether


class Way(enum.Enum):
    """What a rank passes to a function: its shards as they are, its shards by DTensor's rules, or whole values.

    ADDED: its shard as it is, and the results are added up over the ranks. The rank looks how values are cut, since the
    driver may not know it yet; for OWN they are cut as the driver expects, or are put so.
    """

    OWN, ADDED, RULES, WHOLE = "own", "added", "rules", "whole"


class Operation:
    """A function of torch as a rank calls it."""

    def __init__(self, func: Callable, way: Way):
        self.func, self._way = func, way
        self._on_shards: dict[Any, bool] = {}  # by kind of arguments; it must be the same on all ranks
        self._generation = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region = require("an operation on Arrays")
        if self._way is Way.ADDED:
            return _added(region.session, self.func, *args)
        kind = _kind(args, kwargs) if self._way is Way.RULES else None
        if self._generation != region.session.watch.generation:  # replacement ranks know none
            self._on_shards, self._generation = {}, region.session.watch.generation
        if kind is not None and self._on_shards.get(kind, True):
            # By name: torch's DTensor stands above this file.
            propagation = importlib.import_module("spmd.torch_distributed.propagation")
            if len(self._on_shards) >= KINDS:
                self._on_shards.clear()
            try:
                result, of_shards = propagation.on_shards(
                    region, self.func, args, kwargs, first=kind not in self._on_shards
                )
                self._on_shards[kind] = of_shards
                return result
            except propagation.NeedsWhole:
                self._on_shards[kind] = False
        if self._way is not Way.OWN:
            whole = functools.partial(_whole, region.session, self._way is Way.RULES)
            args, kwargs = trees.map(whole, (args, kwargs))
        reseed(region)
        given = [leaf for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = versions(given)
        result = self.func(*args, **kwargs)
        if versions(given) != before:  # of whole values, which are copies; of others the program has seen it
            refuse_write(self.func)
        return result


def refuse_write(func: Callable) -> NoReturn:
    """Refuse a function that changes a value of which this rank has a part."""
    problem = f"{getattr(func, '__name__', str(func))} changes in place what it is given"
    raise SpecError(problem, remedy=UNWRITTEN)


def _kind(args: tuple, kwargs: dict[str, Any]) -> Any:
    """What decides whether DTensor has a rule."""
    leaves, treedef = trees.flatten((args, kwargs))
    kinds = [(_spec(leaf), leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return treedef, *kinds


def _spec(leaf: torch.Tensor) -> P:
    return leaf._spmd_spec  # type: ignore[attr-defined]


def _added(session: RankSession, func: Callable, shard: torch.Tensor) -> torch.Tensor:
    is_16_bit = shard.dtype in (torch.float16, torch.bfloat16)
    # Like torch itself, add 16-bit numbers in 32 bits and round once.
    total = func(shard, dtype=torch.float32) if is_16_bit else func(shard)
    axes = _spec(shard).axes
    if axes:  # else it is whole, though the driver took it for cut
        session.comm(tuple(name for name in session.layout.names if name in axes)).all_reduce(total)
    return total.to(shard.dtype) if shard.is_floating_point() else total


def _whole(session: RankSession, even: bool, leaf: Any) -> Any:
    """The whole value on each rank, from its shards; if these are even, ranks need not exchange their sizes."""
    if not isinstance(leaf, torch.Tensor) or not _spec(leaf).entries:
        return leaf
    spec, whole = _spec(leaf), leaf.detach() if even else leaf.detach().cpu()
    for dim in range(len(spec.entries)):
        if axes := spec.dim_axes(dim):
            comm = session.comm(axes)
            shapes = [tuple(whole.shape)] * comm.size if even else shapes_over(comm, whole)
            refuse_ragged(ragged_shape(tuple(whole.shape), shapes, spec))
            shards = [torch.empty_like(whole) if even else whole.new_empty(shape) for shape in shapes]
            comm.all_gather(shards, whole)
            whole = torch.cat(shards, dim)
    return session.on_device(whole)
