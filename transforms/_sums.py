"""Sums of many leaves, each over the axes that it asks for, in buckets that are reduced while the backward runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.bucket import Buckets, Leaf
from ..kernels.errors import SpecError, message
from ..mesh.rank.planned import PlannedBuckets, PlannedCommunicator
from ..mesh.region import Region
from ..mesh.replication.net import Varying, active, joined, unfollowed
from ._plan import Plan
from ._tokens import forget_undefined

# (axes, dtype on the wire, kind of device): leaves of one group share buckets. Not those of size one: nothing to sum.
Group = tuple[tuple[str, ...], torch.dtype | None, str]
Slot = tuple[Group, int]
_LEAST = 1 << 21  # elements of a weight; a smaller gradient stays in the cache from the product to the sum
_FEW = 4  # times the elements of the factors must go into those of the weight
_ROWS = 64  # of the weight, for each rank


class Sums:
    """One use: `add` every leaf, `open`, `fill` what there is in any order, `finish`. Outside a region, one rank's.

    Args:
        label: what the leaves are of, for ranks to compare.
    """

    def __init__(self, region: Region | None, plan: Plan, label: str = ""):
        self._region, self._plan, self._label = region, plan, label
        self._groups: dict[Group, list[Tensor]] = {}
        self._known: dict[tuple[tuple[str, ...], bool, torch.device], Group] = {}
        self._open: dict[Group, Any] = {}
        self._local: dict[Slot, Tensor] = {}
        self._factors: dict[Group, Factors] = {}
        self._gradual: set[Group] = set()  # those with leaves that come one by one
        self.filled = 0  # how many leaves have been filled in
        # What `finish` fills in at once, in groups where nothing is reduced before all is there.
        self._together: dict[Group, tuple[list[int], list[Tensor]]] = {}
        self._net = active()
        self._varying: dict[Slot, Varying] = {}  # how this rank's values differ from others', where that is followed

    def add(self, like: Tensor, axes: tuple[str, ...], *, exact: bool = False) -> Slot:
        """Announce a leaf; `exact` keeps it from travelling as `wire_dtype`, and says that it is filled in at once."""
        key = axes, exact, like.device
        group = self._known.get(key)
        if group is None:
            sizes = {} if self._region is None else self._region.session.layout.axes
            shared = tuple(name for name in sizes if name in axes and sizes[name] > 1)
            group = self._known[key] = shared, None if exact else self._plan.wire_dtype, like.device.type
            self._groups.setdefault(group, [])
            if not exact and shared:
                self._gradual.add(group)
        members = self._groups[group]
        members.append(like)
        return group, len(members) - 1

    def open(self, *, alone: bool = True) -> None:
        """Take values from now on; `alone` says that nothing else communicates before `finish`."""
        for group, members in self._groups.items():
            axes, wire_dtype, device = group
            if axes and self._region is not None:
                _check_device(device, self._region)
                # On GPUs all collectives take turns. Which comes first must not depend on the leaves that a rank uses.
                options: dict[str, Any] = {} if device != "cuda" else {"early": alone and len(self._gradual) < 2}
                comm = self._region.session.comm(axes, channel="buckets")
                on_host = device == "cpu" and comm.backend == "shm"
                if on_host and wire_dtype is None and group in self._gradual:
                    sizes = {name: self._region.session.layout.axes[name] for name in axes}
                    factors = self._factors[group] = Factors.of(members, self._plan, sizes)
                    options["products"] = factors.leaves
                buckets = self._open[group] = _kind(device, comm)(
                    comm,
                    [Leaf.of(member) for member in members],
                    bucket_bytes=self._plan.bucket_bytes,
                    wire_dtype=wire_dtype,
                    label=self._label,
                    **options,
                )
                if isinstance(buckets, Buckets) and buckets.is_single:
                    self._together[group] = [], []

    @property
    def is_gradual(self) -> bool:
        """Whether a reduction may begin before all that is summed with others is there."""
        return len(self._together) < len(self._open)

    def fill(self, slot: Slot, value: Tensor) -> None:
        """Take a leaf's value, which changes no more."""
        group, index = slot
        self.filled += 1
        buckets = self._open.get(group)
        if buckets is None:
            self._local[slot] = value
            return
        if self._net is not None:
            self._follow(slot, value)
        if group in self._together:
            indexes, values = self._together[group]
            indexes.append(index)
            values.append(value)
            return
        with unfollowed():
            buckets.fill(index, value)

    def fill_in(self, primals: Sequence[tuple[Tensor, Slot]]) -> None:
        """Take the gradients of all leaves when the backward pass is over, where it `is_gradual` no more."""
        without_samples = self._plan.without_samples
        for primal, slot in primals:
            gradient, primal.grad = primal.grad, None
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                self.fill(slot, forget_undefined(gradient, self._plan) if without_samples else gradient)

    def takes_products(self, slot: Slot) -> bool:
        """Whether a leaf may come by `fill_product`: where it is summed with that of other ranks, on CPUs."""
        _, wire_dtype, device = slot[0]
        return slot[0] in self._open and wire_dtype is None and device == "cpu"

    def fill_product(self, slot: Slot, left: Tensor, right: Tensor, *, borrowed: bool = False) -> None:
        """A leaf's value is `left.t() @ right`, which is computed where it is summed, here or by all ranks together.

        Args:
            borrowed: their memory is another's as soon as this returns.
        """
        group, index = slot
        self.filled += 1
        self._follow(slot, left, right)
        buckets = self._open[group]
        with unfollowed():
            factors = self._factors.get(group)
            if factors is not None and factors.pay(index, left, right):
                buckets.fill_product(index, *((left.clone(), right.clone()) if borrowed else (left, right)))
            else:
                torch.mm(left.t(), right, out=buckets.grad_view(index))
                buckets.mark_ready(index)

    def _follow(self, slot: Slot, *sources: Tensor) -> None:
        if self._net is not None:
            self._varying[slot] = joined(self._net.of(source) for source in sources)

    def finish(self) -> dict[Slot, Tensor]:
        """The sums; zeros where nothing was filled in."""
        net = self._net
        found: dict[Slot, Tensor] = {}
        for group, members in self._groups.items():
            if group in self._open:
                with unfollowed():
                    if group in self._together:
                        self._open[group].fill_all(*self._together.pop(group))
                    totals = self._open[group].finish()
                for index, total in enumerate(totals):
                    found[group, index] = total
                    if net is not None and (group, index) in self._varying:
                        net.note(total, self._varying[group, index].without(group[0]))
                continue
            for index, member in enumerate(members):
                local = self._local.get((group, index))
                found[group, index] = torch.zeros_like(member).detach() if local is None else local
        return found


