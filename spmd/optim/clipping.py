"""Clipping by the norm of all gradients together, of which each rank may have a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import transforms
from ..kernels.errors import SpecError
from ..mesh.region import current
from .leaves import layout_of


def check(clip: Any) -> None:
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0:
        raise SpecError(
            "optimizer got an unexpected argument 'clip'", got=repr(clip), expected="a positive number: the norm"
        )


@torch.no_grad()
def scale_of(clip: float, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor | None:
    """The factor for every gradient that brings their common norm down to `clip`; None if it is known to be 1.

    It is that of `torch.nn.utils.clip_grad_norm_`. Other ranks have the rest of a leaf that is cut, so its squared norm
    is summed over the axes that cut it.
    """
    cut: dict[tuple[str, ...], list[Tensor]] = {}
    for param, grad in zip(params, grads, strict=True):
        if grad is not None:
            axes = tuple(sorted(layout_of(param).axes)) if current() is not None else ()
            cut.setdefault(axes, []).append(grad.to_dense() if grad.is_sparse else grad)
    if not cut:
        return None
    norms = []
    for axes, gradients in cut.items():
        norm = torch.nn.utils.get_total_norm(gradients)
        if axes:
            wide = norm.to(torch.promote_types(norm.dtype, torch.float32))  # in float16 its square may be infinite
            norm = transforms.psum(wide.square(), axes).sqrt().to(norm.dtype)
        norms.append(norm)
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
    return None if scale.is_cpu and scale.item() == 1.0 else scale
