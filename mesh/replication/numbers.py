"""Python numbers that tell a rank's place: to all else they are their values, and the net knows along what they differ.

`axis_index` gives one where a body is followed, and arithmetic with it gives others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .net import Varying, active, joined


class VaryingInt(int):
    """An integer that says along which axes it differs between ranks; to all else it is its value."""

    varying: Varying

    def __reduce__(self) -> Any:
        return int, (int(self),)


class VaryingFloat(float):
    """As `VaryingInt`."""

    varying: Varying

    def __reduce__(self) -> Any:
        return float, (float(self),)


def varying_number(value: int, axes: Iterable[str], origin: str) -> int:
    """A rank's own number, followed if anything is."""
    net = active()
    if net is None:
        return value
    net.asked = True
    axes = net.axes & set(axes)
    if not axes:
        return value
    return _number(value, joined([Varying(dict.fromkeys(axes, origin))]))


def plain_number(value: Any) -> Any:
    """A number that is followed no longer."""
    return int(value) if type(value) is VaryingInt else float(value) if type(value) is VaryingFloat else value


def _number(value: Any, varying: Varying) -> Any:
    kind = VaryingInt if type(value) is int else VaryingFloat if type(value) is float else None
    if kind is None:
        return value
    made = kind(value)
    made.varying = varying
    return made


def _arithmetic(name: str) -> Callable:
    def method(self: Any, *others: Any) -> Any:
        result = getattr(self.__class__.__base__, name)(self, *others)
        if result is NotImplemented and others and isinstance(others[0], float):
            result = getattr(float, name)(float(self), *others)
        if result is NotImplemented:
            return result
        return _number(result, joined(number.varying for number in (self, *numbers_in(others))))

    method.__name__ = name
    return method


def numbers_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, VaryingInt | VaryingFloat):
            yield value
        elif isinstance(value, list | tuple):
            yield from numbers_in(value)
        elif isinstance(value, slice):
            yield from numbers_in((value.start, value.stop, value.step))


for _kind in (VaryingInt, VaryingFloat):
    for _op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
        for _name in (f"__{_op}__", f"__r{_op}__"):
            if hasattr(_kind.__base__, _name):
                setattr(_kind, _name, _arithmetic(_name))
    for _op in ("neg", "pos", "abs", "invert"):
        if hasattr(_kind.__base__, f"__{_op}__"):
            setattr(_kind, f"__{_op}__", _arithmetic(f"__{_op}__"))
