"""`save`: state that outlives its processes, written by the ranks that hold it, to be read by any number of them.

Values never change, so that a checkpoint in the background only has to hold on to them. Invariant: whatever happens to
the writer, the checkpoints that are there stay as they are, and what is read is what was written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from . import _checkpoint_files as files
from . import _checkpoint_tree as described
from ._checkpoint_writing import Writing
from .kernels.errors import MeshError, SpecError, message
from .mesh import trees
from .mesh.array import Array
from .mesh.placing import is_array
from .mesh.region import current


class _Saved(Future):
    """A future that knows whether anybody has asked for its result."""

    told = False

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            self.told = self.done()


_in_background: dict[Path, _Saved] = {}


def save(
    path: str | os.PathLike,
    tree: Any,
    *,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
) -> Future:
    """Write a checkpoint, `path/step-00000120` for step 120: there in full, or not at all.

    Every rank writes the shards that it holds (of what all hold, its share) to a safetensors file of its own. On
    launched ranks all call it, with a path that all of them see.

    Args:
        path: a directory, made if need be.
        tree: of tensors, Arrays, numbers, strings, None, `Loader`s (their positions) and `Sampler`s.
        step: the number that the checkpoint is named by; None is the one after the last there.
        keep: remove all but the last so many checkpoints afterwards.
        background: return at once, and write while the program goes on; the next `save` to this path, or
            `result()` of what is returned, waits for it and raises what went wrong.

    Returns:
        A future of the checkpoint's folder; without `background` it is there.

    Raises:
        SpecError: a leaf cannot be saved. OSError: what the file system says, of a full disk for one; the checkpoints
            that were there before are as they were.
    """
    if current() is not None:
        raise MeshError(message("save was called inside a region", remedy="save what the step returns"))
    if keep is not None and keep < 1:
        raise SpecError(message("save got a bad keep", got=keep, expected="at least 1, or None"))
    if step is not None and (not isinstance(step, int) or step < 0):
        raise SpecError(message("save got a bad step", got=repr(step), expected="a whole number from 0 on, or None"))
    path = Path(path).absolute()
    before = _in_background.pop(path, None)
    if before is not None:
        wait([before])
        if not before.told:
            before.result()
    leaves, _ = trees.flatten(tree, is_leaf=is_array)
    mesh = next((leaf.mesh for leaf in leaves if isinstance(leaf, Array)), None)
    structure, entries, tensors = described.describe(tree)
    number = step if step is not None else next((last + 1 for last, _ in files.steps(path)), 0)
    writing = Writing(path, number, keep, mesh, {"tree": structure, "leaves": entries}, tensors)
    future = _Saved()
    if background:
        # Arrays never change; what the caller has of plain tensors may.
        writing.hold()
        try:
            writing.start()
        except BaseException as error:
            future.set_exception(error)
            _in_background[path] = future
            return future
        if mesh is not None:
            mesh.at_close = [*(one for one in mesh.at_close if not one.done()), future]
        threading.Thread(target=_settle, args=(future, writing.finish), name="spmd-checkpoint").start()
        _in_background[path] = future
        return future
    writing.start(wait=True)
    _settle(future, writing.finish)
    future.result()
    if mesh is not None and not mesh.is_driver:
        mesh.run(_nothing)  # no rank goes on before the checkpoint is there
    return future


def _settle(future: Future, call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _nothing() -> None:
    pass
