"""The gradient of a function that every rank evaluates once, and the sums over ranks that it is made of.

An outermost gradient runs torch's backward pass once and packs each result into a bucket as it comes. A gradient within
another one keeps its graph, and sums leaf by leaf with differentiable collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.call import labelled
from ..kernels.errors import SpecError
from ..kernels.torch_private import has_compiler, hooks_made
from ..mesh.replication.net import mark_all
from ._arguments import Argument
from ._auxiliary import NO_AUX, Auxiliary
from ._call import Call, Output, Solution
from ._linear_weights import linear_weights
from ._reductions import psum
from ._sums import Hook, Slot, Sums, home_of
from ._tokens import Tokens, forget_undefined, tokens
from .compiled.second_derivatives import check_differentiated_once
from .compiled.weight_gradients import LARGE, prepare
from .first_call.look import check_trains, look


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """A function's value, and what its gradient depends on.

    Attributes:
        call: what was evaluated.
        value: this rank's value, 0-dim.
        share: what the value is multiplied by in the sum over ranks; on a GPU it may be in float64.
        aux: what the function returned besides its value.
        collectives: the collectives that the function ran.
        hooked: whether the function registered hooks with torch, which may be on any gradient.
    """

    call: Call
    value: Tensor
    share: float | Tensor
    aux: Auxiliary
    collectives: Tokens
    hooked: bool = False

    def contribution(self, x: Tensor, axes: tuple[str, ...], share: float | Tensor | None = None) -> Tensor:
        """What this rank adds to a mean over `axes`; zeros if it has no samples, whatever `x` is."""
        weight: float | Tensor
        weight, has_samples = self.call.weight(axes)
        weight = weight if share is None else share
        if not has_samples:
            return torch.zeros_like(x)
        if isinstance(weight, Tensor):
            return (x * weight).to(x.dtype)
        return x * weight if axes or weight != 1.0 else x

    def ends(self) -> list[Tensor]:
        """The tensors that the backward pass begins at, each scaled by its weight.

        The weights are not handed to torch as gradients: to compare their shapes it imports SymPy, which takes a third
        of a second on every rank.
        """
        if has_compiler():
            check_differentiated_once(self.call, self.value)
        seeds = [(self.value, self.share)] if self.value.requires_grad else []
        seeds += [(token, 0.0) for token in self.collectives.end]
        with torch.enable_grad():
            return [end * seed for end, seed in seeds]


def noted(call: Call, x: Tensor, same: tuple[str, ...]) -> Tensor:
    """Mark a sum over the axes `same` as different along the mean's other axes; no mark if the mean leaves axes out."""
    _note(call, [x], [same])
    return x


def _note(call: Call, sums: Sequence[Tensor], same: Sequence[tuple[str, ...]]) -> None:
    if call.region is not None:
        sizes = call.region.session.layout.sizes
        left = {axes: _left(call.over, sizes, axes) for axes in set(same)}
        mark_all(sums, [left[axes] for axes in same])


@functools.lru_cache(maxsize=256)
def _left(over: tuple[str, ...], sizes: tuple[tuple[str, int], ...], same: tuple[str, ...]) -> frozenset[str] | None:
    """The axes of a mean without those of a sum; None where the mean leaves out an axis of the mesh."""
    return frozenset(over) - set(same) if set(over) == {name for name, _ in sizes} else None


class Plain:
    """Every rank evaluates the function once, on its own samples."""

    def __init__(self, nested: bool):
        self._nested = nested

    def primals(self, arguments: Sequence[Argument]) -> list[Tensor]:
        leaves = [argument.leaf for argument in arguments]
        if self._nested:
            with torch.enable_grad():  # no_grad around a gradient makes it a constant, and not zero
                found = [
                    leaf.view_as(leaf) if leaf.requires_grad else leaf.detach().requires_grad_() for leaf in leaves
                ]
        else:
            found = [leaf.detach().requires_grad_() for leaf in leaves]
        mark_all(found, [argument.differs for argument in arguments])
        return found

    def evaluate(self, call: Call) -> Output:
        return call.evaluate(call.args, call.kwargs)

    def solve(self, call: Call) -> Solution:
        if has_compiler() and call.region is not None and call.region.session.layout.size > 1:
            prepare()
        hooks = hooks_made()
        with tokens() as collectives:
            out = self.evaluate(call)
            collectives.stop()
            hooked = hooks_made() > hooks
            aux = Auxiliary.of(out.aux, call.over) if call.has_aux else NO_AUX
            communicates = bool(collectives.end)
            look(call, out, aux, call.plan.batch, communicates=communicates, hooked=hooked)
            evaluated = Evaluated(call, out.value, call.share(out.count), aux, collectives, hooked)
            return within_a_graph(evaluated) if self._nested else outermost(evaluated)


