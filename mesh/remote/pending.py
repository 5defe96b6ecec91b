"""Requests that wait for an answer from another process."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from ...kernels.interrupts import raised_by_handler
from .. import wire
from .protocol import Name
from .reference import Ref

LOOK_SECONDS = 0.01


@dataclasses.dataclass(slots=True, eq=False)
class Waiting:
    """A request whose answer is awaited.

    Attributes:
        settle: takes the answer: a packet (None: the result is large, and stays where it is), or an error.
        what: what is asked for, in words.
        future, name: of a call.
        refs: Refs among its arguments, whose results must be kept until it is answered.
        nbytes: of its arguments.
        again: whether it is sent again if its rank dies.
    """

    settle: Callable[[Any, BaseException | None], None]
    what: str
    future: Future | None = None
    name: Name | None = None
    refs: tuple[Ref, ...] = ()
    nbytes: int = 0
    again: bool = False


def duplicate(packet: wire.Packet) -> wire.Packet:
    """A copy of a packet, which can be closed by itself."""
    fd = packet.fd if packet.fd in (None, wire.LOST) else os.dup(packet.fd)
    return wire.Packet(packet.data, packet.inline, fd)


def new_future() -> Future:
    """A future that can't be cancelled."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future


def settles(future: Future) -> Callable[[Any, BaseException | None], None]:
    """A `Waiting.settle` that gives a future its result, or its error."""

    def settle(packet: Any, error: BaseException | None) -> None:
        if error is None:
            future.set_result(packet)
        else:
            future.set_exception(error)

    return settle


def result_of(future: Future, seconds: float | None) -> Any:
    """The result of a future; raises its error, or `concurrent.futures.TimeoutError` after so many seconds.

    It polls, because a rank that does nothing at all while a call waits for it counts as stuck (`driver.stuck`).
    """
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = LOOK_SECONDS if end is None else end - time.monotonic()
        try:
            return future.result(max(0.0, min(LOOK_SECONDS, left)))
        except FutureTimeout as error:
            if raised_by_handler(error):
                raise
            if future.done():
                return future.result()
            if end is not None and left <= LOOK_SECONDS:
                raise
