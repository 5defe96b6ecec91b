"""The parts of torch that transforms need and torch doesn't publish; see `kernels.torch_private`, which has most."""

from __future__ import annotations

import torch


def being_exported() -> bool:
    """Whether `torch.export` is running.

    Public way: `torch.compiler.is_exporting`, which is true in what `torch.compile` traces, too, until torch 2.12.
    """
    return torch.compiler._is_exporting_flag
