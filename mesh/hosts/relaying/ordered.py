"""Keeping messages between a driver and one of its hosts in order, over two ways: their link, and a relay.

Once the host has a relay, all messages are numbered, and the other end takes them in the order of the numbers,
whichever way they came. What went through the relay is kept until it is acknowledged, and sent over the link if the
relay is lost. Invariant: every message is taken once, in the order of sending, whatever happens to the relay.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ....kernels.network.codec import Message
from ..link import Link
from ..protocol import Had, Numbered, decode, encode

_ACKNOWLEDGED = 32  # messages for each acknowledgement


class Ordered:
    """One end; any thread may send, one thread takes what has come."""

    def __init__(self, link: Link, take: Callable[[Any, bytes], None]):
        self._link, self._take = link, take
        self._lock = threading.Lock()
        self._numbered = self._relayed = False
        self._sent = self._taken = 0
        self._kept: deque[tuple[int, bytes, Sequence[Any]]] = deque()  # what went through the relay, not acknowledged
        self._early: dict[int, tuple[bytes, bytes]] = {}  # what has come out of order

    def send(self, message: Message, *content: Any) -> None:
        """Send a message over the link, with its content in pieces of bytes, without waiting."""
        self.send_encoded(encode(message), content)

    def send_encoded(self, msg: bytes, content: Sequence[Any]) -> None:
        """As `send`, for an encoded message."""
        if self._link.foreign:
            return
        with self._lock:
            if self._numbered:
                self._sent += 1
                self._link.send(Numbered(self._sent, msg), *content)
            else:
                self._link.send_encoded(msg, content)

    def relayed(self, msg: bytes, content: Sequence[Any]) -> int:
        """A number for a message, which the caller then sends through the relay; 0 if it must use the link instead."""
        with self._lock:
            if not self._relayed or not self._sent:  # the first uses the link, after those without a number
                return 0
            self._sent += 1
            self._kept.append((self._sent, msg, content))
            return self._sent

    def use_relay(self, there: bool) -> None:
        """From now on there is a relay, or none any more."""
        with self._lock:
            self._relayed = there
            self._numbered = self._numbered or there
            for number, msg, content in () if there else self._kept:
                self._link.send(Numbered(number, msg), *content)
            if not there:
                self._kept.clear()

    def resend(self) -> None:
        """Send over the link, too, what the relay may not have delivered yet, so that the next message needn't wait."""
        with self._lock:
            for number, msg, content in self._kept:
                self._link.send(Numbered(number, msg), *content)

    def take(self, number: int, msg: bytes, content: bytes) -> None:
        """Take a message when it is its turn, unless it was taken before."""
        if number > self._taken:
            self._early[number] = msg, content
        while self._early and (found := self._early.pop(self._taken + 1, None)) is not None:
            self._taken += 1
            if self._taken % _ACKNOWLEDGED == 0:
                self._link.send(Had(self._taken))
            self._take(decode(found[0]), found[1])

    def had(self, msg: Had) -> None:
        """The other end has acknowledged messages."""
        with self._lock:
            while self._kept and self._kept[0][0] <= msg.number:
                self._kept.popleft()
