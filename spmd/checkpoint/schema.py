"""What the fields of a file may be: small checks that combine into a schema.

Invariant: whatever a file has, a check passes or raises `Invalid`, which names the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[str, Any], None]  # of a field's name and its value
LARGEST = 2**62
LONGEST_NUMBER = 1024  # bits


class Invalid(Exception):
    """A field is not as `save` writes it: its name, what it has, what was expected."""

    def __init__(self, field: str, got: Any, expected: str):
        try:
            text = repr(got)
        except RecursionError:
            text = "lists within lists"
        super().__init__(field, text if len(text) <= 80 else f"{text[:80]}...", expected)


def require(condition: bool, field: str, got: Any, expected: str) -> None:
    if not condition:
        raise Invalid(field, got, expected)


def anything(field: str, value: Any) -> None:
    pass


def text(field: str, value: Any) -> None:
    require(isinstance(value, str), field, value, "a string")


def flag(field: str, value: Any) -> None:
    require(isinstance(value, bool), field, value, "true or false")


def whole(field: str, value: Any) -> None:
    require(type(value) is int and 0 <= value < LARGEST, field, value, "a whole number from 0 on")


def number(field: str, value: Any) -> None:
    fits = type(value) is int and value.bit_length() <= LONGEST_NUMBER
    require(fits, field, value, f"a whole number of at most {LONGEST_NUMBER} bits")


def plain(field: str, value: Any) -> None:
    if type(value) is int:
        number(field, value)
    else:
        require(isinstance(value, bool | float | str | None), field, value, "a number, a string, true, false or null")


def one_of(*values: Any) -> Check:
    return lambda field, value: require(
        any(value == one and type(value) is type(one) for one in values), field, value, f"one of {values}"
    )


def list_of(of: Check) -> Check:
    def check_list(field: str, value: Any) -> None:
        require(isinstance(value, list), field, value, "a list")
        for index, item in enumerate(value):
            of(f"{field}[{index}]", item)

    return check_list


def mapping_of(of: Check) -> Check:
    def check_mapping(field: str, value: Any) -> None:
        require(isinstance(value, dict), field, value, "an object")
        for name, item in value.items():
            of(f"{field}[{name!r}]", item)

    return check_mapping


def fields(field: str, value: Any, required: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> None:
    """An object of these fields and no others."""
    known = {**required, **(more or {})}
    require(isinstance(value, dict), field, value, "an object")
    fits = {*required} <= {*value} <= {*known}
    require(fits, field or "the whole", [*value], f"the fields {', '.join(required)}")
    for name, item in value.items():
        known[name](f"{field}.{name}".strip("."), item)


def sha256(field: str, value: Any) -> None:
    fits = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
    require(fits, field, value, "a SHA-256")
