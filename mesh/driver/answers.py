"""The ranks' answers, each noted with its task; a task is settled when all ranks have answered.

Most answers to a repeated call are short, and lie in shared memory: the thread that waits for them finds them there,
and no other is woken. Longer answers come over the ranks' sockets, through the thread that listens. Invariant: what a
rank has printed before it answered is shown before the task is settled.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ...kernels.interrupts import uninterrupted
from ...kernels.processes import Owned
from ...kernels.shm.arena import Arena
from .. import protocol, wire
from ..display.records import Records
from ..failure import Failure, capture, combine
from ..hosts.uncopied import Uncopied, ValuesSession
from .functions import ShippedObjects
from .pending import Outcome, Task
from .ranks import Rank
from .receiving import Receiving

_SHARED = (type(None), bool, int, float, str, bytes)  # immutable
_KINDS = {protocol.Failed: "failed", protocol.Skipped: "skipped"}


class Session(ValuesSession, Protocol):
    """What is used here of the driver's session."""

    receiving: Receiving
    shipped: ShippedObjects
    uncopied: Uncopied


class Failing(Protocol):
    """What is used here of `Recovery`."""

    under_way: bool
    interrupted: bool
    failed_starts: int

    def begin(self, why: str | None = None, *, first_failed: int = 0) -> None: ...
    def carry_on(self) -> None: ...


