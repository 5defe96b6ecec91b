"""Modules that were edited on disk, loaded again into a process that keeps running.

For notebooks, where part of the program lies in files beside it. Reloaded are the program's own modules (not installed
packages, not this library) whose file has changed since they were first seen here, and modules that import them, each
after what it imports. A module's functions remain the same objects and get the new code, so that everything that refers
to them does what the file says now.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import operator
import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

from ...kernels.callsite import is_our_file
from .functions import travels_by_name

_INSTALLED = tuple(
    os.path.join(os.path.realpath(sysconfig.get_path(name)), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# Also those of other environments that a .pth file adds.
_PACKAGES = {"site-packages", "dist-packages"}


class LoadedModules:
    """The program's own modules in this process, and the state of each one's file when it was first seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        # Of each module: its spec, of which every load makes a new one, and the time of the file when it was loaded.
        self._specs: dict[str, Any] = {}
        self._times: dict[str, float] = {}
        self._names: set[str] = set()  # of all modules there were

    def notice(self) -> None:
        """Note modules that were imported since the last call."""
        if sys.modules.keys() != self._names:
            self._names = set(sys.modules)
            for name, file in _own_modules().items():
                self._seen.setdefault(name, _state_when_loaded(name, file))
                self._times.setdefault(name, self._seen[name][0] / 1e9)
                self._specs.setdefault(name, sys.modules[name].__spec__)

    def loaded_again(self) -> tuple[str, ...]:
        """Those that something else has loaded since the last call: `importlib.reload`, IPython's `%autoreload`."""
        specs, times, found = self._specs.copy(), _times_of_autoreload(), []  # other threads may note modules meanwhile
        now = [getattr(module, "__spec__", None) for module in map(sys.modules.get, specs)]
        if not times and all(map(operator.is_, now, specs.values())):  # in every call, with hundreds of modules
            return ()
        for name, spec in zip(specs, now, strict=True):
            time = times.get(name, self._times[name])
            if (spec is not None and spec is not specs[name]) or time > self._times[name] + 1e-5:  # rounded, as floats
                found.append(name)
                self._specs[name], self._times[name] = spec or specs[name], time
        return tuple(found)

    def reload(self, names: Iterable[str] = ()) -> list[str]:
        """Reload modules that have changed, and `names` in any case; returns the reloaded modules, in that order.

        Raises:
            whatever a module raises; the modules after it are reloaded at the next call.
        """
        self.notice()
        own = _own_modules()
        stale = {name for name, file in own.items() if name in names or _state(file) != self._seen.get(name)}
        if not stale:
            return []
        imports = {name: _imported_by(name, file) & own.keys() for name, file in own.items()}
        while more := {name for name in own if name not in stale and imports[name] & stale}:
            stale |= more
        done: list[str] = []
        for name in _after_their_imports(stale, imports):
            state = _state(own[name])
            try:
                _reload(sys.modules[name])
            finally:  # one that fails has a new spec, too
                self._specs[name], self._times[name] = sys.modules[name].__spec__, state[0] / 1e9
            self._seen[name] = state
            done.append(name)
        return done


def _times_of_autoreload() -> dict[str, float]:
    """Of which time the files are that `%autoreload` has looked at, by their modules' names.

    It may run the lines that have changed, and leave the rest of the module as it is.
    """
    extension = sys.modules.get("IPython.extensions.autoreload")
    shell = None if extension is None else sys.modules["IPython"].get_ipython()
    magics = None if shell is None else shell.magics_manager.registry.get("AutoreloadMagics")
    times: dict[str, float] = getattr(getattr(magics, "_reloader", None), "modules_mtimes", {})
    return times


def _own_modules() -> dict[str, str]:
    found = {}
    for name in list(sys.modules):
        file = own_file(name)
        if file is not None:
            found[name] = file
    return found


def own_file(name: str) -> str | None:
    """The file of an imported module, if it is one of the program's own; else None."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or name in ("__main__", "__mp_main__"):
        return None
    if getattr(getattr(module, "__spec__", None), "name", None) != name or is_our_file(file):
        return None
    # The path as it is first, since resolving links takes 0.1 s for hundreds of modules.
    installed = _is_installed(file) or _is_installed(os.path.realpath(file))
    return file if not installed and os.path.exists(file) else None


@functools.lru_cache(maxsize=4096)
def is_own(module: str) -> bool:
    """Whether an imported module is one of the program's own."""
    return own_file(module) is not None


def is_programs(obj: types.FunctionType | type) -> bool:
    """Whether a function or a class belongs to the program: it travels by value, or is of one of its modules."""
    return not travels_by_name(obj) or is_own(obj.__module__)


def _is_installed(path: str) -> bool:
    return path.startswith(_INSTALLED) or not _PACKAGES.isdisjoint(path.split(os.sep))


def _state_when_loaded(name: str, file: str) -> tuple[int, int]:
    """That of the file; one of no file, if the module was made from another text (see `edited`)."""
    return _state(file) if sys.modules[name].__spec__.loader_state is None else (0, 0)  # type: ignore[union-attr]


def _state(file: str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_mtime_ns, status.st_size


def _imported_by(name: str, file: str) -> set[str]:
    """The names of modules that a file's import statements may mean."""
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except SyntaxError:  # raised when it is reloaded
        return set()
    found: set[str] = set()
    package = sys.modules[name].__package__ or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found - {name}


def _after_their_imports(names: set[str], imports: dict[str, set[str]]) -> list[str]:
    order: dict[str, None] = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name not in order and name not in above:
            for imported in sorted(imports[name] & names):
                visit(imported, (*above, name))
            order[name] = None

    for name in sorted(names):
        visit(name, ())
    return list(order)


def _reload(module: types.ModuleType) -> None:
    """Reload a module: its functions stay the same objects, and names that `__main__` imported are bound again."""
    before = dict(vars(module))
    # A cached .pyc file is matched by the second and the size, and an edit may change neither.
    if getattr(module, "__cached__", None):
        with contextlib.suppress(OSError):
            os.remove(module.__cached__)
    importlib.invalidate_caches()
    importlib.reload(module)
    after = vars(module)
    for name, old in before.items():
        new = after.get(name)
        if isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType) and new is not old:
            closed = old.__closure__ or new.__closure__
            if not closed and old.__module__ == new.__module__ == module.__name__:
                old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
                old.__doc__, old.__annotations__ = new.__doc__, new.__annotations__
                vars(old).clear()
                vars(old).update(vars(new))
                after[name] = old
    main: dict[str, Any] = vars(sys.modules["__main__"])
    for name, value in list(main.items()):
        if not name.startswith("_") and name in before and value is before[name] and name in after:
            main[name] = after[name]
