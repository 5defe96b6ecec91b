"""Reading containers that are too deep or too large to look into entry by entry.

One of data alone, at any depth, is read by one operation; of any other some entries are.
"""

from __future__ import annotations

import marshal
from typing import Any

import numpy as np

from .references import SCALARS, Reader, parts_of_data

ENTRIES = 64  # of a large container that are compared
_MARSHALLED = (dict, list, tuple, set, *SCALARS)
_TEXT = 16  # characters of a text that count as a value


def look_through(container: Any, most: int) -> tuple[Reader | None, int]:
    """How to read a container of data, tensors and arrays alone, at any depth, and how many values tell that it is;
    `most` at most."""
    left, count, read = [container], 0, _content_of
    while left and count + len(left) <= most:
        one = left.pop()
        count += 1 + (len(one) // _TEXT if isinstance(one, str | bytes) else 0)
        parts = parts_of_data(one)
        if parts is None:
            return None, count
        left += parts
        if type(one) not in _MARSHALLED and not isinstance(one, np.number):  # of which marshal takes the bytes
            read = _parts_of
    return None if left else read, count


def _parts_of(container: Any) -> list[Any]:
    return parts_of_data(container) or []


def _content_of(container: Any) -> list[Any]:
    """The bytes of such a container; none if it has something else by now."""
    try:
        return [marshal.dumps(container, 2)]  # the last version that does not depend on who else refers to an entry
    except ValueError:
        return []


def some_of(container: Any) -> list[Any]:
    """The length of a container and some of its entries, those that cost little."""
    count = len(container)
    if isinstance(container, list | tuple):
        return [count, *container[:: max(1, count // ENTRIES)], *container[-1:]]
    if isinstance(container, dict) and count:
        return [count, next(iter(container)), last := next(reversed(container)), container[last]]
    return [count]
