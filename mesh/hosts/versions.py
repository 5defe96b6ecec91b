"""What has to be the same on all hosts of a driver: what the bytes that travel between them are made by."""

from __future__ import annotations

import importlib.metadata
import platform

import torch


def versions() -> dict[str, str]:
    """What this process runs, by name."""
    python = ".".join(platform.python_version_tuple()[:2])
    spmd = importlib.metadata.version("spmd")
    return {"spmd": spmd, "torch": torch.__version__, "python": python, "machine": platform.machine()}
