"""Parameters laid end to end and sliced: each rank steps one slice, and keeps the state of that slice only.

Each leaf begins at a multiple of 64 elements, and so does every slice. Invariants: no cut falls elsewhere, so the bits
are those of a step on the whole (see `flat`) at any number of ranks; and state from one number of ranks, fetched and
put back, fits another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import transforms
from ..kernels.errors import SpecError
from ..kernels.reduction import ALIGNED, slice_length
from ..mesh import donation
from ..mesh.region import current
from ..mesh.spec import P, Sharded
from .blocks import Piece, allocate
from .engine import Engine
from .flat import divided, offsets, runs, stretches
from .leaves import State, declared

Axis = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that share the work: along which axes, how many, and which one this is; outside a region, one alone."""

    axis: Axis
    index: int = 0
    size: int = 1
    inside: bool = False


ALONE = Ranks((), inside=True)  # each rank steps everything: there is too little to share, or no other rank


@dataclasses.dataclass(frozen=True)
class Slice:
    """This rank's slice of leaves laid end to end, padded to the same length on all ranks.

    Attributes:
        key: of its state.
        members: which of a step's leaves they are, all of one `group`.
        shapes: of these leaves.
        cut: the axes that the leaves are cut over.
    """

    key: str
    members: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    group: int
    ranks: Ranks
    cut: tuple[str, ...]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.shapes))

    @functools.cached_property
    def numel(self) -> int:
        """The elements of all leaves and of the padding between them."""
        return offsets(self.sizes)[-1]

    @functools.cached_property
    def length(self) -> int:
        return slice_length(self.numel, self.ranks.size)

    @functools.cached_property
    def bounds(self) -> tuple[int, int]:
        """Where it starts and stops."""
        start = min(self.ranks.index * self.length, self.numel)
        return start, min(start + self.length, self.numel)

    @functools.cached_property
    def spec(self) -> P | None:
        """The state's: cut over the axes that cut the leaves and those of the slices; None if it is whole."""
        axis = self.ranks.axis
        names = (*((axis,) if isinstance(axis, str) else axis), *self.cut)
        return P(names) if names and self.ranks.inside else None

    def step(
        self,
        engine: Engine,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        own: State,
        hyper: Mapping[str, Any],
        scale: Tensor | None,
    ) -> tuple[list[Tensor], State, dict[str, Any]]:
        """The new parameters, this rank's new state, and the hyper-parameters."""
        if not self.numel:
            return list(params), own, dict(hyper)
        stepped: list[tuple[State, dict[str, Any]]] = []
        into = self._donated_flat(params)
        region = current()
        if into is not None and region is not None:
            region.session.overwrite()
        grads = [grad.to_dense() if grad.is_sparse else grad for grad in grads]

        def write(out: Tensor) -> None:
            pieces = self._pieces(out, grads, None if into is not None else params)
            stepped.append(engine.update_flat(out, pieces, own, hyper, scale))

        if self.ranks.size > 1:
            flat = transforms.gather_written(self.length, params[0].dtype, self.ranks.axis, write, into)
        else:
            flat = into if into is not None else allocate(self.length, params[0])
            write(flat)
        if into is not None:
            donation.note_taken(params)
        found = divided(self.shapes, flat)
        if 0 in self.sizes or not all(param.is_contiguous() for param in params):
            found = list(map(_like, found, params))
        return found, *stepped[0]

    def _pieces(self, out: Tensor, grads: Sequence[Tensor], params: Sequence[Tensor] | None) -> list[Piece]:
        """What lies in this slice; without `params`, their old values are in `out` already."""
        start, stop = self.bounds
        columns, width = [grads] if params is None else [grads, params], grads[0].element_size()
        pieces = []
        for begin, (grad, *source) in runs(self.sizes, columns, start, stop):
            spans = stretches(self.sizes, width, begin, begin + grad.numel())
            pieces.append(Piece(begin - start, source[0] if source else None, grad, spans))
        # A slice of nothing but padding is stepped as well, so that its state has the same entries as the others'.
        return pieces or [Piece(0, out.new_zeros(ALIGNED), out.new_zeros(ALIGNED))]

    def _donated_flat(self, params: Sequence[Tensor]) -> Tensor | None:
        """The flat parameters that the last step made, if they may be overwritten on all ranks."""
        if not any(map(donation.is_donated, params)):
            return None
        whole = None
        first = params[0]
        size, numel = first.element_size(), self.ranks.size * self.length
        if all(map(donation.may_take, params)) and first.untyped_storage().nbytes() == numel * size:
            addresses = [first.data_ptr() + size * offset for offset in offsets(self.sizes)]
            if all(
                param.is_contiguous() and (param.data_ptr() == address or not param.numel())
                for param, address in zip(params, addresses, strict=False)
            ):
                whole = first.detach().as_strided((numel,), (1,), 0)
        return whole if self.ranks.size == 1 or transforms.can_rewrite(whole, self.ranks.axis) else None

    def localize(self, own: State) -> State:
        """This rank's slice of state values, given as that slice, whole, or cut for another number of ranks."""
        if not self.cut and all(type(value) is Tensor and self._is_own(value) for value in own.values()):
            return own  # as from one step to the next
        local = {}
        for name, value in own.items():
            if not self.cut and not self._is_own(value):
                value = fetched(frozenset(), value)
            value = value.local if isinstance(value, Sharded) else value
            if isinstance(value, Tensor) and value.ndim:
                self._check_cut(name, value)
            if isinstance(value, Tensor) and value.ndim and value.shape != (self.length,):
                if value.ndim != 1 or value.numel() < self.numel:
                    raise SpecError(
                        f"opt_state['state'][{self.key!r}][{name!r}] does not fit the parameters",
                        got=f"shape {tuple(value.shape)}",
                        expected=f"({self.length},), this rank's slice, or ({self.numel},) or more, the whole",
                        remedy="pass what opt.init or opt.step returned for these parameters; what is frozen for a "
                        "while stays trainable, with gradients of None (docs/how_to.md)",
                    )
                value = self.cut_out(value)
            local[name] = value
        return local

    def _is_own(self, value: Any) -> bool:
        """Whether a value is one for all elements or this rank's slice, rather than one for another number of ranks."""
        local = value.local if isinstance(value, Sharded) else value
        if not isinstance(local, Tensor) or not local.ndim:
            return True
        return local.shape == (self.length,) and (bool(self.ranks.axis) or not _axes_of(value))

    def cut_out(self, whole: Tensor) -> Tensor:
        """This rank's slice of a flat tensor."""
        start, stop = self.bounds
        return torch.cat([whole[start:stop], whole.new_zeros(self.length - (stop - start))])

    def _check_cut(self, name: str, value: Tensor) -> None:
        """Refuse whole state of cut parameters: its parts lie in the order of the ranks that it was made on."""
        if not self.cut or self.spec is None:
            return
        if value.shape != (self.length,) or getattr(value, "_spmd_spec", self.spec) != self.spec:
            raise cut_otherwise(self.key, name, value, f"({self.length},), cut by {self.spec}")

    def declare(self, own: State) -> State:
        return own if self.spec is None else declared(own, (self.length,), self.spec)


