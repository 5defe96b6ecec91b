"""Where torch's compiler looks for the globals of a function that it inlines.

It takes the module that the function's globals name, such as `__main__`. A function that came to a rank by value is not
its module's, and has globals of its own: guards would read others, or find none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MODULE, _METHOD = "torch._dynamo.symbolic_convert", "get_globals_source_and_value"


def inline_with_own_globals() -> None:
    """From now on, have the compiler, once it is imported, take the globals that a function has. Public way: none."""
    if _MODULE in sys.modules:
        _change(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the compiler as Python does, and changes it when it has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change(module: ModuleType) -> None:
    translator = getattr(module, "InliningInstructionTranslator", None)
    before = getattr(translator, _METHOD, None)
    if before is not None and not hasattr(before, "__wrapped__"):
        setattr(translator, _METHOD, _with_own_globals(before))


def _with_own_globals(before: Callable) -> Callable:
    @functools.wraps(before)
    def found(translator: Any, name: str) -> Any:
        names = translator.f_globals
        module = sys.modules.get(names.get("__name__", ""))
        if module is None or vars(module) is names:
            return before(translator, name)
        source, builder = sys.modules["torch._dynamo.source"], sys.modules["torch._dynamo.variables.builder"]
        of_all = source.GlobalSource(translator.output.install_global_by_id("globals", names))
        return names, builder.VariableBuilder(translator, of_all)(names), source.DictGetItemSource(of_all, name)

    return found
