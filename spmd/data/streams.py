"""`Stream`: a description of samples that are read forwards, from files or any other iterators.

Making one reads nothing: it is sent to the ranks, where each virtual stream of a `Loader` opens a cursor on it.
Invariant: what a virtual stream gives depends on its number, their number, the seed and the epoch alone.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..kernels.arguments import is_number
from ..kernels.callsite import public
from ..kernels.errors import SpecError
from . import cursors, sources
from .cursors import Position, State

_CURSORS = {
    "shards": cursors.Shards,
    "map": cursors.Mapped,
    "filter": cursors.Filtered,
    "shuffle": cursors.Shuffled,
    "pack": cursors.Packed,
    "mix": cursors.Mixed,
}


@dataclasses.dataclass(frozen=True)
class _Stage:
    """A step of a pipeline: what it does, with which arguments, to what the streams before it give."""

    kind: str
    arguments: tuple
    below: tuple[_Stage, ...] = ()

    def open(self, position: Position, state: State) -> Any:
        """A cursor at the beginning, or at a state."""
        made: Any = _CURSORS[self.kind]
        if self.kind == "shards":
            return made(*self.arguments, position, state)
        if self.kind == "mix":
            inner = [None] * len(self.below) if state is None else state[2]
            opened = [
                one.open(position.below(i), at) for i, (one, at) in enumerate(zip(self.below, inner, strict=True))
            ]
            return made(opened, *self.arguments, position, state)
        source = self.below[0].open(position.below(), None if state is None else state[-1])
        return made(source, *self.arguments, *((state,) if self.kind == "pack" else (position, state)))

    def functions(self) -> list[Any]:
        """The user's functions that are called where it is read."""
        own: list[Any] = [self.arguments[0]] if self.kind in ("map", "filter") else []
        if self.kind == "shards" and getattr(self.arguments[1], "__module__", None) != sources.__name__:
            own = [self.arguments[1]]
        return own + [function for one in self.below for function in one.functions()]

    def describe(self) -> str:
        """What order and number of samples depend on, in words: equal for pipelines that a position fits."""
        inner = ", ".join(one.describe() for one in self.below)
        if self.kind == "shards":
            return f"{len(self.arguments[0])} shards"
        shown = "" if self.kind in ("map", "filter") else f"({', '.join(map(repr, self.arguments))})"
        return f"mix[{inner}]{shown}" if self.kind == "mix" else f"{inner}.{self.kind}{shown}"


