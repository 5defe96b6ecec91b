"""Callbacks of the futures of operations, which may start operations themselves, as PowerSGD's hook of DDP does.

When a rank comes to a callback depends on when the operation was over there. So callbacks of one communicator's
collectives run one after another, in the order in which the program gave them, and its next collective waits for them.
Those of messages do neither: a peer may send when it has been in that collective. Invariant: ranks whose programs are
the same start the same collectives in one order.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..kernels.communicator import Communicator
from ..kernels.errors import MeshError
from ..kernels.torch_private import run_as_written

MESSAGES = ("send", "recv", "recvAnySource")  # begun in any order


class Future(torch.futures.Future):
    """The future of a work, which notes that it has callbacks in Python; those of DDP in C++ start nothing."""

    def __init__(self, work: Any):
        super().__init__()
        self._work = weakref.ref(work)

    def then(self, callback: Any) -> Any:
        _under_way.add(self._work(), self)
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        _under_way.add(self._work(), self)
        super().add_done_callback(callback)


class _UnderWay:
    """The collectives whose callbacks are not over: the program's, and those that callbacks have started."""

    def __init__(self) -> None:
        self._works: list[Any] = []
        self._nested: list[Any] = []
        self._changed = threading.Condition()
        self._here = threading.local()

    def add(self, work: Any, future: Future) -> None:
        with self._changed:
            if work is not None and not work.is_message and not future.done() and work not in self._all():
                (self._nested if self._is_inside() else self._works).append(work)

    def run(self, work: Any, complete: Callable[[], None]) -> None:
        outer = self._is_inside()
        with self._changed:
            if work in self._works and not outer:
                self._changed.wait_for(lambda: next(one for one in self._all() if one.comm is work.comm) is work)
        self._here.inside = True
        try:
            complete()
        finally:
            self._here.inside = outer
            with self._changed:
                self._works = [each for each in self._works if each is not work]
                self._nested = [each for each in self._nested if each is not work]
                self._changed.notify_all()

    def wait(self, comm: Communicator) -> None:
        if self._all() and not self._is_inside():
            with self._changed:
                over = self._changed.wait_for(lambda: all(work.comm is not comm for work in self._all()), comm.timeout)
            if not over:
                problem = "a callback of the future of an earlier operation of this group has not ended"
                remedy = "let it wait for nothing that the program does after the next operation"
                raise MeshError(problem, got=f"{comm.timeout:g} s", remedy=remedy)

    def _all(self) -> list[Any]:
        """Those that callbacks have started come first: these callbacks were earlier ones."""
        return [*self._nested, *self._works]

    def _is_inside(self) -> bool:
        return getattr(self._here, "inside", False)


def run(work: Any, complete: Callable[[], None]) -> None:
    """Complete a work's future, which calls its callbacks."""
    _under_way.run(work, complete)


def await_callbacks(comm: Communicator, name: str) -> None:
    """Wait, before an operation of this name, for the callbacks of earlier ones; in a callback for none."""
    if name not in MESSAGES:
        _under_way.wait(comm)


def _in_child() -> None:
    global _under_way
    _under_way = _UnderWay()  # the threads that call them are the parent's


_under_way = _UnderWay()
os.register_at_fork(after_in_child=_in_child)
run_as_written(each for cls in (Future, _UnderWay) for each in vars(cls).values() if hasattr(each, "__code__"))
