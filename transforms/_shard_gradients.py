"""The gradient of a function over virtual shards: one evaluation and one backward pass for each, sums by position.

Invariant: what a shard computes depends on its samples, its place and the step alone, and whatever crosses shards goes
through the tree (`_tree_sums`) or is put in the order of the shards.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ..kernels.errors import SpecError, message
from ..mesh import trees
from ..mesh.region import Region, carry_of, generators
from ._arguments import Argument
from ._auxiliary import Auxiliary
from ._backward import Evaluated, Solution
from ._chain import chain
from ._dealt import Dealt, plain
from ._empty_shards import blank
from ._named_axes import differs_over
from ._shard_results import Results
from ._sums import Hook, Sums
from ._tree_sums import TreeSums
from ._virtual_shards import VirtualShards, after_shards, running


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What is differentiated.

    Attributes:
        evaluate: called with (args, kwargs), gives (value, aux).
        args, kwargs: the arguments, with `Argument.twin` in place of leaves to differentiate by.
        name: the function's, for messages.
    """

    evaluate: Callable[[list, dict], tuple[Tensor, Any]]
    args: list
    kwargs: dict
    name: str


def applies(region: Region | None, over: tuple[str, ...], nested: bool, args: Any, name: str) -> bool:
    """Whether a gradient is one over virtual shards; refuses one that would differ by the number of ranks."""
    if region is None or region.virtual is None:
        return False
    virtual: VirtualShards = region.virtual
    problem = remedy = ""
    if region.shard is not None:
        if virtual.axis not in over:
            return False
        problem = f"grad of {name} within a virtual shard asks for the mean over {virtual.axis!r}, that of all shards"
        remedy = "give the inner grad axes=()"
    elif virtual.axis not in over:
        if not any(isinstance(leaf, Dealt) for leaf in trees.leaves(args)):
            return False
        problem = f"grad of {name} under data_parallel(shards=) leaves out the axis that the batch is split over"
        remedy = "leave axes= out, or use torch.func.grad in a function that is differentiated over the batch"
    elif nested:
        problem = f"grad of {name} under data_parallel(shards=) is part of another gradient's graph"
        remedy = "differentiate the whole in one value_and_grad, with axes=() in the inner one"
    if problem:
        raise SpecError(message(problem, where=region.session.where(), remedy=remedy))
    return True


def over_shards(call: Call, arguments: list[Argument], region: Region, over: tuple[str, ...]) -> Solution:
    """The mean value, a gradient for each argument, and aux."""
    virtual: VirtualShards = region.virtual
    sums = TreeSums(region, virtual)
    share = region.weight(tuple(name for name in over if name != virtual.axis))[0]
    scale = virtual.scale * share
    pieces: dict[int, list[Tensor]] = {}  # gradients by leaves of the batch, a shard each
    places: list[int | None] = []
    for index, argument in enumerate(arguments):
        cut = isinstance(argument.twin, Dealt)
        if cut:
            pieces[index] = []
        elif argument.twin is not None and virtual.axis not in argument.reduce:
            raise SpecError(
                message(
                    f"grad of {call.name} under data_parallel(shards=) is by a value that differs over "
                    f"{virtual.axis!r} and is not the batch",
                    got=f"{argument.leaf.dtype} {tuple(argument.leaf.shape)}",
                    remedy="differentiate by what is the same on all ranks, or by the batch",
                )
            )
        summed = None if cut else argument.twin
        places.append(None if summed is None else sums.add(summed, argument.reduce, scale))
    inputs = _Inputs(call, arguments, virtual)
    results = Results(region, over, sums, share)
    mine = virtual.filled(virtual.place)
    hooks = [
        argument.twin.register_post_accumulate_grad_hook(Hook(sums, place))
        for argument, place in zip(arguments, places, strict=True)
        if place is not None and argument.twin is not None and argument.twin.requires_grad
    ]
    state = generators()
    try:
        for shard in mine:
            args, kwargs, twins = inputs.of(mine.index(shard))
            with running(region, shard), chain() as collectives:
                value, aux = call.evaluate(args, kwargs)
                collectives.stop()
                if shard == mine[0]:
                    _tell(region, value, aux)
                results.take(value, aux, virtual.weight(shard))
                f = Evaluated(value, Auxiliary.of((), ()), arguments, region, over, collectives)
                _backward(f, twins, virtual.weight(shard))
                sums.end_shard()
                for index, twin in twins.items():
                    if index in pieces:
                        pieces[index].append(torch.zeros_like(twin) if twin.grad is None else twin.grad)
    finally:
        after_shards(region, state)
        for hook in hooks:
            hook.remove()
    if not mine:
        results.take_structure(*_told(call, inputs, region))
    virtual.calls += 1
    found = sums.finish()
    noted = Evaluated(torch.zeros(()), Auxiliary.of((), ()), arguments, region, over, collectives=None)  # type: ignore[arg-type]
    gradients = []
    for index, (argument, place) in enumerate(zip(arguments, places, strict=True)):
        if place is not None:
            gradients.append(noted.noted(found[place], argument.reduce))
        elif index in pieces:
            whole = torch.cat([plain(argument.leaf)[:0], *pieces[index]]) * scale
            gradients.append(noted.noted(_sum(region, whole, argument.reduce), argument.reduce))
        else:
            zeros = argument.zeros()
            gradients.append(plain(zeros))
    value, aux = results.finish(found)
    return noted.noted(value, over), gradients, aux


