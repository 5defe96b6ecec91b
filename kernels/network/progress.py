"""What ranks of several hosts have done, published in their store while they stand still.

A wait for a rank that left the region without its part, or that waits for this rank in another collective, can then end
at once, as on one host. A store is too slow to be told of every step: a thread looks once a second, and publishes what
its rank has done if that has not changed since, and the rank waits or is in no region. Invariant: what is published was
true at one moment, and only grows: a rank begins no region and no collective twice, so it is right to act on it later.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist

from ..call import other_calls
from ..callsite import call_site
from ..operations import Work
from ..shm.stalls import is_alone
from .stores import has_ended

_SECONDS = 1.0  # between looks, at what this rank does and at what others have published
_UNOPENED = -1  # collectives begun in a group that a rank has not opened: so a wait for that has this number, too


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """The collective that a rank waits in.

    Attributes:
        group: the name of its communicator.
        number: how many collectives came before it there.
        ranks: of the group.
        what: the words for messages.
    """

    group: str
    number: int
    ranks: tuple[int, ...]
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """What a rank has published.

    Attributes:
        region, active: the last region that it has entered, and whether it is still in it.
        groups: the counts of each group: see `GroupProgress`.
    """

    region: int
    active: bool
    wait: Wait | None
    groups: dict[str, list[int]]

    def has_left(self, region: int) -> bool:
        return self.region > region or (self.region == region and not self.active)


class StoreProgress:
    """What one rank has done, and what the others have published.

    Args:
        generation: gives the current one; records of earlier ones don't count.

    Attributes:
        unreached: the error if the store did not answer. Then it is not asked again: each time takes as long.
    """

    def __init__(self, store: dist.Store, rank: int, generation: Callable[[], int]):
        self._store, self.rank, self._generation = store, rank, generation
        self._at = 0, False  # the last region that this rank has entered, and whether it is in it
        self.wait: Wait | None = None
        self.waits_from = 0.0  # since when, on `time.monotonic`
        self.groups: dict[str, GroupProgress] = {}  # of the generation in which the last one was opened
        self._groups_of = 0
        self._before: Any = None  # at the last look
        self._published: Any = None
        self._read: dict[int, Published | None] = {}
        self._seen, self._next_look = (0, 0), 0.0  # (generation, number of records) of what was read; when to ask again
        self._is_looked_at = False
        self.unreached: Exception | None = None

    def enter(self, region: int) -> None:
        self.wait, self._at = None, (region, True)
        if not self._is_looked_at:
            self._is_looked_at = True
            _look_at(self)

    def leave(self) -> None:
        self.wait, self._at = None, (self._at[0], False)

    def group(self, name: str, ranks: Sequence[int]) -> GroupProgress:
        """A group that this rank is about to open: see `GroupProgress`."""
        if (generation := self._generation()) != self._groups_of:
            self._groups_of = generation
            self.groups.clear()
        found = self.groups[name] = GroupProgress(self, name, ranks)
        return found

    def look(self) -> None:
        """Publish what this rank has done, if it has stood still since the last look; for the thread that looks."""
        now = self._generation(), self._at, self.wait
        region, active = self._at
        if not region or (active and self.wait is None):
            self._before = None
            return
        done = {name: one.published() for name, one in tuple(self.groups.items())}
        if (*now, done) != self._before or now != (self._generation(), self._at, self.wait):
            self._before = *now, done  # perhaps not of one moment
            return
        if self._before == self._published or self.unreached is not None or has_ended(self._store):
            return
        self._published = self._before  # first: where it fails, the watch says so, and it is not tried again
        generation, _, waits = now
        wait = None if waits is None else dataclasses.astuple(waits)
        self._store.set(self._key(generation, self.rank), json.dumps([region, active, wait, done]))
        self._store.add(self._key(generation, "records"), 1)

    def of(self, rank: int) -> Published | None:
        """What another rank has published last, if it has published anything."""
        generation, now = self._generation(), time.monotonic()
        if self.unreached is not None:
            return None
        try:
            if now >= self._next_look:
                self._next_look = now + _SECONDS
                seen = generation, self._store.add(self._key(generation, "records"), 0)
                if seen != self._seen:
                    self._seen = seen
                    self._read.clear()
            if self._seen[0] != generation or not self._seen[1]:
                return None
            if rank not in self._read:
                self._read[rank] = self._fetched(self._key(generation, rank))
        except dist.DistNetworkError as error:
            self.unreached = error  # as the watch will say
            return None
        except dist.DistError:
            return None
        return self._read[rank]

    def has_left(self, rank: int) -> bool:
        """Whether another rank has left the region that this rank is in."""
        region, active = self._at
        found = self.of(rank) if active else None
        return found is not None and found.has_left(region)

    def _fetched(self, key: str) -> Published | None:
        if not self._store.check([key]):
            return None
        region, active, wait, groups = json.loads(self._store.get(key))
        if wait is not None:
            group, number, ranks, what = wait
            wait = Wait(group, number, tuple(ranks), what)
        return Published(region, active, wait, groups)

    @staticmethod
    def _key(generation: int, name: object) -> str:
        return f"progress/{generation}/{name}"


class GroupProgress:
    """What this rank has done in one group.

    Args:
        name: of the group, the same on all its ranks, and of no other one.
        ranks: the global ranks of the group.
    """

    def __init__(self, progress: StoreProgress, name: str, ranks: Sequence[int]):
        self._progress, self._name, self._ranks = progress, name, tuple(ranks)
        self._queue: Collection[Work] | None = None
        self._begun: Sequence[int] | None = None
        self.finished = 0
        self._sent = [0] * len(self._ranks)

    def open(self, queue: Collection[Work], begun: Sequence[int] | None = None) -> None:
        """The group is open; its collectives are queued there.

        Args:
            begun: how many have begun, of a transport that does not queue all and counts them itself.
        """
        self._queue, self._begun = queue, begun

    def counts(self) -> tuple[int, int]:
        """How many came before the one that this rank waits in, and how many are begun or will be without its doing."""
        if self._queue is None:
            return _UNOPENED, 0
        if self._begun is None:
            return self.finished, self.finished + len(self._queue)
        queue = tuple(self._queue)  # another thread may change it
        (begun,), queued = self._begun, sum(each.begun for each in queue)
        return begun - (queued if queue else 1), begun + len(queue) - queued

    def published(self) -> list[int]:
        return [*self.counts(), *self._sent]

    def finish(self) -> None:
        """Count one operation of this rank."""
        self.finished += 1

    def send(self, dst: int) -> None:
        """Count one message of this rank."""
        self._sent[dst] += 1

    def has_left(self, rank: int) -> bool:
        """Whether a rank of the group has left the region that this rank is in."""
        return self._progress.has_left(self._ranks[rank])

    def finished_by(self, rank: int) -> int:
        """How many collectives a rank of the group has finished."""
        return self._of(rank)[0]

    def sent_by(self, rank: int, dst: int) -> int:
        """How many messages a rank of the group has sent to another."""
        return self._of(rank)[2 + dst]

    def _of(self, rank: int) -> list[int]:
        found = self._progress.of(self._ranks[rank])
        nothing = [0, _UNOPENED, *[0] * len(self._ranks)]
        return nothing if found is None else found.groups.get(self._name, nothing)

    def check_wait(self, what: str, peers: Collection[int]) -> None:
        """Note that this rank waits in a collective, and raise if one that it waits for waits for it in another one.

        Each waits for the other to begin what it is in itself, so neither will, unless a thread of theirs does.
        """
        progress, now = self._progress, time.monotonic()
        mine, number = progress.wait, self.counts()[0]
        if mine is None or (mine.group, mine.number) != (self._name, number):
            mine = Wait(self._name, number, self._ranks, f"waiting in {what} at {call_site()}") if is_alone() else None
            progress.wait, progress.waits_from = mine, now
        if mine is None or now - progress.waits_from < _SECONDS:
            return
        for rank in peers:
            found = progress.of(self._ranks[rank])
            theirs = None if found is None or self._ranks[rank] == progress.rank else found.wait
            if theirs is None or progress.rank not in theirs.ranks or self._of(rank)[1] > number:
                continue
            group = progress.groups.get(theirs.group)
            if (_UNOPENED if group is None else group.counts()[1]) <= theirs.number:
                raise other_calls({progress.rank: mine.what, self._ranks[rank]: theirs.what})

    def end_wait(self) -> None:
        self._progress.wait = None

    def close(self) -> None:
        """Do nothing: others may still read what was published."""


# -- the thread that looks ---------------------------------------------------------------------------------------------

_looked_at: weakref.WeakSet[StoreProgress] = weakref.WeakSet()
_lock = threading.Lock()
_over = threading.Event()
_thread: threading.Thread | None = None


def _look_at(progress: StoreProgress) -> None:
    global _thread
    with _lock:
        _looked_at.add(progress)
        if _thread is None:
            _thread = threading.Thread(target=_look, name="spmd-progress", daemon=True)
            _thread.start()


def _look() -> None:
    while not _over.wait(_SECONDS):
        with _lock:
            found = tuple(_looked_at)
        for progress in found:
            try:
                progress.look()
            except dist.DistNetworkError as error:  # the watch says so
                progress.unreached = error
            except dist.DistError:
                pass


@atexit.register
def _end() -> None:
    """End the thread before the interpreter: it may be in torch's code, which does not survive that."""
    _over.set()
    if _thread is not None:
        _thread.join(2 * _SECONDS)


def _in_child() -> None:
    global _thread, _lock, _over
    _thread, _lock, _over = None, threading.Lock(), threading.Event()
    _looked_at.clear()


os.register_at_fork(after_in_child=_in_child)
