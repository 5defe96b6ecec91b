"""Which leaves of a function's arguments are differentiated, and over which axes the gradient of each is summed.

A leaf that is known to be the same along an axis (it came in replicated, or it was `psum`med) has one gradient there,
the sum over all ranks; a leaf that is sharded along the axis has its own gradient on each rank. A leaf that was made in
the region and has no mark counts as the same where its bits agree. They may agree by chance, as each rank's part of a
bias does while it is still zero: a call that a net follows (`mesh/replication/net.py`) refuses such a leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels.call import labelled
from ..kernels.errors import SpecError, message
from ..mesh import trees
from ..mesh.array import Array
from ..mesh.region import Region, planned_session
from ..mesh.replication.net import active, differ_over
from ..mesh.replication.values import digest
from ..mesh.spec import Sharded, is_sharded
from ..mesh.strides import is_frozen


@dataclasses.dataclass(slots=True)
class Argument:
    """One leaf of the differentiated arguments.

    Attributes:
        leaf: the argument's leaf, as the caller gave it.
        primal: what the function is given in its place; None where there is nothing to differentiate.
        reduce: the axes to sum its gradient over.
    """

    leaf: Any
    primal: Tensor | None = None
    reduce: tuple[str, ...] = ()

    def zeros(self) -> Any:
        """The gradient of a leaf that is not differentiated."""
        return self.leaf.new_zeros(self.leaf.shape) if isinstance(self.leaf, Tensor) else None


def prepare(chosen: tuple, region: Region | None, over: tuple[str, ...]) -> tuple[list[Argument], Any]:
    """The leaves of the chosen arguments, and their treedef; `over` are the axes of the mean."""
    leaves, treedef = trees.flatten(chosen)
    arguments, unknown, trained = [], [], []
    left: dict[Any, tuple[str, ...]] = {}  # `over` without the axes that a leaf differs over
    declared_here = declared_in(chosen, treedef)
    for leaf, axes in zip(leaves, declared_here.axes, strict=True):
        kind = type(leaf)
        if kind is not Tensor and isinstance(leaf, Array):
            axes = leaf.spec.axes
            leaf = _local(leaf, region)
        argument = Argument(leaf)
        arguments.append(argument)
        if kind is Tensor:
            trains = leaf.dtype.is_floating_point or leaf.dtype.is_complex
        else:
            trains = is_inexact(leaf) and not is_frozen(leaf)
        if trains:
            argument.primal = leaf
            trained.append((argument, axes))
    noted = differ_over([argument.leaf for argument, _ in trained])
    for (argument, declared), known in zip(trained, noted, strict=True):
        axes = known if declared is None else declared
        if axes is None and over:
            unknown.append(argument)
        if axes not in left:
            left[axes] = tuple(name for name in over if name not in (axes or ()))
        argument.reduce = left[axes]
    if unknown and region is not None:
        with labelled(declared_here.keys):
            _compare(unknown, region, over)
        _check_agreement(unknown, region, lambda: dict(zip(map(id, arguments), trees.paths(chosen), strict=True)))
    return arguments, treedef


class Declared(NamedTuple):
    """`declared_axes` of a tree, whether it has `Sharded` nodes (even without leaves), and its keys as text."""

    axes: list[frozenset[str] | None]
    any: bool
    keys: str


_declared: dict[Any, Declared] = {}  # by structure
_STRUCTURES = 256


def declared_in(tree: Any, treedef: Any) -> Declared:
    """What a tree declares; cached, since it depends on the tree's structure alone."""
    structure = treedef
    try:
        found = _declared.get(treedef)
    except TypeError:  # a node type that the user registered may have metadata that can't be hashed
        found, treedef = None, None
    if found is None:
        if len(_declared) >= _STRUCTURES:
            _declared.clear()
        any_sharded = any(map(is_sharded, trees.leaves(tree, is_leaf=is_sharded)))
        keys = trees.keys_text(structure.child(0) if structure.num_children == 1 else structure)
        keys = keys and f"of {keys}"
        found = Declared(declared_axes(tree), any_sharded, keys)
        if treedef is not None:
            _declared[treedef] = found
    return found


def declared_axes(tree: Any) -> list[frozenset[str] | None]:
    """For each leaf, the axes of the `Sharded` node that it is in; None if it is in none."""
    found: list[frozenset[str] | None] = []
    for node in trees.leaves(tree, is_leaf=is_sharded):
        if isinstance(node, Sharded):
            found.extend([node.spec.axes] * len(trees.leaves(node.local)))
        else:
            found.append(None)
    return found


def is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)


def _local(array: Array, region: Region | None) -> Tensor:
    if region is None:
        raise SpecError(
            message(
                "grad got an Array outside a region",
                got=repr(array),
                remedy="call it in an @spmd function, take the grad of an @spmd function, or pass array.full()",
            )
        )
    return array.local


def _compare(unknown: list[Argument], region: Region, over: tuple[str, ...]) -> None:
    """Remove from `reduce` the axes along which the bits of a leaf differ."""
    mine = b"".join(digest(argument.leaf) for argument in unknown)
    for name in over:
        comm = region.session.comm(name)
        if comm.size == 1:
            continue
        everyone = comm.all_gather_bytes(mine)
        for index, argument in enumerate(unknown):
            part = slice(16 * index, 16 * index + 16)
            if any(other[part] != mine[part] for other in everyone):
                argument.reduce = tuple(axis for axis in argument.reduce if axis != name)


def _check_agreement(unknown: list[Argument], region: Region, paths: Callable[[], dict[int, str]]) -> None:
    """In a call that a net follows, refuse a leaf that agrees between ranks but was computed from values that differ.

    Args:
        paths: gives the path of each argument, by its id.
    """
    net = active()
    if net is None:
        return
    for argument in unknown:
        found = net.of(argument.leaf)
        by_chance = tuple(name for name in argument.reduce if name in found.axes) if argument.leaf.numel() else ()
        if by_chance and planned_session() is not None:  # a planned step has no values; real ones will differ
            argument.reduce = tuple(name for name in argument.reduce if name not in found.axes)
        elif by_chance:
            name, (_, why) = by_chance[0], net.uncovered(argument.leaf, frozenset()) or ((), "")
            raise SpecError(
                message(
                    f"grad can't tell whether a leaf is each rank's own part or the same on all along {name!r}: "
                    f"its values agree, and it {why}",
                    got=f"argument {paths()[id(argument)]}, {list(argument.leaf.shape)}",
                    where=region.session.where(),
                    remedy=f'write Sharded(x, P("{name}")) for a part, and pmean(x, "{name}") for what is the same',
                )
            )
