"""Partition specs: which dimension of a value is cut over which mesh axes.

`P` is pure data and knows no mesh; `Layout` joins it with the sizes of a mesh's axes and computes who holds what.
Invariant: in a tuple of axes the first name is major, both in cutting and in joining.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch

from ..kernels.arguments import plain_text
from ..kernels.callsite import public
from ..kernels.errors import SpecError
from . import strides
from .strides import frozen_as
from .trees import NAMESPACE


@public
@dataclasses.dataclass(frozen=True, init=False, slots=True)
class P:
    """A partition spec: for each dimension `None`, an axis, or a tuple of axes that cut it.

    >>> P("data", None, ("model", "pipe"))
    P('data', None, ('model', 'pipe'))
    >>> sorted(P("data", ("model", "pipe")).axes)
    ['data', 'model', 'pipe']

    Args:
        entries: one per leading dimension; missing trailing entries are `None` (not cut).

    Raises:
        SpecError: an entry is none of the three, or an axis appears twice.
    """

    entries: tuple[str | tuple[str, ...] | None, ...]
    axes: frozenset[str] = dataclasses.field(compare=False, repr=False)
    """All the axes that cut some dimension."""
    _hash: int = dataclasses.field(compare=False, repr=False)  # asked for many times a call

    def __init__(self, *entries: str | tuple[str, ...] | list[str] | None):
        normal: list[str | tuple[str, ...] | None] = []
        for entry in entries:
            if isinstance(entry, list | tuple) and all(isinstance(name, str) for name in entry):
                # ("data",) means "data", and () means None; keeping one form makes equal specs compare equal.
                names = tuple(map(plain_text, entry))
                normal.append(None if not names else names[0] if len(names) == 1 else names)
            elif entry is None or isinstance(entry, str):
                normal.append(None if entry is None else plain_text(entry))
            else:
                expected, remedy = "None, an axis name or a tuple of axis names", 'write for instance P("data", None)'
                raise SpecError("P got an unexpected entry", expected=expected, got=repr(entry), remedy=remedy)
        while normal and normal[-1] is None:
            normal.pop()
        object.__setattr__(self, "entries", tuple(normal))
        axes = [name for dim in range(len(normal)) for name in self.dim_axes(dim)]
        for name in axes:
            if axes.count(name) > 1:
                remedy = "an axis can cut one dimension only"
                raise SpecError(f"P names axis {name!r} twice", got=repr(self), remedy=remedy)
        object.__setattr__(self, "axes", frozenset(axes))
        object.__setattr__(self, "_hash", hash(self.entries))

    def __hash__(self) -> int:
        return self._hash

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that cut dimension `dim`, major first."""
        entry = self.entries[dim] if dim < len(self.entries) else None
        return () if entry is None else (entry,) if isinstance(entry, str) else entry

    def __iter__(self) -> Iterator[str | tuple[str, ...] | None]:
        return iter(self.entries)

    def __getitem__(self, dim: Any) -> Any:
        return self.entries[dim]

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.entries))})"

    def __reduce__(self):
        return (P, self.entries)


REPLICATED = P()


@public
class Sharded:
    """A tree node that declares the spec of a local shard: inside a region, wrap an output in it.

    >>> Sharded(torch.zeros(2), P("data")).spec
    P('data')

    Args:
        local: this rank's shard (a tensor, or a tree of tensors that share the spec).
        spec: how the shards of all ranks form the global value.

    Raises:
        SpecError: `spec` is no P, or `local` is `Sharded` itself.
    """

    __slots__ = ("local", "spec")

    def __init__(self, local: Any, spec: P):
        if not isinstance(spec, P):
            raise SpecError("Sharded got a bad spec", got=repr(spec), expected="P(...)")
        if isinstance(local, Sharded):
            raise SpecError("Sharded got a Sharded", remedy="take its .local, or leave it as it is")
        self.local, self.spec = local, spec

    def __repr__(self) -> str:
        return f"Sharded({self.local!r}, {self.spec!r})"


def is_spec(x: Any) -> bool:
    return isinstance(x, P)


def is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


_register: Any = optree.register_pytree_node  # its type stubs accept collections only
_register(
    Sharded,
    lambda node: ((node.local,), node.spec, ("local",)),
    lambda spec, children: Sharded(next(iter(children)), spec),
    path_entry_type=optree.GetAttrEntry,
    namespace=NAMESPACE,
)


