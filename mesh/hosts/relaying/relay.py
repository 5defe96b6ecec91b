"""A relay: a host that passes messages for all hosts on to some of them, and their answers back, together.

Invariant: it keeps nothing that its sender does not keep, too, so that nothing is lost if it ends.
"""

from __future__ import annotations

import functools
import selectors
import socket
import time
from typing import Any

from ....kernels.network.authentication import code
from ..coded import NotOfThisMesh
from ..gathering import MOMENT_SECONDS
from ..link import Link
from ..protocol import Bundle, Forward, Gathered, Numbered, Pulse
from ..serving import Serving

PULSE_SECONDS = 0.5  # between two signs of life
_UNFINISHED = 64  # tasks for which it keeps which hosts have answered


def secret_of(key: bytes) -> bytes:
    """The secret for connections between a relay and its hosts, from the mesh's key."""
    return code(key, b"relay")


def received(link: Link) -> list[tuple[Any, bytes]] | None:
    """Messages that have come from another host; None if it has ended, or is not of this mesh."""
    try:
        return link.receive(socket.MSG_DONTWAIT)
    except NotOfThisMesh:
        return None


class Relay(Serving):
    """Used by the thread that reads its host's link, except for accepting hosts."""

    def __init__(self, address: str, key: bytes, link: Link, selector: selectors.BaseSelector):
        self._link, self._selector = link, selector
        self._below: dict[int, Link] = {}
        self._held: dict[bytes, list[tuple[int, int, bytes]]] = {}  # content -> (host, number, message) that have it
        self._since = 0.0  # since when the first of them is held
        self._done: dict[int, set[int]] = {}  # task -> hosts whose ranks have all answered
        self._next_pulse = 0.0
        super().__init__(address, secret_of(key), "spmd-relay")

    def welcome(self, rank: int, link: Link) -> None:
        """Accept the host with this number."""
        self._below[rank] = link
        try:
            self._selector.register(link.connection, selectors.EVENT_READ, functools.partial(self._read, rank, link))
        except (OSError, KeyError):  # it can't be watched, so it must not use this relay
            del self._below[rank]
            link.close()
            return
        link.send(Pulse())

    def forward(self, msg: Forward, content: bytes) -> None:
        for host, number in msg.numbers:
            if (link := self._below.get(host)) is not None:
                link.send(Numbered(number, msg.encoded), content)

    def _read(self, host: int, link: Link, events: int) -> None:
        if (messages := received(link)) is None:
            self._selector.unregister(link.connection)
            link.close()
            if self._below.get(host) is link:
                del self._below[host]
            return
        for msg, content in messages:
            if isinstance(msg, Gathered):
                self._hold(host, msg, content)

    def _hold(self, host: int, msg: Gathered, content: bytes) -> None:
        if not self._held:
            self._since = time.monotonic()
        self._held.setdefault(content, []).append((host, msg.number, msg.encoded))
        if not msg.done:
            return
        done = self._done.setdefault(msg.done, set())
        done.add(host)
        if len(self._done) > _UNFINISHED:  # long answers don't pass here, so that some tasks never get complete here
            del self._done[min(self._done)]
        if done >= self._below.keys():
            self._done = {task: hosts for task, hosts in self._done.items() if task > msg.done}
            self._flush()

    def _flush(self) -> None:
        held, self._held = self._held, {}
        groups = tuple((len(content), tuple(parts)) for content, parts in held.items())
        self._link.send(Bundle(groups), *held)

    def tick(self) -> None:
        """Do what is due: send what is held, and signs of life."""
        now = time.monotonic()
        if self._held and now >= self._since + MOMENT_SECONDS:
            self._flush()
        if now >= self._next_pulse:
            self._next_pulse = now + PULSE_SECONDS
            for link in list(self._below.values()):
                link.send(Pulse())

    def left(self) -> float:
        """Seconds until something is due."""
        due = min(self._next_pulse, self._since + MOMENT_SECONDS) if self._held else self._next_pulse
        return max(0.0, due - time.monotonic())

    def close(self) -> None:
        """Stop relaying."""
        super().close()
        for link in list(self._below.values()):
            link.shut()
