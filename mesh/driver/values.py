"""Values that live on a driver's ranks: which Arrays refer to them, when they are freed, and where they are missing.

A value's name is (number of the call that made it, index). Invariant: as long as an `Array` here stands for a value, it
is on every rank, or is noted as missing on ranks that were replaced since.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...kernels.errors import RankOnly
from ...kernels.interrupts import QueuedRef, uninterrupted
from .. import protocol
from ..array import Array, Meta, meta
from ..batch import Deal, refuse_ragged
from ..protocol import ALL, Spans, each_span
from ..replication.values import scalar_in
from ..spec import Layout, P
from .lost_values import lost, restarted
from .pending import Pure, Task, made_for_its_size
from .session_view import Session


class CallValues:
    """The values that a call leaves on the ranks; see `array.Source`.

    If this object is deleted before Arrays were made, the values are freed.

    Attributes:
        number, task: the call's number, and the call.
        missing: index -> the ranks that were replaced since, and lack the value.
        unread_on: the ranks that were replaced since, and have yet to read again what can be read again.
        named: index -> the Array, if a rank was sent its name.
        tells_numbers: the call's answers contain the numbers among its values, so that these need not be fetched.
        freed: the names of values that were freed while others were not.
        read: makes the task that reads them, if they are a batch (`protocol.FillValues`).
        given: releases the driver's part of the arena that they lie in, if they do.
    """

    __slots__ = (
        *("__weakref__", "_find", "_gone", "_ids", "_live", "_metas", "_prints", "_values", "deal"),
        *("donated", "freed", "given", "hints", "missing", "named", "number", "read", "session", "sure", "task"),
        *("tells_numbers", "unread_on"),
    )

    def __init__(self, values: Values, session: Session, number: int):
        self._values, self.session, self.number = values, session, number
        self.task: Task | None = None
        self.hints: Sequence[Meta] = ()
        self.sure = False
        self.deal: Deal | None = None
        self.missing: dict[int, set[int]] = {}
        self.named: dict[int, weakref.ref[Array]] = {}
        self.freed: list[int] = []
        self.unread_on: set[int] = set()
        self.read: Callable[..., protocol.FillValues] | None = None
        self.given: weakref.finalize | None = None
        self._metas: Sequence[Meta] | None = None
        self._find: Callable[[], Sequence[Meta]] | None = None
        self.tells_numbers = False
        self._prints = b""
        self._live: int | None = None  # how many Arrays are alive, once they were made
        self._ids: list[int] = []  # of all Arrays
        self._gone: list[int] = []  # indices of Arrays that are gone, which the ranks have not been told yet
        self.donated: dict[int, str] = {}

    def arrays(
        self,
        task: Task | None,
        hints: Sequence[Meta],
        find: Callable[[], Sequence[Meta]] | None = None,
        deal: Deal | None = None,
    ) -> list[Array]:
        """An Array for each value.

        Args:
            task: the call that makes them.
            hints: shapes, dtypes and specs of the last such call.
            find: gives those of this call, once it is over; None: the hints are right.
        """
        self.task, self.hints, self.sure, self._find, self.deal = task, hints, find is None, find, deal
        mesh, count = self.session.mesh, len(hints)
        with self.session.lock, uninterrupted():  # a rank may be replaced meanwhile
            self._live = count
            if self.unread_on:
                self.missing = {index: set(self.unread_on) for index in range(count)}
            arrays = [Array(mesh, self, index) for index in range(count)]
            self._ids = list(map(id, arrays))
            self._values.watch(self, arrays)
        return arrays

    @property
    def ids(self) -> list[int]:
        """The ids of all Arrays, if all are alive; else empty."""
        self._values.sort()
        return [] if self._gone or self._live != len(self._ids) else self._ids

    def restore(self, index: int, name: str = "a value on this mesh") -> None:
        """Bring a value (`name` in messages) to replaced ranks: read it again, or move it from ranks that have it."""
        self.check(self.session)
        if not self.missing.get(index):
            return
        if self.read is None:
            while missing := self.missing.get(index):  # another rank may die meanwhile
                if not self.session.move_values():
                    raise lost(self.session, self.meta(index), missing, name)
            return
        ranks = sorted(self.unread_on)
        self.was_read(ranks)
        try:
            batch = Pure("a batch", values=(self,))
            self.session.wait(self.session.submit(self.read, ranks=ranks, pure=batch, reported=True))
        except BaseException:
            self.not_read(ranks)
            raise

    def not_read(self, ranks: Iterable[int]) -> None:
        """Note that these ranks lack what can be read again."""
        self.unread_on.update(ranks)
        self.missing = {index: set(self.unread_on) for index in range(len(self.hints))}

    def was_read(self, ranks: Iterable[int]) -> None:
        """Note that these ranks have what can be read again, or will have read it before they do anything else."""
        self.unread_on.difference_update(ranks)
        self.missing = {index: set(self.unread_on) for index in self.missing if self.unread_on}

    def freed_names(self) -> Spans:
        """The names of the values that the ranks were told to free."""
        return (self.number, 0, ALL) if self._live is not None and self._live <= 0 else tuple(self.freed)

    def was_freed(self, index: int) -> bool:
        return any(start <= index < stop for _, start, stop in each_span(self.freed_names()))

    def gone(self) -> Spans:
        """The names of values that no Array stands for any more, to be told to the ranks now."""
        assert self._live is not None
        indexes, self._gone = sorted(self._gone), []
        self._live -= len(indexes)
        if self._live <= 0:
            return (self.number, 0, ALL)
        spans: list[int] = []
        for _, run in itertools.groupby(enumerate(indexes), lambda pair: pair[1] - pair[0]):
            found = [index for _, index in run]
            spans += (self.number, found[0], found[-1] + 1)
        for index in indexes:
            self.missing.pop(index, None)
        self.freed += spans
        return tuple(spans)

    @property
    def live(self) -> int:
        return (self._live or 0) - len(self._gone)

    def settle(self) -> Sequence[Meta]:
        """Wait for the call; gives shapes, dtypes and specs, or raises the call's error."""
        if self._metas is None:
            if self.task is not None:
                task = self.session.wait(self.task)
                self.take_numbers(task.prints.get(task.ranks[0], b""))
            find, self.task = self._find, None  # read before it is cleared: another thread may be here, too
            self._metas = self.hints = self.hints if find is None else find()
            self.sure = True
        return self._metas

    @property
    def made(self) -> bool:
        """Whether Arrays were made of them (they may be gone since)."""
        return self._live is not None

    def was_cut(self, specs: dict[int, P]) -> None:
        """Note how values are cut on a mesh of another size; their call is over, and values not in `specs` are gone."""
        if self.given is not None:
            self.given.detach()  # that memory no longer exists
        metas = list(self.settle())
        for index, spec in specs.items():
            metas[index] = meta(metas[index].shape, metas[index].dtype, spec)
        self._metas = self.hints = metas

    def take_numbers(self, prints: bytes) -> None:
        """Keep the numbers in a rank's answer to the call, which is over."""
        if self.tells_numbers:
            self._prints = prints

    def check(self, session: Any) -> None:
        """Raise the call's error if it is known by now, without waiting.

        Also refuses values from before a restart of the mesh, which uses the same names again.
        """
        if self.session is not session:
            raise restarted(session, "value")
        task = self.task
        if task is not None and task.failure is not None and task.settled.is_set():
            session.wait(task)

    def meta(self, index: int) -> Meta:
        return self.settle()[index]

    def local(self, index: int) -> torch.Tensor:
        raise RankOnly("the driver is not a rank and holds no shard", remedy="use .shards() for all, or .full()")

    def _fetch(self, indexes: Sequence[int], layout: Layout, ranks: Sequence[int] | None = None) -> list[Any]:
        self.settle()
        spans = tuple(word for index in indexes for word in (self.number, index, index + 1))
        fetch = functools.partial(protocol.FetchValues, spans=spans)
        pure = Pure("fetching", lambda: [(self, index) for index in indexes], holds=self, fetches=True)
        task = self.session.submit(fetch, ranks=ranks, layout=layout, pure=pure, reported=True)
        return self.session.wait(task).values()

    @made_for_its_size
    def shards(self, index: int) -> list[torch.Tensor]:
        return [shard for (shard,) in self._fetch([index], self.session.layout)]

    @made_for_its_size
    def full(self, indexes: Sequence[int]) -> list[torch.Tensor]:
        layout, metas = self.session.layout, tuple(self.settle())
        for index in indexes:
            refuse_ragged(metas[index].shape)
        found: dict[int, Any] = {n: scalar_in(self._prints, metas, n) if self._prints else None for n in indexes}
        rest = [index for index, number in found.items() if number is None]
        if rest:
            spec = metas[rest[0]].spec  # of all
            owners, shards = layout.owners(spec), list[Any]([None] * layout.size)
            for index, *parts in zip(rest, *self._fetch(rest, layout, owners), strict=True):
                for rank, part in zip(owners, parts, strict=True):
                    shards[rank] = part
                found[index] = layout.join(shards, spec)
        return [found[index] for index in indexes]


