"""Putting together what the ranks report of their results: do they agree, and what global values do they form?

Each rank gives an `OutputMeta` for every leaf; `assemble` finds the global shapes, or raises an error that names the
leaf and the ranks that differ. The driver and launched ranks both use it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...kernels.errors import SpecError, kind_text
from .. import trees
from ..array import Array, Meta, meta
from ..failure import ranks_text
from ..spec import Layout, P, ragged_shape
from . import values
from .net import RANDOM
from .reports import OutputMeta, Outputs, decode_all, told_among, with_values
from .values import Check


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A leaf of the results as a whole: a value that is not a tensor (`meta` is None), or what an Array shows."""

    meta: Meta | None
    value: Any = None
    shapes: tuple[tuple[int, ...], ...] = ()


class Assembled:
    """The results of a call as a whole.

    Args:
        leaves: what each leaf is as a whole.
        told: the indices of those that are told with each call.

    Attributes:
        metas: what the Arrays show that stand for tensors.
        arrays_only: whether all leaves are tensors.
    """

    __slots__ = ("arrays_only", "leaves", "metas", "told", "treedef")

    def __init__(self, treedef: Any, leaves: Sequence[Result], told: Sequence[int] = ()):
        self.treedef, self.leaves, self.told = treedef, leaves, told
        self.metas = tuple(leaf.meta for leaf in leaves if leaf.meta is not None)
        self.arrays_only = len(self.metas) == len(leaves)

    def tree(self, arrays: Iterable[Array], told: Sequence[Any] = ()) -> Any:
        """The tree that the call returns, with these Arrays for tensors, and what it has told."""
        rest = iter(arrays)
        leaves = [leaf.value if leaf.meta is None else next(rest) for leaf in self.leaves]
        for index, value in zip(self.told, told, strict=True):
            leaves[index] = value
        return trees.unflatten(self.treedef, leaves)


class Remedies(NamedTuple):
    """What to do about results that differ between ranks: in shapes, in structure, in value ("": as they differ)."""

    shapes: str = "return shards of one global value, or declare another spec"
    trees: str = "return the same structure on every rank"
    values: str = ""


OF_RESULTS = Remedies()


def assemble(
    layout: Layout,
    outputs: Mapping[int, Outputs],
    *,
    name: str,
    where: str,
    prints: Sequence[bytes] = (),
    check: Check = Check.SCALARS,
    ragged: bool = False,
    remedies: Remedies = OF_RESULTS,
) -> Assembled:
    """The results as a whole.

    Args:
        outputs: by rank.
        name, where: the program and the mesh, for messages.
        prints, check: each rank's prints of its tensors, and what is compared: with `Check.NOTHING` no values at all.
        ragged: shards may differ in dimensions that are not cut, which then have the size `RAGGED`.
        remedies: what to do about results that do not fit together.

    Raises:
        SpecError: the ranks disagree.
    """
    told = told_among(outputs[0][1])
    if prints:
        reports = {rank: with_values(metas, prints[rank]) for rank, (_, metas) in outputs.items()}
        outputs = {rank: (outputs[rank][0], metas) for rank, (metas, _) in reports.items()}
        prints = [reports[rank][1] for rank in range(len(prints))]
    treedef, first = outputs[0]
    for rank, (other, _) in outputs.items():
        if other != treedef:
            raise SpecError(
                f"{name} returned different trees on rank 0 and rank {rank}",
                got=f"{treedef} and {other}",
                where=where,
                remedy=remedies.trees,
            )
    rank_prints = [values.split(mine, outputs[rank][1], check, len(layout.names)) for rank, mine in enumerate(prints)]
    results = []
    for index, leaf in enumerate(first):
        leaves = {rank: its[index] for rank, (_, its) in outputs.items()}
        what = functools.partial(called, treedef, index, name)  # finding paths takes longer than all of this
        if any(one.spec != leaf.spec or one.dtype != leaf.dtype for one in leaves.values()):
            kinds = "; ".join(f"{ranks_text([rank])}: {_kind(one)}" for rank, one in leaves.items())
            raise SpecError(
                f"{what()} differs in kind between ranks",
                got=kinds,
                where=where,
                remedy="return the same kind of value on every rank",
            )
        if check:
            _check_replicas(layout, leaves, [its[index] for its in rank_prints], what, where, remedies.values)
        if leaf.spec is None:
            results.append(Result(None, value=leaf.value))
            continue
        shapes = tuple(leaves[rank].shape for rank in range(layout.size))
        _check_shapes(layout, shapes, leaf.spec, what, where, remedies.shapes, ragged=ragged)
        assert leaf.dtype is not None
        shape = layout.global_shape(shapes, leaf.spec)
        if ragged:
            shape = ragged_shape(shape, shapes, leaf.spec)
        about = meta(shape, leaf.dtype, leaf.spec, unusual(layout, shapes, shape, leaf.spec))
        results.append(Result(about, shapes=shapes))
    return Assembled(treedef, results, told)


