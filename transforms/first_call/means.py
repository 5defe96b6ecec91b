"""Means over one rank's samples that are summed over ranks, which a step may have unequal numbers of samples on.

`psum(loss.mean(), "data") / axis_size("data")`, as one writes it for JAX, is the mean over the batch as long as ranks
have equal numbers of samples, and silently another value for the last, short batch. `pmean` weighs ranks by their
samples. Invariant: sums over samples pass, and so do means that were multiplied, by the number of samples perhaps.
"""

from __future__ import annotations

from typing import Any

from ...kernels.callsite import warn
from ...mesh import trees
from ...mesh.region import current
from ...mesh.replication.net import active
from ...mesh.replication.statistics import average
from .._plan import current_plan


def warn_of_means(x: Any, axes: tuple[str, ...]) -> None:
    """Warn if a leaf that is summed is a mean over this rank's part of a split batch."""
    net, region = active(), current()
    if net is None or region is None or region.session.rank != 0:
        return
    sizes = region.session.layout.axes
    split = [name for name in axes if name in current_plan().samples and sizes[name] > 1]
    found = [average(net, leaf) for leaf in trees.leaves(x)] if split else []
    if any(found):
        warn(
            f"psum sums means over the samples of each rank along {split[0]!r}, in which ranks count alike, though "
            "they have unequal numbers of samples of a batch that does not divide by them",
            got=next(filter(None, found)),
            remedy=f"write pmean(x, {split[0]!r}), which weighs ranks by their samples, and do not divide by "
            "axis_size; or psum the sum and the count; or, if the sum of means is meant, "
            'warnings.filterwarnings("ignore", ".*means over the samples of each rank")',
        )
