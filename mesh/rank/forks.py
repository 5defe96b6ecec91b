"""Processes that the program has forked in a rank, from a task or from a method of a remote object.

Invariant: a child that comes back from what it was forked in ends there. Only the rank itself answers.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from ...kernels.callsite import hide_our_frames


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def end_fork(error: BaseException | None = None) -> NoReturn:
    """End this process, a fork of a rank, as Python does at the end of a program, or after an error."""
    status = 0 if error is None else _status_of(error)
    flush_output()
    os._exit(status)


def _status_of(error: BaseException) -> int:
    """Show how a fork of this rank ends; returns its exit status."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
    else:
        sys.excepthook(type(error), hide_our_frames(error), error.__traceback__)
    return 1
