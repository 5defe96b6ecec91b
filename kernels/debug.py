"""Traces of communication: SPMD_DEBUG=1 prints a line on standard error for every operation, when it is over.

r0 | all_reduce float32[1024] (sum) -> shm 12 us
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

Note = Callable[[str, str, float, float], None]

_note: Note | None = None


def note_with(note: Note | None) -> None:
    """Have communicators that are made from now on call `note(what, backend, begin, seconds)` for each operation."""
    global _note
    _note = note


def enabled() -> bool:
    """Whether operations are traced."""
    return _prints() or _note is not None


def _prints() -> bool:
    return os.environ.get("SPMD_DEBUG", "0") not in ("", "0")


def traced(steps: Generator[Any, None, Any], rank: int, what: str, backend: str) -> Generator[Any, None, Any]:
    """Run the steps, then report how long they took, from the first to the last."""
    began, start = time.time(), time.perf_counter()
    result = yield from steps
    seconds = time.perf_counter() - start
    if _prints():
        print(f"r{rank} | {what} -> {backend} {1e6 * seconds:.0f} us", file=sys.stderr)
    if _note is not None:
        _note(what, backend, began, seconds)
    return result
