"""Donated memory: which values a step may overwrite, and what happens to a tensor after its memory was reused.

A caller donates arguments (`spmd(donate=...)`); the optimizer then writes new parameters and state into the memory of
the old ones. Invariant: a value's memory is taken only if no other tensor shares it. A value that a donating call
returned, and that shares memory with no other, owns its memory until it is handed out or another result shares its
storage.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence, Set
from typing import Any, NoReturn

import torch

from ..kernels.errors import SpecError
from ..kernels.flat import storages


class DonatedTensor(torch.Tensor):
    """What a tensor becomes after its memory was taken: using it raises an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise SpecError(
            "a donated tensor was used after opt.step had taken over its memory",
            remedy="use it before opt.step, or leave its argument out of donate=",
        )


def mark_donated(tensor: torch.Tensor, *, owned: bool = True, value: torch.Tensor | None = None) -> torch.Tensor:
    """Note that a tensor is donated: a step may take its memory, if the tensor owns that on this rank.

    Args:
        value: the tensor that it was made of for the step; an Array that the step captures may be the same value.
    """
    tensor._spmd_donated = owned  # type: ignore[attr-defined]
    if owned and value is not None:
        tensor._spmd_value = value  # type: ignore[attr-defined]
    return tensor


def is_donated(tensor: Any) -> bool:
    """Whether the caller donated it. That is the same on all ranks, while owning the memory may not be."""
    return hasattr(tensor, "_spmd_donated")


def may_take(tensor: Any) -> bool:
    """Whether it is donated, and owns its memory on this rank."""
    return getattr(tensor, "_spmd_donated", False)


def spare_repeated(tensors: Sequence[torch.Tensor]) -> None:
    """Don't take tensors that come more than once, as tied parameters do: each time would be one more step in place."""
    if len(set(map(id, tensors))) == len(tensors):
        return
    for tensor, times in collections.Counter(tensors).items():
        if times > 1 and is_donated(tensor):
            mark_donated(tensor, owned=False)


_taken = threading.local()  # what was taken on this thread, until it is closed


def take(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor with the same memory, which may be written to."""
    note_taken([tensor])
    return tensor.detach()


def note_taken(tensors: Sequence[torch.Tensor]) -> None:
    """Note that the memory of these tensors was taken."""
    vars(_taken).setdefault("tensors", []).extend(tensors)


def close() -> None:
    """Make the tensors whose memory was taken unusable.

    >>> old = mark_donated(torch.zeros(2))
    >>> take(old).add_(1)
    tensor([1., 1.])
    >>> close()
    >>> old + 1
    Traceback (most recent call last):
    spmd.kernels.errors.SpecError: a donated tensor was used after opt.step had taken over its memory: use it before \
opt.step, or leave its argument out of donate=
    """
    for tensor in vars(_taken).pop("tensors", ()):
        tensor.__class__ = DonatedTensor
        value = getattr(tensor, "_spmd_value", None)
        if value is not None:
            value.__class__ = DonatedTensor


def is_owner(tensor: Any) -> bool:
    """Whether no other tensor shares its memory."""
    return isinstance(tensor, torch.Tensor) and getattr(tensor, "_spmd_owner", False)


def disown(tensor: torch.Tensor) -> torch.Tensor:
    """Note that from now on its memory is shared."""
    if is_owner(tensor):
        tensor._spmd_owner = False  # type: ignore[attr-defined]
    return tensor


def settle(values: Sequence[Any], local: Sequence[Any], results: Sequence[Any], captured: Set[int] | None) -> None:
    """After a call, find out which values own their memory.

    Args:
        values: the values that were passed, as they are kept.
        local: the same values as the body got them; the memory of some was taken.
        results: the results, as they will be kept.
        captured: the addresses of the storages of what the body captures, which later calls may return again; None if
            no arguments were donated: then no results are made owners.
    """
    # Not `is_owner`: this looks at every value in every call, and most don't have the attribute.
    owners = [value for value in values if getattr(value, "_spmd_owner", False)]
    if not owners and captured is None:
        return
    kept = [
        value
        for value, seen in zip(values, local, strict=True)
        if isinstance(value, torch.Tensor) and type(seen) is not DonatedTensor
    ]
    alive = set(map(id, kept))
    owners = [value for value in owners if id(value) in alive]
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    beside = set().union(*(storages(result) for result in tensors if result.layout is not torch.strided))
    strided = [(result, _storage(result)) for result in tensors if result.layout is torch.strided]
    shown = {*beside, *(where for _, where in strided)}
    for value in owners:
        if _storage(value) in shown:
            disown(value)
    if captured is not None:
        beside |= captured
        for value in kept:
            beside |= {_storage(value)} if value.layout is torch.strided else storages(value)
        for result in _apart([(result, where) for result, where in strided if where not in beside]):
            result._spmd_owner = True


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _apart(stored: list[tuple[Any, int]]) -> list[Any]:
    """From pairs (tensor, storage), the tensors that have no gaps and overlap with no other."""
    spans = sorted((tensor.data_ptr(), tensor.nbytes, index) for index, (tensor, _) in enumerate(stored))
    dense = [tensor.is_contiguous() for tensor, _ in stored]
    good = [is_dense and tensor.numel() > 0 for (tensor, _), is_dense in zip(stored, dense, strict=True)]
    end, last = -1, -1
    for start, nbytes, index in spans:
        if start < end:
            good[index] = good[last] = False
        if start + nbytes > end:
            end, last = start + nbytes, index
    # A tensor with gaps counts as overlapping with its whole storage.
    loose = {where for (_, where), is_dense in zip(stored, dense, strict=True) if not is_dense}
    return [tensor for index, (tensor, where) in enumerate(stored) if good[index] and where not in loose]
