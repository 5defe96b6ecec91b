"""A host's place in the tree of relays: what it says to the driver and hears from it, by whichever way.

It may have a relay, which it dials, hears, and answers through, or be one; until it is told so, all goes by the link.
Invariant: a relay that ends, or from which nothing comes for a few seconds, is left, and the driver is told.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import protocol
from ..coded import NotOfThisMesh
from ..link import Link, dial
from ..protocol import DialRelay, Gathered, HasRelay, Numbered, Pulse
from .ordered import Ordered
from .relay import Relay, received, secret_of

SILENT_SECONDS = 3.0  # of a relay that is left then
_TRIES, _AGAIN_SECONDS = 3, 0.5


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
        self._own: Relay | None = None  # if this host is one
        self._relay: Link | None = None  # to the one that it has
        self._dialled: DialRelay | None = None  # which it is to have
        self._dialling = threading.Thread()
        self._heard = 0.0
        self.send, self.resend = self._ordered.send, self._ordered.resend

    def answer(self, ranks: tuple[int, ...], content: Sequence[bytes], done: int) -> None:
        """Send what ranks have answered to what all hosts were told; see `protocol.Gathered`."""
        ranks = () if len(ranks) == self._ranks else ranks  # a shorter message
        msg = protocol.encode(protocol.FromRanks(ranks))
        if self._relay is not None and (number := self._ordered.relayed(msg, content)):
            self._relay.send(Gathered(number, msg, done), *content)
        else:
            self._ordered.send_encoded(msg, content)

    def handle(self, message: Any, content: bytes) -> None:
        """Do what the driver says of the tree, or through it."""
        if isinstance(message, Numbered):
            self._ordered.take(message.number, message.encoded, content)
        elif isinstance(message, protocol.Forward):
            if self._own is not None:
                self._own.forward(message, content)
            self._take(protocol.decode(message.encoded), content)
        elif isinstance(message, protocol.Had):
            self._ordered.had(message)
        elif isinstance(message, protocol.OpenRelay):
            with contextlib.suppress(OSError):  # without one the driver tells the hosts below itself
                self._own = self._own or Relay(self._address, self._key, self._link, self._selector)
                self._link.send(protocol.Relaying(self._own.port))
        elif isinstance(message, DialRelay):
            if message == self._dialled and (self._relay is not None or self._dialling.is_alive()):
                return
            self._dialled = message
            self._dialling = threading.Thread(target=self._dial, args=(message,), name="spmd-relayed", daemon=True)
            self._dialling.start()

    def _dial(self, msg: DialRelay) -> None:
        """A thread's main function: have this relay, if it can be reached; else it is done without."""
        for _ in range(_TRIES):
            with contextlib.suppress(OSError, NotOfThisMesh):
                link = dial((msg.address, msg.port), secret_of(self._key), msg.number)
                read = functools.partial(self._read, link, msg)
                self._selector.register(link.connection, selectors.EVENT_READ, read)
                return
            time.sleep(_AGAIN_SECONDS)

    def _read(self, link: Link, dialled: DialRelay | None, events: int = 0) -> None:
        messages = received(link)
        if messages is None or dialled != self._dialled:  # it has ended, or another is to be the relay by now
            self._end(link)
            return
        for msg, content in messages:
            self._heard = time.monotonic()
            if isinstance(msg, Pulse) and link is not self._relay:  # it has let this host in
                if self._relay is not None:
                    self._end(self._relay)
                self._relay = link
                self._link.send(HasRelay(True))
                self._ordered.use_relay(True)
            elif isinstance(msg, Numbered):
                self._ordered.take(msg.number, msg.encoded, content)

    def _end(self, link: Link) -> None:
        if link.connection.fileno() >= 0:  # else it was left in this round
            with contextlib.suppress(KeyError):
                self._selector.unregister(link.connection)
        link.close()
        if link is self._relay:
            self._relay = None
            self._ordered.use_relay(False)
            self._link.send(HasRelay(False))

    def tick(self) -> None:
        """Do what is due."""
        if self._relay is not None and not self._patience():
            self._read(self._relay, self._dialled)  # what has come while this thread had other things to do
            if self._relay is not None and not self._patience():
                self._end(self._relay)
        if self._own is not None:
            self._own.tick()

    def _patience(self) -> float:
        """For how many seconds more the relay may be silent; infinite: there is none."""
        return float("inf") if self._relay is None else max(0.0, self._heard + SILENT_SECONDS - time.monotonic())

    def left(self) -> float:
        """In how many seconds something is due."""
        return min(self._patience(), float("inf") if self._own is None else self._own.left())

    def close(self) -> None:
        """End the connections to other hosts."""
        if self._relay is not None:
            self._relay.shut()
        if self._own is not None:
            self._own.close()