class Answers(Owned):
    """The answers to one mesh's tasks."""

    def __init__(self, session: Session, recovery: Failing):
        super().__init__()
        self._session, self._recovery = session, recovery
        self._records = Records()

    # -- over the sockets: called by the thread that listens ---------------------------------------------------------

    def take(self, ranks: Sequence[Rank], packet: wire.Packet) -> None:
        """Handle a message from a rank, or one answer that several ranks share."""
        self._take(ranks, packet)
        session = self._session
        with session.lock:
            if (arena := session.ranks.arena) is not None:
                for rank in filter(session.ranks.has, ranks):
                    arena.answers.received[rank.rank] += 1
            self.collect()

    def _take(self, ranks: Sequence[Rank], packet: wire.Packet) -> None:
        session, answer, rank = self._session, protocol.decode(packet.head), ranks[0]
        if isinstance(answer, protocol.Progress):
            self._bar(rank, answer)
            return
        if isinstance(answer, protocol.Logged | protocol.Warned):
            self._records.take(rank.rank, answer)
            return
        if isinstance(answer, protocol.DebuggerPrompt):
            session.receiving.show_output()  # first, what it printed before
            session.debugging.ask(rank.rank, answer)
            return
        if isinstance(answer, protocol.Copying):
            session.uncopied.hear(session, rank, answer)
            return
        if isinstance(answer, protocol.Ship):
            session.shipped.note_unread(answer.key)
            return
        kind = _KINDS.get(type(answer), "ok")
        try:
            values = self._values(packet, len(ranks))
        except BaseException as error:
            kind, values = "failed", [capture(error)] * len(ranks)
        finally:
            packet.close()
        with session.lock:
            if isinstance(answer, protocol.Ready):
                if session.ranks.has(rank):
                    rank.ready, self._recovery.failed_starts = True, 0
                return
            self.collect()
            task = session.pending.tasks.get(answer.task)
            if task is None:
                return
            found = {rank.rank: value for rank, value in zip(ranks, values, strict=True) if session.ranks.has(rank)}
            self._note(task, found, answer, kind)
            if self._recovery.under_way:
                self._recovery.carry_on()
            elif task.complete:
                self._settle_complete(task)

    def _values(self, packet: wire.Packet, count: int) -> list[Any]:
        """A packet's content, as an object for each of `count` ranks."""
        value = wire.loads(packet, self._session.values.object_of) if packet.data else None
        if type(value) in _SHARED:
            return [value] * count
        return [value, *(wire.loads(packet, self._session.values.object_of) for _ in range(count - 1))]

    def _note(self, task: Task, found: dict[int, Any], answer: Any, kind: str) -> None:
        """Note the answer of ranks, with its content for each; the lock must be held."""
        if isinstance(answer, protocol.Metadata | protocol.Unchanged):
            task.prints.update(dict.fromkeys(found, answer.prints))
        if isinstance(answer, protocol.Metadata):
            found = dict.fromkeys(found, answer.data)
            if answer.lasting:
                task.last_results.update(found)
        elif isinstance(answer, protocol.Unchanged):
            found = {rank: task.last_results[rank] for rank in found}
        task.answers.update({rank: (kind, value) for rank, value in found.items()})
        for rank, value in found.items() if kind != "ok" else ():
            own_fault = not task.region and isinstance(value, Failure) and value.kind == "error"
            ends = value.ends if isinstance(value, Failure) else ""
            if ends:
                self._session.ranks.all[rank].ends = ends
            if ends or not own_fault:
                self._recovery.begin(f"rank {rank} {ends}" if own_fault else None, first_failed=task.number)

    def _bar(self, rank: Rank, progress: protocol.Progress) -> None:
        with self._session.lock:
            task = self._session.pending.tasks.get(progress.task)
        if task is not None and not task.settled.is_set():
            with contextlib.suppress(Exception):  # as in `Receiving.end_of_task`
                self._session.receiving.report_bar(rank.rank, task, progress.bar)

    # -- in shared memory: called by any thread ----------------------------------------------------------------------

    def collect(self) -> None:
        """Note the answers in shared memory, and settle tasks that all ranks have answered."""
        session, arena = self._session, self._session.ranks.arena
        if arena is None or self.foreign or not arena.answers.waiting():
            return
        with session.lock, uninterrupted():
            complete = []
            for rank, number, prints in arena.answers.take():
                task = session.pending.tasks.get(number)
                if task is not None:
                    task.prints[rank] = prints
                    task.answers[rank] = ("ok", task.last_results[rank])
                    if task.complete:
                        complete.append(task)
            if complete and not self._recovery.under_way:
                session.receiving.show_printed(session.ranks.all)
                for task in complete:
                    self._settle_complete(task)

    def wait(self, task: Task, seconds: float) -> bool:
        """Wait until a task is settled, but no longer than `seconds`; whether it is."""
        end = time.monotonic() + seconds
        while True:
            self.collect()
            left = end - time.monotonic()
            if task.settled.is_set() or left <= 0:
                return task.settled.is_set()
            arena = self._session.ranks.arena
            if arena is None:
                return task.settled.wait(left)
            arena.bells.sleep(functools.partial(_is_answered, task, arena), left)

    def all_settled(self, seconds: float) -> bool:
        """Wait until all ranks have answered all tasks, but no longer than `seconds`; whether they have."""
        end = time.monotonic() + seconds
        while (tasks := list(self._session.pending.tasks.values())) and time.monotonic() < end:
            self.wait(tasks[-1], min(0.01, end - time.monotonic()))
        return not tasks

    # -- settling ----------------------------------------------------------------------------------------------------

    def _settle_complete(self, task: Task) -> None:
        failures = {} if task.fine else task.failures()
        where = self._session.describe() if failures else ""
        self.settle(task, (lambda: combine(failures, {}, where)) if failures else None)

    def settle(self, task: Task, failure: Outcome = None) -> None:
        """Make the outcome of a task known; the lock must be held."""
        session = self._session
        session.receiving.end_of_task(task)
        together = self._recovery.under_way  # with everything else that fails now
        if failure is None and task.compare is not None and len(set(task.prints.values())) > 1:
            failure, together = task.compare(task), True
        generation = session.ranks.generation if together else None
        if failure is None and session.options["copies"]:
            session.uncopied.hold(task)
        elif task.again is not None:
            for values in task.again.call.values:
                if values.read is not None:  # they are read again when they are needed next
                    values.not_read(rank for rank in task.ranks if task.answers.get(rank, ("lost",))[0] != "ok")
        seen, keeps = self._recovery.interrupted, self._recovery.under_way and task.region > 0
        session.pending.settle(task, failure, generation=generation, seen=seen, keeps=keeps)
        session.changed.notify_all()
        if (arena := session.ranks.arena) is not None:
            if arena.given.dropped:
                arena.given.trim()
            arena.bells.ring((arena.rank,))


def _is_answered(task: Task, arena: Arena) -> bool:
    return task.settled.is_set() or arena.answers.waiting()
