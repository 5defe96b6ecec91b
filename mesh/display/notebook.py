"""Errors in a notebook's own terms: cells instead of temporary files, and tracebacks without this library's frames.

Nothing here imports IPython: in a notebook it has been imported already.
"""

from __future__ import annotations

import os
import re
import sys
from types import TracebackType
from typing import Any

from ...kernels.callsite import followed_by, hide_our_frames, is_ours


def shell() -> Any:
    """IPython's shell if this process is a notebook's kernel, else None."""
    ipython = sys.modules.get("IPython")
    if ipython is None or "ipykernel" not in sys.modules:
        return None
    found = ipython.get_ipython()
    return found if hasattr(found, "kernel") else None


def name_cells(text: str) -> str:
    """A traceback's text with cells named as IPython does it: `Cell In[3], line 2` instead of a temporary file."""
    compiler = getattr(shell(), "compile", None)
    if compiler is None:
        return text

    def cell(match: re.Match[str]) -> str:
        found = compiler.format_code_name(match[1])
        return f"{found[0]} {found[1]}, line {match[2]}" if found and found[0] == "Cell" else match[0]

    text = re.sub(r'File "([^"\n]+)", line (\d+)', cell, text)
    return re.sub(r"(/[^\s:]*ipykernel_[^\s:]+\.py):(\d+)(?= in)", cell, text)


def shorten(error: BaseException) -> BaseException:
    """Make an exception's traceback show without this library's frames, in IPython too, unless SPMD_TRACEBACK=full."""
    error = hide_our_frames(error)
    if shell() is not None and os.environ.get("SPMD_TRACEBACK") != "full":
        error._render_traceback_ = _lines_of_last_error  # type: ignore[attr-defined]
    return error


def _lines_of_last_error() -> list[str]:
    """The lines that IPython shows for an exception: it calls this once it has stored the exception in `sys`."""
    error: Any = sys.last_value  # not a captured one, which would keep itself and its frames alive
    formatter = shell().InteractiveTB
    return formatter.structured_traceback(type(error), error, _users(error.__traceback__), formatter.tb_offset)


def _users(traceback: TracebackType | None) -> TracebackType | None:
    if traceback is None:
        return None
    rest = _users(traceback.tb_next)
    if is_ours(traceback.tb_frame):
        return rest
    return followed_by(rest, traceback)
