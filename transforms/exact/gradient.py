"""The gradient of a function over virtual shards: one evaluation and one backward pass for each, sums by position.

Invariant: what a shard computes depends only on its samples, its place and the step; results of shards are combined by
the tree (`tree_sums`) or in the order of the shards.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ...kernels.errors import SpecError
from ...kernels.torch_private import hooks_made
from ...mesh import trees
from ...mesh.region import Region, carry_of, generators
from ...mesh.replication.net import differs_over
from .._arguments import Argument
from .._auxiliary import NO_AUX, Auxiliary
from .._backward import Evaluated, Plain, noted
from .._call import Call, Output, Solution
from .._empty_shards import blank
from .._plan import Plan
from .._sums import Hook, summed
from .._tokens import tokens
from ..first_call.look import check_trains, look
from .shard_results import Results
from .shards import VirtualShards
from .tracked import Tracked, as_tracked, plain
from .tree_sums import TreeSums
from .virtual_shards import after_shards, cut, running


def applies(region: Region, plan: Plan, over: tuple[str, ...], nested: bool, args: Any, name: str) -> bool:
    """Whether a gradient is over the step's virtual shards; refuses one whose bits depend on the number of ranks."""
    virtual = plan.virtual
    assert virtual is not None
    problem = remedy = ""
    if plan.shard is not None:
        if virtual.axis not in over:
            return False
        problem = f"grad of {name} within a virtual shard asks for the mean over {virtual.axis!r}, that of all shards"
        remedy = "give the inner grad axes=()"
    elif virtual.axis not in over:
        if not any(isinstance(leaf, Tracked) for leaf in trees.leaves(args)):
            return False
        problem = f"grad of {name} under data_parallel(shards=) leaves out the axis that the batch is split over"
        remedy = "leave axes= out, or use torch.func.grad in a function that is differentiated over the batch"
    elif nested:
        problem = f"grad of {name} under data_parallel(shards=) is part of another gradient's graph"
        remedy = "differentiate the whole in one value_and_grad, with axes=() in the inner one"
    if problem:
        raise SpecError(problem, where=region.session.where(), remedy=remedy)
    return True


class Exact:
    """Runs the shards of a rank one after another, and combines their results by position."""

    def primals(self, arguments: Sequence[Argument]) -> list[Tensor]:
        others = iter(Plain(nested=False).primals([one for one in arguments if not isinstance(one.leaf, Tracked)]))
        # A new tensor for each: the same leaf of the batch may also be passed as another argument.
        return [as_tracked(one.leaf) if isinstance(one.leaf, Tracked) else next(others) for one in arguments]

    def solve(self, call: Call) -> Solution:
        region, plan = call.region, call.plan
        virtual = plan.virtual
        assert region is not None and virtual is not None
        for argument in call.arguments:
            if _is_summed(argument) and virtual.axis not in argument.reduce:
                raise SpecError(
                    f"grad of {call.name} under data_parallel(shards=) is by a value that differs over "
                    f"{virtual.axis!r} and is not the batch",
                    got=f"{argument.leaf.dtype} {tuple(argument.leaf.shape)}",
                    remedy="differentiate by what is the same on all ranks, or by the batch",
                )
        solution = _Solution(call, region, virtual)
        state = generators()
        try:
            for index, shard in enumerate(virtual.filled(virtual.position)):
                solution.run(index, shard)
        finally:
            after_shards(region, virtual, state)
            solution.unhook()
        if solution.results is None:
            solution.begin(_described(call, solution.inputs, region, virtual), described=True)
        virtual.calls += 1
        return solution.finish()


