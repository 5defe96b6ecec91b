"""Batches of a dataset of either kind, and those of one epoch that were asked for and not yet taken."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..mesh.driver.snapshot import Snapshot
from ..mesh.mesh import Mesh
from ..mesh.readers.asking import Reader


class Batches:
    """What the batches of both kinds of datasets have in common."""

    source: str
    _reader: Any
    _seen: Snapshot | None = None  # what a launched rank last read with

    def _see_changes(self, mesh: Mesh, *parts: Any) -> None:
        """Go on without workers, which have copies, if anything that batches are read with has changed.

        Only on a launched rank: a driver notices it for its ranks.
        """
        if mesh.is_driver or (self._seen is not None and self._seen.arrays(parts) is not None):
            return
        if self._seen is not None:
            self._reader = copy.copy(self._reader)
        self._seen = Snapshot(parts)


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


def in_words(settings: Mapping[str, Any]) -> str:
    """What batches depend on, as the text that a `Deal` has."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
