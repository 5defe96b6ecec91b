"""How a process that replaces a dead rank takes over its part of the arena, with the values that the rank kept.

The memory that the dead rank's ledger names stays as it is; all its other views of results count as dropped, and the
rest of its heap is freed. Invariant: this is over before the new rank enters a region, and the survivors only see
counters grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from .arena import Arena
from .blocks import Extent
from .heap import Heap
from .ledger import Record


def take_over(arena: Arena) -> list[tuple[Record, list[torch.Tensor]]]:
    """What the process before this one kept: each entry of the ledger, and the bytes of its extents."""
    records = arena.ledger.read()
    named = {extent for one in records for extent in one.extents}
    again = Counter(extent.release for extent in named if extent.release)
    for register in arena.registers:
        for block, _, members in register:
            if arena.rank in members:  # its views count as dropped, except those that are taken again
                dropped = block // 8 + members.index(arena.rank)
                arena.words[dropped] = arena.words[dropped + len(members)] - again[dropped]
    own = arena.registers[arena.rank]
    kept = [(block, Heap.rounded(nbytes)) for block, nbytes, _ in own]
    kept += [(extent.offset, Heap.rounded(extent.nbytes)) for extent in named if not extent.release]
    arena.restart_heap(_gaps(sorted(kept), arena.heap_start, arena.top))
    held = {
        extent: arena.views.take_again(extent) if extent.release else arena.lasting.hold(extent.offset, extent.nbytes)
        for extent in named
    }
    return [(one, [held[extent] for extent in one.extents]) for one in records]


def kept_by(arena: Arena, rank: int) -> list[tuple[Record, list[torch.Tensor]]]:
    """What a rank keeps, for another participant to read while the rank does nothing, or has died."""
    found = []
    for one in arena.entries_of(rank).read():
        found.append((one, [arena.tensor(extent.offset, extent.nbytes, torch.uint8) for extent in one.extents]))
    return found


def _gaps(kept: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The gaps between sorted pieces of (offset, bytes), from `start` to `end`.

    >>> _gaps([(4, 2), (6, 1)], 0, 10)
    [(0, 4), (7, 3)]
    """
    found, at = [], start
    for offset, nbytes in kept:
        if offset > at:
            found.append((at, offset - at))
        at = max(at, offset + nbytes)
    if end > at:
        found.append((at, end - at))
    return found


def extent_of(arena: Arena, storage: torch.UntypedStorage, *, written: bool = False) -> Extent | None:
    """Where a storage lies, if its memory outlives this process; None for private memory, and for changed views.

    Args:
        written: see `Views.extent_of`.
    """
    address = storage.data_ptr()
    return arena.lasting.extent_of(address, storage.nbytes()) or arena.views.extent_of(address, written=written)
