"""What is no mean over samples: a function whose value for all is not the mean of its values for two parts of them.

A step differentiates the mean over ranks of what each computes of its part of the batch. Of a mean over samples that is
the value for the whole batch; of a deviation, a median, a mean with weights or a contrast between samples it is not.
Two parts of one rank's samples tell as much. Invariant: a mean over samples passes, whatever is added to it, and so
does what can't be judged: what depends on the order of samples (a random permutation within the function, for one), on
batch norm, or on a number of samples that it was given, and what fails for other numbers of samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels.callsite import warn
from ...kernels.errors import message
from ...mesh import trees
from .._call import Call, Output
from .repeated import Repeated

FEWEST = 4  # samples that make two parts of which neither is a single one
_TOLERANCE = 1e-4
_COARSE_TOLERANCE = 5e-3
_SMALLEST = 1e-6  # what is smaller is zero but for rounding
_ORDERS = 3  # of few samples, one may do what another does by chance


def look_at_parts(
    call: Call, again: Repeated, once: Output, count: int, axis: str, aux: Mapping[int, str], *, is_counted: bool
) -> None:
    """Warn of a function that is no mean over its samples, or has such aux.

    Args:
        once: what it returned for all of them, of which there are so many.
        axis: along which the batch is split.
        aux: those leaves of aux that are averaged, by number, and what each is called.
        is_counted: whether the count of a mean_of comes of all samples, be it that the step has counted them before.
    """
    here = max(2, 2 * count // 5)  # parts of unequal size have equal weights less often by chance
    samples, whole = torch.arange(count), _numbers(once, aux)
    for order in samples, torch.cat([samples[::2], samples[1::2]]):
        first, second = again.of(order[:here]), again.of(order[here:])
        if first is None or second is None or again.seen.normalises or again.knows_count:
            return
        parts = _numbers(first, aux), _numbers(second, aux)
        for name, value in whole.items():
            one, other = parts[0][name], parts[1][name]
            if not one.shape == other.shape == value.shape or not value.numel():
                continue
            if name == "count" and is_counted and bool(one == other) and bool(one == value):
                continue
            joined = one + other if name in _SUMS else here / count * one + (1 - here / count) * other
            away, size = float((joined - value).abs().max()), float((value.abs() + one.abs() + other.abs()).max())
            if away > (_COARSE_TOLERANCE if again.seen.is_coarse else _TOLERANCE) * size + _SMALLEST:  # NaN is not
                if not _depends_on_order(again, aux, name, value, away * (0.1 if again.seen.is_coarse else 0.01)):
                    at = int((joined - value).abs().argmax())
                    numbers = float(value.flatten()[at]), float(joined.flatten()[at])
                    got = f"{numbers[0]:.6g} for {count} samples, and {numbers[1]:.6g} as the "
                    got += f"{'sum' if name in _SUMS else 'mean'} of those for {here} and {count - here} of them"
                    _warn(call, name, got, axis)
                return


def _depends_on_order(again: Repeated, aux: Mapping[int, str], name: str, whole: Tensor, allowed: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    for _ in range(_ORDERS):
        mixed = again.of(torch.randperm(again.count, generator=generator))
        if mixed is None or not float((_numbers(mixed, aux)[name] - whole).abs().max()) <= allowed:
            return True
    return False


_SUMS = ("total", "count")


def _numbers(out: Output, aux: Mapping[int, str]) -> dict[str, Tensor]:
    """What is averaged, or what is added up, by name."""
    found = {"value": out.value} if out.count is None else {"total": out.value, "count": out.count}
    leaves = trees.leaves(out.aux)
    found |= {path: torch.as_tensor(leaves[index]) for index, path in aux.items()}
    return {name: value.detach().double() for name, value in found.items()}


def _warn(call: Call, name: str, got: str, axis: str) -> None:
    if call.region is None or call.region.session.rank != 0:  # whose numbers would make another warning of it
        return
    ignore = 'warnings.filterwarnings("ignore", ".*is not a mean over samples")'
    if name not in ("value", *_SUMS):
        warn(
            message(
                f"{name} of {call.name} is not a mean over samples, and comes back as the mean of those of the ranks, "
                "which is not what it is of the whole batch",
                got=got,
                remedy="return the means that it is computed of, and compute it of these after the step; psum a sum; "
                f"or gather its samples, all_gather(x, {axis!r}, tiled=True) (docs/losses.md); or {ignore}",
            )
        )
        return
    of_pair = f"for the {name} of its mean_of is not a sum over them, " if name in _SUMS else ""
    warn(
        message(
            f"{call.name} is not a mean over samples, {of_pair}and a step on several ranks, which takes the mean of "
            "theirs, is not what it is on one device with the whole batch",
            got=got,
            remedy="return mean_of(total, count), both summed over samples, for a mean with weights; compute what is "
            f"of the whole batch with psum, pmean or all_gather over {axis!r} (docs/losses.md); or, if each rank's own "
            f"is meant, {ignore}",
        )
    )
