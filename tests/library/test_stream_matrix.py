"""A part of `make resume`: a run over a stream with every stage, stopped and resumed at another size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import stream_matrix
import torch

from spmd import Loader, Stream, data_parallel, spmd, value_and_grad

cloudpickle.register_pickle_by_value(stream_matrix)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_stopped_and_resumed_at_other_sizes(shared_mesh: Any, tmp_path: Path) -> None:
    meshes = {ranks: shared_mesh({"data": ranks}) for ranks in (1, 3)}
    stream = stream_matrix.pipelines(tmp_path / "files")["all of them"]
    found = stream_matrix.resumed("all of them", stream, meshes, tmp_path, every=11)
    assert found.tried >= 8 and found.wrong == []
    assert found.same_ids == found.same_hashes == found.tried


def early_and_late(shard: int) -> Any:
    """The first shards end long before the others."""
    yield from range(100 * shard, 100 * shard + (2 if shard < 4 else 6))


def test_a_batch_of_which_the_first_rank_has_no_samples(shared_mesh: Any) -> None:
    """Its streams have ended; the function can't run on none, and the others tell what it returns."""
    mesh = shared_mesh({"data": 3})
    for shards in (None, 8):

        @spmd(mesh=mesh)
        @data_parallel(shards=shards)
        def step(w: Any, batch: Any) -> Any:
            def loss(w: Any, x: Any) -> Any:
                assert len(x)
                return (w * x.double()).mean()

            return value_and_grad(loss)(w, batch)

        stream = Stream(range(8), early_and_late)
        loader = Loader(stream, 8, mesh=mesh, shuffle=False, shards=shards)
        sizes = []
        for batch in loader:
            value, slope = step(torch.tensor(1.0), batch)
            expected = batch.full().double().mean().item()
            assert (float(value), float(slope)) == (expected, expected)
            sizes.append([len(shard) for shard in batch.shards()])
        assert sizes[0] == [3, 3, 2] and sizes[-1] == [0, 2, 2]
