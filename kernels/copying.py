"""Copies of large tensors that bypass the processor's cache.

A store into memory that isn't cached reads it first, which is a third of a copy's traffic. The C library's memcpy
avoids that above a size that it derives from the cache; where the cache has hundreds of megabytes, no copy is so large.
So the zygote lowers that size for its ranks (GLIBC_TUNABLES, the GNU C library's manual, "Hardware Capability
Tunables"). torch copies with its own loops, so large copies go through the C library. (Not through NumPy: a tensor that
NumPy has seen can't be resized any more, which FSDP does.)
"""

from __future__ import annotations

import ctypes

import torch

LARGE_BYTES = 16 << 20
# For the environment of a process that is about to start; no effect on a C library that isn't glibc.
TUNABLES = f"glibc.cpu.x86_non_temporal_threshold={LARGE_BYTES:#x}"


def copy(out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`out.copy_(source)` for contiguous tensors of one dtype and shape.

    >>> copy(torch.empty(3), torch.ones(3))
    tensor([1., 1., 1.])
    """
    if out.nbytes < LARGE_BYTES or not (out.is_cpu and source.is_cpu) or source.is_conj() or source.is_neg():
        return out.copy_(source)
    copy_bytes(out, source)
    return out


def copy_bytes(out: torch.Tensor, source: torch.Tensor) -> None:
    """The same on the CPU, not seen by torch's modes (a net, say): the caller marks what it has copied.

    >>> out = torch.zeros(2, dtype=torch.uint8)
    >>> copy_bytes(out, torch.ones(2, dtype=torch.uint8)); out
    tensor([1, 1], dtype=torch.uint8)
    """
    ctypes.memmove(out.data_ptr(), source.data_ptr(), out.nbytes)


def copy_alone(out: torch.Tensor, source: torch.Tensor) -> None:
    """The same on any device, on this thread alone unless that takes long.

    torch copies by several threads, which then wait for milliseconds for more work, on cores that ranks need.
    """
    if source.is_cpu and source.nbytes < LARGE_BYTES:
        copy_bytes(out, source)
    else:
        out.copy_(source)
