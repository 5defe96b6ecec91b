"""Classes that travel by value: they stay as they are in the driver, and are on a rank what each call was sent with.

cloudpickle gives each such class a number, by which it is one class wherever it arrives, but takes over its content
with every arrival: what a rank returns would replace a driver's methods by copies that see other globals. And a rank's
class has what arrived last, perhaps with another function than the one that is called.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_own: weakref.WeakSet[type] = weakref.WeakSet()  # that this process has sent, and not received
_received: weakref.WeakSet[type] = weakref.WeakSet()
_keeps = True
# The names that a class has taken over, and which content has them. Not strongly: methods refer to their class.
_last: weakref.WeakKeyDictionary[type, tuple[frozenset[str], weakref.ref[Content] | None]]
_last = weakref.WeakKeyDictionary()
_reading = threading.local()


class Content:
    """What a class had when it arrived, and what this process has set of it since: a cache, say."""

    __slots__ = ("__weakref__", "_bases", "_cls", "_content", "_names", "_set")

    def __init__(self, cls: type, set_content: Callable[[type, Any], Any], content: Any, bases: tuple[type, ...]):
        self._cls, self._set, self._content, self._bases = cls, set_content, content, bases
        self._names = frozenset(content[0])  # another object for each arrival

    def take_over(self) -> None:
        """Have the class be what it was with this, if it has taken over something else since."""
        names, last = _last.get(self._cls, (frozenset[str](), None))
        if names is self._names:
            return
        if last is not None and (before := last()) is not None:
            before._note_changes()
        _last[self._cls] = names | self._names, None  # an interrupt may leave it with some of both
        for name in names - self._names:
            with contextlib.suppress(AttributeError):
                delattr(self._cls, name)
        if self._cls.__bases__ != self._bases:  # a module's class is another one after a reload
            self._cls.__bases__ = self._bases
        self._set(self._cls, self._content)
        _last[self._cls] = self._names, weakref.ref(self)

    def _note_changes(self) -> None:
        then, *others = self._content
        now = {**vars(self._cls), **{name: then[name] for name in then if name == "_abc_impl"}}  # there as a list
        self._content = {name: now[name] for name in then if name in now}, *others


def take_over() -> None:
    """Have this process, a driver's rank, take over the content of all classes that arrive."""
    global _keeps
    _keeps = False


@contextlib.contextmanager
def arriving() -> Iterator[list[Content]]:
    """Collect the content of the classes that arrive in this thread meanwhile."""
    before, found = getattr(_reading, "found", None), list[Content]()
    _reading.found = found
    try:
        yield found
    finally:
        _reading.found = before


def kept_at_home(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """What to pickle for a class, given what `__reduce__` of cloudpickle's pickler returns."""
    if len(reduced) < 6:
        return reduced
    if _keeps and cls not in _received:
        _own.add(cls)
    make, arguments, content, *none, set_content = reduced
    return make, arguments, (set_content, content, cls.__bases__), *none, _arrive


def _arrive(cls: type, state: tuple[Callable[[type, Any], Any], Any, tuple[type, ...]]) -> None:
    if cls in _own:
        return
    _received.add(cls)
    content = Content(cls, *state)
    content.take_over()
    if (found := getattr(_reading, "found", None)) is not None:
        found.append(content)
