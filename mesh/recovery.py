"""What comes back from a driver's ranks, and what is done when one of them fails or dies.

The receiving thread reports here. A failed region raises the arena's abort flag, so that no rank waits in vain. When
all ranks that live have fallen quiet, dead ones are replaced and the next *generation* begins, in which nothing of the
failed region is known. Whoever waits is told earlier: as soon as the others had a moment to give up.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
from typing import TYPE_CHECKING

from . import naming, wire
from .bars import BarState
from .failure import Failure, capture, combine
from .pending import Outcome, Task
from .ranks import Rank

if TYPE_CHECKING:
    from .driver import DriverSession

GRACE_SECONDS = 0.75  # for ranks to give up by themselves once one has failed


class Recovery:
    """The receiving thread's half of a session.

    Attributes:
        under_way: a failed region has not yet been left by all ranks.
        interrupted: the user's Ctrl-C is the reason.
    """

    def __init__(self, session: DriverSession):
        self._session = session
        self.under_way = self.interrupted = False
        self._since = 0.0
        self._culprit = 0  # the number of the first task that failed; those before it may end
        self._lost: dict[int, str] = {}  # ranks that died, and how
        self._stillborn = 0  # ranks in a row that died before they were ready

    @property
    def closed(self) -> str | None:
        return self._session.closed

    def flush(self, rank: Rank) -> bool:
        with self._session.lock:
            return rank.flush()

    def answered(self, rank: Rank, packet: wire.Packet) -> None:
        session = self._session
        kind, number, *rest = pickle.loads(packet.head)
        if kind == "bar":
            self._bar(rank, number, *rest)
            return
        try:
            value = wire.loads(packet, lambda name: naming.object_in_driver(session, name)) if packet.data else None
        except BaseException as error:
            kind, value = "failed", capture(error)
        finally:
            packet.close()
        with session.lock:
            if kind == "ready":
                rank.ready, self._stillborn = True, 0
                return
            task = session.pending.tasks.get(number)
            if task is None:
                return
            if kind == "told":
                assert isinstance(value, bytes)
                kind, task.told[rank.rank] = "ok", value
            elif kind == "as before":
                kind, value = "ok", task.told[rank.rank]
            task.answers[rank.rank] = (kind, value)
            own_fault = not task.region and isinstance(value, Failure) and value.kind == "error"
            if kind != "ok" and not own_fault:
                self.begin(culprit=task.number)
            if self.under_way:
                self.carry_on()
            elif task.complete:
                failures, where = task.failures(), session.describe()
                self._settle(task, (lambda: combine(failures, {}, where)) if failures else None)

    def _bar(self, rank: Rank, number: int, state: BarState) -> None:
        with self._session.lock:
            task = self._session.pending.tasks.get(number)
        if task is not None and not task.settled.is_set():
            with contextlib.suppress(Exception):  # as in `Receiving.end_of_task`
                self._session.receiving.bars.report(rank.rank, task, state)

    def died(self, rank: Rank) -> None:
        how = rank.end_text()
        with self._session.lock:
            rank.alive = False
            self._session.receiving.remove(rank)
            if self._session.closing:
                return
            self._lost[rank.rank] = how
            self._stillborn += not rank.ready
            self._session.pending.lose(rank.rank)
            self.begin(f"rank {rank.rank} {how}")
            self.carry_on()

    def broke(self, error: BaseException) -> None:
        self._session.shut(f"listening to its ranks failed: {type(error).__name__}: {error}")

    def begin(self, why: str | None = None, *, culprit: int = 0) -> None:
        """Make every rank give up (`why` is None where one already does so); the session holds new tasks back."""
        if why is not None:
            self._session.ranks.abort(why)
        if not self.under_way:
            self.under_way, self._since, self._culprit = True, time.monotonic(), culprit
            self._session.receiving.wake()
        self._culprit = min(self._culprit, culprit)

    def carry_on(self) -> None:
        """Tell what is known after the grace, and begin anew once all ranks are quiet; called until then."""
        session = self._session
        with session.lock:
            if not self.under_way or session.closed is not None:
                return
            busy = session.pending.busy()
            if busy and time.monotonic() - self._since < GRACE_SECONDS:
                return
            failure = self._failure()
            for task in sorted(session.pending.tasks.values(), key=lambda task: task.number):
                if task.settled.is_set():
                    continue
                if task.fine:
                    self._settle(task)
                elif task.complete or not (busy and (self.interrupted or task.number < self._culprit)):
                    self._settle(task, failure)
            if busy:
                self.signal_busy()
            else:
                self._begin_anew()

    def signal_busy(self) -> None:
        """Interrupt what the ranks do that still do something, but for tasks that came before the one that failed."""
        for rank, number in self._session.pending.busy().items():
            if number >= self._culprit:
                self._session.ranks.all[rank].signal(signal.SIGINT)

    def _failure(self) -> Outcome:
        failures, lost = self._session.pending.failures(), dict(self._lost)
        where, interrupted = self._session.describe(), self.interrupted
        return lambda: combine(failures, lost, where, interrupted=interrupted)

    def _settle(self, task: Task, failure: Outcome = None) -> None:
        session = self._session
        session.receiving.end_of_task(task)
        generation = session.ranks.generation if self.under_way else None
        session.pending.settle(task, failure, generation=generation, seen=self.interrupted)
        session.changed.notify_all()

    def _begin_anew(self) -> None:
        session = self._session
        if self._stillborn > 2 * session.layout.size:
            session.shut("its ranks die before they are ready; their error output says why")
            return
        session.pending.tasks.clear()
        replaced = session.ranks.begin_anew()
        for rank in range(session.layout.size):
            if rank not in replaced:
                session.tell(("renew", session.ranks.generation), ranks=[rank])
                continue
            for head, packet in session.shipped.again():
                session.tell(head, packet, [rank])
            session.values.lost_on(rank)
        self._lost.clear()
        self.under_way = self.interrupted = False
        session.changed.notify_all()
