"""The two ways to the gradient of a function that has been evaluated, and to the sums over ranks that it is made of.

An outermost gradient runs torch's tape once and packs what comes out into buckets as it comes; one within a graph
keeps its own and sums leaf by leaf with differentiable collectives.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from ..mesh.region import Region
from ._arguments import Argument
from ._auxiliary import Auxiliary
from ._chain import Chain, chain, forget_undefined, may_be_undefined
from ._linear_weights import linear_weights
from ._named_axes import note
from ._reductions import psum
from ._sums import Hook, Place, Sums, home_of


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """A function's value, and what its gradient depends on.

    Attributes:
        value: this rank's, 0-dim.
        aux: what came with it.
        arguments: the leaves to differentiate by.
        region: None outside of one.
        over: the axes of the mean.
        collectives: those that the function made.
        hooked: whether it gave torch hooks, which may wait for any gradient.
    """

    value: Tensor
    aux: Auxiliary
    arguments: list[Argument]
    region: Region | None
    over: tuple[str, ...]
    collectives: Chain
    hooked: bool = False

    def weight(self, axes: tuple[str, ...]) -> tuple[float, bool]:
        """This rank's share in a mean over `axes`, and whether it has any samples."""
        return (1.0, True) if self.region is None else self.region.weight(axes)

    def weighted(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """What this rank contributes to a mean over `axes`: zeros if it has no samples, whatever it computed."""
        share, has_samples = self.weight(axes)
        if not has_samples:
            return torch.zeros_like(x)
        return x * share if axes else x

    def ends(self) -> tuple[list[Tensor], list[Tensor]]:
        """Where the backward pass begins, and with what."""
        seeds = [(self.value, self.weight(self.over)[0])] if self.value.requires_grad else []
        seeds += [(link, 0.0) for link in self.collectives.end]
        return [end for end, _ in seeds], [torch.full_like(end, seed) for end, seed in seeds]

    def noted(self, x: Tensor, same: tuple[str, ...]) -> Tensor:
        """Note where a sum over the axes `same` differs; along an axis that the mean leaves out nothing is known."""
        if self.region is None or set(self.over) != set(self.region.session.layout.names):
            return x
        return note(x, frozenset(self.over) - set(same))


Solution = tuple[Tensor, list[Any], Any]  # the mean value, a gradient for each argument, aux


def outermost(f: Evaluated) -> Solution:
    """One backward pass, whose results are summed in buckets as they come."""
    sums = Sums(f.region)
    places = [None if a.twin is None else sums.add(a.twin, a.reduce) for a in f.arguments]
    value_place = sums.add(f.value, f.over, exact=True)
    aux_places = [
        None if axes is None else sums.add(leaf.detach().contiguous(), axes, exact=True)
        for leaf, axes in zip(f.aux.leaves, f.aux.over, strict=True)
    ]
    sums.open(alone=not f.collectives.end)
    f.aux.check(f.region, f.over)
    # On a rank without samples too: reductions begin as leaves are filled in, and so in the same order on all ranks.
    sums.fill(value_place, f.weighted(f.value.detach(), f.over))
    for leaf, axes, place in zip(f.aux.leaves, f.aux.over, aux_places, strict=True):
        if place is not None:
            sums.fill(place, f.weighted(leaf.detach(), axes or ()))
    ends, seeds = f.ends()
    twins = [(a.twin, place) for a, place in zip(f.arguments, places, strict=True) if a.twin is not None and place]
    if ends and twins:
        home = home_of(f.value)
        handles: list[Any] = []
        try:
            twins = _in_place(f, sums, ends, twins, handles)
            hooks = [(twin, Hook(sums, place, home)) for twin, place in twins]
            if sums.shared:
                handles += [twin.register_post_accumulate_grad_hook(hook) for twin, hook in hooks]
            # In the same chain or one like it, so that a layer computed again (torch.utils.checkpoint) leaves the same
            # trace; on this thread, which knows of the region.
            with chain(), torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(ends, seeds, inputs=[*(twin for twin, _ in twins), f.collectives.first])
        finally:  # A hook on a node is held by what it holds: nothing else would ever free it and its buckets.
            for handle in handles:
                handle.remove()
        if not sums.shared:  # nothing to begin early
            for twin, hook in hooks:
                hook(twin)
    found = sums.finish()
    gradients = [
        a.zeros() if place is None else f.noted(found[place], a.reduce)
        for a, place in zip(f.arguments, places, strict=True)
    ]
    leaves = [
        found[place] if place is not None else leaf.detach() if isinstance(leaf, Tensor) else leaf
        for leaf, place in zip(f.aux.leaves, aux_places, strict=True)
    ]
    return f.noted(found[value_place], f.over), gradients, f.aux.tree(leaves)


Twins = list[tuple[Tensor, Place]]


def _in_place(f: Evaluated, sums: Sums, ends: list[Tensor], twins: Twins, handles: list[Any]) -> Twins:
    """Add hooks that write gradients of weights where they are summed; the leaves that are left for torch."""
    if f.hooked or may_be_undefined(f.region):
        return twins
    places = {id(twin): place for twin, place in twins}
    weights = linear_weights(ends, [twin for twin, _ in twins], lambda twin: sums.has_room(places[id(twin)]))
    for weight in weights:
        place = places.pop(id(weight.twin))
        handles.append(weight.hook(functools.partial(sums.room, place), functools.partial(sums.filled, place)))
    return [(twin, place) for twin, place in twins if id(twin) in places]


def within_a_graph(f: Evaluated) -> Solution:
    """The same, with a result that can be differentiated in turn."""
    f.aux.check(f.region, f.over)
    twins = [argument.twin for argument in f.arguments if argument.twin is not None]
    ends, seeds = f.ends()
    found: list[Tensor] = [torch.zeros_like(twin) for twin in twins]
    if ends and twins:
        with torch.autograd.set_multithreading_enabled(False):
            *found, _ = torch.autograd.grad(
                ends,
                [*twins, f.collectives.first],
                seeds,
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
    remaining = iter(found)
    gradients = [
        a.zeros() if a.twin is None else f.noted(_sum(forget_undefined(next(remaining), f.region), a.reduce), a.reduce)
        for a in f.arguments
    ]

    def average(leaf: Any, axes: tuple[str, ...] | None) -> Any:
        return _sum(f.weighted(leaf, axes), axes) if axes else leaf

    leaves = [average(leaf, axes) for leaf, axes in zip(f.aux.leaves, f.aux.over, strict=True)]
    return f.noted(average(f.value, f.over), f.over), gradients, f.aux.tree(leaves)


def _sum(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    return psum(x, axes) if axes else x.clone()
