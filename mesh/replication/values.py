"""Comparing by value: what a rank sends of tensors that should be the same on other ranks, their *prints*.

Single numbers are sent whole, a few bytes with every answer; of larger tensors a hash is sent, on calls 1, 2, 4, 8 and
so on of a signature. Invariant: equal prints mean equal bytes; the sums in them are for messages only, since processors
may add in different orders.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import pickle
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...kernels.errors import kind_text
from ...kernels.flat import as_bytes, strided_parts
from ...kernels.torch_private import is_fake
from ..spec import P
from ..strides import is_frozen

HASH_BYTES = 16
_PRINT = struct.Struct(f"{HASH_BYTES}sd")  # of a tensor with several elements: a hash, and the sum
_PART = 1 << 16  # elements that are summed at once
_FOLD = 512  # words that are summed to one before hashing, in large tensors


class Check(enum.IntEnum):
    """How much of a call is checked; each level includes those before it."""

    NOTHING = 0
    SCALARS = 1
    VALUES = 2
    TYPES = 3


def check_of(check: str, call: int, ranks: int, *, first: bool) -> Check:
    """What is checked in a call.

    >>> [check_of("first", call, 2, first=call == 1).name for call in (1, 2, 3, 4)]
    ['TYPES', 'VALUES', 'SCALARS', 'VALUES']

    Args:
        check: as given to `spmd`.
        call: its number among the calls of its signature, from 1 on.
        first: whether none of them has succeeded yet.
    """
    if check == "never":
        return Check.NOTHING
    if first:
        return Check.TYPES
    if ranks == 1:
        return Check.SCALARS  # nothing to compare, but the numbers are sent all the same
    return Check.VALUES if check == "always" or call & (call - 1) == 0 else Check.SCALARS


def flag_in(leaf: Any) -> Any:
    """What may decide a result's shape or spec, in a value that is no tensor; not floats, which change too often."""
    if type(leaf) is slice:
        return flag_in(leaf.start), flag_in(leaf.stop), flag_in(leaf.step)
    if isinstance(leaf, enum.Enum):
        return leaf.name or str(leaf.value)  # a value may be one that can't be hashed
    return leaf if isinstance(leaf, int | str | torch.dtype | None) else None


class Leaf(Protocol):
    """What both sides know of a leaf."""

    @property
    def spec(self) -> P | None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype | None: ...


def scalars_among(leaves: Sequence[Leaf]) -> list[int]:
    """The indices of leaves that are single numbers and should be the same on all ranks."""
    return [index for index, leaf in enumerate(leaves) if _is_scalar(leaf)]


def _is_scalar(leaf: Leaf) -> bool:
    return leaf.spec is not None and not leaf.spec.entries and all(size == 1 for size in leaf.shape)


def prints_of_scalars(tensors: Sequence[Any], scalars: Sequence[int]) -> bytes:
    """The bytes of these tensors; empty if one is on a GPU, since reading it would wait for all work there.

    A byte follows if one is a frozen parameter: bytes do not say so, and they are fetched.
    """
    found = [tensors[index] for index in scalars]
    if any(number.is_cuda for number in found):
        return b""
    its_bytes = [ctypes.string_at(number.data_ptr(), number.element_size()) for number in found]
    return b"".join([*its_bytes, b"\0"] if any(map(is_frozen, found)) else its_bytes)


def prints_of_all(tensors: Sequence[Any], leaves: Sequence[Leaf], axes: int) -> bytes:
    """The prints of all tensors, except those that are cut along all of the mesh's `axes` axes."""
    return b"".join(
        tensor_print(tensor) for tensor, leaf in zip(tensors, leaves, strict=True) if _is_compared(leaf, axes)
    )


def _is_compared(leaf: Leaf, axes: int) -> bool:
    return leaf.spec is not None and len(leaf.spec.axes) < axes


def tensor_print(tensor: Tensor) -> bytes:
    """What ranks compare of a tensor: the bytes of a single number, else a hash and the sum."""
    if is_fake(tensor):
        return b""
    if tensor.numel() == 1:
        return bytes(as_bytes(tensor.to_dense()).cpu().numpy())
    numbers = strided_parts(tensor.detach())[-1]
    numbers = numbers.abs() if numbers.is_complex() else numbers
    return _PRINT.pack(digest(tensor), _sum(numbers))


