"""Which leaves of a function's arguments are differentiated, and over which axes the gradient of each is summed.

A leaf that is known to be the same along an axis (it came in replicated, or it was `psum`med) has one gradient there,
the sum over all ranks; a leaf that is sharded along the axis has its own gradient on each rank. A leaf that was made in
the region and has no mark counts as the same where its bits agree. They may agree by chance, as each rank's part of a
bias does while it is still zero: such a leaf is refused by a call that a net follows (`mesh/replication/net.py`), and
by later ones if it differed on the first.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.call import labelled
from ..kernels.errors import SpecError
from ..mesh import trees
from ..mesh.array import Array
from ..mesh.region import Region, planned_session
from ..mesh.replication.net import active, differ_over, differs_over, mark
from ..mesh.replication.values import digest
from ..mesh.spec import Sharded, is_sharded
from ..mesh.strides import is_frozen, is_plain

_LARGE = 1 << 16  # bytes of a leaf; the zeros of a smaller one are written faster than pages are asked for


@dataclasses.dataclass(slots=True)
class Argument:
    """One leaf of the differentiated arguments.

    Attributes:
        leaf: the argument's leaf, as the caller gave it.
        primal: what the function is given in its place; None where there is nothing to differentiate.
        reduce: the axes to sum its gradient over.
        differs: the axes that it is marked with.
    """

    leaf: Any
    primal: Tensor | None = None
    reduce: tuple[str, ...] = ()
    differs: frozenset[str] | None = None

    def zeros(self) -> Any:
        """The gradient of a leaf that is not differentiated."""
        leaf = self.leaf
        if not isinstance(leaf, Tensor):
            return None
        size, axes = leaf.numel() * leaf.element_size(), differs_over(leaf)
        if size < _LARGE or leaf.device.type != "cpu" or type(leaf) not in (Tensor, nn.Parameter) or not is_plain(leaf):
            zeros = leaf.new_zeros(leaf.shape)
        else:
            # New pages are zero until they are written: a model's frozen weights would be written, and held, once more.
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
            zeros = torch.frombuffer(pages, dtype=leaf.dtype).view(leaf.shape)
        return zeros if axes is None else mark(zeros, axes)


def prepare(
    f: Callable, chosen: tuple, region: Region | None, over: tuple[str, ...]
) -> tuple[list[Argument], Any, Declared]:
    """The leaves of the chosen arguments of `f`, their treedef, and what they declare; `over`: the mean's axes."""
    leaves, treedef = trees.flatten(chosen)
    arguments, unknown, trained = [], [], []
    left: dict[Any, tuple[str, ...]] = {}  # `over` without the axes that a leaf differs over
    declares = declared_in(chosen, treedef)
    for leaf, axes in zip(leaves, declares.axes, strict=True):
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
        argument.differs, axes = known, known if declared is None else declared
        if axes is None and over:
            unknown.append(argument)
        if axes not in left:
            left[axes] = tuple(name for name in over if name not in (axes or ()))
        argument.reduce = left[axes]
    if unknown and region is not None:
        with labelled(declares.keys):
            _compare(unknown, region, over)
        differing = _known_to_differ(f, unknown, region, over)
        _check_agreement(
            unknown, differing, region, lambda: dict(zip(map(id, arguments), trees.paths(chosen), strict=True))
        )
    return arguments, treedef, declares


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
            "grad got an Array outside a region",
            got=repr(array),
            remedy="call it in an @spmd function, take the grad of an @spmd function, or pass array.full()",
        )
    return array.local


def _compare(unknown: list[Argument], region: Region, over: tuple[str, ...]) -> None:
    """Remove from `reduce` the axes along which the bits of a leaf differ, on any of the ranks of the mean.

    Along one axis they may agree on some of these ranks and differ on others, and all must make the same sums.
    """
    comm, layout = region.session.comm(over), region.session.layout
    if comm.size == 1:
        return
    everyone = dict(zip(comm.ranks, comm.all_gather_bytes(b"".join(digest(a.leaf) for a in unknown)), strict=True))
    for name in over:
        pairs = [(texts, everyone[layout.group(rank, (name,))[0]]) for rank, texts in everyone.items()]
        for index, argument in enumerate(unknown):
            part = slice(16 * index, 16 * index + 16)
            if any(texts[part] != first[part] for texts, first in pairs):
                argument.reduce = tuple(axis for axis in argument.reduce if axis != name)


def _known_to_differ(
    f: Callable, unknown: list[Argument], region: Region, over: tuple[str, ...]
) -> list[tuple[frozenset[str], str]]:
    """For each leaf, axes along which its values are known to differ, though they may agree now, and why.

    In a call that a net follows, they were computed from values that differ. In later calls of a signature they
    differed at its first one, in all gradients of `f` that were taken there (several in a loop).
    """
    key = (getattr(f, "__code__", type(f)), len(unknown))
    before = region.noted.differing.get(key)
    if region.notes_differing:
        found = [frozenset(over) - frozenset(argument.reduce) for argument in unknown]
        region.noted.differing[key] = [a & b for a, b in zip(found, before or found, strict=True)]
        before = None
    net = active()
    if net is None:
        return [(axes, "differed on the first call") for axes in before or [frozenset[str]()] * len(unknown)]
    reasons = [net.uncovered(argument.leaf, frozenset()) or ((), "") for argument in unknown]
    return [(frozenset(axes), why) for axes, why in reasons]


def _check_agreement(
    unknown: list[Argument],
    differing: list[tuple[frozenset[str], str]],
    region: Region,
    paths: Callable[[], dict[int, str]],
) -> None:
    """Refuse a leaf that agrees between ranks by chance.

    Args:
        differing: `_known_to_differ`.
        paths: gives the path of each argument, by its id.
    """
    for argument, (axes, why) in zip(unknown, differing, strict=True):
        by_chance = tuple(name for name in argument.reduce if name in axes) if argument.leaf.numel() else ()
        if by_chance and planned_session() is not None:  # a planned step has no values; real ones will differ
            argument.reduce = tuple(name for name in argument.reduce if name not in axes)
        elif by_chance:
            name = by_chance[0]
            raise SpecError(
                f"grad can't tell whether a leaf is each rank's own part or the same on all along {name!r}: "
                f"its values agree, and it {why}",
                got=f"argument {paths()[id(argument)]}, {list(argument.leaf.shape)}",
                where=region.session.where(),
                remedy=f'write Sharded(x, P("{name}")) for a part, and pmean(x, "{name}") for what is the same',
            )
