"""Launched ranks: a launcher started the processes, and each runs the whole script.

The ranks meet through a `torch.distributed` store. Ranks of one host then share an arena. A region is a plain call
here; when it fails on one rank, all ranks meet again, learn of it, and raise the same exception.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..kernels import arena as arena_module
from ..kernels.arena import Arena
from ..kernels.errors import Aborted, MeshError, PeerLost, message
from ..kernels.gloo import StoreWatch
from . import wire
from .environments import Launch
from .failure import Failure, capture, combine
from .rank import RankSession
from .rendezvous import meet
from .spec import Layout

RECOVERY_SECONDS = 5.0

_meshes = 0


def join(layout: Layout, launch: Launch, *, backend: str, seed: int, timeout: float) -> tuple[RankSession, str]:
    """Meet the other ranks: this rank's session, and the backend that was chosen."""
    global _meshes
    _meshes += 1
    store = dist.PrefixStore(f"spmd/mesh{_meshes}", meet(launch, timeout))
    store.set_timeout(datetime.timedelta(seconds=timeout))
    rank, size = launch.rank, layout.size
    store.set(f"host/{rank}", _host_identity())
    hosts = [_wait_for(store, f"host/{peer}", peer, timeout) for peer in range(size)]
    one_host = len(set(hosts)) == 1
    arena = _shared_arena(store, rank, size, timeout) if one_host and arena_module.supported() is None else None
    if backend == "auto":
        backend = "shm" if arena is not None else "gloo"
    if backend == "shm" and arena is None:
        reason = "the ranks are on several hosts" if not one_host else arena_module.supported() or "mapping it failed"
        raise MeshError(message("backend 'shm' can't be used", got=reason, remedy="use backend='auto' or 'gloo'"))
    watch: Any = arena if arena is not None else StoreWatch(store, rank)
    if arena is not None:
        arena.watch_processes()
    session = RankSession(
        layout,
        rank,
        backend=backend,
        watch=watch,
        store=lambda: store,
        timeout=timeout,
        seed=seed,
        launched=True,
    )
    session.renew(1)
    return session, backend


def _wait_for(store: Any, key: str, peer: int, timeout: float) -> str:
    try:
        return store.get(key).decode()
    except (RuntimeError, TimeoutError):
        raise MeshError(
            message(
                f"rank {peer} did not come within {timeout:g} s",
                remedy="check that it was started, with the same world size and the same number of meshes",
            )
        ) from None


def _host_identity() -> str:
    """Equal for processes that can map each other's memory: one kernel, one pid and network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')} {os.getuid()}"


def _shared_arena(store: Any, rank: int, size: int, timeout: float) -> Arena | None:
    """Rank 0's arena, mapped by all; None on every rank if one of them can't."""
    arena = fd = None
    try:
        if rank == 0:
            fd = arena_module.create(size)
            arena = Arena(fd, size, 0)
            arena.clear(1)
            store.set("arena", f"/proc/{os.getpid()}/fd/{fd}")
        else:
            fd = arena_module.open_inherited(store.get("arena").decode())
            arena = Arena(fd, size, rank)
    except OSError:
        if rank == 0:
            store.set("arena", "none")
    store.set(f"mapped/{rank}", "yes" if arena is not None else "no")
    answers = [_wait_for(store, f"mapped/{peer}", peer, timeout) for peer in range(size)]
    if fd is not None:
        os.close(fd)  # all have mapped it
    if "no" in answers:
        return None
    assert arena is not None
    arena.generation = 1
    return arena


def call(session: RankSession, body: Callable[[], Any]) -> Any:
    """A region on a launched rank: all ranks raise what one of them raises."""
    session.regions += 1
    failed: BaseException
    try:
        with session.region(session.regions):
            return body()
    except BaseException as error:
        failed = _recover(session, error)
    raise failed


def _recover(session: RankSession, error: BaseException) -> BaseException:
    """After a failed region: meet the other ranks, exchange what happened, and return what all of them raise."""
    failure = capture(error)
    generation = session.watch.generation + 1
    try:
        _meet(session, generation)
        failures: dict[int, Failure] = {
            rank: wire.from_bytes(data)
            for rank, data in enumerate(session.comm().all_gather_bytes(wire.to_bytes(failure)))
        }
    except (PeerLost, MeshError, Aborted) as other:
        if isinstance(error, Aborted):
            # The others are gone or busy: what they said before is all there is.
            return other if isinstance(other, PeerLost) else PeerLost(str(error))
        return error
    return combine(failures, {}, session.mesh_text)


def _meet(session: RankSession, generation: int) -> None:
    """Wait until every rank has left the failed region, then open the next generation together."""
    arena = session.arena
    end = time.monotonic() + RECOVERY_SECONDS
    if arena is None:
        store = session.store()
        store.set(f"quiet/{generation}/{session.rank}", "yes")
        keys = [f"quiet/{generation}/{rank}" for rank in range(session.layout.size)]
        while not store.check(keys):
            _give_up_after(end, "some ranks")
        session.renew(generation)
        return
    arena.quiet(generation)
    for rank in range(session.layout.size):
        while arena.quiet_generation(rank) < generation:
            arena.check_peers()
            _give_up_after(end, f"rank {rank}")
    if session.rank == 0:
        arena.clear(generation)
    while arena.shared_generation < generation:
        arena.check_peers()
        _give_up_after(end, "rank 0")
    session.renew(generation)


def _give_up_after(end: float, who: str) -> None:
    if time.monotonic() > end:
        raise MeshError(
            message(f"{who} did not leave the failed region within {RECOVERY_SECONDS:g} s", remedy="restart the job")
        )
    time.sleep(1e-3)


def set_threads(threads: int | None, launch: Launch, size: int) -> int:
    """Pin torch's threads: this host's cores shared among its ranks, unless the user says otherwise."""
    if threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, launch.local_size or size))
    torch.set_num_threads(threads)
    return threads
