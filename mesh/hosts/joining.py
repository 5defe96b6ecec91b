"""How a rank of a driver with several hosts joins the others: its host's arena, and a store that the driver keeps.

In the store it finds, too, where ranks of other hosts hear calls of remote objects, when it first calls one.
"""

from __future__ import annotations

import datetime
import functools
import json
import urllib.parse
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ...kernels.network.authentication import AuthenticatedStore, code
from ...kernels.network.hosts import LEADER_SECONDS, OTHERS_SECONDS, HostArena, HostWatch, StoreWatch, limit_silence
from .. import protocol


def join(request: protocol.RankRequest, arena_fd: int) -> tuple[HostWatch, Callable[[], Any]]:
    """What a rank watches, and what gives the store."""
    members = next(host for host in request.hosts if request.rank in host)
    store = functools.cache(functools.partial(_store, request))
    seconds = LEADER_SECONDS if request.rank == members[0] else OTHERS_SECONDS
    beyond = StoreWatch(store(), request.rank, address=request.address, seconds=seconds)
    return HostWatch(HostArena(arena_fd, members, request.rank, beyond), request.hosts), store


def _store(request: protocol.RankRequest) -> dist.Store:
    where, limit = urllib.parse.urlparse(request.store), datetime.timedelta(seconds=request.timeout)
    found = dist.TCPStore(where.hostname or "", where.port or 0, None, False, limit, wait_for_workers=False)
    limit_silence(found, max(1.0, request.timeout / 2))
    return AuthenticatedStore(found, code(request.key, b"store"), limit)


CALLS = "calls"  # where the driver says at which address and port each rank hears calls


def elsewhere(request: protocol.RankRequest) -> Callable[[int], tuple[str, int] | None]:
    """What says where a rank of another host hears calls of remote objects; None for one of this host."""
    own = next((host for host in request.hosts if request.rank in host), None)

    # By a connection of its own: over the other one somebody may be waiting for others.
    store = functools.cache(functools.partial(_store, request))

    def address_of(rank: int) -> tuple[str, int] | None:
        if own is None or rank in own:
            return None
        address, port = json.loads(store().get(CALLS))[rank]  # each time: a host that was lost comes again at others
        return address, port

    return address_of
