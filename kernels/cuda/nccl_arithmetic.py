"""How NCCL, which has few dtypes and five operations, does all reductions of this library.

Most tensors travel as they are. Booleans travel as bytes, where "or" is the maximum and "and" the minimum; complex
numbers as pairs; 16-bit integers as 32-bit ones, whose low halves overflow in the same way. NCCL's maximum and minimum
of floats ignore NaN, which must not get lost: for these, floats travel as integers with the same order, and NaN beyond
all. The rest (bitwise operations, complex products) is gathered, and combined on every rank.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ..errors import dtype_name
from ..reduction import Op, Pairwise

# NCCL's names for torch's dtypes.
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMES = {dtype: f"NCCL_{dtype_name(dtype).upper()}" for dtype in (*_INTEGERS, *_FLOATS)}
_OPS = {"sum": "NCCL_SUM", "product": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN", "avg": "NCCL_AVG"}
_BOOLEAN = {"sum": "max", "max": "max", "bor": "max", "product": "min", "min": "min", "band": "min"}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How a reduction travels.

    Attributes:
        dtype: dtype of the elements that NCCL sees.
        op: NCCL's name of the operation; None if the elements are gathered, and combined here.
        divide: whether the sum is then divided by the number of ranks, rounding towards zero.
        same: whether NCCL works on the tensor's own memory, read as `dtype`.
        ordered: "", or the elements are integers in the order of the floats, with NaN last ("max") or first ("min").
    """

    dtype: torch.dtype
    op: str | None
    divide: bool = False
    same: bool = True
    ordered: str = ""


@functools.cache
def way(op: Op, dtype: torch.dtype) -> Way:
    """How an op that is defined for the dtype travels.

    >>> way("sum", torch.complex64).dtype, way("bor", torch.bool).op
    (torch.float32, 'NCCL_MAX')
    """
    if isinstance(op, Pairwise):
        return Way(dtype, None)
    if dtype is torch.bool:
        return Way(torch.uint8, _OPS[_BOOLEAN[op]] if op in _BOOLEAN else None)
    if op not in _OPS or (dtype.is_complex and op == "product"):
        return Way(dtype, None)
    if dtype.is_complex:
        return Way(dtype.to_real(), _OPS[op])
    if dtype in (torch.int16, torch.uint16):
        return Way(torch.int32, _OPS["sum" if op == "avg" else op], divide=op == "avg", same=False)
    if op in ("max", "min") and dtype in _FLOATS:
        return Way(torch.int64 if dtype is torch.float64 else torch.int32, _OPS[op], same=False, ordered=op)
    if op == "avg" and not dtype.is_floating_point and dtype.is_signed:
        return Way(dtype, _OPS["sum"], divide=True)
    return Way(dtype, _OPS[op]) if dtype in NAMES else Way(dtype, None)


def encoded(flat: torch.Tensor, chosen: Way) -> torch.Tensor:
    """A flat contiguous tensor in the form that NCCL gets: a view of its memory, or a new tensor."""
    if chosen.ordered:
        values = flat if flat.dtype.itemsize == chosen.dtype.itemsize else flat.float()
        limits = torch.iinfo(chosen.dtype)
        last = limits.max if chosen.ordered == "max" else limits.min
        return _flipped(values.view(chosen.dtype)).masked_fill_(flat.isnan(), last)
    if not chosen.same:
        return flat.to(chosen.dtype)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat.view(chosen.dtype)


def decoded(result: torch.Tensor, dtype: torch.dtype, chosen: Way, size: int) -> torch.Tensor:
    """NCCL's result, as a tensor of the original dtype."""
    if chosen.ordered:
        return _flipped(result).view(torch.float64 if chosen.dtype is torch.int64 else torch.float32).to(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(result.view(-1, 2))
    result = result.view(dtype) if chosen.same else result.to(dtype)
    if chosen.divide and dtype is torch.uint16:
        return torch.div(result.to(torch.int32), size, rounding_mode="floor").to(dtype)
    return torch.div(result, size, rounding_mode="trunc") if chosen.divide else result


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """The bits of floats as integers in the same order, and back: flips all bits but the sign of negative numbers.

    >>> _flipped(torch.tensor([-2.0, -1.0, 0.0, 1.0]).view(torch.int32)).diff() > 0
    tensor([True, True, True])
    """
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def as_signed(part: torch.Tensor) -> torch.Tensor:
    """Unsigned integers viewed as signed ones, on which torch has bitwise operations."""
    return part.view(_SIGNED.get(part.dtype, part.dtype))


def nccl_type(nccl: Any, dtype: torch.dtype) -> int:
    return int(getattr(nccl, NAMES[dtype]))
