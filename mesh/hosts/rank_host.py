"""The driver's handle on one host of a mesh: the link to it, and its ranks.

One thread reads the links to all hosts (`Reading`). It puts what ranks send into the mesh's `Inbox`, and gives a host's
answers to whoever has asked. Invariant: everything from a rank is put there in the order in which it was sent.
"""

from __future__ import annotations

import functools
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...kernels.errors import MeshError
from ...kernels.listening import READ, Listening
from ...kernels.processes import Owned
from .. import wire
from ..driver.ranks import Rank
from ..rank.activity import Activity, Look
from . import protocol
from .coded import NotOfThisMesh, framed
from .hearing import Inbox
from .link import Link
from .tunnel import Tunnel

_ANSWER_SECONDS = 60.0  # for a host to fork ranks, or to answer another request
SILENT_SECONDS = 30.0  # after which a host that sends no pulse counts as lost


class RemoteRank(Rank):
    """A rank on another host: there are no descriptors for it here, and all messages use its host's link."""

    def __init__(self, rank: int, pid: int, host: RankHost):
        Owned.__init__(self)
        self.rank, self.pid, self._host = rank, pid, host
        self.alive, self.ready, self.region = True, False, -1
        self.pipes: dict[str, int] = {}
        self._how = ""

    def sources(self) -> list[tuple[Any, str]]:
        return []

    def send(self, packet: wire.Packet, parts: list[memoryview]) -> bool:
        self._host.send_to((self.rank,), framed(packet))
        return True

    def flush(self) -> bool:
        return True

    def signal(self, number: int) -> None:
        if self.alive and not self.foreign:
            self._host.link.send(protocol.Signal(self.rank, number))

    def ended(self, seconds: float) -> bool:
        return not self.alive or self._host.inbox.ended_within(self, seconds)

    def end_text(self) -> str:
        return self._how or "died"

    def has_printed(self) -> bool:
        return False  # its output comes through the inbox, in order with its messages

    def last_answers(self) -> Iterator[wire.Packet]:
        return iter(())

    def die(self, how: str, region: int) -> None:
        self._how, self.region = self._how or how, region
        self._host.inbox.bury(self)

    def close(self) -> None:
        """Do nothing: there are no descriptors to close."""


