"""The cases of a matrix, of which `make test` runs those that differ in kind, and `make test-long` the others, too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# For what stands above the communicators, and is the same whatever moves the bytes.
on_both = pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.long)])


def cases(kept: Callable[..., bool], *choices: Iterable[Any]) -> list[Any]:
    """One case for each combination of the choices, for `pytest.mark.parametrize`; those not kept are marked `long`.

    >>> [(*case.values, len(case.marks)) for case in cases(lambda size, name: size == 2 or name == "a", (1, 2), "ab")]
    [(1, 'a', 0), (1, 'b', 1), (2, 'a', 0), (2, 'b', 0)]
    """
    combinations = itertools.product(*choices)
    return [pytest.param(*case, marks=() if kept(*case) else pytest.mark.long) for case in combinations]
