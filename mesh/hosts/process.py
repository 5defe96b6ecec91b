"""The process on each host of a driver's mesh (`spmd host`): it forks the host's ranks, and passes messages on to them.

It dials the driver, which has started it and has given it the mesh's secret on its standard input, or is dialled (see
`spmd.cli.host`). Its ranks are forked from its own zygote, share an arena, and die with it; it ends when the connection
to the driver does. Invariant: it never waits for a rank, and for the driver only while a rank is forked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ...kernels.errors import MeshError
from ...kernels.limits import named_limits
from ...kernels.listening import READ
from ...kernels.processes import cores, open_more_files
from ...kernels.shm import arena as arena_module
from ...kernels.shm.arena import Arena
from ...kernels.shm.blocks import Result
from .. import protocol as ranks_protocol
from .. import wire
from ..display import stacks, status
from ..driver import spawn
from ..driver.ranks import Rank
from ..driver.sockets import RankSockets
from ..driver.spawn import ForkedProcess, Zygote
from ..failure import capture
from ..rank import descriptors, zygote
from ..rank.activity import look_at
from ..resizing.shares import Offered
from . import protocol
from .coded import NotOfThisMesh, inlined, unframed
from .gathering import Gathering
from .holder import Holder
from .link import GREETING_SECONDS, Link, greet_driver, listener, mesh_key
from .protocol import versions
from .tunnel import Tunnel


class Host:
    """The ranks of this host."""

    def __init__(self, link: Link, begin: protocol.Begin, secret: bytes):
        self._link, self._members, self._title = link, begin.ranks, begin.title
        address = link.connection.getsockname()[0]
        request = _fitted(descriptors.decode(begin.request), begin, address)
        self._tunnel = None if request.store else Tunnel(link)
        store = request.store or f"tcp://127.0.0.1:{self._tunnel.port if self._tunnel else 0}"
        self._request = dataclasses.replace(request, store=store, key=mesh_key(secret, request.key))
        self._sockets = RankSockets(self._take, self._show, self._bury)
        self._sockets.selector.register(link.connection, READ, self._read)
        self._ended = False  # whether the link has
        self._arena_fd = arena_module.create(len(begin.ranks))
        self._arena = Arena(self._arena_fd, len(begin.ranks), len(begin.ranks))
        self._ranks: dict[int, Rank] = {}
        self._gathering = Gathering(lambda ranks, content: link.send(protocol.FromRanks(ranks), *content))
        # Where other hosts call objects of a rank; kept for a rank's replacement, as long as this process runs.
        self._heard = {number: listener(address) for number in begin.ranks}
        for one in self._heard.values():
            one.setblocking(False)
        self._holder = Holder(address, self._request.key) if self._request.copies else None
        self._secret = secret
        self._offered: Offered | None = None  # offered to the new ranks of a resize
        self._given: dict[int, Result] = {}  # call -> values that the driver has put on all ranks
        self._clear(self._request.generation)

    def _clear(self, generation: int) -> None:
        self._arena.clear(generation)
        self._arena.introduce(self._title)

    def start(self, ranks: Sequence[int]) -> None:
        """Fork ranks, and report them."""
        forked: list[Rank] = []
        try:
            for number in ranks:
                with named_limits():
                    forked.append(Rank(number, self._request, self._arena_fd, [self._heard[number]]))
        except Exception as error:
            for rank in forked:
                rank.signal(signal.SIGKILL)
                rank.close()
            self._link.send(protocol.Refused(f"{type(error).__name__}: {error}"))
            return
        for rank in forked:
            self._ranks[rank.rank] = rank
            self._sockets.add(rank)
        started = tuple((rank.rank, rank.pid, self._heard[rank.rank].getsockname()[1]) for rank in forked)
        self._link.send(protocol.Started(started, 0 if self._holder is None else self._holder.port))

    def serve(self) -> None:
        """Serve until the connection to the driver ends."""
        while True:
            for heard in self._sockets.select(self._gathering.left()):
                heard()
                if self._ended:
                    return
            if self._gathering.left() == 0:
                self._gathering.flush()

    # -- from the driver -----------------------------------------------------------------------------------------------

    def _read(self, events: int) -> None:
        messages = self._link.receive()
        self._ended = messages is None
        for message, content in messages or ():
            self.handle(message, content)

    def handle(self, message: Any, content: bytes) -> None:
        """Do what a message of the driver's asks for."""
        match message:
            case protocol.ToRanks(ranks):
                self._pass_on(ranks, self._laid_out(unframed(content)))
            case protocol.Signal(rank, number):
                self._ranks[rank].signal(number)
            case protocol.Abort(why):
                self._arena.abort(why)
            case protocol.BeginAnew(generation):
                self._begin_anew(generation)
            case protocol.Ask(what, number):
                self._link.send(self._report(what, number))
            case protocol.Tunnelled() if self._tunnel is not None:
                self._tunnel.carry(message, content)
            case protocol.ListCopies():
                self._link.send(protocol.CopiesHeld(() if self._holder is None else self._holder.names()))
            case protocol.Offer(number):
                self._link.send(protocol.Offered(self._offer(number)))
            case protocol.DropGiven(calls):
                for result in [self._given.pop(call) for call in calls if call in self._given]:
                    self._arena.given.drop(result)

    def _pass_on(self, ranks: Sequence[int], packet: wire.Packet) -> None:
        living = [self._ranks[number] for number in ranks if self._ranks[number].alive]
        self._gathering.expect(packet, [rank.rank for rank in living])
        parts = wire.frame(packet)
        for rank in living:
            if not self._send(rank, packet, parts):
                self._sockets.when_writable(rank)
        packet.close()

    def _begin_anew(self, generation: int) -> None:
        """Open a generation, and replace the dead ranks."""
        self._request = dataclasses.replace(self._request, generation=generation)
        self._clear(generation)
        dead = [number for number in self._members if not self._ranks[number].alive]
        for number in dead:
            self._ranks[number].close()
        self.start(dead)

    def _offer(self, number: bytes) -> int:
        """Offer the ranks' values to those of another mesh; returns the port."""
        if self._offered is not None:
            self._offered.close()
        self._offered = Offered(self._request.address, mesh_key(self._secret, number), self._arena, self._members)
        return self._offered.port

    def _send(self, rank: Rank, packet: wire.Packet, parts: list[memoryview]) -> bool:
        """Send a packet; whether all of it is on its way."""
        try:
            return rank.send(packet, parts)
        except MeshError:  # keeping it for later would need another descriptor, which can't be had
            packet = inlined(packet)
            return rank.send(packet, wire.frame(packet))

    def _laid_out(self, packet: wire.Packet) -> wire.Packet:
        """Put a packet's values once into this host's arena, where ranks share them, and which outlives the ranks."""
        self._arena.given.trim()
        if packet.fd is None or not isinstance(msg := ranks_protocol.decode(packet.head), ranks_protocol.PutValues):
            return packet
        size = os.fstat(packet.fd).st_size
        result = self._given[msg.out] = self._arena.given.take(size)
        memory = self._arena.given.memory(result, size)
        memory[:] = mmap.mmap(packet.fd, size, access=mmap.ACCESS_READ)  # Linux reads at most 2 GiB at once
        packet.close()
        packet.head = ranks_protocol.encode(dataclasses.replace(msg, given=(*result, size)))
        return packet

    def _report(self, what: str, number: int) -> protocol.Report:
        if what == "overwritten":
            return protocol.Report((), "yes" if self._arena.overwritten(number) else "")
        if what == "stack":
            return protocol.Report((), stacks.stacks_of(self._arena, self._members.index(number)))
        if what == "stacks":
            found = (f"rank {rank}: {stacks.stacks_of(self._arena, at)}" for at, rank in enumerate(self._members))
            return protocol.Report((), "\n\n".join(found))
        rows = status.of_board(self._arena, self._members)
        return protocol.Report(tuple(dataclasses.astuple(row) for row in rows), "")

    def pulse(self) -> protocol.Pulse:
        """What tells the driver that this process is neither stopped nor out of reach, and what its ranks do."""
        ranks = [self._ranks.get(number) for number in self._members]  # none, if they could not be forked
        pids = [0 if rank is None or not rank.alive else rank.pid for rank in ranks]
        look = look_at(self._arena, self._members, pids)
        found = {rank: dataclasses.astuple(activity) for rank, activity in look.ranks.items()}
        return protocol.Pulse(look.at, look.in_debugger, found)

    # -- from ranks ----------------------------------------------------------------------------------------------------

    def _take(self, rank: Rank, packets: Iterable[wire.Packet]) -> None:
        for packet in packets:
            self._hand_on(rank, packet)

    def _hand_on(self, rank: Rank, packet: wire.Packet) -> None:
        """Pass a rank's packet to the driver; or an error, if its descriptor could not be received."""
        if packet.fd == wire.LOST and isinstance(msg := ranks_protocol.decode(packet.head), ranks_protocol.Answer):
            try:
                wire.loads(packet)
            except MeshError as error:
                packet = wire.dumps(capture(error))
            packet.head = ranks_protocol.encode(ranks_protocol.Failed(msg.task))
        self._gathering.take(rank.rank, packet)
        packet.close()

    def _show(self, rank: Rank) -> None:
        for stream, data in self._sockets.output_of(rank) if rank.has_printed() else ():
            self._link.send(protocol.Printed(rank.rank, stream), data)

    def _bury(self, rank: Rank) -> None:
        self._take(rank, rank.last_answers())
        self._show(rank)
        self._sockets.remove(rank)
        how = rank.end_text()
        rank.alive = False
        self._gathering.lose(rank.rank)
        self._link.send(protocol.Died(rank.rank, how, self._arena.region(self._members.index(rank.rank))[0]))

    def close(self) -> None:
        """End the ranks."""
        for serving in (self._holder, self._offered):
            if serving is not None:
                serving.close()
        if self._tunnel is not None:
            self._tunnel.close()
        for rank in self._ranks.values():
            rank.signal(signal.SIGKILL)


