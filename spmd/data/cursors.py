"""Cursors: each stage of a virtual stream's pipeline as an iterator that knows where it is and can be reopened there.

A state is made of counters (and of what a source's `tell()` gives), never of samples. Invariant: a cursor opened at
another's `state()` gives what that one would have given next; to do so it rereads at most one window of a shuffle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.call import word_key
from ..kernels.errors import SpecError, add_note
from ..mesh.readers import process
from ..transforms import numbered, permutation
from .opening import begun, called, takes_at
from .random_numbers import seed_generators
from .rows import seen

State = Any
"""Lists, numbers, strings and None: what JSON has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """Which stream of how many, in which epoch: what all random numbers of a stream are made from.

    Attributes:
        path: where the stage is in its pipeline.
        shuffle: whether the shards come in another order in each epoch.
    """

    seed: int
    epoch: int
    stream: int
    streams: int
    shuffle: bool
    path: tuple[int, ...] = ()

    def below(self, index: int = 0) -> Position:
        return dataclasses.replace(self, path=(*self.path, index))

    def key(self, *more: Any) -> int:
        return word_key("stream", self.seed, self.epoch, self.stream, self.path, *more)


class Shards:
    """Records of a stream's share of the shards, one shard after another.

    Where there are fewer shards than streams, several streams read one, and each takes every n-th record.

    Attributes:
        place: which stream it is of, and where in its pipeline.
        records: an iterator over those of the shard that is being read.
    """

    def __init__(self, shards: Sequence[Any], opened: Callable[..., Any], position: Position, state: State):
        self._shards, self._open, self._takes_at = shards, opened, takes_at(opened)
        self.place = position.stream, position.path
        count = len(shards)
        # With fewer shards than streams, each is read in parts, equally many by every stream; else no two share one.
        self._parts = 1 if count >= position.streams else position.streams // math.gcd(count, position.streams)
        whole = Position(position.seed, position.epoch, -1, position.streams, position.shuffle, position.path)
        order = permutation(count, whole.key("shards")) if position.shuffle else range(count)
        self._mine = [
            (int(order[unit % count]), unit // count)
            for unit in range(position.stream, count * self._parts, position.streams)
        ]
        at: Any = None
        self._unit: int = 0
        self._read: int = 0
        if state is not None:
            self._unit, self._read, at = state
        self.records: Any = None
        if state is not None and self._read and self._unit < len(self._mine):
            self._begin(self._read, at)

    def _begin(self, skip: int = 0, at: Any = None) -> None:
        shard = self._shards[self._mine[self._unit][0]]
        at = at if self._takes_at else None
        self.records = begun(self._open, shard, at, self)
        if at is not None:
            return
        if sum(1 for _ in itertools.islice(self.records, skip)) < skip:
            raise SpecError(
                f"a Stream is to go on at record {skip} of {shard!r}, which has fewer",
                remedy="resume with the shards that the checkpoint was made with",
            )

    def _note(self, shard: int) -> None:
        if process.note.kept:
            process.note.write(f"record {self._read} of {self._shards[shard]!r}")

    def _read_some(self, most: int) -> list[Any]:
        """Up to `most` next records of a shard, as many as its reader has at hand; none at its end."""
        some = getattr(self.records, "some", None)
        return list(itertools.islice(self.records, 1)) if some is None else some(most)

    def __next__(self) -> Any:
        return _only(self.some(1))

    def some(self, count: int) -> list[Any]:
        """Up to `count` next records."""
        found: list[Any] = []
        while len(found) < count and self._unit < len(self._mine):
            shard, part = self._mine[self._unit]
            self._note(shard)
            try:
                if self.records is None:
                    self._begin()
                while records := self._read_some(count - len(found)):
                    found += records[(part - self._read) % self._parts :: self._parts]
                    self._read += len(records)
                    if len(found) == count:
                        return found
                    self._note(shard)
            except Exception as error:
                add_note(error, f"[reading record {self._read} of {self._shards[shard]!r}]")
                raise
            self._unit, self._read, self.records = self._unit + 1, 0, None
        return found

    def state(self) -> State:
        tell = getattr(self.records, "tell", None) if self._takes_at else None
        return [self._unit, self._read, tell() if tell is not None and self._read else None]


class Mapped:
    """Each sample through a function, with random numbers of the sample's own."""

    kind = "map"

    def __init__(self, source: Any, function: Callable[[Any], Any], position: Position, state: State):
        self._source, self._function = source, function
        self._key = position.key(self.kind)
        self._count = 0 if state is None else state[0]

    def __next__(self) -> Any:
        return self._called()[1]

    def _called(self) -> tuple[Any, Any]:
        """The next sample, and what the function gives for it."""
        sample = next(self._source)
        seed_generators(numbered(self._key, self._count))
        self._count += 1
        return sample, called(self._function, seen(sample))

    def state(self) -> State:
        return [self._count, self._source.state()]


class Filtered(Mapped):
    """The samples for which a function holds."""

    kind = "filter"

    def __next__(self) -> Any:
        while True:
            sample, holds = self._called()
            if holds:
                return sample


class Shuffled:
    """Windows of samples, each in an order computed from its number. The state is where the window began."""

    def __init__(self, source: Any, window: int, position: Position, state: State):
        self._source, self._window, self._position = source, window, position
        self._number: int = 0 if state is None else state[0]
        given = 0 if state is None else state[1]
        self._began = source.state()
        self._samples: list[Any] = []
        self._order: Any = ()
        self._given = 0
        if given:
            self._fill()
            self._given = given

    def _fill(self) -> None:
        self._began = self._source.state()
        self._samples = taken(self._source, self._window)
        self._order = permutation(len(self._samples), self._position.key("window", self._number)).tolist()
        self._given = 0

    def __next__(self) -> Any:
        return _only(self.some(1))

    def some(self, count: int) -> list[Any]:
        """Up to `count` next samples."""
        found: list[Any] = []
        while len(found) < count:
            if self._given == len(self._samples):
                self._number += bool(self._samples)
                self._fill()
                if not self._samples:
                    break
            indexes = self._order[self._given : self._given + count - len(found)]
            self._given += len(indexes)
            for index in indexes:
                found.append(self._samples[index])
                self._samples[index] = None
        return found

    def state(self) -> State:
        if self._samples and self._given == len(self._samples):
            return [self._number + 1, 0, self._source.state()]
        return [self._number, self._given, self._began]


def _sequence(sample: Any) -> torch.Tensor | None:
    """A sample as a tensor, or None if it can't be one."""
    try:
        return torch.as_tensor(sample, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        return None


class Packed:
    """Sequences laid end to end and cut to one length. The state is where the first one that is not used up began."""

    def __init__(self, source: Any, length: int, pad: Any, state: State):
        self._source, self._length, self._pad = source, length, pad
        self._pieces: deque[tuple[torch.Tensor, State]] = deque()
        self._offset = 0
        self._held = 0
        if state is not None and state[0]:
            self._take()
            self._offset = state[0]

    def _take(self) -> None:
        while True:
            before = self._source.state()
            sample = next(self._source)
            piece = _sequence(sample)
            if piece is None or piece.dim() != 1:
                raise SpecError(
                    "pack got a sample that is not a sequence",
                    got=f"a {type(sample).__name__}" if piece is None else f"shape {tuple(piece.shape)}",
                    expected="tensors, arrays or lists of one dimension",
                    remedy="map each sample to its tokens first",
                )
            if len(piece):  # an empty list would be one of floats
                break
        if self._pieces and piece.dtype != self._pieces[0][0].dtype:
            raise SpecError(
                "pack got sequences of several dtypes",
                got=f"{self._pieces[0][0].dtype} and {piece.dtype}",
                remedy="map them to one",
            )
        self._pieces.append((piece, before))
        self._held += len(piece)

    def __next__(self) -> torch.Tensor:
        while self._held - self._offset < self._length:
            try:
                self._take()
            except StopIteration:
                left = self._held - self._offset
                if self._pad is None or left == 0:
                    self._pieces.clear()
                    self._held = self._offset = 0
                    raise
                some = self._pieces[0][0]
                self._pieces.append((some.new_full((self._length - left,), self._pad), self._source.state()))
                self._held += self._length - left
        parts, wanted = [], self._length
        while wanted:
            piece = self._pieces[0][0][self._offset : self._offset + wanted]
            parts.append(piece)
            wanted -= len(piece)
            self._offset += len(piece)
            if self._offset == len(self._pieces[0][0]):
                self._held -= self._offset
                self._pieces.popleft()
                self._offset = 0
        return torch.cat(parts)

    def state(self) -> State:
        return [self._offset, self._pieces[0][1] if self._pieces else self._source.state()]


class Mixed:
    """Samples of several sources, each from one drawn by weight; when one is used up, the others go on."""

    def __init__(self, sources: Sequence[Any], weights: Sequence[float], position: Position, state: State):
        self._sources, self._weights = sources, weights
        self._key = position.key("mix")
        self._count = 0 if state is None else state[0]
        self._alive = [True] * len(sources) if state is None else [bool(alive) for alive in state[1]]

    def __next__(self) -> Any:
        while any(self._alive):
            weights = [weight if alive else 0.0 for weight, alive in zip(self._weights, self._alive, strict=True)]
            point = numbered(self._key, self._count) / 2**63 * sum(weights)
            sums = list(itertools.accumulate(weights))
            chosen = next(index for index, upto in enumerate(sums) if point < upto or upto == sums[-1])
            try:
                sample = next(self._sources[chosen])
            except StopIteration:
                self._alive[chosen] = False
                continue
            self._count += 1
            return sample
        raise StopIteration

    def state(self) -> State:
        return [self._count, [int(alive) for alive in self._alive], [source.state() for source in self._sources]]


def taken(cursor: Any, count: int) -> list[Any]:
    """Up to `count` next samples of a cursor."""
    if hasattr(cursor, "some"):
        found: list[Any] = cursor.some(count)
        return found
    found = []
    with contextlib.suppress(StopIteration):
        while len(found) < count:
            found.append(next(cursor))
    return found


def _only(found: list[Any]) -> Any:
    if not found:
        raise StopIteration
    return found[0]
