"""Reading a rank's part of a minibatch: what all readers share, and that of a map-style dataset or a tree of tensors.

Invariant: what is read depends only on the sampler, the epoch, the step and the rank's place, and a sample's random
numbers only on (seed, epoch, the sample's id). So a worker process can read as well as the rank itself.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..kernels.arguments import check_value
from ..kernels.errors import SpecError, add_note
from ..kernels.flat import as_bytes
from ..mesh import trees
from ..mesh.purity.captured_state import OwnGenerators
from ..mesh.put import as_tensor
from ..mesh.rank.session import RankSession
from ..mesh.readers import process
from ..mesh.readers.pool import Pool
from ..mesh.readers.stacked import Stacked
from ..mesh.replication import agreement
from ..mesh.replication.reports import OutputMeta
from ..mesh.replication.values import same_value
from ..mesh.spec import REPLICATED, P, block_of, split_sizes
from ..transforms import Sampler
from .opening import called
from .random_numbers import one_thread, own_random_numbers, seed
from .rows import collated

ONE_LENGTH = (
    "have collate_fn pad to one length, the same for all batches, or leave shards= out: then each rank pads to the "
    "longest sample that it has"
)
ROWS = "have collate_fn pad to one length, with a row for each sample; what is of a whole batch, make in the step"
OF_BATCHES = agreement.Remedies(ONE_LENGTH, ROWS, ROWS)
SAME_NUMBERS = (
    "the dataset of a Loader draws from a generator of its own, of which each rank and each worker has a copy: they "
    "draw the same numbers, for other samples"
)
OWN_NUMBERS = (
    "draw by torch.rand, np.random.rand, random.random and their like, which give each sample numbers of its own; or "
    "make the generator for each sample, of its index"
)


class PartReader:
    """Reads a rank's part of each batch, by `read`; shipped to the ranks once, and from there to their workers.

    Args:
        called: what it reads, in messages.
        ahead: number of processes that read for the rank, batches to ask of them ahead, and the most bytes of these.
    """

    def __init__(self, called: str, ahead: tuple[int, int, int]):
        self.__qualname__ = called
        self._ahead = ahead
        self._queue: ReadAhead | None = None
        self._empty: Any = None  # a batch without its samples, once this process has seen one
        self._looked = False  # whether what the user wrote draws random numbers of its own

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_queue": None, "_empty": None, "_looked": False}

    def read(self, *request: Any, **more: Any) -> Any:
        """What a request asks for, read in this process."""
        raise NotImplementedError

    def _read_ahead(self, workers: int) -> ReadAhead:
        """What the processes read that read for this rank."""
        if self._queue is None:
            # A copy: a reference cycle through this object would keep the processes until a garbage collection.
            self._queue = ReadAhead(Pool(copy.copy(self).read, workers), *self._ahead[1:])
        return self._queue

    def _looking(self, roots: Sequence[tuple[Any, str]], reads: Any, read: Callable[[], Any]) -> Any:
        """What `read` gives, with a warning if generators of the roots' own were drawn from; see `OwnGenerators`."""
        self._looked = True
        generators = OwnGenerators(roots, reads)
        found = read()
        generators.check(SAME_NUMBERS, OWN_NUMBERS)
        return found