def summed(region: Region | None, plan: Plan, values: Sequence[tuple[Tensor, tuple[str, ...]]]) -> list[Tensor]:
    """The sums of values, each with the axes that it is summed over."""
    sums = Sums(region, plan)
    slots = [sums.add(value, axes, exact=True) for value, axes in values]
    sums.open()
    for slot, (value, _) in zip(slots, values, strict=True):
        sums.fill(slot, value)
    found = sums.finish()
    return [found[slot] for slot in slots]


@dataclasses.dataclass(frozen=True, slots=True)
class Factors:
    """The leaves of a group that may come as factors: weights of linear layers, for few samples.

    Ranks of one host that exchange these, and each compute a part of the sum over all, write less memory than ranks
    that compute all of it for their own samples and add (sufficient factors: Xie et al., "Distributed Machine Learning
    via Sufficient Factor Broadcasting", 2015). What all ranks must decide alike about that depends on shapes and the
    whole batch only. Bits are then those of one product over all samples.

    Attributes:
        leaves: their indexes.
        here, total: samples on this rank, and on all that the leaves are summed over.
    """

    leaves: frozenset[int]
    here: int
    total: int

    @staticmethod
    def of(members: Sequence[Tensor], plan: Plan, sizes: Mapping[str, int]) -> Factors:
        """Those among `members`, which are summed over axes of these `sizes`."""
        here, total, ranks = 1, 1, 1
        for name, size in sizes.items():
            some, all_of_them = plan.samples.get(name, (1, size))
            here, total, ranks = here * some, total * all_of_them, ranks * size
        leaves = frozenset(
            index
            for index, leaf in enumerate(members)
            if leaf.numel() >= _LEAST  # few are
            and leaf.dim() == 2
            and leaf.dtype in (torch.float32, torch.float64)
            and leaf.is_contiguous()
            and len(leaf) >= ranks * _ROWS
            and _are_few(total, *leaf.shape)
        )
        return Factors(leaves, here, total)

    def pay(self, index: int, left: Tensor, right: Tensor) -> bool:
        """Whether to give these, where other ranks have as many rows for each of their samples."""
        length = len(left) * self.total // max(1, self.here)
        return index in self.leaves and _are_few(length, left.shape[1], right.shape[1])


def _are_few(length: int, rows: int, columns: int) -> bool:
    return _FEW * length * (rows + columns) <= rows * columns


def _check_device(device: str, region: Region) -> None:
    own = region.session.device.type
    if device not in ("cpu", own):
        raise SpecError(
            message(
                f"a gradient on {device!r} cannot be summed over a mesh of device {own!r}",
                where=region.session.where(),
                remedy=f"compute on {own!r}, or make the mesh with device={device!r}",
            )
        )


def home_of(tensor: Tensor) -> Any:
    """What the hooks of a backward pass need to know of the stream that it begins on; None but on GPUs."""
    if not tensor.is_cuda:
        return None
    from ..kernels.cuda.streams import Home

    return Home(tensor.device)


def _kind(device: str, comm: Any) -> Any:
    """The buckets for a kind of device; those of GPUs are imported where there is one."""
    if isinstance(comm, PlannedCommunicator):
        return PlannedBuckets
    if device != "cuda":
        return Buckets
    from ..kernels.cuda.bucket import CudaBuckets

    return CudaBuckets


class Filled(Protocol):
    """Sums of one kind or the other, each with places of its own."""

    def fill(self, slot: Any, value: Tensor) -> None: ...


class Hook:
    """Takes a leaf's gradient as soon as the backward pass has it.

    Args:
        home: where the backward pass began on a GPU, whose stream what sums the gradients waits for.
    """

    __slots__ = ("home", "plan", "slot", "sums")

    def __init__(self, sums: Filled, slot: Any, plan: Plan, home: Any = None):
        self.sums, self.slot, self.plan, self.home = sums, slot, plan, home

    def __call__(self, primal: Any) -> None:
        gradient, primal.grad = primal.grad, None
        if gradient is not None:
            # A rank without samples fills in as well, so that buckets and collectives alternate alike on all ranks.
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            if self.home is None or not gradient.is_cuda:
                self._fill(gradient)
            else:
                with self.home.taking(gradient):
                    self._fill(gradient)

    def _fill(self, gradient: Tensor) -> None:
        self.sums.fill(self.slot, forget_undefined(gradient, self.plan))
