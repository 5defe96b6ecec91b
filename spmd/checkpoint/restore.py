"""`restore`: the last checkpoint that is whole, on a mesh of any size or as plain tensors.

Invariant: nothing of a checkpoint is used before all of its files are checked to be what was written, and launched
ranks all use the same one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ..kernels.arguments import checked_path
from ..kernels.callsite import public, warn
from ..mesh import trees
from ..mesh.array import Array
from ..mesh.mesh import Mesh, resolve
from ..mesh.put import is_array, put
from ..mesh.region import current
from . import leaves
from . import tree as described
from .agreement import itself, mesh_among
from .background import failures
from .fingerprint import fingerprint, resume, warn_if_other
from .read import Damaged, Gone, Opened, open_last

# How often launched ranks look for the same checkpoint, and how long they wait in between for their file systems.
TRIES = 5
PAUSE_SECONDS = 0.2


@public
def restore(path: str | os.PathLike, *, like: Any = None, mesh: Mesh | None = None) -> Any:
    """Read the last checkpoint that `save` wrote to a directory, or the one whose folder is given.

    If a checkpoint is damaged, or could not be written in the background, a warning names it, and the one before it is
    read. The mesh continues the random numbers of the saved run, if that got further than the mesh; after a call that
    failed it goes back to them. All launched ranks of a mesh call it, and use the checkpoint that the first one finds.

    Args:
        path: as given to `save`, or the folder of one checkpoint.
        like: a tree of the structure that was saved; needed if that had named tuples or other classes, which are taken
            from it. `Loader`s in it are set to the saved position, and a loop over one continues there. A dict in it
            may have fewer entries than were saved (all come back), or more, if the saved dict was empty. Its tensors
            must have the saved shapes and dtypes. None in it stands for anything, even a whole tree of dicts, lists and
            tuples.
        mesh: place tensors on this mesh, of any size: cut like the Array at their place in `like`, or else as they were
            saved if the axes that cut them have the same sizes here, or else replicated. None gives plain tensors, or,
            where `like` has an Array, places them on its mesh.

    Returns:
        The tree; without `like` it consists of dicts, lists and tuples, with a state dictionary for a `Loader`. Tensors
        keep their strides, except for gaps and overlaps, and are parameters, and trainable, if they were; they do not
        depend on the files any more.

    Raises:
        SpecError: `like` is of another structure, or a leaf of another shape, dtype or kind. SpmdError: there is no
            checkpoint, none is whole, or the ranks do not see the same one; the message names the files.
    """
    path = checked_path("restore", path, "write restore(path, like=tree)")
    for directory in (path, path.parent):
        for error in failures(directory):
            warn(f"a checkpoint could not be written in the background ({type(error).__name__}: {error})")
    onto = None if mesh is None else resolve(mesh)
    if onto is None and like is not None:
        onto = mesh_among(trees.leaves(like, is_leaf=is_array))
    opened, problems = _open(path, onto)
    with opened:
        for problem in problems:
            warn(f"{problem}; going on from {opened.folder}")
        found = _read(opened, like, mesh, onto)
    if onto is not None:
        onto.run_state.saved = str(opened.folder)
    return found


def _open(path: Path, mesh: Mesh | None) -> tuple[Opened, list[str]]:
    if mesh is None or mesh.is_driver or current() is not None:
        return open_last(path)
    return _open_together(path, mesh)


def _open_together(path: Path, mesh: Mesh) -> tuple[Opened, list[str]]:
    """On launched ranks, whose file systems may show them different things: the first one's choice, or an error."""
    for number in range(TRIES):
        time.sleep(PAUSE_SECONDS if number else 0)
        mine: Opened | Exception | None = None
        chosen: Any = None
        try:
            if mesh.rank == 0:
                mine, chosen = _chosen(path)
            with mesh.run_state.uncounted():
                chosen = mesh.run(itself, chosen)[0]
            if isinstance(chosen, Exception):
                raise chosen
            name, digest, folder, problems = chosen
            if mine is None:
                mine = _same(path / name, digest)
            with mesh.run_state.uncounted():
                wrong = mesh.run(itself, str(mine) if isinstance(mine, Exception) else None)
        except BaseException:
            if isinstance(mine, Opened):
                mine.close()
            raise
        if isinstance(mine, Opened):
            if not any(wrong):
                return mine, problems
            mine.close()
    raise Damaged(
        "the ranks do not see the same checkpoint",
        got="; ".join(f"on rank {rank}: {text}" for rank, text in enumerate(wrong) if text),
        expected=f"{folder} as the first has it",
        remedy="give all ranks the same file system, and let nobody write there meanwhile",
    )


def _chosen(path: Path) -> tuple[Opened | None, Any]:
    """The first rank's choice, and what the others are told: name, digest, folder and problems, or the error."""
    try:
        opened, problems = open_last(path)
    except Exception as error:
        return None, error
    return opened, (os.path.relpath(opened.folder, path), opened.digest, str(opened.folder), problems)


def _same(folder: Path, digest: str) -> Opened | Exception:
    try:
        opened = Opened(Path(os.path.normpath(folder)))
    except (Damaged, Gone, OSError) as error:
        return error
    if opened.digest == digest:
        return opened
    opened.close()
    return Damaged(f"{folder} is another checkpoint", got=opened.digest[:12], expected=digest[:12])


def _read(opened: Opened, like: Any, mesh: Mesh | None, onto: Mesh | None) -> Any:
    manifest, where = opened.manifest, str(opened.folder)
    ranks = manifest.get("ranks", 1)
    described.check(manifest["tree"], manifest["leaves"], like, ranks)
    before, now = described.deals(manifest["leaves"], like)
    warn_if_other({**manifest["fingerprint"], **before}, {**fingerprint(onto), **now}, where)
    resume(onto, manifest, where)
    if onto is not None:
        onto.most_ranks = max(onto.most_ranks, ranks)  # restored values keep their length

    def value(entry: dict[str, Any], wanted: Any) -> Any:
        found = [(position, opened.tensor(file, name)) for position, file, name in manifest["pieces"][entry["key"]]]
        tensor = leaves.marked(entry, leaves.whole(entry, found))
        where = mesh or (wanted.mesh if isinstance(wanted, Array) else None)
        return tensor if where is None else put(tensor, leaves.spec_on(where, entry, wanted), mesh=where)

    return described.rebuild(manifest["tree"], manifest["leaves"], like, value)
