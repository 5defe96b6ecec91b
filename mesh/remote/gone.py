"""Results and objects that nothing in this process refers to any more, until their ranks are told.

Invariant: no line of Python runs when a `Ref` or the handle of an object goes. Python ignores what finalizers raise, so
a Ctrl-C that came during one would be lost, and what had to be released would stay.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError
from typing import Any

from ...kernels.interrupts import QueuedRef, uninterrupted
from .connections import Post
from .protocol import Name, NodeId, Release
from .reference import Unseen
from .restoring import Restoring

THREADS = 64  # of so many the error of a call is kept that nobody can ask for
RELEASES = 64  # results no longer needed, after which they are released without waiting for the next call


class Gone:
    """What is no longer needed, and errors that nobody can ask for any more.

    Attributes:
        made: the objects whose handles this process has.
    """

    def __init__(self, post: Post, restoring: Restoring):
        self._post, self._restoring = post, restoring
        self.made: set[Name] = set()
        self._watches: dict[int, QueuedRef] = {}  # by id, held here: a watch that is gone itself would not be called
        self._garbage: deque[QueuedRef] = deque()  # filled by the garbage collector, which may run at any moment
        self._results: deque[tuple[NodeId, int]] = deque()
        self._objects: deque[tuple[NodeId, Name]] = deque()
        self._unseen: dict[threading.Thread, BaseException] = {}  # the last one of each thread's calls

    @property
    def watching(self) -> bool:
        """Whether a Ref or a handle is alive, or its end has not been seen yet."""
        return bool(self._watches)

    @property
    def all_dropped(self) -> bool:
        """Whether no handle of an object is left."""
        self.sort()
        return self.made <= {name for _, name in tuple(self._objects)}

    def watch(self, obj: Any, owner: NodeId, name: Name, unseen: Unseen | None = None) -> None:
        """Watch a Ref, or a handle; must not be interrupted.

        Args:
            unseen: a Ref's error, as its future would keep it alive by the frames that this went through.
        """
        if self._post.closed is not None:
            return
        watch = QueuedRef(obj, self._garbage.append)
        watch.about = owner, name, unseen
        self._watches[id(watch)] = watch

    def drop(self, owner: NodeId, name: Name) -> None:
        """Note that there is no handle of an object."""
        self._objects.append((owner, name))
        self._post.wake()

    def sort(self) -> None:
        """Take the queue of what is gone."""
        if not self._garbage or self._post.foreign:  # a thread that a fork lacks may hold its lock
            return
        with self._post.lock, uninterrupted():
            while self._garbage:
                watch = self._garbage.popleft()
                self._watches.pop(id(watch), None)
                owner, name, unseen = watch.about
                if unseen is None:
                    self._objects.append((owner, name))
                    continue
                self._results.append((owner, name[1]))
                self.note_unseen(unseen)

    def close(self) -> None:
        """Watch nothing any more."""
        self._watches.clear()
        self._garbage.clear()

    def note_unseen(self, unseen: Unseen) -> None:
        """Note the error of a call whose Ref is gone, if there is one that nobody has seen."""
        with self._post.lock:
            error, unseen.error = unseen.error, None
            if error is not None and not isinstance(error, CancelledError) and self._post.closed is None:
                self._unseen[unseen.caller] = error
                if len(self._unseen) > THREADS:
                    del self._unseen[next(iter(self._unseen))]

    def raise_unseen(self, *, closing: bool = False) -> None:
        """Raise the error of a call whose Ref is gone, so that nobody can ask for it any more.

        It is raised by the thread that made the call; by any if that has ended, or if the mesh is closing.
        """
        self.sort()
        if not self._unseen:
            return
        this = threading.current_thread()
        with self._post.lock:
            for thread in self._unseen:
                if closing or thread is this or not thread.is_alive():
                    raise self._unseen.pop(thread)

    def results_of(self, owner: NodeId) -> tuple[int, ...]:
        """The results of one rank that are no longer needed; those of other ranks stay in the queue."""
        self.sort()
        mine = []
        for _ in range(len(self._results)):
            where, number = self._results.popleft()
            if where[0] == owner[0]:
                mine.append(number)
            else:
                self._results.append((where, number))
        return tuple(mine)

    def tidy(self) -> None:
        """Tell other processes what is no longer needed."""
        self.sort()
        if not self._objects and len(self._results) < RELEASES:
            return
        with self._post.lock:
            while self._objects:
                owner, name = self._objects.popleft()
                if (restorable := self._restoring.objects.get(name)) is not None:
                    owner = restorable.owner  # where it lives now
                self.made.discard(name)
                self._restoring.forget(name)
                self._release(owner, (name,))
            while len(self._results) >= RELEASES:
                self._release(self._results[0][0])

    def _release(self, owner: NodeId, objects: tuple[Name, ...] = ()) -> None:
        released = self.results_of(owner)
        connection = self._post.alive(owner)
        if connection is not None:
            connection.send(Release(released, objects))
