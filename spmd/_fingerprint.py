"""What the bits of a run depend on besides its program: recorded in a checkpoint, compared when it is taken up."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .mesh.mesh import Mesh

# Where a run that was taken up as plain tensors had got to, for the mesh that it goes on on.
_unplaced: list[tuple[int, int]] = []

# Backends that combine in one order, in this library's own arithmetic.
_IN_ORDER = ("shm", "gloo", "mpi")


def fingerprint(mesh: Mesh | None) -> dict[str, Any]:
    """As far as it is known: without a mesh only what this process says."""
    found: dict[str, Any] = {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
    }
    if mesh is not None:
        found["seed"] = mesh.seed
        found["threads"] = mesh.pinned_threads
        found["backend class"] = "in order" if mesh.backend in _IN_ORDER else mesh.backend
        found.update(mesh.settings)
    return found


def warn_if_other(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Say what differs of what both tell."""
    other = {name: (before[name], now[name]) for name in before if name in now and before[name] != now[name]}
    if other:
        listed = "; ".join(f"{name}: {was}, now {is_}" for name, (was, is_) in other.items())
        warnings.warn(
            f"this run goes on from {where} under another fingerprint, so that its bits will differ from those of a "
            f"run that never stopped ({listed})",
            stacklevel=3,
        )


def take_up(mesh: Mesh | None, manifest: Mapping[str, Any], where: str) -> None:
    """Have a mesh go on as a run that was saved; None is the one that next runs a step."""
    position = manifest.get("position")
    if mesh is not None:
        mesh.resumed = (where, manifest["fingerprint"])
        mesh.position = tuple(position or mesh.position)
    elif position is not None:
        _unplaced[:] = [tuple(position)]


def begin_step(mesh: Mesh, settings: dict[str, Any]) -> None:
    """Note what a data_parallel step was made with that is seen in the bits, and compare it with the run taken up."""
    if not mesh.settings and mesh.resumed is None and _unplaced:
        mesh.position = _unplaced.pop()
    mesh.settings = settings
    if mesh.resumed is not None:
        (where, before), mesh.resumed = mesh.resumed, None
        warn_if_other({name: before[name] for name in settings if name in before}, settings, where)
