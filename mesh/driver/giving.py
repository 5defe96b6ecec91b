"""Values that the driver puts on a mesh: their bytes lie once in a host's arena, where every rank of it sees them.

So they are the mesh's, whatever becomes of the ranks, and cost nobody a descriptor. Invariant: a block of the arena is
the value's for as long as the driver has a name for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from .. import protocol, wire
from ..protocol import Spans
from ..spec import P
from .session import DriverSession
from .session_view import Make
from .values import CallValues


def message_of(
    session: DriverSession, values: CallValues, tensors: Sequence[torch.Tensor], specs: tuple[P, ...]
) -> tuple[Make, Callable[[], wire.Packet]]:
    """What has every rank keep its shards of whole tensors, as a call's values; and its content, to be made first."""
    arena = session.ranks.arena if session.lasting else None
    given: list[tuple[int, int, int]] = []

    def allocate(nbytes: int) -> memoryview:
        assert arena is not None
        result = arena.given.take(nbytes)
        given.append((*result, nbytes))
        values.given = weakref.finalize(values, arena.given.drop, result)
        values.given.atexit = False
        return arena.given.memory(result, nbytes)

    def make(number: int, region: int, freed: Spans, forgotten: tuple[str, ...]) -> protocol.Task:
        where = given[-1] if given else None
        return protocol.PutValues(number, region, freed, forgotten, out=values.number, specs=specs, given=where)

    def content() -> wire.Packet:
        packet = session.dumps([*tensors], allocate=None if arena is None else allocate)
        if packet.fd is not None and values.given is None:  # each host lays it in memory of its own
            values.given = weakref.finalize(values, session.ranks.drop_given, values.number)
            values.given.atexit = False
        return packet

    return make, content
