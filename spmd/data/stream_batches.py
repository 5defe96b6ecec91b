"""The batches of a `Stream`: how many virtual streams there are, and asking the ranks for their parts.

Every request carries the last position that is known, so that any rank can answer it. Invariant: an epoch ends with the
first batch to which no virtual stream gives a sample.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

from ..kernels.arguments import checked_flag, integer
from ..kernels.errors import SpecError
from ..mesh.batch import Deal
from ..mesh.mesh import Mesh
from ..mesh.readers.filled import fill_streams
from .feed import Batches, Feed, in_words
from .reading import OF_BATCHES
from .stream_reading import StreamReader
from .streams import Stream

MOST_STREAMS = 64
_runs = itertools.count()


class _Unsized(SpecError, TypeError):
    """What has no length: a TypeError, which `list` and progress bars expect."""


class StreamBatches(Batches):
    """The batches of a Stream.

    Args:
        shards: the number of virtual streams; None is the largest power of two that divides the batch size, up to 64.
        ahead: as in `StreamReader`.
    """

    def __init__(
        self,
        stream: Stream,
        batch_size: int,
        shards: int | None,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        collate: Callable[[list], Any] | None,
        ahead: tuple[int, int, int],
    ):
        batch_size = integer("Loader", "batch_size", batch_size, 1)
        seed = integer("Loader", "seed", seed)  # Python's: NumPy's would have other random numbers
        count = math.gcd(batch_size, MOST_STREAMS) if shards is None else shards
        if batch_size % count:
            raise SpecError(
                "a Stream's batch can't be made of equal parts of its virtual streams",
                got=f"batch_size={batch_size}, shards={shards}",
                remedy="make batch_size a multiple of shards",
            )
        self.stream, self.batch_size, self.count, self.shards = stream, batch_size, count, shards
        shuffle, drop_last = checked_flag("Loader", "shuffle", shuffle), checked_flag("Loader", "drop_last", drop_last)
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.source = in_words(self.settings)
        self._reader = StreamReader(stream, batch_size, count, seed, shuffle, collate, ahead)

    def __len__(self) -> int:
        raise _Unsized(
            "how many batches a Stream has is known only when it has been read",
            got=repr(self.stream),
            remedy="count them, or iterate without a length",
        )

    @property
    def settings(self) -> dict[str, Any]:
        names = ("batch_size", "count", "seed", "shuffle", "drop_last")
        return {"stream": self.stream.stage.describe(), **{name: getattr(self, name) for name in names}}

    def checked(self, epoch: int, step: int, streams: Any) -> tuple[int, int, Any]:
        """The position that these say; raises if there is no such position."""
        try:
            position = None if streams is None else json.loads(streams)
        except (TypeError, ValueError):
            position = ()
        fits = position is None if step == 0 else isinstance(position, list) and len(position) == self.count
        if epoch < 0 or step < 0 or not fits:
            raise SpecError(
                "Loader got a bad state",
                got={"epoch": epoch, "step": step, "streams": str(streams)[:60]},
                expected=f"that of a Loader of this Stream, in {self.count} virtual streams",
            )
        return epoch, step, position

    def is_last(self, step: int) -> bool:
        """Whether an epoch is known to end with a step: never before the next is asked for."""
        return False

    def begin(self, mesh: Mesh, epoch: int, step: int, position: Any) -> _Feed:
        """Ask for the batches of an epoch from a position on."""
        self._see_changes(mesh, self._reader.stream, self._reader.collate)
        return _Feed(self, mesh, epoch, step, position)


class _Feed(Feed):
    def __init__(self, batches: StreamBatches, mesh: Mesh, epoch: int, step: int, position: Any):
        super().__init__(mesh, batches._reader, epoch, step)
        self._batches = batches
        self._known = step, position  # the first step that was not taken, and the position before it
        self._run = next(_runs)

    @property
    def more(self) -> bool:
        """Whether there may be more batches: yes, since only taking one shows that none is left."""
        return True

    def ask(self, count: int) -> None:
        """Ask for `count` more batches."""
        axis, steps = self._mesh.layout.batch_axis, range(self._next, self._next + count)
        deals = [Deal((self._epoch, step), self._batches.shards, source=self._batches.source) for step in steps]
        requests = [((axis, self._run, *deal.position, self._known), deal) for deal in deals]
        self._pending += fill_streams(self._mesh, self._reader, requests, OF_BATCHES)
        self._next += count

    def take(self) -> tuple[Any, Any]:
        """The first batch, or None if the epoch is over, and the position after it."""
        batch, found = self._pending.popleft()()
        count = sum(count for count, _ in found.values())
        if count == 0 or (self._batches.drop_last and count < self._batches.batch_size):
            return None, None
        position = [found[stream][1] for stream in sorted(found)]
        self._known = self._known[0] + 1, position
        return batch, position
