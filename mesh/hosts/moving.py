"""Restoring the values of ranks whose host was lost, from other hosts that have the same shards, or copies.

They go from rank to rank, in their own region, before the calls that need them run again. Invariant: what nobody else
has stays noted as missing, so that whoever asks for it gets an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .. import protocol
from ..array import Array
from ..driver.lost_values import remedy
from ..driver.pending import Task
from ..driver.values import CallValues
from ..spec import Layout
from .uncopied import ValuesSession, names_any

Copies = Mapping[tuple[int, int, int], tuple[str, int]]


@dataclasses.dataclass(slots=True)
class Moves:
    """What is to be sent where.

    Attributes:
        sends: (sender, receiver) -> values, as (call, index).
        fetches: (receiver, address, port, rank whose copies these are) -> values, as (call, index).
        filled: the values that no rank lacks afterwards, with the ranks that lack them now.
        lost, gone: calls with values that nobody has, and those values, as (call, index).
        naming: the keys of functions that name such values.
        task: the task, once it was sent.
        remedy: for errors: what to do about lost values.
    """

    sends: dict[tuple[int, int], list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    fetches: dict[tuple[int, str, int, int], list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    filled: list[tuple[CallValues, int, set[int]]] = dataclasses.field(default_factory=list)
    lost: list[CallValues] = dataclasses.field(default_factory=list)
    gone: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    naming: set[str] = dataclasses.field(default_factory=set)
    task: Task | None = None
    remedy: str = ""

    def needed_by(self, task: Task) -> bool:
        """Whether a call can't run again because it needs lost values."""
        held = task.again.call.holds
        return (
            self._argument(task) is not None
            or any((held._source if isinstance(held, Array) else held) is values for values in self.lost)
            or names_any(task.again, {values.number for values in self.lost}, self.naming)
        )

    def _argument(self, task: Task) -> int | None:
        """The index of the first of a call's arguments that is lost; None if none is."""
        lost = {values.number for values in self.lost}
        for argument, one in enumerate(task.again.call.arguments):
            source: Any = one._source if isinstance(one, Array) else None
            if source is not None and source.number in lost and (source.number, one._index) in self.gone:
                return argument
        return None

    def lack(self, task: Task) -> str:
        """Why a call can't run again, in words, and what to do."""
        argument = self._argument(task)
        what = (
            f"{task.again.call.name} needs a value that is lost, and that nobody else had"
            if argument is None
            else f"{task.again.call.holds.path_of(argument)}, which nobody else had, is lost"
        )
        return f"{what}: {self.remedy}"

    def send(self, session: ValuesSession) -> None:
        """Have the ranks do it, as the next region."""
        if not self.sends and not self.fetches:
            return
        session.regions += 1
        ranks = tuple(range(session.layout.size))
        task = self.task = Task(next(session.numbers), ranks, session.regions, reported=True)
        session.pending.tasks[task.number] = task
        moves = tuple((source, target, tuple(names)) for (source, target), names in self.sends.items())
        copies = tuple((*which, tuple(names)) for which, names in self.fetches.items())
        session.tell(protocol.MoveValues(task.number, task.region, (), (), moves=moves, copies=copies))
        for values, index, _ in self.filled:
            values.missing.pop(index, None)

    def take_back(self) -> bool:
        """If the move has failed, since another rank has died, note the values as missing again; whether it has."""
        if self.task is None or self.task.fine:
            return False
        for values, index, ranks in self.filled:
            values.missing.setdefault(index, set()).update(ranks)
        self.task = None
        return True


def moves_of(session: ValuesSession, again: Iterable[Task]) -> Moves:
    """What has to go where so that all ranks have their values again, without calls that run again or have failed."""
    found, copies = Moves(remedy=remedy(session)), session.ranks.copies()
    made = {id(values) for task in again for values in task.again.call.values}
    for values in session.values.of_calls(read=False):
        if id(values) in made:
            continue
        task = values.task
        if task is not None and (not task.settled.is_set() or task.failure is not None):
            continue  # it runs again, or has failed
        if values.made and not values.live:
            continue
        for index, ranks in list(values.missing.items()):
            if values.was_freed(index):
                continue
            donors = {rank: _donor(session.layout, values.meta(index).spec, ranks, rank) for rank in sorted(ranks)}
            kept = {
                rank: _copy(session.layout, values.meta(index).spec, copies, rank, (values.number, index))
                for rank, donor in donors.items()
                if donor is None
            }
            if None in kept.values():
                found.lost += [] if values in found.lost else [values]
                found.gone.add((values.number, index))
                continue
            for rank, donor in donors.items():
                if donor is None:
                    found.fetches.setdefault((rank, *kept[rank]), []).append((values.number, index))
                else:
                    found.sends.setdefault((donor, rank), []).append((values.number, index))
            found.filled.append((values, index, set(ranks)))
    found.naming = session.shipped.naming({values.number for values in found.lost})
    return found


def _donor(layout: Layout, spec: Any, missing: Collection[int], rank: int) -> Any:
    return next((other for other in layout.replicas(spec, rank) if other not in missing), None)


def _copy(layout: Layout, spec: Any, copies: Copies, rank: int, name: tuple[int, int]) -> Any:
    """Where there is a copy of a rank's shard: (address, port, the rank that it was copied from)."""
    found = ((other, copies.get((other, *name))) for other in layout.replicas(spec, rank))
    return next(((*where, other) for other, where in found if where is not None), None)
