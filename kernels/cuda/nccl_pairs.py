"""NCCL's communicators for messages: one for each direction of each pair of ranks that is used.

NCCL connects two GPUs at their first send and receive, and the calling thread then waits for the other side. So the
thread that makes a communicator also sends one byte through it, on a stream of its own: later messages don't wait on
the host, and two ranks whose first messages cross don't wait for each other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from .lanes import Direction
from .nccl_arithmetic import nccl_type
from .nccl_connection import Connection, Pending, joined
from .nccl_library import Library

_LOOK_SECONDS = 1e-3


class Pairs:
    """The directions from and to one rank.

    Args:
        rank: this rank's number in its group.
        streams: a `streams.Streams`.
    """

    def __init__(self, library: Library, streams: Any, rank: int):
        self._library, self._streams, self._rank = library, streams, rank
        self._connections: dict[Direction, Connection] = {}
        self._pending: dict[Direction, Pending] = {}

    def connect(self, direction: Direction, unique: bytes) -> bool:
        """Whether a direction is ready for messages; if not, begins to connect it, by a unique id that both ranks know.

        Raises:
            MeshError: NCCL could not connect the two.
        """
        if direction in self._connections:
            return True
        pending = self._pending.get(direction)
        if pending is None:
            pending = self._pending[direction] = self._begun(direction, unique)
        if not pending.done():
            return False
        made = pending.result()
        assert made is not None
        self._connections[direction] = made
        self._pending.pop(direction, None)
        return True

    def _begun(self, direction: Direction, unique: bytes) -> Pending:
        name, rank, peer = self._half(direction)

        def run(abandoned: Callable[[], bool]) -> Connection:
            made = joined(self._library, 2, unique, rank, self._streams.enter)
            if abandoned():
                return made
            try:
                stream, byte = self._streams.new(), torch.zeros(1, dtype=torch.uint8, device=self._streams.device)
                with self._streams.on(stream):
                    call = byte.data_ptr(), 1, nccl_type(self._library.nccl, byte.dtype), peer, self._streams.pointer()
                    made.call(lambda raw: getattr(raw, name)(*call), waits=True)
                    event = self._streams.event()
                while not event.query() and not abandoned():
                    time.sleep(_LOOK_SECONDS)
                self._streams.give_back(stream)
            except BaseException:
                made.end(abort=True)
                raise
            return made

        return Pending(run, self._streams.enter)

    def start(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Start this rank's half, a send or a receive, on the current stream."""
        name, _, peer = self._half(direction)
        call = tensor.data_ptr(), tensor.numel(), nccl_type(self._library.nccl, tensor.dtype), peer
        stream = self._streams.pointer()
        self._connections[direction].call(lambda raw: getattr(raw, name)(*call, stream))

    def _half(self, direction: Direction) -> tuple[str, int, int]:
        """This rank's half of a direction: send or receive, its rank in the pair, and its peer's."""
        return ("send", 0, 1) if direction[0] == self._rank else ("recv", 1, 0)

    def check_async_error(self) -> None:
        """Raise an error that NCCL has noticed asynchronously, in any direction."""
        for connection in tuple(self._connections.values()):
            connection.check_async_error()

    def end(self, *, abort: bool) -> None:
        """Begin to end all directions; a second call does nothing."""
        with contextlib.suppress(KeyError):  # pop until empty, since the watchdog may do the same at this moment
            while True:
                self._pending.popitem()[1].abandon()
        with contextlib.suppress(KeyError):
            while True:
                self._connections.popitem()[1].end(abort=abort)
