"""Copies of large tensors past the cache.

A store into memory that isn't in the cache reads it first, a third of a copy's traffic. The C library's memcpy avoids
that above a size which it derives from the cache, and on hosts with hundreds of megabytes of it never reaches; the
zygote lowers that size for its ranks (GLIBC_TUNABLES, the GNU C library's manual, "Hardware Capability Tunables").
torch copies with loops of its own, NumPy with memcpy: so large copies go through NumPy.
"""

from __future__ import annotations

import numpy as np
import torch

LARGE_BYTES = 16 << 20
# For the environment of a process that is about to start; no effect on a C library that isn't glibc.
TUNABLES = f"glibc.cpu.x86_non_temporal_threshold={LARGE_BYTES:#x}"


def copy(out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`out.copy_(source)` for contiguous tensors of one dtype and shape.

    >>> copy(torch.empty(3), torch.ones(3))
    tensor([1., 1., 1.])
    """
    if out.numel() * out.element_size() < LARGE_BYTES or not (out.is_cpu and source.is_cpu):
        return out.copy_(source)
    np.copyto(out.detach().view(-1).view(torch.uint8).numpy(), source.detach().view(-1).view(torch.uint8).numpy())
    return out
