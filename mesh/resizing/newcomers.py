"""Newcomers: the ranks of a mesh's new size, which get ready while the old ranks go on with the program.

They start, import what the program's functions need, and are sent what the old ranks were sent. Invariant: until the
switch (`resize`) nothing in the mesh refers to them, so that giving them up changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from ...kernels.errors import MeshError, PeerLost
from ...kernels.interrupts import uninterrupted
from ...kernels.limits import named_limits
from ...kernels.processes import available_bytes
from ...kernels.shm.heap import Heap
from .. import protocol, wire
from ..driver.ranks import Rank, Ranks
from ..driver.session import DriverSession
from ..driver.sockets import RankSockets
from ..hosts.host_list import HostList
from ..hosts.ranks import HostRanks
from ..spec import Layout

TRIES = 3  # how often newcomers that die are started
_CHUNK_BYTES = 64 << 20  # of memory that is populated between two such checks
_LOOK_SECONDS = 0.1  # between two checks whether they are still wanted


class Died(Exception):
    """A newcomer has died, or a process from which it takes over values."""


class Newcomers:
    """Ranks that get ready.

    Args:
        layout: of their mesh.
        threads: of each.
        shared, own: bytes of values that they will take over: those that all share, and each one's own.
        host_list: the hosts that they will be on, if there are several.

    Attributes:
        ranks: the ranks, once `prepare` has returned.
        known: the keys of shipped objects that they were sent and could read.
    """

    def __init__(
        self, session: DriverSession, layout: Layout, threads: int, shared: int, own: int, host_list: HostList | None
    ):
        self.layout, self._host_list = layout, host_list
        self._session, self._options = session, session.options | {"threads": threads}
        # Their first step is assumed to make new values of the same size, shared and own, and gradients of the shared
        # ones. The memory of other hosts is not known here.
        memory = protocol.Populate(*map(Heap.rounded, (own, own + shared, shared)))
        needed = shared + memory.results + layout.size * (memory.values + 2 * memory.step)
        fits = host_list is None and 2 * needed < available_bytes()
        self._shared_bytes, self._memory = (shared, memory) if fits else (0, protocol.Populate(0, 0, 0))
        self.known: set[str] = set()
        self._printed: list[tuple[Rank, str, bytes]] = []
        self._cancelled = threading.Event()

    @named_limits()
    def prepare(self) -> None:
        """Start them, and wait until they are ready.

        Raises:
            MeshError: they cannot be started, or die before they are ready.
        """
        for left in reversed(range(TRIES)):
            self.ranks, self.known = self._made(), set()
            try:
                self.ranks.start(self.layout.size)
                self._populate()
                self._greet()
                return
            except BaseException as error:
                self.give_up()
                if not isinstance(error, Died):
                    raise
                if not left:
                    problem = f"the mesh cannot be resized: new ranks die before they are ready, {TRIES} times in a row"
                    remedy = "see their error output; the mesh goes on as it was"
                    raise MeshError(problem, got=f"the last: {error}", remedy=remedy) from None

    def _made(self) -> Ranks:
        old, options = self._session.ranks, self._options
        if self._host_list is None:
            return Ranks(self.layout, options, lambda rank: None)
        assert isinstance(old, HostRanks)
        return HostRanks(self._host_list, self.layout, options, lambda rank: None, None, old.secret, self._check_wanted)

    def cancel(self) -> None:
        """Make `prepare` end soon."""
        self._cancelled.set()

    def give_up(self) -> None:
        """End them, if they have not ended yet."""
        with uninterrupted():
            self.ranks.kill()
            self.ranks.close()
        self.show_printed()

    def _populate(self) -> None:
        """Populate the memory for values that they will share."""
        for at in range(0, self._shared_bytes, _CHUNK_BYTES):
            self._check_wanted()
            assert self.ranks.arena is not None
            self.ranks.arena.populate(at, min(_CHUNK_BYTES, self._shared_bytes - at))

    def _check_wanted(self) -> None:
        if self._cancelled.is_set():
            raise MeshError("the mesh was closed while it was resized", where=self._session.describe())

    def _greet(self) -> None:
        """Send them what the old ranks were sent, and wait until they have read it."""
        session = self._session
        with session.lock:
            self.known = session.shipped.keys()
            for msg, packet in session.shipped.for_newcomer():
                self._tell(msg, packet)
        if self._host_list is None:
            self._tell(self._memory)
        self._tell(protocol.PassThrough(0, 0, (), ()))
        self._wait(session.timeout, _ends_a_task)

    def take(self, messages: Sequence[tuple[protocol.Message, wire.Packet]], seconds: float) -> None:
        """Have them do tasks, and wait until all have done all of them."""
        for msg, packet in messages:
            self._tell(msg, packet)
        self._wait(seconds, _ends_a_task, len(messages))

    def copy(self, msg: protocol.CopyTo, seconds: float) -> None:
        """Have their values copied to other hosts of theirs, and wait until that is done."""
        self._tell(msg)
        self._wait(seconds, lambda one: isinstance(one, protocol.Copying) and one.done and one.number == msg.number)

    def _tell(self, msg: protocol.Message, packet: wire.Packet | None = None) -> None:
        packet = wire.Packet(b"") if packet is None else packet
        packet.head = protocol.encode(msg)
        self.ranks.send(packet, wire.frame(packet), None)

    def _wait(self, seconds: float, is_it: Callable[[protocol.Message], bool], count: int = 1) -> None:
        """Wait until each has sent `count` messages that `is_it` accepts."""
        left = dict.fromkeys((rank.rank for rank in self.ranks.all), count)
        end = time.monotonic() + seconds
        found = self._heard_here() if self._host_list is None else self._heard_of_hosts()
        with contextlib.closing(found) as heard:  # at once, not when an error that refers to it is gone
            while any(count > 0 for count in left.values()):
                self._check_wanted()
                if time.monotonic() > end:
                    late = sorted(rank for rank, count in left.items() if count > 0)
                    got = f"ranks {late} are not ready after {seconds:g} s"
                    remedy = "see what they import; the mesh goes on as it was"
                    raise MeshError("the mesh cannot be resized", got=got, remedy=remedy)
                for kind, rank, what in next(heard):
                    if kind == "death":
                        raise Died(f"rank {rank.rank} {rank.end_text()}")
                    if kind == "answer":
                        left[rank.rank] -= is_it(self._decoded(rank, what))
                    else:
                        self._printed.append((rank, kind, what))

    def _heard_here(self) -> Generator[list[tuple[str, Rank, Any]], None, None]:
        """Yields, after a moment at most, what ranks on this host have sent and printed, and which have died."""
        found: list[tuple[str, Rank, Any]] = []

        def said(rank: Rank, packets: Iterable[wire.Packet]) -> None:
            found.extend(("answer", rank, packet) for packet in packets)

        def printed(rank: Rank) -> None:
            found.extend((stream, rank, data) for stream, data in sockets.output_of(rank))

        def ended(rank: Rank) -> None:
            printed(rank)
            found.append(("death", rank, None))

        with contextlib.closing(RankSockets(said, printed, ended)) as sockets:
            for rank in self.ranks.all:
                sockets.add(rank)
            while True:
                for rank in self.ranks.all:
                    rank.flush()
                for heard in sockets.select(_LOOK_SECONDS):
                    heard()
                yield found
                found.clear()

    def _heard_of_hosts(self) -> Generator[list[tuple[str, Rank, Any]], None, None]:
        """The same for ranks on other hosts."""
        assert isinstance(self.ranks, HostRanks)
        inbox, bell = self.ranks.inbox, threading.Event()
        inbox.heard_by(bell.set)
        while True:
            bell.wait(_LOOK_SECONDS)
            bell.clear()
            yield [(kind, rank, what) for kind, ranks, what in inbox.take() for rank in ranks]

    def _decoded(self, rank: Rank, packet: wire.Packet) -> protocol.Message:
        msg = protocol.decode(packet.head)
        rank.ready = rank.ready or isinstance(msg, protocol.Ready)
        if isinstance(msg, protocol.Ship):  # it could not read this object, which is sent again at the switch
            self.known.discard(msg.key)
        if isinstance(msg, protocol.Failed):
            failure = wire.loads(packet)
            got = f"rank {rank.rank}: {failure.type_name}: {failure.text}"
            if failure.type_name == PeerLost.__name__:
                raise Died(got)
            remedy = "the mesh goes on as it was"
            raise MeshError("the mesh cannot be resized: a new rank has failed", got=got, remedy=remedy)
        packet.close()
        if self.ranks.arena is not None:
            self.ranks.arena.answers.received[rank.rank] += 1
        return msg

    def take_over(self, old: Any, listening: threading.Event) -> None:
        """Have the old ranks end, in a thread, and show what these have printed, both once these are listened to."""
        session = self._session
        leave = functools.partial(self._let_leave, old, listening, session.leaving)
        with uninterrupted():  # Ctrl-C would leave them to nobody
            session.leaving = threading.Thread(target=leave, name="spmd-leaving", daemon=True)
            try:
                session.leaving.start()
            except RuntimeError:  # the limit on processes is reached
                session.leaving = None
                leave()
        self._await(listening)
        self.show_printed()

    def _let_leave(self, old: Any, listening: threading.Event, before: threading.Thread | None) -> None:
        self._await(listening)
        if before is not None:
            before.join()
        old.leave()

    def _await(self, listening: threading.Event) -> None:
        while not listening.wait(_LOOK_SECONDS) and self._session.closed is None:  # nothing listens to a closed mesh
            pass

    def show_printed(self) -> None:
        """Show what they have printed so far."""
        self._session.receiving.show(self._printed, self.layout)
        self._printed.clear()


def _ends_a_task(msg: protocol.Message) -> bool:
    return isinstance(msg, protocol.Answer)
