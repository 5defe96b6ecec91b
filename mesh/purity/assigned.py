"""A warning of bodies that give entries of their arguments other tensors, `params[name] = new`, and do not return them.

A rank's containers are its own: in plain torch the caller would see the new value. Invariant: what may be a step on the
way to a result, going by its shape, passes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...kernels.errors import message
from .. import trees
from ..replication.net import marked


def warn_of_assigned(
    name: str, function: Callable, before: Sequence[Any], now: Sequence[Any], result: Any, called: Callable[[int], str]
) -> None:
    """Warn, at a function's first line, of the first such entry.

    Args:
        name, function: what was called.
        before, now: the leaves of its arguments.
        result: what it returned.
        called: what a leaf is called.
    """
    kinds = {(leaf.shape, leaf.dtype) for leaf in trees.leaves(result) if isinstance(leaf, Tensor)}
    for index, (old, new) in enumerate(zip(before, now, strict=True)):
        both = new is not old and isinstance(old, Tensor) and isinstance(new, Tensor)
        if not both or marked(old) or (new.shape, new.dtype) in kinds:  # what is marked is cut, and a batch most often
            continue
        code = getattr(inspect.unwrap(function), "__code__", None)
        file, line = ("spmd", 1) if code is None else (code.co_filename, code.co_firstlineno)
        problem = f"{name} gives its {called(index)} another value, and does not return it: the caller never sees it"
        remedy = "return the new value, as in return {**params, name: value}"
        warnings.warn_explicit(message(problem, remedy=remedy), UserWarning, file, line)
        return
