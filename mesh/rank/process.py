"""A rank's process: what a fresh fork of the zygote does to become one."""

from __future__ import annotations

import datetime
import functools
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...kernels.processes import open_more_files
from ...kernels.registry import register_backend
from ...kernels.shm.arena import Arena
from .. import protocol
from ..display.stacks import publish
from ..display.trace import LOGGER
from ..hosts import joining as hosts
from ..hosts.copier import Copier
from ..mesh import Mesh
from ..region import seed_others
from ..remote.serving import serve_when_called
from ..spec import Layout
from . import devices
from .debugger import debug_through
from .lasting_values import LastingValues
from .logs import relay
from .rank_bars import report_bars
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