def _fitted(request: Any, begin: protocol.Begin, address: str) -> Any:
    """The request, adapted to this host: threads, address, and on another machine folder, path and environment."""
    threads = request.threads or max(1, cores() // len(begin.ranks))
    request = dataclasses.replace(request, threads=threads, address=address)
    if begin.same_machine:
        return request
    folder = request.cwd if os.path.isdir(request.cwd) else os.path.expanduser("~")
    path = tuple(dict.fromkeys([*request.path, *sys.path]))
    return dataclasses.replace(request, cwd=folder, path=path, environ=dict(os.environ))


class ForkedZygote(Zygote):
    """A zygote forked from this process before it has done anything, so that torch is imported only once; see `Zygote`.

    A process in which torch has computed, or that has threads, must not be forked: this one has none yet.

    Args:
        connection: open in this process; the zygote closes it, since it would outlive this process there.
    """

    def __init__(self, connection: socket.socket):
        self._open = connection
        super().__init__()

    def _started(self, theirs: socket.socket) -> ForkedProcess:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                self._control.close()
                self._open.close()
                zygote.main(theirs.detach(), self.driver_pid)
            finally:
                os._exit(1)
        return ForkedProcess(pid, os.pidfd_open(pid))


def main() -> None:
    """The main function of `spmd host`: standard input gives the driver's address, and the secret."""
    try:
        config = json.loads(sys.stdin.readline())
        secret, place, index = bytes.fromhex(config["secret"]), (config["address"], config["port"]), config["index"]
    except (ValueError, TypeError, KeyError):
        sys.exit("spmd host: no driver is named on standard input; Mesh(hosts=...) starts this, or write --listen")
    try:
        hold(greet_driver(socket.create_connection(place, timeout=GREETING_SECONDS), secret, index), secret)
    except (OSError, NotOfThisMesh) as error:
        sys.exit(f"spmd host: {place[0]} port {place[1]}: {error}")


def hold(link: Link, secret: bytes) -> None:
    """Hold the ranks of this host, in a process that has done nothing yet, until the link to the driver ends.

    Raises:
        NotOfThisMesh: the first message was not sent by the driver.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver passes on Ctrl-C
    open_more_files()
    spawn.use(ForkedZygote(link.connection))
    link.send(protocol.Hello(versions()))
    while not (messages := link.receive()):
        if messages is None:
            return  # the driver reports why
    (begin, _), *rest = messages
    try:
        with named_limits():
            host = Host(link, begin, secret)
    except MeshError as error:
        link.send(protocol.Refused(str(error)))
        return
    try:
        host.start(begin.ranks)
        # A thread, since this one may take long for a message; not before, since what has threads must not be forked.
        threading.Thread(target=_pulse, args=(link, host), name="spmd-pulse", daemon=True).start()
        for message, content in rest:
            host.handle(message, content)
        with contextlib.suppress(NotOfThisMesh):
            host.serve()
    finally:
        host.close()


def _pulse(link: Link, host: Host) -> None:
    """A thread's main function: send pulses until the link ends."""
    while not link.ended:
        link.send(host.pulse())
        time.sleep(protocol.PULSE_SECONDS)
