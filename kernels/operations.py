"""Operations under way: generators of steps, started in one order and driven until they are over.

A step is a condition to wait for; when it holds, the operation goes on. So the same code serves blocking calls,
asynchronous calls, and waits that must notice aborts. Invariants: collectives of one communicator end in the order in
which they were started, messages in any order; if two operations use the same memory, the later one reads what the
earlier one wrote; and a wait, as a loop that asks whether an operation is over, advances everything that this process
has started, since the rank that it waits for may itself be waiting for our part in something else.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from .call import here
from .errors import CollectiveMismatch, PeerLost
from .flat import Span, overlap
from .processes import refuse_in_forks
from .waiting import PEER_CHECK_SECONDS, Watch, turn, wait_until

Ready = Callable[[], bool]
Steps = Generator[Ready, None, Any]
Sleep = Callable[[Ready], None]  # sleeps for a moment, or until woken, unless the condition holds

# The communicators of this process that have operations under way.
_active: set[Operations] = set()
os.register_at_fork(after_in_child=_active.clear)


class Transport(Protocol):
    """What operations need from their communicator."""

    rank: int
    sleep: Sleep | None  # how a waiting rank sleeps, if its peers can wake it

    def poll_messages(self) -> None:
        """Check once for arrived messages; receives then match them in the order in which they were posted."""

    def on_finished(self) -> None:
        """A collective is over."""

    def on_stall(self, work: Work) -> None:
        """Called now and then while a wait for `work` lasts: raise the reason, if there is one."""

    def on_waited(self) -> None:
        """A wait for which `on_stall` was called is over."""

    def on_timeout(self, work: Work, seconds: float) -> BaseException:
        """The error for a wait that lasts too long."""


class Work:
    """A started operation: `wait()` finishes it and returns its value, `is_completed()` checks without waiting."""

    steps_taken = 0  # of all operations of this process

    __slots__ = (
        "_error",
        "_operations",
        "_ready",
        "_steps",
        "_value",
        "begun",
        "done",
        "is_bounded",
        "memory",
        "peers",
        "seen",
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
        begins: Ready | None = None,
    ):
        self._operations, self.what, self._steps, self.peers, self.site = operations, what, steps, peers, site
        self.memory, self.begun = memory, False
        self._ready = begins
        self._value: Any = None
        self._error: BaseException | None = None
        self.done = self.seen = False  # `seen`: the program knows that it is done, or has failed
        self.is_bounded = False  # whether the program may stop waiting for it, after a time or since it polls

    def is_completed(self) -> bool:
        with turn:
            self._operations.progress_others()
            return self.has_ended()

    def has_ended(self) -> bool:
        """`is_completed`, of a part of another operation, during which the others advance anyway."""
        with turn:
            self._operations.progress()
            if not self.done:
                self._operations.look(self)
            self.seen |= self.done
            return self.done

    def wait(self, timeout: float | None = None) -> Any:
        with turn:
            self._operations.finish(self, timeout)
        self.seen = True
        if self._error is not None:
            raise self._error
        return self._value

    def may_begin_before(self, later: Work) -> bool:
        """Whether an operation that was started later may begin before this one is over."""
        return self.begun and not overlap(self.memory, later.memory)

    def advance(self) -> bool:
        """Go on as far as possible without waiting; returns whether the operation is over."""
        if self._steps.gi_running:  # type: ignore[attr-defined]
            return False  # it is further up the stack, waiting for a free slot
        if self._error is not None and not self.done:
            raise self._error
        try:
            while not self.done and (self._ready is None or self._ready()):
                self.step()
        except CollectiveMismatch as error:
            self._error = error  # raised again at every wait for it, since finding out takes a moment
            raise
        return self.done

    def fail(self, error: BaseException) -> None:
        """End with an error, which `wait()` will raise."""
        self._error, self.done = error, True

    def step(self) -> None:
        self.begun = True
        Work.steps_taken += 1
        try:
            self._ready = next(self._steps)
        except StopIteration as end:
            self._value, self.done = end.value, True
            self._ready = None  # which may hold what arrived
        except BaseException as error:
            self._error, self.done = error, True
            raise


class Operations:
    """The operations of one communicator that are under way.

    Attributes:
        queue: collectives, in the order in which they were started.
        messages: sends and receives.
        of_call: those of the current call, if it is one of an @spmd function; those that the program knows to be over
            are taken out now and then.
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
        self.of_call: list[Work] = []
        self._call, self._most = here.call, 1

    @property
    def stale(self) -> bool:
        """Whether the mesh has recovered from a failure since these operations were started."""
        return self.generation != self._watch.generation

    def start(
        self, what: str, steps: Steps, begins: Ready | None, *, site: str, async_op: bool, memory: Sequence[Span] = ()
    ) -> Any:
        """Start a collective, and finish it unless it is asynchronous.

        Args:
            begins: whether it can take its first step now. Then it does so at once, so that peers see it, unless it has
                to wait for earlier operations. None if it always waits for these.
            site: where an asynchronous call was made; the site of a blocking call is found on the stack.
            memory: the memory that it reads or writes; needed only if it is to begin early.
        """
        work = Work(self, what, steps, range(len(self._ranks)), site, memory, begins)
        early = begins is not None and begins() and all(before.may_begin_before(work) for before in self.queue)
        self.queue.append(work)
        if early:
            work.step()  # which tells the peers
        if not async_op:
            return work.wait()
        _active.add(self)
        return work

    def start_message(self, what: str, steps: Steps, peers: Sequence[int]) -> Work:
        """Start a send or a receive."""
        work = Work(self, what, steps, peers)
        self.messages.append(work)
        if (call := here.call) & 1:
            if call != self._call:
                self._call, self.of_call, self._most = call, [], 1
            self.of_call.append(work)
            if len(self.of_call) > self._most:  # now and then, since each look is at all of them
                self.of_call = [one for one in self.of_call if not (one.done and one.seen)]
                self._most = 2 * len(self.of_call) + 1
        _active.add(self)
        self.progress_messages()
        return work

    def end_call(self) -> None:
        """At the end of a call of an @spmd function, end its sends, and refuse receives that were not waited for.

        Whether such a receive has its message by now depends on the ranks' speed.
        """
        messages, self.of_call = self.of_call, []
        if not messages or self.stale or self._call != here.call:
            return
        for work in messages:
            if not work.seen and work.what.startswith("recv"):
                raise CollectiveMismatch(
                    f"a call of an @spmd function ends, and nobody has waited for the end of its {work.what}",
                    where=f"rank {self._ranks[self._transport.rank]}, group {self._ranks}",
                    remedy="call wait() of what irecv returns, before the tensor is used and the function returns",
                )
        with turn:
            for work in messages:
                self.finish(work)

    def progress(self) -> None:
        """Advance operations as far as possible without waiting."""
        if self.stale:
            self.drop()
            return
        self._watch.check()
        if self.queue or self.messages:
            self.progress_collectives()
            self.progress_messages()
        if not self.queue and not self.messages:
            _active.discard(self)

    def progress_beside(self) -> None:
        """`progress`, during a wait for another communicator; a disagreement here is raised by waits for these."""
        try:
            self.progress()
        except CollectiveMismatch:
            _active.discard(self)

    def progress_collectives(self) -> None:
        while self.queue and self.queue[0].advance():
            self._finished()

    def look(self, work: Work) -> None:
        """The checks that a wait makes now and then, for callers that poll instead."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + PEER_CHECK_SECONDS
            self._watch.check_peers()
            work.is_bounded = True
            self._transport.on_stall(work)

    def finish(self, work: Work, timeout: float | None = None) -> None:
        """Wait for one operation, and so for those started before it; `timeout` replaces the usual one."""
        if self.stale:
            self.drop()
        while not work.done:
            first = work if work in self.messages or not self.queue else self.queue[0]
            first.is_bounded = timeout is not None
            try:
                self._wait(lambda first=first: first.done, lambda first=first: first, timeout)  # type: ignore[misc]
            finally:
                if self.queue and self.queue[0].done:
                    self._finished()

    def wait_until(self, ready: Ready, what: str, *, gently: bool = False) -> None:
        """Wait for a condition that is part of `what`, a call that need not be among these operations."""

        def first() -> Work:
            return self.queue[0] if self.queue else Work(self, what, _waiting(ready), range(len(self._ranks)))

        self._wait(ready, first, gently=gently)

    def _wait(
        self, ready: Ready, work: Callable[[], Work], timeout: float | None = None, *, gently: bool = False
    ) -> None:
        def progressed() -> bool:
            self.progress_all()
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

    def drop(self, reason: str = "a region failed", remedy: str = "start it again") -> None:
        """End all operations with an error, since no peer will answer: a region failed, or as `reason` says."""
        for work in (*self.queue, *self.messages):
            work.fail(PeerLost(f"{work.what} was under way when {reason}", where=f"group {self._ranks}", remedy=remedy))
        self.queue.clear()
        self.messages.clear()
        self.of_call.clear()
        _active.discard(self)

    def progress_all(self) -> None:
        """Advance all that this process has started, as a wait has to: a peer may need it first."""
        self.progress_messages()
        self.progress_collectives()
        self.progress_others()

    def progress_others(self) -> None:
        """Advance what this process has started in other communicators."""
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


def _waiting(ready: Ready) -> Steps:
    """An operation that only waits."""
    yield ready
