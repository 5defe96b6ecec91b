"""Along which axes of the mesh tensors differ: marks on single tensors, and the net that follows all of them.

A mark is a fact: this tensor differs along these axes, and along no others. It decides, in every call, over which axes
a gradient is summed. The net (`Net`) joins marks through everything that a body computes; it is used in calls with
`Check.TYPES`, and finds a forgotten `psum` even if the values agree by chance. Example: the batch is marked {"data"};
`loss = (w * x).sum()` gets that from `x`, and `psum(loss, "data")` clears it.
Invariant: without a net nothing is followed, and a mark costs one attribute.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from ...kernels.callsite import user_line
from ...kernels.torch_private import base, keep_storage_apart, storage, version, versions

# -- marks -------------------------------------------------------------------------------------------------------------


def mark(tensor: Any, axes: frozenset[str], origin: str = "") -> Any:
    """Note that a tensor differs along `axes`, and is the same along all others; `origin` says why, for messages."""
    tensor._spmd_axes = axes
    tensor._spmd_version = version(tensor)
    net = active()
    if net is not None:
        net.override(tensor, axes, origin)
    return tensor


def marked(tensor: Any) -> frozenset[str] | None:
    """The axes that a tensor, or its base if it is a view, was marked with; None if nothing is known."""
    axes = getattr(tensor, "_spmd_axes", None)
    if axes is None:
        axes = getattr(base(tensor), "_spmd_axes", None)
    return axes


def differs_over(tensor: Any) -> frozenset[str] | None:
    """The axes of a tensor's own mark; None if it has none, or was changed in place since."""
    axes = getattr(tensor, "_spmd_axes", None)
    return axes if axes is None or getattr(tensor, "_spmd_version", None) in (None, version(tensor)) else None


def mark_all(tensors: Sequence[Any], axes: Sequence[frozenset[str] | None]) -> None:
    """`mark` each tensor with its axes, except where these are None."""
    if active() is not None:
        for tensor, own in zip(tensors, axes, strict=True):
            if own is not None:
                mark(tensor, own)
        return
    for tensor, own, now in zip(tensors, axes, versions(tensors), strict=True):
        if own is not None:
            tensor._spmd_axes, tensor._spmd_version = own, now


def all_differ_over(tensors: Sequence[Any]) -> tuple[frozenset[str] | None, ...] | None:
    """`differs_over` of each; None if any was changed in place since it was marked, or has no mark."""
    try:
        marks = list(map(_mark_of, tensors))
    except AttributeError:
        return None
    now = versions(tensors)
    return tuple([axes for axes, _ in marks]) if now == [noted for _, noted in marks] else None


def differ_over(tensors: Sequence[Any]) -> Sequence[frozenset[str] | None]:
    """`differs_over` of each."""
    return all_differ_over(tensors) or [differs_over(tensor) for tensor in tensors]


_mark_of = attrgetter("_spmd_axes", "_spmd_version")


# -- the net -----------------------------------------------------------------------------------------------------------


class Varying(NamedTuple):
    """How a tensor may differ between ranks.

    Attributes:
        origins: axis -> the first cause: `argument batch['x']`.
        line: where the user's program last computed with it: `train.py:12`.
        statistic: the operation that computed it from several of this rank's samples, if any: `mean at train.py:12`.
        chosen: the operation that chose it, or rows of it, by values, if any: `index at train.py:12`.
        row: which of this rank's samples it comes of, if it is known to be one, or some in a row: from, and up to.
    """

    origins: dict[str, str]
    line: str = ""
    statistic: str = ""
    chosen: str = ""
    row: int | tuple[int, int] | None = None

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(self.origins)

    def without(self, axes: Iterable[str]) -> Varying:
        gone = set(axes)
        left = {name: why for name, why in self.origins.items() if name not in gone}
        return self._replace(origins=left) if len(left) == len(self.origins) else Varying(left, self.line, row=self.row)


NOWHERE = Varying({})
RANDOM = "random numbers, which each rank draws for itself"  # an origin


