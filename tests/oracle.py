"""What collectives must give, computed in one process: inputs from known seeds, reductions in NumPy in rank order.

Shared by the tests of the communication layer. Ranks and the driver make the same inputs with `value`, so only results
travel; `same` compares bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import cloudpickle
import numpy as np
import torch

# These functions are pickled by value, so that ranks need not import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)

_NUMPY = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def value(dtype: torch.dtype, shape: Sequence[int], rank: int, seed: int = 0) -> torch.Tensor:
    """The input of one rank: integers over their whole range, floats of mixed magnitude."""
    draw = np.random.default_rng([seed, rank])
    if dtype is torch.bool:
        return torch.from_numpy(np.asarray(draw.integers(0, 2, shape) > 0))
    if dtype in INTEGERS:
        name = str(dtype).removeprefix("torch.")
        limits = np.iinfo(name)
        return torch.from_numpy(np.asarray(draw.integers(limits.min, limits.max, shape, name, endpoint=True)))
    real = np.asarray(draw.standard_normal(shape) * 2.0 ** draw.integers(-6, 7, shape))
    if dtype.is_complex:
        imaginary = np.asarray(draw.standard_normal(shape))
        return torch.complex(torch.from_numpy(real), torch.from_numpy(imaginary)).to(dtype)
    return torch.from_numpy(real).to(dtype)


def meaningful(op: str, dtype: torch.dtype) -> bool:
    """Whether a reduction is defined for a dtype."""
    if op in ("band", "bor", "bxor"):
        return not (dtype.is_floating_point or dtype.is_complex)
    if op in ("min", "max"):
        return not dtype.is_complex
    return not (op == "avg" and dtype is torch.bool)


def exact(op: str, dtype: torch.dtype) -> bool:
    """Whether NumPy must give the same bits; its complex products and quotients round in another way."""
    return not (dtype.is_complex and op in ("product", "avg"))


def reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """((r0 op r1) op r2) ..., 16-bit floats in float32 and rounded once, averages of integers towards zero."""
    dtype = parts[0].dtype
    if len(parts) == 1:
        return parts[0].clone()
    arrays = [(part.float() if dtype in HALVES else part).resolve_conj().resolve_neg().numpy() for part in parts]
    with np.errstate(all="ignore"):
        total = arrays[0]
        for array in arrays[1:]:
            total = np.asarray(_NUMPY[op](total, array))
        if op == "avg" and dtype in INTEGERS:
            size = len(parts)
            below = (total < 0) if np.iinfo(total.dtype).min < 0 else np.zeros(total.shape, bool)
            total = total // total.dtype.type(size) + ((total % total.dtype.type(size) != 0) & below)
            total = np.asarray(total, arrays[0].dtype)
        elif op == "avg":
            total = np.asarray(total / total.dtype.type(len(parts)))
    return torch.from_numpy(np.ascontiguousarray(total).reshape(parts[0].shape)).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements, in order."""
    if not tensor.numel():
        return b""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    return got.shape == expected.shape and got.dtype == expected.dtype and bits(got) == bits(expected)
