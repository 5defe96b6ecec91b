"""Classes that travel by value stay as they are in the driver, if they come from there.

cloudpickle gives each such class a number, by which it is one class wherever it arrives, but takes over its content
with every arrival: what a rank returns would replace a driver's methods by copies that see other globals.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_own: weakref.WeakSet[type] = weakref.WeakSet()  # that this process has sent, and not received
_received: weakref.WeakSet[type] = weakref.WeakSet()
_keeps = True


def take_over() -> None:
    """Have this process, a driver's rank, take over the content of all classes that arrive."""
    global _keeps
    _keeps = False


def kept_at_home(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """What to pickle for a class, given what `__reduce__` of cloudpickle's pickler returns."""
    if len(reduced) < 6:
        return reduced
    if _keeps and cls not in _received:
        _own.add(cls)
    make, arguments, content, *none, set_content = reduced
    return make, arguments, (set_content, content), *none, _arrive


def _arrive(cls: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
    set_content, content = state
    if cls not in _own:
        _received.add(cls)
        set_content(cls, content)
