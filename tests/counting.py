"""An object that tests count with on a rank, and that outlives it if made with `restore=True`."""

from __future__ import annotations


class Counter:
    count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def save(self) -> int:
        return self.count

    def load(self, count: int) -> None:
        self.count = count