def split_sizes(length: int, parts: int) -> list[int]:
    """The lengths of `parts` blocks of `length` things, as even as can be, longer blocks first.

    Dealing gives the same sizes: those of virtual shards, of which shard v takes positions v, v + shards, ...

    >>> split_sizes(10, 4), split_sizes(2, 4)
    ([3, 3, 2, 2], [1, 1, 0, 0])
    """
    each, longer = divmod(length, parts)
    return [each + (index < longer) for index in range(parts)]


def block_of(length: int, parts: int, index: int) -> range:
    """Which of `length` things are in one of the blocks of `split_sizes`, of which there may be any number."""
    each, longer = divmod(length, parts)
    start = index * each + min(index, longer)
    return range(start, start + each + (index < longer))


RAGGED = -1
"""The size of a dimension that is not cut and differs between shards, as it does in a padded batch."""


def ragged_shape(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]], spec: P) -> tuple[int, ...]:
    """A global shape, with `RAGGED` in each dimension that is not cut but differs between shards of these shapes."""
    return tuple(
        RAGGED if not spec.dim_axes(dim) and any(its[dim] != shapes[0][dim] for its in shapes) else size
        for dim, size in enumerate(shape)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A mesh's axes and their sizes; rank order is row-major, the first axis varying slowest.

    >>> layout = Layout((("data", 2), ("model", 3)))
    >>> layout.size, layout.coords(4), layout.group(4, ("model",))
    (6, {'data': 1, 'model': 1}, (3, 4, 5))
    """

    sizes: tuple[tuple[str, int], ...]
    axes: dict[str, int] = dataclasses.field(init=False, repr=False, compare=False)
    names: tuple[str, ...] = dataclasses.field(init=False, repr=False, compare=False)
    size: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", dict(self.sizes))
        object.__setattr__(self, "names", tuple(self.axes))
        object.__setattr__(self, "size", math.prod(self.axes.values()))

    @property
    def batch_axis(self) -> str:
        """The axis that batches are cut along: "data", or the first if there is none of that name."""
        return "data" if "data" in self.names else self.names[0]

    def coords(self, rank: int) -> dict[str, int]:
        coords = {}
        for name, size in reversed(self.sizes):
            rank, coords[name] = divmod(rank, size)
        return {name: coords[name] for name in self.names}

    def rank(self, coords: Mapping[str, int]) -> int:
        rank = 0
        for name, size in self.sizes:
            rank = rank * size + coords[name]
        return rank

    def parts(self, axes: tuple[str, ...]) -> int:
        """How many blocks cutting over `axes` makes."""
        return math.prod([self.axes[name] for name in axes])  # a list, which torch.compile traces

    def part(self, rank: int, axes: tuple[str, ...]) -> int:
        """The index of `rank`'s block among those."""
        coords, index = self.coords(rank), 0
        for name in axes:
            index = index * self.axes[name] + coords[name]
        return index

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` in `axes` only, in the order of `axes` (first name major)."""
        ranks = [self.coords(rank)]
        for name in axes:
            ranks = [{**at, name: index} for at in ranks for index in range(self.axes[name])]
        return tuple(self.rank(at) for at in ranks)

    def axes_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The axes along which some of these ranks differ."""
        coords = [self.coords(rank) for rank in ranks]
        return tuple(name for name in self.names if len({one[name] for one in coords}) > 1)

    def check(self, spec: P, *, where: str = "") -> None:
        """Refuse a spec that names an axis which this mesh lacks."""
        for name in spec.axes:
            if name not in self.axes:
                raise SpecError(
                    f"{spec} names an axis that the mesh does not have",
                    got=repr(name),
                    expected=f"one of {self.names}",
                    where=where,
                    remedy="name an axis of the mesh, or make the mesh with it",
                )

    def check_shape(self, shape: tuple[int, ...], spec: P, *, uneven: bool = False, where: str = "") -> None:
        """Refuse a spec with more entries than dimensions, and a dimension that its axes do not divide."""
        self.check(spec, where=where)
        if len(spec.entries) > len(shape):
            raise SpecError(
                f"{spec} has more entries than the tensor has dimensions",
                got=f"shape {tuple(shape)}",
                expected=f"at least {len(spec.entries)} dimensions",
                where=where,
                remedy="give one entry per dimension, or P() for a value that is not cut",
            )
        for dim in range(len(spec.entries)):
            parts = self.parts(spec.dim_axes(dim))
            if shape[dim] % parts and not uneven:
                raise SpecError(
                    f"dimension {dim} of size {shape[dim]} is not divisible by "
                    f"axis {'x'.join(spec.dim_axes(dim))} of size {parts}",
                    got=f"shape {tuple(shape)} with {spec}",
                    where=where,
                    remedy="pad or drop the rest, or pass it as the batch of data_parallel, which may be uneven",
                )

    def slices(self, shape: tuple[int, ...], spec: P, rank: int) -> tuple[slice, ...]:
        """Where `rank`'s shard lies in a global value of `shape`."""
        return _slices(self, shape, spec, rank)

    def cut(self, tensor: torch.Tensor, spec: P, rank: int) -> torch.Tensor:
        """`rank`'s shard of a global tensor, as a view."""
        return tensor[self.slices(tuple(tensor.shape), spec, rank)] if spec.entries else tensor

    def take(self, tensor: torch.Tensor, spec: P, rank: int) -> torch.Tensor:
        """`rank`'s shard as a tensor with its own memory and no autograd history; a frozen parameter stays one.

        Its elements lie in memory in the same order as those of the whole tensor.
        """
        # A copy, since a view would keep the whole tensor in memory.
        whole = tensor.detach()
        part = self.cut(whole, spec, rank)
        if whole.layout is not torch.strided:
            return strides.copied(whole)
        shard = strides.copied(part, strides.dense(part.shape, strides.dense(whole.shape, whole.stride())))
        return frozen_as(tensor, shard)

    def shard_shape(self, shape: tuple[int, ...], spec: P, rank: int) -> tuple[int, ...]:
        cut = [part.stop - part.start for part in self.slices(shape, spec, rank)]
        return (*cut, *shape[len(cut) :])

    def owner(self, spec: P, rank: int) -> int:
        """The lowest rank that holds the same shard as `rank`."""
        coords = self.coords(rank)
        return self.rank({name: coords[name] if name in spec.axes else 0 for name in self.names})

    def replicas(self, spec: P, rank: int) -> list[int]:
        """The ranks that hold the same shard as `rank`, itself included."""
        owner = self.owner(spec, rank)
        return [other for other in range(self.size) if self.owner(spec, other) == owner]

    def owners(self, spec: P) -> tuple[int, ...]:
        """The lowest rank that holds each shard."""
        return _owners(self, spec)

    def global_shape(self, shapes: Sequence[tuple[int, ...]], spec: P) -> tuple[int, ...]:
        """The shape of the value whose shards have `shapes`, one per rank."""
        shape = list(shapes[0])
        for dim in range(len(spec.entries)):
            shape[dim] = sum(shapes[rank][dim] for rank in self.group(0, spec.dim_axes(dim)))
        return tuple(shape)

    def join(self, shards: list[torch.Tensor], spec: P) -> torch.Tensor:
        """The global tensor, from one shard per rank (only owners' are read), in the memory order of the shards."""
        shards, first = list(shards), shards[0]
        owners = {self.owner(spec, rank) for rank in range(self.size)}
        for dim in range(len(spec.entries)):
            axes = spec.dim_axes(dim)
            if axes:
                joined: dict[int, torch.Tensor] = {}
                for rank in owners:
                    group = self.group(rank, axes)
                    if group[0] not in joined:
                        joined[group[0]] = torch.cat([shards[peer] for peer in group], dim)
                    shards[rank] = joined[group[0]]
        whole = shards[0]
        if whole is first:
            return whole
        if not strides.is_standard(first):
            layout = strides.joined(whole.shape, first.shape, strides.dense(first.shape, first.stride()))
            whole = whole if whole.stride() == layout else strides.copied(whole, layout)
        return frozen_as(first, whole)


@functools.lru_cache(maxsize=1024)
def _owners(layout: Layout, spec: P) -> tuple[int, ...]:
    return tuple(sorted({layout.owner(spec, rank) for rank in range(layout.size)}))


@functools.lru_cache(maxsize=1024)
def _slices(layout: Layout, shape: tuple[int, ...], spec: P, rank: int) -> tuple[slice, ...]:
    index = []
    for dim in range(len(spec.entries)):
        axes = spec.dim_axes(dim)
        block = block_of(shape[dim], layout.parts(axes), layout.part(rank, axes))
        index.append(slice(block.start, block.stop))
    return tuple(index)
