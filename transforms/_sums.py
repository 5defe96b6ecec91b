"""Sums of many leaves, each over its own axes, in buckets that are reduced while the backward pass runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.bucket import Buckets, Leaf
from ..kernels.errors import SpecError
from ..mesh.rank.planned import PlannedBuckets, PlannedCommunicator
from ..mesh.region import Region
from ..mesh.replication.net import Varying, active, joined, unfollowed
from ._plan import Plan
from ._tokens import forget_undefined

_LEAST = 1 << 21  # elements of a weight; a smaller gradient stays in the processor's cache from product to sum
_FEW = 4  # the weight must have at least this many times as many elements as the factors
_ROWS = 64  # least number of the weight's rows for each rank


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """Leaves that share buckets.

    Attributes:
        axes: the axes that they are summed over, without those of size one.
        wire_dtype, device: the dtype that they travel as, and the kind of device.
        members: the leaves.
        is_gradual: whether any leaf is a gradient, which is filled in while the backward pass runs.
        buckets: the buckets that sum them; None where there is nothing to sum.
        factors: the leaves that may come as factors.
        together: with a single bucket, the indexes and values that `finish` fills in all at once.
        local: the values, by index, where there is nothing to sum.
        totals: the sums, by index.
    """

    axes: tuple[str, ...]
    wire_dtype: torch.dtype | None
    device: str
    members: list[Tensor] = dataclasses.field(default_factory=list)
    is_gradual: bool = False
    buckets: Any = None
    factors: Factors | None = None
    together: tuple[list[int], list[Tensor]] | None = None
    local: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    totals: list[Tensor] = dataclasses.field(default_factory=list)


class Slot(NamedTuple):
    """Where a leaf's sum will be."""

    group: Group
    place: int

    @property
    def total(self) -> Tensor:
        """The sum, after `Sums.finish`."""
        return self.group.totals[self.place]


