"""Checkpoints that are written while the program goes on, by directory.

Invariant: what goes wrong is reported once: by the future, by the next `save` to the directory or `restore` from it, by
the mesh when it closes, or at the end of the program.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any


class Saved(Future):
    """A future that knows whether anybody has asked for its result."""

    reported = False

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            self.reported = self.reported or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.reported = True
        return found

    def failed(self) -> BaseException | None:
        """The error, if any; asking here does not count as reporting it."""
        return super().exception()

    def complete(self, call: Callable[[], Any]) -> None:
        """Take over what a call returns or raises."""
        try:
            self.set_result(call())
        except BaseException as error:
            self.set_exception(error)


# The futures of each directory, from any thread, until somebody asks for their results.
_started: dict[Path, list[Saved]] = {}
_lock = threading.Lock()


def start(path: Path, future: Saved, call: Callable[[], Any] | None = None) -> None:
    """Call in a thread, which the interpreter waits for before it ends; without `call` the future is done already."""
    if call is not None:
        future.set_running_or_notify_cancel()  # what is being written can't be cancelled
        in_thread(future.complete, call)
    with _lock:  # not before: if no thread could be started, it would be waited for for ever
        _started.setdefault(path, []).append(future)


def in_thread(call: Callable[..., Any], *args: Any) -> None:
    """Call in a thread, or here and now if no thread can be started: that takes longer, but saves."""
    try:
        threading.Thread(target=call, args=args, name="spmd-checkpoint").start()
    except RuntimeError:  # the limit on processes is reached, or the interpreter is about to end
        call(*args)


def failures(path: Path) -> list[BaseException]:
    """Wait for a directory's checkpoints; return, and so report, all errors that nobody has seen."""
    failed = _failed(path)
    return [error for future in failed if (error := future.exception()) is not None]


def raise_failure(path: Path) -> None:
    """Wait for a directory's checkpoints, and raise the first error that nobody has seen."""
    failed = _failed(path)
    if failed:
        with _lock:
            _started[path] = [*failed[1:], *_started.get(path, [])]
        failed[0].result()


def _failed(path: Path) -> list[Saved]:
    """Wait for a directory's checkpoints and forget them; return those that failed and that nobody asked."""
    with _lock:
        before = [*_started.get(path, [])]
    wait(before)
    with _lock:
        failed = [future for future in before if future in _started.get(path, []) and not future.reported]
        _started[path] = [future for future in _started.get(path, []) if future not in before]
        if not _started[path]:
            del _started[path]
    return [future for future in failed if future.failed() is not None]


def _forget() -> None:
    """In a forked child: the threads that write are the parent's."""
    global _lock
    _lock = threading.Lock()
    _started.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _report_at_exit() -> None:
    """The last chance: each error is printed, as one that nobody has caught."""
    for path in [*_started]:
        for error in failures(path):
            sys.excepthook(type(error), error, error.__traceback__)
