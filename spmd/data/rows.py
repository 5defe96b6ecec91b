"""Rows of a table that stay in its columns: a user's function sees dicts, a batch is taken column by column.

Invariant: `collated(rows)` is what torch's `default_collate` makes of the same rows as dicts: the values and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

# By kind of a column: the dtype of the tensor that default_collate makes of Python's numbers.
_DTYPES = {"i": torch.int64, "u": torch.int64, "f": torch.float64, "b": torch.bool}
_PLAIN = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float", "double"}  # Arrow's types


class Columns:
    """A part of a table: its columns as arrays where they are plain numbers, else as Arrow has them."""

    __slots__ = ("_arrow", "arrays", "length", "names")

    def __init__(self, table: Any):
        self._arrow = table
        self.names: list[str] = list(table.column_names if hasattr(table, "column_names") else table.schema.names)
        self.length = len(table)
        self.arrays: dict[str, np.ndarray] = {}
        for name, column in zip(self.names, table.columns, strict=True):
            if column.null_count == 0 and str(column.type) in _PLAIN:
                # Of a table a column is in chunks, which are joined; that of a record batch would refuse to be copied.
                chunked = hasattr(column, "chunks")
                self.arrays[name] = column.to_numpy() if chunked else column.to_numpy(zero_copy_only=False)

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
    first = samples[0]
    if type(first) is not Row or any(
        type(one) is not Row or one.columns.names != first.columns.names for one in samples
    ):
        return default_collate([seen(one) for one in samples])
    parts: dict[int, tuple[Columns, list[int], list[int]]] = {}
    for place, row in enumerate(samples):
        _, places, ats = parts.setdefault(id(row.columns), (row.columns, [], []))
        places.append(place)
        ats.append(row.at)
    batch = {}
    for name in first.columns.names:
        arrays = [columns.arrays.get(name) for columns, _, _ in parts.values()]
        kinds = {None if array is None else array.dtype.kind for array in arrays}
        if len(kinds) == 1 and (dtype := _DTYPES.get(next(iter(kinds)) or "")) is not None:
            out = batch[name] = torch.empty(len(samples), dtype=dtype)
            for array, (_, places, ats) in zip(arrays, parts.values(), strict=True):
                out.numpy()[places] = array[ats]  # type: ignore[index]
        else:
            batch[name] = default_collate([row.columns.value(name, row.at) for row in samples])
    return batch