class MapReader(PartReader):
    """Reads a rank's part of a minibatch of a map-style dataset, or of a tree of tensors."""

    def __init__(
        self,
        data: Any,
        map_style: bool,
        collate: Any,
        sampler: Sampler,
        shards: int | None,
        ahead: tuple[int, int, int] = (0, 0, 0),
    ):
        super().__init__("the Loader's dataset", ahead)
        self.data, self.map_style, self.collate = data, map_style, collate
        self.sampler, self.shards = sampler, shards
        self._columns: tuple[list[Any], Any] | None = None  # of a tree of tensors: its leaves and treedef, once read

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_columns": None}

    def __call__(
        self, session: RankSession, axis: str, epoch: int, step: int
    ) -> tuple[Any, list[Any], list[OutputMeta]]:
        parts, mine = session.layout.axes[axis], session.layout.coords(session.rank)[axis]
        if self._ahead[0]:
            (batch,) = self._read_ahead(self._ahead[0]).next((mine, parts, epoch, step), self._following)
        elif self.map_style:
            batch = self.read(mine, parts, epoch, step)
        else:
            leaves, treedef = self._rows(mine, parts, epoch, step)
            leaves, total = list(map(session.on_device, leaves)), self._total(step)
            return treedef, leaves, [_cut(axis, leaf.shape, leaf.dtype, total) for leaf in leaves]
        return described(batch, session, axis, self._total(step), self.map_style and self.collate is None)

    def read(self, mine: int, parts: int, epoch: int, step: int) -> Any:
        """Part `mine` of `parts` of a minibatch."""
        if not self.map_style:
            leaves, treedef = self._rows(mine, parts, epoch, step)
            return trees.unflatten(treedef, leaves)
        ids = self.sampler.shard(epoch, step, mine, parts, self.shards)
        groups = self._groups(len(ids), mine, parts, self._total(step))
        if self._looked or mine or max(parts, self._ahead[0]) == 1:  # one rank is enough to tell
            return self._collated(ids, epoch, step, groups)
        kind = type(self.data)
        roots = [(self.data, kind.__name__), (self.collate, "collate_fn")]
        reads = getattr(kind, "__getitem__", None)
        return self._looking(roots, reads, lambda: self._collated(ids, epoch, step, groups))

    def _rows(self, mine: int, parts: int, epoch: int, step: int) -> tuple[list[torch.Tensor], Any]:
        """The part for a tree of tensors, as leaves and treedef."""
        if self._columns is None:
            self._columns = trees.flatten(self.data)
        leaves, treedef = self._columns
        ids = self.sampler.shard(epoch, step, mine, parts, self.shards)
        return [_rows_of(leaf, ids) for leaf in leaves], treedef

    def _following(self, request: tuple) -> Iterator[tuple[tuple, list[tuple]]]:
        """The requests that will come from this one on: the rest of the epoch."""
        mine, parts, epoch, step = request
        coming = range(step, len(self.sampler))
        return (((mine, parts, epoch, later), [(mine, parts, epoch, later)]) for later in coming)

    def _total(self, step: int) -> int:
        return min(self.sampler.batch_size, self.sampler.length - step * self.sampler.batch_size)

    def _groups(self, count: int, mine: int, parts: int, total: int) -> list[tuple[int, int]]:
        """What is collated together: (the key of its random numbers, how many of the ids)."""
        if self.shards is None or self.collate is None:  # torch's default makes the same of all at once
            return [(mine, count)]
        sizes = split_sizes(total, self.shards)
        return [(shard, sizes[shard]) for shard in block_of(self.shards, parts, mine) if sizes[shard]]

    def _collated(self, ids: torch.Tensor, epoch: int, step: int, groups: list[tuple[int, int]]) -> Any:
        collate = collated if self.collate is None else self.collate
        with own_random_numbers(), one_thread(self.shards is not None):
            if len(ids) == 0 and self._empty is not None:
                return self._empty
            empty = False
            # A rank that gets no sample, and never got one, has to look at another's to know what a batch is like.
            if len(ids) == 0:
                ids, groups, empty = self.sampler.batch(epoch, step)[:1], [(0, 1)], True
            made, at = [], 0
            for key, count in groups:
                samples = [self._sample(int(i), epoch) for i in ids[at : at + count]]
                seed("batch", self.sampler.seed, epoch, step, key)
                made.append(called(collate, samples))
                at += count
            batch = made[0] if len(made) == 1 else joined(made)
        self._empty = trees.map(without_samples, batch)
        return self._empty if empty else batch

    def _sample(self, index: int, epoch: int) -> Any:
        process.note.write(f"sample {index} of the {type(self.data).__name__}")
        seed("sample", self.sampler.seed, epoch, index)
        try:
            return self.data[index]
        except StopIteration as error:  # which would be taken for the end of the loop
            raise RuntimeError(f"sample {index} of the {type(self.data).__name__} raised StopIteration") from error
        except Exception as error:
            add_note(error, f"[reading sample {index} of the Loader's {type(self.data).__name__}]")
            raise


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _rows_of(leaf: Any, ids: torch.Tensor) -> torch.Tensor:
    """Some rows of a tensor, or of a mapped file, of which only these are read."""
    if isinstance(leaf, torch.Tensor):
        # Of tensors of one dimension, index_select takes no unsigned integers but uint8.
        selects = leaf.is_contiguous() and (leaf.dim() > 1 or leaf.dtype not in _UNSIGNED)
        return leaf.index_select(0, ids.to(leaf.device)) if selects else leaf[ids]
    rows: torch.Tensor = as_tensor(leaf.view(np.ndarray).take(ids.numpy(), axis=0))
    return rows


