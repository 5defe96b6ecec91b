"""Waiting for a result: with many looks, so that a rank that waits for another's object is not taken to be stuck.

A rank that does nothing at all while a call waits for it is killed (see `driver.stuck`); one that looks is not.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

LOOK_SECONDS = 0.01


def result_of(future: Future, seconds: float | None) -> Any:
    """The result of a future; raises what is in it, or `concurrent.futures.TimeoutError` after so many seconds."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = LOOK_SECONDS if end is None else end - time.monotonic()
        try:
            return future.result(max(0.0, min(LOOK_SECONDS, left)))
        except FutureTimeout:
            if future.done():
                return future.result()
            if end is not None and left <= LOOK_SECONDS:
                raise
