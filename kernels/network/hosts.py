"""Watches ranks of several hosts: within each host through its arena, and between hosts through a store.

Invariants: what ends a region on one host ends it on all; and nothing waits for a store that can't be reached, so that
a host that is cut off from the others notices it, too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch.distributed as dist

from ..call import other_calls
from ..errors import Aborted, PeerLost, message
from ..shm.arena import Arena, StandingArena
from .progress import GroupProgress, StoreProgress

LEADER_SECONDS, OTHERS_SECONDS = 0.05, 0.5  # how often a waiting rank asks the store
_DIGITS = 18  # a region's number has no more
_CALL_SECONDS = 1.0  # how often a waiting rank publishes its call, and reads that of another rank
_GRACE_SECONDS = 1.0  # the rank that runs the store may end a moment before the others


class StoreWatch:
    """Aborts through a store, for ranks that share no memory; waiting ranks read it a few times a second.

    Args:
        address: where the other hosts reach this one, if that is known.
    """

    def __init__(self, store: dist.Store, rank: int, *, address: str | None = None, seconds: float = LEADER_SECONDS):
        self._store, self._rank, self.address, self._seconds = store, rank, address, seconds
        self.generation = self.region = 0
        self.progress = StoreProgress(store, rank, lambda: self.generation)
        self._call, self._waits_from = "", 0.0  # the region's call; when a wait in it began, or last published it
        self._next_look = self._lost_at = 0.0
        self._debugged = False  # some rank was at the prompt of a debugger at the last look

    @property
    def lost(self) -> str | None:
        """The error if the store did not answer; then it is not asked again."""
        error = self.progress.unreached
        return None if error is None else out_of_reach(self._rank, error)

    def enter(self, region: int, call: str = "") -> None:
        self.region, self._call, self._waits_from = region, call, 0.0
        self.progress.enter(region)

    def leave(self) -> None:
        self.progress.leave()

    def abort(self, text: str) -> None:
        if self.lost is None:
            with contextlib.suppress(dist.DistError):  # ranks that this doesn't reach will notice the silence
                self._store.set(self._key(), f"{self.region} {text}")

    def check(self) -> None:
        """Do nothing: reading the store is too slow for every round."""

    def check_peers(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        if self.lost is not None:
            self._lost_at = self._lost_at or now
            if now - self._lost_at > _GRACE_SECONDS:
                raise PeerLost(self.lost, 0)
            return
        try:
            text = self._store.get(self._key()).decode(errors="replace") if self._store.check([self._key()]) else ""
            self._debugged = self._store.add(self._debuggers(), 0) > 0
            other = self._other_call(now) if self._call else None
        except dist.DistError as error:
            self.progress.unreached, self._lost_at = error, now
            return
        finally:
            self._next_look = time.monotonic() + self._seconds
        if text:
            region, _, text = text.partition(" ")
            if region.isdecimal() and len(region) <= _DIGITS and int(region) <= self.region:  # see Arena.check
                raise Aborted(text)
        if other is not None:
            raise other_calls({self._rank: f"{self._call}, waiting", self._met: other})

    @property
    def _met(self) -> int:
        """The rank to compare calls with: rank 0, since a call on one rank alone is mostly there; on rank 0, rank 1."""
        return 0 if self._rank else 1

    def _other_call(self, now: float) -> str | None:
        """The call that another rank waits in, if it has published a different one than this rank's."""
        self._waits_from = self._waits_from or now
        if now - self._waits_from < _CALL_SECONDS:
            return None
        self._waits_from = now
        self._store.set(f"calls/{self.generation}/{self._rank}", f"{self.region} {self._call}")
        key = f"calls/{self.generation}/{self._met}"
        if not self._store.check([key]):
            return None
        region, _, call = self._store.get(key).decode(errors="replace").partition(" ")
        return call if region == str(self.region) and call != self._call else None

    def set_in_debugger(self, there: bool) -> None:
        """Keep waits of other hosts' ranks from timing out meanwhile, too."""
        if self.lost is None:
            with contextlib.suppress(dist.DistError):
                self._store.add(self._debuggers(), 1 if there else -1)

    def in_debugger(self) -> bool:
        return self._debugged

    def _debuggers(self) -> str:
        return f"debuggers/{self.generation}"  # a rank that is killed at its prompt counts until the next generation

    def _key(self) -> str:
        return f"abort/{self.generation}"


def out_of_reach(rank: int, error: BaseException) -> str:
    """The message for a store that does not answer."""
    return message(
        f"rank {rank} has lost contact with the meeting place of the job, and so with the other hosts",
        got=str(error).splitlines()[0],
        remedy="see that the host of rank 0 is up and that the hosts reach each other",
    )


class HostArena(Arena):
    """The arena of one of several hosts.

    Args:
        members: the ranks of this host.
        rank: this process's rank.
        beyond: the watch through which this host tells others of aborts, and hears of theirs.
    """

    has_all_ranks = False

    def __init__(self, fd: int, members: Sequence[int], rank: int, beyond: StoreWatch):
        self.members, self.beyond = tuple(members), beyond
        super().__init__(fd, len(members), self.members.index(rank))

    def mesh_rank_of(self, participant: int) -> int:
        return self.members[participant]

    def participant(self, rank: int) -> int:
        return self.members.index(rank)

    def enter(self, region: int, call: str = "") -> None:
        self.beyond.enter(region, call)
        super().enter(region, call)

    def leave(self) -> None:
        super().leave()
        self.beyond.leave()

    def opened(self, key: int, ranks: Sequence[int]) -> GroupProgress:
        return self.beyond.progress.group(str(key), ranks)

    def abort(self, text: str) -> None:
        super().abort(text)
        self.beyond.abort(text)

    def set_in_debugger(self, there: bool) -> None:
        super().set_in_debugger(there)
        self.beyond.set_in_debugger(there)

    def in_debugger(self) -> bool:
        return super().in_debugger() or self.beyond.in_debugger()

    def check_peers(self) -> None:
        super().check_peers()
        self._check_beyond()

    def _check_beyond(self) -> None:
        try:
            self.beyond.check_peers()
        except Aborted as aborted:
            super().abort(str(aborted))  # tell the other ranks of this host, which read the store less often
            raise


class StandingHostArena(StandingArena, HostArena):
    """A `HostArena` for ranks that run outside of regions: see `StandingArena`."""

    def check_peers(self) -> None:
        self._check_beyond()


class HostWatch:
    """A rank's watch in a mesh of several hosts; the arena behind it knows only the ranks of its own host."""

    def __init__(self, arena: HostArena, hosts: Sequence[Sequence[int]]):
        self.arena, self.hosts, self.address = arena, hosts, arena.beyond.address
        self.progress = arena.beyond.progress
        self.enter, self.leave = arena.enter, arena.leave
        self.in_debugger, self.set_in_debugger = arena.in_debugger, arena.set_in_debugger
        self.abort, self.check, self.check_peers = arena.abort, arena.check, arena.check_peers

    @property
    def lost(self) -> str | None:
        return self.arena.beyond.lost

    @property
    def generation(self) -> int:
        return self.arena.generation

    @generation.setter
    def generation(self, number: int) -> None:
        self.arena.generation = self.arena.beyond.generation = number

    def split(self, ranks: Sequence[int]) -> list[list[int]]:
        """The ranks of a group by host, in the order of the hosts' first ranks in it."""
        found = [[rank for rank in ranks if rank in host] for host in self.hosts]
        return sorted((host for host in found if host), key=lambda host: list(ranks).index(host[0]))
