"""A driver's rank as a place for remote objects: their thread starts with the first call of one.

Until then there is only a listening socket, whose first connection makes the kernel send SIGIO: a rank that nobody
calls has one thread, and one that is in a region for long starts serving all the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..ambient import Ambient, under
from ..rank.state import RankState
from ..region import Region, inside
from .handle import plain_name_of
from .node import Node


def serve_when_called(
    state: RankState,
    key: bytes,
    listening: Sequence[socket.socket],
    elsewhere: Callable[[int], tuple[str, int] | None],
) -> Node:
    """This rank's node, whose thread starts when somebody connects, or when this rank calls an object itself.

    Args:
        elsewhere: see `Node`.
    """
    session = state.session

    @contextlib.contextmanager
    def around(settings: Ambient | None) -> Iterator[None]:
        session.apart.label = True
        with inside(Region(session, ("remote", session.rank), state.mesh)), under(settings):
            yield

    node = Node(
        session.rank,
        key,
        describe=state.mesh.describe,
        name_of=functools.partial(plain_name_of, mesh=lambda: state.mesh),
        object_of=lambda name: state.mesh,
        elsewhere=elsewhere,
        listening=listening,
        around=around,
    )

    def start(*_: Any) -> None:
        if not node.foreign:
            node.start()

    signal.signal(signal.SIGIO, start)
    waiting = select.poll()
    for one in listening:
        fcntl.fcntl(one, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | os.O_ASYNC)
        waiting.register(one, select.POLLIN)
    if waiting.poll(0):  # somebody came before the signal was asked for
        start()
    return node
