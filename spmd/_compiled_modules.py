"""Modules compiled in place by `module.compile()`: which parts were, with which options, and the same for copies.

A deep copy of a module is no longer compiled, and neither would be what is shipped to the ranks. Invariant: if nothing
was compiled, torch's compiler is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .kernels import torch_compiled, torch_private


def compiled_parts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The options that `compile` was given, by the name of each compiled part (empty for the module itself).

    Raises:
        TypeError: this version of torch keeps them elsewhere.
    """
    calls = {name: torch_private.compiled_call(part) for name, part in module.named_modules()}
    return {name: torch_compiled.options_of(call) for name, call in calls.items() if call is not None}


def compile_parts(module: nn.Module, parts: Mapping[str, dict[str, Any]]) -> nn.Module:
    """Compile the same parts of a copy in place."""
    for name, options in parts.items():
        module.get_submodule(name).compile(**options)
    return module
