"""The Gloo communicator: ranks of several hosts, or of one host that has no usable shared memory.

Only bytes travel through torch's Gloo (`alltoall` and `allgather` of uint8); the arithmetic is done here, in rank
order. That sidesteps what Gloo does badly: it corrupts strided tensors silently, lacks int16, uint16/32/64 and
averages of integers, and adds in ring order. Works are polled, never waited for inside Gloo, so that an abort is
noticed; each operation is preceded by a header, so that a disagreement is told before bytes of it mix.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .arena import Arena
from .attendance import Attendance
from .communicator import Call, Communicator, Steps, Work
from .errors import Aborted, PeerLost, message
from .mailbox import Mailbox
from .waiting import Watch, wait_until

_SIOCGIFADDR = 0x8915
_TEXT = 240  # bytes of a header that say what a rank called and where


class GlooCommunicator(Communicator):
    """A group of ranks that talk over TCP; see `Communicator`.

    Args:
        store: any `torch.distributed` store that all ranks of the group share.
        interface: the network interface or address to use; None lets Gloo choose by host name.
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
        super().__init__(ranks, list(ranks).index(global_rank), watch, timeout=timeout)
        self._store, self.channel, self._interface = store, channel, interface
        self._group: Any = None  # torch's stubs leave out what is used of it
        self._mailbox: Mailbox | None = None
        self._open()

    def _open(self) -> None:
        """Connect to the peers; again after every recovery, under a name that no stale message bears."""
        self.close()
        if isinstance(self._watch, Arena):
            self._attendance = Attendance(self._watch, self.ranks, self.channel)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=self.timeout)
        options._devices = [_device(self._interface)]
        self._name = name = f"gloo/{self._watch.generation}/{self.channel}/{','.join(map(str, self.ranks))}"
        self._turns: dict[int, int] = {}  # messages started, by destination
        self._posted: dict[int, int] = {}  # messages handed to the mailbox
        self._matched: dict[int, int] = {}  # messages received, by source
        self._seen = 0
        self._gather_ranks(name)
        before = _sockets()
        try:
            self._group = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), self.rank, self.size, options)
        except RuntimeError as error:
            raise PeerLost(
                message(
                    f"rank {self.ranks[self.rank]} could not connect to group {self.ranks} over Gloo",
                    got=str(error).splitlines()[0],
                    remedy="see that all ranks are running and that the hosts reach each other",
                )
            ) from None
        self._sockets = _sockets() - before

    def _gather_ranks(self, name: str) -> None:
        """Wait until all ranks are about to connect: Gloo's own wait for them notices no abort."""
        self._store.set(f"{name}/here/{self.rank}", "")
        keys = [f"{name}/here/{rank}" for rank in range(self.size)]

        def late() -> None:
            for rank in range(self.size):
                if self._has_left(rank) and not self._store.check([keys[rank]]):
                    raise self.absent(rank, "a collective")

        def overdue() -> PeerLost:
            missing = [self.ranks[rank] for rank in range(self.size) if not self._store.check([keys[rank]])]
            return PeerLost(
                message(
                    f"rank {self.ranks[self.rank]} waited {self.timeout:g} s for ranks {missing} to open their group",
                    where=f"group {self.ranks}",
                    remedy="every rank of the group must make the same calls",
                )
            )

        wait_until(
            lambda: self._store.check(keys),
            self._watch,
            timeout=self.timeout,
            crowded=self._crowded,
            overdue=overdue,
            late=late,
        )

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
        if self._attendance is not None:
            self._attendance.close()
            self._attendance = None
        if self._group is None:
            return
        # Gloo has no way to give an operation up, and its destructor waits for those under way until they time
        # out. Shutting its sockets down ends them at once.
        for number in self._sockets & _sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        self._group = None

    def _done(self, work: dist.Work) -> Steps:
        yield work.is_completed
        try:
            work.wait()
        except RuntimeError as error:
            # A broken connection is how Gloo notices a death or an abort; the watch soon knows who and why.
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                self._watch.check()
                self._watch.check_peers()
                time.sleep(0.01)
            raise PeerLost(
                message(
                    f"rank {self.ranks[self.rank]} lost the connection to a rank of group {self.ranks}",
                    got=str(error).splitlines()[0],
                    remedy="see the output of the other ranks",
                )
            ) from None

    def _agree(self, call: Call, send_sizes: list[int], recv_sizes: list[int]) -> Steps:
        """See that all ranks make the same call; on disagreement exchange where they stand, and raise.

        Returns:
            Whether any rank sends anything: a rank that sends and gets nothing must still take part if others do.
        """
        text = call.text
        head = struct.Struct(f"<Q{self.size}Q")
        for attempt in range(2):
            said = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
            data = head.pack(call.signature, *send_sizes) + said
            mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            theirs = [torch.empty_like(mine) for _ in range(self.size)]
            assert self._group is not None
            yield from self._done(self._group.allgather([theirs], [mine]))
            headers = [bytes(header.numpy().tobytes()) for header in theirs]
            if attempt == 0:
                if all(header[:8] == data[:8] for header in headers):
                    break
                text = f"{call.text}, at {self.site()}"
        else:
            texts = [header[head.size :].rstrip(b"\0").decode(errors="replace") for header in headers]
            raise self.mismatch(text, {rank: texts[rank] for rank in range(self.size) if rank != self.rank})
        sizes = [head.unpack_from(header)[1:] for header in headers]
        for rank, sent in enumerate(sizes):
            if sent[self.rank] != recv_sizes[rank]:
                raise self.wrong_piece(call.text, rank, sent[self.rank], recv_sizes[rank])
        return any(map(any, sizes))

    def _exchange(
        self, call: Call | None, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
    ) -> Steps:
        assert self._group is not None
        send_sizes = [0 if piece is None else piece.numel() for piece in sends]
        recv_sizes = [0 if piece is None else piece.numel() for piece in recvs]
        if call is not None and not (yield from self._agree(call, send_sizes, recv_sizes)):
            return
        outgoing = torch.cat([piece for piece in sends if piece is not None and piece.numel()] or [_EMPTY])
        incoming = torch.empty(sum(recv_sizes), dtype=torch.uint8)
        options = dist.AllToAllOptions()
        yield from self._done(self._group.alltoall_base(incoming, outgoing, recv_sizes, send_sizes, options))
        for target, piece in zip(recvs, incoming.split(recv_sizes), strict=True):
            if target is not None:
                target.copy_(piece)

    # -- point to point ------------------------------------------------------------------------------------------------

    def _open_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            self._mailbox = Mailbox(self._store, self._name, self.rank, _address(self._interface))
        return self._mailbox

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        mailbox = self._open_mailbox()
        # Messages to one destination keep their order: each waits until those before it are posted.
        turn = self._turns.get(dst, 0)
        self._turns[dst] = turn + 1
        yield lambda: self._posted.get(dst, 0) == turn and mailbox.connected(dst)
        if self._attendance is not None:
            self._attendance.send(dst)
        message = mailbox.post(tensor, dst, tag)
        self._posted[dst] = turn + 1
        yield lambda: message.sent

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        mailbox = self._open_mailbox()
        matched: list[tuple[int, int, torch.Tensor]] = []

        def arrived() -> bool:
            for index in range(self._seen):
                source, its_tag, _ = mailbox.inbox[index]
                if its_tag == tag and src in (None, source):
                    matched.append(mailbox.inbox.pop(index))
                    self._seen -= 1
                    return True
            return False

        yield arrived
        source, _, data = matched[0]
        self._matched[source] = self._matched.get(source, 0) + 1
        if data.numel() != tensor.numel():
            raise self.wrong_size(source, tag, data.numel(), tensor.numel())
        tensor.copy_(data)
        return source

    def _took_part(self, rank: int, work: Work) -> bool:
        if work not in self._messages or self._attendance is None:
            return super()._took_part(rank, work)
        if work.what.startswith("send"):
            return True  # the receiver's mailbox takes it without the receiver
        here = self._matched.get(rank, 0)
        if self._mailbox is not None:
            here += sum(source == rank for source, _, _ in tuple(self._mailbox.inbox))
        if here < self._attendance.sent_by(rank, self.rank):
            return True  # the rest is on its way
        self._progress_messages()
        return work.done

    def _poll_messages(self) -> None:
        # The mailbox's thread appends at any time; receives match what was there at the start of a round.
        self._seen = len(self._mailbox.inbox) if self._mailbox is not None else 0


