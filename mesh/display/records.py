"""What ranks log and warn of, given to the driver's own loggers and warning filters.

Called by the thread that listens, which nothing here may stop.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
import warnings
from typing import Any

from .. import protocol


def _log(rank: int, msg: protocol.Logged) -> None:
    """Handle a rank's record as if it had been made here: its attribute `rank` says where it was."""
    logger = logging.getLogger(msg.fields["name"])
    if not logger.isEnabledFor(msg.fields["levelno"]):
        return
    label = f"[rank {rank}] " if rank else ""  # as with what ranks print
    fields = {**msg.fields, "msg": f"{label}{msg.fields['msg']}", "rank": rank, "processName": f"rank {rank}"}
    with contextlib.suppress(Exception):
        logger.handle(logging.makeLogRecord({**fields, "args": None}))


class Records:
    """What one mesh's ranks log and warn of: each warning once, whichever ranks give it."""

    def __init__(self) -> None:
        self._shown: dict[Any, Any] = {}  # as a module's `__warningregistry__`

    def take(self, rank: int, msg: protocol.Logged | protocol.Warned) -> None:
        if isinstance(msg, protocol.Logged):
            _log(rank, msg)
        else:
            self._warn(msg)

    def _warn(self, msg: protocol.Warned) -> None:
        category = next((kind for kind in map(_class, msg.kinds) if kind is not None), Warning)
        try:
            warnings.warn_explicit(msg.text, category, msg.file, msg.line, registry=self._shown)
        except Warning:  # a filter makes an error of it: too late, the rank has gone on
            key = (msg.text, category, msg.line, "error")
            if key not in self._shown:
                self._shown[key] = True
                sys.stderr.write(warnings.formatwarning(msg.text, category, msg.file, msg.line))
        except Exception:  # of a program's own way to show them
            return


def _class(name: tuple[str, str]) -> type[Warning] | None:
    """A class of warnings, if this process has it."""
    found = getattr(sys.modules.get(name[0], builtins), name[1], None)
    return found if isinstance(found, type) and issubclass(found, Warning) else None
