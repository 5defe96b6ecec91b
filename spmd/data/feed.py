"""Batches of one epoch that were asked for and not yet taken; and where they may begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..kernels.errors import SpecError, message
from ..mesh.driver.snapshot import Snapshot
from ..mesh.mesh import Mesh
from ..mesh.readers.asking import Reader


class Feed:
    """What the feeds of both kinds of datasets have in common: batches come in the order in which they were asked for.

    Args:
        reader: what ranks read with; it is looked at for changes once an epoch.
        step: the first that is to be asked for.
    """

    def __init__(self, mesh: Mesh, reader: Any, epoch: int, step: int):
        self._mesh, self._epoch, self._next = mesh, epoch, step
        self._reader = Reader(reader)
        self._pending: deque[Callable[[], Any]] = deque()

    @property
    def asked(self) -> int:
        return len(self._pending)

    @property
    def is_brief(self) -> bool:
        """Whether the ranks took next to no time to read the last batches that were taken."""
        return self._reader.is_brief


class LastSeen:
    """What a launched rank last read with; its workers have copies of that. A driver checks this for its own ranks."""

    def __init__(self) -> None:
        self._seen: Snapshot | None = None

    def has_changed(self, *parts: Any) -> bool:
        """Whether anything in these parts has changed since the last call, as far as `Snapshot` sees."""
        if self._seen is not None and self._seen.unchanged(parts):
            return False
        first, self._seen = self._seen is None, Snapshot(parts)
        return not first


def in_words(settings: Mapping[str, Any]) -> str:
    """What batches depend on, as the text that a `Deal` has."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def check_order(before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a position within an epoch whose samples came in another order, which depends on the settings `names`."""
    for name in names:
        if before[name] != now[name]:
            raise no_batch(f"{name}={now[name]!r}", f"{name}={before[name]!r}, as where the position is from")


def no_batch(got: str, expected: str) -> SpecError:
    """The error for a position at which no batch of a Loader begins."""
    remedy = 'make the Loader as it was, or begin an epoch: load_state_dict({"epoch": epoch, "step": 0})'
    problem = "a Loader can't go on from a position of other batches"
    return SpecError(message(problem, got=got, expected=expected, remedy=remedy))
