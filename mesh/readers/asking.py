"""Asking the ranks for their parts of several batches at once: one message, one task, one answer from each rank.

This is done only for batches that are read quickly (`BRIEF_SECONDS`). For slower ones a message each costs little, and
a long task would delay its first batch, would be lost as a whole with a rank, and would make its rank look stuck.

Invariants: each batch has its own values, so that it can be freed, or read again by a replacement rank, by itself; a
failure is raised at the batch that it belongs to, after the batches before it. A rank that has nothing new to report
says that all is as in an earlier task. The request names that task, and the driver has kept all answers to it.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Sequence
from typing import Any

from ...kernels.interrupts import uninterrupted
from .. import protocol
from ..batch import Deal
from ..driver.functions import Shipped, ShippedObjects
from ..driver.pending import Pure, Task, made_for_its_size
from ..driver.session import DriverSession
from ..driver.values import CallValues
from ..failure import Failure, combine
from ..mesh import Mesh
from ..replication import agreement
from ..spec import Layout

BRIEF_SECONDS = 0.005  # for reading a batch; a message takes a tenth of that

Descriptions = tuple[tuple[bytes, ...], list[list[Any]]]
"""Of a batch: each rank's description of its part, and what else each rank has sent."""


class Reader:
    """A function that reads batches on the ranks, and what these last reported.

    It is not checked for changes as long as the ranks have it.

    Attributes:
        described: the last task that all ranks have answered, and each one's description of the last batch in it.
        is_brief: whether all ranks have read the batches of that task quickly.
    """

    def __init__(self, obj: Any):
        self.obj = obj
        self._known: tuple[ShippedObjects, Shipped] | None = None
        self.described: tuple[int, dict[int, tuple]] = (0, {})
        self.is_brief = False

    def to(self, objects: ShippedObjects) -> Shipped:
        """The function, as shipped to the ranks of a mesh."""
        if self._known is None or self._known[0] is not objects or not objects.has(self._known[1].key):
            self._known, self.described = (objects, objects.ship_function(self.obj)), (0, {})
        return self._known[1]

    def note(self, objects: ShippedObjects, task: int, described: dict[int, tuple]) -> None:
        """Keep the ranks' descriptions of a batch, unless the mesh has other ranks since."""
        if self._known is not None and self._known[0] is objects:
            self.described = task, described


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A batch that the ranks were asked for.

    Attributes:
        layout: of the mesh when it was asked; the mesh may have been resized when the batch is there.
        values: the batch's values.
    """

    layout: Layout
    values: CallValues
    _answers: _Answers
    _index: int

    def descriptions(self) -> Descriptions:
        """The ranks' descriptions of it; waits for them."""
        return self._answers.of(self._index)

    def tree(
        self,
        descriptions: tuple[bytes, ...],
        deal: Deal | None,
        *,
        name: str,
        ragged: bool = False,
        remedies: agreement.Remedies,
    ) -> Any:
        """Its tree of Arrays, from each rank's description; for the arguments see `fill`."""
        where = self._answers.where
        found = agreement.of_batch(self.layout, descriptions, name=name, where=where, ragged=ragged, remedies=remedies)
        return found.tree(self.values.arrays(None, found.metas, deal=deal))


@made_for_its_size
def ask(mesh: Mesh, reader: Reader, requests: Sequence[tuple]) -> list[Asked]:
    """Have every rank read its part of batches, one after another.

    Args:
        reader: a function `reader(session, *arguments) -> (treedef, leaves, OutputMeta of each, and more)`, called on
            every rank.
        requests: the arguments for each batch.
    """
    driver, layout = mesh.driver, mesh.layout
    shipped, (known, described) = reader.to(driver.shipped), reader.described
    with uninterrupted():
        values = [driver.new_values() for _ in requests]
    batches = tuple((arguments, own.number) for arguments, own in zip(requests, values, strict=True))

    def read(
        number: int,
        region: int,
        freed: protocol.Spans,
        forgotten: tuple[str, ...],
        batches: tuple[tuple[tuple, int], ...] = batches,
        known: int = known,
    ) -> protocol.FillValues:  # it keeps `shipped` alive, but not the values, which refer to it
        return protocol.FillValues(number, region, freed, forgotten, shipped.key, batches, known, BRIEF_SECONDS)

    for batch, own in zip(batches, values, strict=True):
        own.read = functools.partial(read, batches=(batch,), known=0)
    # A failure is raised only when the loop comes to the batch, and not if the loop was left before.
    pure = Pure("a batch", values=tuple(values))
    task = driver.submit(read, layout=layout, pure=pure, last_results=described, reported=True)
    answers = _Answers(driver, reader, task, len(batches))
    return [Asked(layout, own, answers, index) for index, own in enumerate(values)]


class _Answers:
    """The ranks' descriptions of the batches of one task."""

    def __init__(self, driver: DriverSession, reader: Reader, task: Task, count: int):
        self._driver, self._reader, self._task, self._count = driver, reader, task, count
        self._found: list[Descriptions] | None = None  # of the batches that all ranks have read
        self._failures: dict[int, Failure] = {}  # of the batch after them
        self.where = driver.describe()

    def of(self, index: int) -> Descriptions:
        if self._found is None:
            self._found = self._taken()
        if index >= len(self._found):
            self._driver.run_state.note_failure(self._task)
            raise combine(self._failures, {}, self.where)
        return self._found[index]

    def _taken(self) -> list[Descriptions]:
        answers = self._driver.wait(self._task).values()
        if all(isinstance(answer, tuple) for answer in answers):  # nothing is new, and all was quick
            self._note(answers, True)
            return [_of_batch(answers)] * self._count
        decoded = [self._decoded(answer) for answer in answers]
        count = min(len(batches) for batches, *_ in decoded)
        for rank, (batches, failure, _) in enumerate(decoded):
            if len(batches) == count and failure is not None:
                self._failures[rank] = failure
        self._note([batches[-1][:1] for batches, *_ in decoded], all(brief for *_, brief in decoded))
        return [_of_batch([batches[index] for batches, *_ in decoded]) for index in range(count)]

    def _note(self, last: Sequence[tuple], brief: bool) -> None:
        """Keep each rank's description of the last batch that it has read, and whether all were read quickly."""
        self._reader.note(self._driver.shipped, self._task.number, dict(enumerate(last)))
        self._reader.is_brief = brief

    def _decoded(self, answer: Any) -> tuple[Sequence[tuple], Failure | None, bool]:
        """One rank's answer: what it sent for each batch, what failed after these, and whether all was read quickly."""
        return ([answer] * self._count, None, True) if isinstance(answer, tuple) else pickle.loads(answer)


def _of_batch(answers: Sequence[tuple]) -> Descriptions:
    return tuple(description for description, *_ in answers), [more for _, *more in answers]
