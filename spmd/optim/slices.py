"""Parameters laid end to end, of which every rank steps, and keeps the state of, one slice.

Each leaf begins at a multiple of 64 elements, and so does every slice. Invariants: no cut falls elsewhere, so that the
tails of vectors, which torch may round otherwise, are those of a step on whole leaves at any number of ranks; and state
of one number of ranks, fetched and put back, suits another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import transforms
from ..kernels import torch_private
from ..kernels.errors import SpecError, message
from ..mesh import donation
from ..mesh.region import current
from ..mesh.spec import P, Sharded
from .blocks import Piece
from .engine import Engine
from .leaves import Leaf, State, declared

Axis = str | tuple[str, ...]
ALIGNED = 64


def slice_length(numel: int, parts: int) -> int:
    """The length of every slice with its padding: a multiple of 64.

    >>> slice_length(200, 3)
    128
    """
    return -(-numel // (ALIGNED * parts)) * ALIGNED


def slice_bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """Where each of `parts` slices of `numel` elements starts and stops: at multiples of 64, or at the end.

    >>> slice_bounds(200, 2), slice_bounds(200, 3)
    ([(0, 128), (128, 200)], [(0, 128), (128, 200), (200, 200)])
    """
    length = slice_length(numel, parts)
    return [(min(part * length, numel), min((part + 1) * length, numel)) for part in range(parts)]


@functools.lru_cache(maxsize=256)
def offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where leaves of these sizes begin, and where the last one ends with its padding.

    >>> offsets((3, 64, 65))
    (0, 64, 128, 256)
    """
    found = [0]
    for size in sizes:
        found.append(found[-1] - -size // ALIGNED * ALIGNED)
    return tuple(found)


def sizes_of(leaves: Sequence[Leaf]) -> tuple[int, ...]:
    return tuple(leaf.param.numel() for leaf in leaves)


def joined(sizes: tuple[int, ...], values: Sequence[Tensor]) -> Tensor:
    """Tensors of these sizes as one flat one, of memory of its own."""
    *starts, end = offsets(sizes)
    first, size = values[0], values[0].element_size()
    if first.untyped_storage().nbytes() == end * size and all(
        value.data_ptr() == first.data_ptr() + size * start and value.is_contiguous()
        for start, value in zip(starts, values, strict=True)
    ):
        return first.detach().as_strided((end,), (1,), 0).clone()
    flat = values[0].new_zeros(end)
    torch_private.copy_each(list(cut(sizes, flat)), [value.reshape(-1) for value in values])
    return flat


def divided(leaves: Sequence[Leaf], flat: Tensor) -> Iterator[Tensor]:
    """Views of a flat tensor, like each of the leaves."""
    for piece, leaf in zip(cut(sizes_of(leaves), flat), leaves, strict=True):
        yield piece.view(leaf.param.shape)


def cut(sizes: tuple[int, ...], flat: Tensor) -> Sequence[Tensor]:
    """The parts of a flat tensor that are leaves of these sizes, flat as well."""
    those = _with_gaps(sizes)
    return flat[: sum(those)].split(those)[::2]


@functools.lru_cache(maxsize=256)
def _with_gaps(numels: tuple[int, ...]) -> list[int]:
    """Of each leaf, and of what lies behind it.

    >>> _with_gaps((3, 64))
    [3, 61, 64, 0]
    """
    starts = offsets(numels)
    return [
        size
        for start, numel, end in zip(starts, numels, starts[1:], strict=False)
        for size in (numel, end - start - numel)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """Those that share the work: along which axes, how many, and which this one is; alone outside a region."""

    axis: Axis
    index: int = 0
    size: int = 1
    inside: bool = False


ALONE = Ranks((), inside=True)  # each steps all, laid end to end for being so little


@dataclasses.dataclass(frozen=True)
class Slice:
    """This rank's slice of leaves laid end to end, padded to the same length on all ranks.

    Attributes:
        key: of its state.
        cut: the axes that the leaves are cut over.
    """

    key: str
    leaves: Sequence[Leaf]
    ranks: Ranks
    cut: tuple[str, ...]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return sizes_of(self.leaves)

    @functools.cached_property
    def numel(self) -> int:
        """Of all leaves, with what lies between them."""
        return offsets(self.sizes)[-1]

    @functools.cached_property
    def length(self) -> int:
        return slice_length(self.numel, self.ranks.size)

    @property
    def spec(self) -> P | None:
        """Of the state, which differs over every axis that cuts the leaves, and over ours; None where it is whole."""
        axis = self.ranks.axis
        names = (*((axis,) if isinstance(axis, str) else axis), *self.cut)
        return P(names) if names and self.ranks.inside else None

    def step(
        self, engine: Engine, own: State, hyper: Mapping[str, Any], scale: Tensor | None
    ) -> tuple[list[Tensor], State, dict[str, Any]]:
        """The new parameters, this rank's new state, and the hyper-parameters."""
        if not self.numel:
            return [leaf.param for leaf in self.leaves], own, dict(hyper)
        stepped: list[tuple[State, dict[str, Any]]] = []
        into = self._given_up()
        region = current()
        if into is not None and region is not None:
            region.session.overwrite()

        def write(out: Tensor) -> None:
            stepped.append(engine.update_flat(out, self._pieces(into is not None, out), own, hyper, scale))

        if self.ranks == ALONE:
            flat = joined(self.sizes, [leaf.param for leaf in self.leaves]) if into is None else into
            grads = [_dense(leaf.grad).reshape(-1) for leaf in self.leaves if leaf.param.numel()]
            stepped.append(engine.update_together(flat, self._parts, grads, own, hyper, scale))
        elif self.ranks.size == 1:
            flat = self.leaves[0].param.new_empty(self.length) if into is None else into
            write(flat)
        else:
            flat = transforms.gather_written(self.length, self.leaves[0].param.dtype, self.ranks.axis, write, into)
        if into is not None:
            for leaf in self.leaves:
                donation.take(leaf.param)
        return [
            _like(piece, leaf.param) for piece, leaf in zip(divided(self.leaves, flat), self.leaves, strict=True)
        ], *stepped[0]

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """What a flat tensor has of each leaf that has elements, flat as well."""
        parts = cut(self.sizes, flat)
        return [part for part in parts if part.numel()] if 0 in self.sizes else list(parts)

    def _pieces(self, there: bool, out: Tensor) -> list[Piece]:
        """What lies in this slice of each leaf."""
        start, stop = slice_bounds(self.numel, self.ranks.size)[self.ranks.index]
        pieces = []
        for offset, leaf in zip(offsets(self.sizes), self.leaves, strict=False):
            first, last = max(start - offset, 0), min(stop - offset, leaf.param.numel())
            if first < last:
                grad = _dense(leaf.grad)
                source = None if there else leaf.param.reshape(-1)[first:last]
                pieces.append(Piece(offset + first - start, source, grad.reshape(-1)[first:last]))
        # A slice of padding alone is stepped as well: its state has to be like that of the others.
        return pieces or [Piece(0, out.new_zeros(ALIGNED), out.new_zeros(ALIGNED))]

    def _given_up(self) -> Tensor | None:
        """The flat parameters that the last step made, if they may be overwritten on all ranks."""
        if not any(donation.is_donated(leaf.param) for leaf in self.leaves):
            return None
        whole = None
        first = self.leaves[0].param
        size, numel = first.element_size(), self.ranks.size * self.length
        offered = all(donation.may_take(leaf.param) for leaf in self.leaves)
        if offered and first.untyped_storage().nbytes() == numel * size:
            places = [first.data_ptr() + size * offset for offset in offsets(self.sizes)]
            if all(
                leaf.param.is_contiguous() and (leaf.param.data_ptr() == place or not leaf.param.numel())
                for leaf, place in zip(self.leaves, places, strict=False)
            ):
                whole = first.detach().as_strided((numel,), (1,), 0)
        return whole if self.ranks.size == 1 or transforms.can_rewrite(whole, self.ranks.axis) else None

    def localize(self, own: State) -> State:
        """State values as this rank's slice, be they given as that or (from elsewhere) as the whole."""
        local = {}
        for name, value in own.items():
            value = value.local if isinstance(value, Sharded) else value
            if isinstance(value, Tensor) and value.ndim:
                self._check_cut(name, value)
            if isinstance(value, Tensor) and value.ndim and value.shape != (self.length,):
                if value.ndim != 1 or value.numel() < self.numel:
                    raise SpecError(
                        message(
                            f"opt_state['state'][{self.key!r}][{name!r}] does not fit the parameters",
                            got=f"shape {tuple(value.shape)}",
                            expected=f"({self.length},), this rank's slice, or ({self.numel},) or more, the whole",
                            remedy="pass what opt.init or opt.step returned for these parameters",
                        )
                    )
                value = self.cut_out(value)
            local[name] = value
        return local

    def cut_out(self, whole: Tensor) -> Tensor:
        """This rank's slice of a flat tensor."""
        start, stop = slice_bounds(self.numel, self.ranks.size)[self.ranks.index]
        return torch.cat([whole[start:stop], whole.new_zeros(self.length - (stop - start))])

    def _check_cut(self, name: str, value: Tensor) -> None:
        """Refuse the whole of state of cut parameters: its parts lie in the order of the ranks that it was made on."""
        if not self.cut or self.spec is None:
            return
        if value.shape != (self.length,) or getattr(value, "_spmd_spec", self.spec) != self.spec:
            raise SpecError(
                message(
                    f"opt_state['state'][{self.key!r}][{name!r}] is not cut as the parameters are",
                    got=f"shape {tuple(value.shape)}, cut by {getattr(value, '_spmd_spec', None)}",
                    expected=f"({self.length},), cut by {self.spec}",
                    remedy="go on with it on a mesh with the sizes of these axes that it was made on",
                )
            )

    def declare(self, own: State) -> State:
        return own if self.spec is None else declared(own, (self.length,), self.spec)


def _dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense() if grad.is_sparse else grad


def _like(piece: Tensor, param: Tensor) -> Tensor:
    # Keeps the strides: channels last stays so. What has no elements shows no memory, which others may be stepped in.
    return piece if param.is_contiguous() and param.numel() else torch.empty_like(param).copy_(piece)