class Sums:
    """For one use: `add` every leaf, `open`, `fill` leaves in any order, `finish`. Outside a region there is one rank.

    Args:
        label: what the leaves are of, for ranks to compare.
    """

    def __init__(self, region: Region | None, plan: Plan, label: str = ""):
        self._region, self._plan, self._label = region, plan, label
        self._groups: dict[Any, Group] = {}
        self._known: dict[tuple[tuple[str, ...], bool, torch.device], Group] = {}
        self.filled = 0  # how many leaves have been filled in
        self._net = active()
        self._varying: dict[Slot, Varying] = {}  # with a net, how this rank's values may differ

    def add(self, like: Tensor, axes: tuple[str, ...], *, exact: bool = False) -> Slot:
        """Announce a leaf; an `exact` one never travels as `wire_dtype`, and does not wait for the backward pass."""
        key = axes, exact, like.device
        group = self._known.get(key)
        if group is None:
            sizes = {} if self._region is None else self._region.session.layout.axes
            shared = tuple(name for name in sizes if name in axes and sizes[name] > 1)
            kind = shared, None if exact else self._plan.wire_dtype, like.device.type
            group = self._known[key] = self._groups.setdefault(kind, Group(*kind))
            group.is_gradual |= bool(shared) and not exact
        group.members.append(like)
        return Slot(group, len(group.members) - 1)

    def open(self, *, alone: bool = True) -> None:
        """Take values from now on; `alone` says that nothing else communicates before `finish`."""
        gradual = sum(group.is_gradual for group in self._groups.values())
        for group in self._groups.values():
            if group.axes and self._region is not None:
                _check_device(group.device, self._region)
                # On GPUs collectives run one after another: their order must not depend on which leaves a rank uses.
                options: dict[str, Any] = {} if group.device != "cuda" else {"early": alone and gradual < 2}
                comm = self._region.session.comm(group.axes, channel="buckets")
                on_host = group.device == "cpu" and comm.backend == "shm"
                if on_host and group.wire_dtype is None and group.is_gradual:
                    sizes = {name: self._region.session.layout.axes[name] for name in group.axes}
                    group.factors = Factors.of(group.members, self._plan, sizes)
                    options["products"] = group.factors.leaves
                group.buckets = _kind(group.device, comm)(
                    comm,
                    [Leaf.of(member) for member in group.members],
                    bucket_bytes=self._plan.bucket_bytes,
                    wire_dtype=group.wire_dtype,
                    label=self._label,
                    **options,
                )
                if isinstance(group.buckets, Buckets) and group.buckets.is_single:
                    group.together = [], []

    @property
    def is_gradual(self) -> bool:
        """Whether some reduction may begin before all leaves are filled in."""
        return any(group.buckets is not None and group.together is None for group in self._groups.values())

    def fill(self, slot: Slot, value: Tensor) -> None:
        """Take a leaf's value, which must not be changed afterwards."""
        group, index = slot
        self.filled += 1
        if group.buckets is None:
            group.local[index] = value
            return
        if self._net is not None:
            self._follow(slot, value)
        if group.together is not None:
            indexes, values = group.together
            indexes.append(index)
            values.append(value)
            return
        with unfollowed():
            group.buckets.fill(index, value)

    def fill_in(self, primals: Sequence[tuple[Tensor, Slot]]) -> None:
        """Take the gradients that no hook has taken, when the backward pass is over."""
        without_samples = self._plan.without_samples
        for primal, slot in primals:
            gradient, primal.grad = primal.grad, None
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                self.fill(slot, forget_undefined(gradient, self._plan) if without_samples else gradient)

    def takes_products(self, slot: Slot) -> bool:
        """Whether a leaf may be filled by `fill_product`: on CPUs, if it is summed over ranks in its own dtype."""
        group = slot[0]
        return group.buckets is not None and group.wire_dtype is None and group.device == "cpu"

    def fill_product(self, slot: Slot, left: Tensor, right: Tensor, *, borrowed: bool = False) -> None:
        """Fill in `left.t() @ right`, computed right in the bucket, by this rank or by all ranks together.

        Args:
            borrowed: the factors' memory is reused as soon as this returns.
        """
        group, index = slot
        self.filled += 1
        self._follow(slot, left, right)
        with unfollowed():
            if group.factors is not None and group.factors.pay(index, left, right):
                factors = (left.clone(), right.clone()) if borrowed else (left, right)
                group.buckets.fill_product(index, *factors)
            else:
                torch.mm(left.t(), right, out=group.buckets.grad_view(index))
                group.buckets.mark_ready(index)

    def _follow(self, slot: Slot, *sources: Tensor) -> None:
        if self._net is not None:
            self._varying[slot] = joined(self._net.of(source) for source in sources)

    def finish(self) -> None:
        """Put the sums into `Group.totals`; leaves that were not filled in get zeros."""
        for group in self._groups.values():
            if group.buckets is not None:
                with unfollowed():
                    if group.together is not None:
                        group.buckets.fill_all(*group.together)
                    group.totals = group.buckets.finish()
                continue
            for index, member in enumerate(group.members):
                local = group.local.get(index)
                group.totals.append(torch.zeros_like(member).detach() if local is None else local)
        if self._net is not None:
            for slot, varying in self._varying.items():
                self._net.note(slot.total, varying.without(slot.group.axes))


def summed(region: Region | None, plan: Plan, values: Sequence[tuple[Tensor, tuple[str, ...]]]) -> list[Tensor]:
    """The sums of values, which come as pairs (value, the axes that it is summed over)."""
    sums = Sums(region, plan)
    slots = [sums.add(value, axes, exact=True) for value, axes in values]
    sums.open()
    for slot, (value, _) in zip(slots, values, strict=True):
        sums.fill(slot, value)
    sums.finish()
    return [slot.total for slot in slots]