class Values:
    """The register of one mesh's values."""

    def __init__(self, session: Session):
        self.session = session
        # What is gone: an Array, about it its call's values and the index; or values, about them None and the call.
        self._garbage: deque[QueuedRef] = deque()
        self._calls: dict[int, QueuedRef] = {}  # number of a call -> the watch of its values
        # Watches of their Arrays, held here: one that became garbage together with its Array would not be called.
        self._arrays: dict[int, list[QueuedRef]] = {}
        self._to_make: set[int] = set()  # calls without Arrays of their values as yet
        self._dropped: list[int] = []  # calls whose values went before Arrays were made
        self._partly: set[CallValues] = set()  # some of their Arrays are gone, which the ranks have not been told

    def of_call(self, number: int) -> CallValues:
        """A place for the values of a call that is about to be sent."""
        with uninterrupted():
            values = CallValues(self, self.session, number)
            self._calls[number] = watch = QueuedRef(values, self._garbage.append)
            watch.about = None, number
            self._to_make.add(number)
        return values

    def watch(self, values: CallValues, arrays: Sequence[Array]) -> None:
        """Watch the Arrays of a call, so that the ranks are told which of them are gone."""
        watches = [QueuedRef(array, self._garbage.append) for array in arrays]
        for index, watch in enumerate(watches):
            watch.about = values, index
        self._to_make.discard(values.number)
        if watches:
            self._arrays[values.number] = watches

    def sort(self) -> None:
        """Take the queue of what is gone, and note it with the values of each call."""
        if not self._garbage or self.session.foreign:  # a thread that a fork lacks may hold its lock
            return
        with self.session.lock, uninterrupted():
            while self._garbage:
                values, number = self._garbage.popleft().about
                if values is not None:
                    values._gone.append(number)
                    self._partly.add(values)
                    continue
                del self._calls[number]
                if number in self._to_make:
                    self._to_make.remove(number)
                    self._dropped.append(number)

    def __len__(self) -> int:
        return sum(values.live for values in self._all())

    def _all(self) -> list[CallValues]:
        return [values for watch in list(self._calls.values()) if (values := watch()) is not None]

    def freed(self) -> Spans:
        """What the ranks may free now."""
        self.sort()
        spans: list[int] = []
        for values in self._partly:
            spans += values.gone()
            if values.live <= 0:
                del self._arrays[values.number]
        for number in self._dropped:
            spans += (number, 0, ALL)
        self._partly.clear()
        self._dropped.clear()
        return tuple(spans)

    def of_calls(self, *, read: bool) -> list[CallValues]:
        """The values of all calls that read them (`read`), or of all others."""
        return [values for values in self._all() if (values.read is not None) == read]

    def needed(self) -> tuple[tuple[int, ...], Spans]:
        """What a replacement rank is to keep of the dead one's values: the calls, and the names among them to free."""
        calls = self.of_calls(read=False)
        return tuple(values.number for values in calls), tuple(name for values in calls for name in values.freed)

    def lost_on(self, rank: int, *, lasting: bool) -> None:
        """Note that a rank was replaced.

        Args:
            lasting: the new one has the old one's values, except those that can be read again.
        """
        for values in self._all():
            if values.read is not None:
                values.not_read([rank])
            elif not lasting:
                for index in range(len(values.hints)):
                    values.missing.setdefault(index, set()).add(rank)

    def unread(self, held: Iterable[Any]) -> list[CallValues]:
        """Batches that some rank lacks and `held` (calls' values, or Arrays) or a function on the ranks refers to."""
        wanted = {id(one._source if isinstance(one, Array) else one) for one in held}
        return [values for values in self._all() if values.unread_on and (id(values) in wanted or values.named)]

    def object_of(self, name: Any) -> Any:
        """The object that was sent under a name (see `sending`)."""
        if name[0] in ("remote", "ref"):
            return self.session.node.caller.object_of(name)
        values: Any = self._calls[name[1]]() if name[0] == "array" else None
        return self.session.mesh if name[0] == "mesh" else values.named[name[2]]()
