"""`Array`s as torch's `DTensor`s and back, without a copy: spec and placements say the same, axis by axis of the mesh.

A mesh axis that cuts dimension d is `Shard(d)`, any other is `Replicate()`. Invariant: what has no counterpart is
refused in words, never cut anew without asking.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..kernels.callsite import public
from ..kernels.errors import SpecError
from ..mesh.array import Array, meta
from ..mesh.mesh import Mesh, resolve
from ..mesh.rank.local_values import LocalValues
from ..mesh.region import current
from ..mesh.spec import RAGGED, Layout, P, Sharded
from .device_mesh import of_mesh


@public
def from_dtensor(dtensor: DTensor, *, mesh: Mesh | None = None) -> Any:
    """The same value as a value of this library, without a copy; `Partial` placements are reduced first.

    >>> import spmd
    >>> def program():
    ...     there = mesh.device_mesh
    ...     x = torch.distributed.tensor.distribute_tensor(torch.arange(4.0), there, [Shard(0)])
    ...     return spmd.from_dtensor(x * 2).spec
    >>> with spmd.Mesh({"data": 2}) as mesh:
    ...     mesh.run(program)
    [P('data'), P('data')]

    Args:
        dtensor: on the mesh's `device_mesh`, or on a part of it that names some of its axes.
        mesh: as for `put`.

    Returns:
        An `Array`; within an @spmd function, which returns no Arrays, a `Sharded`.

    Raises:
        SpecError: it is on another mesh, or is cut in a way that no spec describes.
        MeshError: in the driver.
    """
    mesh = resolve(mesh)
    if not isinstance(dtensor, DTensor):
        got, remedy = (
            type(dtensor).__name__,
            "a plain tensor that each rank has is put(x), or Sharded(x, spec) in a step",
        )
        raise SpecError("from_dtensor got no DTensor", got=got, remedy=remedy)
    layout, session = mesh.layout, mesh.session
    names = dtensor.device_mesh.mesh_dim_names
    if names is None or not set(names) <= set(layout.names):
        got = f"axes {names or 'without names'}, sizes {tuple(dtensor.device_mesh.shape)}"
        raise _on_another_mesh(got, f"some of {layout.axes}")
    for name in names:
        ranks = sorted(dist.get_process_group_ranks(dtensor.device_mesh.get_group(name)))
        expected = list(layout.group(session.rank, (name,)))
        if ranks != expected:
            raise _on_another_mesh(f"ranks {ranks} along {name!r}", f"{expected} on rank {session.rank}")
    if any(isinstance(placement, Partial) for placement in dtensor.placements):
        whole = [Replicate() if isinstance(each, Partial) else each for each in dtensor.placements]
        dtensor = dtensor.redistribute(placements=whole)
    entries: list[list[str]] = [[] for _ in dtensor.shape]
    for name, placement in zip(names, dtensor.placements, strict=True):
        if type(placement) is Shard:
            entries[placement.dim].append(name)
        elif type(placement) is not Replicate:
            raise SpecError(
                "from_dtensor got a placement that no spec says",
                got=str(placement),
                expected="Shard, Replicate or Partial",
                remedy="redistribute it first",
            )
    spec, shape = P(*entries), tuple(dtensor.shape)
    _check_cuts("from_dtensor", layout, shape, spec)
    local = dtensor.to_local()
    region = current()
    if region is not None and region.pure:
        return Sharded(local, spec)
    (array,) = LocalValues(session, [local], [meta(shape, dtensor.dtype, spec)]).arrays(mesh)
    return array


def _on_another_mesh(got: str, expected: str) -> SpecError:
    remedy = "make it on mesh.device_mesh, or give from_dtensor that mesh, mesh="
    return SpecError("from_dtensor got a tensor on another mesh", got=got, expected=expected, remedy=remedy)


@public
def to_dtensor(array: Array) -> DTensor:
    """What `Array.to_dtensor` gives."""
    mesh, spec, shape = array.mesh, array.spec, tuple(array.shape)
    device_mesh = of_mesh(mesh)  # refuses in the driver
    _check_cuts("to_dtensor", mesh.layout, shape, spec)
    local, expected = array.local, mesh.layout.shard_shape(shape, spec, mesh.session.rank)
    if tuple(local.shape) != expected:
        raise SpecError(
            "to_dtensor can't take parts whose sizes a step has chosen, and torch cuts evenly",
            got=f"{list(local.shape)} of {list(shape)}",
            expected=str(list(expected)),
            where=mesh.session.where(),
            remedy="put(array.full(), spec) first",
        )
    return as_dtensor(local, spec, shape, mesh.layout, device_mesh)


def as_dtensor(
    local: torch.Tensor, spec: P, shape: tuple[int, ...], layout: Layout, device_mesh: DeviceMesh
) -> DTensor:
    """A rank's shard as part of a `DTensor` of this shape; the way it is cut must have a counterpart."""
    dims = {name: dim for dim in range(len(spec.entries)) for name in spec.dim_axes(dim)}
    placements = [Shard(dims[name]) if name in dims else Replicate() for name in layout.names]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _check_cuts(what: str, layout: Layout, shape: tuple[int, ...], spec: P) -> None:
    """Refuse what this library and torch cut differently."""
    for dim in range(len(spec.entries)):
        axes = spec.dim_axes(dim)
        if list(axes) != sorted(axes, key=layout.names.index):
            raise SpecError(
                f"{what} can't cut dimension {dim} by axes in another order than the mesh's",
                got=str(axes),
                expected=str(tuple(sorted(axes, key=layout.names.index))),
                remedy="put the value with axes in the mesh's order",
            )
        size, parts = shape[dim], layout.parts(axes)
        if size == RAGGED or size % parts:
            raise SpecError(
                f"{what} can't cut dimension {dim} evenly, and torch cuts unevenly in another way",
                got=f"{'several sizes' if size == RAGGED else size} over {parts} ranks",
                remedy="pad it, or drop the rest",
            )
