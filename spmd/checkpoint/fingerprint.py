"""What the bits of a run depend on besides its program: recorded in a checkpoint, compared when it is resumed.

A program may restore several checkpoints: its run's own, and a teacher's, say, or the best one; nothing says which is
which. Invariant: restoring only moves random numbers forwards, so that a run that is stopped and resumed draws what it
would have drawn; but after a call that failed they go back to what is restored, to run again from there. A step's
settings are reported if they match none of the checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..kernels.callsite import warn
from ..mesh.mesh import Mesh
from ..mesh.run_state import RunState

# Backends that share one order of reduction, and this library's own arithmetic.
_IN_ORDER = ("shm", "gloo", "mpi")

Position = tuple[int, int]  # as `RunState.position`


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint: its folder, what its manifest tells of the run, how far that had got, and when it was restored."""

    where: str
    fingerprint: Mapping[str, Any]
    position: Position | None
    when: float


@dataclasses.dataclass(slots=True)
class Resumed:
    """The checkpoints that a mesh resumes from.

    Attributes:
        restored: by fingerprint, in the order of restoring, each with the furthest position among equal fingerprints.
        compared: names of the steps that have run since.
    """

    restored: dict[str, Restored] = dataclasses.field(default_factory=dict)
    compared: set[str] = dataclasses.field(default_factory=set)

    def add(self, one: Restored) -> None:
        key = json.dumps(one.fingerprint, sort_keys=True)
        before = self.restored.pop(key, None)
        position = _furthest(other.position for other in (before, one) if other is not None)
        self.restored[key] = dataclasses.replace(one, position=position)


# What was restored as plain tensors since a step last ran, for the mesh that goes on with them.
unplaced = Resumed()


def _furthest(positions: Iterable[Position | None]) -> Position | None:
    known = [position for position in positions if position is not None]
    return (max(calls for calls, _ in known), max(runs for _, runs in known)) if known else None


# -- recorded ---------------------------------------------------------------------------------------------------------


def fingerprint(mesh: Mesh | None) -> dict[str, Any]:
    """The fingerprint as far as it is known: without a mesh, only what this process says."""
    found: dict[str, Any] = {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
    }
    return found if mesh is None else {**found, **_of_mesh(mesh)}


def _of_mesh(mesh: Mesh) -> dict[str, Any]:
    backend = "in order" if mesh.backend in _IN_ORDER else mesh.backend
    return {"seed": mesh.seed, "threads": mesh.pinned_threads, "backend class": backend}


def of_run(mesh: Mesh | None) -> dict[str, Any]:
    """What a manifest tells of the run that saves: its fingerprint, its steps, and how far it has got.

    Steps that have not run since the resume are taken over from the restored checkpoints.
    """
    if mesh is not None:
        run = mesh.run_state
        _go_on_unplaced(mesh, at_first=not any(run.functions.values()))
        restored = [] if run.resumed is None else [*run.resumed.restored.values()]
        ran = {name: list(seen) for name, seen in run.settings.items()}
        steps = {**_steps_of(restored, but=ran), **ran}
        run.go_on()  # from what is saved
        return {"fingerprint": {**fingerprint(mesh), "steps": steps}, "position": run.position}
    restored = [*unplaced.restored.values()]
    position = _furthest(one.position for one in restored)
    if position is None:
        return {"fingerprint": fingerprint(None)}
    last = max(restored, key=lambda one: one.position or (-1, -1))
    known = {name: value for name, value in last.fingerprint.items() if name in ("seed", "threads", "backend class")}
    return {"fingerprint": {**fingerprint(None), **known, "steps": _steps_of(restored)}, "position": position}


def _steps_of(restored: Iterable[Restored], but: Mapping[str, Any] | None = None) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in restored:
        for name, made_with in one.fingerprint.get("steps", {}).items():
            if name not in (but or {}):
                seen = found.setdefault(name, [])
                seen += [settings for settings in made_with if settings not in seen]
    return found


# -- resumed ----------------------------------------------------------------------------------------------------------


