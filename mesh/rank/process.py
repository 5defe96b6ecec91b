"""A rank's process: how a fresh fork of the zygote becomes a rank."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import json
import os
import signal
import socket
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...kernels.network.authentication import AuthenticatedStore, code
from ...kernels.network.hosts import LEADER_SECONDS, OTHERS_SECONDS, HostArena, HostWatch, StoreWatch
from ...kernels.network.stores import limit_silence
from ...kernels.processes import open_more_files
from ...kernels.registry import register_backend
from ...kernels.shm.arena import Arena
from ...kernels.torch_private import inline_with_own_globals
from .. import protocol, wire
from ..ambient import Ambient, under
from ..display.bars import report_bars
from ..display.records import relay
from ..display.stacks import publish
from ..display.trace import LOGGER
from ..hosts.copier import Copier
from ..hosts.protocol import CALLS
from ..mesh import Mesh
from ..pickling.classes import take_over
from ..pickling.objects import arrive_on
from ..region import Region, inside, seed_others
from ..remote.handle import plain_name_of
from ..remote.node import Node
from ..spec import Layout
from . import devices
from .debugger import debug_through
from .descriptors import RankRequest
from .lasting_values import LastingValues
from .session import RankSession
from .state import RankState
from .worker import TracedWorker, Worker


def main(request: RankRequest, fds: list[int]) -> None:
    """Serve the driver until it says to exit, or is gone."""
    control, out, err, arena_fd, *listening = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    open_more_files()
    _enter(request.cwd)
    os.environ.clear()
    os.environ.update(request.environ)
    sys.path[:] = request.path
    sys.argv[:] = request.argv
    torch.set_num_threads(request.threads)
    rank = request.rank
    seed_others(request.seed * 65537 + rank)
    if request.factory is not None:
        register_backend(request.backend, wire.from_bytes(request.factory))
    layout = Layout(request.axes)
    connection = socket.socket(fileno=control)
    watch: Any = None
    store: Callable[[], Any] = functools.partial(_file_store, request.store, layout.size, request.timeout)
    if request.hosts:
        watch, store = _joined(request, arena_fd)
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
    if session.host_arena is not None and session.device.type == "cpu":
        session.lasting = LastingValues(session.host_arena)
    arrive_on(session.device)
    take_over()
    inline_with_own_globals()
    session.renew(request.generation)
    mesh = Mesh.on_rank(session, request.threads, request.pinned)
    own_path = request.path if request.hosts else ()
    state = RankState(session, mesh, own_path=own_path, who=(request.address, request.key))
    if request.generation > 1:
        state.values.take_over()
    listeners = [socket.socket(fileno=fd) for fd in listening]
    session.node = serve_when_called(state, request.key, listeners, _elsewhere(request))
    traced = LOGGER in dict(request.levels)
    worker = TracedWorker(state, connection, request.key) if traced else Worker(state, connection)
    if request.copies:
        session.copied = True
        state.values.copier = Copier(layout, request, worker.report, watch)
    report_bars(lambda: worker.task, lambda task, bar: worker.report(protocol.Progress(task, bar)))
    debug_through(session, worker.ask)
    relay(request.levels, worker.report)
    signal.signal(signal.SIGINT, worker.interrupt)
    worker.serve()
    session.close()


def _enter(folder: str) -> None:
    """Make a folder the current one. It may be gone or closed to this user, if this process is in it already."""
    try:
        os.chdir(folder)
    except (FileNotFoundError, PermissionError):
        if os.readlink("/proc/self/cwd").removesuffix(" (deleted)") != folder:
            raise


def _file_store(path: str, size: int, timeout: float) -> Any:
    store = dist.FileStore(path, size)
    store.set_timeout(datetime.timedelta(seconds=timeout))
    return store


def _joined(request: RankRequest, arena_fd: int) -> tuple[HostWatch, Callable[[], Any]]:
    """For a rank on one of several hosts: what it watches for aborts, and a function that gives the driver's store."""
    members = next(host for host in request.hosts if request.rank in host)
    store = functools.cache(functools.partial(_store, request))
    seconds = LEADER_SECONDS if request.rank == members[0] else OTHERS_SECONDS
    beyond = StoreWatch(store(), request.rank, address=request.address, seconds=seconds)
    return HostWatch(HostArena(arena_fd, members, request.rank, beyond), request.hosts), store


def _store(request: RankRequest) -> dist.Store:
    where, limit = urllib.parse.urlparse(request.store), datetime.timedelta(seconds=request.timeout)
    found = dist.TCPStore(where.hostname or "", where.port or 0, None, False, limit, wait_for_workers=False)
    limit_silence(found, max(1.0, request.timeout / 2))
    return AuthenticatedStore(found, code(request.key, b"store"), limit)


def _elsewhere(request: RankRequest) -> Callable[[int], tuple[str, int] | None]:
    """A function that says where a rank on another host listens for remote calls; None for a rank on this host."""
    own = next((host for host in request.hosts if request.rank in host), None)

    # With its own connection, since another thread may be waiting on the other one.
    store = functools.cache(functools.partial(_store, request))

    def address_of(rank: int) -> tuple[str, int] | None:
        if own is None or rank in own:
            return None
        address, port = json.loads(store().get(CALLS))[rank]  # each time: a replaced host has new ones
        return address, port

    return address_of


def serve_when_called(
    state: RankState,
    key: bytes,
    listening: Sequence[socket.socket],
    elsewhere: Callable[[int], tuple[str, int] | None],
) -> Node:
    """This rank's part in remote calls. Its thread starts when somebody connects, or when this rank calls an object.

    Until then there is only a listening socket; on the first connection the kernel sends SIGIO. So a rank that nobody
    calls has one thread, and a rank that is in a long region starts serving all the same.
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
    for one in listening:
        fcntl.fcntl(one, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | os.O_ASYNC)
    return node
