"""A channel: NCCL's communicator for one group of ranks, from opening to end, and the operations started on it.

If the GPUs are already connected for a call, it is made at once, on the current stream. A call that may have to connect
them waits for peers inside NCCL: it is made in a thread of its own, after the GPU has done everything that the channel
was given before. So if a peer never comes, this rank goes on, and nothing is left on its GPU. Invariants: a thread that
waits holds no lock, so that the watchdog can end the channel; the tensors of a started operation live until it is over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..communicator import Communicator
from ..errors import Aborted, CollectiveMismatch, MeshError, PeerLost
from ..waiting import wait_until
from . import nccl_watchdog
from .nccl_connection import Connection, Pending, await_endings
from .nccl_group import forget, group_of
from .nccl_library import Library
from .nccl_pairs import Pairs
from .nccl_under_way import Started, UnderWay

_CLOSE_SECONDS = 1.0
# After a region has failed, operations under way are given so long if the hosts agreed on them: then all GPUs do them,
# unless a rank has died. Results of earlier calls, which the program goes on with, may come of them.
SPARE_SECONDS = 5.0
NcclCall = tuple[Any, ...]  # the name of one of NCCL's functions, and its arguments up to the stream


class Channel:
    """One channel of a group.

    Args:
        host: a communicator of the same ranks for the host.
        make_host: makes more of these; its argument names them.
        streams: a `streams.Streams`.
        name: "main" is the group's first channel; others are split off it.
        advance: advances this rank's messages, for which peers may be waiting.
        agreed: the hosts agree on every call before any of them starts it.
    """

    def __init__(
        self,
        host: Communicator,
        make_host: Callable[[str], Communicator],
        library: Library,
        streams: Any,
        name: str,
        advance: Callable[[], None],
        *,
        agreed: bool,
    ):
        self.host, self.library, self.streams, self.name = host, library, streams, name
        self.watch, self.ranks, self.rank, self.timeout = host._watch, host.ranks, host.rank, host.timeout
        self.failure: BaseException | None = None
        self.pairs = Pairs(library, streams, host.rank)
        self.group = group_of(make_host, self.watch, self.ranks, library)
        self.collectives, self.messages = UnderWay(), UnderWay()
        self.connecting = False
        self._advance, self._agreed = advance, agreed
        self._connection: Connection | None = None
        self._connected: set[Any] = set()  # the kinds of calls for which the GPUs are connected
        self._inside: tuple[str, float] | None = None  # the operation for which this rank is inside NCCL, since when
        self._opened_in = -1  # the generation in which it was opened
        self._spared_until: float | None = None  # since another rank has failed
        self._lock = threading.RLock()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin, or begin anew after a failure; all ranks of the group call this."""
        self._end()
        generation = self.watch.generation
        connection = self.group.open(self)
        with self._lock:
            self.failure, self._connection, self._opened_in = None, connection, generation
            self._spared_until = None
            self._connected.clear()
        nccl_watchdog.watch(self)

    def _end(self) -> None:
        """End NCCL's communicators: normally once all operations are over, else by force; see `settle`."""
        nccl_watchdog.unwatch(self)
        self.settle()
        failed = self.failure is not None or self._opened_in != self.watch.generation
        deadline = time.monotonic() + _CLOSE_SECONDS
        try:
            while not failed and self._connection is not None and not self._idle() and time.monotonic() < deadline:
                time.sleep(1e-3)
        except RuntimeError:  # a CUDA error, which every later call would raise, too
            failed = True
        with self._lock:
            connection, self._connection = self._connection, None
            abort = failed or self.failure is not None or self._oldest() is not None
            self.collectives.clear()
            self.messages.clear()
        if connection is not None:
            self.group.leave(self.name, connection, abort=abort)
        self.pairs.end(abort=abort)

    def close(self) -> None:
        """End the channel; its streams are not used any more."""
        self._end()
        await_endings()
        forget(self.group)
        self.streams.close()

    def set_timeout(self, seconds: float) -> None:
        """Change the timeout of later waits, for GPUs and on the host."""
        self.timeout = seconds
        self.host.set_timeout(seconds)
        self.group.host.set_timeout(seconds)

    def quiet(self) -> bool:
        """Whether all the collectives that this channel was given are over."""
        with self._lock:
            return not self.collectives.count()

    def _idle(self) -> bool:
        with self._lock:
            return not self.collectives.count() and not self.messages.count()

    def _oldest(self) -> Started | None:
        found = [one for one in (self.collectives.oldest(), self.messages.oldest()) if one is not None]
        return min(found, key=lambda started: started.since, default=None)

    # -- failures ------------------------------------------------------------------------------------------------------

    def check(self, what: str = "", generation: int | None = None) -> None:
        """Raise the error that has occurred since the last operation was started, if any.

        Args:
            what, generation: an operation, and the generation in which it was started; it must be the present one.
        """
        if self._opened_in == self.watch.generation and self.failure is not None:
            raise self.failure
        if generation is not None and generation != self.watch.generation:
            raise PeerLost(
                f"{what} was started before a region failed, and may have been ended half done",
                where=f"group {self.ranks}",
                remedy="start it again",
            )

    def settle(self, *, at_once: bool = False) -> None:
        """After a region has failed, wait for what is under way, or end it by force.

        Args:
            at_once: do not wait: a rank has died.
        """
        if at_once:
            self._spared_until = 0.0
        while self._connection is not None and self.failure is None and self._opened_in != self.watch.generation:
            self.look_after()
            time.sleep(1e-3)

    def look_after(self) -> None:
        """The watchdog's check: see `nccl_watchdog`."""
        with self._lock:
            inside, oldest = self._inside, None
            if self._connection is None or self.failure is not None:
                return
            try:
                self.streams.enter()
                self.collectives.count()
                self.messages.count()
                oldest = self._oldest()
                if self._opened_in != self.watch.generation:
                    raise Aborted("a region failed")
                waits = (oldest.what, oldest.since) if inside is None and oldest is not None else inside
                if waits is None:
                    return
                self.watch.check()
                self.watch.check_peers()
                self._connection.check_async_error()
                self.pairs.check_async_error()
                if nccl_watchdog.seconds_since(waits[1]) > self.timeout:
                    raise self.silence(waits[0])
            except Aborted as error:
                if inside is not None or oldest is None or not self._spared():
                    again = PeerLost("a region failed", where=f"group {self.ranks}", remedy="start afresh")
                    self._fail(error if self._opened_in == self.watch.generation else again)
            except BaseException as error:
                self._fail(error)

    def _spared(self) -> bool:
        """Whether what is under way may still end, now that a region has failed."""
        if not self._agreed:
            return False
        now = time.monotonic()
        if self._spared_until is None:
            self._spared_until = now + SPARE_SECONDS
        try:
            self.watch.check_peers()
        except (Aborted, PeerLost):
            return False
        return now < self._spared_until

    def _fail(self, error: BaseException) -> None:
        """End by force, so that threads that wait for the GPU go on."""
        if isinstance(error, (RuntimeError, KeyError)) and not isinstance(error, (MeshError, CollectiveMismatch)):
            oldest, inside = self._oldest(), self._inside
            what = oldest.what if oldest is not None else "?" if inside is None else inside[0]
            error = PeerLost(
                f"NCCL failed on rank {self.ranks[self.rank]} in {what}",
                got=str(error),
                where=f"group {self.ranks}, {self.library.describe()}",
                remedy="run with NCCL_DEBUG=INFO, and see the output of the other ranks",
            )
        with contextlib.suppress(RuntimeError):  # a CUDA error, which every later call raises, too
            self.collectives.count()
            self.messages.count()
        if (unfinished := self._oldest()) is not None:
            nccl_watchdog.note_cut_short(unfinished.since)
        self.failure = error
        if isinstance(error, PeerLost) and self._opened_in == self.watch.generation:  # a later generation goes on
            self.watch.abort(f"rank {self.ranks[self.rank]}: {error}")
        connection, self._connection = self._connection, None
        if connection is not None:
            self.group.leave(self.name, connection, abort=True)
        self.pairs.end(abort=True)

    def silence(self, what: str) -> PeerLost:
        """The error for an operation that takes longer than the timeout."""
        return PeerLost(
            f"{what} on rank {self.ranks[self.rank]} was not over after {self.timeout:g} s",
            where=f"group {self.ranks}",
            remedy="see what the other ranks do, or raise Mesh(timeout=)",
        )

    # -- starting ------------------------------------------------------------------------------------------------------

    def note(self, under_way: UnderWay, what: str, event: Any, keepalive: Any) -> None:
        """Note a started operation, which is over when `event` is, and works on `keepalive`."""
        with self._lock:
            under_way.add(Started(what, event, keepalive))

    def launch(self, what: str, calls: Sequence[NcclCall], works_on: Sequence[Any], *, grouped: bool = False) -> None:
        """Have NCCL start collectives on the current stream, in turn with what other channels launch.

        Args:
            works_on: the tensors; a thread that is left behind in NCCL keeps them, since it may still use them.
            grouped: start all calls as one group.
        """
        with self._lock:
            connection = self._connection
        if connection is None:
            raise self.failure or PeerLost(f"{what} on a closed communicator", where=f"group {self.ranks}")
        capturing = self.streams.capturing()
        kinds = {_kind(*call) for call in calls} - {(name, self.rank) for name in ("send", "recv")}  # not to itself
        connected = capturing or len(self.ranks) == 1 or kinds <= self._connected
        with self.inside(what):
            if not connected:
                self._wait(self.quiet, what)
            with self.streams.in_turn():
                stream = self.streams.pointer()

                def run(raw: Any) -> None:
                    if not grouped:
                        for name, *arguments in calls:
                            getattr(raw, name)(*arguments, stream)
                        return
                    self.library.nccl.groupStart()
                    try:
                        for name, *arguments in calls:
                            getattr(raw, name)(*arguments, stream)
                    finally:
                        self.library.nccl.groupEnd()

                if connected:
                    connection.call(run)
                    return
                self._connect(what, lambda: connection.call(run, waits=True, keepalive=works_on))
                self._connected |= kinds

    def _connect(self, what: str, run: Callable[[], None]) -> None:
        pending = Pending(lambda _: run(), self.streams.enter)
        self.connecting = True
        try:
            self._wait(pending.done, what)
            pending.result()
        finally:
            self.connecting = False

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait on the host, and advance this rank's messages meanwhile."""

        def over() -> bool:
            if self.failure is not None or ready():
                return True
            self._advance()  # a peer may be waiting for a message before it comes
            return False

        wait_until(
            over,
            self.watch,
            timeout=self.timeout,
            oversubscribed=True,
            on_timeout=lambda: self.silence(what),
        )
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Note that this rank is inside NCCL, which may wait for a peer there, so that the watchdog can end it."""
        outer, self._inside = self._inside, (what, time.monotonic())
        try:
            yield
        except Exception as error:
            with self._lock:
                if self.failure is None:
                    self._fail(error)
            raise self.failure from None  # type: ignore[misc]
        finally:
            self._inside = outer


def _kind(name: str, *arguments: Any) -> Any:
    """A key of the connections that a call needs: its peer, or everything by which NCCL chooses an algorithm.

    >>> _kind("send", 0, 100, 1, 7), _kind("allReduce", 0, 0, 100, 7, 0)
    (('send', 7), ('allReduce', 7, 7, 0))
    """
    if name in ("send", "recv"):
        return name, arguments[-1]
    _, _, count, *rest = arguments
    return name, int(count).bit_length(), *rest
