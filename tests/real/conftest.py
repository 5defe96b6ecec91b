"""Real models are looked for once, and their tests left out, by name, where the packages are missing."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spmd import Mesh

PACKAGES = ("transformers", "timm", "torchvision", "torchmetrics")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
if MISSING:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    return f"real models are not tested: no {', '.join(MISSING)} (make test-real)" if MISSING else "real models: found"


def import_torchvision() -> None:
    """torchvision is built for one build of torch; with another its operators are missing, and it fails to import.

    None of the models here calls them: what it registers something for is declared, so that it imports.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        found = importlib.util.find_spec("torchvision")
        assert found is not None and found.origin is not None
        text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
        names = set(re.findall(r"torchvision::(\w+)", text)) | set(re.findall(r'register_meta\("(\w+)"', text))
        for name in sorted(names):
            torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")


if not MISSING:
    import_torchvision()


def _prepared(mesh: Mesh) -> Mesh:
    mesh.run(import_torchvision)
    return mesh


@pytest.fixture
def real_mesh(shared_mesh: Callable[..., Mesh]) -> Callable[[int], Mesh]:
    """`real_mesh(3)`: a mesh of so many ranks, in which the models' packages can be imported."""
    return lambda ranks: _prepared(shared_mesh({"data": ranks}))
