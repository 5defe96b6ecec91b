"""How many sizes of the gradient a rank holds at once while it runs virtual shards: one for each level of the tree."""

from __future__ import annotations

import math
import sys
from typing import Any

import cloudpickle
import pytest
import pytrees
import torch
from internals import change_partial_sums
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from spmd import data_parallel, spmd, value_and_grad

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LEAVES, ROWS = 16, 128  # a leaf is small beside all of them, and large beside what a sample needs


class Living(TorchDispatchMode):
    """Sees every operation, those of the backward pass too, and how many bytes of their results live at most."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given:
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._known.values()))
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in pytrees.leaves(tree) if isinstance(leaf, torch.Tensor)]


def gradients_held(mesh: Any, shards: int) -> float:
    """The most bytes that a rank's step has made and holds, in sizes of the gradient."""
    params = {str(leaf): torch.ones(ROWS, ROWS) for leaf in range(LEAVES)}

    def loss(params: Any, batch: Any) -> Any:
        for weight in params.values():
            batch = batch @ weight
        return batch.mean()

    def step(params: Any, batch: Any) -> Any:
        with Living() as living:
            value_and_grad(loss)(params, batch)
        return torch.tensor(living.most)

    most = spmd(data_parallel(step, shards=shards), mesh=mesh, check="never")(params, torch.ones(2 * shards, ROWS))
    return most.item() / (LEAVES * ROWS * ROWS * 4)


def kept(self: Any, shard: int, value: torch.Tensor) -> None:
    self.nodes.append(((0, shard), value))


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_for_each_level(shared_mesh: Any, ranks: int) -> None:
    mesh = shared_mesh({"data": ranks})
    held = {each: gradients_held(mesh, each * ranks) for each in (1, 2, 4, 8)}
    for each, sizes in held.items():  # sums that are taken into another, and the gradient that the backward is at, go
        assert math.log2(each) <= sizes <= max(1, math.log2(each)) + 0.25, held


def test_sums_that_are_not_made_at_once_would_be_noticed(make_mesh: Any) -> None:
    mesh = make_mesh({"data": 1})

    mesh.run(change_partial_sums, kept)
    assert gradients_held(mesh, 8) > 8
