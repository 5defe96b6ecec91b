"""Finds functions that are not a mean over samples: the value for all samples is not the mean of those for two parts.

A step differentiates the mean over ranks of what each computes from its part of the batch. If the function is a mean
over samples, this is the value for the whole batch; if it is a deviation, a median, a mean with weights or a contrast
between samples, it is not. Two parts of one rank's samples show the difference. A function that pairs samples by their
places (each with the next one) is judged by two halves that are cut as the batch was. Invariant: a mean over samples
passes, whatever is added to it. So does a function that can't be judged: one that puts samples in a random order, that
depends on batch norm or on a given number of samples, or that fails for other numbers of samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels.callsite import warn
from ...mesh import trees
from ...mesh.put import number_or_tensor
from .._call import Call, Output
from .repeated import Repeated

FEWEST = 4  # samples from which two parts can be made with more than one sample each
_TOLERANCE = 1e-4
_COARSE_TOLERANCE = 5e-3
_SMALLEST = 1e-6  # a smaller difference is rounding
_FEW = 32
_ORDERS = 3  # how many orders are tried: for few samples, two may agree by chance
_SUMS = ("total", "count")  # of a mean_of


def look_at_parts(
    call: Call, again: Repeated, once: Output, count: int, axis: str, aux: Mapping[int, str], *, is_counted: bool
) -> bool:
    """Warn if a function, or an averaged leaf of its aux, is not a mean over its samples; returns whether it warned.

    Args:
        once: what the function returned for all samples.
        count: the number of samples.
        axis: the axis along which the batch is split.
        aux: the leaves of aux that are averaged, by index, with the name of each.
        is_counted: whether the count of a mean_of was computed from all samples, even if the step did so before.
    """
    judge = _Judge(call, again, axis, aux, is_counted)
    samples = torch.arange(count, device="cpu")
    here = max(2, 2 * count // 5)  # unequal parts are less likely to have equal weights by chance
    for first in _first_parts(count, here):
        others = torch.ones(count, dtype=torch.bool, device="cpu").index_fill(0, first, False)
        parts = judge.of(first, samples[others])
        if again.seen.normalises or again.knows_count:
            return False
        found = judge.compared(once, parts) if parts else None
        if found and not judge.goes_by_places(found):
            judge.warn(found)
            return True
        if found or not parts:
            break
    else:
        return False
    if again.seen.may_order(count):
        return False
    half = count // 2
    even = samples[: 2 * half]  # it may fail for an odd number, as where each sample is paired with the next
    # All samples get the same random numbers, since the function may have reordered samples before it drew any.
    whole, same = judge.of(even, alike=True), judge.of(even, alike=True)
    halves = (even[::2], even[1::2]) if judge.is_strided else (even[:half], even[half:])
    parts = judge.of(*halves, alike=True)
    if whole and same and parts and judge.compared(whole[0][1], same) is None:  # else it draws other numbers
        found = judge.compared(whole[0][1], parts)
        if found:
            judge.warn(found, by_places=judge.goes_by_places(found, alike=True))
            return True
    return False


def _first_parts(count: int, size: int) -> list[Tensor]:
    """Choices of `size` samples; more choices if there are few samples, where one may agree by chance."""
    samples = torch.arange(count, device="cpu")
    found = [samples[:size], samples[::2][:size]]
    if count <= _FEW:
        found += [torch.cat([samples[::3], samples[1::3]])[:size].sort().values, samples[-size:]]
    return found


Parts = list[tuple[int, Output]]  # for each part the number of samples, and what the function returned


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """A number that is not the mean, or the sum, of the same number for parts of the samples.

    Attributes:
        name: "value", "total", "count", or the name of a leaf of aux.
        whole, joined: the number for all samples, and what those for the parts come to.
        away: by how much these differ.
        sizes: of the parts.
    """

    name: str
    whole: Tensor
    joined: Tensor
    away: float
    sizes: tuple[int, ...]


class _Judge:
    """Compares what a function returns for some samples, for parts of them, and for them in another order."""

    def __init__(self, call: Call, again: Repeated, axis: str, aux: Mapping[int, str], is_counted: bool):
        self._call, self._again, self._axis, self._aux, self._is_counted = call, again, axis, aux, is_counted
        self.is_strided = call.region is not None and call.region.is_strided

    def of(self, *parts: Tensor, alike: bool = False) -> Parts | None:
        """What the function returns for parts of the samples; None if it fails for one of them."""
        found = [(len(part), out) for part in parts if (out := self._again.of(part, alike=alike)) is not None]
        return found if len(found) == len(parts) else None

    def compared(self, whole: Output, parts: Parts) -> _Found | None:
        """The first number that is not the mean, or the sum, of those of the parts; None if all are."""
        coarse, sizes = self._again.seen.is_coarse, tuple(size for size, _ in parts)
        numbers = [self._numbers(out) for _, out in parts]
        for name, value in self._numbers(whole).items():
            values = [each[name] for each in numbers]
            if any(each.shape != value.shape for each in values) or not value.numel():
                continue
            if name == "count" and self._is_counted and all(bool(each == value) for each in values):
                continue
            weights = [1.0 if name in _SUMS else size / sum(sizes) for size in sizes]
            joined = sum(weight * each for weight, each in zip(weights, values, strict=True))
            assert isinstance(joined, Tensor)
            # A mean by a mask is NaN for a part of which nothing is left; one over samples is finite for each part.
            if (value.isfinite() & ~joined.isfinite()).any():
                return _Found(name, value, joined, math.inf, sizes)
            away = float((joined - value).abs().max())
            size = float(torch.stack([value, *values]).abs().sum(0).max())
            if away > (_COARSE_TOLERANCE if coarse else _TOLERANCE) * size + _SMALLEST:  # False for NaN
                return _Found(name, value, joined, away, sizes)
        return None

    def goes_by_places(self, found: _Found, *, alike: bool = False) -> bool:
        """Whether the number changes when the same samples come in another order."""
        generator = torch.Generator().manual_seed(0)
        allowed = found.away * (0.1 if self._again.seen.is_coarse else 0.01)
        for _ in range(_ORDERS):
            mixed = self._again.of(torch.randperm(sum(found.sizes), generator=generator, device="cpu"), alike=alike)
            if mixed is None or not float((self._numbers(mixed)[found.name] - found.whole).abs().max()) <= allowed:
                return True
        return False

    def _numbers(self, out: Output) -> dict[str, Tensor]:
        """The numbers that are averaged or summed over ranks, by name."""
        found = {"value": out.value} if out.count is None else {"total": out.value, "count": out.count}
        leaves = trees.leaves(out.aux)
        found |= {path: number_or_tensor(leaves[index]) for index, path in self._aux.items()}
        return {name: value.detach().double() for name, value in found.items()}

    def warn(self, found: _Found, *, by_places: bool = False) -> None:
        """Give the warning, on rank 0 only: with other ranks' numbers it would count as a different one."""
        call, name = self._call, found.name
        if call.region is None or call.region.session.rank != 0:
            return
        at = int((found.joined - found.whole).abs().argmax())
        whole, joined = (float(each.flatten()[at]) for each in (found.whole, found.joined))
        made = "sum" if name in _SUMS else "mean"
        got = f"{whole:.6g} for {sum(found.sizes)} samples, and {joined:.6g} as the {made} of those for "
        got += " and ".join(map(str, found.sizes)) + " of them"
        ignore = 'warnings.filterwarnings("ignore", ".*is not a mean over samples")'
        part = call.runs_on
        joined_by = "leave shards= out, since collectives can't join shards, and " if call.in_shards else ""
        if by_places:
            got += ", cut as the batch was"
            what = "" if name in ("value", *_SUMS) else f"{name} of "
            problem = (
                f"{what}{call.name} is not a mean over samples, but goes by their places in the batch (it pairs "
                f"neighbours, say), and those of a {part} are not side by side in the whole batch"
            )
            remedy = (
                f"make one sample, a row of its own, of what belongs together, or {joined_by}gather the samples, "
                f"all_gather(x, {self._axis!r}, tiled=True); or, if any pairs will do, {ignore}"
            )
        elif name not in ("value", *_SUMS):
            problem = (
                f"{name} of {call.name} is not a mean over samples, and comes back as the mean of those of the "
                f"{part}s, which is not what it is of the whole batch"
            )
            remedy = (
                f"return the means that it is computed of, and compute it of these after the step; or {joined_by}"
                f"psum a sum, or gather its samples, all_gather(x, {self._axis!r}, tiled=True) (docs/losses.md); "
                f"or {ignore}"
            )
        else:
            of_pair = f"for the {name} of its mean_of is not a sum over them, " if name in _SUMS else ""
            problem = (
                f"{call.name} is not a mean over samples, {of_pair}and a step on several {part}s, which takes "
                "the mean of theirs, is not what it is on one device with the whole batch"
            )
            remedy = (
                f"return mean_of(total, count), both summed over samples, for a mean with weights; {joined_by}"
                f"compute what is of the whole batch with psum, pmean or all_gather over {self._axis!r} "
                f"(docs/losses.md); or, if each {part}'s own is meant, {ignore}"
            )
        warn(problem, got=got, remedy=remedy)
