"""Readers of files, one record after another, that can say where they are and be opened there."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch

from ..kernels.errors import MeshError, SpecError
from . import tar_files
from .rows import Columns, Row


class JsonLines(Iterator[Any]):
    """The values of a file of JSON lines."""

    def __init__(self, path: str, at: int = 0):
        self._file = open(path, "rb")  # noqa: SIM115
        self._file.seek(at)

    def __next__(self) -> Any:
        while line := self._file.readline():
            if not line.isspace():
                return json.loads(line)
        self._file.close()
        raise StopIteration

    def tell(self) -> int | None:
        return None if self._file.closed else self._file.tell()


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
    """Opens files of records of one size."""

    nbytes: int

    def __call__(self, path: str, at: int = 0) -> Iterator[bytes]:
        return _Records(path, self.nbytes, at)


class _Records(Iterator[bytes]):
    def __init__(self, path: str, nbytes: int, at: int):
        self._file = open(path, "rb")  # noqa: SIM115
        self._nbytes, self._at, self._path = nbytes, at, path
        self._file.seek(at * nbytes)

    def __next__(self) -> bytes:
        record = self._file.read(self._nbytes)
        if not record:
            self._file.close()
            raise StopIteration
        if len(record) < self._nbytes:
            raise ValueError(f"{self._path} ends within a record: {len(record)} bytes instead of {self._nbytes}")
        self._at += 1
        return record

    def tell(self) -> int:
        return self._at


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Opens Parquet and Arrow files."""

    columns: tuple[str, ...] | None

    def __call__(self, path: str, at: tuple[int, int] = (0, 0)) -> Iterator[Row]:
        return _Rows(path, self.columns, at)


class _Rows(Iterator[Row]):
    """Rows of a file, a group of them at a time; a position is (group, row in it)."""

    def __init__(self, path: str, columns: tuple[str, ...] | None, at: tuple[int, int]):
        try:
            pyarrow = importlib.import_module("pyarrow")  # not needed for other files
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise MeshError("reading Parquet and Arrow files needs pyarrow", remedy="pip install pyarrow") from None
        if path.endswith((".arrow", ".feather")):
            reader = pyarrow.ipc.open_file(pyarrow.memory_map(path))
            self._groups, names = reader.num_record_batches, reader.schema.names
            self._get = lambda group: _chosen(reader.get_batch(group), columns)
        else:
            file = parquet.ParquetFile(path)
            self._groups, names = file.num_row_groups, file.schema_arrow.names
            chosen, threads = None if columns is None else list(columns), torch.get_num_threads() > 1
            self._get = lambda group: file.read_row_group(group, columns=chosen, use_threads=threads)
        unknown = [name for name in columns or () if name not in names and name.partition(".")[0] not in names]
        if unknown:  # pyarrow leaves them out of some files
            problem = f"columns= of a Stream names what {path} does not have"
            raise SpecError(problem, got=", ".join(map(repr, unknown)), expected=f"some of {names}")
        self._group, self._row = at
        self._columns: Columns | None = None

    def __next__(self) -> Row:
        for row in self.some(1):
            return row
        raise StopIteration

    def some(self, most: int) -> list[Row]:
        """Up to `most` next rows of a group; none at the end of the file."""
        while self._group < self._groups:
            if self._columns is None:
                self._columns = Columns(self._get(self._group))
            if self._row < self._columns.length:
                columns, begin = self._columns, self._row
                self._row = min(begin + most, columns.length)
                return [Row(columns, at) for at in range(begin, self._row)]
            self._group, self._row, self._columns = self._group + 1, 0, None
        return []

    def tell(self) -> tuple[int, int]:
        return (self._group, self._row)


def _chosen(batch: Any, columns: tuple[str, ...] | None) -> Any:
    return batch if columns is None else batch.select(list(columns))


class Tar(Iterator[dict[str, Any]]):
    """Samples of a tar file: consecutive members whose names differ in their extension only."""

    def __init__(self, path: str, at: int = 0):
        self._file = open(path, "rb")  # noqa: SIM115
        self._file.seek(at)
        self._members = tar_files.members(self._file)
        self._next: tuple[int, str, bytes] | None = None
        self._at: int | None = at

    def __next__(self) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        while True:
            member, self._next = self._next or next(self._members, None), None
            if member is None:
                break
            offset, path, content = member
            folder, name = os.path.split(path)
            stem, _, extension = name.partition(".")
            key = os.path.join(folder, stem)
            if sample and sample["__key__"] != key:
                self._next, self._at = member, offset
                return sample
            sample["__key__"] = key
            sample[extension] = content
        self._at = None
        if not sample:
            self._file.close()
            raise StopIteration
        return sample

    def tell(self) -> int | None:
        return self._at
