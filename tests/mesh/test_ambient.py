"""What torch is told around a call holds in it, on a driver's ranks and launched ones: autocast, grad mode, dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts import launched, script

from spmd import SpecError, data_parallel, spmd, value_and_grad


def settings(x: torch.Tensor) -> tuple:
    """What a step sees: grad mode, anomaly detection, dtypes of a product and a new tensor, determinism, precision."""
    modes = torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.get_deterministic_debug_mode()
    dtypes = str((x @ x.T).dtype), str(torch.zeros(1).dtype)
    return *modes, *dtypes, torch.get_float32_matmul_precision()


def test_settings_around_a_call(shared_mesh: Any) -> None:
    mesh = shared_mesh({"data": 2})
    step = spmd(settings, mesh=mesh)
    x = torch.randn(3, 3)
    usual = (True, False, 0, "torch.float32", "torch.float32", "highest")
    for _ in range(2):
        assert step(x) == usual
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert step(x) == settings(x) == (False, False, 0, "torch.bfloat16", "torch.float32", "highest")
            assert mesh.run(settings, x) == [settings(x)] * 2
        with torch.autograd.set_detect_anomaly(True):
            assert step(x) == settings(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert step(x) == settings(x) == (True, False, 0, "torch.float32", "torch.float64", "highest")
        torch.set_float32_matmul_precision("high")
        assert step(x) == settings(x) and mesh.run(settings, x)[1][-1] == "high"
        for mode in (1, 2):
            torch.set_deterministic_debug_mode(mode)
            assert step(x) == settings(x) and mesh.run(settings, x)[1][2] == mode
        if hasattr(torch.backends, "fp32_precision"):  # the newer way, beside which the older can't be asked
            torch.set_float32_matmul_precision("highest")
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            with pytest.raises(RuntimeError):
                torch.get_float32_matmul_precision()
            assert spmd(torch.is_grad_enabled, mesh=mesh)()
    finally:
        if hasattr(torch.backends, "fp32_precision"):
            torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.set_deterministic_debug_mode(0)
    assert step(x) == usual
    mesh.run(torch.set_deterministic_debug_mode, 1)  # what ranks were told themselves holds, too
    assert step(x)[2] == 1
    mesh.run(torch.set_deterministic_debug_mode, 0)


def test_a_gradient_under_autocast_is_that_of_torch(shared_mesh: Any) -> None:
    x, w = torch.randn(6, 4), torch.randn(4, 2)

    def loss_fn(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (batch @ w).float().pow(2).mean()

    step = spmd(data_parallel(lambda w, batch: value_and_grad(loss_fn)(w, batch)), mesh=shared_mesh({"data": 1}))
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradient = step(w, x)
        leaf = w.clone().requires_grad_()
        expected = loss_fn(leaf, x)
    expected.backward()
    assert torch.equal(loss.full(), expected.detach())
    assert torch.equal(gradient.full(), leaf.grad)


LAUNCHED = """
import torch
from spmd import Mesh, spmd

mesh = Mesh({"data": -1})

@spmd(mesh=mesh)
def step(x):
    return torch.is_grad_enabled(), str((x @ x.T).dtype)

with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    print(step(torch.ones(2, 2)))
"""


def test_launched(tmp_path: Any) -> None:
    status, out, err = launched(2, script(tmp_path, LAUNCHED))
    assert status == 0, err
    assert out.split("\n")[:2] == ["(False, 'torch.bfloat16')"] * 2


@pytest.mark.parametrize("batch", [{}, {"name": "x"}, None])
def test_a_batch_without_a_tensor_is_refused(shared_mesh: Any, batch: Any) -> None:
    step = spmd(data_parallel(lambda batch: torch.zeros(())), mesh=shared_mesh({"data": 2}))
    with pytest.raises(SpecError, match="has no tensor to split"):
        step(batch)
