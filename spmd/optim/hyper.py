"""The numbers of a parameter group, which every step reads from the state, and what a step writes in the group."""

from __future__ import annotations

import abc
import difflib
import inspect
import numbers
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from ..kernels.callsite import warn
from ..kernels.errors import SpecError, SpmdError


def is_numeric(value: Any) -> bool:
    kind = type(value)
    if kind is float or kind is int:  # most are; asking an abstract class takes longer
        return True
    if value is None or kind is bool:
        return False
    if isinstance(value, tuple):
        return all(item is None or is_numeric(item) for item in value)
    return isinstance(value, numbers.Real | Tensor)


_ELSEWHERE = {  # what others call arguments of optimizer
    "params": "opt.init(params) takes them",
    "learning_rate": "it is lr=",
    **dict.fromkeys(("max_norm", "max_grad_norm", "grad_clip", "clip_norm"), "it is clip="),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "it is schedule="),
}


def instead_of(name: str, accepted: Iterable[str]) -> str:
    """What to write for a keyword that an optimizer's class does not take, if that can be guessed."""
    close = difflib.get_close_matches(name, [*accepted, "shard", "groups", "schedule", "clip"], 1)
    return _ELSEWHERE.get(name) or (f"write {close[0]}=" if close else "")


def lent(options: dict[str, Any], expected: frozenset[str], hyper: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters as torch wants them: the user may have put a tensor for a number, a list for a tuple."""
    if hyper.keys() != expected:
        refuse_unknown(min(hyper.keys() ^ expected), expected)

    def lend(name: str, default: Any, value: Any) -> Any:
        if type(value) is type(default) is float:
            return value
        if isinstance(default, tuple) and isinstance(value, tuple | list) and len(value) == len(default):
            return tuple(lend(name, *pair) for pair in zip(default, value, strict=True))
        if isinstance(value, Tensor) and value.numel() == 1 and not isinstance(default, Tensor):
            return value.item()
        odd = isinstance(default, tuple) or isinstance(value, tuple) or not is_numeric(value)
        if value is not default and (odd or (isinstance(value, Tensor) and value.numel() != 1)):
            problem = f"opt_state['hyper'][{name!r}] has an unexpected value"
            raise SpecError(problem, got=repr(value), expected=f"something like {default!r}")
        return value

    return {name: lend(name, options[name], value) for name, value in hyper.items()}


def refuse_unknown(name: str, expected: frozenset[str]) -> NoReturn:
    problem = f"opt_state['hyper'] {'misses' if name in expected else 'has an unknown'} {name!r}"
    expected_names = f"the names {sorted(expected)}"
    raise SpecError(problem, expected=expected_names, remedy="pass what opt.init returned")


def written(
    cls: type, group: Mapping[str, Any], options: Mapping[str, Any], lent: Mapping[str, Any], numeric: frozenset[str]
) -> dict[str, Any]:
    """What a step has put in its group besides the numbers, to find it there in the next one (a count, a flag).

    Raises:
        SpmdError: it can't be kept.
    """
    found = {
        name: value
        for name, value in group.items()
        if name not in numeric and name != "params" and (name in lent or value is not options.get(name, group))
    }
    for name, value in found.items():
        if not (value is None or isinstance(value, bool | str) or is_numeric(value)):
            raise SpmdError(
                f"{cls.__name__} keeps something in its parameter group that is no number",
                got=f"{name!r}, of type {type(value).__name__}",
                remedy="keep it per parameter, or as a number in the group",
            )
    return found


def numbers_in(instance: Optimizer) -> dict[str, Any]:
    """The numbers that an optimizer keeps in itself, in no group and for no parameter."""
    return {name: value for name, value in vars(instance).items() if type(value) in (int, float)}


def warn_of_own(cls: type, before: Mapping[str, Any], instance: Optimizer) -> bool:
    """Warn if a step has changed one of them, which no state has: a run that is resumed begins with its first value."""
    after = numbers_in(instance)
    name = next((name for name, value in before.items() if after.get(name, value) != value), None)
    if name is not None:
        problem = f"{cls.__name__} changes a number that it keeps in itself, and opt_state has no part in it"
        warn(problem, got=f"self.{name}", remedy=f"keep it in the group: self.param_groups[0][{name!r}]")
    return name is not None


def mentions(cls: type, name: str) -> bool:
    """Whether methods of an optimizer's class have a name among their constants, as those that write it once do."""
    for code in _codes(base for base in cls.__mro__ if base not in (Optimizer, object)):
        if any(name in one if isinstance(one, tuple) else name == one for one in code.co_consts):
            return True
    return False


def sees_classes(cls: type) -> bool:
    """Whether an optimizer's class may notice one that is derived from it: it lists these, or asks for its type."""
    own = [base for base in cls.__mro__[:-1] if not base.__module__.startswith("torch.optim")]
    lists = type(cls) not in (type, abc.ABCMeta) or any("__init_subclass__" in vars(base) for base in own)
    return lists or any({"type", "__class__"} & {*code.co_names} for code in _codes(own))


def _codes(classes: Iterable[type]) -> Iterator[types.CodeType]:
    """The code of the methods of some classes, and of the functions in them."""
    methods = map(inspect.unwrap, (value for cls in classes for value in vars(cls).values()))
    codes = [method.__code__ for method in methods if isinstance(method, types.FunctionType)]
    for code in codes:
        yield code
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
