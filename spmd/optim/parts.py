"""What a rank steps: which leaves whole, which laid end to end and sliced, and the state of each.

The state of a leaf that is stepped whole is kept under its path, that of sliced leaves under the name of what these
have in common: "float32", with "/model" for leaves that are cut over that axis, ":1" for those of the second group,
"[0,2]" if only some of such leaves are in it, and after "#" a hash of their paths and shapes. Invariant: a leaf's state
is in one place, which depends on nothing that differs between ranks; state in any form fits any number of ranks, but
only the leaves that it was made for.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import transforms
from ..kernels.call import word_key
from ..kernels.errors import MeshError, SpecError, dtype_name
from ..mesh.region import current
from ..mesh.spec import Sharded
from .engine import Engine
from .flat import divided, joined
from .leaves import Leaf, State, declared_as, is_torchs, layout_of, localized, refusal, refuse_torchs
from .slices import ALONE, Axis, Ranks, Slice, cut_otherwise, fetched, is_cut_over, parts_over

# Elements. With "auto", leaves of one kind are sliced only if they have more than this together. For fewer, an exchange
# still costs as much: all ranks wait for each other once more, on busy cores for another process's time slice.
FEW = 1 << 13
# Values of which there is one per leaf. For a parameter without dimensions, the shape does not tell.
_ONE_FOR_A_LEAF = {"step", "eta", "mu", "mu_product"}


def check(cls: type[torch.optim.Optimizer], shard: Any, options: Mapping[str, Any]) -> None:
    """Refuse an optimizer whose step mixes elements of a parameter, and an axis that is no axis."""
    reason = refusal(cls)
    if reason is None and not is_torchs(cls) and _steps_differ_for_parts(cls, options):
        reason = "steps a matrix otherwise than its two halves, flattened"
    if reason:
        raise SpecError(
            f"optimizer cannot shard {cls.__name__}, which {reason}",
            got=f"shard={shard!r}",
            remedy="leave shard out, or take an optimizer that treats every element alike, such as AdamW",
        )
    if not isinstance(shard, str) and not (isinstance(shard, tuple) and all(isinstance(name, str) for name in shard)):
        raise SpecError("optimizer got an unexpected argument 'shard'", got=repr(shard), expected="a mesh axis")


def _steps_differ_for_parts(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> bool:
    """Whether a class is seen to mix elements. One that draws random numbers or wants other parameters passes."""
    line = torch.linspace(-1, 1, 24, dtype=torch.float64, device="cpu")

    def stepped(seed: int, *pieces: Tensor) -> Tensor:
        torch.default_generator.manual_seed(seed)
        params = [torch.nn.Parameter(piece.clone()) for piece in pieces]
        for param in params:
            instance = cls([param], **options)
            for count in range(1, 4):
                param.grad = torch.cos(count * param.detach())
                instance.step()
        return torch.cat([param.detach().flatten() for param in params])

    try:
        with torch.random.fork_rng(devices=[]):
            whole, again = (stepped(seed, line.view(4, 6)) for seed in (0, 1))
            parts = stepped(0, line[:12], line[12:])
    except Exception:  # the step itself refuses it
        return False
    return torch.equal(whole, again) and not torch.allclose(whole, parts, rtol=1e-7, atol=1e-9)


def kind_of(leaf: Leaf) -> str:
    """What leaves must have in common to be laid end to end."""
    return _kind(leaf.param.dtype, layout_of(leaf.param).axes, leaf.group)


@functools.lru_cache(maxsize=256)
def _kind(dtype: torch.dtype, axes: frozenset[str], group: int) -> str:
    name = dtype_name(dtype) + "".join(f"/{name}" for name in sorted(axes))
    return name + (f":{group}" if group else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What is stepped how.

    Attributes:
        slices: leaves laid end to end.
        whole: leaves that are stepped whole, with their indexes.
        states: as this rank keeps them, of slices by key and of whole leaves by path.
        are_kept: all leaves lie in slices, and the state was given as that of these slices, as an earlier step left it.
    """

    slices: tuple[Slice, ...]
    whole: tuple[tuple[int, Leaf], ...]
    states: Mapping[str, State]
    are_kept: bool


def divide(shard: Axis | None, leaves: Sequence[Leaf], state: Mapping[str, State]) -> Parts:
    """Work out the parts of a step of a new kind; `shard` as for `_Division`."""
    found = _Division(shard, leaves, state)
    states = {part.key: found.state_of(part) for part in found.slices}
    states.update({leaf.path: found.state_of_leaf(leaf) for _, leaf in found.whole})
    return Parts(found.slices, found.whole, states, not found.whole and states.keys() == state.keys())


