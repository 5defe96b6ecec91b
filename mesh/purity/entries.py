"""Warnings of bodies that change the containers and objects among their arguments, of which each rank has copies.

`log.append(loss)`, `state["step"] += 1` or a draw from a generator would be lost silently, if the body does not return
what it has changed: the next call begins with the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import optree
from torch import Tensor

from .. import trees
from ..pickling.references import SCALARS
from ..replication.net import marked
from .captured_state import WAY, CapturedState, reached, warn_at
from .generators import generator_state

_NUMBERS = int | float | complex
_LOST = "and does not return it: the caller never sees it"


class GivenObjects:
    """The state of a call's arguments that are objects: generators of random numbers, iterators, those of the program.

    Args:
        before, treedef: the arguments, flattened; those of a batch may be changed.
        whole: types whose instances are not looked into.
        called: gives the name of an argument's part from its path.
    """

    def __init__(
        self,
        before: Sequence[Any],
        treedef: optree.PyTreeSpec,
        whole: tuple[type, ...],
        called: Callable[[str], str],
    ):
        self._whole, self._states = whole, list[tuple[Any, str, CapturedState]]()
        objects = [index for index, one in enumerate(before) if not isinstance(one, (*SCALARS, Tensor))]
        if not objects:
            return
        accessors, places = treedef.accessors(), trees.places(treedef)
        batches = _sharded(before, accessors)
        for index in objects:
            if accessors[index][:2] not in batches:
                name = called(places[index])
                self._states.append((before[index], name, CapturedState([(before[index], name)], whole)))

    def check(self, name: str, function: Callable, result: Any) -> None:
        """Warn, at a function's first line, if it has changed one of them that is not in its result."""
        if not self._states:
            return
        leaves = trees.leaves(result)
        held = [one for one, _ in reached([(leaf, "") for leaf in leaves], self._whole)]
        returned, kinds = set(map(id, held)), set(map(_kind_of, leaves))
        for given, its, state in self._states:
            change = state.first_change(returned)
            if change is not None and not _gives_state(given, kinds):
                remedy = change[1] if change[1] != WAY else "return it, and pass what comes back to the next call"
                warn_at(function, f"{name} changes its {its}, {_LOST}", got=change[0], remedy=remedy)
                return


def _gives_state(given: Any, kinds: Set[Any]) -> bool:
    """Whether results of these kinds may be the state of a generator, with which the caller goes on."""
    state = set(map(_kind_of, trees.leaves(generator_state(given))))
    return bool(state) and state <= kinds


def warn_of_changed(
    name: str,
    function: Callable,
    before: Sequence[Any],
    treedef: optree.PyTreeSpec,
    arguments: Any,
    result: Any,
    called: Callable[[str], str],
) -> None:
    """Warn, at a function's first line, if it has changed an entry of its arguments and does not return the new one.

    What a body puts into its batch passes, since most that is put there is for the body itself.

    Args:
        name, function: what was called.
        before, treedef: the arguments, flattened, as they were passed.
        arguments: the same, after the call.
        result: what it returned.
        called: gives the name of an argument's part from its path.
    """
    now, changed = trees.flatten(arguments)
    if changed == treedef:
        path = _replaced(before, now, treedef, result)
        problem, remedy = "gives its {} another value", "return the new value, as in return {**params, name: value}"
    else:
        path = _filled(before, treedef, now, changed, arguments, result)
        problem, remedy = "adds to its {}", "return what is added, as a result of its own"
    if path is not None:
        problem = f"{name} {problem.format(called(path))}, {_LOST}"
        warn_at(function, problem, remedy=remedy)


def _replaced(before: Sequence[Any], now: Sequence[Any], treedef: optree.PyTreeSpec, result: Any) -> str | None:
    """The path of a leaf that is another tensor or number now.

    One like a result passes (a tensor's shape and dtype, a number's value): the result may have been computed from it.
    """
    kinds = {_kind_of(value) for value in trees.leaves(result)}
    for index, (old, new) in enumerate(zip(before, now, strict=True)):
        is_other = new is not old and (isinstance(new, Tensor) or (isinstance(new, _NUMBERS) and new != old))
        if is_other and not _is_cut(old) and _kind_of(new) not in kinds:
            return trees.places(treedef)[index]
    return None


def _filled(
    before: Sequence[Any],
    treedef: optree.PyTreeSpec,
    now: Sequence[Any],
    changed: optree.PyTreeSpec,
    arguments: Any,
    result: Any,
) -> str | None:
    """The path of a list that has grown, or of a dict that has a new number, or any entry where it had none."""
    there = set(trees.places(treedef))
    sharded = _sharded(before, treedef.accessors())
    known = set(map(id, before))
    for accessor, value in zip(changed.accessors(), now, strict=True):
        if accessor.codify("") in there or id(value) in known or accessor[:2] in sharded:
            continue
        path, kind = accessor[:-1].codify(""), accessor[-1].type
        was_empty = not any(own.startswith(path) for own in there)
        is_number = isinstance(value, _NUMBERS) or (isinstance(value, Tensor) and not value.ndim)
        if (kind is list or (issubclass(kind, dict) and (is_number or was_empty))) and not _contains(
            result, accessor[:-1](arguments)
        ):
            return path
    return None


def _sharded(before: Sequence[Any], accessors: Sequence[Any]) -> set[Any]:
    """The arguments that hold a sharded tensor."""
    return {accessor[:2] for accessor, value in zip(accessors, before, strict=True) if _is_cut(value)}


def _is_cut(value: Any) -> bool:
    """Whether a tensor is sharded; most that are belong to a batch."""
    return isinstance(value, Tensor) and bool(marked(value))


def _contains(tree: Any, container: Any) -> bool:
    """Whether a container is part of a tree, or a copy of it is (`[*log]`), perhaps with further entries."""
    entries = container.items() if isinstance(container, dict) else enumerate(container)
    own = {(key, id(value)) for key, value in entries}

    def is_it(node: Any) -> bool:
        if node is container or not isinstance(node, type(container)):
            return node is container
        its = node.items() if isinstance(node, dict) else enumerate(node)
        return own <= {(key, id(value)) for key, value in its}

    return any(map(is_it, trees.leaves(tree, is_leaf=is_it)))


def _kind_of(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value if isinstance(value, _NUMBERS) else None
