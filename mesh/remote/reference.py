"""`Ref`: the future result of a call of a remote object.

It stands for the result wherever that is. Invariant: the process that runs the call keeps the result for as long as the
caller has the Ref, or has a call under way that the Ref was passed to.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Protocol

from ...kernels.arguments import check_function
from ...kernels.callsite import public
from ...kernels.errors import MeshError, no_attribute
from ..display.notebook import shorten
from .protocol import Name, NodeId

_UNREAD = object()


class Caller(Protocol):
    """Makes calls, waits for results and reads them: this process's `caller.Caller`."""

    def invoke(self, handle: Any, method: str, args: tuple, kwargs: dict[str, Any]) -> Ref: ...
    def check_own(self) -> None: ...
    def wait(self, future: Future, timeout: float | None, waits_for: tuple[NodeId, Name] | None) -> Any: ...
    def read_result(self, ref: Any, outcome: Any, timeout: float | None) -> Any: ...
    def cancel(self, ref: Any) -> bool: ...


class Unseen:
    """The error of a call until somebody has asked for it; while it is here, so are the frames that it went through.

    Attributes:
        error: None if there is none, or `seen`.
        seen: somebody has asked for it, or was given it, so that it is not lost.
        caller: the thread that made the call.
    """

    __slots__ = ("caller", "error", "seen")

    def __init__(self) -> None:
        self.caller = threading.current_thread()
        self.error: BaseException | None = None
        self.seen = False

    def see(self) -> None:
        self.seen = True
        self.error = None


class Outcome(Future):
    """A call's future: its packet, None if the result stays where it is, or an error."""

    def __init__(self) -> None:
        super().__init__()
        self.unseen = Unseen()

    def set_exception(self, exception: BaseException | None) -> None:
        self.unseen.error = exception
        if self.unseen.seen:  # asked afterwards, since another thread may see it just now
            self.unseen.error = None
        super().set_exception(exception)


_INSTEAD = dict.fromkeys(("result", "wait", "value"), "it is ref.get()")  # of what others' futures have


class Ref:
    """The result of a call of a remote object, which may not be there yet.

    >>> class Counter:
    ...     def __init__(self, start):
    ...         self.value = start
    ...     def add(self, more):
    ...         self.value += more
    ...         return self.value
    >>> with Mesh({"data": 2}) as mesh:
    ...     counter = mesh.remote(Counter, 10, rank=1)
    ...     first = counter.add(1)           # begins, and does not wait
    ...     second = counter.add(first)      # the result goes from rank to rank
    ...     first.get(), second.get()
    (11, 22)

    Passed to another call (of an object, `mesh.run`, `mesh.submit` or an `@spmd` function), it arrives there as the
    result, straight from the rank that has it. In a coroutine, `await ref` gives the result.

    Args:
        all: only the library makes Refs.

    Raises:
        what the call raised, of its own type, with the remote traceback, from `get` and `await`.
    """

    __slots__ = ("__weakref__", "_caller", "_value", "future", "label", "name", "owner")

    def __init__(self, caller: Caller, owner: NodeId, name: Name, label: str):
        self._caller, self.owner, self.name, self.label = caller, owner, name, label
        self.future = Outcome()
        self.future.set_running_or_notify_cancel()  # so that cancelling an await does not cancel the call
        self._value: Any = _UNREAD

    @public
    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result; each time it is the same object.

        Args:
            timeout: seconds; None: as long as the rank lives.

        Raises:
            what the call raised; PeerLost: the rank died before the call was done; TimeoutError: it took longer than
            `timeout`; MeshError: calls wait for each other, and this one can never end.
        """
        self.future.unseen.see()
        if self._value is _UNREAD:
            waits_for = (self.owner, self.name) if timeout is None else None
            try:
                outcome = self._caller.wait(self.future, timeout, waits_for)
                self._value = self._caller.read_result(self, outcome, timeout)
            except BaseException as error:
                raise shorten(error) from error.__cause__
        return self._value

    def done(self) -> bool:
        """Whether the call is over, successfully or not."""
        return self.future.done()

    def cancelled(self) -> bool:
        """Whether the call was cancelled before it began."""
        return self.future.done() and isinstance(self.future.exception(), CancelledError)

    def cancel(self) -> bool:
        """Cancel the call if it has not begun yet; whether that was in time. `get` then raises CancelledError."""
        return not self.future.done() and self._caller.cancel(self)

    @public
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the call is over; returns what it raised, None if it succeeded.

        Args, Raises: `timeout` as for `get`.
        """
        try:
            self._caller.wait(self.future, timeout, (self.owner, self.name) if timeout is None else None)
        except BaseException as error:
            # A signal's handler may have taken so long that the call is over by now.
            if not self.future.done() or error is not self.future.exception():
                raise
        self.future.unseen.see()
        return self.future.exception()

    @public
    def add_done_callback(self, fn: Callable[[Ref], object]) -> None:
        """Call `fn(ref)` when the call is over (at once if it is), maybe on another thread, which it must not block."""
        check_function("add_done_callback", fn, "ref.add_done_callback(lambda ref: ...)")
        self.future.unseen.see()
        self.future.add_done_callback(lambda _: fn(self))

    def __await__(self) -> Generator[Any, None, Any]:
        if self._value is _UNREAD:
            self._caller.check_own()
            self.future.unseen.see()
            over: Future = Future()  # without the error: if that is a StopIteration, asyncio's futures wait for ever
            over.set_running_or_notify_cancel()
            self.future.add_done_callback(lambda _: over.set_result(None))
            try:
                yield from asyncio.wrap_future(over).__await__()
                error = self.future.exception()
                if isinstance(error, CancelledError):
                    raise asyncio.CancelledError(*error.args)
            except asyncio.CancelledError as cancelled:  # of the call, or of the task that waits for it
                shorten(cancelled)
                raise
            if error is None and self.future.result() is None:
                # The result is large and has to be fetched, which must not block the event loop.
                yield from asyncio.get_running_loop().run_in_executor(None, self.get).__await__()
        return self.get()

    @public
    def __bool__(self) -> bool:
        problem = "a Ref was asked whether it is true, and stands for a result that may not be there yet"
        raise MeshError(problem, got=repr(self), remedy="ask the result, ref.get(), or whether it is there, ref.done()")

    @public
    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ref) or other is None:
            return self is other
        problem = "a Ref was compared with a value, and stands for a result that may not be there yet"
        raise MeshError(problem, got=f"{self!r} and a {type(other).__name__}", remedy="compare the result, ref.get()")

    __hash__ = object.__hash__

    if not TYPE_CHECKING:  # for type checkers a name that is not there is an error

        @public
        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, _INSTEAD) from None

    @public
    def __reduce__(self) -> Any:
        raise MeshError(
            "a Ref cannot be pickled: its result is on a rank",
            got=repr(self),
            remedy="give it to a call as an argument, or its result: ref.get()",
        )

    def __repr__(self) -> str:
        if not self.future.done():
            state = "under way"
        else:
            error = self.future.exception()
            state = "done" if error is None else f"failed with {type(error).__name__}"
        return f"Ref({self.label} on rank {self.owner[0]}, {state})"
