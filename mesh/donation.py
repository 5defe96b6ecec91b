"""Donated memory: which values a step may overwrite, and what becomes of a tensor whose memory was taken.

A caller donates arguments (`spmd(donate=...)`); the optimizer then takes the memory of parameters and state for what
comes after them. Invariant: a value's memory is taken only if nothing else shows it. A value that came out of a
donating call sharing memory with no other is its memory's owner, until it is handed out or some result shares its
storage.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..kernels.errors import SpecError, message
from ..kernels.flat import storages


class DonatedTensor(torch.Tensor):
    """What a tensor becomes when its memory is taken: nobody may read it any more."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise SpecError(
            message(
                "a donated tensor was used after opt.step had taken over its memory",
                remedy="use it before opt.step, or leave its argument out of donate=",
            )
        )


def mark_donated(tensor: torch.Tensor, *, owned: bool = True) -> torch.Tensor:
    """Note that a tensor is donated: a step may take its memory, if it owns that on this rank."""
    tensor._spmd_donated = owned  # type: ignore[attr-defined]
    return tensor


def is_donated(tensor: Any) -> bool:
    """Whether the caller has given it up, which is the same on all ranks; owning the memory may not be."""
    return hasattr(tensor, "_spmd_donated")


def may_take(tensor: Any) -> bool:
    """Whether it is donated, and owns its memory on this rank."""
    return getattr(tensor, "_spmd_donated", False)


def spare_repeated(tensors: Sequence[torch.Tensor]) -> None:
    """Have what comes more than once, as tied parameters do, not be taken: it would be stepped in place each time."""
    if len(set(map(id, tensors))) == len(tensors):
        return
    for tensor, times in collections.Counter(tensors).items():
        if times > 1 and is_donated(tensor):
            mark_donated(tensor, owned=False)


_taken = threading.local()  # what was taken on this thread, until it is closed


def take(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that may be written to."""
    note_taken([tensor])
    return tensor.detach()


def note_taken(tensors: Sequence[torch.Tensor]) -> None:
    """The memory of these was taken, all at once."""
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


def is_owner(tensor: Any) -> bool:
    """Whether nothing but this value shows its memory."""
    return isinstance(tensor, torch.Tensor) and getattr(tensor, "_spmd_owner", False)


def disown(tensor: torch.Tensor) -> torch.Tensor:
    """Note that the memory is seen elsewhere from now on."""
    if is_owner(tensor):
        tensor._spmd_owner = False  # type: ignore[attr-defined]
    return tensor


def settle(values: Sequence[Any], local: Sequence[Any], results: Sequence[Any], *, donating: bool) -> None:
    """After a call: find out which values own their memory.

    Args:
        values: the tensors that were passed, as they are kept.
        local: the same as the body got them; some were taken.
        results: the results, as they will be kept.
        donating: whether the call took donations, so that its results are worth owning.
    """
    # By the attribute itself: most values have none, and this is asked of all of them in every call.
    owners = [value for value in values if getattr(value, "_spmd_owner", False)]
    if not owners and not donating:
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
    if donating:
        for value in kept:
            beside |= {_storage(value)} if value.layout is torch.strided else storages(value)
        for result in _apart([(result, where) for result, where in strided if where not in beside]):
            result._spmd_owner = True


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _apart(stored: list[tuple[Any, int]]) -> list[Any]:
    """Of (tensor, storage) the tensors that overlap with none of the others, and have no gaps."""
    spans = sorted((tensor.data_ptr(), tensor.nbytes, index) for index, (tensor, _) in enumerate(stored))
    dense = [tensor.is_contiguous() for tensor, _ in stored]
    good = [is_dense and tensor.numel() > 0 for (tensor, _), is_dense in zip(stored, dense, strict=True)]
    end, last = -1, -1
    for start, nbytes, index in spans:
        if start < end:
            good[index] = good[last] = False
        if start + nbytes > end:
            end, last = start + nbytes, index
    # Of a tensor with gaps it isn't known which elements it shows: it speaks for its whole storage.
    loose = {where for (_, where), is_dense in zip(stored, dense, strict=True) if not is_dense}
    return [tensor for index, (tensor, where) in enumerate(stored) if good[index] and where not in loose]
