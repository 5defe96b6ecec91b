"""Which operations compute a statistic of all samples together, as a mean does, or choose some of them by their values.

If a step computes one from its rank's samples, and passes it to the function that it differentiates, it is not the
statistic of the whole batch. Invariant: a result with a row for each sample, computed from that sample alone, is none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.torch_private import version
from .net import Varying, joined
from .operators import Operation

_REDUCTIONS = {"mean", "sum", "prod", "std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm", "logsumexp"}
_REDUCTIONS |= {"max", "min", "amax", "amin", "aminmax", "median", "nanmedian", "mode", "topk", "kthvalue"}
_REDUCTIONS |= {"bincount", "histc", "nansum", "argmax", "argmin", "any", "all", "count_nonzero", "_pdist_forward"}
_REDUCTIONS |= {"histogram", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts"}
_ALONG = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}  # one dimension, which they keep
_ALONG |= {"_softmax", "_log_softmax"}
_MOVING = {"flip", "roll", "_fft_r2c", "_fft_c2c", "_fft_c2r"}  # along several
_PAIRS = {"mm", "bmm", "addmm", "baddbmm"}  # the rows of one with those, or the columns, of another
_PAIRS |= {"_cdist_forward", "_euclidean_dist"}
_PRODUCTS = {"mm", "bmm", "mv", "addmm", "addmv", "baddbmm"}
_SCATTERED = {"index_add", "scatter_add", "scatter_reduce", "index_reduce"}  # rows, to where others may be
_FACTORED = {"_linalg_svd", "linalg_qr", "linalg_lstsq", "linalg_lu", "linalg_pinv"}  # a matrix
_UNIQUE = {"_unique2", "unique_dim", "unique_consecutive"}
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm"}
_PICKING = {"select", "unbind", "index", "gather", "take"}  # one of several numbers, as it is
_LOSSES = {"mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "nll_loss_forward", "nll_loss2d_forward"}
_LOSSES |= {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
_KEEP_MEANS = {"add", "sub", "neg", "clone", "_to_copy", "detach", "alias", "view", "div"}
_SELECTING = {"select", "unbind", "slice", "split", "split_with_sizes"}  # some rows, as views
_MASKS = (torch.bool, torch.uint8)
_Rows = int | tuple[int, int] | None
_ORDER = "the order by "


def joins_samples(
    operation: Operation, samples: int, index: int, result: Tensor, *, all_differ: bool, of_batch: bool
) -> bool:
    """Whether result `index` of an operation is computed from all `samples` samples, the rows of its input, together.

    Sorted values and cumulative sums count (as in quantiles and returns), and so does what is computed of all pairs
    of samples, or pairs them by their places; where samples begin in a packed tensor does not. Nested tensors, which
    have no shape, never count.

    Args:
        all_differ: whether all inputs differ because the batch does, so that none is a weight, or random numbers.
        of_batch: whether any does.
    """
    name, args = operation.name, operation.args
    tensors = [value for value in args if isinstance(value, Tensor)][operation.operator.adds :]
    given = tensors[0] if tensors else None
    if given is None or any(x.is_nested for x in (*tensors, result)) or not max(x.dim() for x in tensors):
        return False
    if of_batch and not index and not result.dim() and name not in _PICKING and max(x.numel() for x in tensors) > 1:
        return True  # another result is a count, as of a loss that its gradient is divided by
    if all_differ and _pairs(name, tensors, samples, result):
        return True
    if not given.dim():
        return False
    if name.removesuffix("_") in _SCATTERED:  # more rows than places
        return args[1] % given.dim() == 0 and args[3].shape[:1] == (samples,) and given.shape[0] < samples
    if name.removesuffix("_") == "index_put" and (*args, False)[3]:
        places = args[1][0]
        return isinstance(places, Tensor) and places.shape[:1] == (samples,) and given.shape[0] < samples
    if name in _BATCH_NORMS:
        return is_batch(given, samples) and bool(args[5])  # training
    dim = _dim_of_samples(given, samples)
    if dim is None:
        return False
    if name == "sort" or name in _ALONG:
        counts = result.is_floating_point() if index == 0 else name == "sort"
        return counts and dim in _dims(operation, given)
    if name in _MOVING:
        return dim in _dims(operation, given)
    if name in _FACTORED:
        return given.dim() == 2
    if name in _UNIQUE:
        return index == 2  # how many there are of each
    return name in _REDUCTIONS and (samples not in result.shape[: dim + 1])


def is_batch(x: Tensor, samples: int) -> bool:
    """Whether a tensor has a row for each sample."""
    return not x.is_nested and x.shape[:1] == (samples,)


def _dim_of_samples(x: Tensor, samples: int) -> int | None:
    """Which dimension is that of the samples: the first; or the outermost in memory, as in a transposed tensor.

    It is not known if the first two are as long: the first may be the time.
    """
    found = [dim for dim in range(x.dim()) if x.shape[dim] == samples]
    if found[:2] == [0, 1]:
        return None
    if not found or x.layout is not torch.strided:
        return found[0] if found[:1] == [0] else None
    outermost = max(found if found[0] == 0 else range(x.dim()), key=lambda dim: (x.shape[dim] > 1, x.stride(dim)))
    return outermost if outermost in found else None


def _dims(operation: Operation, given: Tensor) -> list[int]:
    """Along which dimensions of its input an operation works."""
    dims = next(value for name, value in operation.given().items() if name in ("dim", "dims"))
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return [dim % given.dim() for dim in dims or range(given.dim())]


def _pairs(name: str, tensors: list[Tensor], samples: int, result: Tensor) -> bool:
    """Whether a result is computed of all pairs of samples, or is a sum over them, as a product of matrices is."""
    given, both = tensors[0], (samples, samples)
    sums = name in _PRODUCTS and given.shape[-1] == samples and samples not in result.shape
    pairs = name in _PAIRS and given.shape[-2] == samples and result.shape[-2:] == both
    if (sums or pairs) and result.shape[:-2].numel() == 1:
        return True
    if name == "addr":
        return result.shape == both
    begins = {(1,) * (result.dim() - tensor.dim()) + tensor.shape for tensor in tensors}  # as they are broadcast
    return result.shape[:2] == both and {(samples, 1), (1, samples)} <= {shape[:2] for shape in begins}


def note_statistic(varying: Varying, name: str, index: int) -> Varying:
    """Note on a result that it joins samples; the indices of a sort, which may only reorder them, as their order."""
    here = f"{name} at {varying.line}"
    if name in _MOVING and varying.statistic:
        return varying
    return varying._replace(statistic=_ORDER + here if name == "sort" and index == 1 else here)


def without_order(varying: Varying, index: Tensor, samples: int) -> Varying:
    """How an index varies, for what it is applied to: in another order, all samples are still those of the rank.

    So they are in parts of an order (`for at in lengths.argsort().split(8)`), but not in its beginning.
    """
    if varying.statistic.startswith(_ORDER) and is_batch(index, samples):
        return varying._replace(statistic="")
    return varying


def chooses(operation: Operation) -> bool:
    """Whether the values of its inputs say how many rows an operation's result has: `x[x > 0]`, `nonzero`, `unique`."""
    if not operation.operator.sized_by_values or operation.name != "index":
        return operation.operator.sized_by_values
    first = operation.args[1][0]  # the index of the samples' dimension, which may be of booleans or of numbers
    return isinstance(first, Tensor) and first.dtype in _MASKS


