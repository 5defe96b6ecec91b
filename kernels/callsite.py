"""Which stack frames are the user's: messages name the nearest one, and tracebacks show only these."""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

from .argument_names import refuse_names
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
    return _is_library(frame.f_globals.get("__name__") or "")


@functools.cache  # asked of each frame below each operation of a first call
def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARY


def _nearest(frame: FrameType | None = None) -> tuple[FrameType, int]:
    """The nearest caller outside this library, and the `stacklevel` with which our caller would warn there."""
    level, frame = 1, frame or sys._getframe(1)
    while frame.f_back is not None and is_ours(frame):
        level, frame = level + 1, frame.f_back
    return frame, level


def call_site(of: CodeType | None = None) -> str:
    """`train.py:12 in train_step`: the nearest caller outside this library; that `of` a function, if it is running."""
    below = None if of is None else sys._getframe(1)
    while below is not None and below.f_code is not of:
        below = below.f_back
    frame, _ = _nearest(below)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


_FAULTS = (AssertionError, AttributeError, LookupError, NameError, TypeError)  # which no check of ours raises
_PASS_ON = ("__torch_function__", "__torch_dispatch__")  # functions of ours that run what a program calls of torch
# A function that could not be called is one of the program's, as a loss of other arguments: mypy sees to ours.
_MISFIT = re.compile(r"\S+\(\) (missing|takes|got) ")


def hide_our_frames(error: BaseException) -> BaseException:
    """Remove our frames from an exception that is about to leave this library, unless it is a fault of ours.

    To be called in the `except` clause of a function that the user called, before a bare `raise`.
    """
    ours = error.__traceback__
    left = users_frames(error)
    error.__traceback__ = left
    if ours is not None and ours is not left:
        ours.tb_next = left  # Python 3.10 re-raises with the old traceback object, so cut that too
    if isinstance(error, SpmdError):
        error.__suppress_context__ = True
    return error


def users_frames(error: BaseException) -> TracebackType | None:
    """An exception's traceback without this library's frames; the whole of a fault of ours, or if SPMD_TRACEBACK=full.

    If the exception is this library's own, frames of libraries below the user's last frame (such as torch, if it has
    called us) are left out as well.
    """
    parts = []
    traceback = error.__traceback__
    while traceback is not None:
        parts.append(traceback)
        traceback = traceback.tb_next
    if os.environ.get("SPMD_TRACEBACK") == "full" or _is_fault(error, parts):
        return error.__traceback__
    kept: TracebackType | None = None
    for part in reversed(parts):
        frame = part.tb_frame
        below = isinstance(error, SpmdError) and kept is None and is_ours(frame)
        if not below and not is_our_file(frame.f_code.co_filename):
            kept = followed_by(kept, part)
    return kept


def followed_by(rest: TracebackType | None, part: TracebackType) -> TracebackType:
    """A traceback of the first frame of another one, and of others below it."""
    line: int | None = part.tb_lineno  # None of an interrupt in code that is of no line
    line = part.tb_frame.f_code.co_firstlineno if line is None else line
    return TracebackType(rest, part.tb_frame, part.tb_lasti, line)


def _is_fault(error: BaseException, traceback: Sequence[TracebackType]) -> bool:
    """Whether it looks like a fault of this library: Python's own error, in a function of ours that has begun."""
    on_purpose = isinstance(error, SpmdError) or error.__suppress_context__  # raised `from` something
    if on_purpose or not isinstance(error, _FAULTS) or len(traceback) < 2:
        return False
    code = traceback[-1].tb_frame.f_code
    misfits = isinstance(error, TypeError) and _MISFIT.match(str(error))
    return is_our_file(code.co_filename) and code.co_name not in _PASS_ON and not misfits


def public(f: F, *, like: Any = None, updated: tuple[str, ...] = functools.WRAPPER_UPDATES) -> F:
    """Wrap what programs call, a function or a class, so that the tracebacks of its errors end at the program's line.

    An argument under the name that torch or JAX give it is refused with what to write instead.

    >>> @public
    ... def psum(x, axis): ...
    >>> psum(1, axis_name="data")
    Traceback (most recent call last):
    spmd.kernels.argument_names.UnknownArgument: psum has no argument axis_name (got 'data'): it is axis=

    Args:
        like, updated: what the wrapper is to look like, if not like `f`; as for `functools.wraps`.
    """
    if isinstance(f, type):
        f.__init__ = public(f.__init__)  # type: ignore[misc]
        return f

    @functools.wraps(f if like is None else like, updated=updated)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return f(*args, **kwargs)
            except TypeError as error:
                at = error.__traceback__
                if kwargs and at is not None and at.tb_next is None:  # the function has not begun
                    refuse_names(f, args, kwargs)
                raise
        except BaseException as error:
            hide_our_frames(error)
            raise

    return called  # type: ignore[return-value]


def warn(problem: str, *, got: object = None, where: str = "", remedy: str = "") -> None:
    """Warn the user of something, at the line of the nearest caller outside this library; as `errors.message`."""
    _, level = _nearest()
    warnings.warn(message(problem, got=got, where=where, remedy=remedy), stacklevel=level)


def user_line() -> str:
    """`train.py:12`: file and line of the nearest caller outside this library, without folder; "" if none."""
    frame, _ = _nearest()
    if frame.f_back is None and frame.f_code.co_filename == "<string>":  # the program that starts a rank
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
