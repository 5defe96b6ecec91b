"""What a driver and one of its hosts say to each other, in order, over two ways: their link, and a relay's.

From when the host has a relay, all of it has numbers, and the other end takes it by these, whichever way it came. What
went by the relay is kept until the other end has had it, and sent by the link if the relay is lost. Invariant: all is
taken once, in the order in which it was sent, whatever becomes of the relay.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ....kernels.network.codec import Message
from ..link import Link
from ..protocol import Had, Numbered, decode, encode

_ACKNOWLEDGED = 32  # messages that are acknowledged at once


class Ordered:
    """One end; any thread sends, one takes what has come."""

    def __init__(self, link: Link, take: Callable[[Any, bytes], None]):
        self._link, self._take = link, take
        self._lock = threading.Lock()
        self._numbered = self._relayed = False
        self._sent = self._taken = 0
        self._kept: deque[tuple[int, bytes, Sequence[Any]]] = deque()  # what went by the relay
        self._early: dict[int, tuple[bytes, bytes]] = {}  # what has come before what was sent before it

    def send(self, message: Message, *content: Any) -> None:
        """Send a message, and its content in pieces of bytes, by the link; nobody is waited for."""
        self.send_encoded(encode(message), content)

    def send_encoded(self, msg: bytes, content: Sequence[Any]) -> None:
        """As `send`, of what was encoded before."""
        if self._link.foreign:
            return
        with self._lock:
            if self._numbered:
                self._sent += 1
                self._link.send(Numbered(self._sent, msg), *content)
            else:
                self._link.send_encoded(msg, content)

    def relayed(self, msg: bytes, content: Sequence[Any]) -> int:
        """The number of a message that the caller has relayed now; 0: it is to be sent by the link."""
        with self._lock:
            if not self._relayed or not self._sent:  # the first comes by the link, behind what has no number
                return 0
            self._sent += 1
            self._kept.append((self._sent, msg, content))
            return self._sent

    def use_relay(self, there: bool) -> None:
        """There is a relay from now on, or none any more."""
        with self._lock:
            self._relayed = there
            self._numbered = self._numbered or there
            for number, msg, content in () if there else self._kept:
                self._link.send(Numbered(number, msg), *content)
            if not there:
                self._kept.clear()

    def resend(self) -> None:
        """Send by the link, too, what may still be on its way by the relay: what comes next must not wait for it."""
        with self._lock:
            for number, msg, content in self._kept:
                self._link.send(Numbered(number, msg), *content)

    def take(self, number: int, msg: bytes, content: bytes) -> None:
        """Take a message in its turn, unless it was taken before."""
        if number > self._taken:
            self._early[number] = msg, content
        while self._early and (found := self._early.pop(self._taken + 1, None)) is not None:
            self._taken += 1
            if self._taken % _ACKNOWLEDGED == 0:
                self._link.send(Had(self._taken))
            self._take(decode(found[0]), found[1])

    def had(self, msg: Had) -> None:
        """The other end has taken all up to this."""
        with self._lock:
            while self._kept and self._kept[0][0] <= msg.number:
                self._kept.popleft()
