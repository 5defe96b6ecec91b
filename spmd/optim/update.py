"""One step of all leaves: those that are stepped whole, and this rank's slices of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .engine import Engine
from .leaves import Leaf, State, declared, layout_of
from .parts import Parts, divide
from .slices import Axis

Hyper = Mapping[str, Any]


def create(shard: Axis | None, engines: Sequence[Engine], leaves: Sequence[Leaf]) -> dict[str, State]:
    """The state that the torch class makes in its constructor, without gradients; sliced where it is known now how."""
    found: dict[str, State] = {}
    for group, engine in enumerate(engines):
        members = [leaf for leaf in leaves if leaf.group == group]
        for leaf, own in zip(members, engine.create(members), strict=True):
            if own:
                found[leaf.path] = own
    if shard in (None, "auto"):
        return {leaf.path: _declared(leaf, found[leaf.path]) for leaf in leaves if leaf.path in found}
    parts = divide(shard, [leaf._replace(grad=leaf.param) for leaf in leaves], found)
    state = {part.key: part.declare(parts.states[part.key]) for part in parts.slices}
    state.update({leaf.path: _declared(leaf, parts.states[leaf.path]) for _, leaf in parts.whole})
    return {key: own for key, own in state.items() if own}


def update(
    parts: Parts,
    engines: Sequence[Engine],
    params: Sequence[Tensor],
    grads: Sequence[Any],
    hypers: Sequence[Hyper],
    scale: Tensor | None,
) -> tuple[list[Tensor], dict[str, State], list[dict[str, Any]]]:
    """The new parameters, state, and hyper-parameters of each group; to be called without gradients.

    Args:
        params, grads: what `parts` are parts of; a leaf without gradient is stepped whole, and stays.
        engines, hypers: of each group.
        scale: what gradients are multiplied by, if anything.
    """
    new_params = list(params)
    new_state: dict[str, State] = {}
    new_hypers = [dict(hyper) for hyper in hypers]
    for group, (engine, hyper) in enumerate(zip(engines, hypers, strict=True)):
        members = [(index, leaf) for index, leaf in parts.whole if leaf.group == group]
        if members or not params:
            leaves = [leaf for _, leaf in members]
            given = [parts.states[leaf.path] for leaf in leaves]
            stepped, states, new_hypers[group] = engine.update(leaves, given, hyper, scale)
            for (index, leaf), param, own in zip(members, stepped, states, strict=True):
                new_params[index] = param
                if own:
                    new_state[leaf.path] = _declared(leaf, own)
    for part in parts.slices:
        own, some = parts.states[part.key], part.members
        stepped, own, new_hypers[part.group] = part.step(
            engines[part.group], [params[i] for i in some], [grads[i] for i in some], own, hypers[part.group], scale
        )
        for index, param in zip(some, stepped, strict=True):
            new_params[index] = param
        if own:
            new_state[part.key] = part.declare(own)
    return new_params, new_state, new_hypers


def _declared(leaf: Leaf, own: State) -> State:
    """State of a parameter that is cut says so, since a step's results are otherwise taken for replicated."""
    spec = layout_of(leaf.param)
    return declared(own, leaf.param.shape, spec) if spec.entries else own
