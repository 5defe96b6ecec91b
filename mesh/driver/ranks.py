"""The driver's handles on its rank processes: starting, sending, signalling, replacing and closing them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...kernels.errors import MeshError
from ...kernels.interrupts import uninterrupted
from ...kernels.processes import Owned, ended, memory_kills
from ...kernels.registry import added_factory
from ...kernels.shm import arena as arena_module
from ...kernels.shm.arena import Arena
from ...kernels.torch_private import drop_unfinished_record
from .. import wire
from ..display import trace
from ..display.records import levels
from ..display.stacks import stacks_of
from ..rank.activity import Look, look_at
from ..rank.descriptors import RankRequest
from ..remote.addresses import listen
from ..spec import Layout
from .spawn import await_zygote, fork_rank, mesh_begins, mesh_ends

END_SECONDS = 2.0  # for leaving ranks to end by themselves


class Rank(Owned):
    """One rank process: its socket, its output, and a descriptor that tells when it ends.

    Args:
        rank: its number in the mesh.
        request: what `rank_process.main` needs to know.
        arena: the arena's descriptor.
        listening: sockets on which it also accepts remote calls from other hosts.
    """

    def __init__(self, rank: int, request: RankRequest, arena: int, listening: Sequence[socket.socket] = ()):
        super().__init__()
        self.rank = rank
        self.alive, self.ready = True, False
        self.ends = ""  # why it ends, if that is known before it does
        self.pipes: dict[str, int] = {}
        self._memory_kills = memory_kills()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:  # `ours` are closed only if this fails
            self.connection, connection = socket.socketpair()
            ours.enter_context(self.connection)
            passed = [theirs.enter_context(connection).fileno()]
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            for stream in ("stdout", "stderr"):
                self.pipes[stream], end = os.pipe()
                ours.callback(os.close, self.pipes[stream])
                theirs.callback(os.close, end)
                passed.append(end)
            listener = theirs.enter_context(listen(request.key, rank))
            passed += [arena, *(one.fileno() for one in (listener, *listening))]
            self._zygote, self.pid, self.pidfd = fork_rank(dataclasses.replace(request, rank=rank), passed)
            ours.pop_all()
        self._printed = select.poll()
        for fd in self.pipes.values():
            os.set_blocking(fd, False)
            self._printed.register(fd, select.POLLIN)
        self.sender, self.receiver = wire.Sender(self.connection), wire.Receiver(self.connection)

    def sources(self) -> list[tuple[Any, str]]:
        """The descriptors to listen to, and what each is for."""
        return [(self.connection, "answer"), (self.pidfd, "death"), *((fd, name) for name, fd in self.pipes.items())]

    def send(self, packet: wire.Packet, parts: list[memoryview]) -> bool:
        """Send a packet, given its `frame`, without waiting; whether all of it is on its way (or never can be)."""
        return self._quietly(self.sender.send, packet, parts)

    def flush(self) -> bool:
        return self._quietly(self.sender.flush)

    def _quietly(self, send: Callable[..., bool], *what: Any) -> bool:
        try:
            return not self.alive or send(*what)
        except ConnectionError:  # its death is noticed elsewhere
            self.sender.close()
            return True
        except (OSError, MeshError) as error:  # it would lack a message that the others have
            self.ends = f"was killed, because a message could not be sent to it: {error}"
            self.signal(signal.SIGKILL)
            self.sender.close()
            return True

    def has_printed(self) -> bool:
        """Whether there is anything to `read`: one poll of all streams costs less than trying each."""
        return bool(self._printed.poll(0))

    def read(self, stream: str) -> bytes | None:
        """What it has printed that is not read yet; None if the stream has ended."""
        try:
            data = os.read(self.pipes[stream], 1 << 16)
        except BlockingIOError:
            return b""
        if data:
            return data
        self._printed.unregister(self.pipes[stream])
        os.close(self.pipes.pop(stream))
        return None

    def answers(self) -> list[wire.Packet] | None:
        """The packets that have come from it; None if its socket has ended, and then its process ends, too."""
        packets = self.receiver.receive(block=False)
        if packets is None and not self.ended(0.2):
            self.signal(signal.SIGKILL)  # it can't be reached any more
        return packets

    def last_answers(self) -> Iterator[wire.Packet]:
        """The packets that it sent before it died, which still count."""
        while packets := self.receiver.receive(block=False):
            yield from packets

    def signal(self, number: int) -> None:
        if self.alive and self.pidfd >= 0 and not self.foreign:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def ended(self, seconds: float) -> bool:
        """Wait for the process to end; whether it has."""
        return not self.alive or self.pidfd < 0 or ended(self.pidfd, seconds)

    def end_text(self) -> str:
        """How the process ended."""
        if self.ends:
            return self.ends
        code = self._zygote.exit_code(self.pid)
        if code is None:
            return "died" if self._zygote.alive else "died with the process that forks ranks"
        if code >= 0:
            return f"exited with code {code}"
        if code == -signal.SIGKILL and memory_kills() > self._memory_kills:
            return "was killed by SIGKILL, for memory by all appearances: the kernel has killed for it since"
        return f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"

    def close(self) -> None:
        """Give back its descriptors, once it has ended."""
        if self.pidfd < 0:
            return
        self.sender.close()
        self.receiver.close()
        self.connection.close()
        for fd in (self.pidfd, *self.pipes.values()):
            os.close(fd)
        self.pipes.clear()
        self.pidfd = -1


class Ranks:
    """All ranks of one mesh, and the arena that they share with the driver.

    Args:
        layout: the axes.
        options: what each rank needs to know besides: backend, threads, seed, timeout.
        started: called with every new rank.

    Attributes:
        generation: 1, and one more for each failure that the mesh has recovered from.
        bare: those of the ranks replaced last that have no values, because these were lost with a host.
    """

    def __init__(self, layout: Layout, options: dict[str, Any], started: Callable[[Rank], None]):
        self.generation, self.bare = 1, frozenset[int]()
        self._started = started
        with contextlib.ExitStack() as undo:
            self._arena_fd = arena_module.create(layout.size)
            undo.callback(os.close, self._arena_fd)
            self.arena: Arena | None = Arena(self._arena_fd, layout.size, layout.size)
            self.arena.clear(self.generation)
            self._title = f"Mesh({layout.axes}, backend={options['backend']!r}, device={options['device']!r})"
            self.arena.introduce(self._title)
            # Where ranks meet, in a nameless file: a TCPStore asks the name service about connections, for seconds.
            self._store_fd = os.memfd_create("spmd-store", os.MFD_CLOEXEC)
            undo.callback(os.close, self._store_fd)
            self.request = request_of(layout, options, f"/proc/{os.getpid()}/fd/{self._store_fd}")
            undo.pop_all()
        self.all: list[Rank] = []
        self._deaths = select.poll()
        mesh_begins(self)

    def start(self, size: int) -> None:
        await_zygote()  # it may import torch, which takes seconds
        for rank in range(size):
            with uninterrupted():  # a process that Ctrl-C left to nobody would stay
                self.all.append(self._start(rank))

    def _start(self, number: int) -> Rank:
        assert self.arena is not None
        self.arena.answers.received[number] = 0
        rank = Rank(number, dataclasses.replace(self.request, generation=self.generation), self._arena_fd)
        self._deaths.register(rank.pidfd, select.POLLIN)
        self._started(rank)
        return rank

    def send(self, packet: wire.Packet, parts: list[memoryview], ranks: Iterable[int] | None) -> list[Rank]:
        """Send a packet, given its `frame`, to ranks (None: all) without waiting; gives those that didn't take all."""
        chosen = self.all if ranks is None else [self.all[rank] for rank in ranks]
        return [rank for rank in chosen if not rank.send(packet, parts)]

    def elsewhere(self, rank: int) -> tuple[str, int] | None:
        """Where a rank accepts calls of remote objects, if it is on another host."""
        return None

    def region_of(self, rank: int) -> int:
        """The last region that a rank has entered; -1 if that was lost with its host."""
        return 0 if self.arena is None else self.arena.region(rank)[0]

    def overwritten(self, region: int) -> bool:
        """Whether a region may have changed donated memory."""
        return self.arena is not None and self.arena.overwritten(region)

    def looks(self) -> list[Look]:
        """What was seen last of the ranks, by host."""
        pids = [one.pid if one.alive else 0 for one in self.all]
        return [] if self.arena is None else [look_at(self.arena, range(len(pids)), pids)]

    def stack_of(self, rank: int) -> str:
        """What a rank is doing, as in `Mesh.stacks`; "" if that can't be had."""
        return "" if self.arena is None else stacks_of(self.arena, rank)

    def copies_at(self) -> tuple[tuple[str, int], ...]:
        """Where each host takes copies of other hosts' values: address and port."""
        return ()

    def copies(self) -> dict[tuple[int, int, int], tuple[str, int]]:
        """Which values have copies, as (rank, call, index), and where; also those of ranks that died."""
        return {}

    def drop_given(self, number: int) -> None:
        """Free values that lie in memory of the ranks' hosts; may be called by the garbage collector."""

    @property
    def remark(self) -> str | None:
        """What else the error about dead ranks should say."""
        return None

    @property
    def dying(self) -> bool:
        """Whether ranks are ending by themselves, or were lost with their host, but are not yet known to be dead."""
        return any(rank.alive and rank.ends for rank in self.all)

    def has(self, rank: Rank) -> bool:
        """Whether a process is one of these ranks and has not been replaced."""
        return rank.rank < len(self.all) and self.all[rank.rank] is rank

    def listened_to(self, started: Callable[[Rank], None], hear: Callable[[Any], None]) -> None:
        """Call `started` with all ranks so far, and with new ones from now on; `hear` is for ranks on other hosts."""
        self._started = started
        for rank in self.all:
            started(rank)

    def all_run(self) -> bool:
        """Whether no rank's process has ended, whether that was noticed or not."""
        return not self._deaths.poll(0)

    def abort(self, why: str) -> None:
        """Make every rank that waits give up."""
        if self.arena is not None:
            self.arena.abort(why)

    def begin_anew(self) -> list[int]:
        """Open the next generation, and replace ranks that died; gives the numbers of these."""
        assert self.arena is not None
        self.generation += 1
        self.arena.clear(self.generation)
        self.arena.introduce(self._title)
        dead = [rank for rank in self.all if not rank.alive]
        if dead:
            drop_unfinished_record(self._store_fd)
        for rank in dead:
            self._deaths.unregister(rank.pidfd)
            rank.close()
            self.all[rank.rank] = self._start(rank.rank)
        return [rank.rank for rank in dead]

    def kill(self) -> None:
        for rank in self.all:
            rank.signal(signal.SIGKILL)

    def await_end(self, seconds: float) -> None:
        """Wait, at most for so long, until all have ended."""
        end = time.monotonic() + seconds
        for rank in self.all:
            rank.ended(max(0.0, end - time.monotonic()))

    def leave(self) -> None:
        """Wait for ranks that were told to leave, and release what they had."""
        self.await_end(END_SECONDS)
        self.kill()
        self.close()

    def close(self) -> None:
        """Release what they needed, once they were killed and nobody listens to them any more."""
        for rank in self.all:
            rank.ended(1.0)
            rank.close()
        if self.arena is not None:
            self.arena = None
            mesh_ends(self)
            os.close(self._arena_fd)
            os.close(self._store_fd)


def request_of(
    layout: Layout, options: dict[str, Any], store: str, hosts: tuple[tuple[int, ...], ...] = ()
) -> RankRequest:
    """What every rank of a new mesh of this driver needs to know; see `RankRequest`."""
    trace.writer()  # made first, since its logger's level tells ranks that there is one
    return RankRequest(
        **options,
        rank=-1,
        generation=1,
        key=secrets.token_bytes(32),
        axes=layout.sizes,
        factory=pickled_factory(options["backend"]),
        store=store,
        hosts=hosts,
        address="",
        cwd=os.getcwd(),
        path=tuple(sys.path),
        argv=tuple(sys.argv),
        environ=dict(os.environ),
        levels=levels(),
    )


def pickled_factory(backend: str) -> bytes | None:
    """The pickled factory of a backend that this process has registered; None for one that every process has."""
    factory = added_factory(backend)
    if factory is None:
        return None
    try:
        return wire.to_bytes(factory)
    except Exception as error:
        raise MeshError(
            f"the factory of backend {backend!r} cannot be sent to the ranks",
            got=f"{type(error).__name__}: {error}",
            remedy="register a function that refers to nothing but modules, functions and plain values",
        ) from None
