"""One step of all leaves: those that are stepped whole, and this rank's slices of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .engine import Engine
from .leaves import Leaf, State, declared, layout_of
from .parts import Parts
from .slices import Axis

Hyper = Mapping[str, Any]


@torch.no_grad()
def create(shard: Axis | None, engines: Sequence[Engine], leaves: Sequence[Leaf]) -> dict[str, State]:
    """The state that the torch class makes in its constructor; sliced where it is known now how."""
    found: dict[str, State] = {}
    for group, engine in enumerate(engines):
        members = [leaf for leaf in leaves if leaf.group == group]
        for leaf, own in zip(members, engine.create(members), strict=True):
            if own:
                found[leaf.path] = own
    if shard in (None, "auto"):
        return {leaf.path: _declared(leaf, found[leaf.path]) for leaf in leaves if leaf.path in found}
    parts = Parts(shard, [leaf._replace(grad=leaf.param) for leaf in leaves], found)
    state = {part.key: part.declare(parts.state_of(part)) for part in parts.slices}
    state.update({leaf.path: _declared(leaf, parts.state_of_leaf(leaf)) for leaf in parts.whole})
    return {key: own for key, own in state.items() if own}


@torch.no_grad()
def update(
    shard: Axis | None,
    engines: Sequence[Engine],
    leaves: Sequence[Leaf],
    state: Mapping[str, State],
    hypers: Sequence[Hyper],
    scale: Tensor | None,
) -> tuple[list[Tensor], dict[str, State], list[dict[str, Any]]]:
    """The new parameters, state, and hyper-parameters of each group.

    Args:
        engines, hypers: of each group.
        scale: what gradients are multiplied by, if anything.
    """
    parts = Parts(shard, leaves, state)
    new_params: dict[str, Tensor] = {}
    new_state: dict[str, State] = {}
    new_hypers = [dict(hyper) for hyper in hypers]
    for group, (engine, hyper) in enumerate(zip(engines, hypers, strict=True)):
        members = [leaf for leaf in parts.whole if leaf.group == group]
        if members or not leaves:
            given = [parts.state_of_leaf(leaf) for leaf in members]
            params, states, new_hypers[group] = engine.update(members, given, hyper, scale)
            new_params.update({leaf.path: param for leaf, param in zip(members, params, strict=True)})
            new_state.update(
                {leaf.path: _declared(leaf, own) for leaf, own in zip(members, states, strict=True) if own}
            )
    for part in parts.slices:
        group = part.leaves[0].group
        params, own, new_hypers[group] = part.step(engines[group], parts.state_of(part), hypers[group], scale)
        new_params.update({leaf.path: param for leaf, param in zip(part.leaves, params, strict=True)})
        if own:
            new_state[part.key] = part.declare(own)
    return [new_params[leaf.path] for leaf in leaves], new_state, new_hypers


def _declared(leaf: Leaf, own: State) -> State:
    """State of a parameter that is cut says so, since a step's results are otherwise taken for replicated."""
    spec = layout_of(leaf.param)
    return declared(own, leaf.param.shape, spec) if spec.entries else own
