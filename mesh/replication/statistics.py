"""Which operations compute a statistic of all samples together, as a mean does, or choose some of them by their values.

If a step computes one from its rank's samples, and passes it to the function that it differentiates, it is not the
statistic of the whole batch. Invariant: a result with a row for each sample, computed from that sample alone, is none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.torch_private import arguments, has_tag, operation_name, version

_REDUCTIONS = {"mean", "sum", "prod", "std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm", "logsumexp"}
_REDUCTIONS |= {"max", "min", "amax", "amin", "aminmax", "median", "nanmedian", "mode", "topk", "kthvalue", "dot"}
_REDUCTIONS |= {"bincount", "histc", "nansum", "argmax", "argmin", "any", "all", "count_nonzero"}
_ALONG = {"sort", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}  # along one dimension, which they keep
_ALONG |= {"_softmax", "_log_softmax"}
_PAIRS = {"mm", "bmm", "_cdist_forward", "_euclidean_dist"}  # the rows of one with those, or the columns, of another
_SCATTERED = {"index_add", "scatter_add", "scatter_reduce", "index_reduce"}  # rows, to where others may be
_FACTORED = {"_linalg_svd", "linalg_qr", "linalg_lstsq"}  # a matrix
_LOSSES = {"mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "nll_loss_forward", "nll_loss2d_forward"}
_LOSSES |= {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
_KEEP_MEANS = {"add", "sub", "neg", "clone", "_to_copy", "detach", "alias", "view", "div"}
_MASKS = (torch.bool, torch.uint8)


def joins_samples(
    func: Any, args: tuple, kwargs: dict, samples: int, index: int, result: Tensor, *, all_differ: bool
) -> bool:
    """Whether result `index` of an operation is computed from all `samples` samples, the rows of its input, together.

    Sorted values and cumulative sums count (as in quantiles and returns), and so does what is computed of all pairs
    of samples; the indices of a sort, and where samples begin in a packed tensor, do not. Nested tensors, which have no
    shape, never count.

    Args:
        all_differ: whether all inputs differ between ranks, so that none of them is a weight.
    """
    name = operation_name(func)
    given = args[0] if args else None
    if not isinstance(given, Tensor) or not given.dim() or given.is_nested:
        return False
    if name in _PAIRS and all_differ and result.shape[-2:] == (samples, samples) and result.shape[:-2].numel() == 1:
        return given.shape[-2] == samples
    if name == "mm":
        return all_differ and given.shape[1] == samples and result.shape[0] != samples
    if name.removesuffix("_") in _SCATTERED:  # more rows than places
        return args[1] % given.dim() == 0 and args[3].shape[:1] == (samples,) and given.shape[0] < samples
    if given.shape[0] != samples:
        return False
    if name in _ALONG:
        names = [argument.name for argument in arguments(func)]
        at = names.index("dim")
        dim = args[at] if at < len(args) else kwargs.get("dim", -1)
        return index == 0 and dim % given.dim() == 0 and result.is_floating_point()
    if name in _FACTORED:
        return given.dim() == 2
    return name in _REDUCTIONS and (not result.dim() or result.shape[0] != samples)


def chooses(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether the values of its inputs say how many rows an operation's result has: `x[x > 0]`, `nonzero`, `unique`."""
    if not has_tag(func, torch.Tag.dynamic_output_shape):
        return False
    if operation_name(func) != "index":
        return True
    first = args[1][0]  # the index of the samples' dimension, which may be of booleans or of numbers
    return isinstance(first, Tensor) and first.dtype in _MASKS


def sample_of(func: Any, args: tuple, kwargs: dict, samples: int, index: int) -> int | None:
    """Which of the samples, the rows of its input, result `index` of an operation is: `x[2]`, `for row in x`.

    It is -1 if the second dimension is as long: then that may be the one of the samples, as where the time comes first.
    """
    name = operation_name(func)
    if name not in ("select", "unbind") or args[0].is_nested:
        return None
    if args[0].shape[0] != samples or (*args, 0)[1] % args[0].dim():
        return None
    if samples in args[0].shape[1:2]:
        return -1
    return index if name == "unbind" else args[2] % samples


def note_average(net: Any, func: Any, args: tuple, kwargs: dict, line: str, result: Any) -> None:
    """Note on an operation's result that it is a mean over this rank's samples, plus or divided by anything.

    What is multiplied may be a sum, by the number of samples, and isn't noted.
    """
    given, name = args[0] if args else None, operation_name(func)
    if not isinstance(given, Tensor) or given.is_nested or not isinstance(result, Tensor) or result.is_nested:
        return
    if name in _KEEP_MEANS:
        which = args[:1] if name == "div" else args[:2]
        text = next(filter(None, (average(net, each) for each in which)), "")
    else:
        if name != "mean" and name not in _LOSSES:
            return
        options = {argument.name: at for at, argument in enumerate(arguments(func))}
        at = options.get("reduction", len(args))
        reduction = args[at] if at < len(args) else kwargs.get("reduction", 1)
        whole = given.dim() and (not result.dim() or result.shape[0] != net.samples)
        over = whole and (
            (name == "mean" and given.shape[0] == net.samples)
            or (name in _LOSSES and reduction == 1 and given.shape[0] % net.samples == 0)
        )
        text = f"{name} at {line}" if over else ""
    if text:
        noted: Any = result
        noted._spmd_average = (net, version(result), text)


def average(net: Any, x: Any) -> str:
    """The operation that made a tensor a mean over this rank's samples: `mean at train.py:12`; empty if none did."""
    own = getattr(x, "_spmd_average", None)
    return own[2] if own is not None and own[0] is net and own[1] == version(x) else ""
