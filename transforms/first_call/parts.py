"""What is no mean over samples: a function whose value for all is not the mean of its values for two parts of them.

A step differentiates the mean over ranks of what each computes of its part of the batch. Of a mean over samples that is
the value for the whole batch; of a deviation, a median, a mean with weights or a contrast between samples it is not.
Two parts of one rank's samples tell as much. Invariant: a mean over samples passes, whatever is added to it, and so
does what can't be judged: what depends on the order of samples (a random permutation within the function, for one), on
batch norm, or on a number of samples that it was given, and what fails for other numbers of samples.
"""

from __future__ import annotations

import torch

from ...kernels.callsite import warn
from ...kernels.errors import message
from .._call import Call, Output
from .repeated import Repeated

FEWEST = 4  # samples that make two parts of which neither is a single one
_TOLERANCE = 1e-4
_COARSE_TOLERANCE = 5e-3
_SMALLEST = 1e-6  # what is smaller is zero but for rounding
_ORDERS = 3  # of few samples, one may do what another does by chance


def look_at_parts(call: Call, again: Repeated, once: Output, count: int, axis: str) -> None:
    """Warn of a function that is no mean over its samples.

    Args:
        once: what it returned for all of them, of which there are so many.
        axis: along which the batch is split.
    """
    here = max(2, 2 * count // 5)  # parts of unequal size have equal weights less often by chance
    shares = (here / count, 1 - here / count) if once.count is None else (1.0, 1.0)
    samples = torch.arange(count)
    for order in samples, torch.cat([samples[::2], samples[1::2]]):
        first, second = again.of(order[:here]), again.of(order[here:])
        if first is None or second is None or again.seen.normalises or again.knows_count:
            return
        for name, whole in _numbers(once).items():
            parts = _numbers(first)[name], _numbers(second)[name]
            joined = shares[0] * parts[0] + shares[1] * parts[1]
            away, size = abs(joined - whole), abs(whole) + abs(parts[0]) + abs(parts[1])
            if away > (_COARSE_TOLERANCE if again.seen.is_coarse else _TOLERANCE) * size + _SMALLEST:  # NaN is not
                if not _depends_on_order(again, name, whole, count, away * (0.1 if again.seen.is_coarse else 0.01)):
                    sizes = f"{here} and {count - here} of them"
                    _warn(call, name, f"{whole:.6g} for {count} samples", f"{joined:.6g}", sizes, axis)
                return


def _depends_on_order(again: Repeated, name: str, whole: float, count: int, allowed: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    for _ in range(_ORDERS):
        mixed = again.of(torch.randperm(count, generator=generator))
        if mixed is None or not abs(_numbers(mixed)[name] - whole) <= allowed:
            return True
    return False


def _numbers(out: Output) -> dict[str, float]:
    """What is averaged, or what is added up, by name."""
    value = float(out.value)
    return {"value": value} if out.count is None else {"total": value, "count": float(out.count)}


def _warn(call: Call, name: str, whole: str, joined: str, sizes: str, axis: str) -> None:
    if call.region is None or call.region.session.rank != 0:  # whose numbers would make another warning of it
        return
    of_pair = "" if name == "value" else f"for the {name} of its mean_of is not a sum over them, "
    warn(
        message(
            f"{call.name} is not a mean over samples, {of_pair}and a step on several ranks, which takes the mean of "
            "theirs, is not what it is on one device with the whole batch",
            got=f"{whole}, and {joined} as the {'mean' if name == 'value' else 'sum'} of those for {sizes}",
            remedy="return mean_of(total, count), both summed over samples, for a mean with weights; compute what is "
            f"of the whole batch with psum, pmean or all_gather over {axis!r} (docs/losses.md); or, if each rank's own "
            'is meant, warnings.filterwarnings("ignore", ".*is not a mean over samples")',
        )
    )
