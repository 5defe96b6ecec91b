"""The bench for GPUs, as far as a machine without one can tell: it explains itself, and its steps compute alike."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd import Mesh

SCRIPT = Path(__file__).parent.parent / "bench" / "gpu.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "there is none that it can use" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_says_what_it_does() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "less than eight minutes" in done.stdout


def test_sizes(bench: Any) -> None:
    """As large as the models that they stand for: 124 and 25.6 million parameters."""
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in model.parameters()) for model in (bench.Transformer(), bench.cnn())]
    assert 123e6 < sizes[0] < 126e6
    assert 25e6 < sizes[1] < 26e6


def test_lengths_fill_a_bucket(bench: Any) -> None:
    assert sum(bench.lengths_of(25 * bench.MIB, 4)) == 25 * bench.MIB // 4
    assert len(bench.lengths_of(25 * bench.MIB, 4)) > 20


@pytest.mark.parametrize("name", ["transformer", "cnn"])
def test_steps_compute_alike(bench: Any, make_mesh: Callable[..., Mesh], name: str) -> None:
    """A step of plain torch and one of this library leave the same parameters, here on the CPU."""
    model, x, y = bench.make(name, True, "cpu")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ours = bench.our_step(make_mesh({"data": 1}, device="cpu"), model, x, y)
    ours()
    carry = next(cell.cell_contents for cell in ours.__closure__ if isinstance(cell.cell_contents, list))
    bench.plain_step(model, x, y)()
    changed = 0
    for key, value in carry[0].items():
        assert torch.allclose(value.full(), model.state_dict()[key], atol=1e-4), key
        changed += not torch.equal(value.full(), before[key])
    assert changed > len(carry[0]) // 2
