"""Which frames are the user's: the nearest one names a call, the others make a traceback readable."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType, TracebackType

_LIBRARY = ("spmd", "torch", "optree", "cloudpickle", "concurrent", "threading")


_OUR_FOLDERS = tuple(
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), folder, "")
    for folder in ("spmd", "transforms", "mesh", "kernels")
)


def is_our_file(name: str) -> bool:
    """Whether a source file is this library's (in a checkout the folders lie side by side, installed in one)."""
    return name.startswith(_OUR_FOLDERS) or "/optree/" in name


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs this library (or what it stands on) rather than the user's code."""
    name = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0] in _LIBRARY


def call_site() -> str:
    """`train.py:12 in train_step`: the nearest caller outside this library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_ours(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def hide_our_frames(error: BaseException) -> BaseException:
    """An exception without this library's frames, unless SPMD_TRACEBACK=full asks for them."""
    if os.environ.get("SPMD_TRACEBACK") == "full":
        return error
    frame = error.__traceback__
    while frame is not None:
        if not is_ours(frame.tb_frame):
            return error  # the user's code ran below us, and where it failed is what matters
        frame = frame.tb_next
    return error.with_traceback(None)


def from_user(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that starts at the user's first frame; all of it if none is the user's."""
    start = traceback
    while start is not None and is_ours(start.tb_frame):
        start = start.tb_next
    return start if start is not None else traceback


def warn(text: str) -> None:
    """Warn the user of something, at the line of the nearest caller outside this library."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def user_line() -> str:
    """`train.py:12`: file and line of the nearest caller outside this library; its folder is left out."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_ours(frame):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
