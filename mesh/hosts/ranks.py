"""The ranks of a mesh over several hosts, as their driver holds them.

For each host there is a link, a thread that reads it, and one that hands what comes from a rank on to a socket, and
pipes, of this process, where the driver listens as it does to ranks of its own; so nothing else in the driver knows
where a rank runs. Invariants: a message for several ranks of a host goes there once; and what a host answers is heard
however much of what its ranks say nobody has listened to yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import secrets
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from ...kernels.errors import MeshError, message
from ...kernels.processes import Owned
from .. import protocol as ranks_protocol
from .. import wire
from ..display.status import RankStatus, Status
from ..driver.ranks import Rank, Ranks, request_of
from ..spec import Layout
from . import protocol
from .framing import framed, local_frame
from .link import Link, NotOfThisMesh
from .meeting import Meeting
from .places import Places

_ANSWER_SECONDS = 60.0  # for a host to fork ranks, or to say what they do


class RemoteRank(Rank):
    """A rank on some host: to the driver it looks as its own do.

    Args:
        host: that it is on.
    """

    def __init__(self, rank: int, pid: int, host: RankHost):
        Owned.__init__(self)
        self.rank, self.pid, self._host = rank, pid, host
        self.alive, self.ready = True, False
        self.connection, self._theirs = socket.socketpair()
        (out, out_end), (err, err_end), (self.pidfd, death_end) = os.pipe(), os.pipe(), os.pipe()
        self._ends = {"stdout": out_end, "stderr": err_end, "death": death_end}
        self._how = ""
        self._feeding = threading.Lock()
        self.pipes = {"stdout": out, "stderr": err}
        self._listen()

    def send(self, packet: wire.Packet, parts: list[memoryview]) -> bool:
        self._host.send_to([self], packet)
        return True

    def flush(self) -> bool:
        return True

    def signal(self, number: int) -> None:
        if self.alive and not self.foreign:
            self._host.link.send(protocol.Signal(self.rank, number))

    def end_text(self) -> str:
        return self._how or "died"

    # -- for the host's thread -----------------------------------------------------------------------------------------

    def feed(self, content: bytes) -> None:
        """Hand on what the rank has answered."""
        with contextlib.suppress(OSError):
            for part in local_frame(content):
                self._theirs.sendall(part)

    def print(self, stream: str, data: bytes) -> None:
        with self._feeding, contextlib.suppress(OSError):
            while data and stream in self._ends:
                data = data[os.write(self._ends[stream], data) :]

    def die(self, how: str) -> None:
        """Nothing more comes from it; the driver finds that it has ended, as it would of a rank of its own."""
        with self._feeding:
            self._how = self._how or how
            self._theirs.close()
            for fd in self._ends.values():
                os.close(fd)
            self._ends.clear()


class RankHost:
    """One host: the link to it, and its ranks.

    Args:
        name: its name.
        link: greeted, and its versions compared.
        handle: the launcher's.
    """

    def __init__(self, name: str, link: Link, handle: Any):
        self.name, self.link, self.handle = name, link, handle
        self.lost = ""  # why, once it can't be reached any more
        self._ranks: dict[int, RemoteRank] = {}
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()  # one question at a time
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()  # by ranks
        self._threads = [
            threading.Thread(target=target, name=f"spmd-host-{name}", daemon=True)
            for target in (self._read, self._hand_on)
        ]

    def begin(self, begin: protocol.Begin) -> list[RemoteRank]:
        for thread in self._threads:
            thread.start()
        return self._forked(begin)

    def begin_anew(self, generation: int) -> list[RemoteRank]:
        """Open the next generation, and take the ranks that replace dead ones."""
        return self._forked(protocol.BeginAnew(generation))

    def _forked(self, said: Any) -> list[RemoteRank]:
        answer = self.ask(said)
        if isinstance(answer, protocol.Refused):
            raise MeshError(message(f"host {self.name} can't start ranks", got=answer.why))
        started = [RemoteRank(rank, pid, self) for rank, pid in answer.pids]
        for rank in started:
            self._ranks[rank.rank] = rank
        self._known.set()
        return started

    def ask(self, said: Any) -> Any:
        """Send what is answered; the answer. Raises MeshError if none comes."""
        with self._lock:
            self._known = threading.Event()  # what the ranks say waits until they are known here
            self.link.send(said)
            with contextlib.suppress(queue.Empty):
                if not self.lost and (answer := self._answers.get(timeout=_ANSWER_SECONDS)) is not None:
                    return answer
            if not self.lost:
                self.lost = f"it has not answered for {_ANSWER_SECONDS:g} s"
                self.link.close()
        raise self.lost_error()

    def lost_error(self) -> MeshError:
        remedy = "see the output from there; make a new mesh, on hosts that are up"
        return MeshError(message(f"host {self.name} is lost", got=self.lost, remedy=remedy))

    def send_to(self, ranks: Iterable[Rank], packet: wire.Packet) -> None:
        alive = tuple(rank.rank for rank in ranks if rank.alive)
        if alive:
            self.link.send(protocol.ToRanks(alive), *framed(packet))

    def _read(self) -> None:
        """A thread's main function: until the connection ends."""
        why = "the connection to it has ended"
        try:
            while (messages := self.link.receive()) is not None:
                for said, content in messages:
                    if isinstance(said, protocol.FromRank | protocol.Printed | protocol.Died):
                        self._said.put((said, content))
                        continue
                    if isinstance(said, protocol.Started):
                        self._said.put((said, self._known))
                    self._answers.put(said)
        except NotOfThisMesh as error:
            why = str(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        self.lost = self.lost or why
        self.link.close()
        self._answers.put(None)
        self._said.put(None)

    def _hand_on(self) -> None:
        """The other's: what ranks say, in order."""
        while (found := self._said.get()) is not None:
            said, content = found
            if isinstance(said, protocol.FromRank):
                self._ranks[said.rank].feed(content)
            elif isinstance(said, protocol.Printed):
                self._ranks[said.rank].print(said.stream, content)
            elif isinstance(said, protocol.Died):
                self._ranks[said.rank].die(f"{said.how} on host {self.name}")
            else:
                content.wait(_ANSWER_SECONDS)  # until new ranks are known here
        for rank in list(self._ranks.values()):
            rank.die(f"was lost with host {self.name}, where the process that holds its ranks is gone: {self.lost}")

    def close(self) -> None:
        self.link.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(1.0)


class HostRanks(Ranks):
    """All ranks of a mesh over several hosts; see `driver.ranks.Ranks`, in whose place it is.

    Args:
        places: the hosts.
    """

    def __init__(self, places: Places, layout: Layout, options: dict[str, Any], started: Callable[[Rank], None]):
        self.generation, self.places, self._started = 1, places, started
        self.arena = None  # nothing is shared with the ranks
        self._title = f"Mesh({layout.axes}, backend={options['backend']!r}) on {len(places.names)} hosts"
        self.request = request_of(layout, options, "", places.ranks())
        self.all: list[Rank] = []
        self._hosts: list[RankHost] = []
        self._host_of: dict[int, RankHost] = {}
        self._deaths = select.poll()
        self._meeting: Meeting | None = None
        self._store: dist.Store | None = None

    def start(self, size: int) -> None:
        meeting = self._meeting = Meeting(self.places, secrets.token_bytes(32))
        try:
            meeting.begin()
            self._keep_store(meeting)
            self._hosts = [RankHost(*found) for found in meeting.hosts()]
        finally:
            meeting.close()
        request, found = ranks_protocol.encode(self.request), []
        for host, ranks in zip(self._hosts, self.places.ranks(), strict=True):
            self._host_of.update(dict.fromkeys(ranks, host))
            begin = protocol.Begin(ranks, request, self._title, self.places.local)
            found.append(_in_thread(host.begin, begin))
        self.all = [rank for result in found for rank in result()]
        for rank in self.all:
            self._watch(rank)

    def _keep_store(self, meeting: Meeting) -> None:
        """Keep what the ranks meet in; all that is in it is authenticated with the mesh's key."""
        address, listener = meeting.address, meeting.for_store()
        port = listener.getsockname()[1]
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
        for host, its in by_host.items():
            host.send_to(its, packet)
        return []

    @property
    def end(self) -> str | None:
        lost = [host.name for host in self._hosts if host.lost]
        return f"this mesh ends with host {', '.join(lost)}: make a new one, on hosts that are up" if lost else None

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
        for host in self._hosts:
            if host.lost:
                raise host.lost_error()
        self.generation += 1
        dead = [rank for rank in self.all if not rank.alive]
        for rank in dead:
            self._deaths.unregister(rank.pidfd)
            rank.close()
        results = [_in_thread(host.begin_anew, self.generation) for host in self._hosts]
        for rank in [rank for result in results for rank in result()]:
            self.all[rank.rank] = rank
            self._watch(rank)
        return [rank.rank for rank in dead]

    def status(self) -> Status:
        """See `Mesh.status`."""
        rows = []
        for host in self._hosts:
            told = host.ask(protocol.Ask("status"))
            rows += [dataclasses.replace(RankStatus(*row), host=host.name) for row in told.rows]
        return Status(rows)

    def stacks(self) -> str:
        """See `Mesh.stacks`."""
        return "\n\n".join(host.ask(protocol.Ask("stacks")).text for host in self._hosts)

    def kill(self) -> None:
        for rank in self.all:
            rank.signal(signal.SIGKILL)

    def close(self) -> None:
        """End the per-host processes, and with them all that runs there."""
        for host in self._hosts:
            host.close()
        for rank in self.all:
            rank.close()
        if self._meeting is not None:
            self._meeting.stop()
        self._store = None


def ranks_of(places: Places | None, layout: Layout, options: dict[str, Any], started: Callable[[Rank], None]) -> Ranks:
    """The ranks of a mesh on this host, or on several; the arguments are those of `Ranks`."""
    if places is None:
        return Ranks(layout, options, started)
    return HostRanks(places, layout, options, started)


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
