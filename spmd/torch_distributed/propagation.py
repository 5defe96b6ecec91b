"""Torch's functions on values of a mesh, by the rules of torch's `DTensor`: what can stay cut does, the rest is moved.

Invariant: the result is that of the function on the whole values. What DTensor has no rule for, and what it would take
from a rank's shard as if that were all (numbers that go to Python, random numbers), runs on whole values on each rank.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..kernels.errors import MeshError, SpmdError
from ..kernels.torch_private import ITEM, DispatchMode, has_tag, laid_out, storage, with_layout
from ..mesh import trees
from ..mesh.purity.writes import written_by
from ..mesh.rank.operation import refuse_write
from ..mesh.region import Region
from ..mesh.spec import REPLICATED, Layout, P, Sharded
from .device_mesh import of_mesh
from .dtensor import as_dtensor

aten = torch.ops.aten
_KINDS = 4096  # of shards whose layouts are kept
_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
# Which torch gets wrong below a DTensor (`DispatchMode`); shifts it takes by their names for ones in place.
_WHOLE = {ITEM.default, aten.linalg_pinv.atol_rtol_tensor, aten.__lshift__.Tensor, aten.__rshift__.Tensor}
_SCANS = {aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default}
_PLACES = {aten.argmax.default, aten.argmin.default}
# A part of a sum may be rounded off, or be too large for them. Bytes: of `any` torch adds up the ranks' results.
_SHORT = (torch.float16, torch.bfloat16, torch.uint8)
_MEAN = 1  # torch's number for that way to reduce
_SUMMED_LATER = {
    aten.detach.default,
    aten.alias.default,
    aten.view.default,
    aten.squeeze.dim,
    aten.squeeze_.dim,
    aten.unsqueeze.default,
}


class NeedsWhole(Exception):
    """There is no rule, or none that is right, for what was asked of shards."""


class _Layouts:
    """How shards of each kind are laid out on the device mesh that was asked for last."""

    def __init__(self) -> None:
        self._device_mesh: DeviceMesh | None = None
        self._known: dict[tuple[P, torch.Size, torch.dtype], Any] = {}

    def dtensor(self, shard: torch.Tensor, layout: Layout, device_mesh: DeviceMesh) -> DTensor:
        """A rank's shard of a value that is evenly cut."""
        if device_mesh is not self._device_mesh or len(self._known) >= _KINDS:
            self._device_mesh, self._known = device_mesh, {}
        spec: P = getattr(shard, "_spmd_spec", REPLICATED)
        local, kind = shard.detach(), (spec, shard.shape, shard.dtype)
        known = self._known.get(kind)
        if known is not None:
            return with_layout(local, known)
        shape = list(shard.shape)
        for dim in range(len(spec.entries)):
            shape[dim] *= layout.parts(spec.dim_axes(dim))
        made = as_dtensor(local, spec, tuple(shape), layout, device_mesh)
        self._known[kind] = laid_out(made)
        return made


_layouts = _Layouts()


class _OnShards(DispatchMode):
    """Refuses what DTensor would compute from a rank's shard alone, and what its rules get wrong.

    A weighted mean of samples is not the mean of the ranks' means; a convolution takes whole samples and whole weights;
    and partial values are summed before anything else is done with them, since 1 - x of the parts is not that of the
    sum. It also refuses to write to the arguments, which no other check sees below a DTensor.

    Args:
        function: what was called.
        shards: of its arguments.
    """

    def __init__(self, function: Callable, shards: list[DTensor]):
        super().__init__()
        self._function = function
        self._given = {storage(shard.to_local()) for shard in shards}

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _WHOLE or has_tag(func, torch.Tag.nondeterministic_seeded):
            raise NeedsWhole
        if (func in _LOSSES and args[3] == _MEAN) or (func is aten.convolution.default and not _cut_by_samples(*args)):
            raise NeedsWhole
        if func in _SCANS and args[1] < 0:  # the rule takes it for a dimension that is not cut
            args = (args[0], args[1] + args[0].ndim, *args[2:])
        if func in _PLACES and (*args, None)[1] is None and not _is_cut_by_rows(args[0]):
            raise NeedsWhole  # of equal elements the first is asked for, and the rule takes the first rank's
        if func not in _SUMMED_LATER:
            written = trees.leaves([value for _, value in written_by(func, args, kwargs)])
            if any(isinstance(leaf, DTensor) and storage(leaf.to_local()) in self._given for leaf in written):
                refuse_write(self._function)
            if any(map(_is_partial, written)):
                raise NeedsWhole  # only the sum would be written to, and C++ go on with the partial values
            args, kwargs = trees.map(_summed, (args, kwargs))
        result = func(*args, **kwargs)
        made = result if isinstance(result, tuple | list) else (result,)
        if not all(map(_is_cut_as_said, made)) or any(_is_partial(each) and each.dtype in _SHORT for each in made):
            raise NeedsWhole
        return result


