"""Which regions all ranks of a mesh have finished: what a rank has made in another one, some ranks may not have."""

from __future__ import annotations


class Finished:
    """A rank's record of that.

    Attributes:
        now: the generation, and the number of the last region that this rank has entered.
    """

    def __init__(self) -> None:
        self.now = 0, 0
        self._last: dict[int, int] = {}  # by generation that is over: its last region that all ranks have finished

    def enter(self, region: int) -> None:
        self.now = self.now[0], region

    def renew(self, generation: int, last: int) -> None:
        """A new generation begins, or this rank, in it; `last` is the last region that all ranks have finished."""
        if generation != self.now[0]:
            self._last[self.now[0]] = last
            self.now = generation, self.now[1]

    def has_failed(self, then: tuple[int, int]) -> bool:
        """Whether the region that was the last one `then`, an earlier value of `now`, has failed."""
        generation, region = then
        return generation in self._last and region > self._last[generation]
