"""Axes that a gradient's mean leaves out, though its function communicates over them.

With `axes="data"` each rank's backward pass begins with its share along "data". The transpose of a `psum` over "model"
then sums the derivatives of the values of all ranks along "model". So a tensor-parallel weight gets a gradient that is
too large by a factor of the size of "model", while a bias that is added after the `psum` gets the right one.
"""

from __future__ import annotations

from ...kernels.callsite import warn
from .._call import Call, Solution, Strategy
from .._tokens import state


def solve(strategy: Strategy, call: Call) -> Solution:
    """`strategy.solve`, with a warning if axes are left out; for calls that a net follows."""
    here = state()
    outer, here.crossed = here.crossed, set()
    try:
        solution = strategy.solve(call)
    finally:
        crossed, here.crossed = here.crossed, outer
        if outer is not None:
            outer |= crossed
    region = call.region
    if region is None or region.session.rank != 0:
        return solution
    left_out = [name for name in region.session.layout.names if name in crossed and name not in call.over]
    if left_out:
        names = ", ".join(map(repr, left_out))
        warn(
            f"{call.name} communicates over {names}, which the mean that is differentiated leaves out: the "
            f"gradient is that of the sum over {names} of the ranks' values",
            got=f"axes={call.over!r}",
            where=call.where,
            remedy="leave out axes= for the mean over all ranks, which is the value itself where these have the "
            "same; if you mean the sum, "
            'warnings.filterwarnings("ignore", ".*which the mean that is differentiated leaves out")',
        )
    return solution
