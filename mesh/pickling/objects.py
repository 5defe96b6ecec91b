"""How objects of all kinds travel to another process, where cloudpickle alone would not do."""

from __future__ import annotations

from typing import Any

from ...kernels import torch_compiled
from ...kernels.mapped_files import opened_elsewhere
from . import functions, operators


def reduced(obj: Any) -> Any:
    """What pickle's `__reduce__` is to return of an object; None for most, which cloudpickle pickles well."""
    return torch_compiled.taken_apart(obj) or opened_elsewhere(obj) or operators.reduced(obj) or functions.reduced(obj)
