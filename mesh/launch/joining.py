"""Joining: ranks that have met in a store find out which of them share a host, and map the host's arena.

It needs no mesh: a process group of torch begins the same way. Invariant: all ranks of all hosts come to the same
conclusion, so that if one of them can't map its arena, none does.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...kernels.errors import MeshError
from ...kernels.network.hosts import LEADER_SECONDS, OTHERS_SECONDS, HostArena, HostWatch, StoreWatch
from ...kernels.network.interface import towards
from ...kernels.processes import namespace
from ...kernels.shm import arena as arena_module
from ...kernels.shm.arena import Arena
from ..hosts.protocol import versions
from .rendezvous import address_beside, chosen_address

_GIVE = "give Mesh the same on all ranks; random numbers differ between ranks by themselves"


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """What a rank knows after joining.

    Attributes:
        watch: through which aborts travel: the arena, a watch over the store, or both joined.
        arena: this host's; None if there is none.
        hosts: the ranks of each host.
        identity: this host's.
    """

    watch: Any
    arena: Arena | None
    hosts: list[list[int]]
    identity: str


def join(
    store: Any,
    rank: int,
    size: int,
    *,
    backend: str,
    timeout: float,
    make_arena: Callable[[int, int, int], Arena] = Arena,
    make_host_arena: Callable[[int, list[int], int, StoreWatch], HostArena] = HostArena,
    alike: Mapping[str, object] | None = None,
) -> Joined:
    """Learn where the other ranks are, and map this host's arena if `backend` has a use for one.

    Args:
        alike: arguments that all ranks must have been given alike.
        make_arena: called as `make_arena(fd, size, rank)` if all ranks are on one host.
        make_host_arena: called as `make_host_arena(fd, members, rank, beyond)` if they are on several.
    """
    given = {name: repr(value) for name, value in (alike or {}).items()}
    alike_there = json.dumps([versions(), given])
    store.set(f"host/{rank}", f"{_host_identity()}\n{address_beside(store) or ''}\n{alike_there}")
    entries = [_wait_for(store, f"host/{peer}", peer, timeout).split("\n") for peer in range(size)]
    runs, given_to = zip(*(json.loads(said) for *_, said in entries), strict=True)
    _compare(runs, "ranks run with different {}", "install the same on all hosts")
    _compare(given_to, "ranks make their mesh with different {}", _GIVE)
    hosts = _by_host([identity for identity, *_ in entries])
    several = len(hosts) > 1 or backend == "hierarchical"
    here = _reachable_at(rank, hosts, [at for _, at, _ in entries])
    watch: Any = StoreWatch(store, rank, address=here)
    arena: Arena | None = None
    if not several:
        arena = _shared_arena(store, rank, hosts, timeout, lambda fd: make_arena(fd, size, rank))
        watch = arena or watch
    elif backend == "hierarchical" or (backend == "auto" and len(hosts) < size):
        members = next(host for host in hosts if rank in host)
        beyond = StoreWatch(store, rank, address=here, seconds=LEADER_SECONDS if rank == members[0] else OTHERS_SECONDS)
        arena = _shared_arena(store, rank, hosts, timeout, lambda fd: make_host_arena(fd, members, rank, beyond))
        watch = HostWatch(arena, hosts) if isinstance(arena, HostArena) else watch
    return Joined(watch, arena, hosts, entries[rank][0])


def _wait_for(store: Any, key: str, peer: int, timeout: float) -> str:
    try:
        return store.get(key).decode()
    except (RuntimeError, TimeoutError):
        raise MeshError(
            f"rank {peer} did not come within {timeout:g} s",
            remedy="check that it was started, with the same world size and the same number of meshes",
        ) from None


def _compare(given: Sequence[dict[str, str]], problem: str, remedy: str) -> None:
    """Raise the same error on all ranks if some have anything else than rank 0."""
    for rank, theirs in enumerate(given):
        for name, text in given[0].items():
            if theirs.get(name) != text:
                got = f"rank 0: {text}; rank {rank}: {theirs.get(name)}"
                raise MeshError(problem.format(name), got=got, remedy=remedy)


def _host_identity() -> str:
    """Equal for processes of one host: one kernel, one pid and network namespace, one user.

    Each container or network namespace counts as a host: its ranks have their own addresses, so that measurements and
    failures can be told apart.
    """
    return f"{namespace()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"


def _by_host(identities: list[str]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return list(hosts.values())


def _reachable_at(rank: int, hosts: list[list[int]], addresses: list[str]) -> str | None:
    """The address where other ranks reach this one: its own entry, else the address it has towards another host."""
    if len(hosts) == 1:
        return chosen_address() or "127.0.0.1"
    if addresses[rank]:
        return addresses[rank]
    mine = next(host for host in hosts if rank in host)
    others = [at for peer, at in enumerate(addresses) if at and peer not in mine]
    return towards(others[0]) if others else None


def _shared_arena(
    store: Any, rank: int, hosts: list[list[int]], timeout: float, open_arena: Callable[[int], Arena]
) -> Arena | None:
    """The arena of this rank's host, made by the host's first rank; None on all ranks if any can't map its arena."""
    arena = fd = None
    leader = next(host[0] for host in hosts if rank in host)
    try:
        if arena_module.supported() is not None:
            raise OSError(arena_module.supported())
        if rank == leader:
            fd = arena_module.create(next(len(host) for host in hosts if rank in host))
            arena = open_arena(fd)
            arena.clear(1)
            store.set(f"arena/{rank}", f"{os.getpid()} {fd}")
        else:
            pid, number = map(int, _wait_for(store, f"arena/{leader}", leader, timeout).split())
            fd = arena_module.open_of(pid, number, next(len(host) for host in hosts if rank in host))
            arena = open_arena(fd)
    except (OSError, ValueError):
        if rank == leader:
            store.set(f"arena/{rank}", "none")
    store.set(f"mapped/{rank}", "yes" if arena is not None else "no")
    answers = [_wait_for(store, f"mapped/{peer}", peer, timeout) for host in hosts for peer in host]
    if fd is not None:
        os.close(fd)  # all have mapped it
    if "no" in answers:
        return None
    assert arena is not None
    arena.generation = 1
    return arena
