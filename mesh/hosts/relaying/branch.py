"""A host's place in the tree of relays: what it says to the driver and hears from it, by whichever way.

It may have a relay, or be one; until it is told so, all goes by the link.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Sequence
from typing import Any

from .. import protocol
from ..link import Link
from .ordered import Ordered
from .relay import Relay
from .relayed import Relayed


class Branch:
    """For the thread that reads the host's link.

    Args:
        link: to the driver.
        address: of this host.
        key: of the mesh.
        ranks: of this host, how many.
        selector: has that thread call what is registered with a connection.
        take: does what the driver has said.
    """

    def __init__(
        self,
        link: Link,
        address: str,
        key: bytes,
        ranks: int,
        selector: selectors.BaseSelector,
        take: Callable[[Any, bytes], None],
    ):
        self._link, self._address, self._key, self._selector, self._take = link, address, key, selector, take
        self._ranks, self._ordered = ranks, Ordered(link, take)
        self._relayed = Relayed(key, link, self._ordered, selector)
        self._relay: Relay | None = None
        self.send, self.resend = self._ordered.send, self._ordered.resend

    def answer(self, ranks: tuple[int, ...], content: Sequence[bytes], done: int) -> None:
        """Send what ranks have answered to what all hosts were told; see `protocol.Gathered`."""
        ranks = () if len(ranks) == self._ranks else ranks  # a shorter message
        self._relayed.answer(protocol.encode(protocol.FromRanks(ranks)), content, done)

    def handle(self, message: Any, content: bytes) -> None:
        """Do what the driver says of the tree, or through it."""
        if isinstance(message, protocol.Numbered):
            self._ordered.take(message.number, message.encoded, content)
        elif isinstance(message, protocol.Forward):
            if self._relay is not None:
                self._relay.forward(message, content)
            self._take(protocol.decode(message.encoded), content)
        elif isinstance(message, protocol.Had):
            self._ordered.had(message)
        elif isinstance(message, protocol.OpenRelay):
            with contextlib.suppress(OSError):  # without one the driver tells the hosts below itself
                self._relay = self._relay or Relay(self._address, self._key, self._link, self._selector)
                self._link.send(protocol.Relaying(self._relay.port))
        elif isinstance(message, protocol.DialRelay):
            self._relayed.dial(message)

    def tick(self) -> None:
        """Do what is due."""
        for one in (self._relayed, self._relay):
            if one is not None:
                one.tick()

    def left(self) -> float:
        """In how many seconds something is due."""
        return min(self._relayed.left(), float("inf") if self._relay is None else self._relay.left())

    def close(self) -> None:
        """End the connections to other hosts."""
        for one in (self._relayed, self._relay):
            if one is not None:
                one.close()
