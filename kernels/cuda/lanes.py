"""The stream of each message: each direction between two ranks has a stream to itself while it has messages under way.

Two directions on one stream would have an order that other ranks don't know, and with different orders GPUs may wait
for each other in a circle. So a stream is given to another direction only once its messages are over. A rank has at
most `MOST` streams for sends and as many for receives; a message that finds none free waits on the host. A receive
takes its stream before it tells the sender to begin, so a send that has begun always ends, and so does whatever waits
for its stream.
"""

from __future__ import annotations

import dataclasses
from typing import Any

MOST = 16
Direction = tuple[int, int]  # source, destination


@dataclasses.dataclass(slots=True)
class _Lane:
    """A stream, how many messages it was promised to, and the event after the newest message that was put on it."""

    stream: Any
    promised: int = 0
    newest: Any = None

    def idle(self) -> bool:
        return not self.promised and (self.newest is None or self.newest.query())


class Lanes:
    """The streams of a rank's sends, or of its receives.

    Args:
        streams: the `streams.Streams` that makes them.
    """

    def __init__(self, streams: Any):
        self._streams = streams
        self._of: dict[Direction, _Lane] = {}
        self._free: list[_Lane] = []

    def promise(self, direction: Direction) -> bool:
        """Reserve a stream for one more message of a direction; False if none is free."""
        lane = self._of.get(direction) or self._another()
        if lane is None:
            return False
        self._of[direction] = lane
        lane.promised += 1
        return True

    def _another(self) -> _Lane | None:
        for direction, lane in tuple(self._of.items()):
            if lane.idle():
                self._free.append(self._of.pop(direction))
        if self._free:
            return self._free.pop()
        return _Lane(self._streams.new()) if len(self._of) < MOST else None

    def close(self) -> None:
        """Give the streams back."""
        for lane in (*self._of.values(), *self._free):
            self._streams.give_back(lane.stream)
        self._of.clear()
        self._free.clear()

    def stream(self, direction: Direction) -> Any:
        """The stream that was promised to a direction."""
        return self._of[direction].stream

    def given(self, direction: Direction, event: Any) -> None:
        """Note that a message was put on the stream, and is over when `event` is."""
        lane = self._of[direction]
        lane.promised -= 1
        lane.newest = event
