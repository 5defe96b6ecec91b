"""The driver's side of a mesh: it sends tasks to the ranks and waits for their answers.

The user's thread sends and waits; one thread per mesh listens (`Receiving`), and reports to `Recovery`. A few calls may
run asynchronously; a failure is raised by the call itself, or at the next use of the mesh or of a value. Invariant:
either all ranks that a task is meant for are sent it, or none is.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...kernels.errors import MeshError
from ...kernels.interrupts import uninterrupted
from ...kernels.limits import named_limits
from ...kernels.processes import Owned, open_more_files
from .. import protocol, wire
from ..array import Array
from ..display.notebook import shorten
from ..hosts.ranks import ranks_of
from ..hosts.uncopied import Uncopied
from ..remote.node import driver_node
from ..run_state import RunState
from ..spec import Layout
from . import open_sessions, sending
from .debugging import LOOK_SECONDS, Debugging
from .functions import ShippedObjects
from .lost_values import closed
from .pending import Again, Flight, Make, Pending, Pure, Resized, Task
from .ranks import Ranks
from .receiving import Receiving
from .recovery import Recovery
from .values import CallValues, Values

CLOSE_SECONDS = 2.0
_OPTIONS = ("backend", "device", "threads", "seed", "timeout")  # of the mesh, sent to its ranks


class DriverSession(Owned):
    """The ranks of one mesh and the traffic with them.

    Args:
        mesh: the mesh, with the arguments that it was given; the session only refers to it weakly.

    Attributes:
        values, shipped: what the ranks hold.
        changed: notified when a task is settled, a recovery ends, or the mesh is closed.
        closed: why the mesh is closed, None while it is open.
    """

    @named_limits()
    def __init__(self, mesh: Any):
        super().__init__()
        open_more_files()
        self._mesh, layout = weakref.ref(mesh), mesh.layout
        self.layout: Layout = layout
        self.timeout: float = mesh.timeout
        self.lasting: bool = mesh.device == "cpu"  # values outlive their ranks, in the host's shared memory
        self.reruns: bool = mesh.on_loss == "rerun" and self.lasting
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.values = Values(self)
        self.whole = (type(mesh), Array)  # types that travel as names
        self.shipped = ShippedObjects(self, self.whole)
        # For each @spmd function, its calls by signature: made at the first call, and then looked up.
        self.calls: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.closed: str | None = None
        self.closing, self._closes = False, threading.RLock()  # held by the thread that closes
        self.numbers: Iterator[int] = itertools.count(1)
        self.regions, self.run_state, self.uncopied = 0, RunState(), Uncopied()
        self.pending, self._flight = Pending(self.run_state), Flight()
        self._recovery = Recovery(self, mesh.grace)
        self.move_values = self._recovery.move_values
        self.debugging = Debugging(lambda rank, line: self.tell(line, ranks=[rank]), self._recovery.answers.wait)
        self.receiving = Receiving(self._recovery, layout)
        self.options: dict[str, Any] = {name: getattr(mesh, name) for name in _OPTIONS}
        self.options |= {"pinned": mesh.pinned_threads, "copies": 0 if mesh.hosts is None else mesh.copies}
        self.resizing: Any = None  # a resize whose new ranks are getting ready; see `resizing`
        self.resize_lock = threading.RLock()  # held while the mesh's size is changed, or relied on
        self.leaving: threading.Thread | None = None  # waits for the end of ranks that a resize has told to leave
        self.switching = threading.get_ident()  # the thread that starts or exchanges the ranks; others wait; 0: none
        with contextlib.ExitStack() as undo:
            undo.callback(self.receiving.close, [])
            self.ranks = ranks_of(mesh.hosts, layout, self.options, self.receiving)
            undo.callback(self.ranks.close)
            self.node = self._new_node()
            undo.pop_all()

    @named_limits()
    def start(self) -> None:
        """Start the ranks, and listen to them; if this raises an exception, the session is to be shut."""
        self.ranks.start(self.layout.size)
        with uninterrupted():
            self.receiving.start()
            self.uncopied.copy_to_hosts(self)
            open_sessions.add(self)
        self.switching = 0

    def _new_node(self) -> Any:
        key, elsewhere = self.ranks.request.key, self.ranks.elsewhere
        return driver_node(key, self.describe, self._mesh, self.values.object_of, elsewhere)

    @property
    def mesh(self) -> Any:
        return self._mesh()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks.all]

    @property
    def quiet(self) -> bool:
        """Whether no rank is busy or being replaced; it stays so while the caller holds the lock."""
        return not self._recovery.under_way and not self.pending.tasks and self.ranks.all_run()

    def end_stopped(self, ranks: Iterable[int]) -> None:
        """Kill those of these ranks that are stopped, where they are replaced, instead of waiting until they go on."""
        if self.reruns:
            self._recovery.stuck.end_stopped(ranks)

    def hand_over(self, ranks: Ranks, layout: Layout) -> None:
        """Go on with other ranks, of another layout; the lock must be held, and the session quiet."""
        self.node.close("their mesh was resized", "make them again")
        self.ranks, self.layout = ranks, layout
        self.node = self._new_node()
        self.calls.clear()
        self.shipped.forget_last_results()

    def describe(self) -> str:
        mesh = self._mesh()
        return mesh.describe() if mesh is not None else "a mesh"

    def new_values(self) -> CallValues:
        """A place for the values of a call that is about to be sent."""
        return self.values.of_call(next(self.numbers))

    def dumps(self, obj: Any, names: list[Any] | None = None, **how: Any) -> wire.Packet:
        """See `sending.dumps`."""
        return sending.dumps(self.values, obj, names, **how)

    # -- sending -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        make: Make,
        content: Callable[[], wire.Packet] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        region: bool = False,
        layout: Layout | None = None,
        pure: Pure | None = None,
        **handling: Any,
    ) -> Task:
        """Send a task to ranks (all by default).

        Args:
            make: makes the message, given the fields that all tasks begin with (see `protocol.Task`).
            content: makes its content.
            region: whether it is a region; then the other ranks pass through it, so that nobody waits for them in vain.
            layout: the mesh's layout that the task is made for; by default the current one.
            pure: the call, if it may run again when a rank dies.
            handling: what is done with the answers: `future`, `last_results`, `compare`, `reported`; as for `Task`.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]
            problem = "the handler of a signal, or a finalizer, made a call in the middle of another call"
            remedy = "have it set a flag, and make the call after the step (docs/how_to.md)"
            raise MeshError(problem, where=self.describe(), remedy=remedy)
        layout = layout or self.layout
        chosen = tuple(range(layout.size)) if ranks is None else tuple(ranks)
        others = () if ranks is None else tuple(sorted({*range(layout.size)}.difference(chosen)))
        while True:
            generation = self.ranks.generation  # read before anything below depends on it
            self.ready()
            for needed, *which in pure.needs() if pure is not None else ():
                needed.restore(*which)
            packet = wire.Packet(b"") if content is None else content()
            task, again = None, None
            if pure is not None and (self.reruns or (self.lasting and pure.fetches)):
                again = Again(pure, make, packet)
            try:
                with self.lock:
                    self.ready()
                    if layout is not self.layout or max(chosen, default=0) >= layout.size:
                        raise Resized(self.describe())
                    if generation != self.ranks.generation:
                        continue
                    self.regions += region
                    number, at = next(self.numbers), self.regions if region else 0
                    task = Task(number, chosen, at, again=again, **handling)
                    self._send(task, make, packet, others)
                    return task
            finally:
                if task is None or again is None:
                    packet.close()  # else it is closed when the task is over

    def _send(self, task: Task, make: Make, packet: wire.Packet, others: tuple[int, ...]) -> None:
        """Send a task, and to the other ranks what they have to know of it."""
        with uninterrupted():
            # What nothing here refers to any more is freed on the ranks with the task.
            freed, forgotten = self.values.freed(), self.shipped.unused()
            self.pending.tasks[task.number] = task
            self.tell(make(task.number, task.region, freed, forgotten), packet, task.ranks if others else None)
            if others and task.region:
                rest = Task(next(self.numbers), others, task.region, reported=task.reported)
                self.pending.tasks[rest.number] = rest
                self.tell(protocol.PassThrough(rest.number, task.region, freed, forgotten), ranks=others)
            elif others and (freed or forgotten):
                self.tell(protocol.Free(freed, forgotten), ranks=others)

    def tell(
        self, message: protocol.Message, packet: wire.Packet | None = None, ranks: Iterable[int] | None = None
    ) -> None:
        """Send a message to ranks (all by default)."""
        packet = wire.Packet(b"") if packet is None else packet
        packet.head = protocol.encode(message)
        with self.lock, uninterrupted():
            for rank in self.ranks.send(packet, wire.frame(packet), ranks):
                self.receiving.when_writable(rank)

    def ready(self) -> None:
        """Wait until the ranks take tasks; raise an error that nobody has seen, or that the mesh is closed."""
        self.check_owner()
        if threading.current_thread() is self.receiving:
            problem = "a mesh cannot be used by the thread that listens to its ranks, and shows what they print"
            raise MeshError(problem, remedy="use it in another thread")
        end = time.monotonic() + self.timeout
        with self.lock:
            while True:
                self.check_open()
                self.pending.raise_unseen()
                # A rank's process that has ended will be noticed soon.
                exchanged = self.switching not in (0, threading.get_ident())
                if not self._recovery.under_way and not exchanged and self.ranks.all_run():
                    return
                if time.monotonic() > end:
                    raise MeshError(
                        "the mesh has not recovered from the last failure",
                        got=f"ranks {sorted(self.pending.busy())} are still busy after {self.timeout:g} s",
                        where=self.describe(),
                        remedy="close the mesh and make a new one",
                    )
                self._interruptibly(lambda: self.changed.wait(0.1))

    def check_owner(self) -> None:
        if self.foreign:
            problem = "this mesh belongs to the process that this one was forked from"
            raise MeshError(problem, remedy="use it there, or make a new Mesh here")

    def check_open(self) -> None:
        if self.closed is not None:
            raise closed(self, "value")

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, task: Task, *, raises: bool = True) -> Task:
        """Wait until a task is settled; raises its failure (`raises`). Ctrl-C interrupts the ranks."""
        self.check_owner()
        self._interruptibly(lambda: self._recovery.answers.wait(task, LOOK_SECONDS) or self.debugging.wait(task))
        if raises and task.failure is not None:
            with self.lock:
                self.pending.report(task)
        return task

    def in_flight(self, task: Task) -> None:
        """Note an asynchronous region, and wait for the oldest if there are too many."""
        for oldest in self._flight.add(task):  # the failure of another thread's is raised there
            self.wait(oldest, raises=oldest.caller is threading.current_thread())

    def raise_failure(self, *, closing: bool = False) -> None:
        """Raise an error that this thread has not seen, or that nobody has seen if the mesh is closing."""
        self._recovery.answers.collect()
        with self.lock:
            self.pending.raise_unseen(closing=closing)

    def _interruptibly(self, wait: Callable[[], Any]) -> None:
        try:
            wait()
        except KeyboardInterrupt as error:
            self._recovery.interrupt()
            shorten(error)
            raise

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, why: str = "Mesh.close() was called") -> None:
        """Stop the ranks when they have finished their tasks; raises an error that nobody has seen yet."""
        # A signal's handler, or a finalizer, in the middle of closing leaves it to that.
        if self.closed is not None or self.foreign or self._closes._is_owned():  # type: ignore[attr-defined]
            return
        # Not for a handler in the middle of a call, nor the thread that listens: without these no task is settled.
        listens = threading.current_thread() is self.receiving
        waits = not listens and not self.lock._is_owned()  # type: ignore[attr-defined]
        try:
            if self._closes.acquire(blocking=waits) and self.closed is None:
                self._close(why, waits)
        finally:
            if self._closes._is_owned():  # type: ignore[attr-defined]
                try:
                    self.shut(why)  # also after Ctrl-C: from now on nobody would notice a rank's end
                finally:
                    self._closes.release()

    def _close(self, why: str, waits: bool) -> None:
        open_sessions.discard(self)
        try:
            if waits:
                open_sessions.finish_tasks(self)
            self.raise_failure(closing=True)
            self.node.caller.raise_unseen(closing=True)
        finally:
            self.node.close(why)  # first, so that the end of a rank is not taken for its death
            with self.lock:
                self.closing = True
                self.tell(protocol.Exit())
            self.ranks.await_end(CLOSE_SECONDS)
            self.shut(why)

    def shut(self, why: str, remedy: str = "make a new Mesh") -> None:
        """Kill what still runs, and release everything; `remedy` is for who calls objects that were on the ranks."""
        self.check_owner()
        with uninterrupted():  # halfway, processes would stay
            if self.closed is not None:
                return
            self.closed = why
            open_sessions.discard(self)
            resizing, self.resizing = self.resizing, None
            if resizing is not None:
                resizing.cancel()
            if self.leaving is not None:
                self.leaving.join()
            self.node.close(why, remedy)
            self.ranks.kill()
            self.receiving.close(self.ranks.all)
            self.ranks.close()
            self.shipped.close()
            self.uncopied.close()
            with self.lock:
                for task in list(self.pending.tasks.values()):
                    if not task.settled.is_set():
                        task.settle(lambda: closed(self, "call"))
                self.changed.notify_all()