def create(shard: Axis | None, engines: Sequence[Engine], leaves: Sequence[Leaf]) -> dict[str, State]:
    """The state that the torch class makes in its constructor, before there are gradients; sliced if known how."""
    found: dict[str, State] = {}
    for group, engine in enumerate(engines):
        members = [leaf for leaf in leaves if leaf.group == group]
        for leaf, own in zip(members, engine.create(members), strict=True):
            if own:
                found[leaf.path] = own
    if shard in (None, "auto"):
        return {leaf.path: declared_as(leaf, found[leaf.path]) for leaf in leaves if leaf.path in found}
    parts = divide(shard, [leaf._replace(grad=leaf.param) for leaf in leaves], found)
    state = {part.key: part.declare(parts.states[part.key]) for part in parts.slices}
    state.update({leaf.path: declared_as(leaf, parts.states[leaf.path]) for _, leaf in parts.whole})
    return {key: own for key, own in state.items() if own}


class _Division:
    """The leaves of one step, and the state that was given for them.

    Args:
        shard: the axis that was asked for; "auto" is every axis over which a leaf and its gradient are known to be the
            same, where it pays, None is none.
    """

    def __init__(self, shard: Axis | None, leaves: Sequence[Leaf], state: Mapping[str, State]):
        self._leaves, self._state = leaves, dict(state)
        refuse_torchs(leaves, state)
        self._kinds: dict[str, list[int]] = {}
        if shard is not None or any(key and key[0] not in "[." for key in state):
            for index, leaf in enumerate(leaves):
                self._kinds.setdefault(kind_of(leaf), []).append(index)
        self._check_state()
        few = self._few() if shard == "auto" and transforms.current_plan().virtual is None else ()
        ranks = [
            None if leaf.grad is None else _together(leaf) if index in few else _ranks(shard, leaf)
            for index, leaf in enumerate(leaves)
        ]
        owners = {index: key for key in self._state for index in self._members(key) or ()}
        together: dict[Any, list[int]] = {}
        for kind, members in self._kinds.items():
            for index in members:
                if ranks[index] is not None:
                    device = leaves[index].param.device
                    together.setdefault((kind, ranks[index], owners.get(index), device), []).append(index)
        remain = {key for (_, _, key, _), members in together.items() if key and members == self._members(key)}
        for key in dict.fromkeys(owners.values()):  # in one order on all ranks, since it gathers
            if key not in remain:
                self._dissolve(key)
        self.slices = tuple(
            self._slice(kind, some, along)
            for (kind, along, key, _), members in together.items()
            for some in ([members] if key in remain else self._alike(members))
            if along is not None
        )
        self.whole = tuple((index, leaves[index]) for index, along in enumerate(ranks) if along is None)

    def state_of(self, part: Slice) -> State:
        """The state of a slice, as this rank keeps it."""
        own = self._state.get(part.key)
        if own is not None:
            return part.localize(own)
        leaves = [self._leaves[index] for index in part.members]
        states = [self.state_of_leaf(leaf) for leaf in leaves]
        own = dict(states[0])
        for name, value in states[0].items():
            if _is_like(name, value, leaves[0]):
                own[name] = part.cut_out(joined(part.sizes, [state[name] for state in states]))
        return own

    def state_of_leaf(self, leaf: Leaf) -> State:
        """The state of a leaf that is kept by itself, laid out as the leaf is here."""
        return localized(self._state.get(leaf.path, {}), leaf.param, layout_of(leaf.param))

    def _slice(self, kind: str, members: list[int], along: Ranks) -> Slice:
        some = self._kinds[kind]
        which = "" if members == some else f"[{','.join(str(some.index(index)) for index in members)}]"
        key = f"{kind}{which}#{self._number_of(members)}"
        first = self._leaves[members[0]]
        shapes = tuple(self._leaves[index].param.shape for index in members)
        cut = tuple(sorted(layout_of(first.param).axes))
        return Slice(key, tuple(members), shapes, first.group, along, cut)

    def _few(self) -> set[int]:
        """Leaves so small that it is faster to step all of them than to exchange slices of them."""
        few: set[int] = set()
        for members in self._kinds.values():
            if sum(self._leaves[index].param.numel() for index in members) <= FEW:
                few.update(members)
        return few

    def _members(self, key: str) -> list[int] | None:
        """The leaves whose state lies end to end under a key; None if the key is for other leaves or another order."""
        name, _, number = key.partition("#")
        kind, _, which = name.partition("[")
        members = self._kinds.get(kind)
        if members is not None and which:
            places = [int(place) for place in which.rstrip("]").split(",")]
            members = [members[place] for place in places] if max(places) < len(members) else None
        return members if members is not None and number == self._number_of(members) else None

    def _number_of(self, members: Sequence[int]) -> str:
        """A hash that tells these leaves from all others: if one is frozen, say, those behind it move."""
        leaves = [self._leaves[index] for index in members]
        # Of a cut leaf it has the number of parts, since other parts lie otherwise, end to end; shapes may be unlike.
        parts = [parts_over(layout_of(leaf.param).axes) for leaf in leaves]
        named = [(leaf.path, tuple(leaf.param.shape) if n == 1 else n) for leaf, n in zip(leaves, parts, strict=True)]
        return f"{word_key(*named):x}"[:8]

    def _alike(self, members: Iterable[int]) -> list[list[int]]:
        """Groups of leaves that can share a slice's state, as their step counts and other single values agree."""
        found: dict[Any, list[int]] = {}
        for index in members:
            leaf = self._leaves[index]
            own = self.state_of_leaf(leaf).items()
            alike = tuple((name, None if _is_like(name, value, leaf) else _number(value)) for name, value in own)
            found.setdefault(alike, []).append(index)
        return [*found.values()]

    def _dissolve(self, key: str) -> None:
        """Split state that lies end to end into one state for each leaf."""
        leaves = [self._leaves[index] for index in self._members(key) or ()]
        own, cut = self._state.pop(key), layout_of(leaves[0].param).axes
        for name, value in own.items():
            # A copy for each: a shared one that was donated would be stepped in place once for every leaf.
            parts: Iterable[Any] = [value.clone() if isinstance(value, Tensor) else value for _ in leaves]
            local = value.local if isinstance(value, Sharded) else value
            if isinstance(local, Tensor) and local.ndim:
                if not is_cut_over(value, cut):
                    raise cut_otherwise(key, name, local, f"parts of it, cut over {sorted(cut)}")
                flat = fetched(cut, value)
                parts = divided(tuple(leaf.param.shape for leaf in leaves), flat)
            for leaf, part in zip(leaves, parts, strict=True):
                self._state.setdefault(leaf.path, {})[name] = part

    def _check_state(self) -> None:
        known = {leaf.path for leaf in self._leaves}
        unknown = [key for key in self._state if key not in known and self._members(key) is None]
        if unknown:
            key = min(unknown)
            whose = "something that is no trainable parameter here"
            remedy = (
                "pass what opt.init or opt.step returned for these parameters; what is frozen for a while "
                "stays trainable, with gradients of None (docs/how_to.md); for others call opt.init(params)"
            )
            if key[0] not in "[.":
                whose = "other trainable parameters than these, or of these in another order"
                if "/" in key:
                    whose += ", or of these cut into other parts"
                    remedy += "; of parameters that are cut, go on with it on a mesh with the sizes of these axes that "
                    remedy += "it was made on"
                dtypes = sorted({dtype_name(leaf.param.dtype) for leaf in self._leaves})
                dtype = re.split(r"\W", key)[0]
                if dtype not in dtypes:
                    whose = f"parameters of {dtype}, and these are of {' and '.join(dtypes)}"
                    remedy = f"keep them in {dtype}, and cast in the loss; or begin anew with opt.init(params)"
            raise SpecError(
                f"opt_state holds state of {whose}",
                got=f"opt_state['state'][{key!r}]",
                expected=f"some of {sorted(known)[:5]}",
                remedy=remedy,
            )