def _sockets() -> set[int]:
    """The descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _address(interface: str | None) -> str:
    """This host's address on an interface (an address is itself); by default the one that host names resolve to."""
    interface = interface or os.environ.get("SPMD_INTERFACE")
    if interface is None:
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError:
            return "127.0.0.1"
    if interface.replace(".", "").isdigit():
        return interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])


def _device(interface: str | None):
    interface = interface or os.environ.get("SPMD_INTERFACE")
    if interface is None:
        return dist.ProcessGroupGloo.create_default_device()
    if interface.replace(".", "").isdigit():
        return dist.ProcessGroupGloo.create_device(hostname=interface)
    return dist.ProcessGroupGloo.create_device(interface=interface)


class StoreWatch:
    """Aborts through a store, for ranks that share no memory; asked a few times a second by those who wait."""

    def __init__(self, store: dist.Store, rank: int):
        self._store, self._rank = store, rank
        self.generation = 0
        self._next_look = 0.0

    def abort(self, text: str) -> None:
        self._store.set(self._key(), text)

    def check(self) -> None:
        """Nothing is cheap enough to look at in every round."""

    def check_peers(self) -> None:
        import time

        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + 0.05
            if self._store.check([self._key()]):
                raise Aborted(self._store.get(self._key()).decode(errors="replace"))

    def _key(self) -> str:
        return f"abort/{self.generation}"
