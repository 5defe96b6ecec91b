"""Calling a program on all ranks: arguments go out, results come back as Arrays.

Two ways to the same end: the driver sends the call (`DriverCall`), and a launched rank runs its own part
(`LaunchedCall`). Of each signature one of these is made at the first call, with all that the signature settles, and
looked up afterwards. Invariant: equal signatures mean equal structure, shapes, dtypes and specs of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from . import trees
from .ambient import Ambient, ambient
from .array import Array, Deal
from .counting.counted import note_mesh
from .driver.calls import DriverCall
from .launch.calls import LaunchedCall
from .mesh import Mesh
from .program import Program
from .put import as_tensor, place
from .remote.reference import Ref
from .request import Request


class HasRefs(Exception):
    """Among the arguments of a call are results of remote calls, which must be on the ranks first."""


SIGNATURES = 256  # of one program that are remembered


def call(
    mesh: Mesh,
    program: Program,
    source: Any,
    tree: tuple[tuple, dict[str, Any]],
    request: Callable[[], Request],
    *,
    check: str,
    holder: Any,
) -> Any:
    """Run a program on all ranks: its results, as a tree with Arrays for tensors.

    Args:
        source: the function whose changes mean that the program must be sent again.
        tree: (args, kwargs).
        request: checks the arguments; called for the first of each signature, and where something is wrong with them.
        check: when replicas of results are compared: "first", "always" or "never".
        holder: lives as long as the program is worth keeping on the ranks.
    """
    leaves, treedef = trees.flatten(tree)
    settings = ambient()
    note_mesh(mesh)
    session: Any = mesh.driver if mesh.is_driver else mesh.session
    if mesh.is_driver and session.resizing is not None:
        session.resizing.switch_if_ready()
    signature, deal = _signature(leaves, treedef, settings)
    calls = session.calls.setdefault(holder, {})
    known: DriverCall | LaunchedCall | None = calls.get(signature)
    if known is not None and not known.accepts(mesh, leaves):
        known = None
    if known is None:
        wanted = request()
        plan, moves = wanted.plan(settings), _moves(leaves, wanted)
        leaves = wanted.leaves
    else:
        plan, moves = known.plan, known.moves
        for index, spec in moves:
            leaves[index] = place(mesh, leaves[index], spec)
    donated = [leaves[index] for index, leaf in enumerate(plan.leaves) if leaf.donated] if plan.donating else []
    try:
        if mesh.is_driver:
            session.raise_failure()  # of what was called before, which it is then told of
        this = mesh.run_state.begin_call(program.name, counted=deal is None)
        key = (mesh.seed, "call", this.number) if deal is None else (mesh.seed, "batch", *deal.position)
        try:
            shipped = session.shipped.ship_program(source, program, holder) if mesh.is_driver else None
            if known is None or known.shipped is not shipped:
                made: Any = DriverCall if mesh.is_driver else LaunchedCall
                known = made(mesh, session, program, shipped, treedef, plan, moves)
            assert known is not None
            results = known(leaves, key, this, check=check)
        except BaseException:
            mesh.run_state.fail_call(this)
            raise
    finally:  # a call that fails may have begun to overwrite them
        for array in donated:
            array.donate(program.name)
    if calls.get(signature) is not known:
        if len(calls) >= SIGNATURES:
            del calls[next(iter(calls))]
        calls[signature] = known
    return results


def _signature(leaves: list[Any], treedef: Any, settings: Ambient | None) -> tuple[tuple, Deal | None]:
    """What must be the same for a later call to be like this one, and how a `Loader` dealt the batch in it.

    NumPy arrays become tensors.
    """
    deal: Deal | None = None
    parts: list[Any] = [treedef, settings]
    for index, leaf in enumerate(leaves):
        kind = type(leaf)
        if kind is Array:
            source = leaf._source
            deal = source.deal or deal
            parts.append(source.hints[leaf._index])
            continue
        if isinstance(leaf, np.ndarray):
            leaf = leaves[index] = as_tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            parts.append((tuple(leaf.shape), leaf.dtype))
        elif kind is Ref:
            raise HasRefs
        else:
            parts.append((kind, leaf if isinstance(leaf, int | str | None) else None))
    parts.append(None if deal is None else (deal.shards, deal.sizes))
    return tuple(parts), deal


def _moves(leaves: list[Any], wanted: Request) -> list[tuple[int, Any]]:
    """The Arrays that must be cut anew before a call, and how."""
    return [
        (index, wanted.specs[index])
        for index, (before, after) in enumerate(zip(leaves, wanted.leaves, strict=True))
        if type(before) is Array and after is not before
    ]