def _ranks(shard: Axis | None, leaf: Leaf) -> Ranks | None:
    """The ranks among which a leaf is sliced; None if it is stepped whole."""
    if shard is None:
        return None
    if shard == "auto":
        return _known_ranks(leaf)
    try:
        index = int(transforms.axis_index(shard))  # plain: the slices are put together again, and alike on all ranks
        ranks = Ranks(shard, index, transforms.axis_size(shard), True)
    except MeshError:
        ranks = Ranks(shard)
    names = {shard} if isinstance(shard, str) else {*shard}
    return None if ranks.inside and names & layout_of(leaf.param).axes else ranks


def _together(leaf: Leaf) -> Ranks | None:
    """For leaves too few to slice, or with no ranks to share them: each rank steps all, laid end to end as well."""
    whole = leaf.param.layout is torch.strided and not layout_of(leaf.param).axes
    return ALONE if whole and _known_axes(leaf) is not None else None


def _known_ranks(leaf: Leaf) -> Ranks | None:
    """The ranks that are known to have the same parameter and the same gradient, and that share memory.

    Over a network, and on GPUs, each rank steps everything: every rank has whole gradients by then, so gathering new
    parameters would only add an exchange.
    """
    region, own = current(), _known_axes(leaf)
    if region is None or own is None:
        return None
    layout = region.session.layout
    if region.session.backend != "shm":
        return _together(leaf) if transforms.current_plan().virtual is None else None
    axes = tuple(name for name, size in layout.axes.items() if name not in own and size > 1)
    if axes:
        return Ranks(axes, layout.part(region.session.rank, axes), layout.parts(axes), True)
    alone = tuple(name for name in layout.axes if name not in own)
    if transforms.current_plan().virtual is None:
        return _together(leaf) if alone else None
    # In exact mode a single rank, too, keeps its state by slices, as any number of ranks does.
    return Ranks(alone, inside=True) if alone else None


def _known_axes(leaf: Leaf) -> frozenset[str] | None:
    """The axes over which a parameter differs; None if that isn't known, or its gradient may differ over others."""
    own, others = leaf.axes, leaf.grad_axes
    return None if current() is None or own is None or others is None or not others <= own else own


def _is_like(name: str, value: Any, leaf: Leaf) -> bool:
    if not isinstance(value, Tensor) or value.shape != leaf.param.shape:
        return False
    return value.ndim > 0 or name not in _ONE_FOR_A_LEAF


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else repr(value)