class RankHost:
    """One host: the link to it, and its ranks.

    Args:
        name: its name.
        link: after the greeting and the comparison of versions.
        handle: the launcher's.
        store: the store's address for this end of the link, if the host itself can't reach it.
        inbox: takes what its ranks send.

    Attributes:
        lost: why it can't be reached any more, "" as long as it can.
        copies: the address and port where it takes copies of other hosts' values.
        hears: rank -> the address and port where others call its objects.
        heard: when it last sent something (`time.monotonic`); infinite before its first pulse.
        look: what its last pulse said of its ranks.
    """

    def __init__(self, name: str, link: Link, handle: Any, store: tuple[str, int] | None, inbox: Inbox):
        self.name, self.link, self.handle, self.inbox = name, link, handle, inbox
        self._tunnel = None if store is None else Tunnel(link, store)
        self.lost, self.heard = "", float("inf")
        self.look: Look | None = None
        self.copies: tuple[str, int] = ("", 0)
        self.hears: dict[int, tuple[str, int]] = {}
        self._ranks: dict[int, RemoteRank] = {}
        self._heads: dict[tuple[int, ...], bytes] = {}  # encoded `ToRanks`, by ranks
        self._asked: deque[queue.SimpleQueue[Any]] = deque()  # who waits for an answer, in the order of the requests
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def begun(self) -> bool:
        """Whether it has ranks, and can answer requests."""
        return bool(self._ranks)

    def fork(self, msg: protocol.Begin | protocol.BeginAnew) -> Callable[[], list[RemoteRank]]:
        """Have it fork ranks; returns a function that waits for them and returns them."""
        answer = self.asked(msg)

        def started() -> list[RemoteRank]:
            if isinstance(found := answer(), protocol.Refused):
                raise MeshError(f"host {self.name} can't start ranks", got=found.why)
            return found

        return started

    def asked(self, msg: Any) -> Callable[[], Any]:
        """Send a request; returns a function that waits for the answer, or raises MeshError if none comes."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            if self.lost:
                answer.put(None)
            else:
                self._asked.append(answer)
                self.link.send(msg)

        def given() -> Any:
            try:
                found = answer.get(timeout=_ANSWER_SECONDS)
            except queue.Empty:
                found = None
                self.lost = self.lost or f"it has not answered for {_ANSWER_SECONDS:g} s"
                self.link.shut()
            if found is None:
                raise self.lost_error()
            return found

        return given

    def lost_error(self) -> MeshError:
        remedy = "see the output from there; make a new mesh, on hosts that are up"
        return MeshError(f"host {self.name} is lost", got=self.lost, remedy=remedy)

    def send_to(self, ranks: tuple[int, ...], pieces: Sequence[Any]) -> None:
        """Send a packet, in pieces of bytes (`framed`), for some of its ranks."""
        msg = self._heads.get(ranks)
        if msg is None:
            msg = protocol.encode(protocol.ToRanks(ranks))
            if len(ranks) == len(self._ranks):  # other sets of ranks are many, and rare
                self._heads[ranks] = msg
        self.link.send_encoded(msg, pieces)

    # -- for the thread that reads -------------------------------------------------------------------------------------

    def read(self) -> bool:
        """Take what has come; False if the connection has ended."""
        try:
            if (messages := self.link.receive(socket.MSG_DONTWAIT)) is None:
                return False
            for msg, content in messages:
                self._take(msg, content)
            if self.heard < float("inf"):
                self.heard = time.monotonic()  # a part of a large message is a sign of life, too
        except NotOfThisMesh as error:
            self.lost = self.lost or str(error)
            return False
        except Exception as error:
            self.lost = self.lost or f"{type(error).__name__}: {error}"
            return False
        return True

    def _take(self, msg: Any, content: bytes) -> None:
        if isinstance(msg, protocol.FromRanks):
            self.inbox.put("answer", [self._ranks[rank] for rank in msg.ranks], content)
        elif isinstance(msg, protocol.Pulse):
            self.heard = time.monotonic()
            ranks = {rank: Activity(*fields) for rank, fields in msg.ranks.items()}
            self.look = Look(msg.at, msg.in_debugger, ranks, protocol.PULSE_SECONDS)
        elif isinstance(msg, protocol.Printed):
            self.inbox.put(msg.stream, (self._ranks[msg.rank],), content)
        elif isinstance(msg, protocol.Died):
            self._ranks[msg.rank].die(f"{msg.how} on host {self.name}", msg.region)
        elif isinstance(msg, protocol.Tunnelled):
            if self._tunnel is not None:
                self._tunnel.carry(msg, content)
        else:
            self._asked.popleft().put(self._started(msg) if isinstance(msg, protocol.Started) else msg)

    def _started(self, msg: protocol.Started) -> list[RemoteRank]:
        """Note the ranks, before anything from them is read."""
        started = [RemoteRank(rank, pid, self) for rank, pid, _ in msg.ranks]
        address = self.link.connection.getpeername()[0]
        self.copies = address, msg.copies
        self.hears.update({rank: (address, port) for rank, _, port in msg.ranks})
        self._ranks.update({rank.rank: rank for rank in started})
        return started

    def end(self) -> None:
        """Note that nothing more comes from this host: its ranks are dead."""
        with self._lock:
            self.lost = self.lost or "the connection to it has ended"
            waiting = [self._asked.popleft() for _ in range(len(self._asked))]
        self.link.close()
        if self._tunnel is not None:
            self._tunnel.close()
        how = f"was lost with host {self.name}, where the process that holds its ranks is gone: {self.lost}"
        for rank in self._ranks.values():
            rank.die(how, -1)
        self._ended.set()
        for answer in waiting:
            answer.put(None)

    def close(self) -> None:
        """End the link, and wait until nothing more comes."""
        self.link.shut()
        self._ended.wait(1.0)


class Reading(threading.Thread):
    """A thread that reads the links to all hosts until it is closed, and never blocks on one of them.

    A host that is silent, since its process was stopped for instance, counts as lost: the kernel there would keep its
    connection open for ever.
    """

    def __init__(self) -> None:
        super().__init__(name="spmd-hosts", daemon=True)
        self._listening = Listening()
        self._hosts: list[RankHost] = []
        self._closed, self._looked = False, time.monotonic()
        self.start()

    def add(self, host: RankHost) -> None:
        """Read a host's link; from now on only this thread closes it."""
        self._hosts.append(host)
        self._listening.selector.register(host.link.connection, READ, functools.partial(self._read, host))

    def _read(self, host: RankHost, events: int) -> None:
        if not host.read():
            self._end(host)

    def _end(self, host: RankHost) -> None:
        self._hosts.remove(host)
        self._listening.forget(host.link.connection)
        host.end()

    def _end_silent(self) -> None:
        now, looked = time.monotonic(), self._looked
        if now - looked < 1.0:
            return
        self._looked = now
        for host in list(self._hosts):
            if now - looked > 2 * protocol.PULSE_SECONDS:  # this process itself was stopped
                host.heard = max(host.heard, now)
            elif now - host.heard > SILENT_SECONDS:
                host.lost = host.lost or f"it has sent nothing for {SILENT_SECONDS:g} s; was it stopped?"
                self._end(host)

    def run(self) -> None:
        while not self._closed:
            for heard in self._listening.select(protocol.PULSE_SECONDS):
                heard()
            self._end_silent()
        for host in list(self._hosts):
            self._end(host)
        self._listening.close()

    def close(self) -> None:
        """End the links, and the thread."""
        if self._closed:
            return
        self._closed = True
        self._listening.wake()
        self.join(1.0)
