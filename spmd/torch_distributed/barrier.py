"""A barrier that says who is missing: ranks sign in, and rank 0 decides when it has waited long enough.

It goes through the store, which answers even if ranks are out of step in their collectives.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch.distributed as dist

from ..kernels.errors import CollectiveMismatch

_GRACE_SECONDS = 5.0  # the others wait this much longer than rank 0, to hear its verdict


class MonitoredBarrier:
    """The barriers of one group, counted on each rank."""

    def __init__(self, store: Any, rank: int, size: int):
        self._store, self._rank, self._size = store, rank, size
        self._count = 0

    def __call__(self, seconds: float, wait_all_ranks: bool) -> None:
        """Return once all ranks are here.

        Args:
            seconds: how long to wait; with 0, ranks that are not here yet are missing.
            wait_all_ranks: name all that are missing, not only the first.

        Raises:
            CollectiveMismatch: on all ranks that have come, if one has not.
        """
        self._count += 1
        name = f"spmd/monitored/{self._count}"
        end = time.monotonic() + seconds
        if self._rank:
            self._store.set(f"{name}/{self._rank}", "here")
            verdict = self._verdict(name, end)
        else:
            missing = set(range(1, self._size))
            while missing:
                missing -= {rank for rank in missing if self._store.check([f"{name}/{rank}"])}
                if missing and time.monotonic() >= end:
                    break
                time.sleep(1e-3 if missing else 0)
            if missing and seconds <= 0:
                self._store.set(f"{name}/verdict", "0")
                raise CollectiveMismatch(
                    "Rank 0 timed out in monitoredBarrier after 0 ms: it gave the others no time",
                    got=f"no sign of ranks {sorted(missing)}",
                    remedy="give them some",
                )
            named = sorted(missing) if wait_all_ranks else sorted(missing)[:1]
            verdict = ", ".join(map(str, named))
            self._store.set(f"{name}/verdict", verdict or "all")
            verdict = verdict or "all"
        if self._rank and verdict != "all":
            raise CollectiveMismatch(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors "
                "while waiting for send/recv from rank 0",
                got=f"word from it that ranks {verdict} are missing" if verdict != "0" else "no word in time",
                remedy="see what they do instead, or give them more time",
            )
        if verdict != "all":
            ranks = f"Rank {verdict}" if "," not in verdict else f"Ranks {verdict}"
            raise CollectiveMismatch(
                f"{ranks} failed to pass monitoredBarrier in {1000 * seconds:g} ms",
                remedy="see what it does instead, or give it more time",
            )

    def _verdict(self, name: str, end: float) -> str:
        patience = max(0.0, end - time.monotonic()) + _GRACE_SECONDS
        try:
            self._store.wait([f"{name}/verdict"], datetime.timedelta(seconds=patience))
        except dist.DistStoreError:
            return "0"
        return str(self._store.get(f"{name}/verdict").decode())
