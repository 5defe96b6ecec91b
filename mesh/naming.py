"""Meshes and values on their way between the driver and its ranks: what only one side has travels as a name.

A `Mesh` or an `Array` captured by a shipped function arrives on a rank as that rank's own view of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..kernels.errors import MeshError, message
from .array import Array, LocalSource
from .resident import ResidentSource

if TYPE_CHECKING:
    from .driver import DriverSession
    from .worker import Worker


def name_in_driver(session: DriverSession, obj: Any) -> Any:
    """The name under which an object is sent; None for what travels itself."""
    if isinstance(obj, Array):
        source = obj._readable()
        if not isinstance(source, ResidentSource) or obj.mesh is not session.mesh:
            raise MeshError(
                message(
                    "an Array of another mesh was passed",
                    got=repr(obj),
                    expected=f"one on {session.describe()}",
                    remedy="move it with put(array.full(), mesh=...)",
                )
            )
        session.values.restore(obj)
        shape, _, spec = source.settle()
        return ("array", source.name, tuple(shape), spec)
    if isinstance(obj, session.mesh_type):
        if obj is not session.mesh:
            raise MeshError(
                message(
                    "a function refers to another mesh than the one it runs on",
                    got=obj.describe(),
                    expected=session.describe(),
                    remedy="pass what it needs of that mesh, such as its size, as an argument",
                )
            )
        return ("mesh",)
    return None


def object_in_driver(session: DriverSession, name: Any) -> Any:
    return session.mesh if name[0] == "mesh" else session.values.arrays[name[1]]


def name_on_rank(worker: Worker, obj: Any) -> Any:
    if isinstance(obj, Array):
        name = getattr(obj._source, "name", None)
        if name is None:
            raise MeshError(
                message("an Array made on a rank cannot be returned from mesh.run", remedy="return its local tensor")
            )
        return ("array", name)
    return ("mesh",) if isinstance(obj, type(worker.mesh)) else None


def object_on_rank(worker: Worker, name: Any) -> Any:
    if name[0] == "mesh":
        return worker.mesh
    _, value, shape, spec = name
    source = LocalSource(worker.session, worker.value(value)[0], spec, shape)
    source.name = value
    return Array(worker.mesh, source)
