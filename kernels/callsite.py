"""Which stack frames are the user's: messages name the nearest one, and tracebacks show only these."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

from .errors import SpmdError, message

F = TypeVar("F", bound=Callable[..., Any])

_LIBRARY = ("spmd", "torch", "optree", "cloudpickle", "concurrent", "contextlib", "threading")

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# In a checkout the folders lie side by side; installed, they lie in one folder, the package.
_FOLDERS = ("",) if os.path.exists(os.path.join(_ROOT, "__init__.py")) else ("spmd", "transforms", "mesh", "kernels")
_OUR_FOLDERS = tuple(os.path.join(_ROOT, folder, "") for folder in _FOLDERS)


def is_our_file(name: str) -> bool:
    """Whether a source file is this library's, or optree's."""
    return name.startswith(_OUR_FOLDERS) or "/optree/" in name


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs this library (or one that it uses) rather than the user's code."""
    name = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0] in _LIBRARY


def _nearest() -> tuple[FrameType, int]:
    """The nearest caller outside this library, and the `stacklevel` with which our caller would warn there."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_ours(frame):
        level, frame = level + 1, frame.f_back
    return frame, level


def call_site() -> str:
    """`train.py:12 in train_step`: the nearest caller outside this library."""
    frame, _ = _nearest()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def hide_our_frames(error: BaseException) -> BaseException:
    """Remove our frames from an exception that is about to leave this library, unless SPMD_TRACEBACK=full is set.

    To be called in the `except` clause of a function that the user called, before a bare `raise`.
    """
    if os.environ.get("SPMD_TRACEBACK") == "full":
        return error
    ours = error.__traceback__
    left = users_frames(ours, raised_here=isinstance(error, SpmdError))
    error.__traceback__ = left
    if ours is not None and ours is not left:
        ours.tb_next = left  # Python 3.10 re-raises with the old traceback object, so cut that too
    if isinstance(error, SpmdError):
        error.__suppress_context__ = True
    return error


def users_frames(traceback: TracebackType | None, *, raised_here: bool) -> TracebackType | None:
    """A traceback without this library's frames.

    Args:
        raised_here: the exception is this library's own; then frames of libraries below the user's last frame (such as
            torch, if it has called us) are left out as well.
    """
    parts = []
    while traceback is not None:
        parts.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for part in reversed(parts):
        frame = part.tb_frame
        below = raised_here and kept is None and is_ours(frame)
        if not below and not is_our_file(frame.f_code.co_filename):
            kept = TracebackType(kept, frame, part.tb_lasti, part.tb_lineno)
    return kept


def shows_only_users(call: F, *, like: Any = None, updated: tuple[str, ...] = functools.WRAPPER_UPDATES) -> F:
    """Wrap a function that users call, so that its exceptions are shown without this library's frames.

    Args:
        like, updated: what the wrapper is to look like, if not like `call`; as for `functools.wraps`.
    """

    @functools.wraps(call if like is None else like, updated=updated)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            hide_our_frames(error)
            raise

    return called  # type: ignore[return-value]


def warn(problem: str, *, got: object = None, expected: object = None, where: str = "", remedy: str = "") -> None:
    """Warn the user of something, at the line of the nearest caller outside this library; as `errors.message`."""
    _, level = _nearest()
    warnings.warn(message(problem, got=got, expected=expected, where=where, remedy=remedy), stacklevel=level)


def user_line() -> str:
    """`train.py:12`: file and line of the nearest caller outside this library; its folder is left out."""
    frame, _ = _nearest()
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
