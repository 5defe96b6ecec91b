"""A region: one call of a function on every rank, each on its own shards.

`execute` is the whole of it on one rank: cut what came whole, run the body, give each result its spec. It runs the
same in a driver's rank and in a launched one. What the body's library calls need to know (which mesh, how much this
rank's samples weigh) is in `current()`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..kernels.arena import word_key
from ..kernels.errors import MeshError, SpecError, message
from . import trees
from .rank import RankSession
from .spec import REPLICATED, P, Sharded


@dataclasses.dataclass(slots=True)
class Region:
    """What the running body's library calls see.

    Attributes:
        session: the mesh as this rank knows it.
        totals: axis -> (samples on this rank, samples in the whole batch), where a batch was split over the axis.
        batch_total: dim 0 of the whole batch, if it was split on the way in.
        key: what this region's random numbers are made from.
    """

    session: RankSession
    key: tuple
    mesh: Any = None
    batch_total: int | None = None
    batch_axis: str | None = None
    totals: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    wire_dtype: torch.dtype | None = None
    bucket_mb: float = 25.0

    def weight(self, axes: tuple[str, ...]) -> tuple[float, bool]:
        """This rank's share in a mean over `axes`, and whether it has any samples at all."""
        weight, any_samples = 1.0, True
        for name in axes:
            local, total = self.totals.get(name, (1, self.session.layout.axes[name]))
            weight *= local / total if total else 0.0
            any_samples = any_samples and local > 0
        return weight, any_samples


_regions = threading.local()


def current() -> Region | None:
    """The region whose body is running on this thread, if any."""
    stack = getattr(_regions, "stack", None)
    return stack[-1] if stack else None


def require(what: str) -> Region:
    """The running region, or an error that says that `what` needs one."""
    region = current()
    if region is None:
        raise MeshError(
            message(
                f"{what} was called outside a region, where no mesh axis has a meaning",
                remedy="call it inside an @spmd function, or inside a function given to mesh.run",
            )
        )
    return region


class inside:
    """Make `region` the current one for the length of a `with` block."""

    def __init__(self, region: Region):
        self._region = region

    def __enter__(self) -> Region:
        if not hasattr(_regions, "stack"):
            _regions.stack = []
        _regions.stack.append(self._region)
        return self._region

    def __exit__(self, *_: object) -> None:
        _regions.stack.pop()


def seed_generators(key: tuple) -> None:
    """Seed torch's default generator from a key, the same in every process and run."""
    torch.manual_seed(word_key("rng", *key))


# -- which axes a tensor differs over ------------------------------------------------------------------------------


def mark(tensor: Any, axes: frozenset[str]) -> Any:
    """Note that a tensor holds different values along `axes`, and the same along all others."""
    tensor._spmd_axes = axes
    return tensor


def marked(tensor: Any) -> frozenset[str] | None:
    """The axes a tensor is known to differ over, its own or its base's; None if nothing is known."""
    axes = getattr(tensor, "_spmd_axes", None)
    if axes is None and tensor._is_view() and tensor._base is not None:
        axes = getattr(tensor._base, "_spmd_axes", None)
    return axes


# -- programs ---------------------------------------------------------------------------------------------------------


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


@dataclasses.dataclass(frozen=True, slots=True)
class Entering:
    """A leaf of the arguments on its way in: `spec` says how to cut a tensor that comes whole.

    Attributes:
        whole: the tensor is the global value (else it is already this rank's shard).
        uneven: the cut dimension need not be divisible (a batch).
    """

    value: Any
    spec: P = REPLICATED
    whole: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Leaving:
    """A leaf of the results: what the other side must know of it.

    Attributes:
        spec: None for a value that is not a tensor.
        whole: the global shape, where the rank knows it.
        digest: of the bytes, where replicas are to be compared.
    """

    spec: P | None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    frozen: bool = False
    value: Any = None
    digest: bytes | None = None
    whole: tuple[int, ...] | None = None


def execute(
    session: RankSession,
    mesh: Any,
    program: Program,
    treedef: Any,
    entering: list[Entering],
    *,
    key: tuple,
    batch_total: int | None,
    verify: bool,
) -> tuple[Any, list[Any], list[Leaving]]:
    """Run a program on this rank: (the results' treedef, their local leaves, what to say of each)."""
    layout, rank = session.layout, session.rank
    local: list[Any] = []
    for leaf in entering:
        value = leaf.value
        if isinstance(value, torch.Tensor):
            if leaf.whole and leaf.spec.entries:
                # A copy, so that the whole does not stay in memory for the sake of a part.
                value = layout.cut(value, leaf.spec, rank).clone()
            mark(value, leaf.spec.axes)
            value._spmd_spec = leaf.spec  # type: ignore[attr-defined]
        local.append(value)
    versions = [value._version if isinstance(value, torch.Tensor) else 0 for value in local]
    args, kwargs = trees.unflatten(treedef, local)
    region = Region(
        session, key, mesh, batch_total=batch_total, batch_axis=program.batch_axis if batch_total is not None else None
    )
    state = torch.get_rng_state() if session.launched else None
    seed_generators((*key, rank))
    try:
        with inside(region), torch.enable_grad():
            result = program.body(*args, **kwargs)
    finally:
        if state is not None:
            torch.set_rng_state(state)
    for value, version, path in zip(
        local, versions, trees.paths((args, kwargs)) if _changed(local, versions) else versions, strict=True
    ):
        if isinstance(value, torch.Tensor) and value._version != version:
            raise SpecError(
                message(
                    f"{program.name} changed its input {describe_path(str(path))} in place",
                    where=session.where(),
                    remedy="a step must be pure: write x = x + y instead of x += y, or clone the input first",
                )
            )
    return _leave(session, program, result, verify)


