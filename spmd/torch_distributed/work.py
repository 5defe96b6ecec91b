"""What a collective of a process group returns: torch's `Work`, with a future that is done when the operation is.

A caller that asks for a future goes on computing, and may wait for it where nothing advances the operation (DDP waits
in C++). So a background thread advances operations with futures: it sleeps until a peer has done its part, and works
only while there are any.
Invariants: a future is done once, and its callbacks keep no other thread from communicating; when the program ends, no
such thread is left in torch's code, since the interpreter's end would abort the process there.
"""

from __future__ import annotations

import atexit
import collections
import datetime
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.communicator import Communicator
from ..kernels.errors import SpecError
from ..kernels.shm.stalls import IDLE
from ..kernels.torch_private import end_event, fail_future, run_as_written
from ..kernels.waiting import turn
from . import callbacks

# Works that Python dropped before they were over. C++ finds the methods below only while the Python object lives, and
# may still wait for one that it was given: DDP within `Join` for one a model, from its forward pass to the end of its
# backward pass. C++ doesn't tell when it lets go of it; the others are for what a program drops in between.
_dropped: collections.deque[Work] = collections.deque(maxlen=4)
_closed: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Work(dist.Work):
    """A started operation of a process group.

    Args:
        comm: whose operation it is.
        started: the communicator's operations, one or several.
        result: the tensors that it gives.
        failed: told an error, returns what to raise.
        event: of a profiler, to be ended when the operation is.
        is_message: whether it is a message, no collective.
    """

    def __init__(
        self,
        comm: Communicator,
        started: Sequence[Any],
        result: Any,
        failed: Callable[[BaseException], BaseException],
        event: Any = None,
        *,
        is_message: bool = False,
    ):
        super().__init__()
        self.is_message = is_message
        self.comm, self._started, self._result, self._failed = comm, list(started), result, failed
        self._error: BaseException | None = None
        self._source: Any = None
        self._future: torch.futures.Future | None = None
        self._notified = False
        self._event = event

    def __del__(self) -> None:
        if self._started and self.comm not in _closed:
            _dropped.append(self)

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        try:
            while self._started:
                first = self._started[0]
                if isinstance(first, Work):  # of several that were coalesced
                    first.wait(timeout)
                else:  # those on GPUs never wait for long, and know no timeout
                    self._source = first.wait(seconds) if seconds > 0 and _hosted(first) else first.wait()
                with turn:
                    if self._started and self._started[0] is first:  # another thread may have been here
                        del self._started[0]
        except BaseException as error:
            self.fail(error)
        self._tell()
        if self._error is not None:
            raise self._error
        return True

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self._started.clear()
        self._error = self._failed(error)

    def look(self) -> bool:
        """Whether it is over, without waiting, and without completing the future."""
        try:
            with turn:
                while self._started:
                    if not self._started[0].is_completed():
                        return False
                    self._started.pop(0).wait()
        except BaseException as error:
            self.fail(error)
        return True

    def is_completed(self) -> bool:
        done = self.look()
        if done:
            self._tell()
        return done

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> Any:
        self.wait()
        return self._result

    def source_rank(self) -> int:
        if self._source is None:
            raise SpecError(
                "a work that has received nothing was asked which rank sent it",
                remedy="ask that of recv or irecv, after its wait()",
            )
        return int(self._source)

    _source_rank = source_rank

    def get_future(self) -> Any:
        if self._future is None:
            self._future = callbacks.Future(self)
            if self._error is None and self._started and _hosted(self._started[0]) and not _futures.over:
                _futures.add(self)
            else:
                self.wait()
        return self._future

    def _tell(self) -> None:
        """Complete the future, if there is one."""
        with turn:
            event, self._event = self._event, None
        if event is not None:
            end_event(event)
        with turn:
            if self._future is None or self._notified:
                return
            self._notified = True
        callbacks.run(self, self._complete)

    def _complete(self) -> None:
        assert self._future is not None
        if self._error is None:
            self._future.set_result(self._result)
        else:
            fail_future(self._future, _plain(self._error))


def close(comms: Iterable[Communicator]) -> None:
    """Close communicators, and let go of their works that Python has dropped."""
    for comm in comms:
        comm.close()
        _closed.add(comm)
        for work in [each for each in _dropped if each.comm is comm]:
            _dropped.remove(work)


def _hosted(started: Any) -> bool:
    """Whether an operation is one that this process advances, not a GPU."""
    return all(map(_hosted, started._started)) if isinstance(started, Work) else hasattr(started, "done")


def _plain(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(str(error))


_NAME = "spmd-futures"
_LEAVE_SECONDS = 2.0  # the most that the program's end waits for a callback that does not end


class _Futures:
    """The threads that advance works whose futures somebody may wait for: one waits, others run callbacks.

    A callback may start an operation and wait for its future. So a thread that is about to run callbacks leaves the
    waiting to another, which is started if none is idle.
    """

    def __init__(self) -> None:
        self._pending: list[Work] = []
        self._idle = 0
        self._leads = False  # whether one of them waits
        self.over = False  # the program ends
        self._threads: list[threading.Thread] = []
        self._wanted = threading.Condition()

    def add(self, work: Work) -> None:
        with self._wanted:
            self._pending.append(work)
            self._have_leader()

    def _have_leader(self) -> None:
        if self._leads or not self._pending:
            return
        if self._idle:
            self._wanted.notify()
        else:
            self._idle += 1
            thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
            self._threads.append(thread)
            thread.start()

    def leave(self) -> None:
        """Have the threads end, as the program does."""
        with self._wanted:
            self.over = True
            self._wanted.notify_all()
        end = time.monotonic() + _LEAVE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._wanted:
                threading.current_thread().name = IDLE
                while not self.over and (self._leads or not self._pending):
                    self._wanted.wait()
                threading.current_thread().name = _NAME
                if self.over:
                    return
                self._leads, self._idle = True, self._idle - 1
            over = self._await_one()
            with self._wanted:
                self._pending = [work for work in self._pending if work not in over]
                self._leads = False
                self._have_leader()
            while over:  # leaving none to a thread that is idle
                over.pop(0).is_completed()
            with self._wanted:
                self._idle += 1

    def _await_one(self) -> list[Work]:
        """Wait until a work is over, and return those that are."""
        pending = list(self._pending)
        over: list[Work] = []

        def ready() -> bool:
            over.extend(work for work in pending if work not in over and work.look())
            return bool(over) or self.over or len(self._pending) > len(pending)

        try:
            pending[0].comm.wait_for(ready, "an operation with a future")
        except BaseException as error:
            over = [work for work in pending if work.look()]
            if not over:  # the error is of none of them: fail the one that was waited for
                pending[0].fail(error)
                over = pending[:1]
        return over


def _in_child() -> None:
    global _futures
    _futures = _Futures()  # its threads are the parent's


_futures = _Futures()
atexit.register(lambda: _futures.leave())
os.register_at_fork(after_in_child=_in_child)
run_as_written(each for cls in (Work, _Futures) for each in vars(cls).values() if hasattr(each, "__code__"))
