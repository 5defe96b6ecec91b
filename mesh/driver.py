"""The driver's side of a mesh: it sends tasks to the ranks and waits for their answers.

The user's thread sends and waits; one thread per mesh listens (`Receiving`), and what it hears goes to `Recovery`.
Calls are asynchronous up to a few; a failure surfaces at the call, or at the next use of the mesh or of a value.
Invariant: every rank is told of every task that is meant for it, or none is.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from ..kernels.errors import MeshError, message
from . import naming, tasks, wire
from .array import Array
from .interrupts import uninterrupted
from .notebook import shorten
from .pending import Pending, Task
from .ranks import Ranks
from .receiving import Receiving
from .recovery import Recovery
from .resident import Values
from .shipped import ShippedObjects
from .shipping import unpicklable_among
from .spec import Layout

IN_FLIGHT = 2
BRIEF_IN_FLIGHT, BRIEF_SECONDS = 8, 0.02  # calls that are over soon: more of them, and Ctrl-C still finds them ended
INTERRUPT_SECONDS = 0.3  # for calls under way to end by themselves after Ctrl-C
CLOSE_SECONDS = 2.0


class DriverSession:
    """The ranks of one mesh and the traffic with them.

    Args:
        mesh: whose ranks they are; only its finalizer keeps a session alive longer than its mesh.
        layout: the axes.
        backend, device, threads, seed, timeout: as given to `Mesh`.
        pinned: torch threads of a rank while it computes under `shards=`.

    Attributes:
        values, shipped: what lives on the ranks.
        changed: notified when a task is settled, a recovery ends, or the mesh is closed.
        closed: why the mesh is closed, None while it is open.
    """

    def __init__(
        self,
        mesh: Any,
        layout: Layout,
        *,
        backend: str,
        device: str,
        threads: int,
        pinned: int,
        seed: int,
        timeout: float,
    ):
        self._mesh, self.mesh_type = weakref.ref(mesh), type(mesh)
        self.layout, self.backend, self.timeout = layout, backend, timeout
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.values = Values(self)
        self.whole = (type(mesh), Array)  # types that travel as names
        self.shipped = ShippedObjects(self, self.whole)
        self.closed: str | None = None
        self.closing = False
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._regions = 0
        self._everyone = tuple(range(layout.size))
        self.pending = Pending()
        self._flight: deque[Task] = deque()
        self._most_in_flight = IN_FLIGHT
        self._nothing = wire.dumps((tasks.do_nothing, ()))
        self._recovery = Recovery(self)
        self.receiving = Receiving(self._recovery, layout)
        options = {
            "backend": backend,
            "device": device,
            "threads": threads,
            "pinned": pinned,
            "seed": seed,
            "timeout": timeout,
        }
        self.ranks = Ranks(layout, options, self.receiving.add)
        try:
            self.ranks.start(layout.size)
        except BaseException:
            self.shut("it could not be made")
            raise
        self.receiving.start()
        if not _open_sessions:
            # After the zygote's own hook was registered, so that this runs before it.
            atexit.unregister(close_all)
            atexit.register(close_all)
        _open_sessions.add(self)

    @property
    def mesh(self) -> Any:
        return self._mesh()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks.all]

    def describe(self) -> str:
        mesh = self._mesh()
        return mesh.describe() if mesh is not None else "a mesh"

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
        told: dict[int, bytes] | None = None,
        needs: Iterable[Any] = (),
        parts: Callable[[], Iterable[tuple[str, Any]]] = tuple,
    ) -> Task:
        """Send `function(worker, *arguments)` to ranks (all by default).

        Args:
            region: the other ranks pass through the region too, so that nobody waits for them in vain.
            future: takes the first rank's result, or the failure.
            told: what the ranks last said of results of the program that this calls.
            needs: the Arrays whose names are among the arguments.
            parts: the arguments and what to call them, asked if one of them cannot be sent.
        """
        chosen = self._everyone if ranks is None else tuple(ranks)
        others = tuple(rank for rank in self._everyone if rank not in chosen)
        while True:
            generation = self._with(needs)
            packet = self._packed(function, arguments, parts)
            try:
                with self.lock:
                    self.ready()
                    if generation != self.ranks.generation:
                        continue
                    self._regions += region
                    task = Task(next(self._numbers), chosen, self._regions if region else 0, future, told)
                    with uninterrupted():
                        # What nothing here refers to any more goes with the task.
                        unused = self.values.garbage(), self.shipped.unused()
                        self._send_task("task", task, packet, unused)
                        if others and region:
                            rest = Task(next(self._numbers), others, task.region)
                            self._send_task("task", rest, self._nothing, unused)
                        elif others and any(unused):
                            self.tell(("free", *unused), ranks=others)
                    return task
            finally:
                packet.close()

    def submit_again(self, arguments: tuple, *, told: dict[int, bytes], needs: Iterable[Any]) -> Task:
        """`submit` of a region to all ranks, quickly: `tasks.call_again` with numbers, strings and names of values."""
        packet = wire.Packet(pickle.dumps(arguments))
        while True:
            generation = self._with(needs)
            with self.lock:
                self.ready()
                if generation != self.ranks.generation:
                    continue
                self._regions += 1
                task = Task(next(self._numbers), self._everyone, self._regions, None, told)
                with uninterrupted():
                    self._send_task("again", task, packet, (self.values.garbage(), self.shipped.unused()))
                return task

    def _with(self, needs: Iterable[Any]) -> int:
        """Have values on all ranks, also on those that were replaced; the generation in which they are."""
        self.ready()
        generation = self.ranks.generation
        for array in needs:
            self.values.restore(array)
        return generation

    def _packed(
        self, function: Callable, arguments: tuple, parts: Callable[[], Iterable[tuple[str, Any]]]
    ) -> wire.Packet:
        try:
            return self.dumps((function, arguments))
        except wire.Unsendable as error:
            found = unpicklable_among(parts(), self.whole)
            raise MeshError(
                message(
                    f"a call cannot be sent to the ranks, because of {found or f'an argument: {error}'}",
                    where=self.describe(),
                    remedy="pass what it is made of, or make it inside the function",
                )
            ) from None

    def _send_task(self, kind: str, task: Task, packet: wire.Packet, unused: tuple[Any, Any]) -> None:
        self.pending.tasks[task.number] = task
        self.tell((kind, task.number, task.region, *unused), packet, task.ranks)

    def tell(self, head: tuple, packet: wire.Packet | None = None, ranks: Iterable[int] | None = None) -> None:
        """Send something that needs no answer to ranks (all by default)."""
        packet = wire.Packet(b"") if packet is None else packet
        packet.head = pickle.dumps(head)
        parts = wire.frame(packet)
        with self.lock, uninterrupted():
            for rank in self.ranks.all if ranks is None else [self.ranks.all[rank] for rank in ranks]:
                if not rank.send(packet, parts):
                    self.receiving.when_writable(rank)

    def ready(self) -> None:
        """Wait until the ranks take tasks; raise an error that nobody has seen, or that the mesh is closed."""
        if os.getpid() != self._pid:
            raise MeshError(message("this mesh belongs to the process that this one was forked from"))
        if threading.current_thread() is self.receiving:
            raise MeshError(
                message("a mesh cannot be used in a callback of its futures", remedy="use the result in another thread")
            )
        end = time.monotonic() + self.timeout
        with self.lock:
            while True:
                self.check_open()
                self.pending.raise_unseen()
                if not self._recovery.under_way and self.ranks.all_run():  # else that is about to be noticed
                    return
                if time.monotonic() > end:
                    raise MeshError(
                        message(
                            "the mesh has not recovered from the last failure",
                            got=f"ranks {sorted(self.pending.busy())} are still busy after {self.timeout:g} s",
                            where=self.describe(),
                            remedy="close the mesh and make a new one",
                        )
                    )
                self._interruptibly(lambda: self.changed.wait(0.1))

    def check_open(self) -> None:
        if self.closed is not None:
            raise MeshError(
                message(f"this mesh is closed: {self.closed}", where=self.describe(), remedy="make a new Mesh")
            )

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, task: Task) -> Task:
        """Wait until a task is settled; raises its failure. Ctrl-C interrupts the ranks."""
        self._interruptibly(task.settled.wait)
        if task.failure is not None:
            with self.lock:
                self.pending.report(task)
        return task

    def in_flight(self, task: Task) -> None:
        """Note an asynchronous region, and wait for the oldest if there are too many."""
        if self._flight and self._flight[-1].settled.is_set():
            self._flight.clear()
            self._most_in_flight = IN_FLIGHT
        self._flight.append(task)
        while len(self._flight) > self._most_in_flight:
            oldest = self._flight.popleft()
            if not oldest.settled.is_set():
                self.wait(oldest)
            brief = oldest.seconds < BRIEF_SECONDS
            self._most_in_flight = min(self._most_in_flight + 1, BRIEF_IN_FLIGHT) if brief else IN_FLIGHT

    def raise_failure(self) -> None:
        """Raise an error that nobody has seen."""
        with self.lock:
            self.pending.raise_unseen()

    def _interruptibly(self, wait: Callable[[], Any]) -> None:
        try:
            wait()
        except KeyboardInterrupt as error:
            self._interrupt()
            shorten(error)
            raise

    def _interrupt(self) -> None:
        """Ctrl-C: let what is about to end do so, stop the rest, and wait for that; a second Ctrl-C kills the ranks."""
        recovery = self._recovery
        self.pending.note_failure()
        try:
            with self.lock:
                if self.changed.wait_for(lambda: not self.pending.tasks or self.closed, INTERRUPT_SECONDS):
                    return
                recovery.interrupted = not recovery.under_way  # else something has failed, and is to be told
                recovery.begin("interrupted by the user")
                while recovery.under_way and self.closed is None:
                    recovery.signal_busy()
                    self.changed.wait(1.0)
        except KeyboardInterrupt:
            count = len(self.values.arrays)
            self.shut(f"killed by a second Ctrl-C; {count} values that were on it are lost")
            raise KeyboardInterrupt(f"mesh killed: {count} values that were on its ranks are lost") from None

    def reload(self, names: Sequence[str]) -> list[str]:
        """Load modules again that have changed on disk, here and on the ranks; raises what one of them raises."""
        self.ready()
        done = self.shipped.modules.reload(names)
        lists = self.wait(self.submit(tasks.reload_modules, (list(names) + done,), region=True)).values()
        with self.lock:
            self.shipped.read_anew()
        return list(dict.fromkeys([*done, *(name for names in lists for name in names)]))

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, why: str = "Mesh.close() was called") -> None:
        """Stop the ranks when they are done; raises an error that nobody has seen yet."""
        if self.closed is not None or os.getpid() != self._pid:
            return
        _open_sessions.discard(self)
        failed: BaseException | None = None
        try:
            for task in list(self.pending.tasks.values()):
                task.settled.wait(self.timeout)
            self.raise_failure()
        except BaseException as error:
            failed = error
        with self.lock:
            self.closing = True
            self.tell(("exit",))
        end = time.monotonic() + CLOSE_SECONDS
        for rank in self.ranks.all:
            rank.ended(max(0.0, end - time.monotonic()))
        self.shut(why)
        if failed is not None:
            raise failed

    def shut(self, why: str) -> None:
        """Kill what still runs, and give everything back."""
        if self.closed is not None:
            return
        self.closed = why
        _open_sessions.discard(self)
        self.ranks.kill()
        self.receiving.close(self.ranks.all)
        self.ranks.close()
        self.shipped.close()
        with self.lock:
            for task in list(self.pending.tasks.values()):
                if not task.settled.is_set():
                    task.settle(lambda: MeshError(message(f"this mesh is closed: {why}", remedy="make a new Mesh")))
            self.changed.notify_all()


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
