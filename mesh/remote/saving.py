"""An object that is restored says what it has become, after each call and before anybody is told that this is done."""

from __future__ import annotations

import itertools
import threading

from .. import wire
from . import answers
from .connections import Post
from .contents import Contents
from .objects import Call, LiveObject
from .protocol import Raised, SavedResult, SavedState


class Saving:
    """What of this process's objects is on its way to their makers; see `restoring`."""

    def __init__(self, post: Post, contents: Contents):
        self._post, self._contents = post, contents
        self._numbers = itertools.count(1)
        self._coming: dict[int, threading.Event] = {}

    def saved(self, live: LiveObject, call: Call, kind: type, packet: wire.Packet) -> tuple[type, wire.Packet]:
        """Have the maker of an object keep what it has become, before anybody is told that the call is done."""
        assert live.maker is not None
        try:
            state, _ = self._contents.of_result(live.value.save(), f"{type(live.value).__name__}.save")
        except BaseException as error:
            packet.close()
            return Raised, answers.packed(error, self._post.id[0])
        number, kept = next(self._numbers), threading.Event()
        self._coming[number] = kept
        with self._post.lock:
            if call.name[0] == live.name[0]:
                live.maker.send(SavedResult(live.name, call.name[1], kind is Raised), packet)
            live.maker.send(SavedState(number, live.name), state)
        state.close()
        while not kept.wait(1.0) and not live.maker.lost:
            pass
        del self._coming[number]
        return kind, packet

    def kept(self, number: int) -> None:
        """The maker has what was sent under a number."""
        if number in self._coming:
            self._coming[number].set()
