"""Ctrl-C at the wrong moment: what must be done whole, such as telling every rank of a call, is shielded from it."""

from __future__ import annotations

# `signal` wraps each of these in look-ups of enumerations: ten times the cost, on every call.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from typing import Any

_SIGINT = int(signal.SIGINT)
_shielded = False  # the main thread is in such a block already


class uninterrupted:
    """Hold Ctrl-C back for the length of a `with` block, which must be short; it takes effect at the block's end.

    Only the main thread is interrupted by signals; on others, and inside another such block, this does nothing.
    """

    __slots__ = ("_handler", "_held")

    def __enter__(self) -> None:
        global _shielded
        self._handler: Any = None
        self._held: tuple[Any, ...] | None = None
        if not _shielded and threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_SIGINT)
            if callable(handler):  # not ignored, and not handled outside Python
                _signal.signal(_SIGINT, self._hold)
                self._handler, _shielded = handler, True

    def _hold(self, *arguments: Any) -> None:
        self._held = arguments

    def __exit__(self, *_: object) -> None:
        global _shielded
        if self._handler is not None:
            _shielded = False
            _signal.signal(_SIGINT, self._handler)
            if self._held is not None:
                self._handler(*self._held)
