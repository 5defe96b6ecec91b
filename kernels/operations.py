"""Operations under way: generators of steps, started in one order and driven until they are over.

A step is a condition to wait for; an operation goes on when that holds. So one piece of code serves the blocking call,
the asynchronous one and the wait that must notice aborts. Invariants: collectives of one communicator end in the order
in which they were started, messages in any; of those that use the same memory a later one reads what an earlier one
has written; and whoever waits goes on with all that this process has started, since the rank waited for may wait for
our part in something else.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from .errors import CollectiveMismatch, PeerLost, message
from .flat import Span, overlap
from .processes import refuse_in_forks
from .waiting import PEER_CHECK_SECONDS, Watch, turn, wait_until

Ready = Callable[[], bool]
Steps = Generator[Ready, None, Any]
Sleep = Callable[[Ready], None]  # for a moment, or until woken, unless it is ready

# Of communicators of this process, those with operations under way.
_active: set[Operations] = set()
os.register_at_fork(after_in_child=_active.clear)


class Transport(Protocol):
    """What the operations of a communicator need of it."""

    sleep: Sleep | None  # how who waits sleeps, where peers wake it

    def poll_messages(self) -> None:
        """Look once for what has arrived; receives then match it in the order in which they were posted."""

    def on_finished(self) -> None:
        """A collective is over."""

    def on_stall(self, work: Work) -> None:
        """Called now and then while a wait for `work` lasts: raise the reason, if there is one."""

    def on_waited(self) -> None:
        """A wait that lasted is over."""

    def on_timeout(self, work: Work, seconds: float) -> BaseException:
        """The error for a wait that lasts too long."""


class Work:
    """A started operation: `wait()` finishes it and gives its value, `is_completed()` asks without waiting."""

    __slots__ = (
        "_error",
        "_operations",
        "_ready",
        "_steps",
        "_value",
        "begun",
        "done",
        "memory",
        "peers",
        "site",
        "what",
    )

    def __init__(
        self,
        operations: Operations,
        what: str,
        steps: Steps,
        peers: Sequence[int],
        site: str = "",
        memory: Sequence[Span] = (),
    ):
        self._operations, self.what, self._steps, self.peers, self.site = operations, what, steps, peers, site
        self.memory, self.begun = memory, False
        self._ready: Ready | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self.done = False

    def is_completed(self) -> bool:
        with turn:
            self._operations.progress()
            if not self.done:
                self._operations.look(self)
            return self.done

    def wait(self, timeout: float | None = None) -> Any:
        with turn:
            self._operations.finish(self, timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def start(self) -> None:
        """Take the first step, which tells the peers."""
        self._ready = None
        self._step()

    def may_begin_before(self, later: Work) -> bool:
        """Whether one that was started later may begin before this one is over."""
        return self.begun and not overlap(self.memory, later.memory)

    def advance(self) -> bool:
        """Go on as far as no waiting is needed; whether the operation is over."""
        if self._steps.gi_running:  # type: ignore[attr-defined]
            return False  # it is further up the stack, waiting for a free slot
        if self._error is not None and not self.done:
            raise self._error
        try:
            while not self.done and (self._ready is None or self._ready()):
                self._step()
        except CollectiveMismatch as error:
            self._error = error  # told whenever it is waited for; it takes a moment to find out
            raise
        return self.done

    def fail(self, error: BaseException) -> None:
        """End with an error, for who waits for it."""
        self._error, self.done = error, True

    def _step(self) -> None:
        self.begun = True
        try:
            self._ready = next(self._steps)
        except StopIteration as end:
            self._value, self.done = end.value, True
        except BaseException as error:
            self._error, self.done = error, True
            raise


class Operations:
    """The operations of one communicator that are under way.

    Attributes:
        queue: collectives, in the order in which they were started.
        messages: sends and receives.
    """

    def __init__(
        self, transport: Transport, ranks: Sequence[int], watch: Watch, *, timeout: float, oversubscribed: bool
    ):
        refuse_in_forks(self, transport)
        self._transport, self._ranks, self._watch = transport, tuple(ranks), watch
        self.timeout, self._oversubscribed = timeout, oversubscribed
        self._next_look = 0.0
        self.generation = watch.generation
        self.queue: deque[Work] = deque()
        self.messages: list[Work] = []

    @property
    def stale(self) -> bool:
        """Whether the mesh has recovered from a failure since these were started."""
        return self.generation != self._watch.generation

    def start(
        self, what: str, steps: Steps, *, site: str, early: bool, async_op: bool, memory: Sequence[Span] = ()
    ) -> Any:
        """Start a collective, and finish it unless it is asynchronous.

        Args:
            site: where an asynchronous call was made; where a blocking one stands is found on the stack.
            early: take the first step at once, which tells the peers, unless it must wait for those before.
            memory: that it reads or writes, asked about only if it is to begin early.
        """
        work = Work(self, what, steps, range(len(self._ranks)), site, memory)
        early = early and all(before.may_begin_before(work) for before in self.queue)
        self.queue.append(work)
        if early:
            work.start()
        if not async_op:
            return work.wait()
        _active.add(self)
        return work

    def start_message(self, what: str, steps: Steps, peers: Sequence[int]) -> Work:
        """Start a send or a receive."""
        work = Work(self, what, steps, peers)
        self.messages.append(work)
        _active.add(self)
        self.progress_messages()
        return work

    def progress(self) -> None:
        """Advance what can be advanced without waiting."""
        if self.stale:
            self.drop()
            return
        self._watch.check()
        self.progress_collectives()
        self.progress_messages()
        if not self.queue and not self.messages:
            _active.discard(self)

    def progress_beside(self) -> None:
        """The same for who waits for another communicator's: a disagreement here is told to who waits for these."""
        try:
            self.progress()
        except CollectiveMismatch:
            _active.discard(self)

    def progress_collectives(self) -> None:
        while self.queue and self.queue[0].advance():
            self._finished()

    def look(self, work: Work) -> None:
        """What a wait does now and then, for who asks instead of waiting."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + PEER_CHECK_SECONDS
            self._watch.check_peers()
            self._transport.on_stall(work)

    def finish(self, work: Work, timeout: float | None = None) -> None:
        """Wait for one operation, and so for those started before it; `timeout` seconds instead of the usual."""
        if self.stale:
            self.drop()
        while not work.done:
            first = work if work in self.messages or not self.queue else self.queue[0]
            try:
                self._wait(lambda first=first: first.done, lambda first=first: first, timeout)  # type: ignore[misc]
            finally:
                if self.queue and self.queue[0].done:
                    self._finished()

    def wait_until(self, ready: Ready, what: str, *, gently: bool = False) -> None:
        """Wait for a condition that is part of `what`, a call that need not be among these."""

        def first() -> Work:
            return self.queue[0] if self.queue else Work(self, what, _waiting(ready), range(len(self._ranks)))

        self._wait(ready, first, gently=gently)

    def _wait(
        self, ready: Ready, work: Callable[[], Work], timeout: float | None = None, *, gently: bool = False
    ) -> None:
        def progressed() -> bool:
            self._progress_all()
            return ready()

        stalled = False

        def on_stall() -> None:
            nonlocal stalled
            stalled = True
            self._transport.on_stall(work())

        seconds = self.timeout if timeout is None else timeout
        wait_until(
            progressed,
            self._watch,
            timeout=seconds,
            oversubscribed=self._oversubscribed,
            on_timeout=lambda: self._transport.on_timeout(work(), seconds),
            on_stall=on_stall,
            sleep=self._transport.sleep,
            gently=gently,
        )
        if stalled:
            self._transport.on_waited()

    def drop(self) -> None:
        """End all with an error: a region failed, and nobody will answer."""
        for work in (*self.queue, *self.messages):
            work.fail(
                PeerLost(
                    message(
                        f"{work.what} was under way when a region failed",
                        where=f"group {self._ranks}",
                        remedy="start it again",
                    )
                )
            )
        self.queue.clear()
        self.messages.clear()
        _active.discard(self)

    def _progress_all(self) -> None:
        self.progress_messages()
        self.progress_collectives()
        for other in tuple(_active):
            if other is not self:
                other.progress_beside()

    def _finished(self) -> None:
        """Go on to the next operation in the queue."""
        self.queue.popleft()
        self._transport.on_finished()

    def progress_messages(self) -> None:
        if self.messages:
            self._transport.poll_messages()
            self.messages = [work for work in self.messages if not work.advance()]


def matched(inbox: list[Any], src: int | None, tag: int) -> Steps:
    """Wait for a message from a source (None: any) with a tag; takes it out of an inbox of (source, tag, ...)."""
    found: list[Any] = []

    def arrived() -> bool:
        for index, (source, its_tag, *_) in enumerate(inbox):
            if its_tag == tag and src in (None, source):
                found.append(inbox.pop(index))
                return True
        return False

    yield arrived
    return found[0]


def _waiting(ready: Ready) -> Steps:
    """An operation that consists of waiting."""
    yield ready
