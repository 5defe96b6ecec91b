"""What a driver's rank logs and warns of goes to the driver, whose handlers and filters it meets there.

Invariant: the root logger's handler here is ours, so that `logging.basicConfig` on a rank adds no second one.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from .. import protocol

_PLAIN = (str, int, float, bool, type(None))


def levels() -> tuple[tuple[str, int], ...]:
    """The levels that this process has set, by logger; "" is the root logger."""
    named = dict(logging.root.manager.loggerDict)
    found = [(name, logger.level) for name, logger in named.items() if isinstance(logger, logging.Logger)]
    return ("", logging.root.level), *((name, level) for name, level in found if level != logging.NOTSET)


def relay(session_levels: Iterable[tuple[str, int]], send: Callable[[protocol.Message], None]) -> None:
    """Have this process's records and warnings sent from now on.

    Args:
        session_levels: see `levels`.
    """
    for name, level in session_levels:
        logging.getLogger(name or None).setLevel(level)
    logging.root.addHandler(_Relay(send))
    show = warnings.showwarning

    def send_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if file is not None and file is not sys.stderr:
            show(message, category, filename, lineno, file, line)
            return
        kinds = tuple((kind.__module__, kind.__qualname__) for kind in category.__mro__ if issubclass(kind, Warning))
        send(protocol.Warned(str(message), kinds, filename, lineno))

    warnings.showwarning = send_warning


class _Relay(logging.Handler):
    def __init__(self, send: Callable[[protocol.Message], None]):
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = {name: value for name, value in vars(record).items() if isinstance(value, _PLAIN)}
            fields["msg"] = record.getMessage()
            if record.exc_info:
                fields["exc_text"] = record.exc_text or logging.Formatter().formatException(record.exc_info)
            self._send(protocol.Logged(fields))
        except Exception:
            self.handleError(record)
