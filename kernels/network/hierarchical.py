"""The hierarchical communicator: shared memory within each host, and the network among leaders, one per host.

An all-reduce sums the ranks of each host in its arena. The hosts' first ranks, the leaders, then sum these over Gloo,
and write the total into each arena for all to read. With h hosts, 2(h-1)/h of the bytes per host cross the network,
however many ranks a host has. Other collectives send their bytes as `GlooCommunicator` does; only their agreement on
the call takes this way. Invariants:

* numbers are added in the order of the ranks on a host, then in that of the hosts (by their first rank in the group),
  so a run repeats exactly; on one host with as many ranks the order, and so the bits, may differ.
* a sum in tree order has the bits of one host: it goes by hosts if these are nodes of the tree, else by single ranks.
* 16-bit floats are added in float32 and rounded twice: once for the host's sum, once for the total. Their averages are
  divided before that, since 16 bits may not hold the sum.
* operations begin in the arena and go on to the network one after another, so that all leaders agree on their order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..call import Call, check_pieces, shut_down
from ..collectives import ONE_PHASE_BYTES
from ..communicator import Communicator
from ..flat import as_bytes
from ..operations import Steps, Work
from ..reduction import HALVES, Op, Pairwise, divide
from ..shm.communicator import ShmCommunicator
from .gloo import GlooCommunicator
from .hosts import HostWatch

_LAST_WORDS_SECONDS = 2.0  # by then, everything that a rank sent before it died has arrived
_HOST = "the ranks of its host"  # what it waits for at first


def communicator(
    store: dist.Store, watch: HostWatch, ranks: Sequence[int], rank: int, *, timeout: float, channel: str
) -> Communicator:
    """The communicator for a group: on one host, with one rank on each host, or with several ranks on some."""
    hosts = watch.split(ranks)
    if len(hosts) == 1:
        return ShmCommunicator(watch.arena, ranks, timeout=timeout, channel=channel)
    kind = GlooCommunicator if len(hosts) == len(ranks) else HierarchicalCommunicator
    return kind(store, watch, ranks, rank, timeout=timeout, channel=channel, interface=watch.address)


class HierarchicalCommunicator(GlooCommunicator):
    """A group of ranks on several hosts; see `Communicator`, and for the arguments `GlooCommunicator`."""

    backend = "hierarchical"
    _host: ShmCommunicator | None = None
    # Operations begin in one order, and share their totals in one order, but ranks may mix the two differently. So
    # sharing has a communicator of its own.
    _shared: ShmCommunicator | None = None
    _across: GlooCommunicator | None = None  # on leaders
    _lost_at: float | None = None  # when a rank of this host was found to be gone

    def _open(self) -> None:
        """Open the group of all ranks, then that of this host, then that of the leaders."""
        super()._open()
        watch: Any = self._watch
        self._hosts = watch.split(self.ranks)
        self._mine = next(host for host in self._hosts if self.ranks[self.rank] in host)
        self._waits_for = ""
        channel = f"{self.channel} of {self.ranks}"  # other groups may have the same ranks here, or the same leaders
        if self._host is not None and self._shared is not None:
            self._host.renew()
            self._shared.renew()
        else:
            self._host = ShmCommunicator(watch.arena, self._mine, timeout=self.timeout, channel=channel)
            self._shared = ShmCommunicator(watch.arena, self._mine, timeout=self.timeout, channel=f"{channel}, shared")
        self.may_begin = self._host.may_begin
        if self.ranks[self.rank] != self._mine[0]:
            return
        if self._across is not None:
            self._across.renew()
        else:
            leaders = [host[0] for host in self._hosts]
            self._across = GlooCommunicator(
                self._store,
                watch,
                leaders,
                self.ranks[self.rank],
                timeout=self.timeout,
                channel=channel,
                interface=self._interface,
            )

    def close(self) -> None:
        for part in (self._across, self._host, self._shared):
            if part is not None:
                part.close()
        super().close()

    def reclaim(self) -> None:
        if self._host is not None:
            self._host.reclaim()

    def empty(self, shape: Sequence[int] | int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        assert self._host is not None
        return self._host.empty(shape, dtype=dtype)

    def _start(self, what: str, steps: Steps, async_op: bool, tensors: Sequence[torch.Tensor] = ()) -> Any:
        started = super()._start(what, steps, async_op, tensors)
        if async_op:
            self._operations.progress_collectives()  # earlier operations may go on to the network
        return started

    # -- what the collectives consist of -------------------------------------------------------------------------------

    def _all_reduce(self, call: Call, flat: torch.Tensor, op: Op, *, in_place: bool = False) -> Steps:
        host, across = self._host, self._across
        assert host is not None and self._shared is not None
        narrow = op == "avg" and flat.dtype in HALVES
        across_hosts: Op = "sum" if op == "avg" else op
        added: Op = "avg" if narrow else across_hosts
        if isinstance(op, Pairwise):
            if not self._is_subtree():
                return (yield from super()._all_reduce(call, flat, op))
            added, across_hosts = Pairwise(1.0), op  # only the root is scaled
        self._waits_for = _HOST
        partial = yield from host._all_reduce(call, flat, added)
        total: Any = None
        if across is not None:
            self._waits_for = f"the other hosts, at their ranks {[host[0] for host in self._hosts]}"
            if narrow:
                partial = partial * (host.size / self.size)
            total = yield from across._all_reduce(call, partial, across_hosts)
            if op == "avg" and not narrow:
                divide(total, self.size)
        del partial  # its memory is free for the next operation
        self._waits_for = f"the first rank of its host, rank {self._mine[0]}, which talks to the other hosts"
        if flat.numel() * flat.element_size() <= ONE_PHASE_BYTES:
            result = torch.empty_like(flat) if total is None else total
            yield from self._share(result)
            return result

        def write(out: torch.Tensor) -> None:
            if total is not None:  # the leader's slice holds the total; the other slices are not used
                out.copy_(total)

        shared = yield from self._shared._all_gathered(call, flat.numel(), flat.dtype, write)
        return shared[: flat.numel()]

    def _is_subtree(self) -> bool:
        """Whether each host's ranks are one node of the binary tree, so that summing by hosts gives the tree's bits."""
        each = len(self._mine)
        alike = all(len(host) == each for host in self._hosts)
        return alike and each & (each - 1) == 0 and [rank for host in self._hosts for rank in host] == [*self.ranks]

    def _share(self, tensor: torch.Tensor) -> Steps:
        """Overwrite a contiguous tensor with the leader's, on the ranks of this host."""
        assert self._shared is not None
        data, leads = as_bytes(tensor), self._across is not None
        sends = [data if leads and rank > 0 else None for rank in range(self._shared.size)]
        recvs = [data if not leads and rank == 0 else None for rank in range(self._shared.size)]
        yield from self._shared._exchange(None, sends, recvs)

    def _agree(self, call: Call, send_sizes: list[int], recv_sizes: list[int]) -> Steps:
        """As `NetworkedCommunicator._agree`: first on each host, then among the leaders."""
        assert self._host is not None
        members, size = self._host.size, self.size
        self._waits_for = _HOST
        mine, rows = torch.tensor(send_sizes, device="cpu"), torch.empty(members, size, dtype=torch.int64, device="cpu")
        yield from self._host._exchange(call, [as_bytes(mine)] * members, [as_bytes(row) for row in rows])
        table = torch.empty(size, size, dtype=torch.int64, device="cpu")
        if self._across is not None:
            self._waits_for = f"the other hosts, at their ranks {[host[0] for host in self._hosts]}"
            nothing = [0] * len(self._hosts)
            yield from self._across._agree(call, nothing, nothing)
            most = max(map(len, self._hosts))
            padded = torch.zeros(most, size, dtype=torch.int64, device="cpu")
            padded[:members] = rows
            theirs = [torch.empty_like(padded) for _ in self._hosts]
            yield from self._across._all_gather([as_bytes(part) for part in theirs], as_bytes(padded))
            for host, part in zip(self._hosts, theirs, strict=True):
                table[[self.ranks.index(rank) for rank in host]] = part[: len(host)]
        self._waits_for = f"the first rank of its host, rank {self._mine[0]}, which talks to the other hosts"
        yield from self._share(table)
        check_pieces(self, call.text, table[:, self.rank].tolist(), recv_sizes)
        self._waits_for = "all ranks"
        return bool(table.any())

    # -- what is told when it takes too long ---------------------------------------------------------------------------

    def on_stall(self, work: Work) -> None:
        super().on_stall(work)
        self._arena.set_waiting(work.what)
        self._look_for_lost(work)

    def _look_for_lost(self, work: Work) -> None:
        """Raise if a rank of this host that is needed has died or shut the group down, where nobody else reports it.

        What it did before that may still arrive, so wait for a moment first.
        """
        now = time.monotonic()
        needed = {self.ranks[peer] for peer in work.peers} if self._is_message(work) else set(self._mine)
        gone = (self._gone(place, work) for place, rank in enumerate(self._mine) if rank in needed)
        lost = next((each for each in gone if each is not None), None)
        if lost is None:
            return
        if self._lost_at is None:
            self._lost_at = now
        elif now - self._lost_at > _LAST_WORDS_SECONDS:
            raise lost

    def _gone(self, place: int, work: Work) -> BaseException | None:
        """The error for a rank of this host that has died, or has shut the group down without its part."""
        rank, host, shared = self._mine[place], self._host, self._shared
        if host is not None and shared is not None and host._slots.closed(place):
            # In the later parts of a collective only the leader is needed, who shares what came from the other hosts.
            owes = place == 0 and not shared._slots.took_part(0, shared._slots.begun[0])
            if owes or self._waits_for == _HOST or self._is_message(work):
                return shut_down(self.ranks, self.rank, self.ranks.index(rank), work.what)
        return self._arena.lost(self._arena.participant(rank))

    def on_timeout(self, work: Work, seconds: float) -> BaseException:
        error = super().on_timeout(work, seconds)
        if self._is_message(work):
            return error
        lines = [f"\n  it waited for {self._waits_for}"] if self._waits_for else []
        for rank in self._mine:
            if rank != self.ranks[self.rank]:
                doing = self._arena.status(self._arena.participant(rank)) or "computing, not in a collective"
                lines.append(f"\n  rank {rank}: {doing}")
        return type(error)(f"{error.args[0]}{''.join(lines)}")

    @property
    def _arena(self) -> Any:
        watch: Any = self._watch
        return watch.arena