@dataclasses.dataclass(frozen=True, slots=True)
class Factors:
    """The leaves of a group that may come as factors: weights of linear layers, for few samples.

    Ranks of one host that exchange the factors, and each compute some rows of the sum over all samples, write less
    memory than ranks that compute the whole gradient for their own samples and add (sufficient factors: Xie et al.,
    "Distributed Machine Learning via Sufficient Factor Broadcasting", 2015). The bits are those of one product over all
    samples. What all ranks must decide alike depends on nothing but shapes and the size of the whole batch.

    Attributes:
        leaves: the indexes of these leaves.
        here, total: samples on this rank, and on all ranks that the leaves are summed over.
    """

    leaves: frozenset[int]
    here: int
    total: int

    @staticmethod
    def of(members: Sequence[Tensor], plan: Plan, sizes: Mapping[str, int]) -> Factors:
        """Choose from `members`, which are summed over axes of these `sizes`."""
        here, total, ranks = 1, 1, 1
        for name, size in sizes.items():
            some, all_of_them = plan.samples.get(name, (1, size))
            here, total, ranks = here * some, total * all_of_them, ranks * size
        leaves = frozenset(
            index
            for index, leaf in enumerate(members)
            if leaf.numel() >= _LEAST  # checked first, since few are so large
            and leaf.dim() == 2
            and leaf.dtype in (torch.float32, torch.float64)
            and leaf.is_contiguous()
            and len(leaf) >= ranks * _ROWS
            and _are_few(total, *leaf.shape)
        )
        return Factors(leaves, here, total)

    def pay(self, index: int, left: Tensor, right: Tensor) -> bool:
        """Whether to exchange these factors, assuming that other ranks have as many rows per sample."""
        length = len(left) * self.total // max(1, self.here)
        return index in self.leaves and _are_few(length, left.shape[1], right.shape[1])


def _are_few(length: int, rows: int, columns: int) -> bool:
    return _FEW * length * (rows + columns) <= rows * columns


def _check_device(device: str, region: Region) -> None:
    own = region.session.device.type
    if device not in ("cpu", own):
        raise SpecError(
            f"a gradient on {device!r} cannot be summed over a mesh of device {own!r}",
            where=region.session.where(),
            remedy=f"compute on {own!r}, or make the mesh with device={device!r}",
        )


def home_of(tensor: Tensor) -> Any:
    """What hooks need to know about the stream that the backward pass begins on; None if not on a GPU."""
    if not tensor.is_cuda:
        return None
    from ..kernels.cuda.streams import Home

    return Home(tensor.device)


def _kind(device: str, comm: Any) -> Any:
    """The class of buckets for a kind of device; the one for GPUs is imported only where it is needed."""
    if isinstance(comm, PlannedCommunicator):
        return PlannedBuckets
    if device != "cuda":
        return Buckets
    from ..kernels.cuda.bucket import CudaBuckets

    return CudaBuckets


class Filled(Protocol):
    """`Sums` or `TreeSums`: what a hook fills gradients into."""

    def fill(self, slot: Any, value: Tensor) -> None: ...


class Hook:
    """Takes a leaf's gradient as soon as the backward pass has computed it.

    Args:
        home: on a GPU, where the backward pass began; the sums wait for its stream.
    """

    __slots__ = ("home", "plan", "slot", "sums")

    def __init__(self, sums: Filled, slot: Any, plan: Plan, home: Any = None):
        self.sums, self.slot, self.plan, self.home = sums, slot, plan, home

    def __call__(self, primal: Any) -> None:
        gradient, primal.grad = primal.grad, None
        if gradient is not None:
            # A rank without samples fills in too, so that buckets and collectives alternate in the same way everywhere.
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            if self.home is None or not gradient.is_cuda:
                self._fill(gradient)
            else:
                with self.home.taking(gradient):
                    self._fill(gradient)

    def _fill(self, gradient: Tensor) -> None:
        self.sums.fill(self.slot, forget_undefined(gradient, self.plan))
