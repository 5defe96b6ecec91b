"""`save`: state that outlives its processes, written by the ranks that hold it, to be read by any number of them.

Values never change, so that a checkpoint in the background only has to hold on to them. Invariant: whatever happens to
the writer, the checkpoints that are there stay as they are, and what is read is what was written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels.arguments import checked_flag, checked_path, is_whole
from ..kernels.callsite import public
from ..kernels.errors import MeshError, SpecError, SpmdError
from ..kernels.interrupts import uninterrupted
from ..mesh import trees
from ..mesh.array import Array
from ..mesh.mesh import Mesh, nearest
from ..mesh.put import is_array
from ..mesh.region import current
from ..mesh.resizing.resize import one_at_a_time
from . import tree as described
from .agreement import agree, mesh_among
from .background import Saved, raise_failure, start
from .fingerprint import of_run
from .manifest import MANIFEST
from .schema import LARGEST
from .write import Writing


@public
def save(
    path: str | os.PathLike,
    tree: Any,
    *,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
) -> Future:
    """Write a checkpoint, `path/step-00000120` for step 120: there in full, or not at all.

    Every rank writes the shards that it holds, and a share of what all hold, to a safetensors file of its own. Launched
    ranks all call it, with a path that all of them see.

    Args:
        path: a directory, made if need be; `~` is the user's own.
        tree: of tensors, Arrays, numbers, strings, None, `Loader`s (their positions) and `Sampler`s.
        step: the checkpoint's number; an existing checkpoint of this number is replaced. None is the number after the
            last one there, and never one that another program or thread has taken meanwhile.
        keep: remove all but the last `keep` checkpoints afterwards; what is no checkpoint stays.
        background: return at once, and write while the program goes on. An error is raised by `result()` of the future,
            or else by the next `save` to this path, by the mesh when it closes, or printed when the program ends;
            `restore` from this path gives a warning. All of these wait until the checkpoint is done.

    Returns:
        A future of the checkpoint's folder; without `background` it is done.

    Raises:
        SpecError: a leaf cannot be saved, the path is a checkpoint's own folder, or something that is no checkpoint has
            the checkpoint's name. OSError: from the file system (a full disk, say), with the file's name; earlier
            checkpoints stay as they were. SpmdError: launched ranks do not agree on what to save; it says which differ
            in what. If one launched rank raises, all of them do.
    """
    if current() is not None:
        remedy = "save what the step returns; the handler of a signal, also in a step, sets a flag (docs/how_to.md)"
        raise MeshError("save was called inside a region", remedy=remedy)
    background = checked_flag("save", "background", background)
    path = checked_path("save", path, "the path comes first: save(path, tree)")
    leaves, _ = trees.flatten(tree, is_leaf=is_array)
    mesh = _mesh_of(leaves)
    # No other thread may resize the mesh until the leaves are described and their writing has begun.
    with contextlib.nullcontext() if mesh is None else one_at_a_time(mesh):
        future = _begun(path, tree, leaves, mesh, step=step, keep=keep, background=background)
    if not background:
        future.result()
    return future


def _begun(
    path: Path, tree: Any, leaves: list[Any], mesh: Mesh | None, *, step: int | None, keep: int | None, background: bool
) -> Saved:
    """A checkpoint on its way; without `background` it is done. For the arguments see `save`."""
    writes = mesh is not None and (not mesh.is_driver or any(isinstance(leaf, Array) for leaf in leaves))
    problem, started = _problem(path, step, keep), None
    if problem is None:
        step = None if step is None else int(step)
        try:
            structure, entries, tensors = described.describe(tree)
        except SpmdError as error:
            problem = error
    if mesh is not None and not mesh.is_driver:
        asked = {"path": path, "step": step, "keep": keep, "background": background}
        by_path = {} if problem else {entry["path"]: leaf for entry, leaf in zip(entries, leaves, strict=True)}
        started = agree(mesh, problem, asked, by_path)
    elif problem is not None:
        raise problem
    manifest = {"tree": structure, "leaves": entries, **of_run(mesh)}
    if mesh is not None:
        manifest["ranks"] = mesh.most_ranks
    on = mesh if writes else None
    writing = Writing(path, step, keep, on, manifest, tensors, background=background, started=started)
    future = Saved()
    try:
        writing.start()
        if background:
            _go_on(path, future, mesh, writing.finish)
        else:
            future.complete(writing.finish)
    except BaseException as error:
        if not (future.running() or future.done()):
            writing.abandon(error)
        if not isinstance(error, Exception):
            raise
        future.set_exception(error)
        if background:
            _go_on(path, future, mesh)
    return future


def _go_on(path: Path, future: Saved, mesh: Mesh | None, call: Callable[[], Any] | None = None) -> None:
    """As `background.start`; the mesh, too, waits for the future before it closes."""
    with uninterrupted():
        start(path, future, call)
        if mesh is not None:
            mesh.at_close = [*(one for one in mesh.at_close if not one.done()), future]


def _problem(path: Path, step: Any, keep: int | None) -> Exception | None:
    """Why nothing can be saved: bad arguments, or an error in the background that nobody has seen."""
    if keep is not None and (not is_whole(keep) or keep < 1):
        return SpecError("save got a bad keep", got=repr(keep), expected="at least 1, or None")
    if step is not None and (
        not isinstance(step, int | np.integer) or isinstance(step, bool) or not 0 <= step < LARGEST
    ):
        expected = "a whole number from 0 to 2**62 - 1, or None"
        return SpecError("save got a bad step", got=repr(step), expected=expected)
    if (path / MANIFEST).exists():
        got, remedy = str(path), "pass the directory that it is in, and step= to replace it"
        return SpecError("save got the folder of one checkpoint as the path", got=got, remedy=remedy)
    try:
        raise_failure(path)
    except Exception as error:
        return error
    return None


def _mesh_of(leaves: Sequence[Any]) -> Mesh | None:
    """The mesh of a run: that of its values, of its Loader, or the one that this process is a rank of."""
    here = nearest()
    return mesh_among(leaves) or (None if here is None or here.is_driver else here)
