"""What launched ranks are about to save, compared before anything is written.

Each rank runs the whole script, so one of them may come with another tree, path or step. Invariant: all ranks
go on, or all raise the same error, which says which ranks differ in what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..data.loader import Loader
from ..kernels.errors import SpmdError, dtype_name, kind_text
from ..mesh.array import Array
from ..mesh.failure import ranks_text
from ..mesh.mesh import Mesh
from ..mesh.put import as_tensor
from . import folder as folders
from .write import attempt, begin

SHOWN = 5  # of what differs


def agree(mesh: Mesh, problem: Exception | None, asked: Mapping[str, Any], leaves: Mapping[str, Any]) -> Any:
    """Begin a checkpoint, or raise the error of a rank that failed, or one that says how the ranks differ.

    All ranks of a launched mesh call it; they wait for each other once.

    Args:
        problem: why this rank can't save.
        asked: the arguments of `save` by name.
        leaves: by path; empty if this rank can't save.

    Returns:
        The folder and its number, or the error if the first rank can't make one.
    """
    mine = {**{name: str(value) for name, value in asked.items()}, **_kinds(leaves)}
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    outcome = attempt(begin, asked["path"], asked["step"]) if mesh.rank == 0 and problem is None else None
    try:
        with mesh.run_state.uncounted():
            everyones = mesh.run(itself, (problem, digest, outcome))
        for failed, *_ in everyones:
            if failed is not None:
                raise failed
        if len({digest for _, digest, *_ in everyones}) > 1:
            with mesh.run_state.uncounted():
                everyone = mesh.run(itself, mine)
            raise SpmdError(
                "the ranks do not agree on what to save",
                got="; ".join(_differences(everyone)) or "the same leaves in another order",
                where=mesh.describe(),
                remedy="have all ranks call save with the same arguments, and leave out what differs between them",
            )
    except BaseException:
        if isinstance(outcome, tuple):
            folders.abandon(outcome[0])
        raise
    return everyones[0][2]


def itself(x: Any) -> Any:
    return x


def mesh_among(leaves: Sequence[Any]) -> Mesh | None:
    """The mesh of the first Array among these, or else of the first Loader that was given one."""
    of_arrays = (leaf.mesh for leaf in leaves if isinstance(leaf, Array))
    of_loaders = (leaf.mesh for leaf in leaves if isinstance(leaf, Loader) and leaf.mesh is not None)
    return next(of_arrays, None) or next(of_loaders, None)


def _kinds(leaves: Mapping[str, Any]) -> dict[str, str]:
    return {f"leaf {path or 'the whole'}": _kind(as_tensor(leaf)) for path, leaf in leaves.items()}


def _kind(leaf: Any) -> str:
    """What the ranks must agree on. Floats, such as times, may differ: the first rank's are saved.

    Of Arrays each rank saves its part, so all have to be of the same call.
    """
    if isinstance(leaf, Array):
        source: Any = leaf._source
        return ", ".join(filter(None, (kind_text(leaf.dtype, leaf.shape), str(leaf.spec), source.origin(leaf._index))))
    if isinstance(leaf, torch.Tensor):
        kind = "" if leaf.layout is torch.strided else f", {leaf.layout}"
        shape = "(nested)" if leaf.is_nested else list(leaf.shape)
        return f"{dtype_name(leaf.dtype)}{shape}{kind}, a plain tensor{' on meta' * leaf.is_meta}"
    if isinstance(leaf, Loader):
        return f"a Loader at {leaf.state_dict()}"
    if isinstance(leaf, bool | str | type(None)):
        return repr(leaf)
    if isinstance(leaf, int | np.integer):
        return hex(leaf) if abs(int(leaf)) >> 64 else str(int(leaf))
    return type(leaf).__name__


def _differences(everyone: list[dict[str, str]]) -> list[str]:
    found = []
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        groups: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            groups.setdefault(theirs.get(name, "nothing"), []).append(rank)
        if len(groups) > 1:
            found.append(f"{name}: {', '.join(f'{what} on {ranks_text(ranks)}' for what, ranks in groups.items())}")
    return [*found[:SHOWN], *([f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else [])]
