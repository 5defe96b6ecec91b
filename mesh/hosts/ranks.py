"""The driver's handles on the ranks of a mesh over several hosts.

Invariant: a message for several ranks of a host is sent there once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ...kernels.errors import MeshError
from ...kernels.interrupts import uninterrupted
from ...kernels.network.authentication import AuthenticatedStore, code
from .. import wire
from ..display.status import RankStatus, Status
from ..driver.ranks import Rank, Ranks, request_of
from ..driver.receiving import Receiving
from ..launch.meeting import url
from ..rank import descriptors
from ..rank.activity import Look
from ..spec import Layout
from . import protocol
from .coded import framed
from .hearing import Inbox
from .host_list import HostList
from .launchers import DialledHosts
from .link import listener, mesh_key
from .meeting import Dialling, Meeting
from .rank_host import RankHost, Reading, RemoteRank

START_SECONDS = 120.0  # for all hosts to come: importing torch from a slow disk takes long
AGAIN_SECONDS = 30.0  # for a lost host to come back
_LOST = "lost with its host"  # the status of a rank until it is replaced
_TRIES = 5  # to get all hosts back, if another one is lost meanwhile


class HostRanks(Ranks):
    """All ranks of a mesh over several hosts; for the other methods and arguments see `driver.ranks.Ranks`.

    Args:
        host_list: the hosts.
        hear: takes the inbox, where everything from ranks arrives; None: nobody listens yet (see `listened_to`).
        secret: of the ranks whose values these take over; by default that of dialled hosts, or a new one.
        check_wanted: raises an error once nobody waits for them to start any more.
    """

    def __init__(
        self,
        host_list: HostList,
        layout: Layout,
        options: dict[str, Any],
        started: Callable[[Rank], None],
        hear: Callable[[Inbox], None] | None,
        secret: bytes | None = None,
        check_wanted: Callable[[], None] = lambda: None,
    ):
        self.generation, self.host_list, self._started = 1, host_list, started
        self.inbox, self._reading = Inbox(), Reading()
        if hear is not None:
            hear(self.inbox)
        self._check_wanted = check_wanted
        self.arena = None  # nothing is shared with the ranks
        self._title = f"Mesh({layout.axes}, backend={options['backend']!r}) on {len(host_list.names)} hosts"
        own = host_list.launcher.secret if isinstance(host_list.launcher, DialledHosts) else secrets.token_bytes(32)
        self.secret = own if secret is None else secret
        self._members = host_list.ranks()  # of each host
        request = request_of(layout, options, "", self._members)
        self.number = request.key  # from which each host makes the key
        self.request = dataclasses.replace(request, key=mesh_key(self.secret, self.number))
        self.all: list[Rank] = []
        self._hosts: list[RankHost] = []
        self._host_of: dict[int, RankHost] = {}
        self._dropped: deque[int] = deque()  # calls whose values in the hosts' memory can be freed
        self.bare: frozenset[int] = frozenset()
        self._store: dist.Store | None = None
        self._store_at = ("", 0)

    def start(self, size: int) -> None:
        self._come(self.host_list, range(len(self.host_list.names)), START_SECONDS)
        begun = [self._begun(index) for index in range(len(self._hosts))]
        refused = []
        for result in begun:
            try:
                self.all += result()  # all of them, to be closed if another host refuses
            except MeshError as error:
                refused.append(error)
        if refused:
            raise refused[0]
        for rank in self.all:
            self._started(rank)
        self._tell_where()

    def _come(self, host_list: HostList, indexes: Sequence[int], seconds: float) -> None:
        """Start hosts, and wait for them; from now on they are those with these numbers."""
        meeting = (Dialling if host_list.dialled else Meeting)(host_list, self.secret, seconds, self._check_wanted)
        try:
            meeting.begin()
            if self._store is None:
                self._keep_store(meeting)
            store = self._store_at if host_list.dialled else None
            found = meeting.hosts()
            with uninterrupted():  # Ctrl-C would leave them to nobody
                hosts = [RankHost(*one, store, self.inbox) for one in found]
                for host in hosts:
                    self._reading.add(host)
                for index, host in zip(indexes, hosts, strict=True):
                    self._hosts[index : index + 1] = [host]
                meeting.hand_over()
        finally:
            meeting.close()
            meeting.stop()

    def _begun(self, index: int) -> Callable[[], list[RemoteRank]]:
        """Have a host fork its ranks; returns a function that waits for them."""
        host, ranks = self._hosts[index], self._members[index]
        self._host_of.update(dict.fromkeys(ranks, host))
        own = dataclasses.replace(self.request, generation=self.generation, key=self.number)
        request = descriptors.encode(dataclasses.replace(own, store="") if self.host_list.dialled else own)
        return host.fork(protocol.Begin(ranks, request, self._title, self.host_list.local))

    def _tell_where(self) -> None:
        """Write into the store where each rank accepts remote calls."""
        assert self._store is not None
        limit = datetime.timedelta(seconds=self.request.timeout)
        store = AuthenticatedStore(self._store, code(self.request.key, b"store"), limit)
        store.set(protocol.CALLS, json.dumps([self.elsewhere(rank) for rank in range(len(self.all))]))

    def elsewhere(self, rank: int) -> tuple[str, int]:
        heard = self._host_of[rank].hears.get(rank)
        if heard is None:
            raise ConnectionRefusedError(f"rank {rank} has not begun yet")
        return heard

    def _keep_store(self, meeting: Meeting) -> None:
        """Open the store in which the ranks meet; all entries are authenticated with the mesh's key."""
        address, listening = meeting.address, listener(meeting.address)  # where the hosts reach this process
        port = listening.getsockname()[1]
        self._store_at = address, port
        self._store = dist.TCPStore(
            address, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self.request = dataclasses.replace(self.request, store=url(address, port))

    def send(self, packet: wire.Packet, parts: list[memoryview], ranks: Iterable[int] | None) -> list[Rank]:
        """Send a packet to ranks (None: all), once to each host, without waiting."""
        pieces = framed(packet)
        dropped = tuple(self._dropped.popleft() for _ in range(len(self._dropped)))
        if dropped:
            msg = protocol.encode(protocol.DropGiven(dropped))
            for host in self._hosts:
                host.link.send_encoded(msg, ())
        every = zip(self._hosts, self._members, strict=False)  # there are no hosts once this is closed
        for host, its in every if ranks is None else self._by_host(ranks):
            host.send_to(its, pieces)
        return []

    def _by_host(self, ranks: Iterable[int]) -> Iterable[tuple[RankHost, tuple[int, ...]]]:
        found: dict[RankHost, list[int]] = {}
        for rank in ranks:
            found.setdefault(self._host_of[rank], []).append(rank)
        return [(host, tuple(its)) for host, its in found.items()]

    def region_of(self, rank: int) -> int:
        return getattr(self.all[rank], "region", -1)

    def overwritten(self, region: int) -> bool:
        return any(answer.text for _, answer in self._answers(protocol.Ask("overwritten", region)))

    def looks(self) -> list[Look]:
        return [host.look for host in list(self._hosts) if host.look is not None and not host.lost]

    def stack_of(self, rank: int) -> str:
        try:
            text: str = self._host_of[rank].asked(protocol.Ask("stack", rank))().text
        except MeshError:  # its host is lost
            return ""
        return text

    def _answers(self, msg: Any) -> list[tuple[RankHost, Any]]:
        """Ask all hosts at once; returns the answers of those that are not lost."""
        found = []
        for host, answer in [(host, host.asked(msg)) for host in list(self._hosts) if host.begun]:
            with _unless_lost(host):
                found.append((host, answer()))
        return found

    def offered_to(self, others: HostRanks) -> tuple[tuple[str, int], ...]:
        """Have these ranks' values offered to others that take them over; returns each rank's host's address and port.

        Raises:
            MeshError: a host is lost.
        """
        answers = [host.asked(protocol.Offer(others.number)) for host in self._hosts]
        ports = [answer().port for answer in answers]
        return tuple(
            (self._hosts[index].copies[0], ports[index]) for index, its in enumerate(self._members) for _ in its
        )

    def listened_to(self, started: Callable[[Rank], None], hear: Callable[[Inbox], None]) -> None:
        super().listened_to(started, hear)
        hear(self.inbox)

    def copies_at(self) -> tuple[tuple[str, int], ...]:
        return tuple(host.copies for host in self._hosts)

    def copies(self) -> dict[tuple[int, int, int], tuple[str, int]]:
        answers = self._answers(protocol.ListCopies()) if self.request.copies else ()
        return {name: host.copies for host, answer in answers for name in answer.names}

    def drop_given(self, number: int) -> None:
        self._dropped.append(number)  # sent with the next message, since the garbage collector may call this

    @property
    def remark(self) -> str | None:
        lost = ", ".join(host.name for host in self._hosts if host.lost)
        values = "with copies of" if self.request.copies else "without"
        return f"if host {lost} comes again the mesh goes on, {values} the values that it alone had" if lost else None

    @property
    def dying(self) -> bool:
        return any(rank.alive and self._host_of[rank.rank].lost for rank in self.all)

    def all_run(self) -> bool:
        return not any(map(self.has, list(self.inbox.ended)))

    def abort(self, why: str) -> None:
        for host in self._hosts:
            host.link.send(protocol.Abort(why))

    def begin_anew(self) -> list[int]:
        """Open the next generation, and replace ranks that died; gives the numbers of these.

        Raises:
            MeshError: a host is lost.
        """
        self.generation += 1
        bare: set[int] = set()
        begun: dict[int, list[RemoteRank]] = {}  # by host
        for _ in range(_TRIES):  # another may be lost meanwhile
            lost = [index for index, host in enumerate(self._hosts) if host.lost]
            if lost:
                bare.update(rank for index in lost for rank in self._members[index])
                for index in lost:
                    begun.pop(index, None)
                self._start_again(lost)
            results = {
                index: self._begun(index) if index in lost else host.fork(protocol.BeginAnew(self.generation))
                for index, host in enumerate(self._hosts)
                if index not in begun
            }
            for index, result in results.items():
                with _unless_lost(self._hosts[index]):
                    begun[index] = result()
            if len(begun) == len(self._hosts):
                break
        else:
            raise next(host for host in self._hosts if host.lost).lost_error()
        self.bare = frozenset(bare)
        started = [*itertools.chain.from_iterable(begun.values())]
        for rank in started:  # also one whose host knew of a death that was not heard of here yet
            self.all[rank.rank] = rank
            self._started(rank)
        self.inbox.forget(self.all)
        if bare:
            self._tell_where()
        return [rank.rank for rank in started]

    def _start_again(self, indexes: list[int]) -> None:
        """Start new processes on the hosts whose own are lost."""
        why = self._hosts[indexes[0]].lost_error()
        for index in indexes:
            self._end(self._hosts[index])
        try:
            self._come(self.host_list.only(indexes), indexes, AGAIN_SECONDS)
        except MeshError as error:
            raise why from error

    def _end(self, host: RankHost) -> None:
        host.close()
        self.host_list.launcher.stop(host.handle)

    def status(self) -> Status:
        """See `Mesh.status`."""
        reports = dict(self._answers(protocol.Ask("status")))
        rows = []
        for host, ranks in zip(list(self._hosts), self._members, strict=False):
            if host in reports:
                rows += [dataclasses.replace(RankStatus(*row), host=host.name) for row in reports[host].rows]
            else:
                rows += [RankStatus(rank, host.name, 0, 0, _LOST, 0) for rank in ranks]
        return Status(rows)

    def stacks(self) -> str:
        """See `Mesh.stacks`."""
        reports = dict(self._answers(protocol.Ask("stacks")))
        return "\n\n".join(
            reports[host].text if host in reports else "\n\n".join(f"rank {rank}: {_LOST}" for rank in ranks)
            for host, ranks in zip(list(self._hosts), self._members, strict=False)
        )

    def close(self) -> None:
        """End the per-host processes, and with them everything that they run."""
        self._reading.close()
        for host in self._hosts:
            self.host_list.launcher.stop(host.handle)
        self._hosts.clear()
        self._store = None


@contextlib.contextmanager
def _unless_lost(host: RankHost) -> Iterator[None]:
    """Ignore an error if the host is lost."""
    try:
        yield
    except MeshError:
        if not host.lost:
            raise


def ranks_of(host_list: HostList | None, layout: Layout, options: dict[str, Any], receiving: Receiving) -> Ranks:
    """The ranks of a mesh on this host, or on several, listened to by `receiving`; for other arguments see `Ranks`."""
    if host_list is None:
        return Ranks(layout, options, receiving.add)
    return HostRanks(host_list, layout, options, receiving.add, receiving.hear)
