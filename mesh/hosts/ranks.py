"""The ranks of a mesh over several hosts, as their driver holds them.

Invariant: a message for several ranks of a host goes there once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import queue
import secrets
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist

from ...kernels.errors import MeshError
from ...kernels.network.authentication import AuthenticatedStore, code
from .. import protocol as ranks_protocol
from .. import wire
from ..display.status import RankStatus, Status
from ..driver.ranks import Rank, Ranks, request_of
from ..driver.receiving import Receiving
from ..spec import Layout
from . import protocol
from .framing import framed
from .joining import CALLS
from .launchers import DialledHosts
from .link import mesh_key
from .meeting import Dialling, Meeting
from .places import Places
from .rank_host import RankHost, RemoteRank, Together

START_SECONDS = 120.0  # for all hosts to come: importing torch from a slow disk takes its time
AGAIN_SECONDS = 30.0  # for a host that was lost to come again
_LOST = "lost with its host"  # what a rank does that another is yet to replace
_TRIES = 5  # to have all hosts there, where another is lost while one comes again


class HostRanks(Ranks):
    """All ranks of a mesh over several hosts; see `driver.ranks.Ranks`, in whose place it is.

    Args:
        places: the hosts.
        together: hears what several ranks of a host say alike; None: nobody does so far (`listened_to`).
        secret: of those whose values these are to take over; of their own by default.
        check_wanted: raises once nobody waits for them to start any more.
    """

    def __init__(
        self,
        places: Places,
        layout: Layout,
        options: dict[str, Any],
        started: Callable[[Rank], None],
        together: Together | None,
        secret: bytes | None = None,
        check_wanted: Callable[[], None] = lambda: None,
    ):
        self.generation, self.places, self._started, self._together = 1, places, started, together
        self._check_wanted = check_wanted
        self.arena = None  # nothing is shared with the ranks
        self._title = f"Mesh({layout.axes}, backend={options['backend']!r}) on {len(places.names)} hosts"
        own = places.launcher.secret if isinstance(places.launcher, DialledHosts) else secrets.token_bytes(32)
        self.secret = own if secret is None else secret
        request = request_of(layout, options, "", places.ranks())
        self.number = request.key  # of which each host makes the key
        self.request = dataclasses.replace(request, key=mesh_key(self.secret, self.number))
        self.all: list[Rank] = []
        self._hosts: list[RankHost] = []
        self._host_of: dict[int, RankHost] = {}
        self._dropped: deque[int] = deque()  # calls whose values lay in memory of their hosts
        self._deaths = select.poll()
        self.bare: frozenset[int] = frozenset()
        self._store: dist.Store | None = None
        self._store_at = ("", 0)

    def start(self, size: int) -> None:
        self._hosts = self._come(self.places, START_SECONDS)
        begun = [self._begun(place) for place in range(len(self._hosts))]
        refused = []
        for result in begun:
            try:
                self.all += result()  # to be closed with these, if another host refuses
            except MeshError as error:
                refused.append(error)
        if refused:
            raise refused[0]
        for rank in self.all:
            self._watch(rank)
        self._tell_where()

    def _come(self, places: Places, seconds: float) -> list[RankHost]:
        """Have hosts started, and wait for them."""
        meeting = (Dialling if places.dialled else Meeting)(places, self.secret, seconds, self._check_wanted)
        try:
            meeting.begin()
            if self._store is None:
                self._keep_store(meeting)
            store = self._store_at if places.dialled else None
            return [RankHost(*found, store, self._together) for found in meeting.hosts()]
        finally:
            meeting.close()
            meeting.stop()

    def _begun(self, place: int) -> Callable[[], list[RemoteRank]]:
        """Begin to have a host fork its ranks; what gives them."""
        host, ranks = self._hosts[place], self.places.ranks()[place]
        self._host_of.update(dict.fromkeys(ranks, host))
        told = dataclasses.replace(self.request, generation=self.generation, key=self.number)
        request = ranks_protocol.encode(dataclasses.replace(told, store="") if self.places.dialled else told)
        return _in_thread(host.begin, protocol.Begin(ranks, request, self._title, self.places.local))

    def _tell_where(self) -> None:
        """Tell the ranks, by the store, where each of them hears calls."""
        assert self._store is not None
        limit = datetime.timedelta(seconds=self.request.timeout)
        told = AuthenticatedStore(self._store, code(self.request.key, b"store"), limit)
        told.set(CALLS, json.dumps([self.elsewhere(rank) for rank in range(len(self.all))]))

    def elsewhere(self, rank: int) -> tuple[str, int]:
        return self._host_of[rank].hears[rank]

    def _keep_store(self, meeting: Meeting) -> None:
        """Keep what the ranks meet in; all that is in it is authenticated with the mesh's key."""
        address, listener = meeting.address, meeting.for_store()
        port = listener.getsockname()[1]
        self._store_at = address, port
        self._store = dist.TCPStore(
            address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        where = f"tcp://{f'[{address}]' if ':' in address else address}:{port}"
        self.request = dataclasses.replace(self.request, store=where)

    def _watch(self, rank: Rank) -> None:
        self._deaths.register(rank.pidfd, select.POLLIN)
        self._started(rank)

    def send(self, packet: wire.Packet, parts: list[memoryview], ranks: Iterable[int] | None) -> list[Rank]:
        """Send a packet to ranks (None: all), once a host; nobody is held up."""
        by_host: dict[RankHost, list[Rank]] = {}
        for rank in self.all if ranks is None else [self.all[rank] for rank in ranks]:
            by_host.setdefault(self._host_of[rank.rank], []).append(rank)
        pieces = framed(packet)
        dropped = tuple(self._dropped.popleft() for _ in range(len(self._dropped)))
        if dropped:
            for host in self._hosts:
                host.link.send(protocol.DropGiven(dropped))
        for host, its in by_host.items():
            host.send_to(its, pieces)
        return []

    def region_of(self, rank: int) -> int:
        return getattr(self.all[rank], "region", -1)

    def overwritten(self, region: int) -> bool:
        found = False
        for host in self._hosts:
            with _unless_lost(host):
                found = found or bool(host.ask(protocol.Ask("overwritten", region)).text)
        return found

    def offered_to(self, others: HostRanks) -> tuple[tuple[str, int], ...]:
        """Have what these ranks have offered to others, who take it over: for each rank address and port of its host.

        Raises:
            MeshError: a host is lost.
        """
        ports = [host.ask(protocol.Offer(others.number)).port for host in self._hosts]
        return tuple(
            (self._hosts[place].copies[0], ports[place]) for place, its in enumerate(self.places.ranks()) for _ in its
        )

    def listened_to(self, started: Callable[[Rank], None], together: Together) -> None:
        super().listened_to(started, together)
        self._together = together
        for host in self._hosts:
            host.together = together

    def copies_at(self) -> tuple[tuple[str, int], ...]:
        return tuple(host.copies for host in self._hosts)

    def copies(self) -> dict[tuple[int, int, int], tuple[str, int]]:
        found = {}
        for host in self._hosts if self.request.copies else ():
            with _unless_lost(host):
                found.update(dict.fromkeys(host.ask(protocol.ListCopies()).names, host.copies))
        return found

    def drop_given(self, number: int) -> None:
        self._dropped.append(number)  # told with what is sent next: here the garbage collector may be at work

    @property
    def remark(self) -> str | None:
        lost = ", ".join(host.name for host in self._hosts if host.lost)
        return f"if host {lost} comes again the mesh goes on, without the values that it alone had" if lost else None

    @property
    def dying(self) -> bool:
        return any(rank.alive and self._host_of[rank.rank].lost for rank in self.all)

    def all_run(self) -> bool:
        return not self._deaths.poll(0)

    def abort(self, why: str) -> None:
        for host in self._hosts:
            host.link.send(protocol.Abort(why))

    def begin_anew(self) -> list[int]:
        """Open the next generation, with new processes for those that died: these ranks.

        Raises:
            MeshError: a host is lost.
        """
        self.generation += 1
        dead = [rank for rank in self.all if not rank.alive]
        for rank in dead:
            self._deaths.unregister(rank.pidfd)
            rank.close()
        bare: set[int] = set()
        begun: dict[int, list[RemoteRank]] = {}  # by host
        for _ in range(_TRIES):  # another may be lost meanwhile
            lost = [place for place, host in enumerate(self._hosts) if host.lost]
            if lost:
                bare.update(rank for place in lost for rank in self.places.ranks()[place])
                for rank in itertools.chain.from_iterable(begun.pop(place, ()) for place in lost):
                    rank.close()
                self._start_again(lost)
            results = {
                place: self._begun(place) if place in lost else _in_thread(host.begin_anew, self.generation)
                for place, host in enumerate(self._hosts)
                if place not in begun
            }
            for place, result in results.items():
                with _unless_lost(self._hosts[place]):
                    begun[place] = result()
            if len(begun) == len(self._hosts):
                break
        else:
            raise next(host for host in self._hosts if host.lost).lost_error()
        self.bare = frozenset(bare)
        started = [*itertools.chain.from_iterable(begun.values())]
        for rank in started:
            if (old := self.all[rank.rank]) not in dead:  # its host knew of its end before it was heard here
                self._deaths.unregister(old.pidfd)
            self.all[rank.rank] = rank
            self._watch(rank)
        if bare:
            self._tell_where()
        return [rank.rank for rank in started]

    def _start_again(self, places: list[int]) -> None:
        """Have other processes hold the ranks of hosts whose own are lost."""
        why = self._hosts[places[0]].lost_error()
        for place in places:
            self._end(self._hosts[place])
        try:
            hosts = self._come(self.places.only(places), AGAIN_SECONDS)
        except MeshError as error:
            raise why from error
        for place, host in zip(places, hosts, strict=True):
            self._hosts[place] = host

    def _end(self, host: RankHost) -> None:
        host.close()
        self.places.launcher.stop(host.handle)

    def status(self) -> Status:
        """See `Mesh.status`."""
        rows = []
        for host, ranks in zip(list(self._hosts), self.places.ranks(), strict=False):
            found = [RankStatus(rank, host.name, 0, 0, _LOST, 0) for rank in ranks]
            with _unless_lost(host):
                if host.begun:
                    told = host.ask(protocol.Ask("status")).rows
                    found = [dataclasses.replace(RankStatus(*row), host=host.name) for row in told]
            rows += found
        return Status(rows)

    def stacks(self) -> str:
        """See `Mesh.stacks`."""
        texts = []
        for host, ranks in zip(list(self._hosts), self.places.ranks(), strict=False):
            text = "\n\n".join(f"rank {rank}: {_LOST}" for rank in ranks)
            with _unless_lost(host):
                if host.begun:
                    text = host.ask(protocol.Ask("stacks")).text
            texts.append(text)
        return "\n\n".join(texts)

    def kill(self) -> None:
        for rank in self.all:
            rank.signal(signal.SIGKILL)

    def close(self) -> None:
        """End the per-host processes, and with them all that runs there."""
        for host in self._hosts:
            host.close()
        for rank in self.all:
            rank.close()
        for host in self._hosts:
            self.places.launcher.stop(host.handle)
        self._hosts.clear()
        self._store = None


@contextlib.contextmanager
def _unless_lost(host: RankHost) -> Iterator[None]:
    """Pass over the error of a host that is lost with this."""
    try:
        yield
    except MeshError:
        if not host.lost:
            raise


def ranks_of(places: Places | None, layout: Layout, options: dict[str, Any], receiving: Receiving) -> Ranks:
    """The ranks of a mesh on this host, or on several, heard by a thread; the arguments are those of `Ranks`."""
    if places is None:
        return Ranks(layout, options, receiving.add)
    return HostRanks(places, layout, options, receiving.add, receiving.together)


def _in_thread(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Begin a call; what is returned waits for its result, or raises what it has raised."""
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(*args), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="spmd-hosts", daemon=True).start()

    def result() -> Any:
        value, error = results.get()
        if error is not None:
            raise error
        return value

    return result
