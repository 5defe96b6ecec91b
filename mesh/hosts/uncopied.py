"""Calls whose results are not yet copied to other hosts: what it takes to run them again if their host is lost now.

Invariant: a call's inputs are held here from its end until all copies of its results exist, so that what a lost host
had is either copied or can be computed again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from .. import protocol
from ..array import Array
from ..driver.functions import ShippedObjects
from ..driver.pending import Again, Task
from ..driver.ranks import Rank, Ranks
from ..driver.session_view import Session
from ..driver.values import CallValues, Values

_MOST = 32  # calls that are held, however long their copies take


class ValuesSession(Session, Protocol):
    """The driver's session, with its values."""

    values: Values
    shipped: ShippedObjects


class Uncopied:
    """What a driver knows of the copies of its ranks' values; the session's lock guards it."""

    def __init__(self) -> None:
        self._number = 0
        self._waits: dict[int, dict[int, int]] = {}  # call -> rank that copies its results -> number of its `CopyTo`
        self._held: dict[int, tuple[Task, Any]] = {}  # by call: a task that is over, and what it takes to run it again

    def copy_to_hosts(self, session: ValuesSession) -> None:
        """Send all ranks the current hosts for copies, if values have copies."""
        if session.options["copies"]:
            session.tell(self.copy_to(session.ranks, session.values))

    def copy_to(self, ranks: Ranks, values: Values) -> protocol.CopyTo:
        """The message that makes these ranks keep copies of all values."""
        self._number += 1
        needed, _ = values.needed()
        return protocol.CopyTo(self._number, ranks.copies_at(), needed)

    def hear(self, session: ValuesSession, rank: Rank, msg: protocol.Copying) -> None:
        """Note a rank's report of its copies."""
        with session.lock:
            if session.ranks.has(rank):
                self._note(rank.rank, msg)

    def _note(self, rank: int, msg: protocol.Copying) -> None:
        if not msg.done:
            for call in msg.calls:
                self._waits.setdefault(call, {})[rank] = msg.number
            return
        before = [call for call, ranks in self._waits.items() if ranks.get(rank, msg.number) < msg.number]
        for call in (*msg.calls, *before):
            ranks = self._waits.get(call, {})
            ranks.pop(rank, None)
            if not ranks:
                self._forget(call)

    def _forget(self, call: int) -> None:
        self._waits.pop(call, None)
        if call in self._held:
            self._held.pop(call)[1].packet.close()

    def hold(self, task: Task) -> None:
        """Keep what it takes to run a successful task again, if its results are still being copied."""
        again = task.again
        if again is None or len(again.call.values) != 1 or again.call.values[0].number not in self._waits:
            return
        self._held[again.call.values[0].number] = task, again
        task.again = None
        if len(self._held) > _MOST:
            self._held.pop(next(iter(self._held)))[1].packet.close()

    def tasks_for(self, lost: list[CallValues], session: ValuesSession) -> list[Task]:
        """Tasks that make lost values again, in order; these values are removed from `lost`."""
        found: list[Task] = []
        left = {values.number for values in lost if values.number not in self._held}
        calls = [values for values in lost if values.number not in left]
        for values in sorted(calls, key=lambda values: (self._held[values.number][0].region > 0, values.number)):
            done, again = self._held[values.number]
            if left & _sources(again) or names_any(again, left, session.shipped.naming(left)):
                left.add(values.number)
                continue
            del self._held[values.number]
            self._waits.pop(values.number, None)
            task = Task(next(session.numbers), done.ranks, int(done.region > 0), None, done.last_results)
            task.reported, task.again = True, again
            session.pending.tasks[task.number] = task
            values.missing.clear()
            found.append(task)
        lost[:] = [values for values in lost if values.number in left]
        return found

    def close(self) -> None:
        """Forget all calls: everything is copied, or no longer needed."""
        self._waits.clear()
        for call in [*self._held]:
            self._forget(call)


def _sources(again: Again) -> set[int]:
    """The numbers of the calls whose values a call needs."""
    needed = (one._source if isinstance(one, Array) else one for one in (*again.call.arguments, again.call.holds))
    return {values.number for values in needed if isinstance(values, CallValues)}


def names_any(again: Again, calls: Collection[int], functions: Collection[str]) -> bool:
    """Whether what is sent for a call names values of these calls, or its function, one of these, does."""
    shipped = getattr(again.call.holds, "shipped", None)  # of a step; of a batch's reader the name is not known
    reads = any(values.read is not None for values in again.call.values)
    return bool(
        not set(again.packet.values).isdisjoint(calls)
        or (reads and functions)
        or (shipped is not None and shipped.key in functions)
    )