def resume(mesh: Mesh | None, manifest: Mapping[str, Any], where: str) -> None:
    """Have a mesh continue a saved run; None stands for the next mesh that runs a first step."""
    position = manifest.get("position")
    position = None if position is None else (position[0], position[1])
    one = Restored(where, manifest["fingerprint"], position, time.monotonic())
    if mesh is None:
        unplaced.add(one)
    else:
        _go_on(mesh.run_state, [one])


def _go_on(run: RunState, restored: list[Restored]) -> None:
    """Move the run forwards to the furthest of these checkpoints, or, after a call that failed, back to them."""
    failed, before = run.failed, run.position
    since = [one for one in restored if one.position is not None and failed is not None and one.when > failed]
    if since:
        run.resumed, run.failed = Resumed(), None
        restored, start = since, None
    else:
        start = before
    if run.resumed is None:
        run.resumed = Resumed(compared=set(run.settings))
    for one in restored:
        run.resumed.add(one)
    run.position = _furthest([start, *(one.position for one in restored)]) or before
    if run.position != before:  # all steps go on from there, including those that have run here before
        run.resumed.compared.clear()
    run.begun.clear()


def _go_on_unplaced(mesh: Mesh, *, at_first: bool, of_steps: bool = True) -> None:
    """Resume from what was restored as plain tensors: at the first call of a function, or after a call that failed.

    Args:
        of_steps: also from runs with data_parallel steps, which calls of other functions leave to those steps.
    """
    failed = mesh.run_state.failed
    waiting = {key: one for key, one in unplaced.restored.items() if of_steps or one.fingerprint.get("steps") == {}}
    if waiting and (at_first or (failed is not None and any(one.when > failed for one in waiting.values()))):
        if mesh.run_state.resumed is None:  # else the mesh has been compared
            _compare([*waiting.values()], _of_mesh(mesh), "")
        _go_on(mesh.run_state, [*waiting.values()])
    for key in waiting:
        del unplaced.restored[key]


# -- compared ---------------------------------------------------------------------------------------------------------


def begin_step(mesh: Mesh, step: Any, name: str, settings: dict[str, Any] | None) -> None:
    """Before an @spmd function is first called, or first since a checkpoint was restored: go on with what was restored.

    Args:
        settings: the arguments of `data_parallel` that the bits depend on; they are noted, and compared with those of
            the resumed run. None for other functions.
    """
    run = mesh.run_state
    if unplaced.restored:
        _go_on_unplaced(mesh, at_first=name not in run.functions, of_steps=settings is not None)
    run.begun.add(step)
    run.functions[name] = run.functions.get(name, False) or settings is not None
    if settings is None or name == "<lambda>":  # all lambdas have this name
        return
    seen = run.settings.setdefault(name, [])
    if settings not in seen:
        seen.append(settings)
    taken = run.resumed
    if taken is not None and name not in taken.compared:
        taken.compared.add(name)
        steps = [
            dataclasses.replace(one, fingerprint=made_with)
            for one in taken.restored.values()
            for made_with in one.fingerprint.get("steps", {}).get(name, [])
        ]
        _compare(steps, settings, f" of {name}")


def _compare(restored: list[Restored], now: Mapping[str, Any], of: str) -> None:
    """Warn if the present settings match none of these checkpoints."""
    if restored and all(_other(one.fingerprint, now) for one in restored):
        last = restored[-1]
        before = {f"{key}{of}": value for key, value in last.fingerprint.items()}
        warn_if_other(before, {f"{key}{of}": value for key, value in now.items()}, last.where)


def warn_if_other(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Warn of what both have and differ in; the steps are compared when they run."""
    other = _other(before, now)
    if other:
        listed = "; ".join(f"{name}: {was}, now {is_}" for name, (was, is_) in other.items())
        warn(
            f"this run goes on from {where} under another fingerprint, so that its bits will differ from those of a "
            f"run that never stopped ({listed})"
        )


def _other(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    made_with = [settings for seen in before.get("steps", {}).values() for settings in seen]
    same_on_all = bool(made_with) and all(settings.get("shards") is not None for settings in made_with)
    passed_over = ("steps", "backend class") if same_on_all else ("steps",)
    return {
        name: (was, now[name])
        for name, was in before.items()
        if name in now and name not in passed_over and now[name] != was
    }
