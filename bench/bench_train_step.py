"""The train step (gradients and AdamW) of four models: ours, DDP on Gloo, one process with all threads, JAX."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Contender, Groups, measure

MODELS = ("mlp_1k", "mlp_4k", "encoder", "cnn")
SLOW = {"shard": None, "fused": False}  # the default is both
OURS = {
    "ours": SLOW,
    "ours, donated": {**SLOW, "donate": True},
    "ours, fused, donated": {"shard": None, "fused": True, "donate": True},
    "ours, sharded, fused": {"shard": "data", "fused": True},
    "ours, sharded, fused, donated": {"shard": "data", "fused": True, "donate": True},
}
FLAGS: dict[str, dict] = {"": {}, ", foreach": {"foreach": True}, ", fused": {"fused": True}}
TWO = (
    *(Contender(name, "ours", options) for name, options in OURS.items()),
    Contender("ours, from a driver", "driver", SLOW),
    Contender("ours, from a driver, sharded, fused, donated", "driver", OURS["ours, sharded, fused, donated"]),
    *(Contender(f"ddp{flags}", "gloo", options) for flags, options in FLAGS.items()),
    Contender("one process", "plain"),
    Contender("one process, fused", "plain", {"fused": True}),
    Contender("jax", "jax"),
    Contender("forward and backward alone", "floor"),
)
OVERSUBSCRIBED = ("ours", "ours, sharded, fused, donated", "ddp, fused")
FOUR = tuple(c for c in TWO if c.name in OVERSUBSCRIBED)


def train_step(groups: Groups, ranks: int, model: str, rounds: int = 7, seconds: float = 0.12) -> dict:
    contenders, rounds = (TWO, rounds) if ranks == 2 else (FOUR, min(rounds, 4))
    return measure(groups, contenders, "train_step", f"models:{model}", ranks=ranks, rounds=rounds, seconds=seconds)


@pytest.mark.parametrize("contender", [c.name for c in TWO])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [2, 4])
def bench_train_step(ranks: int, model: str, contender: str, measured: Callable, replay: Callable) -> None:
    if ranks == 4 and contender not in OVERSUBSCRIBED:
        pytest.skip("measured with two ranks")
    replay(measured("train_step", train_step, ranks, model), contender)
