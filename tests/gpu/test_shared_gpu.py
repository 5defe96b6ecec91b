"""Two ranks on one GPU, as the tests of this folder have them where there is one only: here on NCCL's fake."""

from __future__ import annotations

import sys
from collections.abc import Callable

import cloudpickle
import nccl_fake
import pytest
import torch
from internals import pretend_nccl

from spmd import Mesh
from spmd.kernels import registry

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def total(make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[float]]:
    """`total()` sums the ones of two ranks that share a GPU."""
    pretend_nccl(monkeypatch, 23203, "/somewhere/libnccl.so.2", "14.2.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(registry._FACTORIES, "nccl-shared", nccl_fake.shared_factory)
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS"):
        monkeypatch.delenv(name, raising=False)

    def total() -> list[float]:
        mesh = make_mesh({"data": 2}, backend="nccl-shared", device="cpu")
        return mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(1))))

    return total


def test_the_tests_give_ranks_of_one_gpu_few_blocks(
    total: Callable[[], list[float]], enough_gpus: Callable[[int], None]
) -> None:
    """The fixture of this folder sets what NCCL in the ranks' own processes then reads."""
    enough_gpus(2)
    assert total() == [2.0, 2.0]


@pytest.mark.parametrize(("share", "text"), [("0", "several ranks use the same GPU"), ("1", "64 blocks of a GPU")])
def test_otherwise_they_do_not_fit(
    total: Callable[[], list[float]], monkeypatch: pytest.MonkeyPatch, share: str, text: str
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", share)
    with pytest.raises(Exception, match=text):
        total()