class ReadAhead:
    """Requests that are sent to a pool before the rank makes them, in the order in which it will.

    A request is divided into parts: one, for any of the readers, or one for each of several.

    Args:
        ahead: requests to have under way.
        most_bytes: the most bytes of their answers, judged by the largest so far; one request is always under way.
    """

    def __init__(self, pool: Pool, ahead: int, most_bytes: int):
        self._pool, self._ahead, self._most_bytes = pool, ahead, most_bytes
        self._asked: deque[tuple[tuple, list[int]]] = deque()
        self._coming: Iterator[tuple[tuple, list[tuple]]] = iter(())
        self._largest = 0

    def next(self, request: tuple, following: Callable[[tuple], Iterator[tuple[tuple, list[tuple]]]]) -> list[Any]:
        """The answers to a request's parts.

        Args:
            following: `following(request)` gives this one and those that will come after it, each with its parts.
        """
        try:
            if not self._asked or self._asked[0][0] != request:
                self._pool.forget()
                self._asked.clear()
                self._coming = following(request)
                self._ask(len(self._pool))  # one each: how large answers are is not known yet
            found = [self._pool.take(number) for number in self._asked[0][1]]
            self._asked.popleft()
            leaves = (leaf for leaf in trees.leaves(found) if getattr(leaf, "layout", None) is not torch.sparse_coo)
            nbytes = sum(leaf.nbytes for leaf in leaves if hasattr(leaf, "nbytes"))
            self._largest = max(self._largest, nbytes)
            self._ask(min(self._ahead, max(1, self._most_bytes // max(self._largest, 1))))
            return found
        except BaseException:
            self._asked.clear()
            raise

    def _ask(self, count: int) -> None:
        while len(self._asked) < count and (coming := next(self._coming, None)) is not None:
            request, parts = coming
            indexes = range(len(parts)) if len(parts) > 1 else [None]
            self._asked.append((request, [self._pool.ask(*each) for each in zip(parts, indexes, strict=True)]))


def described(
    batch: Any, session: RankSession, axis: str, total: int, only_tensors: bool
) -> tuple[Any, list[Any], list[OutputMeta]]:
    """A rank's part of a batch, on its device, with its metadata.

    Args:
        total: samples of the batch over all ranks.
        only_tensors: refuse leaves that are none.
    """
    if batch is None:
        raise SpecError("a Loader's collate_fn made no batch", got="None", remedy="have it return the batch")
    leaves, treedef = trees.flatten(batch)
    metas = []
    for index, leaf in enumerate(leaves):
        leaf = as_tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            check_value(leaf, lambda: f"the batch{trees.paths(batch)[index]} of a Loader", cut=True)  # noqa: B023
            leaf = session.on_device(leaf)
        leaves[index] = leaf
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            metas.append(_cut(axis, leaf.shape, leaf.dtype, total))
        elif isinstance(leaf, torch.Tensor):
            metas.append(OutputMeta(REPLICATED, (), leaf.dtype, value=bytes(as_bytes(leaf).cpu().numpy())))
        elif only_tensors:
            raise SpecError(
                "a Loader's batch is of tensors, and the dataset's samples have something else",
                got=f"{type(leaf).__name__} in the batch's {trees.paths(batch)[index]}",
                remedy="give a collate_fn that leaves it out or makes numbers of it, an index for instance",
            )
        else:
            metas.append(OutputMeta(None, value=leaf))
    return treedef, leaves, metas


@functools.lru_cache(maxsize=1 << 10)
def _cut(axis: str, shape: torch.Size, dtype: torch.dtype, total: int) -> OutputMeta:
    """The metadata of a rank's part of a tensor of `total` samples; cached, as most batches are alike."""
    return OutputMeta(P(axis), tuple(shape), dtype, whole=(total, *shape[1:]))


def joined(shards: list[Any]) -> Any:
    """The collated virtual shards of a rank as one batch."""

    def join(first: Any, *others: Any) -> Any:
        leaves = [as_tensor(leaf) for leaf in (first, *others)]
        if not isinstance(leaves[0], torch.Tensor) or not leaves[0].dim():
            for leaf in leaves[1:]:
                if not _are_same(leaves[0], leaf):
                    problem = "the virtual shards of a Loader's batch differ in what has no row for each sample"
                    raise SpecError(problem, got=f"{leaves[0]!r:.60} and {leaf!r:.60}", remedy=ROWS)
            return first
        if any(leaf.shape[1:] != leaves[0].shape[1:] for leaf in leaves):
            raise SpecError(
                "the virtual shards of a Loader's batch differ in more than dimension 0, and a rank that runs "
                "several of them has them in one tensor",
                got="; ".join(str(list(leaf.shape)) for leaf in leaves),
                remedy=ONE_LENGTH,
            )
        return torch.cat(leaves)

    return trees.map(join, *shards)


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and bool(torch.equal(as_bytes(one), as_bytes(other)))
    return same_value(one, other)


def without_samples(leaf: Any) -> Any:
    if isinstance(leaf, Stacked):
        return leaf.without_samples()
    leaf = as_tensor(leaf)
    return leaf.new_empty((0, *leaf.shape[1:])) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
