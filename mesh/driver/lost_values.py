"""Values that no rank has any more: what is said of them, and what to do."""

from __future__ import annotations

from collections.abc import Collection

from ...kernels.errors import MeshError, PeerLost
from ..array import Meta
from .session_view import Session

RESTARTED = "it was restarted"  # why a session is closed whose mesh goes on


def lost(session: Session, about: Meta, missing: Collection[int], name: str) -> PeerLost:
    """The error for a value that these ranks lack, one of which alone held a shard; `name` is what messages call it."""
    replicas = {rank: session.layout.replicas(about.spec, rank) for rank in sorted(missing)}
    rank = next(rank for rank, others in replicas.items() if set(others) <= set(missing))
    return PeerLost(
        f"{name} was lost with rank {rank}{_host_of(session, rank)}, which alone held a shard of it",
        got=f"{about.spec}, shape {tuple(about.shape)}",
        where=session.describe(),
        remedy=f"{remedy(session)}, or compute it again",
        rank=rank,
    )


def _host_of(session: Session, rank: int) -> str:
    hosts = None if session.mesh is None else session.mesh.hosts
    return "" if hosts is None else f" on host {hosts.by_rank()[rank]}"


def remedy(session: Session) -> str:
    """What an error advises if no rank has a value any more."""
    several = session.mesh is not None and session.mesh.hosts is not None
    saved = session.run_state.saved
    go_on = "restore from a checkpoint (none was saved)" if saved is None else f"restore({saved!r})"
    keeps = "; Mesh(copies=1) would have kept it" if several and not session.options["copies"] else ""
    return f"{go_on}{keeps}"


def closed(session: Session, what: str) -> MeshError:
    """The error of a value, or of a call, of a session that is closed."""
    if session.closed == RESTARTED:
        return restarted(session, what)
    advice = "make a new Mesh, and fetch values with .full() before the old one is closed, as by `with`"
    return MeshError(f"this mesh is closed: {session.closed}", where=session.describe(), remedy=advice)


def restarted(session: Session, what: str) -> MeshError:
    advice = "compute it again, or put() it again"
    return MeshError(f"this {what} was lost when its mesh was restarted", where=session.describe(), remedy=advice)
