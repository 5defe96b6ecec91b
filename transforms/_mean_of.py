"""`mean_of`: a loss as a total and its divisor, so that its mean over the mesh is exact whatever the weights."""

from __future__ import annotations

import dataclasses
import numbers
from typing import NoReturn

import torch
from torch import Tensor

from ..kernels.callsite import public, warn
from ..kernels.errors import SpecError
from ..kernels.torch_private import Node, is_fake, saved


@dataclasses.dataclass(frozen=True, slots=True)
class MeanOf:
    """What `mean_of` returns: this rank's total, and its count, which is not differentiated."""

    total: Tensor
    count: Tensor

    @public
    def _computed_with(self, *_: object) -> NoReturn:
        raise SpecError(
            "a mean_of is a pair of numbers, and can't be computed with before both are summed over the mesh",
            remedy="put what is added into the total: mean_of(losses.sum() + 0.01 * penalty * count, count); the mean "
            "itself is the value that value_and_grad returns",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _computed_with
    __pow__ = __rpow__ = __abs__ = __float__ = exp = log = sqrt = detach = item = backward = _computed_with


@public
def mean_of(total: Tensor, count: Tensor | float) -> MeanOf:
    """A loss for `grad` and `value_and_grad` that is a total divided by a count, both summed over the mesh first.

    A mean over samples doesn't need this, since ranks are weighted by their samples. Any other mean does: over tokens
    that are not padding, with class weights, over pairs. Such a mean that is returned without `mean_of` gives a warning
    on the first call, and so does a total or a count that is not a sum over samples.

    >>> def loss_fn(w, batch):
    ...     losses = (w * batch["x"] - batch["y"]).square() * batch["mask"]
    ...     return mean_of(losses.sum(), batch["mask"].sum())
    >>> batch = {"x": torch.tensor([1.0, 2.0]), "y": torch.zeros(2), "mask": torch.tensor([1.0, 0.0])}
    >>> from spmd import value_and_grad
    >>> value_and_grad(loss_fn)(torch.tensor(3.0), batch)
    (tensor(9.), tensor(6.))

    Args:
        total: floating-point tensor with one element, such as a loss with reduction="sum".
        count: number, or tensor with one element, of this rank's samples; not differentiated. It may be 0 on some
            ranks: don't clamp it, or these ranks would count. If it is 0 on all ranks, the value is NaN, like torch's
            own mean of nothing, and the gradients are what a backward pass makes of that (zeros or NaN).

    Returns:
        A pair to return from the function that is differentiated. Its value then is sum(total) / sum(count) over the
        mesh; on one device, the total divided by the count.

    Raises:
        SpecError: one of them is something else.
    """
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.dtype.is_floating_point:
        raise SpecError(
            'mean_of got an unexpected value for argument "total"',
            expected="a floating-point tensor with one element",
            got=f"{total.dtype}{list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__,
            remedy='sum it: cross_entropy(..., reduction="sum"), or losses.sum()',
        )
    if isinstance(count, Tensor) and count.numel() == 1 and not count.dtype.is_complex:
        counted = count.detach().reshape(()).to("cpu" if total.is_cpu else count.device, torch.float64)
    elif isinstance(count, numbers.Real):
        counted = torch.tensor(float(count), dtype=torch.float64, device="cpu")
    else:
        raise SpecError(
            'mean_of got an unexpected value for argument "count"',
            expected="a number, or a real tensor with one element",
            got=f"{count.dtype}{list(count.shape)}" if isinstance(count, Tensor) else type(count).__name__,
            remedy="sum it: mask.sum(), or weights[labels].sum()",
        )
    return MeanOf(total.reshape(()), counted)


_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")


def warn_of_weights(name: str, node: Node, rows: int) -> bool:
    """Warn if a node is a cross entropy's mean over targets that do not all count the same; returns whether it is.

    Args:
        rows: the number of samples; 0 if it is not known.
    """
    if type(node).__name__ not in _CROSS_ENTROPIES or saved(node, "reduction") != 1:
        return False
    weights, targets = saved(node, "weight"), saved(node, "target")
    if is_fake(targets):
        return False
    if weights is None:
        index = int(saved(node, "ignore_index"))
        ignored = targets == (index - (1 << 64) if index >> 63 else index)  # torch gives it without a sign
        got = "ignored targets" if bool(ignored.any()) and not _is_shift(ignored, rows) else ""
    else:
        got = "class weights" if bool((weights != weights[0]).any()) else ""
    if got:
        warn(
            f"{name} takes a mean over targets that do not all count the same, of each rank's samples or each "
            "virtual shard's, which is not that of the whole batch",
            got=got,
            remedy="return mean_of(F.cross_entropy(..., reduction='sum'), count), where count is the number of "
            "targets that are not ignored, or the sum of their weights (docs/losses.md)",
        )
    return bool(got)


def _is_shift(ignored: Tensor, rows: int) -> bool:
    """Whether each sample leaves out one position, the same in all, as the last token has none that comes next.

    More positions may be padding, of which other ranks' samples have more or fewer.
    """
    if not rows or int(ignored.sum()) != rows or ignored.numel() % rows:
        return False
    return bool(ignored.reshape(rows, -1).all(0).any())
