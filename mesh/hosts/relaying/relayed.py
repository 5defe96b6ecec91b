"""A host that has a relay: it dials it, hears through it what the driver says to all hosts, and answers through it.

Invariant: a relay that ends, or from which nothing comes for a few seconds, is left, and the driver is told.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..coded import NotOfThisMesh
from ..link import GREETING_SECONDS, Link, greet_driver
from ..protocol import DialRelay, Gathered, HasRelay, Numbered, Pulse
from .ordered import Ordered
from .relay import received, secret_of

SILENT_SECONDS = 3.0  # of a relay that is left then
_TRIES, _AGAIN_SECONDS = 3, 0.5


class Relayed:
    """The host's end, for the thread that reads its link.

    Args:
        key: of the mesh.
        link: to the driver.
        ordered: what is said over that.
        selector: has that thread call what is registered with a connection.
    """

    def __init__(self, key: bytes, link: Link, ordered: Ordered, selector: selectors.BaseSelector):
        self._key, self._link, self._ordered, self._selector = key, link, ordered, selector
        self._relay: Link | None = None
        self._dialled: DialRelay | None = None  # the relay that it is to have
        self._dialling = threading.Thread()
        self._heard = 0.0

    def dial(self, msg: DialRelay) -> None:
        """Have this relay, if it can be reached; what can't be reached from here is done without."""
        if msg == self._dialled and (self._relay is not None or self._dialling.is_alive()):
            return
        self._dialled = msg
        self._dialling = threading.Thread(target=self._dial, args=(msg,), name="spmd-relayed", daemon=True)
        self._dialling.start()

    def _dial(self, msg: DialRelay) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(OSError, NotOfThisMesh):
                connection = socket.create_connection((msg.address, msg.port), timeout=GREETING_SECONDS)
                try:
                    link = greet_driver(connection, secret_of(self._key), msg.number)
                except BaseException:
                    connection.close()
                    raise
                read = functools.partial(self._read, link, msg)
                self._selector.register(connection, selectors.EVENT_READ, (read, None))
                return
            time.sleep(_AGAIN_SECONDS)

    def _read(self, link: Link, dialled: DialRelay | None) -> None:
        messages = received(link)
        if messages is None or dialled != self._dialled:  # it has ended, or another is to be the relay by now
            self._end(link)
            return
        for msg, content in messages:
            self._heard = time.monotonic()
            if isinstance(msg, Pulse) and link is not self._relay:  # it has let this host in
                self._leave()
                self._relay = link
                self._link.send(HasRelay(True))
                self._ordered.use_relay(True)
            elif isinstance(msg, Numbered):
                self._ordered.take(msg.number, msg.encoded, content)

    def answer(self, msg: bytes, content: Sequence[Any], done: int) -> None:
        """Send an answer of ranks to what was said to all hosts; see `Gathered`."""
        if self._relay is not None and (number := self._ordered.relayed(msg, content)):
            self._relay.send(Gathered(number, msg, done), *content)
        else:
            self._ordered.send_encoded(msg, content)

    def tick(self) -> None:
        """Do what is due."""
        if self._relay is not None and not self.left():
            self._read(self._relay, self._dialled)  # what has come while this thread had other things to do
            if not self.left():
                self._leave()

    def left(self) -> float:
        """In how many seconds something is due; infinite: nothing is."""
        return float("inf") if self._relay is None else max(0.0, self._heard + SILENT_SECONDS - time.monotonic())

    def _leave(self) -> None:
        if self._relay is not None:
            self._end(self._relay)

    def _end(self, link: Link) -> None:
        if link.connection.fileno() >= 0:  # else it was left in this round
            with contextlib.suppress(KeyError):
                self._selector.unregister(link.connection)
        link.close()
        if link is self._relay:
            self._relay = None
            self._ordered.use_relay(False)
            self._link.send(HasRelay(False))

    def close(self) -> None:
        """It is all over."""
        if self._relay is not None:
            self._relay.shut()
