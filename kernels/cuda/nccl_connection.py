"""NCCL's own communicators: how they are made, called and ended.

Making one waits inside NCCL for the peers, and so does the first call that sends bytes between two GPUs. If a peer
never comes, such a call waits for ever and can't be cancelled. So it is made in a thread of its own (`Pending`); the
caller waits for that thread, and notices aborts, deaths and the timeout there. Ending a communicator frees its memory.
Invariants: nothing is freed while a thread is inside NCCL; a result for which nobody waits any more is aborted; every
thread makes its rank's GPU the current one, since each thread has its own current device; no thread holds up the end of
the process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import MeshError, PeerLost
from .nccl_library import Library
from .placement import fault

END_SECONDS = 5.0
# A call whose peers are connected returns in microseconds. One that is still inside NCCL after so long must be waiting
# for a peer after all, and only an abort ends it.
JOIN_SECONDS = 30.0
# What CuPy raises; a KeyError for error codes that it has no name for.
ERRORS = (RuntimeError, KeyError)

_FAULTY = "see what ran on it before; with CUDA_LAUNCH_BLOCKING=1 the operation itself raises"
_endings: list[threading.Thread] = []
_lock = threading.Lock()


class Connection:
    """One of NCCL's communicators, which is ended once, when no thread is inside it.

    Args:
        raw: CuPy's communicator.
        enter: makes this rank's GPU the current one of a thread.
    """

    def __init__(self, raw: Any, enter: Callable[[], None]):
        self._raw, self._enter = raw, enter
        self._changed = threading.Condition()
        self._inside, self._waiting, self._ended = 0, 0, False
        self._keepalive: Any = None

    def call(self, run: Callable[[Any], Any], *, waits: bool = False, keepalive: Any = None) -> Any:
        """Return `run(raw)`; the communicator can't be ended meanwhile.

        Args:
            waits: the call may wait for peers, and its thread may be left behind there.
            keepalive: the tensors of the call; if it is left behind, they are kept as long as the communicator.

        Raises:
            PeerLost: the communicator was ended before.
        """
        with self._changed:
            if self._ended:
                raise PeerLost("NCCL's communicator was ended before it was called")
            self._inside += 1
            self._waiting += waits
            self._keepalive = keepalive
        try:
            return run(self._raw)
        finally:
            with self._changed:
                self._inside -= 1
                self._waiting -= waits
                if not self._ended:
                    self._keepalive = None
                self._changed.notify_all()

    def check_async_error(self) -> None:
        """Raise an error that NCCL has noticed asynchronously."""
        with contextlib.suppress(PeerLost):
            self.call(lambda raw: raw.check_async_error())

    def end(self, *, abort: bool) -> None:
        """Begin to end it: normally, or with `abort` whatever it is doing; a second call does nothing.

        Does not wait, so that several can be ended at once: one may be stuck behind another on the GPU.
        """
        with self._changed:
            if self._ended:
                return
            self._ended = True
        thread = threading.Thread(target=self._end, args=(abort,), name="spmd-nccl-ending", daemon=True)
        thread.start()
        with _lock:
            _endings[:] = [*(one for one in _endings if one.is_alive()), thread]

    def _end(self, abort: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._changed.wait_for(lambda: not self._inside, JOIN_SECONDS)
        with contextlib.suppress(*ERRORS):  # it may be broken already
            self._enter()
            if abort:
                self._raw.abort()
            else:
                self._raw.destroy()


def await_endings() -> None:
    """Wait for communicators that are being ended; once, and for a few seconds, since a peer may have vanished."""
    deadline = time.monotonic() + END_SECONDS
    with _lock:
        threads, _endings[:] = tuple(_endings), []
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def connected(library: Library, make: Callable[[], Any], enter: Callable[[], None]) -> Connection:
    """The communicator that `make` returns, a call of NCCL's that connects GPUs.

    Raises:
        MeshError: it failed.
    """
    try:
        return Connection(make(), enter)
    except ERRORS as error:
        if said := fault():
            raise MeshError("NCCL found a GPU that can be used no more", got=said, remedy=_FAULTY) from None
        raise MeshError(
            "NCCL could not connect the GPUs",
            got=f"{error}; {library.describe()}",
            remedy="run with NCCL_DEBUG=INFO; ranks need a GPU each, and a driver as new as their CUDA version",
        ) from None


def joined(library: Library, size: int, unique: bytes, rank: int, enter: Callable[[], None]) -> Connection:
    """NCCL's communicator of all ranks that have this unique id; waits for them."""
    return connected(library, lambda: library.nccl.NcclCommunicator(size, unique, rank), enter)


class Pending:
    """A call that waits for peers inside NCCL, in a thread of its own.

    Args:
        run: the call, which may make a connection; its argument tells it whether it was abandoned.
        enter: makes this rank's GPU the current one of a thread.
    """

    def __init__(self, run: Callable[[Callable[[], bool]], Connection | None], enter: Callable[[], None]):
        self._run, self._enter = run, enter
        self._lock = threading.Lock()
        self._over, self._abandoned = threading.Event(), threading.Event()
        self._found: Connection | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._in_thread, name="spmd-nccl-pending", daemon=True).start()

    def _in_thread(self) -> None:
        found = None
        try:
            self._enter()
            found = self._run(self._abandoned.is_set)
        except BaseException as error:
            self._error = error
        with self._lock:
            abandoned = self._abandoned.is_set()
            self._found = None if abandoned else found
        if abandoned and found is not None:
            found.end(abort=True)
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def result(self) -> Connection | None:
        """What the call returned, once it is `done`; raises its error."""
        if self._error is not None:
            raise self._error
        with self._lock:
            if self._abandoned.is_set():
                raise PeerLost("NCCL's communicator was abandoned while it was being made")
            found, self._found = self._found, None
        return found

    def abandon(self) -> None:
        """Give up the result, now or when it comes; a second call does nothing."""
        with self._lock:
            self._abandoned.set()
            found, self._found = self._found, None
        if found is not None:
            found.end(abort=True)
