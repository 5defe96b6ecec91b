"""A program on one rank: cut what came whole, run the body as a region, and give each result its spec.

`execute` does the same in a driver's rank and in a launched one. Invariant: the body's tensors share memory with the
values that were passed, which may not be written to, but are objects of their own: nothing set on them lasts.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels.errors import SpecError, message
from . import donation, trees
from .agreement import Leaving, digest, path_in
from .array import Array
from .frozen import frozen_as, is_frozen
from .rank import RankSession
from .region import Region, generators, inside, mark, reseed, restore_generators
from .spec import REPLICATED, P, is_sharded, is_spec

_structures: dict[Any, tuple[Any, list[P | None]]] = {}  # what `_stripped` found of those that came back


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What is shipped to the ranks once: a body and how its results are read.

    Attributes:
        body: called with the arguments' local parts.
        out_specs: prefix tree of P for the results.
        name: for messages.
        batch_axis: the axis over which the argument `batch` is split (data_parallel), or None.
    """

    body: Callable[..., Any]
    out_specs: Any
    name: str
    batch_axis: str | None = None


class Entering(NamedTuple):
    """A leaf of the arguments on its way in.

    Attributes:
        spec: how a tensor is cut.
        whole: it still has to be (else it is this rank's shard already).
        donated: the caller gives its memory up.
    """

    value: Any
    spec: P = REPLICATED
    whole: bool = False
    donated: bool = False


def execute(
    session: RankSession,
    mesh: Any,
    program: Program,
    treedef: Any,
    entering: list[Entering],
    *,
    key: tuple,
    batch_total: int | None,
    dealt: int | None,
    verify: bool,
    before: list[Leaving] | None = None,
) -> tuple[Any, list[Any], list[Leaving]]:
    """Run a program on this rank: (the results' treedef, their local leaves, what to say of each).

    Args:
        before: what was said of an earlier call's results, without digests; what is the same is not made anew.
    """
    local = _enter(session, entering)
    versions = [None if not isinstance(x, torch.Tensor) or x.is_inference() else x._version for x in local]
    args, kwargs = trees.unflatten(treedef, local)
    batch_axis = program.batch_axis if batch_total is not None else None
    region = Region(session, key, mesh, batch_total=batch_total, batch_axis=batch_axis, dealt=dealt)
    state = generators() if session.launched else None
    reseed(region, session.rank)
    try:
        with inside(region), torch.enable_grad():
            result = program.body(*args, **kwargs)
    finally:
        if state is not None:
            restore_generators(state)
    for index, (value, version) in enumerate(zip(local, versions, strict=True)):
        if version is not None and type(value) is not donation.Taken and value._version != version:
            raise SpecError(
                message(
                    f"{program.name} changed its input {describe_path(path_in(treedef, index))} in place",
                    where=session.where(),
                    remedy="a step must be pure: write x = x + y instead of x += y, or clone the input first",
                )
            )
    treedef, leaves, said = _leave(session, program, result, verify, before)
    donating = any(leaf.donated for leaf in entering)
    donation.settle([leaf.value for leaf in entering], local, leaves, donating=donating)
    return treedef, leaves, said


def _enter(session: RankSession, entering: list[Entering]) -> list[Any]:
    """This rank's part of every leaf; a tensor that comes twice stays one tensor."""
    ids = [id(leaf.value) for leaf in entering if isinstance(leaf.value, torch.Tensor)]
    if len(set(ids)) == len(ids):
        return [
            _local(session, leaf, alone=True) if isinstance(leaf.value, torch.Tensor) else leaf.value
            for leaf in entering
        ]
    local: list[Any] = []
    times = collections.Counter(ids)
    same: dict[Any, torch.Tensor] = {}
    for leaf in entering:
        value = leaf.value
        if isinstance(value, torch.Tensor):
            which = (id(value), leaf.spec, leaf.whole, leaf.donated)
            if which not in same:
                same[which] = _local(session, leaf, alone=times[id(value)] == 1)
            value = same[which]
        local.append(value)
    return local


def _local(session: RankSession, leaf: Entering, *, alone: bool) -> torch.Tensor:
    """This rank's part of a leaf, with what is known of it noted on it."""
    value = leaf.value
    if leaf.whole and leaf.spec.entries:
        value = session.placed(session.layout.take(value, leaf.spec, session.rank))
    elif leaf.whole and value.device != session.device:
        value = frozen_as(value, session.placed(value.detach()))
    elif not is_frozen(value):
        owned = alone and donation.is_owner(value)
        value = value.detach()
        if leaf.donated:
            donation.offer(value, owned=owned)
    value._spmd_spec = leaf.spec
    return mark(value, leaf.spec.axes)


