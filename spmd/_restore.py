"""`restore`: the last checkpoint that is whole, on a mesh of any size or as plain tensors.

Invariant: nothing of a checkpoint is used before all of its files were found to be what was written.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from . import _checkpoint_background as under_way
from . import _checkpoint_files as files
from . import _checkpoint_tree as described
from ._checkpoint_files import Damaged
from ._fingerprint import fingerprint, take_up, warn_if_other
from ._loader import Loader
from .kernels.errors import SpecError, SpmdError, message
from .mesh import trees
from .mesh.array import Array
from .mesh.mesh import Mesh
from .mesh.placing import is_array, put
from .mesh.spec import P


def restore(path: str | os.PathLike, *, like: Any = None, mesh: Mesh | None = None) -> Any:
    """Read the last checkpoint that `save` wrote to a directory, or the one whose folder is given.

    A damaged one is named in a warning, and the one before it is read. The mesh goes on with the random numbers of the
    run that was saved.

    Args:
        path: as given to `save`, or the folder of one checkpoint.
        like: a tree such as was saved, needed where that had named tuples or other classes. `Loader`s in it are set to
            the position that was saved, and dicts in it may have fewer entries.
        mesh: place tensors on this mesh, of whatever size: sharded as they were if it cuts them in as many parts,
            else replicated. None gives plain tensors, or places them where `like` has Arrays.

    Returns:
        The tree; without `like` of dicts, lists and tuples, with a state dictionary for a `Loader`.

    Raises:
        SpecError: `like` is of another structure. SpmdError: there is no checkpoint, or none that is whole; the message
            names the files. What went wrong with one in the background, if nobody has seen it.
    """
    path = Path(path).absolute()
    for directory in (path, path.parent):
        under_way.settled(directory)
    if (path / files.MANIFEST).exists() or files.is_name(path.name):
        return _read(path, files.read_manifest(path), like, mesh)
    problems = []
    for _, folder in files.steps(path):
        try:
            manifest = files.read_manifest(folder)
        except Damaged as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}; going on from {folder}", stacklevel=2)
        return _read(folder, manifest, like, mesh)
    if problems:
        raise Damaged(message(f"{problems[0]}, and no checkpoint in {path} is whole", got="; ".join(problems)))
    raise SpmdError(message(f"there is no checkpoint in {path}", remedy="look at the path given to save"))


def _read(folder: Path, manifest: dict[str, Any], like: Any, mesh: Mesh | None) -> Any:
    placed = mesh or _mesh_of(like)
    before, now = described.deals(manifest["leaves"], like)
    warn_if_other({**manifest["fingerprint"], **before}, {**fingerprint(placed), **now}, str(folder))
    take_up(placed, manifest, str(folder))
    opened: dict[str, Any] = {}

    def value(key: str, entry: dict[str, Any], wanted: Any) -> Any:
        parts = []
        for _, file, name in sorted(manifest["pieces"][key]):
            if file not in opened:
                opened[file] = safe_open(folder / file, framework="pt")
            parts.append(opened[file].get_tensor(name))
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        tensor = torch.view_as_complex(tensor) if entry["dtype"].startswith("complex") else tensor
        where = mesh or (wanted.mesh if isinstance(wanted, Array) else None)
        if where is None:
            return torch.nn.Parameter(tensor, requires_grad=False) if entry.get("frozen") else tensor
        spec = P(*[tuple(one) if isinstance(one, list) else one for one in entry["spec"]])
        return put(tensor, spec if _fits(where, tensor, spec, entry) else P(), mesh=where)

    return described.rebuild(manifest["tree"], manifest["leaves"], like, value)


def _mesh_of(like: Any) -> Mesh | None:
    """The mesh that a run goes on on, as far as `like` says."""
    leaves = [] if like is None else trees.leaves(like, is_leaf=is_array)
    of_arrays = (leaf.mesh for leaf in leaves if isinstance(leaf, Array))
    of_loaders = (leaf.mesh for leaf in leaves if isinstance(leaf, Loader) and leaf.mesh is not None)
    return next(of_arrays, None) or next(of_loaders, None)


def _fits(mesh: Mesh, tensor: Tensor, spec: P, entry: dict[str, Any]) -> bool:
    """Whether to cut a value as it was: slices of a sharded optimizer are of no use to another number of ranks."""
    try:
        mesh.layout.check_shape(tuple(tensor.shape), spec)
    except SpecError:
        return False
    return not spec.entries or mesh.layout.parts(spec.dim_axes(0)) == entry["parts"]
