"""SPMD_DEBUG=1: one line on standard error for every operation of a communicator, when it is over.

r0 | all_reduce float32[1024] (sum) -> shm 12 us
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from typing import Any


def enabled() -> bool:
    """Whether operations are to be printed."""
    return os.environ.get("SPMD_DEBUG", "0") not in ("", "0")


def traced(steps: Generator[Any, None, Any], rank: int, what: str, backend: str) -> Generator[Any, None, Any]:
    """The same steps, and a line with the time from the first to the last."""
    start = time.perf_counter()
    result = yield from steps
    print(f"r{rank} | {what} -> {backend} {1e6 * (time.perf_counter() - start):.0f} us", file=sys.stderr)
    return result
