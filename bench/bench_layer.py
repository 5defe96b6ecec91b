"""The functional layer alone: one rank, `value_and_grad` and `opt.step` against plain `backward()` and `step()`.

The plain program runs in a process of its own, and once more within our rank's process: so what the library does to its
process can be told apart from what its layer costs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Contender, Groups, measure

MODELS = ("mlp_1k", "mlp_4k", "encoder", "cnn")
CONTENDERS = (
    Contender("ours", "ours beside plain"),
    Contender("plain", "plain thread"),
    Contender("plain, in our process", "ours beside plain", {"plain": True}),
    Contender("ours, donated", "ours beside plain", {"donate": True}),
    Contender("ours, fused", "ours beside plain", {"fused": True}),
    Contender("ours, fused, donated", "ours beside plain", {"fused": True, "donate": True}),
    Contender("plain, fused", "plain thread", {"fused": True}),
    Contender("plain, fused, in our process", "ours beside plain", {"plain": True, "fused": True}),
)


def layer(groups: Groups, model: str, rounds: int = 6, seconds: float = 0.1) -> dict:
    return measure(groups, CONTENDERS, "train_step", f"models:{model}", ranks=1, rounds=rounds, seconds=seconds)


@pytest.mark.parametrize("contender", [c.name for c in CONTENDERS])
@pytest.mark.parametrize("model", MODELS)
def bench_layer(model: str, contender: str, measured: Callable, replay: Callable) -> None:
    replay(measured("layer", layer, model), contender)
