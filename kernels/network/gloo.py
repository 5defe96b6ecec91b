"""The Gloo communicator: ranks of several hosts, or of one host that has no usable shared memory.

Only bytes travel through torch's Gloo (`alltoall` and `allgather` of uint8); the arithmetic is done here, in rank
order. That sidesteps what Gloo does badly: it corrupts strided tensors silently, lacks int16, uint16/32/64 and
averages of integers, and adds in ring order. Works are polled, never waited for inside Gloo, so that an abort is
noticed; each operation is preceded by a header, so that a disagreement is told before bytes of it mix.
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

from ..call import Call, check_size
from ..errors import MeshError, PeerLost, message
from ..flat import sizes
from ..operations import Steps
from ..processes import Owned
from ..torch_private import gloo_options, set_timeout
from ..waiting import Watch, wait_until
from . import gloo_group
from .communicator import NetworkedCommunicator
from .interface import address_of
from .mailbox import Mailbox

_LONG = datetime.timedelta(days=1)  # as operations go; one that was given up and that Gloo forgot ends then

_all: weakref.WeakSet[GlooCommunicator] = weakref.WeakSet()


@atexit.register
def _end_what_is_under_way() -> None:
    """Torch would wait for it when the program ends, whoever is gone."""
    for comm in [*_all]:
        comm.end_what_is_under_way()


class GlooCommunicator(NetworkedCommunicator):
    """A group of ranks that talk over TCP; see `Communicator`.

    Args:
        store: any `torch.distributed` store that all ranks of the group share.
        interface: the network interface or address to use; None is the address that this host's name resolves to.
    """

    backend = "gloo"

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
        self._group: Any = None  # torch's stubs leave out what is used of it
        self._sockets: gloo_group.Sockets = set()
        self._under_way: set[dist.Work] = set()
        self._mailbox: Mailbox | None = None
        _all.add(self)
        self._open()

    def _open(self) -> None:
        """Connect to the peers; again after every recovery, under a name that no stale message bears."""
        self._disconnect()  # no more than that: who is opened afresh is not closed for good
        address = self._address()
        try:
            options = gloo_options(self.timeout, address)
        except RuntimeError as error:
            raise MeshError(
                message(
                    f"Gloo can't listen at {address} on {socket.gethostname()}",
                    got=_reason(error),
                    expected="an IPv4 address of this host, if only that of its loopback",
                    remedy="give it one (ip addr add 127.0.0.1/8 dev lo), correct SPMD_INTERFACE, or on one host take "
                    "backend='shm'",
                )
            ) from None
        self._turns: dict[int, int] = {}  # messages started, by destination
        self._posted: dict[int, int] = {}  # messages handed to the mailbox
        self._meet()
        store = dist.PrefixStore(self._name, self._store)
        try:
            self._group, self._sockets = gloo_group.connect(store, self.rank, self.size, options, self._wait)
            # From here on it is our wait that gives up: it knows of a rank that is in a debugger, and says more.
            set_timeout(self._group, _LONG)
        except RuntimeError as error:
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
            message(
                f"rank {self.ranks[self.rank]} could not connect to group {self.ranks} over Gloo",
                got=reason,
                remedy="see that all ranks are running and that the hosts reach each other",
            )
        )

    def close(self) -> None:
        self._disconnect()
        super().close()

    def end_what_is_under_way(self) -> None:
        """Close if an operation has begun that nobody has seen the end of."""
        if self._under_way:
            self.close()

    def _disconnect(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
        if self._group is None or self._owned.foreign:  # a child's connections are its parent's
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

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        mailbox = self._open_mailbox()
        # Messages to one destination keep their order: each waits until those before it are posted.
        turn = self._turns.get(dst, 0)
        self._turns[dst] = turn + 1
        yield lambda: self._posted.get(dst, 0) == turn and mailbox.connected(dst)
        if self._counters is not None:
            self._counters.send(dst)
        message = mailbox.post(tensor, dst, tag)
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

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        self._open_mailbox()
        source, _, data = yield from self._message(src, tag)
        check_size(self.ranks, self.rank, source=source, tag=tag, got=data.numel(), expected=tensor.numel())
        tensor.copy_(data)
        return source

    def poll_messages(self) -> None:
        # The mailbox's thread appends at any time; receives match what was there at the start of a round.
        if self._mailbox is not None:
            self._mailbox.check()
            self._inbox += [self._mailbox.inbox.pop(0) for _ in range(len(self._mailbox.inbox))]


def _reason(error: RuntimeError) -> str:
    """What Gloo says, without where in its sources it says so and what it advises."""
    text = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", str(error).splitlines()[0])
    return text.partition(". This is typically")[0]


_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