def cut_otherwise(key: str, name: str, value: Tensor, expected: str) -> SpecError:
    """The error for state of cut parameters that is whole, or of ranks that were other ones."""
    return SpecError(
        f"opt_state['state'][{key!r}][{name!r}] is not cut as the parameters are",
        got=f"shape {tuple(value.shape)}, cut by {getattr(value, '_spmd_spec', None)}",
        expected=expected,
        remedy="go on with it on a mesh with the sizes of these axes that it was made on",
    )


def parts_over(axes: frozenset[str]) -> int:
    """How many parts a leaf has that is cut over these axes."""
    region = current()
    return 1 if region is None else region.session.layout.parts(tuple(axes))


def is_cut_over(value: Any, cut: frozenset[str]) -> bool:
    """Whether a value has the parts of leaves that are cut over these axes, where these have more than one."""
    return parts_over(cut) == 1 or cut <= {*_axes_of(value)}


def fetched(cut: frozenset[str], value: Any) -> Tensor:
    """All slices, end to end, of a value that belongs to leaves that are cut over these axes."""
    names = tuple(name for name in _axes_of(value) if name not in cut)
    local: Tensor = value.local if isinstance(value, Sharded) else value
    return transforms.all_gather(local, names, tiled=True) if current() is not None and names else local


def _axes_of(value: Any) -> tuple[str, ...]:
    """The axes over which a value is cut, in the order in which its parts lie."""
    spec = value.spec if isinstance(value, Sharded) else getattr(value, "_spmd_spec", None)
    return () if spec is None else spec.dim_axes(0)


def _like(piece: Tensor, param: Tensor) -> Tensor:
    # Keeps the strides, such as channels last. A tensor without elements gets its own memory, not a view of the
    # others'.
    return piece if param.is_contiguous() and param.numel() else torch.empty_like(param).copy_(piece)
