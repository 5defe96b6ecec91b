"""A host's place in the tree of relays: its messages to and from the driver, directly or through a relay.

It may have a relay, which it dials, receives from and answers through, or be one itself; until the driver says so,
everything uses the link. Invariant: if a relay ends, or sends nothing for a few seconds, the host drops it and tells
the driver.
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

SILENT_SECONDS = 3.0  # after which a silent relay is dropped
_TRIES, _AGAIN_SECONDS = 3, 0.5


class Branch:
    """Used by the thread that reads the host's link.

    Args:
        link: to the driver.
        address: of this host.
        key: of the mesh.
        ranks: how many this host has.
        selector: of that thread, which calls what is registered with a connection.
        take: handles a message from the driver.
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
        self._relay: Link | None = None  # to this host's relay
        self._dialled: DialRelay | None = None  # the relay that it should have
        self._dialling = threading.Thread()
        self._heard = 0.0
        self.send, self.resend = self._ordered.send, self._ordered.resend

    def answer(self, ranks: tuple[int, ...], content: Sequence[bytes], done: int) -> None:
        """Send ranks' answers to a task of all hosts; see `protocol.Gathered`."""
        ranks = () if len(ranks) == self._ranks else ranks  # a shorter message
        msg = protocol.encode(protocol.FromRanks(ranks))
        if self._relay is not None and (number := self._ordered.relayed(msg, content)):
            self._relay.send(Gathered(number, msg, done), *content)
        else:
            self._ordered.send_encoded(msg, content)

    def handle(self, message: Any, content: bytes) -> None:
        """Handle a message from the driver about the tree, or through it."""
        if isinstance(message, Numbered):
            self._ordered.take(message.number, message.encoded, content)
        elif isinstance(message, protocol.Forward):
            if self._own is not None:
                self._own.forward(message, content)
            self._take(protocol.decode(message.encoded), content)
        elif isinstance(message, protocol.Had):
            self._ordered.had(message)
        elif isinstance(message, protocol.OpenRelay):
            with contextlib.suppress(OSError):  # without this relay, the driver sends to the hosts below directly
                self._own = self._own or Relay(self._address, self._key, self._link, self._selector)
                self._link.send(protocol.Relaying(self._own.port))
        elif isinstance(message, DialRelay):
            if message == self._dialled and (self._relay is not None or self._dialling.is_alive()):
                return
            self._dialled = message
            self._dialling = threading.Thread(target=self._dial, args=(message,), name="spmd-relayed", daemon=True)
            self._dialling.start()

    def _dial(self, msg: DialRelay) -> None:
        """A thread's main function: connect to this relay; if it can't be reached, the host works without."""
        for _ in range(_TRIES):
            with contextlib.suppress(OSError, NotOfThisMesh):
                link = dial((msg.address, msg.port), secret_of(self._key), msg.number)
                read = functools.partial(self._read, link, msg)
                self._selector.register(link.connection, selectors.EVENT_READ, read)
                return
            time.sleep(_AGAIN_SECONDS)

    def _read(self, link: Link, dialled: DialRelay | None, events: int = 0) -> None:
        messages = received(link)
        if messages is None or dialled != self._dialled:  # it has ended, or another one should be the relay by now
            self._end(link)
            return
        for msg, content in messages:
            self._heard = time.monotonic()
            if isinstance(msg, Pulse) and link is not self._relay:  # the relay has accepted this host
                if self._relay is not None:
                    self._end(self._relay)
                self._relay = link
                self._link.send(HasRelay(True))
                self._ordered.use_relay(True)
            elif isinstance(msg, Numbered):
                self._ordered.take(msg.number, msg.encoded, content)

    def _end(self, link: Link) -> None:
        if link.connection.fileno() >= 0:  # else it was dropped in this round already
            with contextlib.suppress(KeyError):
                self._selector.unregister(link.connection)
        link.close()
        if link is self._relay:
            self._relay = None
            self._ordered.use_relay(False)
            self._link.send(HasRelay(False))

    def tick(self) -> None:
        """Do what is due: notice a silent relay, send what this host relays."""
        if self._relay is not None and not self._patience():
            self._read(self._relay, self._dialled)  # what has come while this thread was busy
            if self._relay is not None and not self._patience():
                self._end(self._relay)
        if self._own is not None:
            self._own.tick()

    def _patience(self) -> float:
        """How many seconds more the relay may be silent; infinite if there is none."""
        return float("inf") if self._relay is None else max(0.0, self._heard + SILENT_SECONDS - time.monotonic())

    def left(self) -> float:
        """Seconds until something is due."""
        return min(self._patience(), float("inf") if self._own is None else self._own.left())

    def close(self) -> None:
        """End the connections to other hosts."""
        if self._relay is not None:
            self._relay.shut()
        if self._own is not None:
            self._own.close()
