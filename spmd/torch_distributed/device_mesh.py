"""A mesh's ranks as torch's `DeviceMesh`: same names, same order, over process groups on the arena that they share.

The default process group of a rank is made with it, unless the program has made one of "spmd" itself. Invariant: the
device meshes of a mesh are one object, however often it is asked for, until a rank is replaced, or the program destroys
the process groups that it is made of. If the call fails in which it is made, on some ranks perhaps, all make it anew.
"""

from __future__ import annotations

import datetime
import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..kernels.errors import MeshError
from ..mesh.mesh import Mesh
from ..mesh.rank.session import RankSession
from .creation import adopting
from .group import ProcessGroup
from .registration import NAME
from .world import World

# With when, and of which default process group, it was made.
_made: weakref.WeakKeyDictionary[RankSession, tuple[tuple[int, int], weakref.ref, DeviceMesh]]
_made = weakref.WeakKeyDictionary()


def of_mesh(mesh: Mesh) -> DeviceMesh:
    """The mesh's `DeviceMesh` on this rank; the first time a collective call.

    Raises:
        MeshError: in the driver; where `torch.distributed` has ranks of its own that are not these; the first time in a
            method of a remote object, or a function given to `mesh.submit`.
    """
    session = mesh.session
    then, default, found = _made.get(session, ((0, 0), lambda: None, None))
    default_now = dist.group.WORLD if dist.is_initialized() else None
    if found is None or session.finished.is_over(then) or default_now is None or default() is not default_now:
        session.check_together("make mesh.device_mesh")
        _have_default_group(session)
        layout = session.layout
        sizes = tuple(layout.axes.values())
        found = init_device_mesh(session.device.type, sizes, mesh_dim_names=tuple(layout.names))
        _made[session] = session.finished.now, weakref.ref(dist.group.WORLD), found
    return found


def _have_default_group(session: RankSession) -> None:
    default = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(default, ProcessGroup) and default.world.over:
        dist.destroy_process_group()  # of a mesh that was closed, or of a rank that was replaced
        default = None
    if default is None:
        store = dist.PrefixStore("torch", session.store())
        limit = datetime.timedelta(seconds=session.timeout)
        with adopting(World.of_mesh(session)):
            dist.init_process_group(NAME, store=store, rank=session.rank, world_size=session.layout.size, timeout=limit)
    elif (dist.get_backend(), dist.get_rank(), dist.get_world_size()) != (NAME, session.rank, session.layout.size):
        raise MeshError(
            "mesh.device_mesh needs torch.distributed to have the ranks of the mesh, over this library",
            got=f"{dist.get_backend()!r}, rank {dist.get_rank()} of {dist.get_world_size()}",
            expected=f"{NAME!r}, rank {session.rank} of {session.layout.size}, or no process group yet",
            remedy=f'use init_process_group("{NAME}"), or leave it to mesh.device_mesh',
        )