class _Solution:
    """Collects the results of the shards that have run; what is summed is announced after the first evaluation."""

    def __init__(self, call: Call, region: Region, virtual: VirtualShards):
        self._call, self._region, self._virtual = call, region, virtual
        self.inputs = _Inputs(call, virtual)
        self.results: Results | None = None
        self._sums = TreeSums(region, call.plan, virtual, call.keys)
        self._slots: list[int | None] = []
        self._pieces: dict[int, list[Tensor]] = {
            index: [] for index, argument in enumerate(call.arguments) if isinstance(argument.primal, Tracked)
        }
        self._hooks: list[Any] = []
        self._trains = False  # whether the value of any shard here depends on what it is differentiated by
        self._share = call.weight(tuple(name for name in call.over if name != virtual.axis))[0]

    def begin(self, first: _Described, *, described: bool = False) -> None:
        """Announce what is summed, now that the first shard shows what the function returns."""
        call, virtual = self._call, self._virtual
        self._scale = virtual.scale * self._share if first.out.count is None else 1.0
        self._slots = [
            self._sums.add(argument.primal, argument.reduce, self._scale)
            if _is_summed(argument) and argument.primal is not None
            else None
            for argument in call.arguments
        ]
        self._hooks = [
            argument.primal.register_post_accumulate_grad_hook(Hook(self._sums, slot, call.plan))
            for argument, slot in zip(call.arguments, self._slots, strict=True)
            if slot is not None and argument.primal is not None and argument.primal.requires_grad
        ]
        self.results = Results(call, self._region, virtual, self._sums, self._share)
        if described:
            self.results.take_structure(first.out, first.notes)

    def run(self, index: int, shard: int) -> None:
        """One shard, the `index`th of this rank."""
        call, virtual = self._call, self._virtual
        args, kwargs, primals = self.inputs.of(index)
        with running(self._region, virtual, shard), tokens() as collectives:
            hooks = hooks_made()
            out = call.evaluate(args, kwargs)
            hooked = hooks_made() > hooks
            collectives.stop()
            if self.results is None:
                _describe(self._region, virtual, out)
                self.begin(_Described(out, []))
            assert self.results is not None
            weight = virtual.weight(shard) if out.count is None else 1.0
            self.results.take(out, virtual.weight(shard))
            if index == 0 or hooked:
                parts = tuple(parts[index] for parts in self.inputs.parts.values())
                aux = Auxiliary.of(out.aux, call.over)
                of_shard = dataclasses.replace(call, args=args, kwargs=kwargs)
                look(of_shard, out, aux, parts, communicates=bool(collectives.end), hooked=hooked)
            ends = Evaluated(call, out.value, weight, NO_AUX, collectives).ends()
            if ends and primals:
                with tokens():
                    torch.autograd.backward(ends, inputs=[*primals.values(), collectives.first])
            self._trains = self._trains or not self._sums.filled.isdisjoint(self._slots)
            self._sums.end_shard()
            for number, primal in primals.items():
                if number in self._pieces:
                    self._trains = self._trains or primal.grad is not None
                    self._pieces[number].append(torch.zeros_like(primal) if primal.grad is None else primal.grad)

    def unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> Solution:
        call = self._call
        assert self.results is not None
        found = self._sums.finish()
        value, factor, aux = self.results.finish(found)
        gradients = []
        for index, (argument, slot) in enumerate(zip(call.arguments, self._slots, strict=True)):
            if slot is not None:
                total = found[slot] if factor is None else found[slot] * factor
                gradients.append(noted(call, total, argument.reduce))
            elif index in self._pieces:
                whole = torch.cat([plain(argument.leaf)[:0], *self._pieces[index]])
                whole = whole * (self._scale if factor is None else factor)
                (total,) = summed(call.region, call.plan, [(whole, argument.reduce)])
                gradients.append(noted(call, total, argument.reduce))
            else:
                gradients.append(plain(argument.zeros()))
        if not self._trains:
            check_trains(
                call, False, [g for g, a in zip(gradients, call.arguments, strict=True) if a.primal is not None]
            )
        return noted(call, value, call.over), gradients, aux


