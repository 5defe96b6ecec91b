"""Steps of real models, beside plain torch on the whole batch: the same losses and parameters to rounding.

At 1, 2 and 3 ranks, with a batch of seven samples, which none of 2 and 3 divides.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import BATCH_NORM, BUILDERS, build
from real_training import assert_same, by_mesh, by_torch, dealt_batches

from spmd import optimizer


def adamw() -> Any:
    return optimizer(torch.optim.AdamW, lr=1e-3)


def expected_of(name: str, *, checkpointing: bool = False) -> Any:
    module = build(name, checkpointing=checkpointing)
    return by_torch(name, module, torch.optim.AdamW(module.parameters(), lr=1e-3))


@pytest.mark.parametrize("name", BUILDERS)
def test_as_on_one_device(name: str, real_mesh: Any) -> None:
    expected = expected_of(name)
    for ranks in (1, 2, 3):
        assert_same(name, by_mesh(name, build(name), adamw(), real_mesh(ranks)), expected)


@pytest.mark.parametrize("name", BUILDERS)
def test_under_activation_checkpointing(name: str, real_mesh: Any) -> None:
    """Layers that are computed again in the backward pass."""
    expected = expected_of(name, checkpointing=True)
    for ranks, shards in ((2, None), (3, 4)):
        module = build(name, checkpointing=True)
        assert_same(name, by_mesh(name, module, adamw(), real_mesh(ranks), shards=shards), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in BATCH_NORM])
def test_dropout_has_the_same_masks_at_any_size(name: str, checkpointing: bool, real_mesh: Any) -> None:
    """Under shards= bit for bit, also where the backward pass draws them again; without dropout the run is another."""

    def run(ranks: int, dropout: float = 0.3) -> Any:
        mesh, module = real_mesh(ranks), build(name, dropout, checkpointing=checkpointing)
        return by_mesh(name, module, adamw(), mesh, batches=dealt_batches(name, mesh, 4), shards=4)

    first = run(1)
    for ranks in (2, 3):
        found = run(ranks)
        assert found.losses == first.losses
        assert all(torch.equal(value, first.params[key]) for key, value in found.params.items())
    assert run(2, 0.0).losses != first.losses
