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


def _log(rank: int, said: protocol.Logged) -> None:
    """Handle a rank's record as if it had been made here: its attribute `rank` says where it was."""
    logger = logging.getLogger(said.fields["name"])
    if not logger.isEnabledFor(said.fields["levelno"]):
        return
    label = f"[rank {rank}] " if rank else ""  # as with what ranks print
    fields = {**said.fields, "msg": f"{label}{said.fields['msg']}", "rank": rank, "processName": f"rank {rank}"}
    with contextlib.suppress(Exception):
        logger.handle(logging.makeLogRecord({**fields, "args": None}))


class Records:
    """What one mesh's ranks log and warn of: each warning once, whichever ranks give it."""

    def __init__(self) -> None:
        self._shown: dict[Any, Any] = {}  # as a module's `__warningregistry__`

    def take(self, rank: int, said: protocol.Logged | protocol.Warned) -> None:
        if isinstance(said, protocol.Logged):
            _log(rank, said)
        else:
            self._warn(said)

    def _warn(self, said: protocol.Warned) -> None:
        category = next((kind for kind in map(_class, said.kinds) if kind is not None), Warning)
        try:
            warnings.warn_explicit(said.text, category, said.file, said.line, registry=self._shown)
        except Warning:  # a filter makes an error of it: too late, the rank has gone on
            key = (said.text, category, said.line, "error")
            if key not in self._shown:
                self._shown[key] = True
                sys.stderr.write(warnings.formatwarning(said.text, category, said.file, said.line))
        except Exception:  # of a program's own way to show them
            return


def _class(name: tuple[str, str]) -> type[Warning] | None:
    """A class of warnings, if this process has it."""
    found = getattr(sys.modules.get(name[0], builtins), name[1], None)
    return found if isinstance(found, type) and issubclass(found, Warning) else None
