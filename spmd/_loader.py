"""`Loader`: batches of a dataset, read on the ranks, each rank its own samples.

The driver sends positions, not data: the dataset goes to the ranks once, and which samples a rank reads follows from
the sampler alone. Invariant: the batches depend on the sampler's arguments, never on how far reading ahead has got.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from ._loader_random import one_thread, own_random_numbers, seed
from .kernels.callsite import hide_our_frames
from .kernels.errors import SpecError, message
from .mesh import trees
from .mesh.agreement import OutputMeta
from .mesh.array import Deal
from .mesh.display import drawing
from .mesh.mesh import Mesh, resolve
from .mesh.put import as_tensor, fill
from .mesh.rank.session import RankSession
from .mesh.spec import P, split_sizes, strided_sizes
from .transforms import Sampler

_ONE_LENGTH = (
    "have collate_fn pad to one length, the same for all batches, or leave shards= out: then each rank pads to the "
    "longest sample that it has"
)


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
        prefetch: batches to have read ahead.
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
    ):
        if prefetch < 0:
            raise SpecError(message("Loader got a bad prefetch", got=prefetch, expected="at least 0"))
        tree = _tensors(dataset) if collate_fn is None else None
        self.dataset, self.prefetch, self.shards = dataset, prefetch, shards
        length = len(dataset) if tree is None else trees.leaves(tree)[0].shape[0]
        self.sampler = Sampler(length, batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last, order=order)
        self._mesh = mesh
        self._reader = _Reader(dataset if tree is None else tree, tree is None, collate_fn, self.sampler, shards)
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

        def ask() -> None:
            for step in steps:
                deal = Deal((epoch, step), self.shards)
                where = (axis, epoch, step)
                part = fill(
                    mesh, "the Loader's dataset", self._reader, where, deal, ragged=self._ragged, remedy=_ONE_LENGTH
                )
                pending.append(part)
                return

        for _ in range(self.prefetch if mesh.is_driver else 0):
            ask()
        while self._loads == loads:
            ask()
            if not pending:
                break
            batch = pending.popleft()()
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


def _unread(leaf: Any) -> Any:
    """A leaf of a dataset as a tensor; a mapped file as it is, of which each rank reads its own samples."""
    return leaf if isinstance(leaf, np.memmap) and leaf.dtype.kind in "biufc" else as_tensor(leaf)


class _Reader:
    """Reads a rank's part of a minibatch; shipped to the ranks once."""

    def __init__(self, data: Any, map_style: bool, collate: Any, sampler: Sampler, shards: int | None):
        self.data, self.map_style, self.collate = data, map_style, collate
        self.sampler, self.shards = sampler, shards
        self._empty: Any = None  # a batch as this rank last collated it, without its samples

    def __call__(
        self, session: RankSession, axis: str, epoch: int, step: int
    ) -> tuple[Any, list[Any], list[OutputMeta]]:
        parts, mine = session.layout.axes[axis], session.layout.coords(session.rank)[axis]
        ids = self.sampler.shard(epoch, step, mine, parts, self.shards)
        total = min(self.sampler.batch_size, self.sampler.length - step * self.sampler.batch_size)
        if self.map_style:
            batch = self._collated(ids, session, epoch, step, self._groups(len(ids), mine, parts, total))
        else:
            batch = trees.map(lambda x: x[ids] if isinstance(x, torch.Tensor) else np.array(x[ids.numpy()]), self.data)
        leaves, treedef = trees.flatten(batch)
        spec = P(axis)
        said = []
        for index, leaf in enumerate(leaves):
            leaf = as_tensor(leaf)
            leaf = leaves[index] = session.placed(leaf) if isinstance(leaf, torch.Tensor) else leaf
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                said.append(OutputMeta(spec, tuple(leaf.shape), leaf.dtype, whole=(total, *leaf.shape[1:])))
            elif isinstance(leaf, torch.Tensor):
                said.append(OutputMeta(P(), tuple(leaf.shape), leaf.dtype))
            elif self.collate is None and self.map_style:
                raise SpecError(
                    message(
                        "a Loader's batch is of tensors, and the dataset's samples have something else",
                        got=f"{type(leaf).__name__} in the batch's {trees.paths(batch)[index]}",
                        remedy="give a collate_fn that leaves it out or makes numbers of it, an index for instance",
                    )
                )
            else:
                said.append(OutputMeta(None, value=leaf))
        return treedef, leaves, said

    def _groups(self, count: int, mine: int, parts: int, total: int) -> list[tuple[int, int]]:
        """What is collated together: (what its random numbers are keyed by, how many of the ids)."""
        if self.shards is None:
            return [(mine, count)]
        owned, sizes = split_sizes(self.shards, parts), strided_sizes(total, self.shards)
        first = sum(owned[:mine])
        return [(shard, sizes[shard]) for shard in range(first, first + owned[mine]) if sizes[shard]]

    def _collated(
        self, ids: torch.Tensor, session: RankSession, epoch: int, step: int, groups: list[tuple[int, int]]
    ) -> Any:
        collate = default_collate if self.collate is None else self.collate
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
                made.append(collate(samples))
                at += count
            batch = made[0] if len(made) == 1 else _joined(made)
        self._empty = trees.map(_without_samples, batch)
        return self._empty if empty else batch

    def _sample(self, index: int, epoch: int) -> Any:
        seed("sample", self.sampler.seed, epoch, index)
        try:
            return self.data[index]
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"[reading sample {index} of the Loader's {type(self.data).__name__}]")
            raise


def _joined(shards: list[Any]) -> Any:
    """The collated virtual shards of a rank as one batch."""

    def join(first: Any, *others: Any) -> Any:
        leaves = [as_tensor(leaf) for leaf in (first, *others)]
        if not isinstance(leaves[0], torch.Tensor) or not leaves[0].dim():
            return first
        if any(leaf.shape[1:] != leaves[0].shape[1:] for leaf in leaves):
            raise SpecError(
                message(
                    "the virtual shards of a Loader's batch differ in more than dimension 0, and a rank that runs "
                    "several of them has them in one tensor",
                    got="; ".join(str(list(leaf.shape)) for leaf in leaves),
                    remedy=_ONE_LENGTH,
                )
            )
        return torch.cat(leaves)

    return trees.map(join, *shards)


def _without_samples(leaf: Any) -> Any:
    leaf = as_tensor(leaf)
    return leaf[:0].clone() if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
