"""What is no mean over samples: a function whose value for all is not the mean of its values for two parts of them.

A step differentiates the mean over ranks of what each computes of its part of the batch. Of a mean over samples that is
the value for the whole batch; of a deviation, a median, a mean with weights or a contrast between samples it is not.
Two parts of one rank's samples tell as much. What pairs samples by their places (each with the next one) is judged by
two halves that are cut as the batch was. Invariant: a mean over samples passes, whatever is added to it, and so does
what can't be judged: what orders samples at random, depends on batch norm or on a number of samples that it was given,
and what fails for other numbers of samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels.callsite import warn
from ...kernels.errors import message
from ...mesh import trees
from ...mesh.put import number_or_tensor
from .._call import Call, Output
from .repeated import Repeated

FEWEST = 4  # samples that make two parts of which neither is a single one
_TOLERANCE = 1e-4
_COARSE_TOLERANCE = 5e-3
_SMALLEST = 1e-6  # what is smaller is zero but for rounding
_FEW = 32
_ORDERS = 3  # of few samples, one may do what another does by chance
_SUMS = ("total", "count")  # of a mean_of


def look_at_parts(
    call: Call, again: Repeated, once: Output, count: int, axis: str, aux: Mapping[int, str], *, is_counted: bool
) -> bool:
    """Warn of a function that is no mean over its samples, or has such aux; whether it is such a one.

    Args:
        once: what it returned for all of them, of which there are so many.
        axis: along which the batch is split.
        aux: those leaves of aux that are averaged, by number, and what each is called.
        is_counted: whether the count of a mean_of comes of all samples, be it that the step has counted them before.
    """
    judge = _Judge(call, again, axis, aux, is_counted)
    samples = torch.arange(count, device="cpu")
    here = max(2, 2 * count // 5)  # parts of unequal size have equal weights less often by chance
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
    # All with one sample's random numbers: it may have put samples in another order before it drew any.
    whole, same = judge.of(even, alike=True), judge.of(even, alike=True)
    halves = (even[::2], even[1::2]) if judge.is_dealt else (even[:half], even[half:])
    parts = judge.of(*halves, alike=True)
    if whole and same and parts and judge.compared(whole[0][1], same) is None:  # else it is random in ways of its own
        found = judge.compared(whole[0][1], parts)
        if found:
            judge.warn(found, by_places=judge.goes_by_places(found, alike=True))
            return True
    return False


def _first_parts(count: int, size: int) -> list[Tensor]:
    """So many of the samples, chosen in several ways: more of few, of which ranks do by chance what all do."""
    samples = torch.arange(count, device="cpu")
    found = [samples[:size], samples[::2][:size]]
    if count <= _FEW:
        found += [torch.cat([samples[::3], samples[1::3]])[:size].sort().values, samples[-size:]]
    return found


Parts = list[tuple[int, Output]]  # of how many samples, and what it returned for them


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """What is not the mean, or the sum, of what it is for parts of the samples.

    Attributes:
        name: of the value, or of the leaf of aux.
        whole, joined: what it is, and what the parts come to.
        away: by how much they differ.
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
        self.is_dealt = call.region is not None and call.region.is_dealt

    def of(self, *parts: Tensor, alike: bool = False) -> Parts | None:
        """What it returns for parts of the samples; None if it fails for one."""
        found = [(len(part), out) for part in parts if (out := self._again.of(part, alike=alike)) is not None]
        return found if len(found) == len(parts) else None

    def compared(self, whole: Output, parts: Parts) -> _Found | None:
        """The first of its values that is not made of those of the parts."""
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
            away = float((joined - value).abs().max())
            size = float(torch.stack([value, *values]).abs().sum(0).max())
            if away > (_COARSE_TOLERANCE if coarse else _TOLERANCE) * size + _SMALLEST:  # NaN is not
                return _Found(name, value, joined, away, sizes)
        return None

    def goes_by_places(self, found: _Found, *, alike: bool = False) -> bool:
        """Whether it is another value for the same samples in another order."""
        generator = torch.Generator().manual_seed(0)
        allowed = found.away * (0.1 if self._again.seen.is_coarse else 0.01)
        for _ in range(_ORDERS):
            mixed = self._again.of(torch.randperm(sum(found.sizes), generator=generator, device="cpu"), alike=alike)
            if mixed is None or not float((self._numbers(mixed)[found.name] - found.whole).abs().max()) <= allowed:
                return True
        return False

    def _numbers(self, out: Output) -> dict[str, Tensor]:
        """What is averaged, or what is added up, by name."""
        found = {"value": out.value} if out.count is None else {"total": out.value, "count": out.count}
        leaves = trees.leaves(out.aux)
        found |= {path: number_or_tensor(leaves[index]) for index, path in self._aux.items()}
        return {name: value.detach().double() for name, value in found.items()}

    def warn(self, found: _Found, *, by_places: bool = False) -> None:
        """Tell what it is, on the first rank: others' numbers would make another warning of it."""
        call, name = self._call, found.name
        if call.region is None or call.region.session.rank != 0:
            return
        at = int((found.joined - found.whole).abs().argmax())
        whole, joined = (float(each.flatten()[at]) for each in (found.whole, found.joined))
        made = "sum" if name in _SUMS else "mean"
        got = f"{whole:.6g} for {sum(found.sizes)} samples, and {joined:.6g} as the {made} of those for "
        got += " and ".join(map(str, found.sizes)) + " of them"
        ignore = 'warnings.filterwarnings("ignore", ".*is not a mean over samples")'
        if by_places:
            got += ", cut as the batch was"
            what = "" if name in ("value", *_SUMS) else f"{name} of "
            problem = (
                f"{what}{call.name} is not a mean over samples, but goes by their places in the batch (it pairs "
                "neighbours, say), and those on a rank are not side by side in the whole batch"
            )
            remedy = (
                "make one sample, a row of its own, of what belongs together, or gather the samples, "
                f"all_gather(x, {self._axis!r}, tiled=True); or, if any pairs will do, {ignore}"
            )
        elif name not in ("value", *_SUMS):
            problem = (
                f"{name} of {call.name} is not a mean over samples, and comes back as the mean of those of the ranks, "
                "which is not what it is of the whole batch"
            )
            remedy = (
                "return the means that it is computed of, and compute it of these after the step; psum a sum; "
                f"or gather its samples, all_gather(x, {self._axis!r}, tiled=True) (docs/losses.md); or {ignore}"
            )
        else:
            of_pair = f"for the {name} of its mean_of is not a sum over them, " if name in _SUMS else ""
            problem = (
                f"{call.name} is not a mean over samples, {of_pair}and a step on several ranks, which takes the mean "
                "of theirs, is not what it is on one device with the whole batch"
            )
            remedy = (
                "return mean_of(total, count), both summed over samples, for a mean with weights; compute what is of "
                f"the whole batch with psum, pmean or all_gather over {self._axis!r} (docs/losses.md); or, if each "
                f"rank's own is meant, {ignore}"
            )
        warn(message(problem, got=got, remedy=remedy))
