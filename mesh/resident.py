"""Values that live on a driver's ranks: who refers to them here, when they go, and where they are missing.

A value's name is (number of the call that made it, index). Invariant: a value is on every rank for as long as an
`Array` here stands for it, or it is noted as missing on the ranks that were replaced since.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.errors import MeshError, PeerLost, message
from . import tasks
from .array import Array
from .pending import Task
from .spec import P

if TYPE_CHECKING:
    from .driver import DriverSession

Name = tuple[int, int]
Meta = tuple[tuple[int, ...], torch.dtype, P]


class Values:
    """The register of one mesh's resident values."""

    def __init__(self, session: DriverSession):
        self._session = session
        self.arrays: weakref.WeakValueDictionary[Name, Array] = weakref.WeakValueDictionary()
        self._garbage: deque[Name | int] = deque()
        self._missing: dict[Name, set[int]] = {}

    def adopt(self, name: Name, array: Array) -> None:
        """Tie a value to the driver's object for it: it goes when that does."""
        self.arrays[name] = array
        weakref.finalize(array, self._garbage.append, name).atexit = False

    def drop(self, number: int) -> None:
        """Let go of all that a call has left on the ranks."""
        self._garbage.append(number)

    def garbage(self) -> list[Name | int]:
        """What the ranks may free now: values, and numbers of calls whose results nobody took."""
        found: list[Name | int] = []
        while self._garbage:
            name = self._garbage.popleft()
            found.append(name)
            if isinstance(name, tuple):
                self._missing.pop(name, None)
        return found

    def lost_on(self, rank: int) -> None:
        """A rank was replaced: the new one has nothing."""
        for name in list(self.arrays):
            self._missing.setdefault(name, set()).add(rank)

    def restore(self, array: Array) -> None:
        """Give a value to the ranks that were replaced since it was made, from ranks that have the same shard."""
        source = array._source
        assert isinstance(source, ResidentSource)
        source.check_there(self._session)
        missing = self._missing.get(source.name)
        if not missing:
            return
        session, spec, layout = self._session, array.spec, self._session.layout
        for rank in sorted(missing):
            donors = [twin for twin in layout.twins(spec, rank) if twin not in missing]
            if not donors:
                raise PeerLost(
                    message(
                        f"a value on this mesh was lost with rank {rank}, which alone held a shard of it",
                        got=f"{spec}, shape {tuple(array.shape)}",
                        where=session.describe(),
                        remedy="restore it from a checkpoint, or compute it again",
                    ),
                    rank,
                )
            shard = session.wait(session.submit(tasks.fetch_value, (source.name,), ranks=donors[:1])).values()[0]
            session.wait(session.submit(tasks.set_value, (source.name, shard, spec), ranks=[rank]))
        self._missing.pop(source.name, None)


class Outputs:
    """The values that a call will leave on the ranks; freed if this goes before they were made Arrays of."""

    def __init__(self, mesh: Any, session: DriverSession):
        self._mesh, self._session = mesh, session
        self.number = session.new_number()
        self._finalizer = weakref.finalize(self, session.values.drop, self.number)
        self._finalizer.atexit = False

    def array(
        self, index: int, task: Task, meta: Callable[[], Meta], *, deal: Any = None, hint: Meta | None = None
    ) -> Array:
        name = (self.number, index)
        array = Array(self._mesh, ResidentSource(self._session, name, task, meta, hint), deal)
        self._session.values.adopt(name, array)
        return array

    def taken(self) -> None:
        """There is an Array for every value now."""
        self._finalizer.detach()


class ResidentSource:
    """Where a resident Array's data is; see `array.Source`.

    Args:
        task: the call that makes the value.
        meta: its shape, dtype and spec, asked once that call is over.
        hint: what the same call made the last time.
    """

    def __init__(
        self, session: DriverSession, name: Name, task: Task, meta: Callable[[], Meta], hint: Meta | None = None
    ):
        self._session, self.name, self._meta, self.hint = session, name, meta, hint
        self._task: Task | None = task
        self._known: Meta | None = None

    def settle(self) -> Meta:
        """(shape, dtype, spec), once the call that makes the value is over; raises what went wrong in it."""
        if self._known is None:
            if self._task is not None:
                self._session.wait(self._task)
            self._known = self.hint = self._meta()
            self._task = None
        return self._known

    def check_there(self, session: DriverSession) -> None:
        """Refuse a value of ranks that are no more: names begin anew when a mesh is restarted."""
        if self._session is not session:
            raise MeshError(
                message(
                    "this value was lost when its mesh was restarted",
                    where=session.describe(),
                    remedy="compute it again, or put() it again",
                )
            )

    def check(self) -> None:
        """Raise what went wrong in the call that makes the value, if that is known; never waits."""
        task = self._task
        if task is not None and task.settled.is_set() and task.failure is not None:
            self._session.wait(task)

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

    value = local

    def _fetch(self, ranks: Sequence[int]) -> list[torch.Tensor]:
        self.settle()
        session = self._session
        array = session.values.arrays[self.name]
        return session.wait(session.submit(tasks.fetch_value, (self.name,), ranks=ranks, needs=[array])).values()

    def shards(self) -> list[torch.Tensor]:
        return self._fetch(range(self._session.layout.size))

    def full(self) -> torch.Tensor:
        layout, spec = self._session.layout, self.spec()
        owners = sorted({layout.owner(spec, rank) for rank in range(layout.size)})
        found: list[Any] = [None] * layout.size
        for rank, shard in zip(owners, self._fetch(owners), strict=True):
            found[rank] = shard
        return layout.join(found, spec)
