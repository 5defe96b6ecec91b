"""Errors of remote calls, on their way from the rank where they were raised to whoever asks for the result."""

from __future__ import annotations

import pickle
from typing import Any

from ...kernels.errors import MeshError, PeerLost
from .. import wire
from ..failure import Failure, capture, combine


def packed(error: BaseException, rank: int) -> wire.Packet:
    """An exception of this process as the content of `Raised`."""
    return wire.Packet(pickle.dumps((rank, capture(error))))


def raised(packet: wire.Packet, mesh: str) -> BaseException:
    """The exception that the content of `Raised` describes: its own type, with the remote traceback."""
    rank: int
    failure: Failure
    rank, failure = pickle.loads(packet.data)
    return combine({rank: failure}, {}, mesh)


def lost(rank: int, what: str, mesh: str, cut: str = "") -> PeerLost:
    """The error for a rank that has ended, or could not be sent a message (`cut`), and with it what lived there."""
    return PeerLost(
        f"rank {rank}, on which {what} lived, {f'could not be sent a message: {cut}' if cut else 'has died or left'}",
        where=mesh,
        remedy=f"make the object again{'' if cut else ': the mesh replaces the rank'}",
        rank=rank,
    )


def unreachable(rank: int, what: str, mesh: str) -> PeerLost:
    """The error for a rank that accepts no connection, and is not replaced either."""
    return PeerLost(
        f"rank {rank}, on which {what} was to live, lets nobody in",
        where=mesh,
        remedy="it has died, or can open no more files: see its RLIMIT_NOFILE, ulimit -n",
        rank=rank,
    )


def gone(label: str, mesh: str) -> MeshError:
    return MeshError(
        f"{label} is no more: the handle that mesh.remote returned for it is gone",
        where=mesh,
        remedy="keep that handle for as long as the object is needed",
    )


def refuse_gradients(leaves: list[Any], what: str) -> None:
    """Refuse tensors through which a gradient would be expected to flow back: a remote call has no derivative."""
    for leaf in leaves:
        if getattr(leaf, "grad_fn", None) is not None:
            raise MeshError(
                f"{what} was given a tensor of a gradient's graph, and remote calls have no derivative",
                got=f"shape {tuple(leaf.shape)} of {type(leaf.grad_fn).__name__}",
                remedy="detach() it; for pipelines that are differentiated use ppermute",
            )
