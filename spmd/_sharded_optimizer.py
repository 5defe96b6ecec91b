"""The optimizer of which every rank does, and keeps, one part: slices of the parameters laid end to end.

Leaves of one dtype form a group. Each rank steps its slice of the group as if it were one parameter, keeps the state
of that slice as `Sharded`, and gathers everyone's new slice. Leaves that are cut over the axis already are stepped
whole where they are.
Invariant: slices are cut at multiples of 64 elements and padded to equal length, so that vector tails fall in the same
places at any number of ranks, and state of one number of ranks, fetched and put back, suits another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import transforms
from .kernels.errors import MeshError, SpecError, message
from .mesh import donation
from .mesh.region import current
from .mesh.spec import P, Sharded

Axis = str | tuple[str, ...]
State = dict[str, Any]  # of one parameter: {"exp_avg": tensor, ...}

REFUSED = {
    "Adafactor": "factors the moments of whole matrices",
    "LBFGS": "uses dot products of all parameters",
    "Muon": "orthogonalises whole matrices",
    "SparseAdam": "takes sparse gradients, which cannot be cut flat",
}


class Leaf(NamedTuple):
    """A parameter to be optimised; its path names its state."""

    path: str
    param: Tensor
    grad: Tensor | None = None


class Engine(Protocol):
    """What `_engine.Engine` does here."""

    options: dict[str, Any]

    def create(self, leaves: Sequence[Leaf]) -> list[State]: ...
    def update(
        self, leaves: Sequence[Leaf], states: Sequence[State], hyper: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[State], dict[str, Any]]: ...
    def update_pieces(
        self,
        params: Sequence[Tensor] | None,
        grads: Sequence[Tensor],
        state: State,
        hyper: Mapping[str, Any],
        out: Tensor,
    ) -> tuple[State, dict[str, Any]]: ...


def slice_length(numel: int, parts: int) -> int:
    """The length of every slice with its padding: a multiple of 64.

    >>> slice_length(200, 3)
    128
    """
    return -(-numel // (64 * parts)) * 64


def slice_bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """Where each of `parts` slices of `numel` elements starts and stops: at multiples of 64, or at the end.

    >>> slice_bounds(200, 2), slice_bounds(200, 3)
    ([(0, 128), (128, 200)], [(0, 128), (128, 200), (200, 200)])
    """
    length = slice_length(numel, parts)
    return [(min(part * length, numel), min((part + 1) * length, numel)) for part in range(parts)]


def check(cls: type[torch.optim.Optimizer], shard: Any) -> None:
    """Refuse an optimizer whose step mixes elements of a parameter, and an axis that is no axis."""
    for base in cls.__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in REFUSED:
            raise SpecError(
                message(
                    f"optimizer cannot shard {cls.__name__}, which {REFUSED[base.__name__]}",
                    got=f"shard={shard!r}",
                    remedy="leave shard out, or take an optimizer that treats every element alike, such as AdamW",
                )
            )
    if not isinstance(shard, str) and not (isinstance(shard, tuple) and all(isinstance(name, str) for name in shard)):
        raise SpecError(
            message("optimizer got an unexpected argument 'shard'", got=repr(shard), expected="a mesh axis")
        )


def check_state(state: Mapping[str, Any], known: set[str]) -> None:
    if unknown := state.keys() - known:
        raise SpecError(
            message(
                "opt_state holds state of something that is no trainable parameter here",
                got=f"opt_state['state'][{min(unknown)!r}]",
                expected=f"some of {sorted(known)[:5]}",
                remedy="pass what opt.init or opt.step returned for these parameters",
            )
        )


@torch.no_grad()
def create(axis: Axis, engine: Engine, leaves: Sequence[Leaf]) -> dict[str, State]:
    """The state that the torch class makes in its constructor, of this rank's parts."""
    parts = _parts(axis, leaves)
    states = engine.create([part.leaf() for part in parts])
    return {part.key: part.declare(own) for part, own in zip(parts, states, strict=True) if own}