class _Inputs:
    """The arguments of every shard."""

    def __init__(self, call: Call, virtual: VirtualShards):
        self._tree = (tuple(call.args), call.kwargs)
        self._leaves, self._treedef = trees.flatten(self._tree)
        tracked = {index: leaf for index, leaf in enumerate(self._leaves) if isinstance(leaf, Tracked)}
        paths = trees.paths(self._tree) if tracked else []
        # In the arguments a leaf of the batch that is differentiated is replaced by its primal.
        primals = [(number, a) for number, a in enumerate(call.arguments) if isinstance(a.primal, Tracked)]
        stands_for = {id(a.primal): (number, a.leaf) for number, a in primals}
        self._numbers: dict[int, int] = {}
        self.parts: dict[int, list[Tensor]] = {}
        for index, leaf in tracked.items():
            if id(leaf) in stands_for:
                self._numbers[index], leaf = stands_for[id(leaf)]
            self.parts[index] = cut(virtual, leaf, call.name, paths[index])
        self._shared = {number: a.primal for number, a in enumerate(call.arguments) if isinstance(a.primal, Tensor)}

    def of(self, which: int) -> tuple[list, dict, dict[int, Tensor]]:
        """For one shard of this rank: args, kwargs, and the leaves to differentiate by."""
        leaves, primals = list(self._leaves), {n: t for n, t in self._shared.items() if not isinstance(t, Tracked)}
        for index, parts in self.parts.items():
            leaves[index] = parts[which]
            if index in self._numbers:
                leaves[index] = primals[self._numbers[index]] = parts[which].requires_grad_()
        args, kwargs = trees.unflatten(self._treedef, leaves)
        return list(args), kwargs, primals

    def of_none(self) -> tuple[list, dict]:
        """args and kwargs for a batch without samples."""
        leaves = [plain(leaf)[:0] if isinstance(leaf, Tracked) else leaf for leaf in self._leaves]
        args, kwargs = trees.unflatten(self._treedef, leaves)
        return list(args), kwargs


@dataclasses.dataclass(frozen=True, slots=True)
class _Described:
    """What a function returned, and the notes on the leaves of its aux, since pickling loses these."""

    out: Output
    notes: list[tuple[Any, frozenset[str] | None]]


def _describe(region: Region, virtual: VirtualShards, out: Output) -> None:
    """Tell ranks without samples what the function returns; the first rank with samples does it."""
    able = _with_samples(virtual)
    if len(able) == len(virtual.owners):
        return
    description = b""
    if virtual.position == able[0]:
        parts = trees.map(blank, (out.value, out.count, out.aux))
        description = cloudpickle.dumps((parts, _notes(out.aux)))
    region.session.comm(virtual.axis).all_gather_bytes(description)


def _described(call: Call, inputs: _Inputs, region: Region, virtual: VirtualShards) -> _Described:
    if virtual.total == 0:  # nobody has samples: evaluating an empty batch shows what the results look like
        out = call.evaluate(*inputs.of_none())
        return _Described(out, _notes(out.aux))
    descriptions = region.session.comm(virtual.axis).all_gather_bytes(b"")
    parts, notes = pickle.loads(descriptions[_with_samples(virtual)[0]])
    return _Described(Output(*parts), notes)


def _with_samples(virtual: VirtualShards) -> list[int]:
    """The ranks with samples: rank 0 may be none of them, as its virtual streams may have ended in a stream's batch."""
    return [position for position in range(len(virtual.owners)) if virtual.filled(position)]


def _notes(aux: Any) -> list[tuple[Any, frozenset[str] | None]]:
    """The notes on aux's leaves, which pickling loses: how to carry them on, and the axes that they differ over."""
    return [(carry_of(leaf), differs_over(leaf)) for leaf in trees.leaves(aux)]


def _is_summed(argument: Argument) -> bool:
    """Whether a leaf is to be differentiated by and is no part of the batch."""
    return argument.primal is not None and not isinstance(argument.primal, Tracked)
