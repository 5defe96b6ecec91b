"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from internals import share_a_gpu

from spmd import Mesh


@pytest.fixture
def enough_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`enough_gpus(2)`: where there are fewer, two ranks share one, or the test is skipped."""

    def see(size: int) -> None:
        if size <= torch.cuda.device_count():
            return
        if reason := share_a_gpu(monkeypatch):
            pytest.skip(f"one GPU, and {reason}")

    return see


@pytest.fixture(params=[1, 2])
def mesh(request: pytest.FixtureRequest, make_mesh: Callable[..., Mesh], enough_gpus: Callable[[int], None]) -> Mesh:
    """One rank, and two: on a GPU each, or on one where NCCL 2.30 or later is at hand."""
    enough_gpus(request.param)
    return make_mesh({"data": request.param}, device="cuda")