@torch.no_grad()
def update(
    axis: Axis, engine: Engine, leaves: Sequence[Leaf], state: Mapping[str, State], hyper: Mapping[str, Any]
) -> tuple[list[Tensor], dict[str, State], dict[str, Any]]:
    """Step this rank's parts, and gather the parameters."""
    parts = _parts(axis, leaves)
    check_state(state, {part.key for part in parts})
    new_params: dict[str, Tensor] = {}
    new_state: dict[str, State] = {}
    new_hyper = dict(hyper)
    for part in parts:
        own = part.localize(state.get(part.key, {}))
        joined, own, new_hyper = part.step(engine, own, hyper)
        new_params.update(joined)
        if own:
            new_state[part.key] = part.declare(own)
    return [new_params[leaf.path] for leaf in leaves], new_state, new_hyper


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """This rank's slice, `start` to `stop`, of `leaves` laid end to end; padded to `length`, the same on all ranks."""

    key: str
    leaves: list[Leaf]
    start: int
    stop: int
    length: int
    numel: int
    axis: Axis | None
    """Over which the slices are gathered; `None` if this one is all there is."""
    spec: P | None
    """Of the state; `None` outside a region."""

    def leaf(self) -> Leaf:
        """Of this rank's slice, to make its state for."""
        return Leaf(self.key, torch.cat(self._pieces([leaf.param.reshape(-1) for leaf in self.leaves])))

    def step(
        self, engine: Engine, own: State, hyper: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], State, dict[str, Any]]:
        """The parameters by path, this rank's new state, and the hyper-parameters."""
        stepped: list[tuple[State, dict[str, Any]]] = []
        if all(leaf.grad is None for leaf in self.leaves):
            return {leaf.path: leaf.param for leaf in self.leaves}, own, dict(hyper)

        into = self._given_up()

        def write(out: Tensor) -> None:
            params = None if into is not None else self._pieces([leaf.param.reshape(-1) for leaf in self.leaves])
            grads = self._pieces([_flat_grad(leaf) for leaf in self.leaves])
            region, narrow = current(), self.leaves[0].param.dtype.itemsize < 4
            if region is not None and region.virtual is not None and (narrow or engine.options.get("fused")):
                # Torch rounds the tail of a vector otherwise than the rest here; a whole slice has no tail.
                params, grads = None if params is None else [torch.cat(params)], [torch.cat(grads)]
            stepped.append(engine.update_pieces(params, grads, own, hyper, out))

        dtype = self.leaves[0].param.dtype
        if self.axis is None:
            flat = self.leaves[0].param.new_empty(self.length) if into is None else into
            write(flat)
        else:
            flat = transforms.gather_written(self.length, dtype, self.axis, write, into)
        if into is not None:
            for leaf in self.leaves:
                donation.take(leaf.param)
        return self._split(flat), *stepped[0]

    def _given_up(self) -> Tensor | None:
        """The flat parameters that the last step made, if they may be overwritten on all ranks."""
        if not any(donation.is_donated(leaf.param) for leaf in self.leaves):
            return None
        whole = None
        first = self.leaves[0].param
        numel = self.length if self.axis is None else transforms.axis_size(self.axis) * self.length
        offered = all(donation.is_offered(leaf.param) for leaf in self.leaves)
        if offered and first.untyped_storage().nbytes() == numel * first.element_size():
            at = first.data_ptr()
            for leaf in self.leaves:
                if leaf.grad is None or not leaf.param.is_contiguous() or leaf.param.data_ptr() != at:
                    break
                at += leaf.param.numel() * leaf.param.element_size()
            else:
                whole = first.detach().as_strided((numel,), (1,), 0)
        return whole if self.axis is None or transforms.can_rewrite(whole, self.axis) else None

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [leaf.param.numel() for leaf in self.leaves]
        joined = {}
        for leaf, piece in zip(self.leaves, flat[: self.numel].split(sizes), strict=True):
            piece = piece.view(leaf.param.shape)
            if leaf.grad is None:
                piece = leaf.param
            elif not leaf.param.is_contiguous():
                piece = torch.empty_like(leaf.param).copy_(piece)  # keeps the strides: channels last stays so
            joined[leaf.path] = piece
        return joined

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
                value = torch.cat(self._pieces([value[: self.numel]]))
            local[name] = value
        return local

    def _check_cut(self, name: str, value: Tensor) -> None:
        """Refuse the whole of state of cut parameters: its parts lie in the order of the ranks that it was made on."""
        cut = "/" in self.key and self.spec is not None
        if cut and (value.shape != (self.length,) or getattr(value, "_spmd_spec", self.spec) != self.spec):
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

    def _pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What this rank's slice has of flat tensors laid end to end, with zeros for its padding."""
        pieces, offset = [], 0
        for tensor in tensors:
            pieces.append(tensor[max(self.start - offset, 0) : max(self.stop - offset, 0)])
            offset += tensor.numel()
        return [*pieces, tensors[0].new_zeros((self.length - (self.stop - self.start),))]


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """A leaf that is cut over the axis already, and stepped where it is."""

    key: str
    given: Leaf
    spec: P

    def leaf(self) -> Leaf:
        return self.given

    def step(
        self, engine: Engine, own: State, hyper: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], State, dict[str, Any]]:
        (new,), (state,), new_hyper = engine.update([self.given], [own], hyper)
        return {self.given.path: new}, state, new_hyper

    def localize(self, own: State) -> State:
        return localized(own, self.given.param, self.spec)

    def declare(self, own: State) -> State:
        return declared(own, self.given.param.shape, self.spec)


