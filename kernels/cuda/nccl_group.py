"""What the channels of one group of ranks share: NCCL's first communicator, from which the others are split off.

Splitting saves ranks from meeting by a unique id again for each channel. Invariants: ranks enter NCCL together, after a
barrier of the hosts; a rank can give up waiting for peers inside NCCL; a communicator is split only when all its
operations are over, as NCCL requires.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..communicator import Communicator
from ..errors import PeerLost
from ..waiting import wait_until
from .nccl_connection import Connection, Pending, await_endings, connected, joined
from .nccl_library import Library

FIRST = "main"  # the channel that works on the first communicator


class User(Protocol):
    """A channel of a group."""

    name: str
    streams: Any

    def quiet(self) -> bool:
        """Whether all its collectives are over."""


class Group:
    """The communicators of one group.

    Args:
        host: a communicator of the same ranks for the host, which carries the unique id.
    """

    def __init__(self, host: Communicator, library: Library):
        self.host, self.library = host, library
        self._generation: int | None = None
        self._first: Connection | None = None
        self._lock = threading.Lock()
        self._users: dict[str, User] = {}

    def open(self, user: User) -> Connection:
        """Make NCCL's communicator for a channel, in the present generation; all ranks of the group call this."""
        host = self.host
        host._watch.check()
        host._watch.check_peers()
        generation = host._watch.generation
        if self._generation != generation or self._first is None:
            self.end(abort=True)
            await_endings()
            self._first, self._generation = self._made(user.streams.enter), generation
        self._users[user.name] = user
        if user.name == FIRST:
            return self._first
        first_user = self._users.get(FIRST)
        if first_user is not None:
            self._wait(first_user.quiet, "done with the collectives that it began with")
        host.barrier()
        first, enter = self._first, user.streams.enter

        def split() -> Connection:
            return connected(
                self.library, lambda: first.call(lambda raw: raw.commSplit(0, host.rank), waits=True), enter
            )

        return self._waited_for(split, enter)

    def _made(self, enter: Callable[[], None]) -> Connection:
        host, library = self.host, self.library
        unique = torch.zeros(128, dtype=torch.uint8, device="cpu")
        if host.rank == 0:
            made = library.nccl.get_unique_id()
            unique[: len(made)] = torch.frombuffer(bytearray(made), dtype=torch.uint8)
        host.broadcast(unique, src=0)
        host.barrier()
        return self._waited_for(lambda: joined(library, host.size, unique.numpy().tobytes(), host.rank, enter), enter)

    def _waited_for(self, make: Callable[[], Connection], enter: Callable[[], None]) -> Connection:
        """Wait for a communicator that all ranks of the group make together; abandon it after an error."""
        pending = Pending(lambda _: make(), enter)
        try:
            self._wait(pending.done, "connected by NCCL with")
            made = pending.result()
            assert made is not None
            return made
        except BaseException:
            pending.abandon()
            raise

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        host = self.host
        others = [rank for rank in host.ranks if rank != host.ranks[host.rank]]
        whom = f"ranks {others}" if others else "itself"

        def on_timeout() -> PeerLost:
            return PeerLost(
                f"rank {host.ranks[host.rank]} was not {what} {whom} after {host.timeout:g} s",
                where=f"group {host.ranks}, {self.library.describe()}",
                remedy="see what the other ranks do, run with NCCL_DEBUG=INFO, or raise Mesh(timeout=)",
            )

        wait_until(ready, host._watch, timeout=host.timeout, oversubscribed=True, on_timeout=on_timeout)

    def leave(self, name: str, connection: Connection, *, abort: bool) -> None:
        """End a channel's communicator; the first one ends with its last user, or at once if by force."""
        self._users.pop(name, None)
        if name != FIRST:
            connection.end(abort=abort)
        elif abort and connection is self._first:  # else another channel has already ended it, and made a new one
            self.end(abort=True)
        if not self._users:
            self.end(abort=abort)

    def end(self, *, abort: bool) -> None:
        """End the first communicator, if there is one."""
        with self._lock:  # the watchdog may do the same
            first, self._first = self._first, None
        if first is not None:
            first.end(abort=abort)


_groups: dict[tuple[int, tuple[int, ...]], Group] = {}


def group_of(make_host: Callable[[str], Communicator], watch: Any, ranks: tuple[int, ...], library: Library) -> Group:
    """The group of these ranks in one mesh; the same for all channels."""
    key = (id(watch), ranks)
    found = _groups.get(key)
    if found is None or found.host._watch is not watch:
        found = _groups[key] = Group(make_host("nccl"), library)
    return found


def forget(group: Group) -> None:
    """Drop a group that no channel uses any more."""
    for key in [key for key, known in _groups.items() if known is group and not group._users]:
        _groups.pop(key).host.close()
