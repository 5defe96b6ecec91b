"""Reduces tensors in rank order: the one place that decides the order of additions.

Floating-point sums depend on their order. Whatever the transport, contributions are combined as
((r0 + r1) + r2) + ..., never in order of arrival, so every rank and every run gets the same bits.
Sixteen-bit floats are accumulated in float32 and rounded once.

The exception is the op `Pairwise`, for sums that must not depend on how many contributions there are: it
adds neighbours, then neighbours of these, and rounds at every addition.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .errors import SpecError

ALIGNED = 64  # elements; a vector loop rounds a slice's tail otherwise: cut at multiples, all tails are in one place

# For each op, torch's and NumPy's name of the function that combines two values.
_COMBINE = {
    "sum": "add",
    "avg": "add",
    "min": "minimum",
    "max": "maximum",
    "product": "multiply",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
}
_TORCH: dict[str, Callable[..., torch.Tensor]] = {op: getattr(torch, name) for op, name in _COMBINE.items()}
OPS = tuple(_COMBINE)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # NumPy computes with these, torch does not
HALVES = (torch.float16, torch.bfloat16)
# Block by block, partial sums stay in the cache: those of more than two contributions, and those of 16-bit floats,
# which lie in memory of their own.
_BLOCK = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Pairwise:
    """The op that sums in a binary tree over the contributions and multiplies the root by `scale`.

    >>> reduce_in_order([torch.ones(2), torch.ones(2), torch.ones(2)], Pairwise(0.5), torch.empty(2))
    tensor([1.5000, 1.5000])
    """

    scale: float

    def __str__(self) -> str:
        return f"pairwise sum times {self.scale.hex()}"


Op = str | Pairwise  # one of `OPS`, or a sum in tree order


def check_op(op: Op, dtype: torch.dtype) -> None:
    """Refuse an operation that is unknown, or that has no meaning for `dtype`."""
    if not isinstance(op, Pairwise) and op not in OPS:
        raise SpecError("unknown reduction op", got=repr(op), expected=f"one of {OPS}")
    if not _has_meaning(op, dtype):
        remedy = "cast the tensor, or use another op"
        if _is_float8(dtype):
            remedy = "8 bits are too few to reduce in, cast it to bfloat16 or float32; moving it works as it is"
        raise SpecError(f"op {str(op)!r} is not defined for {dtype}", remedy=remedy)


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


@functools.cache
def _has_meaning(op: Op, dtype: torch.dtype) -> bool:
    """Whether torch can do the arithmetic; found out by trying, since any list of ours would go out of date."""
    if _is_float8(dtype):  # torch multiplies some of these, on some devices
        return False
    try:
        one = torch.ones(1, dtype=dtype, device="cpu")
        _reduce([one, one], op, torch.empty_like(one))
    except RuntimeError:
        return False
    return True


def reduce_in_order(parts: Sequence[torch.Tensor], op: Op, out: torch.Tensor) -> torch.Tensor:
    """Combine `parts` (flat, of one shape and dtype, in rank order) into `out`.

    >>> reduce_in_order([torch.tensor([1, 2]), torch.tensor([3, 5])], "sum", torch.empty(2, dtype=torch.int64))
    tensor([4, 7])
    """
    if out.numel() > _BLOCK and (len(parts) > 2 or out.dtype in HALVES):
        for start in range(0, out.numel(), _BLOCK):
            end = start + _BLOCK
            _reduce([part[start:end] for part in parts], op, out[start:end])
    else:
        _reduce(parts, op, out)
    return out


def _reduce(parts: Sequence[torch.Tensor], op: Op, out: torch.Tensor) -> None:
    if isinstance(op, Pairwise):
        _reduce_pairwise(parts, op.scale, out)
        return
    combine = _TORCH[op]
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    if out.dtype in _UNSIGNED:
        _reduce_unsigned([part.numpy() for part in parts], op, out.numpy())
        if op == "avg":
            divide(out, len(parts))
        return
    narrow = out.dtype in HALVES and op in ("sum", "avg", "product")
    if narrow:
        total = combine(parts[0].float(), parts[1])
    else:
        total = combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(total, part, out=total)
    if op == "avg":
        divide(total, len(parts))
    if narrow:
        out.copy_(total)


def _reduce_pairwise(parts: Sequence[torch.Tensor], scale: float, out: torch.Tensor) -> None:
    if len(parts) == 2:  # needs no memory besides the result's
        torch.add(parts[0], parts[1], out=out).mul_(scale)
        return
    while len(parts) > 1:
        pairs = [torch.add(left, right) for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    torch.mul(parts[0], scale, out=out)


def _reduce_unsigned(parts: Sequence[np.ndarray], op: str, out: np.ndarray) -> None:
    combine = getattr(np, _COMBINE[op])
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


def divide(total: torch.Tensor, count: int) -> None:
    """Turn a sum into an average, in place; integers are rounded towards zero.

    >>> total = torch.tensor([-7, 7]); divide(total, 2); total
    tensor([-3,  3])
    """
    if total.dtype in _UNSIGNED:
        numbers = total.numpy()
        np.floor_divide(numbers, count, out=numbers)
    else:
        total.div_(count, rounding_mode=None if total.dtype.is_floating_point or total.dtype.is_complex else "trunc")


def slice_bounds(numel: int, parts: int) -> list[int]:
    """Where `parts` nearly equal slices of `numel` elements begin and end, cut at multiples of `ALIGNED` elements.

    >>> slice_bounds(200, 3)
    [0, 128, 192, 200]
    """
    each, longer = divmod(-(-numel // ALIGNED), parts)
    bounds = [0]
    for index in range(parts):
        bounds.append(min(numel, bounds[-1] + ALIGNED * (each + (index < longer))))
    return bounds


def slice_length(numel: int, parts: int) -> int:
    """The length of equal slices, with the padding of the last ones.

    >>> slice_length(200, 3)
    128
    """
    return -(-numel // (ALIGNED * parts)) * ALIGNED