def joined(parts: Iterable[Varying]) -> Varying:
    """How something computed from several parts varies: along each axis that one of them varies along."""
    origins: dict[str, str] = {}
    statistic, chosen, rows = "", "", set()
    for part in parts:
        if part.origins:
            origins, statistic, chosen = {**part.origins, **origins}, statistic or part.statistic, chosen or part.chosen
            rows.add(part.row)
    row = rows.pop() if len(rows) == 1 else None
    return Varying(origins, user_line(), statistic, chosen, row) if origins else NOWHERE


class Net:
    """The axes along which each tensor of one region may differ.

    Most is noted by storage, which views, detached tensors and what autograd saves share. If a view differs in another
    way than the rest of its storage (one rank's rows of a whole tensor, a leaf of a bucket), that is noted on the view
    itself, and holds until it is changed in place.

    Args:
        sizes: of the mesh's axes; along an axis of size 1 nothing differs but virtual shards.
    """

    def __init__(self, sizes: dict[str, int]):
        self.axes = frozenset(name for name, size in sizes.items() if size > 1)
        self.samples, self.split = 0, tuple[str, ...]()
        """How many samples of a split batch this rank has, and the axes along which it is split."""
        self.asked = False  # whether the body asked for its place in the mesh: ranks may do different things then
        self.numbers: dict[float, str] = {}  # statistics that `.item()` made numbers of, with what computed them
        self._storages: dict[int, tuple[Any, Varying]] = {}  # the first entry keeps the address from being reused
        self._paused = 0

    def __deepcopy__(self, memo: Any) -> Net:  # with a tensor that it has a note on; a copy would free storages twice
        return self

    def of(self, tensor: Any) -> Varying:
        """How a tensor may differ."""
        own = getattr(tensor, "_spmd_varying", None)
        if own is not None and own[0] is self and own[1] == version(tensor):
            return own[2]
        found = self._storages.get(storage(tensor))
        return NOWHERE if found is None else found[1]

    def override(self, tensor: Tensor, axes: frozenset[str], origin: str) -> None:
        """Note exactly how a tensor differs, whatever is known of other tensors in the same memory."""
        before = self.of(tensor).origins
        origins = {name: origin or before.get(name, "") for name in axes & self.axes}
        self.note(tensor, Varying(origins, user_line() if origins else ""))

    def note(self, tensor: Any, varying: Varying, number: int | None = None) -> None:
        """Note how this object differs, while its version is the present one, or `number`."""
        tensor._spmd_varying = (self, version(tensor) if number is None else number, varying)

    def enter(self, tensors: Sequence[tuple[Tensor, Varying]]) -> None:
        """Note how tensors that were not followed so far differ.

        This is noted by storage, too, if all tensors in it differ alike, since torch makes views of them, which are
        other objects, within its operations.
        """
        kinds: dict[int, set[frozenset[str]]] = {}
        for tensor, varying in tensors:
            kinds.setdefault(storage(tensor), set()).add(varying.axes)
        for tensor, varying in tensors:
            if varying.origins:
                self.note(tensor, varying)
                if len(kinds[storage(tensor)]) == 1:
                    self.made(tensor, varying)

    def note_averaged(self, tensor: Any, axes: frozenset[str]) -> None:
        """Note that a tensor is aux, the mean over `axes` of what differed along them."""
        tensor._spmd_averaged = axes

    def averaged(self, tensor: Any) -> frozenset[str]:
        return getattr(tensor, "_spmd_averaged", frozenset())

    def view(self, tensor: Tensor, varying: Varying, number: int | None = None) -> None:
        """Note how a tensor differs that shares another's memory."""
        if self.of(tensor)._replace(line=varying.line) != varying:
            self.note(tensor, varying, number)

    def made(self, tensor: Tensor, varying: Varying) -> None:
        """Note how a tensor differs that has new memory, or was overwritten as a whole."""
        key = storage(tensor)
        if not key:
            self.note(tensor, varying)
        elif varying.origins:
            self._storages[key] = (keep_storage_apart(tensor), varying)
        else:
            self._storages.pop(key, None)

    def written(self, tensor: Tensor, varying: Varying) -> None:
        """Note that something was written to a part of a tensor's memory."""
        whole = joined([self._storages.get(storage(tensor), (None, NOWHERE))[1], self.of(tensor), varying])
        is_part = tensor.numel() * tensor.element_size() < nbytes(tensor)
        self.made(tensor, whole._replace(row=None) if is_part else whole)  # the rest is of other samples

    def result(self, tensor: Tensor, varying: Varying) -> None:
        """Note exactly how a result of the library differs that was computed while the net was paused."""
        self.note(tensor, varying)
        if 2 * tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            self.made(tensor, varying)

    def uncovered(self, tensor: Tensor, axes: frozenset[str]) -> tuple[tuple[str, ...], str] | None:
        """Along which other axes than these a result may differ, and why; None if along none."""
        found = self.of(tensor).without(axes)
        if not found.origins:
            return None
        origins = ", ".join(dict.fromkeys(found.origins.values()))
        return tuple(sorted(found.axes)), f"comes of {origins}" + (f", computed at {found.line}" if found.line else "")

    @property
    def paused(self) -> bool:
        return self._paused > 0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Follow nothing in a block: it is the library's own work, whose results the library notes itself."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1


