"""Settings of the whole process, such as torch's default dtype, around blocks that may run on several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class Overlapping:
    """A context manager for all blocks that overlap: the first enters another one, and the last leaves it.

    If each block put back what it had found, one that ends would do so under the others, and the last one would put
    back what the first had set, for ever.

    Args:
        make: makes the context manager that is entered.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]):
        self._make, self._lock, self._blocks = make, threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._entered = self._make()
                self._entered.__enter__()
            self._blocks += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._entered.__exit__(None, None, None)
