"""Rows of a table that stay in its columns: a user's function sees dicts, a batch is taken column by column.

Invariant: `collated(rows)` is what torch's `default_collate` makes of the same rows as dicts: the values and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from ..kernels.errors import add_note
from ..mesh.readers import process
from ..mesh.readers.stacked import Stacked

# The dtype that default_collate gives Python's numbers, by the kind of a column.
_DTYPES = {"i": np.int64, "u": np.int64, "f": np.float64, "b": np.bool_}
_PLAIN = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float", "double"}  # Arrow's types
_STACKED_BYTES = 1 << 24


class Columns:
    """A part of a table: its columns as arrays where they are plain numbers, else as Arrow has them.

    Attributes:
        arrays: by name.
        stacks: columns of one dtype as one array, by dtype and names; in a large part each by itself, uncopied.
    """

    __slots__ = ("_arrow", "arrays", "length", "names", "stacks")

    def __init__(self, table: Any):
        self._arrow = table
        self.names: list[str] = list(table.column_names if hasattr(table, "column_names") else table.schema.names)
        self.length = len(table)
        self.arrays: dict[str, np.ndarray] = {}
        for name, column in zip(self.names, table.columns, strict=True):
            if column.null_count == 0 and str(column.type) in _PLAIN:
                # A table's column is in chunks, which are joined; a record batch's raises unless a copy is allowed.
                chunked = hasattr(column, "chunks")
                self.arrays[name] = column.to_numpy() if chunked else column.to_numpy(zero_copy_only=False)
        alike: dict[Any, list[str]] = {}
        copied = sum(array.nbytes for array in self.arrays.values()) <= _STACKED_BYTES
        for name, array in self.arrays.items():
            alike.setdefault((array.dtype, None if copied else name), []).append(name)
        self.stacks: dict[tuple[np.dtype, tuple[str, ...]], np.ndarray] = {}
        for (dtype, _), names in alike.items():
            stack = (
                np.stack([self.arrays[name] for name in names], axis=1) if copied else self.arrays[names[0]][:, None]
            )
            self.stacks[dtype, tuple(names)] = stack
            self.arrays.update(zip(names, stack.T, strict=True))

    def value(self, name: str, at: int) -> Any:
        """One value, as Python has it."""
        found = self.arrays.get(name)
        return self._arrow.column(name)[at].as_py() if found is None else found[at].item()


class Row:
    """One row, by its place in the columns."""

    __slots__ = ("at", "columns")

    def __init__(self, columns: Columns, at: int):
        self.columns, self.at = columns, at

    def __reduce__(self) -> Any:
        return dict, (seen(self),)


def seen(sample: Any) -> Any:
    """A sample as a user's function gets it: a row as a dict."""
    if type(sample) is not Row:
        return sample
    return {name: sample.columns.value(name, sample.at) for name in sample.columns.names}


def collated(samples: Sequence[Any]) -> Any:
    """A batch of samples, as torch's default makes it."""
    try:
        return _batch_of(samples)
    except Exception as error:
        add_note(
            error,
            f"[collating the Loader's samples, each a {type(seen(samples[0])).__name__}: where they differ in size, or "
            "have more than numbers, give a collate_fn= that pads, for instance]",
        )
        raise


def _batch_of(samples: Sequence[Any]) -> Any:
    if set(map(type, samples)) != {Row}:
        return _collated([seen(one) for one in samples])
    columns = [row.columns for row in samples]
    parts = {id(one): one for one in columns}
    names = samples[0].columns.names
    if any(part.names != names for part in parts.values()):
        return default_collate([seen(one) for one in samples])
    whose, rows = np.array([*map(id, columns)]), np.array([row.at for row in samples])
    indexes = [np.flatnonzero(whose == key) for key in parts]
    found = _numbers([*parts.values()], indexes, [rows[where] for where in indexes], len(samples))
    return {
        name: found[name] if name in found else default_collate([row.columns.value(name, row.at) for row in samples])
        for name in names
    }


def _collated(samples: list[Any]) -> Any:
    """`default_collate`; in a reader, large tensors, also in dicts and tuples, are stacked where they are sent."""
    kinds = {*map(type, samples)} if process.note.kept else set()
    first = samples[0]
    if kinds == {dict} and all(sample.keys() == first.keys() for sample in samples):
        return {name: _collated([sample[name] for sample in samples]) for name in first}
    if kinds == {tuple} and len({*map(len, samples)}) == 1:
        return [_collated([*part]) for part in zip(*samples, strict=True)]
    if kinds == {np.ndarray} and first.dtype.kind in "biufc":
        return _collated([torch.as_tensor(sample, device="cpu") for sample in samples])
    found = Stacked.of(samples) if kinds == {torch.Tensor} else None
    return default_collate(samples) if found is None else found


def _numbers(
    parts: list[Columns], indexes: list[np.ndarray], rows: list[np.ndarray], count: int
) -> dict[str, torch.Tensor]:
    """The columns that are plain numbers, and of one dtype in all parts.

    Args:
        indexes, rows: for each part, the places in the batch and those in its columns.
    """
    found: dict[str, torch.Tensor] = {}
    for key in parts[0].stacks:
        (source, names), stacks = key, [part.stacks.get(key) for part in parts]
        dtype = _DTYPES.get(source.kind)
        if dtype is None or any(stack is None for stack in stacks):
            continue
        made: np.ndarray = np.empty((count, len(names)), dtype=dtype)
        for stack, to, at in zip(stacks, indexes, rows, strict=True):
            made[to] = stack[at]  # type: ignore[index]
        found.update((name, torch.from_numpy(column.copy())) for name, column in zip(names, made.T, strict=True))
    return found
