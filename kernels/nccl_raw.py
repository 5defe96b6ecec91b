"""NCCL's own communicators: how they are made and ended, each time in a thread of its own.

Both wait inside NCCL for the peers, for ever where one is dead, and such a wait cannot be called off. So a thread of
its own waits there, and who wants the communicator waits for the thread, where aborts, deaths and the timeout are
noticed. Invariants: a communicator that comes when nobody waits for it any more is aborted by its thread; every thread
makes its rank's GPU the current one, which is a thread's own affair; none of them holds up the end of the process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from .errors import MeshError, PeerLost, message
from .nccl_library import Library

END_SECONDS = 5.0
# What CuPy raises: a KeyError for results that it has no name for.
ERRORS = (RuntimeError, KeyError)

_endings: list[threading.Thread] = []
_lock = threading.Lock()


def connected(library: Library, make: Callable[[], Any]) -> Any:
    """What one of NCCL's calls that connect GPUs returns.

    Raises:
        MeshError: it failed.
    """
    try:
        return make()
    except ERRORS as error:
        raise MeshError(
            message(
                "NCCL could not connect the GPUs",
                got=f"{error}; {library.describe()}",
                remedy="run with NCCL_DEBUG=INFO; ranks need a GPU each, and a driver as new as their CUDA version",
            )
        ) from None


def joined(library: Library, size: int, unique: bytes, rank: int) -> Any:
    """NCCL's communicator of those that have this unique id; waits for all of them."""
    return connected(library, lambda: library.nccl.NcclCommunicator(size, unique, rank))


class Making:
    """A communicator that is being made.

    Args:
        make: makes it, and waits for its peers.
        enter: makes this rank's GPU the current one of a thread.
    """

    def __init__(self, make: Callable[[], Any], enter: Callable[[], None]):
        self._make, self._enter = make, enter
        self._lock = threading.Lock()
        self._over, self._given_up = threading.Event(), False
        self._found: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="spmd-nccl-making", daemon=True).start()

    def _run(self) -> None:
        found = None
        try:
            self._enter()
            found = self._make()
        except BaseException as error:
            self._error = error
        with self._lock:
            late = self._given_up
            self._found = None if late else found
        if late and found is not None:
            with contextlib.suppress(*ERRORS):
                found.abort()
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def result(self) -> Any:
        """The communicator, once it is `done`; raises what went wrong."""
        if self._error is not None:
            raise self._error
        with self._lock:
            found, self._found = self._found, None
        if found is None:
            raise PeerLost(message("NCCL's communicator was given up while it was being made"))
        return found

    def give_up(self) -> None:
        """Want it no more, now or when it comes; a second call does nothing."""
        with self._lock:
            self._given_up = True
            found, self._found = self._found, None
        if found is not None:
            end(found, abort=True, enter=self._enter)


def end(raw: Any, *, abort: bool, enter: Callable[[], None]) -> None:
    """Begin to end a communicator: in peace, or at once whatever it is doing.

    Does not wait, so that several can be ended at once: one may be stuck on the GPU behind another.
    """

    def run() -> None:
        with contextlib.suppress(*ERRORS):  # it may be broken already
            enter()
            if abort:
                raw.abort()
            else:
                raw.destroy()

    thread = threading.Thread(target=run, name="spmd-nccl-ending", daemon=True)
    thread.start()
    with _lock:
        _endings[:] = [*(one for one in _endings if one.is_alive()), thread]


def await_endings() -> None:
    """Wait for what is being ended; for a few seconds only, as a peer may be gone without a word."""
    deadline = time.monotonic() + END_SECONDS
    for thread in tuple(_endings):
        thread.join(max(0.0, deadline - time.monotonic()))
