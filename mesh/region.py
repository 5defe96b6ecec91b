"""A region: one call of a function on every rank, each on its own shards.

Library functions that the body calls find what they need in `current()`: the mesh, and the plan of the step.
Invariant: a thread runs the body of one region at a time, for the length of a `with inside(region)` block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..kernels.call import word_key
from ..kernels.errors import MeshError
from .ambient import Ambient, under
from .batch import BatchSplit
from .purity.updates import Update
from .rank.session import RankSession

_MOST_CHECKS = 4096  # that a region notes
Differing = dict[Any, list[frozenset[str]]]  # for each leaf the axes, by the differentiated function


@dataclasses.dataclass(slots=True)
class Noted:
    """What calls of one kind have shown on this rank, and later ones need not show again.

    A kind has one code and one signature, whatever the data are that its function captures.

    Attributes:
        looked_at: what they have checked (`transforms.first_call`).
        differing: axes along which leaves that gradients were taken by differed at the first of them
            (`transforms._arguments`).
        choices: flags and names, and integers, seen so far.
        checked: one has ended well that was checked as a first call.
    """

    looked_at: set[Any] = dataclasses.field(default_factory=set)
    differing: Differing = dataclasses.field(default_factory=dict)
    choices: tuple[set[Any], set[Any]] = dataclasses.field(default_factory=lambda: (set(), set()))
    checked: bool = False

    def note_checked(self, what: Any) -> None:
        """Note what was checked; not without end, since a region may be as long as the run."""
        if len(self.looked_at) < _MOST_CHECKS:
            self.looked_at.add(what)


@dataclasses.dataclass(slots=True)
class Region:
    """What the library functions that the running body calls can see.

    Attributes:
        session: the mesh as this rank knows it.
        key: what this region's random numbers are made from.
        body: the function that runs in it, of an @spmd function.
        batch, total: how the batch that came in was split, and how many rows it has, if that is known.
        plan: of the `data_parallel` step that is running, `transforms._plan.Plan`.
        random: what the generators were last seeded with.
        keys: how many keys were derived from that.
        alike: the axes along which all ranks were seeded the same.
        pure: the body may change nothing: it is an @spmd function.
        by_some: the body runs on some ranks only.
        in_gradient: a function is being differentiated.
        within: the operator of torch's one of whose functions is running, "torch.cond" say, at a followed call.
        noted: what calls of its kind have shown.
        notes_differing: this is the first of them here.
        looks: how many functions this region has offered for such a check so far.
        captured: ids of the tensors that the function refers to besides its arguments and that require gradients.
        updates: the steps of optimizers, at the first call of a signature (`purity.updates`); None at later ones.
        differentiated: the tensors that gradients were taken with respect to, at such a call.
    """

    session: RankSession
    key: tuple
    mesh: Any = None
    body: Any = None
    batch: BatchSplit = dataclasses.field(default_factory=BatchSplit)
    total: int | None = None
    plan: object = None
    random: tuple = ()
    keys: int = 0
    alike: frozenset[str] = frozenset()
    captured: frozenset[int] = frozenset()
    pure: bool = False
    by_some: bool = False
    in_gradient: bool = False
    within: str = ""
    noted: Noted = dataclasses.field(default_factory=Noted)
    notes_differing: bool = False
    looks: int = 0
    updates: list[Update] | None = None
    differentiated: list[torch.Tensor] = dataclasses.field(default_factory=list)

    @property
    def is_strided(self) -> bool:
        """Whether its batch is a `Loader`'s, which deals the samples to the ranks one by one."""
        return self.key[1:2] == ("batch",)


class _Regions(threading.local):
    """The regions that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Region] = []


_regions = _Regions()


def current() -> Region | None:
    """The region whose body is running on this thread, if any."""
    stack = _regions.stack
    return stack[-1] if stack else None


@contextlib.contextmanager
def running_within(operator: str) -> Iterator[None]:
    """While a function runs that was given to an operator of torch's: it may not communicate."""
    region = current()
    if region is None:
        yield
        return
    before, region.within = region.within, operator
    try:
        yield
    finally:
        region.within = before


def planned_session() -> RankSession | None:
    """The session of a step that this thread checks without running it, whatever mesh it names."""
    region = current()
    return region.session if region is not None and region.session.backend == "planned" else None


def require(what: str) -> Region:
    """The running region, or an error that says that `what` needs one."""
    region = current()
    if region is None:
        remedy = "call it inside an @spmd function, or inside a function given to mesh.run"
        if threading.current_thread() is not threading.main_thread():
            remedy += "; a thread that such a function starts is in no region: call it on the function's own thread"
        raise MeshError(f"{what} was called outside a region, where no mesh axis has a meaning", remedy=remedy)
    return region


class inside:
    """Make `region` the current one for the length of a `with` block.

    In the block, torch runs backward passes on this thread and not on its own thread for the GPU, which would not know
    the region: a layer that torch.utils.checkpoint computes again may communicate.
    """

    def __init__(self, region: Region):
        self._region = region

    def __enter__(self) -> Region:
        _regions.stack.append(self._region)
        self._threads = torch.autograd.set_multithreading_enabled(False)
        return self._region

    def __exit__(self, *_: object) -> None:
        self._threads.__exit__(None, None, None)
        _regions.stack.pop()


def seed_others(number: int) -> None:
    """Seed the generators of NumPy and Python."""
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


def reseed(region: Region, *more: Any, alike: frozenset[str] = frozenset()) -> None:
    """Seed torch's generator from a region's key, and from `more`, which sets this stream of numbers apart."""
    region.random, region.alike = (*region.key, *more), alike
    number = word_key("rng", *region.random)  # the same in every process and run
    # torch.manual_seed notes the whole call stack, three times, for devices that nobody has touched yet.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def generators() -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state of torch's generators, for `restore_generators`."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def restore_generators(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


_NOTHING = contextlib.nullcontext()


def run_body(
    region: Region,
    settings: Ambient | None,
    body: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    looks: contextlib.AbstractContextManager[Any] = _NOTHING,
) -> Any:
    """Run a region's body under its caller's settings, and within `looks`.

    Torch's generator is seeded from the region's key; a launched rank's is put back, since the script goes on with it.
    """
    state = generators() if region.session.launched else None
    reseed(region, region.session.rank)
    try:
        with inside(region), under(settings), looks:
            return body(*args, **(kwargs or {}))
    finally:
        if state is not None:
            restore_generators(state)


# -- what is noted for the check of a first call -----------------------------------------------------------------------


def noted_updates() -> list[Update] | None:
    """Where steps of optimizers are noted at the first call of a signature; None at later ones."""
    region = current()
    return None if region is None else region.updates


def note_differentiated(region: Region | None, leaves: Iterable[torch.Tensor]) -> None:
    """Note what a gradient is taken with respect to, at the first call of a signature."""
    if region is not None and region.updates is not None:
        region.differentiated += leaves


# -- values that are carried from one virtual shard to the next -----------------------------------------------------


def note_carry(result: torch.Tensor, base: torch.Tensor, decay: float) -> torch.Tensor:
    """Note that `result` is `decay * base` plus something that does not depend on `base`: a running statistic.

    With it the results of shards that all began at `base` can be folded as if each had begun where the last one ended.
    """
    result._spmd_carry = (decay, base)  # type: ignore[attr-defined]
    return result


def carry_of(leaf: Any) -> tuple[float, torch.Tensor] | None:
    return getattr(leaf, "_spmd_carry", None)
