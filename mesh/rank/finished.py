"""What all ranks of a mesh have done together: of what a rank has made otherwise, another rank may know nothing."""

from __future__ import annotations


class Finished:
    """A rank's record of that.

    Attributes:
        now: the generation, and the number of the last region that this rank has entered.
    """

    def __init__(self) -> None:
        self.now = 0, 0
        self._members_since = 0  # the generation in which a rank was last replaced
        self._last: dict[int, int] = {}  # by generation that is over: its last region that all ranks have finished

    def enter(self, region: int) -> None:
        self.now = self.now[0], region

    def renew(self, generation: int, last: int, *, replaced: bool) -> None:
        """A new generation begins, or this rank, in it.

        Args:
            last: the last region that all ranks have finished.
            replaced: whether a rank was.
        """
        if generation != self.now[0]:
            self._last[self.now[0]] = last
            self.now = generation, self.now[1]
        if replaced:
            self._members_since = generation

    def is_over(self, then: tuple[int, int]) -> bool:
        """Whether a rank may lack what all were to make `then`, an earlier `now`: it is new, or that region failed."""
        generation, region = then
        return generation < self._members_since or region > self._last.get(generation, region)
