"""Finds sums over samples, and aux with rows or counts of samples, by evaluating a function with every sample twice.

The autograd graph, shapes and whole numbers raise a suspicion; evaluating again proves it. Invariant: a result that
does not change when every sample comes twice, such as a mean, passes. `parts` evaluates on parts of the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...kernels import torch_private
from ...kernels.callsite import warn
from ...kernels.errors import SpecError
from ...kernels.torch_private import Node, saved, sums_up
from ...mesh import trees
from ...mesh.put import as_tensor, number_or_tensor
from ...mesh.replication.net import active, differs_over
from .._arguments import Argument
from .._auxiliary import Auxiliary
from .._call import Call, Output
from .parts import FEWEST, look_at_parts
from .repeated import Repeated
from .slopes import look_at_slopes


def look_at_samples(
    call: Call, out: Output, aux: Auxiliary, batch: Sequence[Tensor], split: set[str], *, is_judged: bool
) -> bool:
    """The checks of `look` that depend on the samples; returns whether it warned that this is not a mean over them.

    Args:
        is_judged: whether to find that out.
    """
    rows = batch[0].shape[0]
    with_rows = [] if call.plan.virtual is not None else [a for a in call.arguments if _has_rows(a, rows)]
    own = [argument.leaf for argument in with_rows if not split & set(argument.reduce)]
    alike = [a.leaf for a in with_rows if split & set(a.reduce) and differs_over(a.leaf) is None]
    again = Repeated(call, [*batch, *own], split)
    may_be_sum = bool(call.plan.samples) and out.count is None and _may_be_sum(out.value.grad_fn, rows)
    has_rows = not call.nested and may_have_rows(aux, rows, split)
    counts = [] if call.nested else _may_be_counts(aux, split)
    may_need_twice = may_be_sum or has_rows or bool(alike) or bool(counts)
    is_judged = is_judged and rows >= FEWEST and not alike
    once = again.times(1) if may_need_twice or is_judged else None
    twice = again.times(2) if may_need_twice and once is not None else None
    if alike and once is not None and twice is None and again.times(2, alike) is not None:
        raise _made_alike(call, alike[0], rows, split)
    if may_be_sum and once is not None and twice is not None and _moves(once, twice):
        _check_sum(call, once, twice, again.times(3), by_samples=bool(own))
    if has_rows and twice is not None:
        _check_rows(call, out, aux, twice, split)
    are_counts = bool(counts) and twice is not None and _warn_of_counts(call, out, aux, twice, counts, split)
    if is_judged and once is not None:
        net = active()
        is_counted = net is not None and out.count is not None and bool(net.of(out.count).statistic)
        averaged = {} if are_counts else _averaged(out, aux, split)
        if look_at_parts(call, again, once, rows, min(split), averaged, is_counted=is_counted):
            return True
        return look_at_slopes(call, again, rows)
    return False


def _has_rows(argument: Argument, rows: int) -> bool:
    return argument.primal is not None and argument.leaf.dim() > 0 and argument.leaf.shape[0] == rows


def _made_alike(call: Call, leaf: Tensor, rows: int, split: set[str]) -> SpecError:
    return SpecError(
        f"{call.name} is differentiated by a tensor with a row for each sample that was made in the step and has "
        "the same values on all ranks, so that the gradients of their samples would be summed",
        got=f"shape {list(leaf.shape)}, for {rows} samples on this rank",
        where=call.where,
        remedy=f'say that each rank has rows of its own: grad(f)(Sharded(tensor, P("{min(split)}"))).local',
    )


def nodes(end: Node | None) -> Iterator[Node]:
    """The nodes of an autograd graph, each once."""
    left, seen = [end], {end}
    while left:
        node = left.pop()
        if node is None:
            continue
        yield node
        for below, _ in node.next_functions:
            if below not in seen:
                seen.add(below)
                left.append(below)


def _may_be_sum(end: Node | None, rows: int) -> bool:
    """Whether anything on the way to a value sums a tensor that may have a row for each sample."""
    for node in nodes(end):
        name = type(node).__name__
        if name in ("SumBackward0", "SumBackward1"):
            if any(size and size % rows == 0 for size in saved(node, "self_sym_sizes")):
                return True
        elif name in _ADD_UP or (("Loss" in name or "CrossEntropy" in name) and sums_up(node)):
            return True
    return False


_ADD_UP = {"DotBackward0", "LinalgVectorNormBackward0", "NormBackward0", "NormBackward1"}


def may_have_rows(aux: Auxiliary, rows: int, split: set[str]) -> bool:
    """Whether a leaf of aux may have an entry for each of `rows` samples, judged by its shape."""
    if rows > 1 and aux.leaves and len(aux.leaves) % rows == 0:
        return True
    return any(
        isinstance(leaf, Tensor)
        and (axes is None or split & set(axes))
        and any(size == rows or (rows > 1 and size and size % rows == 0) for size in leaf.shape)
        for leaf, axes in zip(aux.leaves, aux.over, strict=True)
    )


def _may_be_counts(aux: Auxiliary, split: set[str]) -> list[int]:
    """The indexes of averaged leaves of aux that hold whole numbers only."""
    return [
        index
        for index, (leaf, axes) in enumerate(zip(aux.leaves, aux.over, strict=True))
        if isinstance(leaf, Tensor)
        and leaf.is_floating_point()
        and split & set(axes or ())
        and not torch_private.is_fake(leaf)
        and bool(leaf.any())
        and torch.equal(leaf, leaf.round())
    ]


def _averaged(out: Output, aux: Auxiliary, split: set[str]) -> dict[int, str]:
    """The leaves of aux that are averaged, by index, with what messages call them."""
    paths = trees.paths(out.aux)
    return {
        index: f"aux{paths[index]}"
        for index, (leaf, axes) in enumerate(zip(aux.leaves, aux.over, strict=True))
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and split & set(axes or ())
    }


def _moves(once: Output, twice: Output) -> bool:
    """Whether a value changes, by more than rounding, when every sample comes twice."""
    value = float(once.value)
    return abs(float(twice.value) - value) > 1e-3 * abs(value)


def _check_sum(call: Call, once: Output, twice: Output, thrice: Output | None, by_samples: bool) -> None:
    """Refuse a sum over samples: it grows by as much from once to twice as from twice to thrice."""
    if thrice is None:
        return
    first, second, third = float(once.value), float(twice.value), float(thrice.value)
    if abs((third - second) - (second - first)) <= 1e-3 * abs(second - first):
        raise SpecError(
            f"{call.name} returns a sum over its samples, and the mean over {call.runs_on}s of sums is not that of the "
            "whole batch",
            got=f"{first:.6g}, and {second:.6g} for every sample twice",
            where=call.where,
            remedy="return the mean over samples, or mean_of(total, count)"
            + ("; for the gradient of each sample by itself take grad(f, axes=())" if by_samples else ""),
        )


def _check_rows(call: Call, out: Output, aux: Auxiliary, twice: Output, split: set[str]) -> None:
    """Refuse leaves of aux that get longer when every sample comes twice, unless they are `Sharded`."""
    again, paths = [as_tensor(leaf) for leaf in trees.leaves(twice.aux)], trees.paths(out.aux)
    remedy = f'return Sharded(value, P("{min(split)}")), whose rows stay those of the samples, or reduce it, '
    if len(again) != len(aux.leaves):
        raise SpecError(
            f"aux of {call.name} has a leaf for each sample, and would be averaged over different samples",
            got=f"{len(aux.leaves)} leaves, and {len(again)} for every sample twice",
            where=call.where,
            remedy=f"{remedy}value.mean() for instance",
        )
    for leaf, more, axes, path in zip(aux.leaves, again, aux.over, paths, strict=True):
        both = isinstance(leaf, Tensor) and isinstance(more, Tensor) and leaf.shape != more.shape
        if both and (axes is None or split & set(axes)):
            raise SpecError(
                f"aux{path} of {call.name} has a row for each sample, and would be averaged over different samples",
                got=f"shape {list(leaf.shape)}, and {list(more.shape)} for every sample twice",
                where=call.where,
                remedy=f"{remedy}value.mean(0) for instance",
            )


def _warn_of_counts(
    call: Call, out: Output, aux: Auxiliary, twice: Output, counts: Sequence[int], split: set[str]
) -> bool:
    """Warn of a leaf of aux that doubles when every sample comes twice; returns whether it warned."""
    again = trees.leaves(twice.aux)
    for index in counts:
        leaf, more = aux.leaves[index], number_or_tensor(again[index])
        if more.shape == leaf.shape and torch.equal(more.to(leaf.dtype), 2 * leaf):
            path = trees.paths(out.aux)[index]
            summed = "" if call.in_shards else f'psum(value, "{min(split)}"), or '
            warn(
                f"aux{path} of {call.name} is a number of samples, and averaged over {call.runs_on}s as floats in aux "
                "are: not that of the whole batch",
                remedy=f"{summed}return its mean, value / len(batch)",
            )
            return True
    return False
