"""What the bits of a run depend on besides its program: recorded in a checkpoint, compared when it is taken up.

Of the checkpoints that a program restores before its next step, one is the run's own, and others may be a teacher's:
nothing says which. A run that restores others when it starts does so whenever it starts, and its own has got at least
as far: so positions only move forwards, and what the steps were made with is told where it is as in none of them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .mesh.mesh import Mesh

# Backends that combine in one order, in this library's own arithmetic.
_IN_ORDER = ("shm", "gloo", "mpi")


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint: its folder, what its manifest tells of the run, and how far that had got."""

    where: str
    fingerprint: Mapping[str, Any]
    position: tuple[int, int] | None


@dataclasses.dataclass(slots=True)
class TakenUp:
    """What a mesh goes on from.

    Attributes:
        restored: the last checkpoint of every directory, in the order of restoring.
        compared: names of the steps that have run since.
    """

    restored: dict[str, Restored] = dataclasses.field(default_factory=dict)
    compared: set[str] = dataclasses.field(default_factory=set)

    def add(self, one: Restored) -> tuple[int, int] | None:
        """Where the run goes on, if this checkpoint has got further than those of other directories."""
        directory = str(Path(one.where).parent)
        self.restored.pop(directory, None)
        others = [other.position for other in self.restored.values() if other.position is not None]
        self.restored[directory] = one
        if one.position is None or any(one.position <= other for other in others):
            return None
        return max([one.position, *others])


# What was restored as plain tensors, for the mesh that goes on with them.
_unplaced = TakenUp()


def fingerprint(mesh: Mesh | None) -> dict[str, Any]:
    """As far as it is known: without a mesh only what this process says."""
    found: dict[str, Any] = {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
    }
    if mesh is not None:
        found.update(_of_mesh(mesh))
        found["steps"] = {name: list(seen) for name, seen in mesh.settings.items()}
    return found


def _of_mesh(mesh: Mesh) -> dict[str, Any]:
    backend = "in order" if mesh.backend in _IN_ORDER else mesh.backend
    return {"seed": mesh.seed, "threads": mesh.pinned_threads, "backend class": backend}


def warn_if_other(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Say what differs of what both tell; the steps are compared when they run."""
    other = _other({name: value for name, value in before.items() if name != "steps"}, now)
    if other:
        listed = "; ".join(f"{name}: {was}, now {is_}" for name, (was, is_) in other.items())
        warnings.warn(
            f"this run goes on from {where} under another fingerprint, so that its bits will differ from those of a "
            f"run that never stopped ({listed})",
            stacklevel=3,
        )


def _other(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (was, now[name]) for name, was in before.items() if name in now and now[name] != was}


def take_up(mesh: Mesh | None, manifest: Mapping[str, Any], where: str) -> None:
    """Have a mesh go on as a run that was saved; None is the one that next runs its first step."""
    position = manifest.get("position")
    one = Restored(where, manifest["fingerprint"], None if position is None else (position[0], position[1]))
    if mesh is None:
        _unplaced.add(one)
    else:
        _place(mesh, one)


def _place(mesh: Mesh, one: Restored) -> None:
    if mesh.resumed is None or mesh.resumed.compared:
        mesh.resumed = TakenUp()
    mesh.position = mesh.resumed.add(one) or mesh.position


def begin_step(mesh: Mesh, name: str, settings: dict[str, Any]) -> None:
    """Note what a data_parallel step was made with that is seen in the bits, and compare it with the run taken up."""
    if not mesh.settings and _unplaced.restored:
        placed = [] if mesh.resumed is None else [*mesh.resumed.restored.values()]
        _compare([*placed, *_unplaced.restored.values()], _of_mesh(mesh), "")
        known = set() if mesh.resumed is None else set(mesh.resumed.restored)
        for directory, one in _unplaced.restored.items():
            if directory not in known:  # what was restored onto the mesh itself is what it goes on from
                _place(mesh, one)
        _unplaced.restored.clear()
    if name == "<lambda>":  # a name that all of them have
        return
    seen = mesh.settings.setdefault(name, [])
    if settings not in seen:
        seen.append(settings)
    taken = mesh.resumed
    if taken is not None and name not in taken.compared:
        first = not taken.compared
        taken.compared.add(name)
        steps = [
            Restored(one.where, was, None) for one in taken.restored.values() for was in _made_with(one, name, first)
        ]
        _compare(steps, settings, f" of {name}")


def _made_with(one: Restored, name: str, first: bool) -> list[dict[str, Any]]:
    """What the steps of a name were made with; older checkpoints tell it of the last step, of whatever name."""
    if "steps" in one.fingerprint:
        return one.fingerprint["steps"].get(name, [])
    return [{key: one.fingerprint[key] for key in ("shards", "wire dtype") if key in one.fingerprint}] if first else []


def _compare(restored: list[Restored], now: Mapping[str, Any], of: str) -> None:
    """Warn if what is now is as in none of several checkpoints."""
    if restored and all(_other(one.fingerprint, now) for one in restored):
        last = restored[-1]
        before = {f"{key}{of}": value for key, value in last.fingerprint.items()}
        warn_if_other(before, {f"{key}{of}": value for key, value in now.items()}, last.where)
