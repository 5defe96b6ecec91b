"""A rank's process: what a fresh fork of the zygote does to become one."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...kernels.processes import open_more_files
from ...kernels.registry import register_backend
from ...kernels.shm.arena import Arena
from .. import protocol
from ..ambient import Ambient, under
from ..display.bars import report_bars
from ..display.records import relay
from ..display.stacks import publish
from ..display.trace import LOGGER
from ..hosts import joining as hosts
from ..hosts.copier import Copier
from ..mesh import Mesh
from ..region import Region, inside, seed_others
from ..remote.handle import plain_name_of
from ..remote.node import Node
from ..spec import Layout
from . import devices
from .debugger import debug_through
from .lasting_values import LastingValues
from .session import RankSession
from .state import RankState
from .worker import TracedWorker, Worker


def main(request: protocol.RankRequest, fds: list[int]) -> None:
    """Serve the driver until it says that this is enough, or goes."""
    control, out, err, arena_fd, *listening = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    open_more_files()
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environ)
    sys.path[:] = request.path
    sys.argv[:] = request.argv
    torch.set_num_threads(request.threads)
    rank = request.rank
    seed_others(request.seed * 65537 + rank)
    if request.factory is not None:
        register_backend(request.backend, pickle.loads(request.factory))
    layout = Layout(request.axes)
    connection = socket.socket(fileno=control)
    watch: Any = None
    store: Callable[[], Any] = functools.partial(_store, request.store, layout.size, request.timeout)
    if request.hosts:
        watch, store = hosts.join(request, arena_fd)
    else:
        watch = Arena(arena_fd, layout.size, rank)
    publish(watch.arena if request.hosts else watch)
    session = RankSession(
        layout,
        rank,
        backend=request.backend,
        watch=watch,
        store=store,
        timeout=request.timeout,
        seed=request.seed,
        launched=False,
        device=devices.of_rank(request.device, rank),
    )
    if session.leases is not None and session.device.type == "cpu":
        session.lasting = LastingValues(session.leases)
    session.renew(request.generation)
    mesh = Mesh.on_rank(session, request.threads, request.pinned)
    own_path = request.path if request.hosts else ()
    state = RankState(session, mesh, own_path=own_path, who=(request.address, request.key))
    if request.generation > 1:
        state.values.take_over()
    listeners = [socket.socket(fileno=fd) for fd in listening]
    session.node = serve_when_called(state, request.key, listeners, hosts.elsewhere(request))
    traced = LOGGER in dict(request.levels)
    worker = TracedWorker(state, connection, request.key) if traced else Worker(state, connection)
    if request.copies:
        session.copied = True
        state.values.copier = Copier(layout, request, worker.report, watch)
    report_bars(worker.current_task, worker.report_bar)
    debug_through(session, worker.ask)
    relay(request.levels, worker.report)
    signal.signal(signal.SIGINT, worker.interrupt)
    worker.serve()
    session.close()


def _store(path: str, size: int, timeout: float) -> Any:
    store = dist.FileStore(path, size)
    store.set_timeout(datetime.timedelta(seconds=timeout))
    return store


def serve_when_called(
    state: RankState,
    key: bytes,
    listening: Sequence[socket.socket],
    elsewhere: Callable[[int], tuple[str, int] | None],
) -> Node:
    """This rank's part in remote calls, whose thread starts when somebody connects, or when this rank calls an object.

    Until then there is only a listening socket, whose first connection makes the kernel send SIGIO: a rank that nobody
    calls has one thread, and one that is in a region for long starts serving all the same.

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
