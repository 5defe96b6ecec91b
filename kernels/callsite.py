"""Which frames are the user's: the nearest one names a call, the others make a traceback readable."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType

_LIBRARY = ("spmd", "torch", "optree", "cloudpickle", "concurrent", "threading")


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


def from_user(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that starts at the user's first frame; all of it if none is the user's."""
    start = traceback
    while start is not None and is_ours(start.tb_frame):
        start = start.tb_next
    return start if start is not None else traceback
