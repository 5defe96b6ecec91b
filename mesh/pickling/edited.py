"""Modules whose files were edited after the program had imported them, for processes that import them later.

A rank that replaces a dead one, or that comes with a resize, imports the program's modules anew, maybe hours after the
others. Invariant: it gets the code that the driver has loaded, not what the files say by then.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

from .reloading import LoadedModules, own_file

_EDITED = "made from the text that the driver has"
_kept: dict[str, list[str]] = {}  # module -> its file, and the text that it has in the driver


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    """What a module of the driver was made from.

    Attributes:
        spec: the module's, of which every load makes a new one.
        state: the file's, when it was read.
    """

    spec: Any
    file: str
    state: tuple[int, int] | None
    text: str


_loaded: dict[str, _Loaded] = {}  # by name


class DriverModules(LoadedModules):
    """Those of the driver, as one of its meshes knows them."""

    def notice(self) -> None:
        known = set(self._seen)
        super().notice()
        for name in self._seen.keys() - known:
            if name not in _loaded or _loaded[name].spec is not _spec(name):
                _read(name)
            elif (state := _loaded[name].state) is not None:  # known from another mesh, and maybe edited since
                self._seen[name] = state

    def loaded_again(self) -> tuple[str, ...]:
        found = super().loaded_again()
        for name in found:
            _read(name)
        return found

    def reload(self, names: Iterable[str] = ()) -> list[str]:
        before = dict(self._seen)
        try:
            done = super().reload(names)
        except BaseException:
            for name, one in list(_loaded.items()):
                if self._seen.get(name) != before.get(name):
                    _read(name)
                else:  # ranks go on with what the one that has failed was before
                    _loaded[name] = dataclasses.replace(one, spec=_spec(name))
            raise
        for name in done:
            _read(name)
        return done

    def edited(self) -> dict[str, list[str]]:
        """The file and the loaded text of each module whose file has another by now, or is gone."""
        found = {}
        for name, one in list(_loaded.items()):
            if one.spec is not _spec(name):
                _read(name)  # something else has loaded it meanwhile
            elif _state(one.file) != one.state and _text(one.file) != one.text:
                found[name] = [one.file, one.text]
        return found


def _read(name: str) -> None:
    _loaded.pop(name, None)
    if (file := own_file(name)) is not None:
        state, text = _state(file), _text(file)
        if text is not None:
            _loaded[name] = _Loaded(_spec(name), file, state, text)


def _spec(name: str) -> Any:
    return getattr(sys.modules.get(name), "__spec__", None)


def keep(modules: dict[str, list[str]]) -> None:
    """Have these modules, if they are imported here from now on, made from these texts, all others from their files."""
    _kept.clear()
    _kept.update(modules)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def kept() -> dict[str, list[str]]:
    return _kept


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _kept:
            return None
        file, text = _kept[fullname]
        within = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        loader = _Loader(fullname, file, text)
        spec = importlib.util.spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=within)
        assert spec is not None
        spec.loader_state = _EDITED
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, text: str):
        super().__init__(fullname, path)
        self._text = text

    def get_code(self, fullname: str) -> Any:
        return compile(self._text, self.path, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        return self._text


_finder = _Finder()


def _text(file: str) -> str | None:
    try:
        with open(file, "rb") as source:
            return importlib.util.decode_source(source.read())
    except (OSError, SyntaxError, UnicodeError):
        return None


def _state(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