def unusual(
    layout: Layout, shapes: tuple[tuple[int, ...], ...], shape: tuple[int, ...], spec: P
) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of all ranks' shards, if these are other ones than `Layout.slices` would cut; else None.

    >>> layout = Layout((("data", 2),))
    >>> unusual(layout, ((4,), (3,)), (7,), P("data")), unusual(layout, ((4,), (2,)), (6,), P("data"))
    (None, ((4,), (2,)))
    """
    if all(each == shapes[0] for each in shapes):
        return None
    dims = range(len(spec.entries))
    usual = [layout.shard_shape(shape, spec, rank) for rank in range(layout.size)]
    is_unusual = any(its[dim] != own[dim] for its, own in zip(shapes, usual, strict=True) for dim in dims)
    return shapes if is_unusual else None


@functools.lru_cache(maxsize=64)
def _of_batch(
    layout: Layout, descriptions: tuple[bytes, ...], name: str, where: str, ragged: bool, remedies: Remedies
) -> Assembled:
    return assemble(layout, decode_all(descriptions), name=name, where=where, ragged=ragged, remedies=remedies)


def of_batch(
    layout: Layout, descriptions: tuple[bytes, ...], *, name: str, where: str, ragged: bool = False, remedies: Remedies
) -> Assembled:
    """`assemble` for a batch, with a cache: most batches have the same descriptions as an earlier one."""
    found = _of_batch(layout, descriptions, name, where, ragged, remedies)
    own = [Result(None, copy.deepcopy(leaf.value)) if leaf.meta is None else leaf for leaf in found.leaves]
    return Assembled(found.treedef, own)


def called(treedef: Any, index: int, name: str) -> str:
    """What a leaf of the results is called, for messages."""
    return f"result {path_in(treedef, index)} of {name}"


def path_in(treedef: Any, index: int) -> str:
    """Where a leaf is in a tree, as `['w'][0]`."""
    return trees.places(treedef)[index] or "(the whole of it)"


def _check_replicas(
    layout: Layout, leaves: dict[int, OutputMeta], prints: list[Any], what: Callable[[], str], where: str, remedy: str
) -> None:
    """Refuse a result that should be the same on several ranks and is not."""
    variants: dict[int, list[list[int]]] = {}  # owner -> groups of ranks that agree
    for rank, leaf in leaves.items():
        groups = variants.setdefault(0 if leaf.spec is None else layout.owner(leaf.spec, rank), [])
        for group in groups:
            alike = same(leaves[group[0]], leaf)
            if alike and (not prints or values.same_bytes(prints[group[0]], prints[rank], leaf.shape)):
                group.append(rank)
                break
        else:
            groups.append([rank])
    varying = next((leaf.varying for leaf in leaves.values() if leaf.varying is not None), None)
    apart = next((groups for groups in variants.values() if len(groups) > 1), None)
    if apart is not None:
        axes = _axes_between(layout, apart)
        got = "; ".join(f"{ranks_text(ranks)}: {_show(leaves[ranks[0]], prints, ranks[0])}" for ranks in apart)
        problem = f"{what()} should be the same on all ranks along {', '.join(axes)}, and is not"
        problem += f"; it {varying[1]}" if varying is not None else ""
    elif varying is not None:
        axes, got = varying[0], None
        problem = f"{what()} may differ between ranks along {', '.join(axes)}, though it does not this time"
        problem += f"; it {varying[1]}"
    else:
        return
    raise _differing(problem, axes, got, where, leaves[0], remedy)


def _axes_between(layout: Layout, groups: list[list[int]]) -> tuple[str, ...]:
    """The axes along which ranks that differ in this axis alone are in different groups."""
    found = []
    for name in layout.names:
        rows: dict[Any, set[int]] = {}  # ranks that differ along this axis alone: their groups
        for number, group in enumerate(groups):
            for rank in group:
                rows.setdefault(tuple({**layout.coords(rank), name: 0}.values()), set()).add(number)
        if any(len(numbers) > 1 for numbers in rows.values()):
            found.append(name)
    return tuple(found)


def _cut_more(leaf: OutputMeta, axis: str) -> str:
    """The spec of a leaf with another axis in it: along its first dimension that is not cut, if there is one."""
    entries: list[Any] = [] if leaf.spec is None else [*leaf.spec.entries]
    free = entries.index(None) if None in entries else len(entries)
    entries[free : free + 1] = [axis]
    if leaf.spec is not None and leaf.spec.entries and len(entries) > len(leaf.shape):
        entries = [(*leaf.spec.dim_axes(0), axis), *leaf.spec.entries[1:]]
    return repr(P(*entries)).replace("'", '"')


def refuse_varying(leaf: OutputMeta, what: str, where: str) -> None:
    """Refuse a result that may differ between ranks, where its values aren't known."""
    if leaf.varying is not None:
        axes, why = leaf.varying
        problem = f"{what} may differ between ranks along {', '.join(axes)}; it {why}"
        raise _differing(problem, axes, None, where, leaf, "")


