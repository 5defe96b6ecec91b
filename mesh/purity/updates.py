"""Steps of optimizers whose result a body drops, or that it gives something else than gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...kernels.errors import SpecError
from ...kernels.flat import storages
from .. import trees


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """One step of an optimizer: the parameters, gradients and state that it was given, and what it made of them."""

    given: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor | None]
    given_state: Any
    made: Sequence[torch.Tensor]
    state: Sequence[torch.Tensor]


def check_updates(
    updates: Sequence[Update],
    differentiated: Sequence[torch.Tensor],
    arguments: Sequence[Any],
    result: Any,
    name: str,
    where: str,
) -> None:
    """Refuse a body that gives an optimizer parameters for gradients, or drops what the optimizer made.

    Args:
        updates: that the body made.
        differentiated: what it took gradients with respect to.
        arguments, result: the leaves that it got, and what it returned.
        name, where: of the body, for the message.
    """
    results = trees.leaves(result) if updates else []
    remedy = "params, opt_state = opt.step(params, grads, opt_state), and return these"
    for update in updates:
        if _is_swapped(update, differentiated):
            problem = f"{name} gives opt.step as gradients what it takes gradients by"
        elif _is_dropped(update, arguments, results):
            problem = f"{name} returns parameters as it was given them, and drops those that opt.step made of them"
            problem += ": nothing would be trained"
        elif _state_is_dropped(update, result):
            problem = f"{name} returns its optimizer's state as it was given it, and drops what opt.step made"
        else:
            continue
        raise SpecError(problem, where=where, remedy=remedy)


def _is_swapped(update: Update, differentiated: Sequence[torch.Tensor]) -> bool:
    """Whether an optimizer was given parameters as its gradients."""
    ids = {id(leaf) for leaf in differentiated}
    grads = [grad for grad in update.grads if grad is not None]
    return bool(grads) and all(id(grad) in ids for grad in grads)


def _state_is_dropped(update: Update, results: Any) -> bool:
    """Whether a step returns an optimizer's new parameters, but the state that the optimizer was given."""
    leaves = trees.leaves(results, is_leaf=lambda node: node is update.given_state)
    returned = {id(leaf) for leaf in leaves}
    trains = not _memory(leaves).isdisjoint(_memory(update.made))
    drops = bool(update.state) and not any(id(one) in returned for one in update.state)
    return trains and drops and id(update.given_state) in returned


def _is_dropped(update: Update, arguments: Sequence[Any], results: Sequence[Any]) -> bool:
    """Whether a step returns the parameters that it was called with, its optimizer's new state, and no new parameters.

    A step that skips an update on purpose returns the old state as well.
    """
    returned = {id(leaf) for leaf in results}
    unchanged = returned & {id(leaf) for leaf in update.given} & {id(leaf) for leaf in arguments}
    kept = not _memory(results).isdisjoint(_memory(update.made))
    return bool(unchanged) and not kept and (not update.state or any(id(one) in returned for one in update.state))


def _memory(leaves: Iterable[Any]) -> set[int]:
    """The addresses of the tensors' storages."""
    return set().union(*(storages(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)))
