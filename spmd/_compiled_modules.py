"""Modules that were compiled in place, `module.compile()`: which parts, with what, and their copies compiled alike.

torch's copies of a module forget it, and so would what is shipped to the ranks. Invariant: where nothing was compiled,
torch's compiler is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .kernels import torch_compiled, torch_private


def compiled_parts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """By the name of each part that was compiled, the module itself has none, what `compile` was given.

    Raises:
        TypeError: this version of torch keeps it elsewhere.
    """
    calls = {name: torch_private.compiled_call(part) for name, part in module.named_modules()}
    return {name: torch_compiled.options_of(call) for name, call in calls.items() if call is not None}


def compile_parts(module: nn.Module, parts: Mapping[str, dict[str, Any]]) -> nn.Module:
    """Compile the same parts of a copy in place."""
    for name, options in parts.items():
        module.get_submodule(name).compile(**options)
    return module
