"""Torch's functions on values of a mesh, cut as torch's `DTensor` says: what can stay cut does, the rest is moved.

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
from ..kernels.torch_private import ITEM, TorchDispatchMode
from ..mesh import trees
from ..mesh.region import Region
from ..mesh.spec import REPLICATED, Layout, P, Sharded
from .device_mesh import of_mesh
from .dtensor import as_dtensor
from .torch_private import laid_out, with_layout

_KINDS = 4096  # of shards whose layouts are kept


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


class _OnShards(TorchDispatchMode):
    """Refuses what DTensor takes from a rank's shard."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is ITEM.default or torch.Tag.nondeterministic_seeded in func.tags:
            raise NeedsWhole
        return func(*args, **(kwargs or {}))


def on_shards(region: Region, func: Callable, args: tuple, kwargs: dict[str, Any], *, first: bool) -> tuple[Any, bool]:
    """The function of these shards, which are evenly cut; as an @spmd function returns it.

    Also says whether each rank has computed of its shards alone, rather than of whole values that torch has gathered.

    Args:
        first: of its kind, of which torch may have something to say, once.

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
        with _unlogged() if first else contextlib.nullcontext(), torch.no_grad():
            with _OnShards():
                result = func(*args, **kwargs)
            gathered = all(map(_is_whole, trees.leaves(result)))
            return trees.map(lambda leaf: _left(region, leaf), result), not gathered
    except SpmdError as error:
        if isinstance(error, MeshError):  # torch.distributed has other ranks than the mesh
            raise NeedsWhole from error
        raise
    except Exception as error:  # also of the program's own making, which the whole values then show as it is
        raise NeedsWhole from error


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, DTensor) and all(type(each) is Replicate for each in leaf.placements)


def _left(region: Region, leaf: Any) -> Any:
    """A result as an @spmd function returns it."""
    if not isinstance(leaf, DTensor):
        raise NeedsWhole  # computed of this rank's shard, perhaps
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
    """Torch's advice on DTensor is for those who use it, and its errors are looked at."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch.distributed")
            yield
    finally:
        logging.disable(before)
