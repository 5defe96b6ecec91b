"""The arena of ranks that run outside of regions: they stay together until each calls `end`, or its process ends.

Nobody tells them that a rank died: a rank that waits for another one checks whether its process still exists.
Invariant: an operation does not fail because of a rank that had done its part in it before it ended or died.
"""

from __future__ import annotations

from ..errors import PeerLost
from .arena import Arena


class StandingArena(Arena):
    """An `Arena` for ranks that are together from `begin` to `end`."""

    def begin(self) -> None:
        """Call this when all ranks have mapped the arena."""
        self.watch_processes()
        self.enter(1)

    def end(self) -> None:
        """Call this when this rank takes part in nothing any more."""
        self.leave()
        super().close()

    def check_peers(self) -> None:
        """Do nothing: a rank's death concerns only ranks that wait for it; see `lost`."""

    def has_left(self, rank: int) -> bool:
        return super().has_left(rank) or self.lost(rank) is not None

    def lost(self, rank: int) -> PeerLost | None:
        return self._if_dead(rank)
