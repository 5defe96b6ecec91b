"""Refusing operations that would write to a step's arguments or captured tensors, before they do.

A rank's shard may be memory that all ranks of a host see, and a step that failed can only run again if its inputs are
unchanged. Comparing versions afterwards finds most such writes too late, and writes through `tensor.data` not at all.
Writes through `tensor.numpy()` are found afterwards, by comparing bytes, and only in small tensors.
Invariant: writes that overlap no watched memory, and the library's own writes, pass.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...kernels.flat import as_bytes, extent_bytes
from ...kernels.torch_private import arguments, is_fake, operation_name

_SMALL = 1 << 16  # tensors up to this many bytes are compared
Refuse = Callable[[], NoReturn]
# In training these write to running statistics, which their schemas don't say.
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
_Span = tuple[int, int, Refuse]


class Watched:
    """Memory that a region may not write to.

    >>> def refuse():
    ...     raise ValueError("no")
    >>> kept = torch.zeros(4)
    >>> watched = Watched([(kept, refuse)])
    >>> watched.check(torch.zeros(4))
    >>> watched.check(kept.data[2:])
    Traceback (most recent call last):
    ValueError: no

    Args:
        tensors: each with a function that raises the error.
    """

    def __init__(self, tensors: Sequence[tuple[Tensor, Refuse]]):
        spans = [(*span, refuse) for tensor, refuse in tensors if (span := _span_of(tensor)) is not None]
        self._spans: list[_Span] = sorted(spans, key=lambda one: one[:2])
        self._small = [
            (tensor, refuse, content) for tensor, refuse in tensors if (content := _content_of(tensor)) is not None
        ]
        self._starts = [start for start, _, _ in self._spans]
        self._furthest = list(itertools.accumulate((end for _, end, _ in self._spans), max))

    def check_all(self, tensors: Any) -> None:
        """`check` each tensor in an operation's argument."""
        for tensor in tensors_in(tensors):
            self.check(tensor)

    def compare(self) -> None:
        """Refuse writes that bypassed torch, in tensors small enough that their bytes were kept."""
        for tensor, refuse, before in self._small:
            if bytes(as_bytes(tensor).numpy()) != before:
                refuse()

    def check(self, tensor: Tensor) -> None:
        """Refuse to write to this tensor if any of it is watched."""
        span = _span_of(tensor)
        if span is None:
            return
        before = bisect.bisect_left(self._starts, span[1])
        if before and self._furthest[before - 1] > span[0]:
            next(refuse for _, end, refuse in self._spans[:before] if end > span[0])()


def written_by(func: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """The arguments that an operation of torch writes to, with their names."""
    places, statistics = _written_places(func)
    if statistics and args[5]:  # in training
        places = [*places, *statistics]
    return [(name, args[index] if index < len(args) else kwargs.get(name)) for index, name in places]


@functools.cache
def _written_places(func: Any) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Which arguments an operation writes to, and which it writes to in training besides."""
    operation, given = operation_name(func), [*enumerate(arguments(func))]
    if operation == "record_stream":  # declared as a write, but only keeps memory from being reused
        return [], []
    written = [(index, one.name) for index, one in given if one.is_written]
    return written, [(index, one.name) for index, one in given[3:5] if operation in _BATCH_NORMS]


def _span_of(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses where a tensor's elements begin and end; None if it has no elements in memory."""
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a tensor without memory
        return None
    if tensor.is_nested:  # it has no shape
        return start, start + tensor.untyped_storage().nbytes()
    return (start, start + extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize)) if start else None


def _content_of(tensor: Tensor) -> bytes | None:
    """The bytes of a small tensor on a CPU; None for others, and in a step that is only checked, without values."""
    if not tensor.is_cpu or _span_of(tensor) is None or tensor.nbytes > _SMALL:  # sparse ones have no nbytes
        return None
    content = as_bytes(tensor)
    return None if is_fake(content) else bytes(content.numpy())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in an operation's argument."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