def refuse_apart(leaf: OutputMeta, other: OutputMeta, what: str, where: str) -> None:
    """Refuse a result that is not the same on two ranks that should agree, as far as that is known without values."""
    if leaf.spec != other.spec or leaf.dtype != other.dtype:
        problem, got = f"{what} differs in kind between ranks", f"{_kind(leaf)} and {_kind(other)}"
        raise SpecError(problem, got=got, where=where, remedy="return the same kind of value on every rank")
    if leaf.spec is None:
        if not values.same_value(leaf.value, other.value):
            got, remedy = f"{leaf.value!r:.60} and {other.value!r:.60}", "return a tensor, and psum or pmean it"
            raise SpecError(f"{what} should be the same on all ranks, and is not", got=got, where=where, remedy=remedy)
        return
    sizes = zip(leaf.shape, other.shape, strict=False)
    apart = [dim for dim, (size, its) in enumerate(sizes) if size != its and not leaf.spec.dim_axes(dim)]
    if apart or len(leaf.shape) != len(other.shape):
        problem, got = f"{what} has other shapes on other ranks", f"{leaf.shape} and {other.shape}"
        raise SpecError(problem, got=got, where=where, remedy=OF_RESULTS.shapes)


def _differing(
    problem: str, axes: Sequence[str], got: str | None, where: str, leaf: OutputMeta, instead: str
) -> SpecError:
    otherwise = "give it" if leaf.spec is None or leaf.shape else "return x[None], and give that"  # no dimension to cut
    remedy = f"psum or pmean it over {axes[0]!r}, or {otherwise} a spec such as out_specs={_cut_more(leaf, axes[0])}"
    remedy = remedy if leaf.spec is not None else f"return a tensor, and {remedy}"
    if RANDOM in problem:  # a mean of noise is smaller
        remedy = f"pbroadcast(noise, {axes[0]!r}, 0) is the same on all ranks; or {remedy}"
    return SpecError(problem, got=got, where=where, remedy=instead or remedy)


def same(a: OutputMeta, b: OutputMeta) -> bool:
    """Whether the reports of two ranks, or calls, give the same value or shape (and print, if they have one)."""
    if a.spec is None:
        return values.same_value(a.value, b.value)
    return a.shape == b.shape and values.same_bytes(a.value, b.value, a.shape)


def _show(leaf: OutputMeta, rank_prints: list[bytes | None], rank: int) -> str:
    if leaf.spec is None:
        return repr(leaf.value)[:60]
    mine = (rank_prints[rank] if rank_prints else None) or leaf.value
    if mine is None or leaf.dtype is None:
        return kind_text(leaf.dtype, leaf.shape)
    return values.shown(mine, leaf.shape, leaf.dtype)


def _kind(leaf: OutputMeta) -> str:
    if leaf.spec is None:
        return type(leaf.value).__name__
    return f"{kind_text(leaf.dtype, leaf.shape)} {leaf.spec}"


def _check_shapes(
    layout: Layout,
    shapes: tuple[tuple[int, ...], ...],
    spec: P,
    what: Callable[[], str],
    where: str,
    remedy: str,
    *,
    ragged: bool = False,
) -> None:
    """Refuse shards that do not fit together: sizes may differ only between blocks of a dimension that is cut.

    Args:
        ragged: in other dimensions, sizes may differ from shard to shard.
    """
    if all(shape == shapes[0] for shape in shapes):
        return
    fits = all(len(shape) == len(shapes[0]) for shape in shapes)
    for dim in range(len(shapes[0]) if fits else 0):
        sizes: dict[int, int] = {}
        for rank, shape in enumerate(shapes):
            cut = spec.dim_axes(dim)
            block = layout.owner(spec, rank) if ragged and not cut else layout.part(rank, cut)
            fits = fits and sizes.setdefault(block, shape[dim]) == shape[dim]
    if not fits:
        raise SpecError(
            f"the shards of {what()} do not fit together",
            got="; ".join(f"rank {rank}: {list(shape)}" for rank, shape in enumerate(shapes)),
            expected=f"shapes that differ only where {spec} cuts",
            where=where,
            remedy=remedy,
        )
