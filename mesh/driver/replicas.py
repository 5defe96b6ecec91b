"""Restoring values of replaced ranks from their replicas, where values don't outlive a rank, as on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Collection

from ...kernels.errors import PeerLost
from .. import protocol
from ..array import Meta
from .session_view import Session


def copy_from_replicas(
    session: Session, call: int, about: Meta, index: int, missing: Collection[int], name: str
) -> None:
    """Give a value of a call to the ranks that lack it; `name` is what messages call it."""
    fetch = functools.partial(protocol.FetchValues, spans=(call, index, index + 1))
    store = functools.partial(protocol.StoreValue, call=call, index=index, spec=about.spec)
    for rank in sorted(missing):
        donors = [replica for replica in session.layout.replicas(about.spec, rank) if replica not in missing]
        if not donors:
            raise PeerLost(
                f"{name} was lost with rank {rank}{_host_of(session, rank)}, which alone held a shard of it",
                got=f"{about.spec}, shape {tuple(about.shape)}",
                where=session.describe(),
                remedy=f"{remedy(session)}, or compute it again",
                rank=rank,
            )
        (shard,) = session.wait(session.submit(fetch, ranks=donors[:1], reported=True)).values()[0]
        content = functools.partial(session.dumps, shard)
        session.wait(session.submit(store, content, ranks=[rank], reported=True))


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
