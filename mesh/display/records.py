"""Ranks' log records and warnings: sent to the driver (`relay`), and passed to its loggers and filters (`Records`).

Invariants: the root logger on a rank has our handler, so that `logging.basicConfig` there adds no second one; and no
error in here stops the listening thread, which calls `Records`.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from .. import protocol

_PLAIN = (str, int, float, bool, type(None))


def _log(rank: int, msg: protocol.Logged) -> None:
    """Handle a rank's record as if it had been made here, with the attribute `rank`."""
    logger = logging.getLogger(msg.fields["name"])
    if not logger.isEnabledFor(msg.fields["levelno"]):
        return
    label = f"[rank {rank}] " if rank else ""  # as for what ranks print
    fields = {**msg.fields, "msg": f"{label}{msg.fields['msg']}", "rank": rank, "processName": f"rank {rank}"}
    with contextlib.suppress(Exception):
        logger.handle(logging.makeLogRecord({**fields, "args": None}))


class Records:
    """Log records and warnings of one mesh's ranks; what several ranks give is shown once each time."""

    def __init__(self) -> None:
        self._shown: dict[Any, Any] = {}  # as a module's `__warningregistry__`
        self._times: dict[protocol.Warned, Counter[int]] = {}  # how often each rank gave a warning

    def take(self, rank: int, msg: protocol.Logged | protocol.Warned) -> None:
        if isinstance(msg, protocol.Logged):
            _log(rank, msg)
        else:
            times = self._times.setdefault(msg, Counter())
            before = max(times.values(), default=0)
            times[rank] += 1
            if times[rank] > before:
                self._warn(msg)

    def _warn(self, msg: protocol.Warned) -> None:
        category = next((kind for kind in map(_class, msg.kinds) if kind is not None), Warning)
        try:
            warnings.warn_explicit(msg.text, category, msg.file, msg.line, registry=self._shown)
        except Warning:  # a filter turns it into an error: too late for that, since the rank has gone on
            key = (msg.text, category, msg.line, "error")
            if key not in self._shown:
                self._shown[key] = True
                sys.stderr.write(warnings.formatwarning(msg.text, category, msg.file, msg.line))
        except Exception:  # the program's own function to show warnings has failed
            return


def _class(name: tuple[str, str]) -> type[Warning] | None:
    """The class of a warning, if this process has it."""
    found = getattr(sys.modules.get(name[0], builtins), name[1], None)
    return found if isinstance(found, type) and issubclass(found, Warning) else None


def levels() -> tuple[tuple[str, int], ...]:
    """The levels that this process has set, by logger; "" is the root logger."""
    named = dict(logging.root.manager.loggerDict)
    found = [(name, logger.level) for name, logger in named.items() if isinstance(logger, logging.Logger)]
    return ("", logging.root.level), *((name, level) for name, level in found if level != logging.NOTSET)


def relay(session_levels: Iterable[tuple[str, int]], send: Callable[[protocol.Message], None]) -> None:
    """From now on, send this process's log records and warnings."""
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