class _Inputs:
    """The arguments of every shard."""

    def __init__(self, call: Call, arguments: list[Argument], virtual: VirtualShards):
        self._tree = (tuple(call.args), call.kwargs)
        self._leaves, self._treedef = trees.flatten(self._tree)
        cut = {index: leaf for index, leaf in enumerate(self._leaves) if isinstance(leaf, Dealt)}
        paths = trees.paths(self._tree) if cut else []
        # A twin of a leaf of the batch stands for it.
        stands_for = {id(a.twin): (number, a.leaf) for number, a in enumerate(arguments) if isinstance(a.twin, Dealt)}
        self._numbers: dict[int, int] = {}
        self.parts: dict[int, list[Tensor]] = {}
        for index, leaf in cut.items():
            if id(leaf) in stands_for:
                self._numbers[index], leaf = stands_for[id(leaf)]
            self.parts[index] = virtual.cut(leaf, call.name, paths[index])
        self._shared = {number: a.twin for number, a in enumerate(arguments) if isinstance(a.twin, Tensor)}

    def of(self, which: int) -> tuple[list, dict, dict[int, Tensor]]:
        """Of a shard of this rank: args, kwargs, and the leaves to differentiate by."""
        leaves, twins = list(self._leaves), {n: t for n, t in self._shared.items() if not isinstance(t, Dealt)}
        for index, parts in self.parts.items():
            leaves[index] = parts[which]
            if index in self._numbers:
                leaves[index] = twins[self._numbers[index]] = parts[which].requires_grad_()
        args, kwargs = trees.unflatten(self._treedef, leaves)
        return list(args), kwargs, twins

    def of_none(self) -> tuple[list, dict]:
        """For a batch without samples."""
        leaves = [plain(leaf)[:0] if isinstance(leaf, Dealt) else leaf for leaf in self._leaves]
        args, kwargs = trees.unflatten(self._treedef, leaves)
        return list(args), kwargs


def _backward(f: Evaluated, twins: dict[int, Tensor], weight: float) -> None:
    seeds = [(f.value, weight)] if f.value.requires_grad else []
    seeds += [(link, 0.0) for link in f.collectives.end]
    if not seeds or not twins:
        return
    with chain(), torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(
            [end for end, _ in seeds],
            [torch.full_like(end, seed) for end, seed in seeds],
            inputs=[*twins.values(), f.collectives.first],
        )


def _tell(region: Region, value: Tensor, aux: Any) -> None:
    """Have ranks without samples know what the function returns; the first rank always has some, if any has."""
    virtual: VirtualShards = region.virtual
    if not _some_have_none(virtual):
        return
    said = b""
    if virtual.place == 0:
        said = cloudpickle.dumps((blank(value), trees.map(blank, aux), _notes(aux)))
    region.session.comm(virtual.axis).all_gather_bytes(said)


def _told(call: Call, inputs: _Inputs, region: Region) -> tuple[Tensor, Any, list[Any]]:
    virtual: VirtualShards = region.virtual
    if virtual.total == 0:  # nobody has samples: what comes of none shows what the results look like
        value, aux = call.evaluate(*inputs.of_none())
        return value, aux, _notes(aux)
    return pickle.loads(region.session.comm(virtual.axis).all_gather_bytes(b"")[0])


def _some_have_none(virtual: VirtualShards) -> bool:
    return not all(virtual.filled(place) for place in range(len(virtual.owners)))


def _notes(aux: Any) -> list[tuple[Any, frozenset[str] | None]]:
    """What is noted on the leaves of aux, and does not travel with them: how they are carried on, where they differ."""
    return [(carry_of(leaf), differs_over(leaf)) for leaf in trees.leaves(aux)]


def _sum(region: Region, x: Tensor, axes: tuple[str, ...]) -> Tensor:
    sums = Sums(region)
    place = sums.add(x, axes, exact=True)
    sums.open()
    sums.fill(place, x)
    return sums.finish()[place]
