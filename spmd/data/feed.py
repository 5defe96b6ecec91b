"""Batches of one epoch that were asked for and not yet taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

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