def describe_path(path: str) -> str:
    """`argument 0['w']` from a path into (args, kwargs).

    >>> describe_path("[0][1]['w']"), describe_path("[1]['batch'][0]")
    ("argument 1['w']", 'argument batch[0]')
    """
    which, _, rest = path[4:].partition("]")
    return f"argument {which.strip(chr(39))}{rest}" if path.startswith(("[0][", "[1][")) else path


def _leave(
    session: RankSession, program: Program, result: Any, verify: bool, before: list[Leaving] | None
) -> tuple[Any, list[Any], list[Leaving]]:
    leaves, treedef = trees.flatten(result)
    treedef, declared = _stripped(treedef, leaves)
    if any(type(leaf) is Array for leaf in leaves):
        declared = [leaf.spec if type(leaf) is Array else own for leaf, own in zip(leaves, declared, strict=True)]
        leaves = [leaf.local if type(leaf) is Array else leaf for leaf in leaves]
    try:
        specs = trees.broadcast_to(program.out_specs, treedef, is_leaf=is_spec)
    except ValueError:
        raise SpecError(
            message(
                f"out_specs of {program.name} do not fit what it returned",
                got=f"{program.out_specs!r} for {trees.shown(result)}",
                expected="a prefix of the result's tree",
                remedy="give one P for all results, or one per result",
            )
        ) from None
    said: list[Leaving] = []
    axes = len(session.layout.names)
    known: list[Any] = [None] * len(leaves) if verify or before is None or len(before) != len(leaves) else before
    for index, (leaf, own, known_one) in enumerate(zip(leaves, declared, known, strict=True)):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(leaf)
        if not isinstance(leaf, torch.Tensor):
            said.append(Leaving(None, value=leaf))
            continue
        spec = own or specs[index] or REPLICATED
        if spec.entries:
            _check_result(session, program, treedef, index, leaf, spec)
        leaves[index] = leaf = leaf if is_frozen(leaf) else leaf.detach()
        if known_one is not None and known_one.dtype is leaf.dtype and known_one[:2] == (spec, leaf.shape):
            said.append(known_one)
            continue
        compare = verify and len(spec.axes) < axes
        said.append(Leaving(spec, tuple(leaf.shape), leaf.dtype, None, digest(leaf) if compare else None))
    _settle(session, leaves)
    return treedef, leaves, said


def _stripped(treedef: Any, leaves: list[Any]) -> tuple[Any, list[P | None]]:
    """A result's structure without the nodes that say how its leaves are cut, and for each leaf what its node says."""
    found = _structures.get(treedef)
    if found is not None:
        return found
    # Of the leaves themselves: classes may check what they are made of.
    nodes, outer = trees.flatten(trees.unflatten(treedef, leaves), is_leaf=is_sharded)
    declared: list[P | None] = []
    for node in nodes:
        declared.extend([node.spec] * len(trees.leaves(node.local)) if is_sharded(node) else [None])
    local = [node.local if is_sharded(node) else node for node in nodes]
    if len(_structures) >= 256:
        _structures.clear()
    found = _structures[treedef] = trees.flatten(trees.unflatten(outer, local))[1], declared
    return found


def _settle(session: RankSession, leaves: list[Any]) -> None:
    """Copy results out of shared memory, unless they make up most of a block: then they keep it as theirs.

    A block goes back when nothing refers to it. A small view (a loss beside a bucket of gradients) would hold all of
    it; new parameters, side by side in one block that all ranks read, are better left where they are.
    """
    blocks: dict[int, list[int]] = {}
    if not session.leases:
        return
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and session.is_leased(leaf):
            blocks.setdefault(leaf.untyped_storage().data_ptr(), []).append(index)
    for members in blocks.values():
        used = sum(leaves[index].numel() * leaves[index].element_size() for index in members)
        if 2 * used < leaves[members[0]].untyped_storage().nbytes():
            for index in members:
                leaves[index] = leaves[index].clone()


def _check_result(
    session: RankSession, program: Program, treedef: Any, index: int, leaf: torch.Tensor, spec: P
) -> None:
    session.layout.check(spec, where=f"out_specs of {program.name}")
    if len(spec.entries) > leaf.dim():
        raise SpecError(
            message(
                f"result {path_in(treedef, index)} of {program.name} has fewer dimensions than its spec",
                got=f"shape {tuple(leaf.shape)} with {spec}",
                where=session.where(),
                remedy="reshape it, or give it a shorter spec",
            )
        )
