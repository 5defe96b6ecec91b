"""Gathering the answers of one host's ranks: equal answers go to the driver as one message.

An answer is held until all ranks that were given the task have answered it, but only for a moment; everything else that
a rank sends goes at once. Invariant: the driver gets everything from a rank in the order in which it was sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .. import protocol as ranks_protocol
from .. import wire
from .coded import framed

MOMENT_SECONDS = 0.005
_ANSWERS = (ranks_protocol.Answer, ranks_protocol.Metadata, ranks_protocol.Unchanged)
_ENDS = (*_ANSWERS, ranks_protocol.Failed, ranks_protocol.Skipped)
_MOST_BYTES = 1 << 12  # longer answers are not held


def is_gathered(packet: wire.Packet) -> bool:
    """Whether this is an answer, and so may be equal on several ranks."""
    return isinstance(ranks_protocol.decode(packet.head), _ANSWERS)


class Gathering:
    """The packets of a host's ranks, on their way to the driver.

    Args:
        send: sends a packet of one or several ranks, in pieces of bytes.
    """

    def __init__(self, send: Callable[[tuple[int, ...], Sequence[bytes]], None]):
        self._send = send
        self._due: dict[int, set[int]] = {}  # task -> ranks that have not answered
        self._held: dict[int, dict[bytes, list[int]]] = {}  # task -> answer -> ranks that gave it
        self._since = 0.0  # since when the first of them is held

    def expect(self, packet: wire.Packet, ranks: Sequence[int]) -> None:
        """Note a packet that is about to be sent to ranks."""
        if len(ranks) > 1 and isinstance(msg := ranks_protocol.decode(packet.head), ranks_protocol.Task):
            self._due[msg.number] = set(ranks)

    def take(self, rank: int, packet: wire.Packet) -> None:
        """Take a packet from a rank; the caller may close it afterwards."""
        msg = ranks_protocol.decode(packet.head)
        due = self._due.get(msg.task) if isinstance(msg, _ENDS) else None
        if due is not None:
            due.discard(rank)
        if due is None or not isinstance(msg, _ANSWERS) or packet.fd is not None or len(packet.data) > _MOST_BYTES:
            if any(rank in ranks for alike in self._held.values() for ranks in alike.values()):
                self.flush()
            self._send((rank,), framed(packet))
        else:
            if not self._held:
                self._since = time.monotonic()
            alike = self._held.setdefault(msg.task, {})
            alike.setdefault(b"".join(framed(packet)), []).append(rank)
        if due is not None and not due:
            self._complete(msg.task)

    def lose(self, rank: int) -> None:
        """Note that a rank will not answer any more."""
        self.flush()
        for due in self._due.values():
            due.discard(rank)
        self._due = {task: due for task, due in self._due.items() if due}

    def _complete(self, task: int) -> None:
        del self._due[task]
        for other in sorted(self._held):
            if other <= task:
                self._let_go(other)

    def _let_go(self, task: int) -> None:
        for content, ranks in self._held.pop(task).items():
            self._send(tuple(ranks), (content,))

    def flush(self) -> None:
        """Send everything that is held."""
        for task in sorted(self._held):
            self._let_go(task)

    def left(self) -> float | None:
        """Seconds until `flush` is due; None if nothing is held."""
        return max(0.0, self._since + MOMENT_SECONDS - time.monotonic()) if self._held else None
