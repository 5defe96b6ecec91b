"""The batches of a dataset that knows its length: which there are, and asking the ranks for them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..kernels.arguments import check_value, checked_flag, integer
from ..kernels.callsite import warn
from ..kernels.errors import SpecError
from ..mesh import trees
from ..mesh.array import Array
from ..mesh.batch import Deal
from ..mesh.mesh import Mesh
from ..mesh.put import as_tensor, is_array
from ..mesh.readers.filled import fill
from ..transforms import Sampler
from .feed import Batches, Feed, in_words
from .reading import OF_BATCHES, MapReader


class MapBatches(Batches):
    """The batches of a map-style dataset, or of a tree of tensors.

    Args:
        options: the Sampler's.
        ahead: as in `MapReader`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shards: int | None,
        *,
        collate: Callable[[list], Any] | None,
        ahead: tuple[int, int, int],
        **options: Any,
    ):
        _refuse_arrays(dataset)
        if collate is not None and isinstance(dataset, dict | tuple):
            _refuse_collated(dataset)
        tree = _tensors(dataset) if collate is None else None
        length = _length(dataset) if tree is None else trees.leaves(tree)[0].shape[0]
        self._dataset, self._leaves = dataset, None if tree is None else trees.leaves(dataset)
        batch_size = integer("Loader", "batch_size", batch_size, 1)
        for flag in ("shuffle", "drop_last"):
            checked_flag("Loader", flag, options[flag])
        self.sampler = Sampler(length, batch_size, **options)
        if length and not len(self.sampler):
            got = f"{length} samples, batch_size={batch_size}, drop_last=True"
            warn("a Loader has no batches, and a loop over it does nothing", got=got, remedy="make batch_size smaller")
        if collate is None and isinstance(dataset, list):
            _refuse_columns(dataset, batch_size)
        self.shards, self.steps = shards, len(self.sampler)
        self.source = in_words(self.settings)
        self._reader = MapReader(dataset if tree is None else tree, tree is None, collate, self.sampler, shards, ahead)
        # Samples that are collated may be padded, on each rank to a length of its own.
        self._ragged = tree is None and shards is None
        self._collated = collate is not None and shards is None

    def __len__(self) -> int:
        return self.steps

    @property
    def settings(self) -> dict[str, Any]:
        names = ("length", "batch_size", "seed", "shuffle", "drop_last", "order")
        return {name: getattr(self.sampler, name) for name in names}

    def checked(self, epoch: int, step: int, streams: Any) -> tuple[int, int, None]:
        """The position that these say; raises if there is no such position."""
        if epoch < 0 or not 0 <= step <= len(self) or streams is not None:
            got = {"epoch": epoch, "step": step, **({} if streams is None else {"streams": streams})}
            raise SpecError("Loader got a bad state", got=got, expected=f"epoch from 0 on, step 0 to {len(self)}")
        return (epoch + 1, 0, None) if step and step == len(self) else (epoch, step, None)

    def is_last(self, step: int) -> bool:
        """Whether an epoch is known to end with a step."""
        return step + 1 == self.steps

    def begin(self, mesh: Mesh, epoch: int, step: int, position: None) -> _Feed:
        """Ask for the batches of an epoch from a step on."""
        self._check_length()
        self._see_changes(mesh, self._reader.data, self._reader.collate)
        return _Feed(self, mesh, epoch, step)

    def _check_length(self) -> None:
        """Take the dataset as it is by now; refuse another length, since the sampler has the old one."""
        if self._leaves is None:
            length = len(self._dataset)
        else:
            leaves, before = trees.leaves(self._dataset), self._leaves
            if len(leaves) != len(before) or any(map(operator.is_not, leaves, before)):
                self._reader.data, self._leaves = _tensors(self._dataset), leaves
            length = trees.leaves(self._reader.data)[0].shape[0]
        if length != self.sampler.length:
            raise SpecError(
                "the dataset of a Loader has changed its length",
                got=str(length),
                expected=f"{self.sampler.length}, as when the Loader was made",
                remedy="make a new Loader",
            )


class _Feed(Feed):
    def __init__(self, batches: MapBatches, mesh: Mesh, epoch: int, step: int):
        super().__init__(mesh, batches._reader, epoch, step)
        self._batches = batches

    @property
    def more(self) -> bool:
        """Whether there may be batches that were not asked for."""
        return self._next < self._batches.steps

    def ask(self, count: int) -> None:
        """Ask for `count` more batches, as far as there are any."""
        this, axis = self._batches, self._mesh.layout.batch_axis
        steps = range(self._next, min(self._next + count, this.steps))
        deals = [Deal((self._epoch, step), this.shards, source=this.source) for step in steps]
        requests = [((axis, *deal.position), deal) for deal in deals]
        if requests:
            name = "the Loader's dataset"
            kinds = {"ragged": this._ragged, "collated": this._collated}
            self._pending += fill(self._mesh, name, self._reader, requests, **kinds, remedies=OF_BATCHES)
        self._next += len(steps)

    def take(self) -> tuple[Any, None]:
        """The first batch, or None if the epoch is over; and what a position has besides the step's number: None."""
        return (self._pending.popleft()() if self._pending else None), None


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:  # a sparse matrix of SciPy, say
        problem, remedy = "Loader got a dataset without a length", "give it a class with __len__ and __getitem__"
        raise SpecError(problem, got=f"{type(dataset).__name__}: {error}", remedy=remedy) from None