def _changed(local: list[Any], versions: list[int]) -> bool:
    return any(isinstance(v, torch.Tensor) and v._version != old for v, old in zip(local, versions, strict=True))


def describe_path(path: str) -> str:
    """`argument 0['w']` from a path into (args, kwargs)."""
    if path.startswith("[0]["):
        index, _, rest = path[4:].partition("]")
        return f"argument {index}{rest}"
    if path.startswith("[1]["):
        name, _, rest = path[4:].partition("]")
        return f"argument {name.strip(chr(39))}{rest}"
    return path


def is_spec(x: Any) -> bool:
    return isinstance(x, P)


def is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def _leave(session: RankSession, program: Program, result: Any, verify: bool) -> tuple[Any, list[Any], list[Leaving]]:
    from .array import Array

    layout = session.layout
    declared: list[P | None] = []

    def strip(node: Any) -> Any:
        if isinstance(node, Sharded):
            declared.extend([node.spec] * len(trees.leaves(node.local)))
            return node.local
        declared.append(node.spec if isinstance(node, Array) else None)
        return node

    result = trees.map(strip, result, is_leaf=is_sharded)
    leaves, treedef = trees.flatten(result)
    try:
        specs = trees.broadcast_prefix(program.out_specs, result, is_leaf=is_spec)
    except ValueError as error:
        raise SpecError(
            message(
                f"out_specs of {program.name} do not fit what it returned",
                got=f"out_specs {program.out_specs!r}: {error}",
                expected="a prefix of the result's tree",
                remedy="give one P for all results, or one per result",
            )
        ) from None
    said: list[Leaving] = []
    for index, leaf in enumerate(leaves):
        spec = declared[index] if declared[index] is not None else specs[index]
        spec = REPLICATED if spec is None else spec
        if isinstance(leaf, Array):
            leaf = leaf.local
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(leaf)
        if not isinstance(leaf, torch.Tensor):
            if spec.entries:
                raise SpecError(
                    message(
                        f"result {path_of(result, index)} of {program.name} is not a tensor and cannot be sharded",
                        got=f"{type(leaf).__name__} with {spec}",
                        remedy="return a tensor, or give it P()",
                    )
                )
            leaves[index] = leaf
            said.append(Leaving(None, value=leaf))
            continue
        layout.check(spec, where=f"out_specs of {program.name}")
        if len(spec.entries) > leaf.dim():
            raise SpecError(
                message(
                    f"result {path_of(result, index)} of {program.name} has fewer dimensions than its spec",
                    got=f"shape {tuple(leaf.shape)} with {spec}",
                    where=session.where(),
                    remedy="reshape it, or give it a shorter spec",
                )
            )
        frozen = isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad
        if not frozen:
            leaf = leaf.detach()
        if session.is_leased(leaf):
            leaf = leaf.clone()
        leaves[index] = leaf
        compare = verify and len(spec.axes) < len(layout.names)
        said.append(Leaving(spec, tuple(leaf.shape), leaf.dtype, frozen, digest=digest(leaf) if compare else None))
    return treedef, leaves, said


def path_of(result: Any, index: int) -> str:
    path = trees.paths(result)[index]
    return f"leaf {path}" if path else "(the whole of it)"


def digest(tensor: torch.Tensor) -> bytes:
    """A short hash of a tensor's bytes, shape and dtype."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    state = hashlib.blake2b(repr((tuple(tensor.shape), tensor.dtype)).encode(), digest_size=16)
    state.update(flat.numpy())
    return state.digest()


def disagreement(layout: Any, treedef: Any, said: dict[int, list[Leaving]], name: str, mesh: str) -> SpecError | None:
    """The error for a result that should be the same on several ranks and is not, or None.

    Args:
        said: what each rank said of its leaves, in the same order on all.
    """
    from .failure import ranks_text

    first = said[0]
    for index, leaf in enumerate(first):
        groups: dict[int, dict[Any, list[int]]] = {}
        for rank, leaves in said.items():
            spec = leaf.spec
            owner = 0 if spec is None else layout.owner(spec, rank)
            token = _token(leaves[index])
            groups.setdefault(owner, {}).setdefault(token, []).append(rank)
        for variants in groups.values():
            if len(variants) > 1:
                path = trees.paths(trees.unflatten(treedef, list(range(len(first)))))[index]
                sides = "; ".join(f"{ranks_text(ranks)}: {_show(said[ranks[0]][index])}" for ranks in variants.values())
                axes = [axis for axis in layout.names if leaf.spec is None or axis not in leaf.spec.axes]
                return SpecError(
                    message(
                        f"result {path or '(the whole of it)'} of {name} should be the same on all ranks "
                        f"along {', '.join(axes)}, and is not",
                        got=sides,
                        where=mesh,
                        remedy=f'psum or pmean it over {axes[0]!r}, or give it a spec such as out_specs=P("{axes[0]}")',
                    )
                )
    return None


def _token(leaf: Leaving) -> Any:
    if leaf.spec is not None:
        return (leaf.digest, leaf.dtype) if leaf.digest is not None else None
    value = leaf.value
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (type(value).__name__, repr(value) if value != value else value)


def _show(leaf: Leaving) -> str:
    if leaf.spec is None:
        return repr(leaf.value)[:60]
    return (
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} with other bytes"
        if leaf.shape
        else "another number"
    )
