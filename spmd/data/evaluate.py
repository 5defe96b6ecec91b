"""`evaluate`: totals over all batches of a loader, exact also where the last one is short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..kernels.arguments import check_function
from ..kernels.callsite import public
from ..kernels.errors import SpecError
from ..mesh import trees
from ..mesh.array import Array
from ..mesh.put import fetch, is_array, number_or_tensor
from .loader import Loader


@public
def evaluate(step: Callable[..., Any], loader: Loader, *args: Any) -> Any:
    """Add up what a step returns for every batch of an epoch.

    Let the step return sums and counts, not means: a mean of means is wrong where batches differ in size.

    >>> with Mesh({"data": 2}) as mesh:
    ...     @spmd(mesh=mesh)
    ...     @data_parallel
    ...     def totals(w, batch):
    ...         total, count = (w * batch).sum(), torch.tensor(len(batch))
    ...         return {"sum": psum(total, "data"), "count": psum(count, "data")}
    ...     evaluate(totals, Loader(torch.arange(5.0), batch_size=3, mesh=mesh), torch.tensor(2.0))
    {'sum': tensor(20., dtype=torch.float64), 'count': tensor(5)}

    Args:
        step: `step(*args, batch)`, an `@spmd` function that returns a tree of values that are the same on all ranks.
        loader: its first epoch is read, and afterwards it is set back to the beginning of that epoch.

    Returns:
        The tree of their sums, as tensors: of floats in float64, of integers and booleans in int64.

    Raises:
        SpecError: the loader has no batches, or the step returns what can't be added up. Whatever the step raises.
    """
    check_function("evaluate", step, "evaluate(step, loader, params)")
    if not isinstance(loader, Loader):
        remedy = "write evaluate(step, Loader(data, batch_size=...))"
        raise SpecError("evaluate takes a Loader", got=type(loader).__name__, remedy=remedy)
    beginning = {"epoch": 0, "step": 0}
    loader.load_state_dict(beginning)
    totals, last = None, None
    for batch in loader:
        # One call behind, so that the ranks compute while the last results are added here.
        last, before = step(*args, batch), last
        if last is None:
            problem = "the step that evaluate was given returns nothing"
            raise SpecError(problem, remedy="return sums and counts, such as psum(hits, 'data')")
        totals = _added(totals, before)
    totals = _added(totals, last)
    loader.load_state_dict(beginning)
    if totals is None:
        raise SpecError("evaluate got a loader without batches", got=repr(loader))
    return totals


def _added(totals: Any, result: Any) -> Any:
    if result is None:
        return totals
    for leaf in trees.leaves(result, is_leaf=is_array):
        if isinstance(leaf, Array) and leaf.mesh.layout.batch_axis in leaf.spec.axes:
            raise SpecError(
                "evaluate can't add up what each rank has a part of",
                got=repr(leaf),
                remedy="return sums and counts, such as psum(hits, 'data'), not a value for each sample",
            )
    found = trees.map(_wide, fetch(result))
    return found if totals is None else trees.map(_sum, totals, found)


def _sum(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if total.shape != value.shape:  # rows of batches that differ in size, perhaps, which would be added by broadcasting
        raise SpecError(
            "evaluate can't add up what a step gives in another shape for each batch",
            got=f"{list(total.shape)}, then {list(value.shape)}",
            remedy="return sums and counts, not a value for each sample",
        )
    return total + value


def _wide(leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor | np.ndarray | np.generic | int | float | complex):
        remedy = "return sums and counts, tensors or numbers"
        raise SpecError("evaluate can't add up what is no number", got=type(leaf).__name__, remedy=remedy)
    tensor = number_or_tensor(leaf)
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)