def outermost(f: Evaluated) -> Solution:
    """One backward pass, whose results are summed in buckets as they come."""
    call = f.call
    sums = Sums(call.region, call.plan, call.keys)
    trained = [(argument.primal, argument.reduce) for argument in call.arguments if argument.primal is not None]
    argument_slots = [sums.add(primal, axes) for primal, axes in trained]
    value_slot = sums.add(f.value, call.over, exact=True)
    aux_slots = [
        None if axes is None else sums.add(leaf.detach().contiguous(), axes, exact=True)
        for leaf, axes in zip(f.aux.leaves, f.aux.over, strict=True)
    ]
    sums.open(alone=not f.collectives.end)
    if call.has_aux:
        f.aux.check_parts(call.region, call.arguments)
        f.aux.check(call.region, call.over)
    # On a rank without samples too: filling leaves in starts reductions, which must start in the same order everywhere.
    sums.fill(value_slot, f.contribution(f.value.detach(), call.over, f.share))
    for leaf, axes, slot in zip(f.aux.leaves, f.aux.over, aux_slots, strict=True):
        if slot is not None:
            sums.fill(slot, f.contribution(leaf.detach(), axes or ()))
    begun = sums.filled
    _differentiate(f, sums, [(primal, slot) for (primal, _), slot in zip(trained, argument_slots, strict=True)])
    took_part = sums.filled > begun
    sums.finish()
    totals = [slot.total for slot in argument_slots]
    if not took_part:
        check_trains(call, f.value.requires_grad, totals)
    value = value_slot.total
    _note(call, [*totals, value], [*(axes for _, axes in trained), call.over])
    remaining = iter(totals)
    gradients = [a.zeros() if a.primal is None else next(remaining) for a in call.arguments]
    leaves = [
        slot.total if slot is not None else leaf.detach() if isinstance(leaf, Tensor) else leaf
        for leaf, slot in zip(f.aux.leaves, aux_slots, strict=True)
    ]
    return value, gradients, f.aux.tree(leaves) if call.has_aux else ()


Primals = list[tuple[Tensor, Slot]]


def _differentiate(f: Evaluated, sums: Sums, primals: Primals) -> None:
    """Run torch's backward pass, and fill every gradient into its slot."""
    ends = f.ends()
    if not ends or not primals:
        return
    home = home_of(f.value)
    handles: list[Any] = []
    try:
        primals = _in_place(f, sums, ends, primals, handles)
        if sums.is_gradual:
            handles += [
                primal.register_post_accumulate_grad_hook(Hook(sums, slot, f.call.plan, home))
                for primal, slot in primals
            ]
        # Within a chain of tokens, as in the forward pass: then a layer that is computed again (torch.utils.checkpoint)
        # saves the same tensors as before.
        with tokens(), _on_this_thread(f.call):
            torch.autograd.backward(ends, inputs=[*(primal for primal, _ in primals), f.collectives.first])
    finally:  # A node's hook refers to what keeps the node alive: without this, it and its buckets would leak.
        for handle in handles:
            handle.remove()
    sums.fill_in(primals)


def _in_place(f: Evaluated, sums: Sums, ends: list[Tensor], primals: Primals, handles: list[Any]) -> Primals:
    """Add hooks that write weights' gradients right into their buckets; returns the leaves that are left to torch."""
    if f.hooked or f.call.plan.without_samples:
        return primals
    large = [
        primal
        for primal, slot in primals
        if primal.numel() * primal.element_size() >= LARGE and sums.takes_products(slot)  # a sparse one has no `nbytes`
    ]
    if not large:
        return primals
    argument_slots = {id(primal): slot for primal, slot in primals}
    for weight in linear_weights(ends, [primal for primal, _ in primals], large, handles):
        slot = argument_slots.pop(id(weight.leaf))
        handles.append(weight.hook(functools.partial(sums.fill_product, slot)))
    return [(primal, slot) for primal, slot in primals if id(primal) in argument_slots]


def within_a_graph(f: Evaluated) -> Solution:
    """Like `outermost`, but with a result that can be differentiated again."""
    call = f.call
    f.aux.check_parts(call.region, call.arguments)
    f.aux.check(call.region, call.over)
    primals = [argument.primal for argument in call.arguments if argument.primal is not None]
    ends = f.ends()
    found: list[Tensor] = [torch.zeros_like(primal) for primal in primals]
    if ends and primals:
        with _on_this_thread(call):
            *found, _ = torch.autograd.grad(
                ends,
                [*primals, f.collectives.first],
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
    remaining = iter(found)
    with labelled(call.keys):
        gradients = [
            a.zeros()
            if a.primal is None
            else noted(call, _sum(forget_undefined(next(remaining), call.plan), a.reduce), a.reduce)
            for a in call.arguments
        ]

    def average(leaf: Any, axes: tuple[str, ...] | None) -> Any:
        return _sum(f.contribution(leaf, axes), axes) if axes else leaf

    leaves = [average(leaf, axes) for leaf, axes in zip(f.aux.leaves, f.aux.over, strict=True)]
    value = _sum(f.contribution(f.value, call.over, f.share), call.over)
    return noted(call, value, call.over), gradients, f.aux.tree(leaves)


def _on_this_thread(call: Call) -> contextlib.AbstractContextManager:
    """Outside a region, keep torch's backward pass on this thread; in a region it already is."""
    return torch.autograd.set_multithreading_enabled(False) if call.region is None else contextlib.nullcontext()


def _sum(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    if axes and x.is_sparse:
        raise SpecError(
            "a sparse gradient can't be summed over ranks within another gradient",
            got=f"one of shape {list(x.shape)}",
            remedy="make the embedding with sparse=False: grad gives dense gradients of all layers",
        )
    return psum(x, axes) if axes else x.clone()
