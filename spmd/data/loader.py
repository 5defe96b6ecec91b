"""`Loader`: batches of a dataset, read on the ranks, each rank its own samples.

The driver sends positions, not data: the dataset goes to the ranks once, and which samples a rank reads follows from
the sampler alone. Invariant: the batches depend on the sampler's arguments, never on how far reading ahead has got.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..kernels.callsite import hide_our_frames
from ..kernels.errors import SpecError, message
from ..mesh import trees
from ..mesh.array import Array, Deal
from ..mesh.display import drawing
from ..mesh.mesh import Mesh, resolve
from ..mesh.put import as_tensor, fill, is_array
from ..transforms import Sampler
from .reading import ONE_LENGTH, MapReader


class Loader:
    """Iterate over one epoch of minibatches, as Arrays that are already on the ranks.

    >>> with Mesh({"data": 2}) as mesh:
    ...     loader = Loader({"x": torch.arange(10)}, batch_size=4, shuffle=False, mesh=mesh)
    ...     [batch["x"].shards() for batch in loader][-1]
    [tensor([8]), tensor([9])]

    Args:
        dataset: a dict, tuple, named tuple or single one of tensors or arrays that share dimension 0; or any map-style
            dataset (`len(d)`, `d[i]`; a list is one), whose samples are collated.
        batch_size: samples in a minibatch, over all ranks.
        mesh: None is the enclosing or default mesh.
        seed, shuffle, drop_last, order: as in `Sampler`.
        collate_fn: makes a batch of a list of samples; None is torch's default. Tensors are sharded along dimension 0;
            what is no tensor (or has no dimension) must be the same on all ranks. It may pad, on each rank to the
            longest sample there: a step gets its own part, `shards()` are all, `full()` refuses.
        prefetch: batches to have read ahead; with `workers`, for each of them.
        workers: processes beside each rank that read, collate and augment for it; 0 has the rank do it between steps.
            They are started anew, with torch imported once a rank, never as forks of a process that computes; what
            they read reaches the rank through shared memory. The batches are the same for any number.
        prefetch_mb: reads no further ahead on a rank than so many megabytes.
        shards: deal by this many virtual shards, for a step that is `data_parallel` over as many: what a shard has
            does not depend on the number of ranks. `collate_fn` is given one of them at a time.

    Iterating yields the batches of one epoch, sharded over the axis "data" (the first axis, if there is none of that
    name), and moves on to the next epoch at its end; after a break it starts that epoch again. A loop goes on from a
    position that is loaded meanwhile (by `restore`), until the end of the epoch that it was in. `len()` is steps per
    epoch. Random numbers that a sample is made with depend on (seed, epoch, the sample's id), not on who reads it.

    Raises:
        SpecError: the dataset's leaves differ in length, or a bad number; when iterating, strings for samples. Whatever
            the dataset raises on a rank, as its own type, with a note that names the sample.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        mesh: Mesh | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list], Any] | None = None,
        prefetch: int = 2,
        shards: int | None = None,
        order: str = "feistel",
        workers: int = 0,
        prefetch_mb: float = 512.0,
    ):
        for name, value in (("prefetch", prefetch), ("workers", workers), ("prefetch_mb", prefetch_mb)):
            if value < 0:
                raise SpecError(message(f"Loader got a bad {name}", got=value, expected="at least 0"))
        tree = _tensors(dataset) if collate_fn is None else None
        self.dataset, self.prefetch, self.shards, self._most_bytes = dataset, prefetch, shards, int(prefetch_mb * 1e6)
        length = len(dataset) if tree is None else trees.leaves(tree)[0].shape[0]
        self.sampler = Sampler(length, batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last, order=order)
        self._mesh = mesh
        ahead = workers, max(1, prefetch) * workers, self._most_bytes
        self._reader = MapReader(
            dataset if tree is None else tree, tree is None, collate_fn, self.sampler, shards, ahead
        )
        # Samples that are collated may be padded, on each rank to a length of its own.
        self._ragged = tree is None and shards is None
        self._epoch = 0
        self._yielded = 0
        self._resume = 0
        self._loads = 0  # how often a position was loaded, after which iterators under way go on from it

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def mesh(self) -> Mesh | None:
        """As given."""
        return self._mesh

    @property
    def settings(self) -> dict[str, Any]:
        """What its batches depend on, besides the dataset and the position."""
        names = ("length", "batch_size", "seed", "shuffle", "drop_last", "order")
        return {**{name: getattr(self.sampler, name) for name in names}, "shards": self.shards}

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch; it means the same at any number of ranks."""
        return {"epoch": self._epoch, "step": self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position that `state_dict` gave.

        Raises:
            SpecError: there is no such position.
        """
        epoch, step = int(state["epoch"]), int(state["step"])
        if epoch < 0 or not 0 <= step <= len(self):
            raise SpecError(
                message("Loader got a bad state", got=state, expected=f"epoch from 0 on, step 0 to {len(self)}")
            )
        if step and step == len(self):
            epoch, step = epoch + 1, 0
        self._epoch, self._yielded, self._resume = epoch, step, step
        self._loads += 1

    def __iter__(self) -> Iterator[Any]:
        try:
            mesh = resolve(self._mesh)
            axis = mesh.layout.batch_axis
            last = self._epoch
            while self._epoch <= last:
                loads, epoch, first = self._loads, self._epoch, self._resume
                self._resume, self._yielded = 0, first
                yield from self._batches(mesh, axis, epoch, first)
                if self._loads == loads and epoch == last:
                    return
        except Exception as error:
            hide_our_frames(error)
            raise

    def _batches(self, mesh: Mesh, axis: str, epoch: int, first: int) -> Iterator[Any]:
        """The batches of an epoch from a step on, until another position is loaded."""
        loads = self._loads
        pending: deque[Callable[[], Any]] = deque()
        steps = iter(range(first, len(self)))

        def ask() -> bool:
            for step in steps:
                deal = Deal((epoch, step), self.shards)
                where = (axis, epoch, step)
                part = fill(
                    mesh, "the Loader's dataset", self._reader, where, deal, ragged=self._ragged, remedy=ONE_LENGTH
                )
                pending.append(part)
                return True
            return False

        while self._loads == loads:
            if not pending and not ask():
                break
            batch = pending.popleft()()
            ahead = self.prefetch if mesh.is_driver else 0
            if ahead and (nbytes := _nbytes(batch) // mesh.layout.axes[axis]):
                ahead = min(ahead, self._most_bytes // nbytes)
            while len(pending) < ahead and ask():
                pass
            self._yielded += 1
            if self._yielded == len(self):
                self._epoch, self._yielded = epoch + 1, 0
            yield batch

    def grids(self, epoch: int) -> tuple[list[drawing.Grid], int]:
        """Pictures of which rank takes which sample, and the number of ranks."""
        return self.sampler.grids(resolve(self._mesh).layout, epoch, self.shards)

    def _repr_html_(self) -> str:
        return drawing.html(*self.grids(self._epoch))

    def __repr__(self) -> str:
        return f"Loader({self.sampler!r}, shards={self.shards})"


def _tensors(dataset: Any) -> Any:
    """The dataset as a tree of tensors with one length, or None if it is map-style."""
    if isinstance(dataset, IterableDataset):
        raise SpecError(
            message(
                "Loader can't shuffle and deal an IterableDataset",
                got=type(dataset).__name__,
                expected="a map-style dataset, with len(d) and d[i]",
            )
        )
    if isinstance(dataset, list | torch.utils.data.Dataset):
        return None
    leaves = [_unread(leaf) for leaf in trees.leaves(dataset)]
    if not leaves or not all(isinstance(leaf, torch.Tensor | np.memmap) for leaf in leaves):
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, dict | tuple):
            return None
        raise SpecError(
            message(
                "Loader got a dataset that it can't read",
                got=type(dataset).__name__,
                expected="a dict, tuple or single one of tensors or arrays, or a map-style dataset",
            )
        )
    lengths = [leaf.shape[0] if leaf.ndim else None for leaf in leaves]
    if None in lengths or len(set(lengths)) > 1:
        listed = ", ".join(f"{path or 'the whole'}: {n}" for path, n in zip(trees.paths(dataset), lengths, strict=True))
        raise SpecError(
            message("the leaves of the dataset differ in length", got=listed, remedy="make dimension 0 agree")
        )
    return trees.map(_unread, dataset)


def _nbytes(batch: Any) -> int:
    """Bytes of a batch's tensors; of what is padded on each rank to its own length, as if that were nothing."""
    found = [leaf for leaf in trees.leaves(batch, is_leaf=is_array) if isinstance(leaf, Array)]
    return sum(abs(math.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in found)


def _unread(leaf: Any) -> Any:
    """A leaf of a dataset as a tensor; a mapped file as it is, of which each rank reads its own samples."""
    return leaf if isinstance(leaf, np.memmap) and leaf.dtype.kind in "biufc" else as_tensor(leaf)
