"""Opening a shard of a `Stream` with the user's function.

Invariant: every virtual stream has an iterator of its own; of one that two shared, each would get some of the records.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ..kernels.errors import SpecError

_readers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # the last to begin, by iterator's id


def begun(opened: Callable[..., Any], shard: Any, at: Any, reader: Any) -> Iterator[Any]:
    """An iterator over a shard's records, from a position on that is not None.

    Args:
        reader: a cursor with a `place`, which keeps the iterator as `records` while it reads.

    Raises:
        SpecError: the function returned nothing to iterate over, or what another virtual stream reads.
    """
    records = called(opened, shard) if at is None else called(opened, shard, at)
    if not hasattr(records, "__iter__") and not hasattr(records, "__getitem__"):
        raise SpecError(
            "a Stream's open(shard) returned nothing to iterate over",
            got=f"a {type(records).__name__} for {shard!r}",
            remedy="yield the records in it, or return an iterator over them",
        )
    found = iter(records)
    other = _readers.get(id(found))
    if other is not None and other.records is found and other.place != reader.place:
        raise SpecError(
            "a Stream's open(shard) returned one iterator to two virtual streams, each of which would lose records",
            got=f"{found!r} for {shard!r}",
            remedy="make a new iterator in open(shard), at every call",
        )
    _readers[id(found)] = reader
    return found


def takes_at(opened: Callable[..., Any]) -> bool:
    """Whether a user's function opens a shard at a position, its second argument; a file's `mode` is none."""
    try:
        second = [*inspect.signature(opened).parameters.values()][1:2]
    except ValueError:  # a builtin
        return False
    return any(each.kind is each.POSITIONAL_OR_KEYWORD and not isinstance(each.default, str) for each in second)


def called(function: Callable[..., Any], *args: Any) -> Any:
    """What a user's function returns; a StopIteration that it raises would be taken for the end of the stream."""
    try:
        return function(*args)
    except StopIteration as error:
        raise RuntimeError(f"{function!r} raised StopIteration") from error
