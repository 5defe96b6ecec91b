"""Checkpoints that are written while the program goes on.

Invariant: what goes wrong with one is told once: by its future, by the next `save` to its directory or `restore` from
it, by the mesh when it closes, or at the end of the program.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any


class Saved(Future):
    """A future that knows whether anybody has asked for its result."""

    told = False

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            self.told = self.told or self.done()

    def settle(self, call: Callable[[], Any]) -> None:
        try:
            self.set_result(call())
        except BaseException as error:
            self.set_exception(error)


# Those of each directory, of whatever threads, until somebody asks.
_begun: dict[Path, list[Saved]] = {}
_lock = threading.Lock()


def begin(path: Path, future: Saved, call: Callable[[], Any] | None = None) -> None:
    """Call in a thread, before whose end the interpreter does not end; None if the future is done already."""
    with _lock:
        _begun.setdefault(path, []).append(future)
    if call is not None:
        threading.Thread(target=future.settle, args=(call,), name="spmd-checkpoint").start()


def settled(path: Path) -> None:
    """Wait for those of a directory; raises what went wrong, if nobody has seen it."""
    with _lock:
        before = [*_begun.get(path, [])]
    wait(before)
    untold = [future for future in before if not future.told and future.exception() is not None]
    with _lock:
        here = [future for future in _begun.pop(path, []) if future not in before or future in untold[1:]]
        if here:  # of other threads, and what is to be raised the next time
            _begun[path] = here
    if untold:
        untold[0].result()


@atexit.register
def _tell() -> None:
    """The last chance: Python prints what is raised here."""
    for path in [*_begun]:
        settled(path)
