"""What goes to other processes beside a function, and which part of it is the largest."""

from __future__ import annotations

import linecache
from typing import Any

import numpy as np
import torch

from .references import functions_of, used_by


def typed_sources(function: Any) -> dict[str, list[str]]:
    """Source lines of functions that come from no file (a REPL, a notebook), for tracebacks on the ranks."""
    sources: dict[str, list[str]] = {}
    for one in functions_of(function):
        entry = linecache.cache.get(one.__code__.co_filename)
        if entry is not None and len(entry) == 4 and entry[1] is None:
            sources[one.__code__.co_filename] = list(entry[2])
    return sources


def remember_sources(sources: dict[str, list[str]]) -> None:
    """Keep such source lines on a rank, for tracebacks."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def largest_part(function: Any) -> str:
    """The largest object that travels with a function, by name and size; empty if no tensor or array does."""
    sizes = [
        (_bytes_of(value), f"{name!r}, used in {one.__qualname__}")
        for one in functions_of(function)
        for name, value in used_by(one).items()
    ]
    nbytes, what = max(sizes, default=(0, ""))
    return f"{what} ({nbytes / 1e6:.0f} MB)," if nbytes else ""


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.nn.Module):
        value = [*value.parameters(), *value.buffers()]
    if isinstance(value, dict | list | tuple):
        return sum(map(_bytes_of, value.values() if isinstance(value, dict) else value))
    return value.nbytes if isinstance(value, torch.Tensor | np.ndarray) and not isinstance(value, np.memmap) else 0
