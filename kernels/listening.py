"""One thread that listens to many descriptors, and that other threads can wake.

Invariant: what is registered with a descriptor is called by that thread alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
from collections.abc import Callable
from typing import Any

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Listening:
    """A selector that other threads can wake; each descriptor is registered with a function that takes its events.

    Args:
        woken: called by the thread that listens, after another thread has woken it.
    """

    def __init__(self, woken: Callable[[], None] = lambda: None):
        self.selector = selectors.DefaultSelector()
        self._woken = woken
        self._pipe = os.pipe()
        try:
            for fd in self._pipe:
                os.set_blocking(fd, False)
            self.selector.register(self._pipe[0], READ, self._drain)
        except BaseException:
            self.close()
            raise

    def wake(self) -> None:
        """Have the listening thread call `woken`; may be called by any thread."""
        with contextlib.suppress(OSError):  # the pipe is full of wakes, or closed
            os.write(self._pipe[1], b"!")

    def _drain(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
        self._woken()

    def select(self, seconds: float | None = None) -> list[Callable[[], None]]:
        """Wait until descriptors are ready; gives what to call for each."""
        return [functools.partial(key.data, events) for key, events in self.selector.select(seconds)]

    def forget(self, source: Any) -> None:
        """Stop listening to a descriptor."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(source)

    def close(self) -> None:
        self.selector.close()
        for fd in self._pipe:
            os.close(fd)
