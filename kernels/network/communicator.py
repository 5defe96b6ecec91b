"""The common base of communicators over a network library: ranks meet in a store, and agree before bytes move.

Before each collective, ranks exchange a header, so that all of them find a disagreement before any data is mixed up.
"""

from __future__ import annotations

import abc
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..call import Call, absent, check_pieces, disagreement
from ..callsite import call_site
from ..collectives import matched
from ..communicator import Communicator
from ..errors import PeerLost
from ..operations import Steps, Work
from ..progress import ProgressCounters
from ..shm.arena import Arena
from ..waiting import Watch, wait_until
from .authentication import code, key_of, seal, unseal
from .hosts import HostWatch, StoreWatch
from .progress import GroupProgress

_TEXT = 240  # bytes of a header for the text of what a rank called and where


class NetworkedCommunicator(Communicator):
    """A group of ranks whose bytes go through another library; see `Communicator`.

    Args:
        store: any `torch.distributed` store that all ranks of the group share.
    """

    _progress: GroupProgress | None  # then the `_counters`, too

    def __init__(
        self,
        store: dist.Store,
        watch: Watch,
        ranks: Sequence[int],
        global_rank: int,
        *,
        timeout: float,
        channel: str,
    ):
        super().__init__(ranks, list(ranks).index(global_rank), watch, timeout=timeout)
        self._store, self.channel = store, channel

    @abc.abstractmethod
    def _all_gather(self, theirs: list[torch.Tensor], mine: torch.Tensor) -> Steps:
        """Fill `theirs` with the flat uint8 tensors of all ranks, all of one size."""

    def _meet(self) -> None:
        """Wait until all ranks are about to connect, under a name that no stale message has."""
        group = ",".join(map(str, self.ranks))
        self._name = f"{self.backend}/{self._watch.generation}/{self.channel}/{group}"
        if self._counters is not None:  # of the generation before, which all ranks have left
            self._counters.close()
        if isinstance(self._watch, Arena):
            self._counters = ProgressCounters(self._watch, self.ranks, self.channel)
        elif isinstance(self._watch, HostWatch | StoreWatch):
            self._counters = self._progress = self._watch.progress.group(self._name, self.ranks)
        self._inbox: list[Any] = []  # messages not received yet: (source, tag, and the library's data for it)
        self._received: dict[int, int] = {}  # how many messages were received, by source
        self._store.set(f"{self._name}/here/{self.rank}", secrets.token_hex(16))
        keys = [f"{self._name}/here/{rank}" for rank in range(self.size)]

        def on_stall() -> None:
            for rank in range(self.size):
                if self._has_left(rank) and not self._store.check([keys[rank]]):
                    self._watch.check()
                    raise absent(self.ranks, self.rank, rank, "a collective", call_site())
            if self._progress is not None:
                self._progress.check_wait(f"the first operation of group {self.ranks}", range(self.size))

        def on_timeout() -> PeerLost:
            missing = [self.ranks[rank] for rank in range(self.size) if not self._store.check([keys[rank]])]
            return PeerLost(
                f"rank {self.ranks[self.rank]} waited {self.timeout:g} s for ranks {missing} to open their group",
                where=f"group {self.ranks}",
                remedy="every rank of the group must make the same calls",
            )

        wait_until(
            lambda: self._store.check(keys),
            self._watch,
            timeout=self.timeout,
            oversubscribed=self.oversubscribed,
            on_timeout=on_timeout,
            on_stall=on_stall,
        )
        if self._progress is not None:
            self._progress.end_wait()
            self._progress.open(self._operations.queue)
        self.key = code(key_of(self._store), self._name.encode(), self._store.get(keys[0]))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        found = super().all_gather_bytes(seal(self.key, str(self.rank), data))
        opened = [unseal(self.key, str(rank), its) for rank, its in enumerate(found)]
        if None in opened:
            raise not_of_this_job(self, opened.index(None))
        return [its for its in opened if its is not None]

    def close(self) -> None:
        """Leave this rank's counters readable: a peer may still be in an operation that is over here."""

    def _agree(self, call: Call, send_sizes: list[int], recv_sizes: list[int]) -> Steps:
        """Check that all ranks make the same call; if not, exchange what each called and where, and raise.

        Returns:
            Whether any rank sends anything; if so, all ranks must take part, even those that send and get nothing.
        """
        text = call.text
        head = struct.Struct(f"<Q{self.size}Q")
        for attempt in range(2):
            shown = text.encode(errors="backslashreplace")[:_TEXT].ljust(_TEXT, b"\0")
            data = head.pack(call.signature, *send_sizes) + shown
            mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            theirs = [torch.empty_like(mine) for _ in range(self.size)]
            yield from self._all_gather(theirs, mine)
            headers = [bytes(header.numpy().tobytes()) for header in theirs]
            if attempt == 0:
                if all(header[:8] == data[:8] for header in headers):
                    break
                text = f"{call.text}, at {self.site()}"
        else:
            texts = [header[head.size :].rstrip(b"\0").decode(errors="replace") for header in headers]
            raise disagreement(self.ranks, {**dict(enumerate(texts)), self.rank: text})
        sizes = [head.unpack_from(header)[1:] for header in headers]
        check_pieces(self, call.text, [sent[self.rank] for sent in sizes], recv_sizes)
        return any(map(any, sizes))

    def _message(self, src: int | None, tag: int) -> Steps:
        """Wait for a message, take it out of the inbox, and count it."""
        found = yield from matched(self._inbox, src, tag)
        self._received[found[0]] = self._received.get(found[0], 0) + 1
        return found

    # -- what ends a wait ----------------------------------------------------------------------------------------------

    def _has_left(self, rank: int) -> bool:
        return super()._has_left(rank) if self._progress is None else self._progress.has_left(rank)

    def _took_part(self, rank: int, work: Work) -> bool:
        if not self._is_message(work) or self._counters is None:
            return super()._took_part(rank, work)
        if work.what.startswith("send"):
            if self._takes_messages(rank):
                return True
        else:
            self.poll_messages()
            waiting = sum(source == rank for source, *_ in self._inbox)
            if self._received.get(rank, 0) + waiting < self._counters.sent_by(rank, self.rank):
                return True  # the rest is on its way
        self._operations.progress_messages()
        return work.done

    @abc.abstractmethod
    def _takes_messages(self, rank: int) -> bool:
        """Whether messages can be sent to a rank that has left the region."""

    def _cut_off(self, reason: str) -> PeerLost:
        """The error for a lost connection, unless the watch raises one that says more."""
        self._look_for_death()
        problem = f"rank {self.ranks[self.rank]} lost the connection to a rank of group {self.ranks}"
        return PeerLost(problem, got=reason, remedy="see the output of the other ranks")

    def _look_for_death(self) -> None:
        """After a broken connection, give the watch a moment to raise who died or aborted, and why."""
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            self._watch.check()
            self._watch.check_peers()
            time.sleep(0.01)


def not_of_this_job(comm: Communicator, source: int) -> PeerLost:
    """The error for data that claims to be from a rank of the group, but has no valid code."""
    return PeerLost(
        f"what came as rank {comm.ranks[source]}'s is not of this job",
        where=f"rank {comm.ranks[comm.rank]}, group {comm.ranks}",
        remedy="see who else can reach the ports of this job: docs/security.md",
    )
