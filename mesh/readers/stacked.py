"""Samples that are stacked as they leave a reader, straight into the memory that the rank will map: one copy less.

Invariant: what arrives equals torch.stack of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_LEAST_BYTES = 1 << 16  # of a stack for which saving a copy is worth it


class Stacked:
    """Tensors of one shape and dtype that stand for their stack."""

    __slots__ = ("_samples", "dtype", "shape")

    def __init__(self, samples: Sequence[torch.Tensor]):
        self._samples, self.dtype = list(samples), samples[0].dtype
        self.shape = (len(samples), *samples[0].shape)

    @staticmethod
    def of(samples: Sequence[Any]) -> Stacked | None:
        """Samples to stack; None if they are too small, not alike, or no plain tensors."""
        first = samples[0]
        if not _plain(first) or len(samples) * first.nbytes < _LEAST_BYTES:
            return None
        alike = all(one.shape == first.shape and one.dtype == first.dtype and _plain(one) for one in samples)
        return Stacked(samples) if alike else None

    def numel(self) -> int:
        return len(self._samples) * self._samples[0].numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def write(self, flat: torch.Tensor) -> None:
        """Stack the samples into `flat`, which has as many elements."""
        torch.stack(self._samples, out=flat.view(self.shape))

    def without_samples(self) -> torch.Tensor:
        return self._samples[0].new_empty((0, *self.shape[1:]))


def _plain(x: torch.Tensor) -> bool:
    known = type(x) is torch.Tensor and x.layout is torch.strided and x.device.type == "cpu"
    return known and not (x.requires_grad or x.is_quantized or x.is_conj() or x.is_neg())
