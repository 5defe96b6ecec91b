"""`torch.distributed` learns of the backend "spmd" as soon as both are loaded, whichever comes first.

The reason: `import spmd` loads nothing of torch, and a program that never communicates should not pay for it.
Invariant: only a function is registered, and the backend itself is loaded when a process group is made.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "spmd"
DEVICES = ("cpu", "cuda")
_MODULE = "torch.distributed.distributed_c10d"


def register_when_loaded() -> None:
    """Register now if `torch.distributed` is loaded, else when it is."""
    loaded = sys.modules.get(_MODULE)
    if loaded is not None:
        _register(loaded)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    module.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def _create(options: Any, backend_options: Any) -> Any:
    return importlib.import_module(f"{__package__}.creation").create(options)  # loaded when it is wanted


class _Finder:
    """Finds one module, once, and registers the backend with it when it has been loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _register(module)

            loader.exec_module = exec_module
        return spec
