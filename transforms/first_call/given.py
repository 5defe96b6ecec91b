"""Arguments that make a mean over samples wrong: statistics of one rank's samples, some of these, and single ones.

A function may be a mean over samples and still be given advantages that the step normalised over this rank's samples,
or the share of a class among them: values that are not those of the whole batch. And an inner gradient for one sample
at a time (a task of MAML) becomes a mean over ranks, which have different samples. Invariant: a value that was reduced
over the ranks does not count as a statistic of one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import torch_private
from ...kernels.callsite import warn
from ...mesh.replication.net import active
from .._call import Call, Output
from .repeated import given_to


def warn_of_statistics(call: Call, out: Output, axis: str) -> bool:
    """Warn if a function is given, or holds, a statistic of this rank's samples; returns whether it warned.

    Args:
        axis: the axis along which the batch is split.
    """
    net = active()
    if net is None or call.region is None or call.region.session.rank != 0:
        return False
    for leaf in given_to(call):
        if isinstance(leaf, float):
            statistic, dims = net.numbers.get(leaf, ""), 0
        elif isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.dtype is torch.bool):
            statistic, dims = net.of(leaf).statistic, leaf.dim()
        else:
            continue
        if not statistic or not (dims or out.count is None):  # the count of a mean_of is each rank's own
            continue
        got = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"the number {leaf:.6g}"
        warn(
            f"{call.name} is not a mean over samples of the whole batch: it is given what the step computed of "
            "this rank's samples together",
            got=f"{got}, which comes of {statistic}",
            remedy=f"compute it of the whole batch: pmean(x.mean(), {axis!r}), or x = all_gather(x, {axis!r}, "
            "tiled=True) before (docs/losses.md); or, if each rank's own is meant, "
            'warnings.filterwarnings("ignore", ".*is not a mean over samples")',
        )
        return True
    return False


def warn_of_chosen(call: Call, out: Output) -> bool:
    """Warn of a mean over samples that the step chose by their values; returns whether it warned.

    Ranks have other numbers of these, and are weighted by how many samples they had before.
    """
    net = active()
    if net is None or call.region is None or call.region.session.rank != 0 or out.count is not None:
        return False
    chosen = net.of(out.value).chosen
    for leaf in given_to(call) if chosen else ():
        if isinstance(leaf, Tensor) and net.of(leaf).chosen == chosen:
            warn(
                f"{call.name} is not a mean over samples of the whole batch: it is one over those that the step "
                "chose by their values, and each rank is weighted by how many samples it had before",
                got=f"a tensor of shape {list(leaf.shape)} for {net.samples} samples, which comes of {chosen}",
                remedy="return mean_of(total, count), mean_of(losses.sum(), len(losses)) for instance "
                '(docs/losses.md); or warnings.filterwarnings("ignore", ".*is not a mean over samples")',
            )
            return True
    return False


def warn_of_single_samples(call: Call) -> None:
    """Warn of an inner gradient for a single row of the batch, which is another sample on each rank."""
    if call.region is None or call.region.session.rank != 0:
        return
    rows = {(torch_private.storage(leaf), leaf.shape[1:]) for leaf in call.plan.batch if leaf.shape[0] > 1}
    for leaf in given_to(call):
        storage = torch_private.storage(leaf) if isinstance(leaf, Tensor) else None
        if not storage or (storage, leaf.shape) not in rows:
            continue
        warn(
            f"{call.name} is differentiated within another gradient for a single sample, and the mean is taken "
            "over the ranks, which have different ones",
            got=f"a row of the batch, of shape {list(leaf.shape)}",
            remedy="torch.func.grad(f), or grad(f, axes=()), is the gradient for this rank's sample alone",
        )
        return
