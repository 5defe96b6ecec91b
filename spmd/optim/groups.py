"""Parameter groups: which parameters are stepped with options of their own.

Invariant: a parameter belongs to the first group that names it, and to the default one if none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
from torch import Tensor, nn

from ..kernels.arguments import checked_flag
from ..kernels.callsite import warn
from ..kernels.errors import SpecError
from ..mesh import trees

Groups = Sequence[Mapping[str, Any]]

FORM = 'groups=[{"params": lambda name, p: name.endswith("bias"), "weight_decay": 0.0}]'


def check(groups: Any) -> list[tuple[Any, dict[str, Any]]]:
    """For each group, what names its parameters, and its options."""
    if isinstance(groups, Sequence) and all(isinstance(one, Mapping) and "params" in one for one in groups):
        for number, one in enumerate(groups):
            _refuse_parameters(number, one["params"])
        return [(one["params"], {name: value for name, value in one.items() if name != "params"}) for one in groups]
    raise SpecError(
        "optimizer got an unexpected argument 'groups'",
        got=repr(groups),
        expected='a list of dictionaries, each with "params" and the options of these parameters',
        remedy=f"write {FORM}",
    )


def _refuse_parameters(number: int, which: Any) -> None:
    """Refuse a module, and its parameters themselves, as torch's constructors take them."""
    if isinstance(which, nn.Module | Iterator | nn.Parameter) or (
        isinstance(which, list | tuple | set) and any(isinstance(one, nn.Parameter) for one in which)
    ):
        raise SpecError(
            f'"params" of groups[{number}] does not name parameters',
            got=f"a {type(which).__name__}",
            expected="a function of a name and a tensor, a list of names, or a tree of booleans",
            remedy='write "params": lambda name, p: name.startswith("head."), or names such as ["head.weight"]',
        )


def warn_of_empty(count: int, numbers: Sequence[int], treedef: optree.PyTreeSpec) -> None:
    """Warn of groups that no parameter belongs to, whose options have no effect.

    Args:
        count: how many groups there are.
        numbers: the group of every leaf.
    """
    for number in sorted({*range(1, count + 1)} - {*numbers}):
        problem = f"no parameter belongs to groups[{number - 1}], and its options have no effect"
        remedy = 'look at its "params", and at those of the groups before it, which come first'
        warn(problem, got=f"parameters {names_of(treedef)[:5]}", remedy=remedy)


def numbers_of(groups: Sequence[Any], params: Any) -> list[int]:
    """The group of every leaf of `params`: 0 is the default, 1 the first of `groups`."""
    leaves, treedef = trees.flatten(params)
    if not groups:
        return [0] * len(leaves)
    names = names_of(treedef)
    chosen = [0] * len(leaves)
    for number, which in reversed([*enumerate(groups, 1)]):
        for index, is_in in enumerate(_members(which, names, leaves, treedef, number)):
            if is_in:
                chosen[index] = number
    return chosen


def names_of(treedef: optree.PyTreeSpec) -> list[str]:
    """The path of every leaf with dots, as `named_parameters` has it."""
    return [".".join(str(entry) for entry in path) for path in treedef.paths()]


def _members(which: Any, names: list[str], leaves: list[Any], treedef: optree.PyTreeSpec, number: int) -> list[bool]:
    if callable(which):
        named = zip(names, leaves, strict=True)
        try:
            return [isinstance(leaf, Tensor) and bool(which(name, leaf)) for name, leaf in named]
        except TypeError as error:  # of a regular expression's search, the second argument is a position
            raise SpecError(
                f'"params" of groups[{number - 1}] is a function that fails for a name and a parameter',
                got=f"{type(error).__name__}: {error}",
                remedy='write lambda name, p: ..., such as "params": lambda name, p: name.endswith("bias")',
            ) from error
    if isinstance(which, list | tuple | set | frozenset) and all(isinstance(name, str) for name in which):
        if unknown := sorted({*which} - {*names}):
            problem = f"groups[{number - 1}] names {unknown[0]!r}, which is no parameter"
            raise SpecError(problem, got=sorted(which)[:5], expected=f"some of {names[:5]}")
        return [name in which for name in names]
    what = f'"params" of groups[{number - 1}]'
    if isinstance(which, str):  # as a prefix tree, it would be one truth for all
        raise SpecError(f"{what} is a text", got=repr(which), remedy=f'write "params": [{which!r}]')
    try:
        spread = trees.broadcast_to(which, treedef)
    except ValueError:
        problem = f"{what} does not fit the parameters"
        expected = "a function of a name and a tensor, a list of names, or a tree of booleans, a prefix of theirs"
        raise SpecError(problem, got=trees.shown(which), expected=expected) from None
    remedy = "give True or False for each parameter, or a list of names"
    return [checked_flag(what, f"value for {name}", one, remedy) for name, one in zip(names, spread, strict=True)]


def refuse_module(what: str, params: Any) -> None:
    """Refuse a module or its `parameters()`, whose structure no step could return, and an optimizer's state."""
    is_state = isinstance(params, Mapping) and {"state", "hyper"} <= params.keys()
    if isinstance(params, nn.Module | Iterator) or is_state:
        raise SpecError(
            f"{what} takes the tree of parameters",
            got="an optimizer's state" if is_state else f"a {type(params).__name__}",
            remedy="apply, params = functional(model), and opt.init(params)",
        )


def check_params(params: Any, options: Sequence[str]) -> None:
    """Refuse what torch's constructors take: groups, a module's parameters one after another."""
    refuse_module("opt.init", params)
    grouped = isinstance(params, Sequence) and bool(params)
    if grouped and all(isinstance(one, Mapping) and "params" in one for one in params):
        named = next((name for one in params for name in one if name != "params" and name in options), None)
        if named is not None:
            raise SpecError(
                "opt.init takes the tree of parameters, and their groups are given to optimizer",
                got=f'a list of dictionaries with "params" and {named!r}',
                remedy=f"write optimizer(..., {FORM}), and opt.init(params)",
            )