def _instead_of(dataset: Any) -> str:
    """What to give a Loader instead of what it can't read."""
    if isinstance(dataset, torch.utils.data.DataLoader):
        return "give it loader.dataset, or the step the batches of the DataLoader"
    if isinstance(dataset, dict):
        several = dataset and all(hasattr(one, "__getitem__") and _is_object(one) for one in dataset.values())
        return f"of several datasets give it one, dataset[{next(iter(dataset))!r}]" if several else ""
    if isinstance(dataset, str):
        return "load what is there first, or read files forwards: Stream.jsonl([path]) and others (docs/data.md)"
    if isinstance(dataset, Iterable) and _is_object(dataset):
        return (
            "make a list of it, or read it forwards: Loader(Stream([0], open), batch_size), where open(shard) yields "
            "samples (docs/data.md)"
        )
    return ""


def _refuse_arrays(dataset: Any) -> None:
    """Of an Array each rank would have to fetch its rows from the others."""
    leaves = trees.leaves(dataset, is_leaf=is_array) if isinstance(dataset, Array | dict | tuple) else []
    found = next((leaf for leaf in leaves if isinstance(leaf, Array)), None)
    if found is not None:
        problem = "Loader got a dataset that is on a mesh, and reads what the program has"
        raise SpecError(problem, got=repr(found), remedy="fetch it, Loader(fetch(dataset), batch_size)")


def _refuse_collated(dataset: dict | tuple) -> None:
    """Of columns a collate_fn would get whole ones for samples."""
    columns = [*dataset.values()] if isinstance(dataset, dict) else [*dataset]
    kinds = [(one.shape, one.dtype) for one in columns if isinstance(one, torch.Tensor | np.ndarray)]
    if len(kinds) < max(1, len(columns)) or len({shape[:1] for shape, _ in kinds}) > 1:
        return
    if 0 in dataset if isinstance(dataset, dict) else len({*kinds}) == 1:  # samples, perhaps
        return
    made = "StackDataset(**dataset)" if isinstance(dataset, dict) else "StackDataset(*dataset)"
    problem = f"Loader got a {type(dataset).__name__} of columns, and a collate_fn, which takes a list of samples"
    raise SpecError(problem, remedy=f"give it torch.utils.data.{made}, which has a sample of each row")


def _refuse_columns(samples: list, batch_size: int) -> None:
    """Of a list [x, y] each would be a sample, and these can't be collated: x and y have a row for each sample.

    Samples of several shapes may be read one at a time, or, if they are many, one on each rank.
    """
    first, second = samples[:2] if 1 < len(samples) <= batch_size else (None, None)
    if not isinstance(first, torch.Tensor | np.ndarray) or not isinstance(second, torch.Tensor | np.ndarray):
        return
    if first.shape[:1] == second.shape[:1] > (len(samples),) and first.shape != second.shape:
        raise SpecError(
            "Loader got a list of tensors of several shapes, and takes each for a sample",
            got=f"{list(first.shape)} and {list(second.shape)}",
            expected="samples of one shape, or a collate_fn",
            remedy="for tensors with a row for each sample give a tuple, Loader((x, y), batch_size), or a dict",
        )


def _is_object(value: Any) -> bool:
    return not isinstance(value, torch.Tensor | np.ndarray | str | bytes | dict | tuple | list)


def _tensors(dataset: Any) -> Any:
    """The dataset as a tree of tensors with one length, or None if it is map-style."""
    if isinstance(dataset, IterableDataset):
        raise SpecError(
            "Loader can't shuffle and deal an IterableDataset",
            got=type(dataset).__name__,
            expected="a map-style dataset, with len(d) and d[i]",
            remedy="Loader(Stream([dataset], iter), batch_size) reads it forwards, on every rank; let files be the "
            "shards of a Stream for each to read its own (docs/data.md)",
        )
    if isinstance(dataset, list | torch.utils.data.Dataset):
        return None
    leaves = [_unread(leaf) for leaf in trees.leaves(dataset)]
    if not leaves or not all(isinstance(leaf, torch.Tensor) or _is_mapped(leaf) for leaf in leaves):
        is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if is_map_style and not isinstance(dataset, dict | tuple | str):
            return None
        odd = [
            f", with a {type(leaf).__name__} at {path}"
            for path, leaf in zip(trees.paths(dataset), leaves, strict=True)
            if path and not (isinstance(leaf, torch.Tensor) or _is_mapped(leaf))
        ]
        raise SpecError(
            "Loader got a dataset that it can't read",
            got=type(dataset).__name__ + "".join(odd[:1]),
            expected="a dict, tuple or single one of tensors or arrays, or a map-style dataset",
            remedy=_instead_of(dataset),
        )
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            check_value(leaf, lambda: "a Loader's dataset", cut=True)
    lengths = [leaf.shape[0] if leaf.ndim else None for leaf in leaves]
    if None in lengths or len(set(lengths)) > 1:
        listed = ", ".join(f"{path or 'the whole'}: {n}" for path, n in zip(trees.paths(dataset), lengths, strict=True))
        raise SpecError("the leaves of the dataset differ in length", got=listed, remedy="make dimension 0 agree")
    return trees.map(_unread, dataset)


def _unread(leaf: Any) -> Any:
    """A leaf of a dataset as a tensor; a mapped file stays as it is, so that each rank reads its own samples only."""
    return leaf if _is_mapped(leaf) else as_tensor(leaf)


def _is_mapped(leaf: Any) -> bool:
    """Whether it is a mapped file of numbers."""
    return isinstance(leaf, np.memmap) and leaf.dtype.kind in "biufc"
