"""What was counted: the collectives of one rank, and their sums by operation, axis and direction."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One operation of a communicator.

    Attributes:
        operation: as a communicator calls it: `psum` is an all_reduce, `ppermute` an all_to_all.
        axes: of the mesh, along which the ranks that took part differ.
        bytes: of what this rank gave to it.
        backward: it ran in a backward pass, or sums gradients.
    """

    operation: str
    axes: tuple[str, ...]
    bytes: int
    backward: bool


class Counts:
    """Collectives in the order in which they were started, with what they come to."""

    def __init__(self, collectives: Iterable[Collective] = ()):
        self._collectives = list(collectives)

    def note(self, collective: Collective) -> None:
        self._collectives.append(collective)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All of them."""
        return tuple(self._collectives)

    @property
    def operations(self) -> dict[str, int]:
        """How many there were of each operation."""
        return dict(collections.Counter(one.operation for one in self._collectives))

    @property
    def bytes(self) -> int:
        """What this rank gave to all of them together."""
        return sum(one.bytes for one in self._collectives)

    @property
    def axes(self) -> dict[str, int]:
        """How many there were along each axis of the mesh; one along several counts for each."""
        return dict(collections.Counter(name for one in self._collectives for name in one.axes))

    @property
    def forward(self) -> Counts:
        """Those of forward passes."""
        return Counts(one for one in self._collectives if not one.backward)

    @property
    def backward(self) -> Counts:
        """Those of backward passes, with the sums of gradients."""
        return Counts(one for one in self._collectives if one.backward)

    def __len__(self) -> int:
        return len(self._collectives)

    def __repr__(self) -> str:
        each = ", ".join(f"{name} x{count}" for name, count in self.operations.items())
        along = ", ".join(f"{name} x{count}" for name, count in self.axes.items())
        return (
            f"Counts({each or 'no collectives'}; {self.bytes} bytes; along {along or 'no axis'}; "
            f"{len(self.forward)} forward, {len(self.backward)} backward)"
        )
