"""Rows of Parquet and Arrow files: a batch of them is what torch makes of the same rows as dicts."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import default_collate

from spmd import Loader, SpecError, Stream

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

COUNT = 24


def table() -> Any:
    kinds = ("int8", "int64", "uint32", "float32", "float64")
    columns = {kind: pyarrow.array([3 * i % 101 for i in range(COUNT)], getattr(pyarrow, kind)()) for kind in kinds}
    columns["bool"] = pyarrow.array([i % 3 == 0 for i in range(COUNT)])
    columns["text"] = pyarrow.array([f"word {i}" for i in range(COUNT)])
    columns["list"] = pyarrow.array([[i, i + 1] for i in range(COUNT)])
    columns["big"] = pyarrow.array([i + 2**40 for i in range(COUNT)], pyarrow.uint64())
    return pyarrow.table(columns)


def written(folder: Path) -> dict[str, Stream]:
    """The table in a Parquet file of groups of five rows, and in an Arrow file of batches of seven."""
    parquet.write_table(table(), folder / "rows.parquet", row_group_size=5)
    with pyarrow.OSFile(str(folder / "rows.arrow"), "w") as file, pyarrow.ipc.new_file(file, table().schema) as writer:
        writer.write_table(table(), max_chunksize=7)
    return {kind: Stream.parquet([folder / f"rows.{kind}"]) for kind in ("parquet", "arrow")}


def test_batches_are_those_of_dicts(shared_mesh: Any, tmp_path: Path) -> None:
    mesh = shared_mesh({"data": 2})
    options = {"mesh": mesh, "shards": 2, "seed": 1}
    for kind, stream in written(tmp_path).items():
        numbers = Stream.parquet([tmp_path / f"rows.{kind}"], columns=["int64", "float32", "bool", "int8"]).shuffle(9)
        expected = Loader(numbers, 6, collate_fn=default_collate, **options)
        for found, wanted in zip(Loader(numbers, 6, **options), expected, strict=True):
            assert list(found) == list(wanted)
            for name in wanted:
                assert found[name].dtype == wanted[name].dtype, (kind, name)
                assert found[name].full().tolist() == wanted[name].full().tolist(), (kind, name)
        seen = Loader(stream, 6, collate_fn=as_text, **options)
        rows = [eval(text) for batch in seen for text in read(batch)]
        assert sorted(rows, key=lambda row: row["text"]) == sorted(table().to_pylist(), key=lambda row: row["text"])


@pytest.mark.parametrize("copied", [1 << 24, 0], ids=["stacked", "column by column"])
def test_files_whose_columns_are_of_other_types(
    shared_mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    monkeypatch.setattr("spmd.data.rows._STACKED_BYTES", copied)
    paths = [tmp_path / f"{part}.parquet" for part in range(3)]
    for part, path in enumerate(paths):
        at = pyarrow.array(range(12 * part, 12 * part + 12), pyarrow.int32() if part else pyarrow.int64())
        columns = {name: pyarrow.array([x.as_py() / 2 for x in at], pyarrow.float32()) for name in ("x", "y")}
        parquet.write_table(pyarrow.table({"at": at, **columns}), path, row_group_size=5)
    rows = {row["at"]: row for path in paths for row in parquet.read_table(path).to_pylist()}
    seen = []
    for batch in Loader(Stream.parquet(paths).shuffle(7), 9, mesh=shared_mesh({"data": 1}), seed=3, shards=3):
        expected = default_collate([rows[at] for at in batch["at"].tolist()])
        assert list(batch) == list(expected)
        for name, value in expected.items():
            assert batch[name].dtype == value.dtype and torch.equal(batch[name].full(), value)
        seen += batch["at"].tolist()
    assert sorted(seen) == sorted(rows)


def as_text(rows: list) -> torch.Tensor:
    """Rows as a user's function sees them, as bytes of one length."""
    assert all(type(row) is dict for row in rows)
    return torch.tensor([list(repr(row).encode().ljust(400)) for row in rows], dtype=torch.uint8)


def read(batch: Any) -> list[str]:
    return [bytes(row).decode().strip() for row in batch.full().tolist()]


def test_every_kind_of_column_is_collated_as_torch_does() -> None:
    from spmd.data.rows import Columns, Row, collated, seen

    parts = [Columns(table()), Columns(table().to_batches()[0].slice(3))]
    rows = [Row(columns, at) for columns in parts for at in range(columns.length)]
    random.Random(0).shuffle(rows)
    batch, wanted = collated(rows[:20]), default_collate([seen(row) for row in rows[:20]])
    assert list(batch) == list(wanted)
    for name, values in wanted.items():
        if isinstance(values, torch.Tensor):
            assert batch[name].dtype == values.dtype and torch.equal(batch[name], values), name
        elif name == "list":
            assert all(map(torch.equal, batch[name], values))
        else:
            assert batch[name] == values
    assert pickle.loads(pickle.dumps(rows[0])) == seen(rows[0]) and type(pickle.loads(pickle.dumps(rows[0]))) is dict
    mixed = [rows[0], seen(rows[1])]
    assert torch.equal(collated(mixed)["int64"], default_collate([seen(row) for row in mixed])["int64"])


def test_missing_values_are_refused_as_torch_refuses_them(shared_mesh: Any, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"x": [1, None, 3]}), tmp_path / "gaps.parquet")
    with pytest.raises((TypeError, RuntimeError), match="NoneType"):
        list(Loader(Stream.parquet([tmp_path / "gaps.parquet"]), 3, shards=1, mesh=shared_mesh({"data": 1})))


def test_columns_that_a_file_lacks_are_refused(shared_mesh: Any, tmp_path: Path) -> None:
    """PyArrow leaves them out of what it reads of a Parquet file."""
    written(tmp_path)
    for kind in ("parquet", "arrow"):
        stream = Stream.parquet([tmp_path / f"rows.{kind}"], columns=["int64", "int65"])
        with pytest.raises(SpecError, match=rf"names what .*rows.{kind} does not have .*'int64'.*got 'int65'"):
            next(iter(Loader(stream, 6, mesh=shared_mesh({"data": 2}))))
