"""Deadlock detection: finding calls that wait for themselves, through any number of objects on any ranks.

A call that has waited for a while sends a probe along what it waits for. A call that has not begun waits for the calls
before it in its object, and for its arguments; a running one for what its method waits for without a timeout. A probe
that comes back to where it began has found a cycle (the method of Chandy, Misra and Haas, 1983). Invariant: a cycle
that was found is real and permanent, since none of its waits can end in another way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from .connections import Connection
from .objects import Call, LiveObject
from .protocol import Name, NodeId, Probe, WaitsForItself

_HOPS = 100  # a probe's most


class Probes:
    """The probes that pass through this process; the node's lock must be held for all methods."""

    def __init__(
        self,
        own: NodeId,
        calls: dict[Name, Call],
        objects: dict[Name, LiveObject],
        connection: Callable[[int], Connection],
    ):
        self._own, self._calls, self._objects, self._connection = own, calls, objects, connection

    def send(self, owner: NodeId, probe: Probe) -> None:
        """Send a probe to the process that runs the call it is about."""
        if owner == self._own:
            self.look(probe)
        else:
            self._tell(owner, probe)

    def look(self, probe: Probe) -> None:
        """Pass a probe on along everything that its call waits for."""
        call = self._calls.get(probe.call)
        if call is None or call.answer is not None or len(probe.seen) > _HOPS or probe.call in probe.seen[1:]:
            return
        seen = (*probe.seen, probe.call)
        for owner, name in self._waits_of(call):
            if name != probe.waiting:
                self.send(owner, Probe(probe.waiting, name, seen))
            elif owner == self._own:
                self.found(probe.waiting, seen)
            else:
                self._tell(owner, WaitsForItself(probe.waiting, seen))

    def _waits_of(self, call: Call) -> list[tuple[NodeId, Name]]:
        if call.state == "running":
            return [] if call.waits_for is None else [call.waits_for]
        live = self._objects.get(call.invoke.target)
        before = [] if live is None else live.before(call)
        return [*(call.invoke.refs[index] for index in call.missing), *((self._own, one.name) for one in before)]

    def found(self, waiting: Name, chain: tuple[Name, ...]) -> None:
        """Note that a call of this process waits for itself."""
        call = self._calls.get(waiting)
        if call is not None and call.waits_for is not None:
            call.deadlock = chain

    def _tell(self, owner: NodeId, msg: Any) -> None:
        with contextlib.suppress(OSError):
            self._connection(owner[0]).send(msg)
