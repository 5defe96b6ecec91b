"""Finds functions whose gradient is not that of a mean over samples, though their value is a mean.

The backward pass may do something else than differentiate: a hook of an activation or a `torch.autograd.Function` that
normalises the gradient that it gets, or `loss / loss.detach()`, which is 1 for any samples. For a rank's samples that
is not what it is for the whole batch. Invariant: a gradient that is the sum of those of its parts passes, where each
part begins its backward pass as a rank or a virtual shard does. So hooks that scale pass, and those that clip or
normalise sample by sample pass where ranks give the same as one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.callsite import warn
from .._call import Call, Output
from .repeated import Repeated

_SAMPLES = 4  # few, since the graph of all samples is in memory, too
_SMALL = 1 << 16  # elements; gradients by larger leaves take long, and much memory
_ENTRIES = 4096  # of each gradient, that are compared
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 5e-2
_SMALLEST = 1e-6  # a smaller difference is rounding


def look_at_slopes(call: Call, again: Repeated, count: int) -> bool:
    """Warn if a function's gradient is not a mean over its samples, where its value is; returns whether it warned."""
    if again.seen.normalises or again.knows_count:
        return False
    samples = torch.arange(count, device="cpu")
    # Rounding may turn a maximum, or a kink, to another side; not for both.
    differing = _differing(call, again, samples[:_SAMPLES])
    if differing is None or _differing(call, again, samples.flip(0)[:_SAMPLES]) is None:
        return False
    if call.region is not None and call.region.session.rank == 0:
        part, (whole, joined) = call.runs_on, differing
        warn(
            f"the gradient of {call.name} is not a mean over samples, as its value is: a hook, a "
            "torch.autograd.Function, or a factor behind detach() computes something of the gradient or the value of a "
            f"{part}'s samples together",
            got=f"an entry of {whole:.6g} for {_SAMPLES} samples, and {joined:.6g} as the mean of those for two parts",
            remedy="clip or normalise grads in the step, where they are of the whole batch; compute a factor of the "
            f"whole batch with pmean (docs/losses.md); or, if each {part}'s own is meant, "
            'warnings.filterwarnings("ignore", ".*is not a mean over samples")',
        )
    return True


def _differing(call: Call, again: Repeated, samples: Tensor) -> tuple[float, float] | None:
    """An entry of the gradient for some samples, and what those for two parts of them come to, if that is another."""
    whole = _Slope(None)
    out = again.of(samples, backward=whole)
    if out is None:
        return None
    seed = 1.0 if out.count is None else 1.0 / float(out.count)
    value, joined, sizes = torch.zeros_like(out.value), torch.zeros_like(whole.entries), whole.entries.abs()
    for part in samples.chunk(2):
        share = len(part) / len(samples) if out.count is None else seed
        slope = _Slope(1.0 if call.in_shards else share)  # shards are scaled once they are summed
        its = again.of(part, backward=slope)
        if its is None:
            return None
        entries = share * slope.entries if call.in_shards else slope.entries
        value, joined = value + its.value * (share if out.count is None else 1.0), joined + entries
        sizes = torch.maximum(sizes, entries.abs())
    coarse = again.seen.is_coarse
    tolerance = _COARSE_TOLERANCE if coarse else _TOLERANCE
    if not bool((value - out.value).abs() <= tolerance * out.value.abs() + _SMALLEST):  # it depends on their number
        return None
    away = (joined - whole.entries).abs()
    if not away.numel() or not bool(away.max() > tolerance * sizes.max() + _SMALLEST):  # False for NaN
        return None
    at = int(away.argmax())
    return float(whole.entries[at]), float(joined[at])


class _Slope:
    """Takes the gradients of an output by small leaves (biases, of large layers), and keeps some of their entries.

    Args:
        seed: what the backward pass begins with; None for that of a mean.

    Attributes:
        entries: of these gradients.
    """

    def __init__(self, seed: float | None):
        self._seed = seed
        self.entries = torch.empty(0, device="cpu")

    def __call__(self, out: Output, leaves: list[Tensor]) -> None:
        leaves = [leaf for leaf in leaves if leaf.numel() <= _SMALL] or [min(leaves, key=torch.numel)]
        kept = [_some(torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)) for leaf in leaves]

        def keep(index: int) -> Any:
            def hook(leaf: Tensor) -> None:
                assert leaf.grad is not None
                kept[index], leaf.grad = _some(leaf.grad), None

            return hook

        for index, leaf in enumerate(leaves):
            leaf.register_post_accumulate_grad_hook(keep(index))
        seed = self._seed if self._seed is not None else 1.0 if out.count is None else 1.0 / float(out.count)
        torch.autograd.backward([out.value * seed], inputs=leaves)
        self.entries = torch.cat(kept)


def _some(gradient: Tensor) -> Tensor:
    """Entries from all over a gradient."""
    dense = gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()
    flat = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return flat.flatten()[:: max(1, flat.numel() // _ENTRIES)].double().cpu()
