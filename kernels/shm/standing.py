"""The arena of ranks that are in no region: they stay together until each ends its part, or its process.

So nobody tells them of a death: whoever waits for a rank looks whether that is still there. Invariant: a rank that has
done its part in an operation before it went is not missed in it.
"""

from __future__ import annotations

from ..errors import PeerLost
from .arena import Arena


class StandingArena(Arena):
    """As `Arena`, for ranks that are together from `begin` to `end`."""

    def begin(self) -> None:
        """All ranks have mapped it."""
        self.watch_processes()
        self.enter(1)

    def end(self) -> None:
        """This rank takes part in nothing any more."""
        self.leave()
        super().close()

    def check_peers(self) -> None:
        """Nothing: the death of a rank is nothing to those that don't wait for it; see `lost`."""

    def has_left(self, rank: int) -> bool:
        return super().has_left(rank) or self.lost(rank) is not None

    def lost(self, rank: int) -> PeerLost | None:
        return self._if_dead(rank)
