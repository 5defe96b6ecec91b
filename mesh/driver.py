"""The driver's side of a mesh: it sends tasks to the ranks, waits for answers, and learns at once of what goes wrong.

The user's thread sends and waits; one thread per mesh listens (`Receiving`). Calls are asynchronous up to `IN_FLIGHT`;
a failure surfaces at the call, or at the next use of the mesh or of a value. It raises the arena's abort flag, so that
no rank waits in vain; when all ranks that live have fallen quiet, dead ones are replaced and the next *generation*
begins, in which nothing of the failed region is known. Invariant: every rank is told of every task, or none is.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from ..kernels import arena as arena_module
from ..kernels.arena import Arena
from ..kernels.errors import MeshError, message
from . import naming, tasks, wire
from .array import Array
from .failure import Failure, capture, combine
from .interrupts import uninterrupted
from .pending import Task
from .ranks import Rank, pickled_factory
from .receiving import Receiving
from .resident import Values
from .shipped import ShippedObjects
from .shipping import unpicklable_among
from .spec import Layout

IN_FLIGHT = 2
GRACE_SECONDS = 0.5  # for ranks to give up by themselves once one has failed
INTERRUPT_SECONDS = 0.3  # for calls under way to end by themselves after Ctrl-C
CLOSE_SECONDS = 2.0


class DriverSession:
    """The ranks of one mesh and the traffic with them.

    Args:
        mesh: whose ranks they are; only its finalizer keeps a session alive longer than its mesh.
        layout: the axes.
        backend, threads, seed, timeout: as given to `Mesh`.

    Attributes:
        values, shipped: what lives on the ranks.
        closed: why the mesh is closed, None while it is open.
    """

    def __init__(self, mesh: Any, layout: Layout, *, backend: str, threads: int, seed: int, timeout: float):
        self._mesh, self.mesh_type = weakref.ref(mesh), type(mesh)
        self.layout, self.backend, self.timeout = layout, backend, timeout
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.values = Values(self)
        self.whole = (type(mesh), Array)  # types that travel as names
        self.shipped = ShippedObjects(self, self.whole)
        self.closed: str | None = None
        self._closing = False
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._regions = 0
        self._tasks: dict[int, Task] = {}  # those that some rank has not answered
        self._unreported: deque[Task] = deque()
        self._flight: deque[Task] = deque()
        self._nothing = wire.dumps((tasks.do_nothing, ()))
        # A failure under way: since when, who died of it, whether the user wanted it.
        self._recovering = self._interrupted = False
        self._failed_at = 0.0
        self._lost: dict[int, str] = {}
        self._stillborn = 0  # ranks in a row that died before they were ready

        self.generation = 1
        self._arena_fd = arena_module.create(layout.size)
        self.arena: Arena | None = Arena(self._arena_fd, layout.size, layout.size)
        self.arena.clear(self.generation)
        # Where ranks of a backend that needs a store meet. A file without a name, and no TCPStore: that one asks the
        # name service about every connection, which takes seconds where none answers.
        self._store_fd = os.memfd_create("spmd-store", os.MFD_CLOEXEC)
        self._request = {
            "axes": layout.sizes,
            "backend": backend,
            "factory": pickled_factory(backend),
            "threads": threads,
            "seed": seed,
            "timeout": timeout,
            "store": f"/proc/{os.getpid()}/fd/{self._store_fd}",
            "cwd": os.getcwd(),
            "path": list(sys.path),
            "argv": list(sys.argv),
            "environ": dict(os.environ),
        }
        self._receiving = Receiving(self, layout.size)
        self._ranks: list[Rank] = []
        try:
            for rank in range(layout.size):
                self._ranks.append(self._start(rank))
        except BaseException:
            self._shut("it could not be made")
            raise
        self._receiving.start()
        if not _open_sessions:
            # After the zygote's own hook was registered, so that this runs before it.
            atexit.unregister(close_all)
            atexit.register(close_all)
        _open_sessions.add(self)

    def _start(self, rank: int) -> Rank:
        started = Rank(rank, {**self._request, "generation": self.generation}, self._arena_fd)
        self._receiving.add(started)
        return started

    @property
    def mesh(self) -> Any:
        return self._mesh()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def describe(self) -> str:
        mesh = self._mesh()
        return repr(mesh) if mesh is not None else "a mesh"

    def new_number(self) -> int:
        """A number that no task and no output of this mesh has had."""
        return next(self._numbers)

    def dumps(self, obj: Any, names: list[Any] | None = None) -> wire.Packet:
        """Pickle for the ranks; raises `Unsendable`, or what is wrong with a value in it.

        Args:
            names: takes the names that stand for what stays here.
        """
        raised: list[BaseException] = []

        def name_of(one: Any) -> Any:
            try:
                name = naming.name_in_driver(self, one)
            except BaseException as error:
                raised.append(error)
                raise
            if name is not None and names is not None:
                names.append(name)
            return name

        try:
            return wire.dumps(obj, name_of)
        except Exception as error:
            if raised:
                raise raised[0] from raised[0].__cause__
            raise wire.Unsendable(f"{type(error).__name__}: {error}") from None

    # -- sending -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        function: Callable,
        arguments: tuple,
        *,
        ranks: Sequence[int] | None = None,
        region: bool = False,
        future: Future | None = None,
        parts: Callable[[], Iterable[tuple[str, Any]]] = tuple,
    ) -> Task:
        """Send `function(worker, *arguments)` to ranks (all by default).

        Args:
            region: the other ranks pass through the region too, so that nobody waits for them in vain.
            future: takes the first rank's result, or the failure.
            parts: the arguments and what to call them, asked if one of them cannot be sent.
        """
        try:
            packet = self.dumps((function, arguments))
        except wire.Unsendable as error:
            found = unpicklable_among(parts(), self.whole)
            raise MeshError(
                message(
                    f"a call cannot be sent to the ranks, because of {found or f'an argument: {error}'}",
                    where=self.describe(),
                    remedy="pass what it is made of, or make it inside the function",
                )
            ) from None
        try:
            with self.lock:
                self.ready()
                everyone = range(self.layout.size)
                chosen = tuple(everyone if ranks is None else ranks)
                self._regions += region
                task = Task(next(self._numbers), chosen, self._regions if region else 0, future)
                with uninterrupted():
                    # What nothing here refers to any more goes with the task.
                    unused = self.values.garbage(), self.shipped.unused()
                    others = tuple(rank for rank in everyone if rank not in chosen)
                    self._send_task(task, packet, unused)
                    if others and region:
                        self._send_task(Task(next(self._numbers), others, task.region), self._nothing, unused)
                    elif others and any(unused):
                        self.tell(("free", *unused), ranks=others)
                return task
        finally:
            packet.close()

    def _send_task(self, task: Task, packet: wire.Packet, unused: tuple[Any, Any]) -> None:
        self._tasks[task.number] = task
        self.tell(("task", task.number, task.region, *unused), packet, task.ranks)

    def tell(self, head: tuple, packet: wire.Packet | None = None, ranks: Iterable[int] | None = None) -> None:
        """Send something that needs no answer to ranks (all by default)."""
        packet = wire.Packet(b"") if packet is None else packet
        packet.head = pickle.dumps(head)
        with self.lock, uninterrupted():
            for rank in range(len(self._ranks)) if ranks is None else ranks:
                if not self._ranks[rank].send(packet):
                    self._receiving.when_writable(self._ranks[rank])

    def ready(self) -> None:
        """Wait until the ranks take tasks; raise an error that nobody has seen, or that the mesh is closed."""
        if os.getpid() != self._pid:
            raise MeshError(message("this mesh belongs to the process that this one was forked from"))
        if threading.current_thread() is self._receiving:
            raise MeshError(
                message("a mesh cannot be used in a callback of its futures", remedy="use the result in another thread")
            )
        end = time.monotonic() + self.timeout
        with self.lock:
            while True:
                self.check_open()
                self.raise_failure()
                if not self._recovering:
                    return
                if time.monotonic() > end:
                    raise MeshError(
                        message(
                            "the mesh has not recovered from the last failure",
                            got=f"ranks {self._busy()} are still busy after {self.timeout:g} s",
                            where=self.describe(),
                            remedy="close the mesh and make a new one",
                        )
                    )
                self._wait_for_change(0.1)

    def check_open(self) -> None:
        if self.closed is not None:
            raise MeshError(
                message(f"this mesh is closed: {self.closed}", where=self.describe(), remedy="make a new Mesh")
            )

    def _wait_for_change(self, seconds: float) -> None:
        try:
            self._changed.wait(seconds)
        except KeyboardInterrupt:
            self.interrupt()
            raise

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, task: Task) -> Task:
        """Wait until a task is settled; raises its failure. Ctrl-C interrupts the ranks."""
        try:
            task.settled.wait()
        except KeyboardInterrupt:
            self.interrupt()
            raise
        if task.failure is not None:
            with self.lock:
                self._report(task)
        return task

    def in_flight(self, task: Task) -> None:
        """Note an asynchronous region, and wait for the oldest if there are too many."""
        self._flight.append(task)
        while len(self._flight) > IN_FLIGHT:
            oldest = self._flight.popleft()
            if not oldest.settled.is_set():
                self.wait(oldest)

    def raise_failure(self) -> None:
        """Raise the failure of a task whose caller has not seen it."""
        with self.lock:
            while self._unreported:
                task = self._unreported.popleft()
                if not task.reported:
                    self._report(task)

    def _report(self, task: Task) -> None:
        task.reported = True
        for other in self._unreported:
            # What failed in one generation failed for one reason.
            other.reported = other.reported or other.generation == task.generation is not None
        assert task.failure is not None
        raise task.failure()

    def interrupt(self) -> None:
        """Ctrl-C: let what is about to end do so, stop the rest, and wait for that; a second Ctrl-C kills the ranks."""
        try:
            with self.lock:
                if self._changed.wait_for(lambda: not self._tasks or self.closed, INTERRUPT_SECONDS):
                    return
                self._interrupted = not self._recovering  # else something has failed, and is to be told
                self._begin_recovery("interrupted by the user")
                while self._recovering and self.closed is None:
                    self._signal_busy()
                    self._changed.wait(1.0)
        except KeyboardInterrupt:
            count = len(self.values.arrays)
            self._shut(f"killed by a second Ctrl-C; {count} values that were on it are lost")
            raise KeyboardInterrupt(f"mesh killed: {count} values that were on its ranks are lost") from None

    def _signal_busy(self) -> None:
        for rank in self._busy():
            self._ranks[rank].signal(signal.SIGINT)

    def _busy(self) -> list[int]:
        return sorted({rank for task in self._tasks.values() for rank in task.busy()})

    # -- what the receiving thread reports -----------------------------------------------------------------------------

    @property
    def restless(self) -> bool:
        return self._recovering

    def tick(self) -> None:
        if self._recovering:
            self._recover()

    def flush(self, rank: Rank) -> bool:
        with self.lock:
            return rank.flush()

    def answered(self, rank: Rank, packet: wire.Packet) -> None:
        kind, number = pickle.loads(packet.head)
        try:
            value = wire.loads(packet, lambda name: naming.object_in_driver(self, name)) if packet.data else None
        except BaseException as error:
            kind, value = "failed", capture(error)
        finally:
            packet.close()
        with self.lock:
            if kind == "ready":
                rank.ready, self._stillborn = True, 0
                return
            task = self._tasks.get(number)
            if task is None:
                return
            task.answers[rank.rank] = (kind, value)
            own_fault = not task.region and isinstance(value, Failure) and value.kind == "error"
            if kind != "ok" and not own_fault:
                self._begin_recovery(None)
            if self._recovering:
                self._recover()
            elif task.complete:
                failures, where = task.failures(), self.describe()
                self._settle(task, (lambda: combine(failures, {}, where)) if failures else None)

    def died(self, rank: Rank) -> None:
        how = rank.end_text()
        with self.lock:
            rank.alive = False
            self._receiving.remove(rank)
            if self._closing:
                return
            self._lost[rank.rank] = how
            self._stillborn += not rank.ready
            for task in self._tasks.values():
                if rank.rank in task.ranks:
                    task.answers.setdefault(rank.rank, ("lost", None))
            self._begin_recovery(f"rank {rank.rank} {how}")
            self._recover()

    def broke(self, error: BaseException) -> None:
        self._shut(f"listening to its ranks failed: {type(error).__name__}: {error}")

    # -- recovery -----------------------------------------------------------------------------------------------------

    def _begin_recovery(self, why: str | None) -> None:
        """Make every rank give up (`why` is None where one already does so), and hold new tasks back."""
        if why is not None and self.arena is not None:
            self.arena.abort(why)
        if not self._recovering:
            self._recovering, self._failed_at = True, time.monotonic()
            self._receiving.wake()

    def _recover(self) -> None:
        """Carry the recovery on: report what is known after the grace, and begin anew once all ranks are quiet."""
        with self.lock:
            if not self._recovering or self.closed is not None:
                return
            busy = self._busy()
            if busy and time.monotonic() - self._failed_at < GRACE_SECONDS:
                return
            failure = self._failure()
            for task in sorted(self._tasks.values(), key=lambda task: task.number):
                if task.settled.is_set():
                    continue
                if task.fine:
                    self._settle(task)
                elif task.complete or not busy or not self._interrupted:
                    # The caller learns it now; a rank that is still busy may take its time.
                    self._settle(task, failure)
            if busy:
                self._signal_busy()
                return
            self._tasks.clear()
            self._begin_anew()

    def _failure(self) -> Callable[[], BaseException]:
        failures = {rank: failure for task in self._tasks.values() for rank, failure in task.failures().items()}
        lost, where, interrupted = dict(self._lost), self.describe(), self._interrupted
        return lambda: combine(failures, lost, where, interrupted=interrupted)

    def _settle(self, task: Task, failure: Callable[[], BaseException] | None = None) -> None:
        if task.complete:
            self._tasks.pop(task.number, None)
        if task.region:
            self._receiving.end_of_region()
        task.generation = self.generation if self._recovering else None
        task.settle(failure)
        if failure is not None and not self._interrupted:
            self._unreported.append(task)
        self._changed.notify_all()

    def _begin_anew(self) -> None:
        if self._stillborn > 2 * self.layout.size:
            self._shut("its ranks die before they are ready; their error output says why")
            return
        assert self.arena is not None
        self.generation += 1
        self.arena.clear(self.generation)
        self._flight.clear()
        for rank, process in enumerate(self._ranks):
            if process.alive:
                self.tell(("renew", self.generation), ranks=[rank])
            else:
                process.close()
                self._ranks[rank] = self._start(rank)
                for head, packet in self.shipped.again():
                    self.tell(head, packet, [rank])
                self.values.lost_on(rank)
        self._lost.clear()
        self._recovering = self._interrupted = False
        self._changed.notify_all()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, why: str = "Mesh.close() was called") -> None:
        """Stop the ranks when they are done; raises an error that nobody has seen yet."""
        if self.closed is not None or os.getpid() != self._pid:
            return
        _open_sessions.discard(self)
        failed: BaseException | None = None
        try:
            for task in list(self._tasks.values()):
                task.settled.wait(self.timeout)
            self.raise_failure()
        except BaseException as error:
            failed = error
        with self.lock:
            self._closing = True
            self.tell(("exit",))
        end = time.monotonic() + CLOSE_SECONDS
        for rank in self._ranks:
            rank.ended(max(0.0, end - time.monotonic()))
        self._shut(why)
        if failed is not None:
            raise failed

    def _shut(self, why: str) -> None:
        """Kill what still runs, and give everything back."""
        if self.closed is not None:
            return
        self.closed = why
        _open_sessions.discard(self)
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        self._receiving.close(self._ranks)
        for rank in self._ranks:
            rank.ended(1.0)
            rank.close()
        self.shipped.close()
        os.close(self._arena_fd)
        os.close(self._store_fd)
        self.arena = None
        with self.lock:
            for task in self._tasks.values():
                if not task.settled.is_set():
                    task.settle(lambda: MeshError(message(f"this mesh is closed: {why}", remedy="make a new Mesh")))
            self._changed.notify_all()


_open_sessions: set[DriverSession] = set()


def close_quietly(session: DriverSession) -> None:
    """Close a session whose mesh is gone, and show what nobody has seen; called wherever garbage is collected."""
    if isinstance(threading.current_thread(), Receiving):
        # That thread is needed for closing; it can't wait here.
        threading.Thread(target=close_quietly, args=(session,), daemon=True).start()
        return
    try:
        session.close("nothing refers to it any more")
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()


def close_all() -> None:
    """At exit: end every mesh that is still open, and show what nobody has seen."""
    for session in list(_open_sessions):
        try:
            session.close("the driver exited")
        except BaseException:
            traceback.print_exc()
