"""The Gloo communicator: ranks of several hosts, or of one host that has no usable shared memory.

Only bytes travel through torch's Gloo (`alltoall` and `allgather` of uint8); the arithmetic is done here, in rank
order. That avoids what Gloo does badly: it silently corrupts strided tensors, lacks int16, uint16/32/64 and averages of
integers, and adds in ring order. Operations are polled, never waited for inside Gloo, so that aborts are noticed.
Before each operation ranks exchange a header, so that they find a disagreement before any data is mixed up.
"""

from __future__ import annotations

import atexit
import datetime
import re
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..call import Call, check_received
from ..errors import MeshError, PeerLost
from ..flat import sizes
from ..operations import Steps
from ..processes import Owned
from ..torch_private import gloo_options, set_timeout
from ..waiting import Watch, wait_until
from . import gloo_group
from .communicator import NetworkedCommunicator
from .interface import address_of
from .mailbox import Mailbox, address_key

_LONG = datetime.timedelta(days=1)  # longer than any operation; ends those that were given up and that Gloo keeps

_all: weakref.WeakSet[GlooCommunicator] = weakref.WeakSet()


@atexit.register
def _end_what_is_under_way() -> None:
    """Close communicators with unfinished operations: torch would wait for these at the end, even for dead peers."""
    for comm in [*_all]:
        if comm._under_way:
            comm.close()


class GlooCommunicator(NetworkedCommunicator):
    """A group of ranks that talk over TCP; see `Communicator`.

    Args:
        store: any `torch.distributed` store that all ranks of the group share.
        interface: the network interface or address to use; None is the address that this host's name resolves to.
    """

    backend = "gloo"
    stamped = True

    def __init__(
        self,
        store: dist.Store,
        watch: Watch,
        ranks: Sequence[int],
        global_rank: int,
        *,
        timeout: float,
        channel: str = "main",
        interface: str | None = None,
    ):
        super().__init__(store, watch, ranks, global_rank, timeout=timeout, channel=channel)
        self._interface = interface
        self._owned = Owned()
        self._group: Any = None  # torch's stubs lack the methods that are used here
        self._sockets: gloo_group.Sockets = set()
        self._under_way: set[dist.Work] = set()
        self._mailbox: Mailbox | None = None
        _all.add(self)
        self._open()

    def _open(self) -> None:
        """Connect to the peers; again after every recovery, under a name that no stale message has."""
        self._disconnect()  # not `close`, which is final in subclasses
        address = self._address()
        try:
            options = gloo_options(self.timeout, address)
        except RuntimeError as error:
            raise MeshError(
                f"Gloo can't listen at {address} on {socket.gethostname()}",
                got=_reason(error),
                expected="an IPv4 address of this host, if only that of its loopback",
                remedy="give it one (ip addr add 127.0.0.1/8 dev lo), correct SPMD_INTERFACE, or on one host take "
                "backend='shm'",
            ) from None
        self._turns: dict[int, int] = {}  # messages started, by destination
        self._posted: dict[int, int] = {}  # messages handed to the mailbox
        self._meet()
        store = dist.PrefixStore(self._name, self._store)
        try:
            self._group, self._sockets = gloo_group.connect(store, self.rank, self.size, options, self._wait)
            # From now on our own wait times out: it knows of ranks in a debugger, and its error says more.
            set_timeout(self._group, _LONG)
        except PeerLost:
            raise
        except RuntimeError as error:
            self._look_for_death()
            raise self._unconnected(_reason(error)) from None

    def _wait(self, connected: Callable[[], bool]) -> None:
        wait_until(
            connected,
            self._watch,
            timeout=self.timeout,
            oversubscribed=self.oversubscribed,
            on_timeout=lambda: self._unconnected(f"nothing within {self.timeout:g} s"),
            gently=True,
        )

    def _unconnected(self, reason: str) -> PeerLost:
        return PeerLost(
            f"rank {self.ranks[self.rank]} could not connect to group {self.ranks} over Gloo",
            got=reason,
            remedy="see that all ranks are running and that the hosts reach each other",
        )

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _disconnect(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
        if self._group is None or self._owned.foreign:  # in a fork, the connections belong to the parent
            return
        self._under_way.clear()
        ended, self._group = [self._group], None
        gloo_group.end(ended, self._sockets)

    def _done(self, work: dist.Work) -> Steps:
        self._under_way.add(work)
        yield work.is_completed
        self._under_way.discard(work)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._cut_off(_reason(error)) from None

    def _all_gather(self, theirs: list[torch.Tensor], mine: torch.Tensor) -> Steps:
        yield from self._done(self._group.allgather([theirs], [mine]))

    def _exchange(
        self, call: Call | None, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
    ) -> Steps:
        send_sizes, recv_sizes = sizes(sends), sizes(recvs)
        if call is not None and not (yield from self._agree(call, send_sizes, recv_sizes)):
            return
        outgoing = torch.empty(sum(send_sizes), dtype=torch.uint8, device="cpu")
        torch.cat([piece for piece in sends if piece is not None and piece.numel()] or [_EMPTY], out=outgoing)
        incoming = torch.empty(sum(recv_sizes), dtype=torch.uint8, device="cpu")
        options = dist.AllToAllOptions()
        yield from self._done(self._group.alltoall_base(incoming, outgoing, recv_sizes, send_sizes, options))
        for target, piece in zip(recvs, incoming.split(recv_sizes), strict=True):
            if target is not None:
                target.copy_(piece)

    def _address(self) -> str:
        if self._interface is not None:
            return address_of(self._interface)
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError:
            return "127.0.0.1"

    # -- point to point ------------------------------------------------------------------------------------------------

    def _open_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            self._mailbox = Mailbox(self._store, self._name, self.rank, self._address())
        return self._mailbox

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, stamp: int = 0) -> Steps:
        mailbox = self._open_mailbox()
        # Messages to one destination keep their order: each waits until the ones before it are posted.
        turn = self._turns.get(dst, 0)
        self._turns[dst] = turn + 1
        yield lambda: self._posted.get(dst, 0) == turn and mailbox.connected(dst)
        if self._counters is not None:
            self._counters.send(dst)
        message = mailbox.post(tensor, dst, tag, stamp)
        self._posted[dst] = turn + 1

        def sent() -> bool:
            mailbox.check()
            if message.lost:
                self._look_for_death()
                problem = (
                    f"rank {self.ranks[self.rank]} lost the connection to rank {self.ranks[dst]}, and a message to it"
                )
                raise PeerLost(problem, self.ranks[dst])
            return message.sent

        yield sent

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, stamp: int = 0) -> Steps:
        self._open_mailbox()
        source, _, data, sent = yield from self._message(src, tag)
        check_received(self, source, tag, got=(data.numel(), sent), expected=(tensor.numel(), stamp))
        tensor.copy_(data)
        return source

    def _takes_messages(self, rank: int) -> bool:
        return bool(self._store.check([address_key(self._name, rank)]))  # from then on its mailbox's thread takes them

    def poll_messages(self) -> None:
        # The mailbox's thread appends at any time; receives match the messages that are there at this moment.
        if self._mailbox is not None:
            self._mailbox.check()
            self._inbox += [self._mailbox.inbox.pop(0) for _ in range(len(self._mailbox.inbox))]


def _reason(error: RuntimeError) -> str:
    """Gloo's error message, without the line in its sources and its advice."""
    text = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", str(error).splitlines()[0])
    return text.partition(". This is typically")[0]


_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
