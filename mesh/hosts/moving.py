"""Values of ranks whose host was lost, with all that lay in its memory: from ranks of other hosts that have the same.

They go from rank to rank, in a region of their own, before the calls that need them run again. Invariant: what nobody
else has stays noted as missing, so that whoever asks for it is told.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

from .. import protocol, wire
from ..array import Array
from ..driver.pending import Pending, Task
from ..driver.values import CallValues, Values
from ..spec import Layout


class Session(Protocol):
    """The driver's session, as far as it is seen from here."""

    layout: Layout
    lock: threading.RLock
    numbers: Iterator[int]
    pending: Pending
    regions: int
    values: Values

    def tell(
        self, message: protocol.Message, packet: wire.Packet | None = None, ranks: Iterable[int] | None = None
    ) -> None: ...


@dataclasses.dataclass(slots=True)
class Moves:
    """What is to be sent where.

    Attributes:
        sends: who sends to whom, and what, as (call, index).
        filled: the values that nobody lacks after that, with who lacks them now.
        lost: those that nobody has.
        task: once it was sent.
    """

    sends: dict[tuple[int, int], list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    filled: list[tuple[CallValues, int, set[int]]] = dataclasses.field(default_factory=list)
    lost: list[CallValues] = dataclasses.field(default_factory=list)
    task: Task | None = None

    def needed_by(self, task: Task) -> bool:
        """Whether a call can't run again for want of what is lost."""
        held = (*task.again.arguments, task.again.holds)
        sources = {id(one._source if isinstance(one, Array) else one) for one in held}
        return any(id(values) in sources or values.named for values in self.lost)

    def send(self, session: Session) -> None:
        """Have the ranks do it, as the next region of all."""
        if not self.sends:
            return
        session.regions += 1
        ranks = tuple(range(session.layout.size))
        task = self.task = Task(next(session.numbers), ranks, session.regions)
        task.reported = True
        session.pending.tasks[task.number] = task
        moves = tuple((source, target, tuple(names)) for (source, target), names in self.sends.items())
        session.tell(protocol.MoveValues(task.number, task.region, (), (), moves=moves))
        for values, index, _ in self.filled:
            values.missing.pop(index, None)

    def take_back(self) -> None:
        """Another rank has died meanwhile: what was to be filled may be missing still."""
        if self.task is not None and not self.task.fine:
            for values, index, ranks in self.filled:
                values.missing.setdefault(index, set()).update(ranks)


def moves_of(session: Session) -> Moves:
    """What has to go where, for all to have what they had; of calls that are over."""
    found = Moves()
    for values in session.values.of_calls(read=False):
        task = values.task
        if task is not None and (not task.settled.is_set() or task.failure is not None):
            continue  # it runs again, or has failed
        if values.made and not values.live:
            continue
        freed = values.freed_names()
        for index, ranks in list(values.missing.items()):
            if any(freed[at + 1] <= index < freed[at + 2] for at in range(0, len(freed), 3)):
                continue
            donors = {rank: _donor(session.layout, values.meta(index).spec, ranks, rank) for rank in sorted(ranks)}
            if None in donors.values():
                found.lost.append(values)
                continue
            for rank, donor in donors.items():
                found.sends.setdefault((donor, rank), []).append((values.number, index))
            found.filled.append((values, index, set(ranks)))
    return found


def _donor(layout: Layout, spec: Any, missing: Collection[int], rank: int) -> Any:
    return next((other for other in layout.replicas(spec, rank) if other not in missing), None)
