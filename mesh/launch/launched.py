"""Launched ranks: a launcher started the processes, and each runs the whole script.

The ranks meet through a `torch.distributed` store. Ranks of one host then share an arena. Here a region is a plain
function call; if it fails on one rank, all ranks meet again, exchange what happened, and raise the same exception.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...kernels.errors import Aborted, MeshError, PeerLost
from ...kernels.limits import named_limits
from ...kernels.network.hosts import HostWatch, out_of_reach
from ...kernels.processes import check_not_imported_by_worker, cores, end_with_parent, forked_cannot
from ...kernels.shm import arena as arena_module
from ...kernels.shm.arena import Arena
from .. import wire
from ..display.stacks import publish
from ..failure import Failure, capture, combine, ranks_text
from ..rank import devices
from ..rank.session import RankSession
from ..spec import Layout
from . import joining
from .environments import Launch
from .rendezvous import meet

RECOVERY_SECONDS = 5.0

_meshes = 0


@named_limits()
def join(
    layout: Layout, launch: Launch, *, backend: str, device: str, seed: int, timeout: float
) -> tuple[RankSession, str]:
    """Meet the other ranks; returns this rank's session, and the backend that was chosen."""
    global _meshes
    check_not_imported_by_worker()
    if os.environ.keys() & {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"}:  # it would go on if its launcher was killed
        end_with_parent(os.getppid())
    _meshes += 1
    _write_whole_lines()
    store = meet(launch, timeout, f"mesh{_meshes}")
    rank, size = launch.rank, layout.size
    alike = {"axes": layout.axes, "backend": backend, "seed": seed}
    met = joining.join(store, rank, size, backend=backend, timeout=timeout, alike=alike)
    arena, hosts = met.arena, met.hosts
    several = len(hosts) > 1 or backend == "hierarchical"
    own = devices.of_launched(device, backend, launch, store, met.identity, size)
    if backend == "auto" and own is not None:
        backend = "nccl"
    elif backend == "auto":
        backend = "gloo" if arena is None else "hierarchical" if several else "shm"
    if arena is None and backend in ("shm", "hierarchical"):
        reason = arena_module.supported() or "mapping it failed on one of the hosts"
        if backend == "shm" and several:
            reason = f"the ranks are on {len(hosts)} hosts: {', '.join(map(ranks_text, hosts))}"
        raise MeshError(f"backend {backend!r} can't be used", got=reason, remedy="use backend='auto' or 'gloo'")
    if arena is not None:
        arena.watch_processes()
        publish(arena)
    session = RankSession(
        layout,
        rank,
        backend=backend,
        watch=met.watch,
        store=lambda: store,
        timeout=timeout,
        seed=seed,
        launched=True,
        device=own,
    )
    session.renew(1)
    if _meshes == 1:
        from ..rank.debugger import debug_through  # not at the top: it imports all that pdb needs

        debug_through(session)
        gc.collect()
        gc.freeze()  # torch's many objects: searching them for garbage can take longer than a step
        atexit.register(gc.unfreeze)  # so that at exit everything is closed, and meeting places are removed
    return session, backend


def _write_whole_lines() -> None:
    """Buffer output by lines: ranks share the launcher's output, where lines should stay in one piece."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # unless a program, or a test, has replaced it
            stream.reconfigure(line_buffering=True, write_through=False)


def call(session: RankSession, body: Callable[[], Any], what: str, *, pure: bool = False) -> Any:
    """A region on a launched rank: all ranks raise what one of them raises.

    Args:
        what: the name of the call; it is an error if another rank makes a call with another name.
        pure: it is a call of an @spmd function.
    """
    if session.foreign:
        raise forked_cannot("make a call of all ranks")
    session.regions += 1
    failed: BaseException
    try:
        with session.region(session.regions, what, pure=pure):
            return body()
    except BaseException as error:
        if session.foreign:  # a forked child that got here: only the rank itself meets the others
            raise
        failed = _recover(session, error)
    session.run_state.note_failure()
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
        # The others are gone or busy, so only what is known already can be raised.
        if isinstance(error, Aborted):
            return other if isinstance(other, PeerLost) else PeerLost(str(error))
        if isinstance(error, PeerLost) and isinstance(other, PeerLost) and other.rank != error.rank:
            return PeerLost(f"{error}\n{other}", other.rank)
        return error
    return combine(failures, {}, session.mesh_text)


def _meet(session: RankSession, generation: int) -> None:
    """Wait until every rank has left the failed region, and open the next generation together."""
    arena = session.arena
    end = time.monotonic() + RECOVERY_SECONDS
    if arena is None:
        _meet_in_store(session, generation, end)
        # Before anything checks the store again, where the old generation is aborted.
        session.renew(generation, session.regions - 1)
        if isinstance(session.watch, HostWatch):
            _clear(session.watch.arena, generation, end, leads=session.watch.arena.rank == 0)
        return
    arena.quiet(generation)
    for rank in range(session.layout.size):
        while arena.quiet_generation(rank) < generation:
            arena.check_peers()
            _check_time(end, f"rank {rank}")
    _clear(arena, generation, end, leads=session.rank == 0)
    session.renew(generation, session.regions - 1)


def _meet_in_store(session: RankSession, generation: int, end: float) -> None:
    if session.watch.lost is not None:
        raise PeerLost(session.watch.lost, 0)
    store, size = session.store(), session.layout.size
    keys = {rank: f"quiet/{generation}/{rank}" for rank in range(size)}
    try:
        store.set(keys[session.rank], "yes")
        while not store.check(list(keys.values())):
            if time.monotonic() > end:
                silent = [rank for rank in range(size) if not store.check([keys[rank]])]
                where = f"rank {session.rank}, after {RECOVERY_SECONDS:g} s"
                lost = f"{ranks_text(silent)} did not answer: dead, cut off, or busy with something else"
                raise PeerLost(lost, where=where, remedy="restart the job", rank=silent[0])
            time.sleep(1e-2)
    except dist.DistError as error:
        raise PeerLost(out_of_reach(session.rank, error), 0) from None


def _clear(arena: Arena, generation: int, end: float, *, leads: bool) -> None:
    """Clear the abort of the failed region, on all ranks of the host together."""
    if leads:
        arena.clear(generation)
    while arena.shared_generation < generation:
        arena.check_peers()
        _check_time(end, "the first rank of the host")


def _check_time(end: float, who: str) -> None:
    if time.monotonic() > end:
        raise MeshError(
            f"{who} did not leave the failed region within {RECOVERY_SECONDS:g} s", remedy="restart the job"
        )
    time.sleep(1e-3)


def set_threads(threads: int | None, launch: Launch, size: int) -> int:
    """Set torch's threads: by default this host's cores, shared among its ranks."""
    if threads is None:
        threads = max(1, cores() // max(1, launch.local_size or size))
    torch.set_num_threads(threads)
    return threads