def _cut_by_samples(x: DTensor, *others: Any) -> bool:
    """Whether nothing of a convolution is cut except the first dimension of its input."""
    weights = (leaf for leaf in others if isinstance(leaf, DTensor))
    return _is_cut_by_rows(x) and all(map(_is_whole, weights))


def _is_cut_by_rows(x: DTensor) -> bool:
    return all(each in (Replicate(), Shard(0)) for each in x.placements)


def _is_cut_as_said(leaf: Any) -> bool:
    """Whether a rank's part of a result has the shape that torch's rule says; the same on all ranks.

    Some rules are wrong: torch 2.13 gives `logsumexp(keepdim=True)` the layout that it has without keepdim, and 2.14
    says that `argmin` is cut where the tensor is not, but computes all of it on every rank.
    """
    if not isinstance(leaf, DTensor):
        return True
    parts, local = [1] * leaf.ndim, leaf.to_local().shape
    for placement, size in zip(leaf.placements, leaf.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] *= size
    cut = zip(leaf.shape, parts, strict=True)
    return len(local) == leaf.ndim and all(
        size % count or size == here * count for (size, count), here in zip(cut, local, strict=True)
    )


def _is_partial(leaf: Any) -> bool:
    return isinstance(leaf, DTensor) and any(isinstance(each, Partial) for each in leaf.placements)


def _summed(leaf: Any) -> Any:
    """A tensor whose partial values are summed over the ranks, or reduced as is left to do with them."""
    if not _is_partial(leaf):
        return leaf
    return leaf.redistribute(
        placements=[Replicate() if isinstance(each, Partial) else each for each in leaf.placements]
    )


def on_shards(region: Region, func: Callable, args: tuple, kwargs: dict[str, Any], *, first: bool) -> tuple[Any, bool]:
    """Apply a function to these shards, which are evenly cut; the results are as an @spmd function returns them.

    Also says whether each rank computed from its own shards alone, rather than from whole values that torch gathered.

    Args:
        first: whether it is the first call of its kind, for which torch may log something.

    Raises:
        NeedsWhole: the same on all ranks.
    """
    layout = region.session.layout

    try:
        device_mesh = of_mesh(region.mesh)
        args, kwargs = trees.map(
            lambda leaf: _layouts.dtensor(leaf, layout, device_mesh) if isinstance(leaf, torch.Tensor) else leaf,
            (args, kwargs),
        )
        shards = [leaf for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, DTensor)]
        with _unlogged() if first else contextlib.nullcontext(), torch.no_grad():
            with _OnShards(func, shards):
                result = func(*args, **kwargs)
            gathered = all(map(_is_whole, trees.leaves(result)))
            return trees.map(lambda leaf: _left(region, leaf), result), not gathered
    except SpmdError as error:
        if isinstance(error, MeshError):  # torch.distributed has other ranks than the mesh
            raise NeedsWhole from error
        raise
    except Exception as error:  # also the program's own errors, which the call on whole values then shows as they are
        raise NeedsWhole from error


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, DTensor) and all(type(each) is Replicate for each in leaf.placements)


def _left(region: Region, leaf: Any) -> Any:
    """A result as an @spmd function returns it."""
    if not isinstance(leaf, DTensor):
        raise NeedsWhole  # it may be computed from this rank's shard
    session = region.session
    layout, placements = session.layout, list(leaf.placements)
    wanted = [Replicate() if isinstance(each, Partial) else each for each in placements]
    axes: list[list[str]] = [[] for _ in leaf.shape]
    for name, placement in zip(layout.names, wanted, strict=True):
        if type(placement) is Shard:
            axes[placement.dim].append(name)
        elif type(placement) is not Replicate:
            raise NeedsWhole
    if any(size % layout.parts(tuple(own)) for size, own in zip(leaf.shape, axes, strict=True)):
        wanted, axes = [Replicate()] * len(wanted), []  # torch cuts unevenly in another way
    summed = tuple(name for name, each in zip(layout.names, placements, strict=True) if each == Partial("sum"))
    if summed and sum(each != other for each, other in zip(placements, wanted, strict=True)) == len(summed):
        local = leaf.to_local()
        session.comm(summed).all_reduce(local)  # along all of them at once
    else:
        local = (leaf if wanted == placements else leaf.redistribute(placements=wanted)).to_local()
    spec = P(*axes)
    return Sharded(local, spec) if spec.entries else local


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Silence torch's logs: its advice is for users of DTensor, and its errors are handled here."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch.distributed")
            warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1")  # C++ says it of our own line
            yield
    finally:
        logging.disable(before)
