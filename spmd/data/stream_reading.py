"""Reading a rank's part of a minibatch from its virtual streams.

Each virtual stream gives its part of every batch, collated by itself if there is a `collate_fn`; a rank concatenates
those of its streams. Invariant: a stream's part of step s, its length and the position after it are the same whoever
reads it. A request comes with a position from which a rank or worker that replaces another can answer it, too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from ..mesh import trees
from ..mesh.rank.session import RankSession
from ..mesh.replication.reports import OutputMeta
from ..mesh.spec import block_of, split_sizes
from .cursors import Position, State, taken
from .opening import called
from .random_numbers import one_thread, own_random_numbers, seed
from .reading import PartReader, described, joined, without_samples
from .rows import collated, seen
from .streams import Stream

Counts = dict[int, tuple[int, State]]
"""By virtual stream: how many samples it gave, and its state after them."""
Base = tuple[int, Sequence[State] | None]
"""A step, and the state of each virtual stream before it; None is the beginning of the epoch."""
_RUNS_KEPT = 2  # iterations under way that a reader remembers


@dataclasses.dataclass(slots=True)
class _Run:
    """One iteration over an epoch: the cursors of a reader's streams, and the step that they are at."""

    step: int
    open: dict[int, Any]


class StreamReader(PartReader):
    """Reads a rank's part of a batch of virtual streams.

    Args:
        count: number of virtual streams.
    """

    def __init__(
        self,
        stream: Stream,
        batch_size: int,
        count: int,
        seed: int,
        shuffle: bool,
        collate: Any,
        ahead: tuple[int, int, int],
    ):
        super().__init__("the Loader's Stream", ahead)
        self.stream, self.sizes, self.count = stream, split_sizes(batch_size, count), count
        self.seed, self.shuffle, self.collate = seed, shuffle, collate
        # The functions that may draw random numbers.
        self._functions = [*stream.stage.functions(), *(() if collate is None else (collate,))]
        self._runs: OrderedDict[int, _Run] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_runs": OrderedDict()}

    def __call__(
        self, session: RankSession, axis: str, run: int, epoch: int, step: int, base: Base
    ) -> tuple[Any, list[Any], list[OutputMeta], Counts]:
        parts, mine = session.layout.axes[axis], session.layout.coords(session.rank)[axis]
        streams = tuple(block_of(self.count, parts, mine))
        if self._ahead[0]:
            counts, batches = self._asked_before(run, epoch, step, streams, base)
        else:
            counts, batches = self.read(run, epoch, step, streams, base)
        if batches:
            batch = batches[0] if len(batches) == 1 else joined(batches)
            self._empty = trees.map(without_samples, batch)
        else:
            batch = self._without_samples(epoch)
        return *described(batch, session, axis, 0, self.collate is None), counts

    def read(self, run: int, epoch: int, step: int, streams: tuple[int, ...], base: Base) -> tuple[Counts, list[Any]]:
        """What these streams give to a step's batch, in order: from where they are, or else from `base` on."""
        known = self._runs.get(run)
        if self._functions and not self._looked and streams and streams[0] == 0 and len(streams) < self.count:
            roots = [(function, getattr(function, "__name__", "")) for function in self._functions]
            return self._looking(roots, self._functions[0], lambda: self.read(run, epoch, step, streams, base))
        with own_random_numbers(bool(self._functions)), one_thread(True):
            if known is None or known.step != step or not {*streams} <= {*known.open}:
                known = self._runs[run] = _Run(step, self._opened(epoch, step, streams, base))
                while len(self._runs) > _RUNS_KEPT:
                    self._runs.popitem(last=False)
            return self._next(known, epoch, step, streams)

    def _opened(self, epoch: int, step: int, streams: tuple[int, ...], base: Base) -> dict[int, Any]:
        at, states = base
        opened = {v: self._open(epoch, v, None if states is None else states[v]) for v in streams}
        for v, cursor in opened.items():
            for _ in range(step - at):
                taken(cursor, self.sizes[v])
        return opened

    def _next(self, known: _Run, epoch: int, step: int, streams: tuple[int, ...]) -> tuple[Counts, list[Any]]:
        known.step = -1  # if this fails, its streams are somewhere in between
        given = {v: taken(known.open[v], self.sizes[v]) for v in streams}
        counts = {v: (len(samples), known.open[v].state()) for v, samples in given.items()}
        batches = []
        if self.collate is None:  # torch's default needs no random numbers: all streams at once
            together = [sample for samples in given.values() for sample in samples]
            batches = [collated(together)] if together else []
        else:
            for v, samples in given.items():
                if samples:
                    seed("batch", self.seed, epoch, step, v)
                    batches.append(self._collate(samples))
        known.step = step + 1
        return counts, batches

    def _collate(self, samples: list[Any]) -> Any:
        return collated(samples) if self.collate is None else called(self.collate, [seen(sample) for sample in samples])

    def _open(self, epoch: int, stream: int, state: State) -> Any:
        """A cursor on one virtual stream: at the beginning of an epoch, or where a state says."""
        return self.stream.stage.open(Position(self.seed, epoch, stream, self.count, self.shuffle), state)

    def _asked_before(
        self, run: int, epoch: int, step: int, streams: tuple[int, ...], base: Base
    ) -> tuple[Counts, list[Any]]:
        workers = min(self._ahead[0], max(1, len(streams)))
        ends = list(itertools.accumulate(split_sizes(len(streams), workers)))
        shares = [streams[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

        def following(_: tuple) -> Iterator[tuple]:
            for later in itertools.count(step):
                yield (run, epoch, later), [(run, epoch, later, share, base) for share in shares]

        counts: Counts = {}
        batches: list[Any] = []
        for mine, made in self._read_ahead(workers).next((run, epoch, step), following):
            counts |= mine
            batches += made
        return counts, batches

    def _without_samples(self, epoch: int) -> Any:
        """An empty batch, for a rank that gets no samples: like its last one, or like any stream's first sample."""
        if self._empty is None:
            with own_random_numbers(bool(self._functions)), one_thread(True):
                for v in range(self.count):
                    samples = taken(self._open(epoch, v, None), 1)
                    if samples:
                        self._empty = trees.map(without_samples, self._collate(samples))
                        break
                else:
                    return ()
        return self._empty