def _sum(numbers: Tensor) -> float:
    """The sum in float64; on a CPU in parts, since torch makes a float64 copy first."""
    parts = [numbers] if numbers.is_cuda else numbers.reshape(-1).split(_PART)
    return sum(part.sum(dtype=torch.float64).item() for part in parts)


def split(prints: bytes, leaves: Sequence[Leaf], check: Check, axes: int) -> list[bytes | None]:
    """The print of each leaf, cut out of all; None for leaves that were not checked."""
    found: list[bytes | None] = []
    at = 0
    for leaf in leaves:
        if not (_is_scalar(leaf) if check < Check.VALUES else _is_compared(leaf, axes)):
            found.append(None)
            continue
        single = all(size == 1 for size in leaf.shape)
        size = leaf.dtype.itemsize if single and leaf.dtype is not None else _PRINT.size
        found.append(prints[at : at + size])
        at += size
    return found


def scalar_in(prints: bytes, leaves: tuple[Leaf, ...], index: int) -> Tensor | None:
    """A leaf's value from the tensors' prints of a call with `Check.SCALARS`; None if it is not among them."""
    offsets = _offsets(leaves)
    if index not in offsets or offsets[-1] != len(prints):  # one is on a GPU, or frozen
        return None
    leaf, start = leaves[index], offsets[index]
    assert leaf.dtype is not None
    number = torch.frombuffer(bytearray(prints[start : start + leaf.dtype.itemsize]), dtype=leaf.dtype)
    return number.view(leaf.shape)


@functools.lru_cache(maxsize=256)
def _offsets(leaves: tuple[Leaf, ...]) -> dict[int, int]:
    """Where each number among these leaves begins in the prints; under -1 the length of the prints."""
    found, at = {}, 0
    for index in scalars_among(leaves):
        dtype = leaves[index].dtype
        if dtype is not None:
            found[index] = at
            at += dtype.itemsize
    return {**found, -1: at}


def same_bytes(a: bytes | None, b: bytes | None, shape: Sequence[int]) -> bool:
    """Whether two ranks' prints of tensors of one shape agree."""
    if a is None or b is None or a == b:
        return True
    return not all(size == 1 for size in shape) and a[:HASH_BYTES] == b[:HASH_BYTES]


def same_value(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors are the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float | complex):
        return a is b or repr(a) == repr(b)  # 0.0 and -0.0 are two numbers
    try:
        return bool(a == b or (a != a and b != b))
    except Exception:  # no truth value, or no comparison at all
        return pickle.dumps(a) == pickle.dumps(b)


def shown(content: bytes, shape: Sequence[int], dtype: torch.dtype) -> str:
    """A number, or of several their sum, for messages."""
    if all(size == 1 for size in shape):
        number = torch.frombuffer(bytearray(content), dtype=dtype)
        return str(number.numpy()[0] if dtype is torch.float32 else number.item())
    return f"{kind_text(dtype, shape)} with other bytes (sum {_PRINT.unpack(content)[1]:.9g})"


def digest(tensor: Tensor) -> bytes:
    """A short hash of a tensor's bytes, shape and dtype."""
    if is_fake(tensor):
        return bytes(HASH_BYTES)
    state = hashlib.blake2b(repr((tuple(tensor.shape), tensor.dtype)).encode(), digest_size=HASH_BYTES)
    for part in strided_parts(tensor):
        _hash(state, as_bytes(part).cpu())
    return state.digest()


def _hash(state: Any, data: Tensor) -> None:
    if data.numel() >= 64 * _FOLD and data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0:
        # Hash the sums of rows and of columns, in a tenth of the time of hashing everything.
        words = data[: data.numel() // (8 * _FOLD) * (8 * _FOLD)].view(torch.int64).view(-1, _FOLD)
        state.update(words.sum(0).numpy().data)
        state.update(words.sum(1).numpy().data)
        data = data[8 * words.numel() :]
    state.update(data.numpy().data)
