"""The batch of a step: which argument it is, and how it was split before a region began.

A batch that is passed whole to a call gets the spec of its axis in `Request`; one that is whole within a region is cut
by `transforms._batch`. Both ask `BatchArgument` which argument it is, and `common_length` how long it is.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..kernels.errors import SpecError
from . import trees
from .spec import RAGGED


@dataclasses.dataclass(frozen=True, slots=True)
class Deal:
    """How a `Loader` dealt a batch: its (epoch, step), and over how many virtual shards.

    Attributes:
        sizes: of the virtual shards, if they differ from what dealing samples one by one gives; of a batch without
            shards, the sizes of the virtual streams, if some rank has no samples.
        source: in words, what else the batches of the `Loader` depend on, besides the dataset.
    """

    position: tuple[int, int]
    shards: int | None = None
    sizes: tuple[int, ...] | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchArgument:
    """Which argument of a function is its batch, and how it is to be split.

    Attributes:
        name: of the argument.
        position: among the positional arguments; None if it is keyword-only.
        axis: the mesh axis.
        shards: over how many virtual shards; None for as many parts as ranks.
    """

    name: str
    position: int | None
    axis: str
    shards: int | None = None

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> int | str:
        """Its position in a call of the function `name`, or its own name if it is passed by name."""
        if self.position is not None and self.position < len(args):
            return self.position
        if self.name not in kwargs:
            raise SpecError(
                f"{name} was called without its batch",
                got=f"{len(args)} arguments by position, and by name {list(kwargs)}",
                expected=f"an argument named {self.name!r}",
            )
        return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSplit:
    """How the batch of a call was split before its region began.

    Attributes:
        axis: over which; None if the function is no `data_parallel` step.
        shards: over how many virtual shards a `Loader` dealt it; None if no `Loader` did, or without shards.
        sizes: of these shards, if they differ from what dealing samples one by one gives.
        in_shards: whether the function runs over several virtual shards of it, of which one rank may have all.
    """

    axis: str | None = None
    shards: int | None = None
    sizes: tuple[int, ...] | None = None
    in_shards: bool = False


def common_length(lengths: Mapping[int, int], called: Callable[[int], str], whose: str) -> int | None:
    """The common size of dimension 0 of a batch's leaves; None if there are none.

    Args:
        lengths: index of a leaf -> its size.
        called: gives a leaf's name for the error.

    Raises:
        SpecError: they differ.
    """
    if len(set(lengths.values())) > 1:
        raise SpecError(
            f"the leaves of the batch of {whose} differ in dimension 0",
            got=", ".join(f"{called(index)}: {length}" for index, length in lengths.items()),
            remedy="samples are the rows: transpose a batch whose dimension 0 is time; "
            "pad samples of several lengths to one tensor (and pack a PackedSequence in the loss); "
            "of samples that are no rows, as graphs, let the batch be their numbers (docs/how_to.md); "
            "pass what has no row for each sample in another argument",
        )
    return next(iter(lengths.values()), None)


def refuse_lists(tree: Any, length: int, whose: str) -> None:
    """Refuse a list of non-tensors that has one entry for each of `length` samples, beside tensors that are split.

    A DataLoader makes such lists of strings. A NumPy array of strings, a range or a column of a table counts, too. A
    tuple is allowed: it is taken to be the same for all samples.

    Raises:
        SpecError: there is one.
    """
    if length < 2:
        return

    def is_list(node: Any) -> bool:
        return type(node) is list and len(node) == length and all(isinstance(entry, _PLAIN) for entry in node)

    for index, node in enumerate(trees.leaves(tree, is_list)):
        if type(node) is list or _is_column(node, length):
            kind = "an array" if isinstance(node, np.ndarray) else f"a {type(node).__name__}"
            raise SpecError(
                f"batch{trees.paths(tree, is_list)[index]} of {whose} is {kind} "
                f"with an entry for each of {length} samples, and would not be split as the tensors beside it are",
                got=f"{kind} of {type(node[0]).__name__}" if isinstance(node, list | np.ndarray) else kind,
                remedy="make a tensor of it (of tokens, for strings), or a tuple if every rank is to have all",
            )


def _is_column(leaf: Any, length: int) -> bool:
    """Whether a leaf that neither is nor becomes a tensor has one entry for each of `length` samples."""
    if isinstance(leaf, torch.Tensor | numbers.Number | str | bytes):  # Arrays count as numbers
        return False
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return False
    try:
        return hasattr(type(leaf), "__getitem__") and len(leaf) == length
    except TypeError:  # it has no length
        return False


def refuse_ragged(shape: Sequence[int]) -> None:
    """Refuse to make one tensor of shards that differ in a dimension that is not cut."""
    if RAGGED in shape:
        raise SpecError(
            "the ranks' parts of this batch cannot be joined to one tensor",
            got=f"other sizes of dimension {list(shape).index(RAGGED)} on other ranks",
            remedy="have collate_fn pad to one length, or use .shards()",
        )


_PLAIN = (str, bytes, bool, int, float)