def nbytes(tensor: Tensor) -> int:
    """The bytes of a tensor's whole storage; 0 if it has none."""
    return tensor.untyped_storage().nbytes() if storage(tensor) else 0


class _Nets(threading.local):
    net: Net | None = None


_nets = _Nets()


def active() -> Net | None:
    """The net of the region that runs on this thread, if its tensors are followed."""
    return _nets.net


@contextlib.contextmanager
def activate(net: Net | None) -> Iterator[None]:
    """Make `net` the active one."""
    before, _nets.net = _nets.net, net
    try:
        yield
    finally:
        _nets.net = before


def unfollowed() -> contextlib.AbstractContextManager[None]:
    """Pause the active net, if there is one, for the length of a `with` block."""
    net = active()
    return NOTHING if net is None else net.pause()


NOTHING = contextlib.nullcontext()


# -- numbers that depend on the rank -----------------------------------------------------------------------------------
# `axis_index` gives one where a body is followed, and so does arithmetic with it; for all else they are plain numbers.


class VaryingInt(int):
    """An integer that says along which axes it differs between ranks; for all else it is a plain integer."""

    varying: Varying

    def __reduce__(self) -> Any:
        return int, (int(self),)


class VaryingFloat(float):
    """As `VaryingInt`."""

    varying: Varying

    def __reduce__(self) -> Any:
        return float, (float(self),)


def varying_number(value: int, axes: Iterable[str]) -> int:
    """This rank's place along some axes; if a net is active, it is followed."""
    net = active()
    if net is None:
        return value
    net.asked = True
    axes = net.axes & set(axes)
    return _number(value, joined([Varying(dict.fromkeys(axes, "axis_index"))])) if axes else value


def plain_number(value: Any) -> Any:
    """A number without what the net knows of it."""
    return int(value) if type(value) is VaryingInt else float(value) if type(value) is VaryingFloat else value


def _number(value: Any, varying: Varying) -> Any:
    kind = VaryingInt if type(value) is int else VaryingFloat if type(value) is float else None
    if kind is None:
        return value
    made = kind(value)
    made.varying = varying
    return made


def _arithmetic(name: str) -> Callable:
    def method(self: Any, *others: Any) -> Any:
        result = getattr(self.__class__.__base__, name)(self, *others)
        if result is NotImplemented and others and isinstance(others[0], float):
            result = getattr(float, name)(float(self), *others)
        if result is NotImplemented:
            return result
        return _number(result, joined(number.varying for number in (self, *numbers_in(others))))

    method.__name__ = name
    return method


def numbers_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, VaryingInt | VaryingFloat):
            yield value
        elif isinstance(value, list | tuple):
            yield from numbers_in(value)
        elif isinstance(value, slice):
            yield from numbers_in((value.start, value.stop, value.step))


for _kind in (VaryingInt, VaryingFloat):
    for _op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
        for _name in (f"__{_op}__", f"__r{_op}__"):
            if hasattr(_kind.__base__, _name):
                setattr(_kind, _name, _arithmetic(_name))
    for _op in ("neg", "pos", "abs", "invert"):
        if hasattr(_kind.__base__, f"__{_op}__"):
            setattr(_kind, f"__{_op}__", _arithmetic(f"__{_op}__"))
