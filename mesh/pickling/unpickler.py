"""Reading pickles in several threads of one process, a rank's and its objects'.

Python's locks of modules are one each: where two threads import two modules that import each other (a package and a
part of it), it breaks the deadlock by giving one thread a module that is half imported, and its import fails.
So one thread at a time imports what pickles name.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from cloudpickle import cloudpickle

from ...kernels.errors import add_note

_imports = threading.RLock()
_PATIENCE = 60.0  # seconds after which a thread does not wait any more for another one's import, which may wait for it


def _renew() -> None:
    """In a fork the thread that imports does not exist."""
    global _imports
    _imports = threading.RLock()


os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    lock = _imports
    has_lock = lock.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if has_lock:
            lock.release()


@contextlib.contextmanager
def _importing(module: str) -> Iterator[None]:
    with _one_at_a_time():
        try:
            yield
        except ModuleNotFoundError as error:
            where = (
                f"this process, on host {socket.gethostname()}, was importing {module}, which what was sent to it names"
            )
            remedy = "have the program's modules at the same paths on all hosts, or install them"
            add_note(error, f"[{where}: {remedy}]")
            raise


def _imported(name: str) -> ModuleType:
    with _importing(name):
        return cloudpickle.subimport(name)


class Unpickler(pickle.Unpickler):
    """That of pickle, which waits while another thread imports."""

    def find_class(self, module: str, name: str) -> Any:
        with _importing(module):
            found = super().find_class(module, name)
        return _imported if found is cloudpickle.subimport else found
