"""How objects of all kinds travel to another process, where cloudpickle alone would not do."""

from __future__ import annotations

from typing import Any

from ...kernels import torch_compiled
from ...kernels.mapped_files import opened_elsewhere
from . import functions, gpu_tensors, operators


def reduced(obj: Any) -> Any:
    """What pickle's `__reduce__` is to return of an object; None for most, which cloudpickle pickles well."""
    for module in (operators, functions, gpu_tensors):
        if (found := module.reduced(obj)) is not None:
            return found
    return torch_compiled.taken_apart(obj) or opened_elsewhere(obj)
