"""A warning of programs that drop what a training step gives them, and call it with the old values again.

They train nothing, and no error shows it: `train_step(params, opt_state, batch)` alone on its line. Those that drop the
optimizer's new state alone train with its first one.
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """How many calls in a row dropped some of the new values, and by name the last one's arguments and new values."""

    times: int
    given: dict[str, Any]
    new: dict[str, _Refs]


_FIRST = _Calls(0, 0, _TIMES, [], [], [])
# Not kept in the steps, which travel.
_known: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()
_parts: weakref.WeakKeyDictionary[Any, _Parts] = weakref.WeakKeyDictionary()
_all_looked: weakref.WeakSet[Any] = weakref.WeakSet()
_some_looked: weakref.WeakSet[Any] = weakref.WeakSet()
used: weakref.WeakSet[Any] = weakref.WeakSet()  # steps of which calls have shown that their results are used, or not


def look(step: Any, batch: str, arguments: tuple[tuple, dict[str, Any]], results: Any, *, quiet: bool) -> None:
    """Look at a call of a step, and warn if it is the last of several in a row whose results were dropped.

    Args:
        step: the @spmd function that was called, which is not among `used`.
        batch: the name of the argument with samples, which are others each time.
        arguments: (args, kwargs).
        quiet: another rank says it.
    """
    named = step.named(*arguments)
    samples = _tensors(named.pop(batch, None))
    renewed = _renewed(named, results)
    for is_over, look_at in ((_all_looked, _look_at_all), (_some_looked, _look_at_some)):
        if step not in is_over:
            dropped = look_at(step, named, samples, renewed)
            if dropped is None:
                continue
            is_over.add(step)
            if dropped and not quiet:
                _warn(step, arguments, renewed, dropped)
    if step in _all_looked and step in _some_looked:
        used.add(step)


def _warn(step: Any, arguments: tuple[tuple, dict[str, Any]], renewed: dict[str, Any], dropped: list[str]) -> None:
    name, names, every = step.program.name, ", ".join(dropped), ", ".join(renewed)
    problem = f"{name} returns new values of {names}, and this program drops them: nothing is trained"
    if len(dropped) < len(renewed):
        kept = ", ".join(one for one in renewed if one not in dropped)
        problem = f"{name} returns new values of {every}, and this program takes those of {kept} alone"
        problem += f": each call begins with the same {names}"
    written = f"{every}, loss = {name}({', '.join(step.named(*arguments))})"
    warn(problem, remedy=f"write {written}, with all results in their order")


def _look_at_all(step: Any, named: dict[str, Any], samples: list[Any], renewed: dict[str, Any]) -> list[str] | None:
    """The names of arguments whose new values are all dropped; empty if they are not, None if it is not clear yet."""
    before, turn = _known.get(step, _FIRST), RunState.turns
    if turn != before.turn + 1:  # what was called in between may have used the results
        before = _FIRST
    given = _tensors(named)
    is_dropped = all(ref() is None for ref in before.new)
    again = is_dropped and _are(before.given, given) and not _are(before.batch, samples)
    # Both parameters and the optimizer's state: gradients alone may be what is wanted.
    if len(renewed) < 2 or (before is not _FIRST and not again):
        return []
    new = _tensors(next(iter(renewed.values())))  # of `_, _, loss = step(...)` the last one is kept by its name
    _known[step] = now = _Calls(turn, before.dropped + again, before.most, _refs(given), _refs(samples), _refs(new))
    if now.dropped == now.most:
        if all(_is_unchanged(named[name], value) for name, value in renewed.items()):
            _known[step] = dataclasses.replace(now, dropped=0, most=2 * now.most)  # it evaluates, and may train later
            return None
        return [*renewed]
    return None


def _look_at_some(step: Any, named: dict[str, Any], samples: list[Any], renewed: dict[str, Any]) -> list[str] | None:
    """As `_look_at_all`, of the state of optimizers alone, or of all but these; others may be dropped on purpose."""
    states = [name for name in renewed if _is_state(named[name])]
    others = [name for name in renewed if name not in states]
    before = _parts.pop(step, None)
    if not states or not others:
        return []
    now = _Parts(
        0 if before is None else before.times + 1,
        {name: _refs(_tensors(named[name])) or named[name] for name in renewed},
        {name: _refs(_tensors(value)) for name, value in renewed.items()},
    )
    if before is not None:
        goes_on = {name for name, new in before.new.items() if new and _are(new, _tensors(named.get(name)))}
        stays = {name for name, given in before.given.items() if _is_given(given, named.get(name))}
        pairs = ((states, others), (others, states))
        dropped = next((one for one, other in pairs if stays >= {*one} and goes_on & {*other}), [])
        if not dropped:
            return []
        if now.times == _TIMES:
            return [name for name in dropped if not _is_unchanged(named[name], renewed[name])]
    _parts[step] = now
    return None


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and {"state", "hyper"} <= value.keys()


def _is_given(before: Any, value: Any) -> bool:
    """Whether an argument is the same again; `before` are its tensors, or itself if it had none."""
    tensors = _tensors(value)
    return _are(before, tensors) if isinstance(before, list) and tensors else before is value


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
    if len(_tensors(old)) != len(_tensors(new)):  # as a state that the first step fills
        return False
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
