"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spmd import Mesh


@pytest.fixture(params=[1, 2])
def mesh(request: pytest.FixtureRequest, make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> Mesh:
    """One rank, and two: on a GPU each, or on one where NCCL 2.30 or later is at hand."""
    if request.param > torch.cuda.device_count():
        from spmd.kernels import nccl_library

        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        library = nccl_library.load()
        if not nccl_library.may_share_gpu(library):
            pytest.skip(f"one GPU, and several ranks on it need NCCL 2.30: {library.describe()}")
    return make_mesh({"data": request.param}, device="cuda")
