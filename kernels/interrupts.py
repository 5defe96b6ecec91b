"""Protection from signals for what must not be interrupted halfway, such as sending a call to every rank."""

from __future__ import annotations

# `signal` wraps each of these functions in look-ups of enumerations, which makes them ten times as slow.
import _signal  # type: ignore[import-not-found]
import functools
import signal
import threading
import weakref
from typing import Any

# Ctrl-C, and the signals of schedulers, launchers and timers that a program may handle.
_HANDLED = tuple(
    map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM))
)
_shielded = False  # the main thread is in such a block already


class uninterrupted:
    """Delay signal handlers until the end of a `with` block, which must be short.

    Only the main thread is interrupted by signals; on others, and inside another such block, this does nothing.
    """

    __slots__ = ("_handlers", "_held")

    def __enter__(self) -> None:
        global _shielded
        self._handlers: dict[int, Any] = {}
        if _shielded or threading.current_thread() is not threading.main_thread():
            return
        self._held: list[tuple[Any, int, Any]] = []
        try:
            for number in _HANDLED:
                handler = _signal.getsignal(number)
                if callable(handler):  # not ignored, and not handled outside Python
                    self._handlers[number] = handler
                    _signal.signal(number, self._hold)
        except BaseException:  # raised by a handler that was not replaced yet
            self._give_back()
            raise
        _shielded = bool(self._handlers)

    def _hold(self, number: int, frame: Any) -> None:
        self._held.append((self._handlers[number], number, frame))

    def __exit__(self, *_: object) -> None:
        global _shielded
        if self._handlers:
            _shielded = False
            self._give_back()

    def _give_back(self) -> None:
        """Restore the handlers, and run those whose signal came meanwhile; any of them may raise an exception."""
        try:
            while self._handlers:
                number, handler = next(reversed(self._handlers.items()))
                _signal.signal(number, handler)  # from here on it may run, and so end this loop
                del self._handlers[number]
        finally:
            if self._handlers:
                self._give_back()
            elif self._held:
                handler, number, frame = self._held.pop(0)
                try:
                    handler(number, frame)
                finally:
                    self._give_back()


class QueuedRef(weakref.ref):
    """A weak reference that its callback, `append` of a queue, puts there when the object is gone.

    No line of Python runs for that: a Ctrl-C that came during one, as in a finalizer, would be lost.

    Attributes:
        about: what has to be known of the object then.
    """

    __slots__ = ("about",)
    about: Any


def raised_by_handler(error: BaseException) -> bool:
    """Whether the handler of a signal has raised this, a timeout of the program's, say: it may come anywhere."""
    codes = [_code_of(_signal.getsignal(number)) for number in _HANDLED]
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(handler: Any) -> Any:
    """The code that a handler runs: a function's, a method's, a partial's, or an object's `__call__`."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