def _flat_grad(leaf: Leaf) -> Tensor:
    if leaf.grad is None:  # the state of a shared slice has to see something
        return leaf.param.new_zeros(()).expand(leaf.param.numel())
    return (leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad).reshape(-1)


def layout_of(param: Tensor) -> P:
    """How a parameter in a region is cut, as it was passed in or marked."""
    spec = getattr(param, "_spmd_spec", None)
    return P(tuple(sorted(getattr(param, "_spmd_axes", ())))) if spec is None else spec


def declared(own: State, shape: Sequence[int], spec: P) -> State:
    """State as `Sharded` where it is laid out as the parameter is; a count of steps stays plain."""
    return {
        name: Sharded(value, spec) if isinstance(value, Tensor) and value.ndim and value.shape == shape else value
        for name, value in own.items()
    }


def localized(own: State, param: Tensor, spec: P) -> State:
    """State of a cut parameter as this rank has it, be it given so or (made in the driver, say) whole."""
    local: State = {}
    region = current()
    for name, value in own.items():
        value = value.local if isinstance(value, Sharded) else value
        if region is not None and isinstance(value, Tensor) and value.ndim and value.shape != param.shape:
            value = region.session.layout.cut(value, spec, region.session.rank)
        local[name] = value
    return local


def _parts(axis: Axis, leaves: Sequence[Leaf]) -> list[Slice | Whole]:
    """What this rank steps; in the same order on all ranks, as the gathering needs."""
    names = (axis,) if isinstance(axis, str) else axis
    try:
        index, size, inside = transforms.axis_index(axis), transforms.axis_size(axis), True
    except MeshError:
        index, size, inside = 0, 1, False
    parts: list[Slice | Whole] = []
    groups: dict[tuple[torch.dtype, tuple[str, ...]], list[Leaf]] = {}
    for leaf in leaves:
        spec = layout_of(leaf.param)
        axes = tuple(sorted(spec.axes))
        if inside and set(names) & set(axes):
            parts.append(Whole(leaf.path, leaf, spec))
        else:
            groups.setdefault((leaf.param.dtype, axes), []).append(leaf)
    for (dtype, axes), members in groups.items():
        numel = sum(leaf.param.numel() for leaf in members)
        key = str(dtype).removeprefix("torch.") + "".join(f"/{name}" for name in axes)
        gathered = axis if size > 1 and numel else None
        # State differs over every axis that cuts the leaves, and over ours: dim 0 is cut over all of them.
        flat = P((*names, *axes)) if inside else None
        start, stop = slice_bounds(numel, size)[index]
        parts.append(Slice(key, members, start, stop, slice_length(numel, size), numel, gathered, flat))
    return parts
