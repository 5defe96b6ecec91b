"""The driver's side of a mesh: it starts the ranks, sends them tasks, and learns at once of what goes wrong.

One thread per mesh receives: answers, printed lines, deaths. The user's thread sends, and waits for answers. A failure
raises the arena's abort flag, so that no rank waits in vain; when all ranks that live have fallen quiet, dead ones are
replaced and the next generation begins. Calls are asynchronous up to `IN_FLIGHT`; a failure surfaces at the call,
or at the next use of the mesh or of a value.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ..kernels import arena as arena_module
from ..kernels.arena import Arena
from ..kernels.errors import MeshError, PeerLost, message
from . import shipping, tasks, trees, wire
from .failure import Failure, combine
from .output import Collator
from .spawn import zygote
from .spec import Layout, P

IN_FLIGHT = 2
GRACE_SECONDS = 0.5  # for ranks to give up by themselves once one has failed
CLOSE_SECONDS = 2.0


class Task:
    """Something sent to ranks, and their answers as they come."""

    __slots__ = ("answers", "done", "event", "failure", "future", "number", "ranks", "region", "reported")

    def __init__(self, number: int, ranks: Sequence[int], region: int):
        self.number, self.ranks, self.region = number, tuple(ranks), region
        self.answers: dict[int, tuple[str, Any]] = {}
        self.event = threading.Event()
        self.failure: Callable[[], BaseException] | None = None
        self.reported = False
        self.future: Future | None = None

    def values(self) -> list[Any]:
        return [self.answers[rank][1] for rank in self.ranks]


class _Rank:
    """A rank process as the driver sees it."""

    def __init__(self, rank: int, pid: int, pidfd: int, connection: socket.socket, pipes: tuple[int, int]):
        self.rank, self.pid, self.pidfd, self.connection = rank, pid, pidfd, connection
        self.pipes = dict(zip(("stdout", "stderr"), pipes, strict=True))
        self.receiver = wire.Receiver(connection)
        self.alive, self.ready = True, False


class DriverSession:
    """The ranks of one mesh and the traffic with them; `Mesh` is its only user."""

    def __init__(self, mesh: Any, layout: Layout, *, backend: str, threads: int, seed: int, timeout: float):
        self._mesh = weakref.ref(mesh)
        self.mesh_id, self.layout, self.backend = id(mesh), layout, backend
        self.threads, self.seed, self.timeout = threads, seed, timeout
        self.generation = 1
        self._closing = False
        self._stillborn = 0  # ranks in a row that died before they were ready
        self.closed: str | None = None
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._tasks: dict[int, Task] = {}
        self._failed: deque[Task] = deque()
        self._recovering = False
        self._failed_at = 0.0
        self._lost: dict[int, str] = {}
        self._numbers = 0
        self._regions = 0
        self._packets: dict[str, wire.Packet] = {}
        self._hashes: dict[Any, str] = {}
        self._snapshots: weakref.WeakKeyDictionary[Any, tuple[list[Any], str]] = weakref.WeakKeyDictionary()
        self._keep: dict[str, list[Any]] = {}
        self.arrays: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._garbage: deque[Any] = deque()
        self._missing: dict[Any, set[int]] = {}
        self._flight: deque[Task] = deque()
        self.known_results: dict[Any, Any] = {}
        self.decoded: dict[bytes, Any] = {}
        self._tcp_store: Any = None

        fd = arena_module.create(layout.size)
        self._arena_fd = fd
        self.arena = Arena(fd, layout.size, layout.size)
        self.arena.clear(self.generation)
        self._collator = Collator(_print, layout.size)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", None))
        self._ranks: list[_Rank] = []
        try:
            for rank in range(layout.size):
                self._ranks.append(self._fork(rank))
        except BaseException:
            self._kill()
            raise
        self._thread = threading.Thread(target=self._receive, name="spmd-receiver", daemon=True)
        self._thread.start()
        if not _open_sessions:
            # After the zygote's own hook was registered, so that this runs before it.
            atexit.unregister(close_all)
            atexit.register(close_all)
        _open_sessions.add(self)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _fork(self, rank: int) -> _Rank:
        mine, theirs = socket.socketpair()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        out, err = os.pipe(), os.pipe()
        request = {
            "rank": rank,
            "axes": self.layout.sizes,
            "backend": self.backend,
            "threads": self.threads,
            "seed": self.seed,
            "timeout": self.timeout,
            "mesh_id": self.mesh_id,
            "generation": self.generation,
            "store": self._store_address(),
            "cwd": os.getcwd(),
            "path": list(sys.path),
            "argv": list(sys.argv),
            "environ": dict(os.environ),
        }
        self._zygote = zygote()
        pid, pidfd = self._zygote.fork(request, [theirs.fileno(), out[1], err[1], self._arena_fd])
        for fd in (out[1], err[1]):
            os.close(fd)
        theirs.close()
        process = _Rank(rank, pid, pidfd, mine, (out[0], err[0]))
        for fd in process.pipes.values():
            os.set_blocking(fd, False)
        self._selector.register(mine, selectors.EVENT_READ, ("answer", process))
        self._selector.register(pidfd, selectors.EVENT_READ, ("death", process))
        for stream, fd in process.pipes.items():
            self._selector.register(fd, selectors.EVENT_READ, (stream, process))
        return process

    def _store_address(self) -> tuple[str, int] | None:
        """Where ranks of a backend that needs a store meet: at the driver, on this host."""
        if self.backend == "shm":
            return None
        if self._tcp_store is None:
            import torch.distributed as dist

            self._tcp_store = dist.TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=self.timeout),
            )
        return ("127.0.0.1", self._tcp_store.port)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks]

    def describe(self) -> str:
        mesh = self._mesh()
        return repr(mesh) if mesh is not None else "a mesh"

    # -- sending -----------------------------------------------------------------------------------------------------------

    def _send(self, process: _Rank, packet: wire.Packet) -> None:
        if process.alive:
            with contextlib.suppress(ConnectionError):  # its death is noticed by the receiver
                wire.send(process.connection, packet)

    def _dumps(self, obj: Any) -> wire.Packet:
        return wire.dumps(obj, self._name_of)

    def _name_of(self, obj: Any) -> Any:
        from .mesh import name_in_driver

        return name_in_driver(self, obj)

    def _object_of(self, name: Any) -> Any:
        from .mesh import object_in_driver

        return object_in_driver(self, name)

    def submit(
        self,
        function: Callable,
        arguments: tuple,
        *,
        ranks: Sequence[int] | None = None,
        region: bool = False,
        future: Future | None = None,
    ) -> Task:
        """Send `function(worker, *arguments)` to ranks (all by default)."""
        with self._lock:
            self._ready()
            targets = range(self.layout.size) if ranks is None else ranks
            if region:
                self._regions += 1
            self._numbers += 1
            task = Task(self._numbers, targets, self._regions if region else 0)
            task.future = future
            packet = self._dumps(("task", task.number, task.region, function, arguments))
            self._tasks[task.number] = task
            self._free_garbage()
            for rank in task.ranks:
                self._send(self._ranks[rank], packet)
            packet.close()
            if region and len(task.ranks) < self.layout.size:
                others = [rank for rank in range(self.layout.size) if rank not in task.ranks]
                self._numbers += 1
                idle = Task(self._numbers, others, task.region)
                self._tasks[idle.number] = idle
                packet = self._dumps(("task", idle.number, idle.region, tasks.do_nothing, ()))
                for rank in others:
                    self._send(self._ranks[rank], packet)
            return task

    def _ready(self) -> None:
        """Refuse a closed mesh, raise an error not yet reported, and wait until a recovery is over."""
        if self.closed is not None:
            raise MeshError(
                message(f"this mesh is closed: {self.closed}", where=self.describe(), remedy="make a new Mesh")
            )
        self.raise_failure()
        end = time.monotonic() + self.timeout
        while self._recovering:
            if time.monotonic() > end:
                raise MeshError(
                    message(
                        "the mesh has not recovered from the last failure",
                        got=f"ranks {self._busy()} are still busy after {self.timeout:g} s",
                        remedy="close the mesh and make a new one",
                    )
                )
            self._quiet.wait(0.1)
        if self._missing:
            self._forget_lost()

    def _busy(self) -> list[int]:
        return sorted({r for task in self._tasks.values() for r in task.ranks if r not in task.answers})

    def raise_failure(self) -> None:
        """Raise the error of a task whose caller has not seen it."""
        with self._lock:
            while self._failed:
                task = self._failed.popleft()
                if not task.reported and task.failure is not None:
                    self._report(task)

    def _report(self, task: Task) -> None:
        task.reported = True
        for other in self._failed:  # those behind it failed because it did
            other.reported = True
        assert task.failure is not None
        raise task.failure()

    def wait(self, task: Task) -> Task:
        """Wait for all answers; raises if the task failed. Ctrl-C interrupts the ranks."""
        try:
            while not task.event.wait(1.0):
                if self.closed is not None:
                    break
        except KeyboardInterrupt:
            self.interrupt()
            raise
        if task.failure is not None:
            with self._lock:
                self._report(task)
        if not task.event.is_set():
            raise MeshError(message(f"this mesh is closed: {self.closed}", remedy="make a new Mesh"))
        return task

    def in_flight(self, task: Task) -> None:
        """Note an asynchronous region, and wait for the oldest if there are too many."""
        self._flight.append(task)
        while len(self._flight) > IN_FLIGHT:
            oldest = self._flight.popleft()
            if not oldest.event.is_set():
                self.wait(oldest)

    # -- shipping ----------------------------------------------------------------------------------------------------------

    def ship(self, obj: Any, *, sources: dict[str, list[str]] | None = None) -> str:
        """Send an object to all ranks unless they have it; its content's hash."""
        packet = self._dumps(("ship", obj))
        key = wire.content_hash(packet)  # the ranks compute the same
        with self._lock:
            if key in self._packets:
                packet.close()
                return key
            self._ready()
            self._packets[key] = packet
            for process in self._ranks:
                if sources:
                    self._send(process, self._dumps(("sources", sources)))
                self._send(process, packet)
        return key

    def ship_function(self, function: Any, wrap: Callable[[Any], Any] | None = None, slot: Any = None) -> str:
        """Ship a function (wrapped by `wrap`, if given), pickling it again only if what it refers to has changed."""
        new = shipping.snapshot(function)
        holder = slot if slot is not None else function
        try:
            known = self._snapshots.get(holder)
        except TypeError:  # not weakly referable
            known, holder = None, None
        if known is not None and shipping.unchanged(known[0], new):
            return known[1]
        try:
            key = self.ship(function if wrap is None else wrap(function), sources=shipping.typed_sources(function))
        except (MeshError, KeyboardInterrupt):
            raise
        except Exception as error:
            part = shipping.unpicklable_part(function)
            raise MeshError(
                message(
                    f"{getattr(function, '__qualname__', function)!s} cannot be sent to the ranks, "
                    f"because {part or f'it cannot be pickled: {error}'}",
                    where=self.describe(),
                    remedy="pass what it needs as an argument, or make it inside the function",
                )
            ) from None
        if holder is not None:
            self._snapshots[holder] = (new, key)
        return key

    def ship_treedef(self, treedef: Any) -> str:
        key = self._hashes.get(treedef)
        if key is None:
            key = self._hashes[treedef] = self.ship(trees.pack(treedef))
        return key

    # -- values ---------------------------------------------------------------------------------------------------------------

    def new_ids(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers

    def adopt(self, value: Any, array: Any) -> None:
        """Tie a resident value to the driver's object for it: it goes when that does."""
        self.arrays[value] = array
        weakref.finalize(array, self._garbage.append, value).atexit = False

    def _free_garbage(self) -> None:
        values = []
        while self._garbage:
            values.append(self._garbage.popleft())
        if values:
            for value in values:
                self._missing.pop(value, None)
            packet = self._dumps(("free", values))
            for process in self._ranks:
                self._send(process, packet)

    def restore(self, value: Any, array: Any) -> None:
        """Give a value to the ranks that were replaced since it was made, from a rank that has the same shard."""
        missing = self._missing.get(value)
        if not missing:
            return
        spec = array.spec
        for rank in sorted(missing):
            twins = [r for r in range(self.layout.size) if self.layout.owner(spec, r) == self.layout.owner(spec, rank)]
            donors = [r for r in twins if r not in missing]
            if not donors:
                raise PeerLost(
                    message(
                        f"a value on this mesh was lost with rank {rank}, which alone held a shard of it",
                        got=f"{spec}, shape {tuple(array.shape)}",
                        where=self.describe(),
                        remedy="restore it from a checkpoint, or compute it again",
                    ),
                    rank,
                )
            shard = self.wait(self.submit(tasks.fetch_value, (value,), ranks=donors[:1])).values()[0]
            self.wait(self.submit(tasks.set_values, ([(value, shard, spec)],), ranks=[rank]))
        self._missing.pop(value, None)

    def _forget_lost(self) -> None:
        for value in [value for value in self._missing if value not in self.arrays]:
            self._missing.pop(value)

    # -- interrupting ------------------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Ctrl-C: stop what the ranks do, and wait until they have stopped; a second Ctrl-C kills them."""
        with self._lock:
            if not self._busy():
                return
            self._fail("interrupted by the user")
        try:
            while True:
                with self._lock:
                    self._signal_busy()
                    if self._quiet.wait_for(lambda: not self._recovering, 1.0):
                        break
        except KeyboardInterrupt:
            count = len(self.arrays)
            self._kill()
            self.closed = f"killed by a second Ctrl-C; {count} values that were on it are lost"
            raise KeyboardInterrupt(f"mesh killed: {count} values that were on its ranks are lost") from None
        with self._lock:
            for task in self._failed:
                task.reported = True
            self._failed.clear()

    def _signal_busy(self) -> None:
        for rank in self._busy():
            process = self._ranks[rank]
            if process.alive:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pidfd, signal.SIGINT)

    # -- the receiving thread -----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while self.closed is None:
            due = self._collator.tick()
            waiting = 0.1 if self._recovering else due
            for key, _ in self._selector.select(waiting):
                kind, process = key.data
                if self.closed is not None:
                    return
                if kind == "wake":
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                elif kind == "answer":
                    self._take_answers(process)
                elif kind == "death":
                    self._died(process)
                else:
                    self._read_pipe(process, kind)
            if self._recovering:
                self._push()

    def _read_pipe(self, process: _Rank, stream: str) -> None:
        fd = process.pipes.get(stream)
        while fd is not None:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(fd)
                os.close(fd)
                del process.pipes[stream]
                return
            self._collator.feed(process.rank, stream, data)

    def _take_answers(self, process: _Rank) -> None:
        packets = process.receiver.receive(block=False)
        if packets is None:
            if process.alive and select.select([process.pidfd], [], [], 0.2)[0]:
                self._died(process)
            elif process.alive:
                self._selector.unregister(process.connection)
            return
        for packet in packets:
            for stream in list(process.pipes):
                self._read_pipe(process, stream)
            try:
                number, status, value = wire.loads(packet, self._object_of)
            except BaseException as error:
                from .failure import capture

                number, status, value = None, "failed", capture(error)
            packet.close()
            self._answer(process.rank, number, status, value)

    def _answer(self, rank: int, number: int | None, status: str, value: Any) -> None:
        with self._lock:
            if status == "ready":
                self._ranks[rank].ready, self._stillborn = True, 0
                return
            if number is None:  # a task that the rank could not even read: the oldest it has not answered
                waiting = [
                    n for n, task in sorted(self._tasks.items()) if rank in task.ranks and rank not in task.answers
                ]
                if not waiting:
                    return
                number = waiting[0]
            task = self._tasks.get(number)
            if task is None:
                return
            task.answers[rank] = (status, value)
            if status != "ok":
                self._fail(None)
            if len(task.answers) == len(task.ranks) and not self._recovering:
                self._finish(task)
            elif self._recovering:
                self._push()

    def _finish(self, task: Task) -> None:
        self._tasks.pop(task.number, None)
        if task.region:
            for process in self._ranks:
                for stream in list(process.pipes):
                    self._read_pipe(process, stream)
            self._collator.flush()
            self._collator.begin()
        if task.failure is not None:
            self._failed.append(task)
        if task.future is not None:
            if task.failure is not None:
                task.reported = True
                task.future.set_exception(task.failure())
            else:
                task.future.set_result(task.answers[task.ranks[0]][1])
        task.event.set()

    # -- failure ---------------------------------------------------------------------------------------------------------------------

    def _fail(self, why: str | None) -> None:
        """Begin to recover: every rank gives up, nothing new is sent."""
        if self._recovering:
            return
        self._recovering = True
        self._failed_at = time.monotonic()
        if why is not None:
            self.arena.abort(why)
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"!")

    def _died(self, process: _Rank) -> None:
        with self._lock:
            if not process.alive or self._closing:
                return
            while True:  # what it said before it died counts
                packets = process.receiver.receive(block=False)
                if not packets:
                    break
            process.alive = False
            code = self._zygote.exit_code(process.pid)
            how = (
                "died"
                if code is None
                else f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"exited with code {code}"
            )
            self._lost[process.rank] = how
            self._stillborn += not process.ready
            for stream in list(process.pipes):
                self._read_pipe(process, stream)
            for fd in (process.connection, process.pidfd, *process.pipes.values()):
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(fd)
            process.connection.close()
            self._fail(f"rank {process.rank} {how}")
            self.arena.abort(f"rank {process.rank} {how}")
            for task in self._tasks.values():
                if process.rank in task.ranks:
                    task.answers.setdefault(process.rank, ("lost", None))
            self._push()

    def _push(self) -> None:
        """Carry the recovery on: report what is known after the grace, and begin anew once all are quiet."""
        with self._lock:
            if not self._recovering:
                return
            busy = self._busy()
            if busy and time.monotonic() - self._failed_at < GRACE_SECONDS:
                return
            failures = {
                rank: value
                for task in self._tasks.values()
                for rank, (status, value) in task.answers.items()
                if status == "failed" and isinstance(value, Failure)
            }
            lost = dict(self._lost)
            where = self.describe()
            self._pending_failure = lambda: combine(failures, lost, where)
            for task in sorted(self._tasks.values(), key=lambda task: task.number):
                complete = len(task.answers) == len(task.ranks)
                fine = complete and all(status == "ok" for status, _ in task.answers.values())
                if fine:
                    self._finish(task)
                elif not task.event.is_set() and (complete or not busy or failures or lost):
                    task.failure = self._pending_failure
                    if complete:
                        self._finish(task)
                    else:
                        # The caller learns it now; the rank that is still busy may take its time.
                        self._failed.append(task)
                        task.event.set()
            if busy:
                self._signal_busy()
                return
            self._tasks.clear()
            self._begin_anew()

    def _begin_anew(self) -> None:
        if self._stillborn > 2 * self.layout.size:
            self.closed = "its ranks die before they are ready; their error output says why"
            self._quiet.notify_all()
            return
        self.generation += 1
        self.arena.clear(self.generation)
        self._flight.clear()
        packet = self._dumps(("renew", self.generation))
        for process in list(self._ranks):
            if process.alive:
                self._send(process, packet)
            else:
                os.close(process.pidfd)
                for fd in process.pipes.values():
                    os.close(fd)
                fresh = self._ranks[process.rank] = self._fork(process.rank)
                for shipped in self._packets.values():
                    self._send(fresh, shipped)
                for value in list(self.arrays):
                    self._missing.setdefault(value, set()).add(process.rank)
        self._lost.clear()
        self._recovering = False
        self._quiet.notify_all()

    # -- the end -----------------------------------------------------------------------------------------------------------------------

    def close(self, why: str = "Mesh.close() was called") -> None:
        """Stop the ranks; raises an error that nobody has seen yet."""
        if self.closed is not None:
            return
        _open_sessions.discard(self)
        failed: BaseException | None = None
        try:
            for task in list(self._tasks.values()):
                if not self._recovering:
                    task.event.wait(self.timeout)
            self.raise_failure()
        except BaseException as error:
            failed = error
        with self._lock:
            self._closing = True
            packet = self._dumps(("exit", None))
            for process in self._ranks:
                self._send(process, packet)
        end = time.monotonic() + CLOSE_SECONDS
        for process in self._ranks:
            if process.alive:
                select.select([process.pidfd], [], [], max(0.0, end - time.monotonic()))
        self.closed = why
        self._kill()
        if failed is not None:
            raise failed

    def _kill(self) -> None:
        self.closed = self.closed or "killed"
        for process in self._ranks:
            with contextlib.suppress(ProcessLookupError, OSError):
                signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"!")
        thread = getattr(self, "_thread", None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        for process in self._ranks:
            for stream in list(process.pipes):
                with contextlib.suppress(OSError, KeyError, ValueError):
                    self._read_pipe(process, stream)
            select.select([process.pidfd], [], [], 1.0)
            process.connection.close()
            for fd in (process.pidfd, *process.pipes.values()):
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._collator.flush()
        for fd in (self._wake_read, self._wake_write, self._arena_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._selector.close()
        for packet in self._packets.values():
            packet.close()
        for task in self._tasks.values():
            task.event.set()


_open_sessions: set[DriverSession] = set()


def close_all() -> None:
    """At exit: end every mesh that is still open, and show what nobody has seen."""
    for session in list(_open_sessions):
        try:
            session.close("the driver exited")
        except BaseException:
            traceback.print_exc()


def _print(stream: str, text: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    with contextlib.suppress(Exception):  # a closed stream must not stop the receiving thread
        target.write(text)
        target.flush()


class ResidentSource:
    """A value that lives on the driver's ranks under a name; see `array.Source`."""

    def __init__(self, session: DriverSession, value: Any, task: Task | None, meta: Callable[[], tuple]):
        self._session, self.value, self._task, self._meta = session, value, task, meta
        self._known: tuple[tuple[int, ...], torch.dtype, P, bool] | None = None

    def settle(self) -> tuple[tuple[int, ...], torch.dtype, P, bool]:
        """(shape, dtype, spec, frozen), once the call that makes the value is over."""
        if self._known is None:
            if self._task is not None:
                self._session.wait(self._task)
            self._known = self._meta()
        return self._known

    def shape(self) -> tuple[int, ...]:
        return self.settle()[0]

    def dtype(self) -> torch.dtype:
        return self.settle()[1]

    def spec(self) -> P:
        return self.settle()[2]

    def local(self) -> torch.Tensor:
        raise MeshError(
            message("the driver is not a rank and holds no shard", remedy="use .shards() for all of them, or .full()")
        )

    def _fetch(self, ranks: Sequence[int]) -> list[torch.Tensor]:
        self.settle()
        session = self._session
        session.restore(self.value, session.arrays[self.value])
        return session.wait(session.submit(tasks.fetch_value, (self.value,), ranks=ranks)).values()

    def shards(self) -> list[torch.Tensor]:
        return self._fetch(range(self._session.layout.size))

    def full(self) -> torch.Tensor:
        layout, spec = self._session.layout, self.spec()
        owners = sorted({layout.owner(spec, rank) for rank in range(layout.size)})
        found: list[Any] = [None] * layout.size
        for rank, shard in zip(owners, self._fetch(owners), strict=True):
            found[rank] = shard
        return layout.join(found, spec)
