"""How a rank of a driver with several hosts joins the others: its host's arena, and a store that the driver keeps."""

from __future__ import annotations

import datetime
import functools
import urllib.parse
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ...kernels.network.authentication import AuthenticatedStore, code
from ...kernels.network.hosts import LEADER_SECONDS, OTHERS_SECONDS, HostArena, HostWatch, StoreWatch, limit_silence
from ...kernels.network.interface import towards
from .. import protocol


def join(request: protocol.RankRequest, arena_fd: int) -> tuple[HostWatch, Callable[[], Any]]:
    """What a rank watches, and what gives the store."""
    members = next(host for host in request.hosts if request.rank in host)
    where = urllib.parse.urlparse(request.store)
    host, port = where.hostname or "", where.port or 0
    limit = datetime.timedelta(seconds=request.timeout)

    @functools.cache
    def store() -> dist.Store:
        found = dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)
        limit_silence(found, max(1.0, request.timeout / 2))
        return AuthenticatedStore(found, code(request.key, b"store"), limit)

    # The first of the driver's own hosts is where the store is: it is reached at the same address.
    own = "127.0.0.1" if host == "127.0.0.1" else towards(host) or host
    seconds = LEADER_SECONDS if request.rank == members[0] else OTHERS_SECONDS
    beyond = StoreWatch(store(), request.rank, address=own, seconds=seconds)
    return HostWatch(HostArena(arena_fd, members, request.rank, beyond), request.hosts), store