def rows_of(operation: Operation, samples: int, index: int, result: Tensor, row: _Rows) -> _Rows:
    """Which of the samples, the rows of its input, result `index` of an operation is: `x[2]`, `for row in x`, `x[:-1]`.

    It is -1 for one or some if the second dimension is as long: then that may be the one of the samples, as where the
    time comes first, and parts may be put in that order.

    Args:
        row: which of them its input is; None if all.
    """
    name, args = operation.name, operation.args
    if name not in _SELECTING or isinstance(row, int):
        return row
    if args[0].is_nested:
        return row if (*args, 0)[1] else -1
    given, (first, end) = args[0], row or (0, samples)
    at = 2 if name.startswith("split") else 1
    if given.shape[0] != end - first or (*args, 0, 0)[at] % given.dim():
        return row
    may_be_time = samples in given.shape[1:2]
    if name in ("select", "unbind"):
        start, count = index if name == "unbind" else args[2] % given.shape[0], 1
    else:
        start, count = _start(name, args, index, given.shape[0]), result.shape[0]
    if count == 1:
        return -1 if may_be_time else first + start
    every = name == "slice" and args[4:5] not in ((), (1,))  # second or third one
    if every or count in (0, end - first):
        return row
    return -1 if may_be_time else (first + start, first + start + count)


def _start(name: str, args: tuple, index: int, rows: int) -> int:
    """Where part `index` that a slice or a split takes of some rows begins."""
    if name == "slice":
        return slice(*(*args, None, None)[2:4]).indices(rows)[0]
    return index * args[1] if name == "split" else sum(args[1][:index])


def put_together(name: str, entries: list[tuple[Tensor, Varying]], samples: int) -> tuple[Varying, bool]:
    """How tensors vary that are put one after the other, and whether samples come to other places in the new one.

    They do in `cat([x[1:], x[:1]])`, but not if the parts were computed one by one.
    """
    at, moved, seen = 0, False, set[int]()
    for tensor, varying in entries:
        if varying.origins and isinstance(varying.row, tuple):
            rows = range(*varying.row)
            moved |= rows.start != at and tensor.shape[:1] == (len(rows),) and seen.isdisjoint(rows)
            seen.update(rows)
        at += len(tensor) if name == "cat" and tensor.dim() and not tensor.is_nested else 1
    whole = joined(varying for _, varying in entries)
    if at == samples or isinstance(whole.row, tuple):
        whole = whole._replace(row=None)
    return whole, moved and at == samples


def note_average(net: Any, operation: Operation, line: str, result: Any) -> None:
    """Note on an operation's result that it is a mean over this rank's samples, plus or divided by anything.

    What is multiplied may be a sum, by the number of samples, and isn't noted.
    """
    name, args = operation.name, operation.args
    given = args[0] if args else None
    if not isinstance(given, Tensor) or given.is_nested or not isinstance(result, Tensor) or result.is_nested:
        return
    if name in _KEEP_MEANS:
        which = args[:1] if name == "div" else args[:2]
        text = next(filter(None, (average(net, each) for each in which)), "")
    else:
        if name != "mean" and name not in _LOSSES:
            return
        reduction = operation.given().get("reduction")
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
