"""Copies of large tensors past the cache.

A store into memory that isn't in the cache reads it first, a third of a copy's traffic. The C library's memcpy avoids
that above a size which it derives from the cache, and on hosts with hundreds of megabytes of it never reaches; the
zygote lowers that size for its ranks (GLIBC_TUNABLES, the GNU C library's manual, "Hardware Capability Tunables").
torch copies with loops of its own, so large copies go to the C library. (Not through NumPy: a tensor that it has seen
can't be resized any more, which FSDP does.)
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
    """The same on the CPU, unseen by torch's modes: what is collected is marked by who collects it.

    >>> out = torch.zeros(2, dtype=torch.uint8)
    >>> copy_bytes(out, torch.ones(2, dtype=torch.uint8)); out
    tensor([1, 1], dtype=torch.uint8)
    """
    ctypes.memmove(out.data_ptr(), source.data_ptr(), out.nbytes)