@public
class Stream:
    """Samples that are read forwards, from shards that are opened one after another.

    >>> def count(shard):
    ...     yield from range(shard, shard + 3)
    >>> stream = Stream([0, 10, 20, 30], count).filter(lambda x: x % 10 != 1).map(torch.tensor)
    >>> with Mesh({"data": 2}) as mesh:
    ...     [batch.full().tolist() for batch in Loader(stream, batch_size=4, shuffle=False, mesh=mesh)]
    [[0, 10, 20, 30], [2, 12, 22, 32]]

    A `Loader` reads it as V virtual streams, each with its own share of the shards, its own random numbers and its own
    shuffle. V is the Loader's `shards=`, or else the largest power of two up to 64 that divides the batch size; a rank
    owns whole streams. So the batches, and their order, are the same at any number of ranks, every sample comes once in
    an epoch, and a position is a few counters for each stream, from which any number of ranks can resume.

    Args:
        shards: what to open: paths, or anything else that can be pickled. Give several for each virtual stream: with
            fewer shards than streams, several streams read the same shard, each keeping its share of the records.
        open: `open(shard)` returns an iterator over the shard's records; it must not draw random numbers (`map` may).
            If it also takes a position, `open(shard, at)`, a resumed run calls it with what the iterator's `tell()`
            returned (JSON: numbers, strings, lists), and reads on there; else a resumed run reads the shard's first
            records again and drops them.

    Raises:
        SpecError: there are no shards, one is an iterator, or `open` can't be called.
    """

    def __init__(self, shards: Iterable[Any], open: Callable[..., Any]):
        if isinstance(shards, str | bytes | os.PathLike):
            remedy = f"write Stream([{shards!r}], open)"
            raise SpecError("Stream got no list of shards", got=repr(shards), remedy=remedy)
        shards = list(shards) if isinstance(shards, Iterable) else shards
        if not isinstance(shards, list) or not shards or not callable(open):
            got = f"{len(shards)} shards" if isinstance(shards, list) else f"{shards!r} for shards"
            raise SpecError(
                "Stream got nothing to read",
                got=f"{got}, and {open!r} to open them with",
                expected="at least one shard, and a function open(shard)",
            )
        once = next((shard for shard in shards if isinstance(shard, Iterator)), None)
        if once is not None:
            raise SpecError(
                "Stream got a shard that can be read only once, and each epoch reads all shards anew",
                got=f"a {type(once).__name__}",
                remedy="make the iterator in open(shard), of what the shard names: a path, a list, a dataset",
            )
        self.stage = _Stage("shards", (shards, open))

    @classmethod
    def _of(cls, stage: _Stage) -> Stream:
        made = cls.__new__(cls)
        made.stage = stage
        return made

    def _then(self, kind: str, *arguments: Any) -> Stream:
        return Stream._of(_Stage(kind, arguments, (self.stage,)))

    @public
    def map(self, function: Callable[[Any], Any]) -> Stream:
        """Apply a function to each sample; its random numbers depend on seed, epoch, stream and sample alone."""
        return self._then("map", _callable("map", function))

    @public
    def filter(self, predicate: Callable[[Any], Any]) -> Stream:
        """Keep the samples for which a predicate holds; its random numbers are like those in `map`."""
        return self._then("filter", _callable("filter", predicate))

    @public
    def shuffle(self, window: int) -> Stream:
        """Shuffle within windows of this many samples; a window's order is computed from its number.

        A virtual stream holds one window in memory, and a resumed run rereads at most one. So shuffle names, or other
        small things, and map them to large ones afterwards.
        """
        return self._then("shuffle", _positive("shuffle", "window", window))

    @public
    def pack(self, length: int, *, pad: Any = None) -> Stream:
        """Sequences laid end to end and cut to one length: tensors of shape [length].

        Args:
            length: of each result.
            pad: the value that fills up the last one of a virtual stream; None drops that one.
        """
        if pad is not None and not is_number(pad):
            raise SpecError("pack got a bad pad", got=repr(pad), expected="a number, or None")
        return self._then("pack", _positive("pack", "length", length), pad)

    @staticmethod
    @public
    def mix(streams: Sequence[Stream], weights: Sequence[float] | None = None) -> Stream:
        """Several streams as one, each sample from one of them, drawn by weight.

        A stream that is used up leaves the rest of the epoch to the others, so that every sample comes once.

        Args:
            streams: at least one.
            weights: positive, of any sum; None is equal ones.
        """
        try:
            weights = [1.0] * len(streams) if weights is None else list(weights)
            fit = len(weights) == len(streams) > 0 and all(is_number(weight) and weight > 0 for weight in weights)
        except TypeError:  # no sequences
            fit = False
        if not fit or not all(isinstance(stream, Stream) for stream in streams):
            raise SpecError(
                "mix got streams and weights that don't fit",
                got=f"{streams}, weights {weights}",
                expected="as many positive weights as streams, at least one",
            )
        weights = [float(weight) for weight in weights or ()]
        return Stream._of(_Stage("mix", (weights,), tuple(stream.stage for stream in streams)))

    @staticmethod
    @public
    def jsonl(paths: Iterable[Any]) -> Stream:
        """The values of files of JSON lines; a position is a place in a file.

        Args:
            paths: of the files, text with a JSON value in each line.
        """
        return Stream(_paths(paths), sources.JsonLines)

    @staticmethod
    @public
    def parquet(paths: Iterable[Any], columns: Sequence[str] | None = None) -> Stream:
        """The rows of Parquet files, or Arrow files (`.arrow`, `.feather`), as dicts; needs pyarrow.

        Args:
            paths: of the files. One row group (record batch) is read at a time; a resumed run reads its current one
                again.
            columns: None is all.
        """
        if columns is not None and (isinstance(columns, str) or not columns):
            raise SpecError("a Stream got no list of columns", got=repr(columns), remedy="list names; None is all")
        return Stream(_paths(paths), sources.Table(None if columns is None else tuple(columns)))

    @staticmethod
    @public
    def tar(paths: Iterable[Any]) -> Stream:
        """The samples of tar files as WebDataset writes them: a dict of bytes by extension, and "__key__".

        Args:
            paths: of the files. What a name has before its first dot is a sample's key.
        """
        return Stream(_paths(paths), sources.Tar)

    @staticmethod
    @public
    def records(paths: Iterable[Any], nbytes: int) -> Stream:
        """The records of files in which all have the same size, as bytes.

        Args:
            paths: of the files.
            nbytes: the size of a record, in bytes.
        """
        return Stream(_paths(paths), sources.Records(_positive("records", "nbytes", nbytes)))

    def __repr__(self) -> str:
        return f"Stream({self.stage.describe()})"


def _paths(paths: Iterable[Any]) -> list[str]:
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
        raise SpecError("a Stream got no list of paths", got=repr(paths), remedy="list the files' paths")
    return [str(path) for path in paths]


def _callable(caller: str, function: Any) -> Any:
    if not callable(function):
        raise SpecError(f"{caller} got what can't be called", got=repr(function), expected="a function")
    return function


def _positive(caller: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{caller} got a bad {name}", got=repr(value), expected="a whole number of at least 1")
    return value
