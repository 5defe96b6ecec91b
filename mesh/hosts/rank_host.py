"""One host of a mesh, as the driver holds it: the link to it, and its ranks, which look as ranks of this host do.

For each host there is a link, a thread that reads it, and one that hands what comes from a rank on to a socket, and
pipes, of this process, where the driver listens as it does to ranks of its own; so nothing else in the driver knows
where a rank runs. What several ranks say alike is handed on as one, to who listens (`Together`). Invariant: what a host
answers is heard however much of what its ranks say is yet to be listened to.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...kernels.errors import MeshError, message
from ...kernels.processes import Owned
from .. import wire
from ..driver.ranks import Rank
from . import protocol
from .coded import NotOfThisMesh
from .framing import framed, local_frame, whole_packet
from .link import Link
from .tunnel import Tunnel

_ANSWER_SECONDS = 60.0  # for a host to fork ranks, or to say what they do

Together = Callable[[Sequence[Rank], wire.Packet], None]
"""What is told of a message that several ranks have sent alike."""


class RemoteRank(Rank):
    """A rank on some host: to the driver it looks as its own do.

    Args:
        host: that it is on.
    """

    def __init__(self, rank: int, pid: int, host: RankHost):
        Owned.__init__(self)
        self.rank, self.pid, self._host = rank, pid, host
        self.alive, self.ready, self.region = True, False, -1
        self.connection, self._theirs = socket.socketpair()
        (out, out_end), (err, err_end), (self.pidfd, death_end) = os.pipe(), os.pipe(), os.pipe()
        self._ends = {"stdout": out_end, "stderr": err_end, "death": death_end}
        self._how = ""
        self._fed = self._heard = 0  # messages, before and behind the socket
        self._feeding = threading.Lock()
        self._printed_before = False
        self.pipes = {"stdout": out, "stderr": err}
        self._listen()

    def send(self, packet: wire.Packet, parts: list[memoryview]) -> bool:
        self._host.send_to([self], framed(packet))
        return True

    def flush(self) -> bool:
        return True

    def signal(self, number: int) -> None:
        if self.alive and not self.foreign:
            self._host.link.send(protocol.Signal(self.rank, number))

    def end_text(self) -> str:
        return self._how or "died"

    def answers(self) -> list[wire.Packet] | None:
        packets = super().answers()
        self._heard = self._fed if packets is None else self._heard + len(packets)
        return packets

    def said_more(self) -> bool:
        return self._heard < self._fed

    def has_printed(self) -> bool:
        return self._printed_before and super().has_printed()

    # -- for the host's thread -----------------------------------------------------------------------------------------

    def feed(self, content: bytes) -> None:
        """Hand on what the rank has answered."""
        with contextlib.suppress(OSError):
            for part in local_frame(content):
                self._theirs.sendall(part)
            self._fed += 1

    def print(self, stream: str, data: bytes) -> None:
        self._printed_before = True
        with self._feeding, contextlib.suppress(OSError):
            while data and stream in self._ends:
                data = data[os.write(self._ends[stream], data) :]

    def die(self, how: str, region: int) -> None:
        """Nothing more comes from it; the driver finds that it has ended, as it would of a rank of its own."""
        with self._feeding:
            self._how, self.region = self._how or how, region
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
        store: where the link's end here finds the store, if the host can't.
        together: hears what several ranks say alike; None: as if each had said it alone.
    """

    def __init__(self, name: str, link: Link, handle: Any, store: tuple[str, int] | None, together: Together | None):
        self.name, self.link, self.handle, self.together = name, link, handle, together
        self._tunnel = None if store is None else Tunnel(link, store)
        self.lost = ""  # why, once it can't be reached any more
        self.copies: tuple[str, int] = ("", 0)  # where it takes copies of other hosts' values
        self.hears: dict[int, tuple[str, int]] = {}  # where its ranks are called by others
        self._ranks: dict[int, RemoteRank] = {}
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.RLock()  # one question at a time, and no other before its ranks are known
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()  # by ranks
        self._threads = [
            threading.Thread(target=target, name=f"spmd-host-{name}", daemon=True)
            for target in (self._read, self._hand_on)
        ]

    @property
    def begun(self) -> bool:
        """Whether it has ranks, and answers."""
        return bool(self._ranks)

    def begin(self, begin: protocol.Begin) -> list[RemoteRank]:
        for thread in self._threads:
            thread.start()
        return self._forked(begin)

    def begin_anew(self, generation: int) -> list[RemoteRank]:
        """Open the next generation, and take the ranks that replace dead ones."""
        return self._forked(protocol.BeginAnew(generation))

    def _forked(self, said: Any) -> list[RemoteRank]:
        with self._lock:
            answer = self.ask(said)
            if isinstance(answer, protocol.Refused):
                raise MeshError(message(f"host {self.name} can't start ranks", got=answer.why))
            started = [RemoteRank(rank, pid, self) for rank, pid, _ in answer.ranks]
            address = self.link.connection.getpeername()[0]
            self.copies = address, answer.copies
            self.hears.update({rank: (address, port) for rank, _, port in answer.ranks})
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

    def send_to(self, ranks: Iterable[Rank], pieces: Sequence[Any]) -> None:
        """Send a packet, in pieces of bytes (`framed`), for those of the ranks that are alive."""
        alive = tuple([rank.rank for rank in ranks if rank.alive])
        if alive:
            self.link.send(protocol.ToRanks(alive), *pieces)

    def _read(self) -> None:
        """A thread's main function: until the connection ends."""
        why = "the connection to it has ended"
        try:
            while (messages := self.link.receive()) is not None:
                for said, content in messages:
                    if isinstance(said, protocol.Carried):
                        if self._tunnel is not None:
                            self._tunnel.carry(said, content)
                        continue
                    if isinstance(said, protocol.FromRanks | protocol.Printed | protocol.Died):
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
        if self._tunnel is not None:
            self._tunnel.close()
        self._answers.put(None)
        self._said.put(None)

    def _hand_on(self) -> None:
        """The other's: what ranks say, in order."""
        while (found := self._said.get()) is not None:
            said, content = found
            if isinstance(said, protocol.FromRanks):
                ranks = [self._ranks[rank] for rank in said.ranks]
                if len(ranks) > 1 and self.together is not None:
                    self.together(ranks, whole_packet(content))
                else:
                    for rank in ranks:
                        rank.feed(content)
            elif isinstance(said, protocol.Printed):
                self._ranks[said.rank].print(said.stream, content)
            elif isinstance(said, protocol.Died):
                self._ranks[said.rank].die(f"{said.how} on host {self.name}", said.region)
            else:
                content.wait(_ANSWER_SECONDS)  # until new ranks are known here
        for rank in list(self._ranks.values()):
            rank.die(f"was lost with host {self.name}, where the process that holds its ranks is gone: {self.lost}", -1)

    def close(self) -> None:
        self.link.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(1.0)
