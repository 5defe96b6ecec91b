"""A warning of programs that drop what a training step gives them, and call it with the old values again.

They train nothing, and no error shows it: `train_step(params, opt_state, batch)` alone on its line.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor

from .kernels.callsite import warn
from .kernels.errors import SpmdError
from .mesh import trees
from .mesh.array import Array
from .mesh.run_state import RunState

_TIMES = 3  # that all was dropped; a program may warm up with two batches. Later, if the values were no new ones, more

_Refs = list[weakref.ref]


@dataclasses.dataclass(frozen=True, slots=True)
class _Calls:
    """How many calls in a row had new values dropped, and how many may; the last one's arguments, batch, new values.

    Attributes:
        turn: the last one's, see `RunState.turns`.
    """

    turn: int
    dropped: int
    most: int
    given: _Refs
    batch: _Refs
    new: _Refs


_FIRST = _Calls(0, 0, _TIMES, [], [], [])
# Not kept in the steps, which travel.
_known: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()
used: weakref.WeakSet[Any] = weakref.WeakSet()  # steps of which a call has shown that their results are used


def look(step: Any, batch: str, arguments: tuple[tuple, dict[str, Any]], results: Any, *, quiet: bool) -> None:
    """Look at a call of a step, and warn if it is the last of several in a row whose results were dropped.

    Args:
        step: the @spmd function that was called, which is not among `used`.
        batch: the name of the argument with samples, which are others each time.
        arguments: (args, kwargs).
        quiet: another rank says it.
    """
    before, turn = _known.get(step, _FIRST), RunState.turns
    if turn != before.turn + 1:  # what was called in between may have used the results
        before = _FIRST
    named = step.named(*arguments)
    samples = _tensors(named.pop(batch, None))
    renewed = _renewed(named, results)
    given = _tensors(named)
    is_dropped = all(ref() is None for ref in before.new)
    again = is_dropped and _are(before.given, given) and not _are(before.batch, samples)
    # Both parameters and the optimizer's state: gradients alone may be what is wanted.
    if len(renewed) < 2 or (before is not _FIRST and not again):
        used.add(step)
        return
    new = _tensors(next(iter(renewed.values())))  # of `_, _, loss = step(...)` the last one is kept by its name
    _known[step] = now = _Calls(turn, before.dropped + again, before.most, _refs(given), _refs(samples), _refs(new))
    if now.dropped == now.most:
        if all(_is_unchanged(named[name], value) for name, value in renewed.items()):
            _known[step] = dataclasses.replace(now, dropped=0, most=2 * now.most)  # it evaluates, and may train later
            return
        used.add(step)
        if not quiet:
            name, names = step.program.name, ", ".join(renewed)
            problem = f"{name} returns new values of {names}, and this program drops them: nothing is trained"
            written = f"{names}, loss = {name}({', '.join(step.named(*arguments))})"
            warn(problem, remedy=f"write {written}, with all results in their order")


def _renewed(arguments: dict[str, Any], results: Any) -> dict[str, Any]:
    """The containers among the results that are like an argument, by the argument's name."""
    found: dict[str, Any] = {}
    left = [*results.values()] if isinstance(results, dict) else [*results] if isinstance(results, tuple | list) else []
    for name, value in arguments.items():
        like = next((index for index, one in enumerate(left) if _is_like(value, one)), None)
        if like is not None:
            found[name] = left.pop(like)
    return found


def _is_like(value: Any, other: Any) -> bool:
    if type(value) is not type(other) or isinstance(value, Tensor | Array):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys()
    return isinstance(value, list | tuple) and len(value) == len(other)


def _is_unchanged(old: Any, new: Any) -> bool:
    """Whether a step returned an argument as it was given it. A launched rank looks at what it has itself."""
    for before, after in zip(_tensors(old), _tensors(new), strict=False):
        if isinstance(after, Array) and not after.mesh.is_driver:
            if after.spec.entries:
                continue
            before, after = before.local if isinstance(before, Array) else before, after.local
            before = before.to(after.device)
        try:
            if before.dtype != after.dtype or not torch.equal(before, after):
                return False
        except (NotImplementedError, TypeError, RuntimeError, SpmdError):  # sparse and nested ones can't be compared
            return False
    return True


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in trees.leaves(tree) if isinstance(leaf, Tensor | Array)]


def _refs(leaves: list[Any]) -> _Refs:
    return list(map(weakref.ref, leaves))


def _are(refs: _Refs, leaves: list[Any]) -> bool:
    return len(refs) == len(leaves) and all(ref() is leaf for ref, leaf in zip(refs, leaves, strict=True))
