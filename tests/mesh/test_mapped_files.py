"""A `np.memmap` travels as its path: no process reads it whole."""

import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch

from spmd import Loader, MeshError, Sampler
from spmd.mesh import wire

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def mapped(tmp_path):
    whole = np.arange(60, dtype=np.int64).reshape(20, 3)
    with open(tmp_path / "data", "wb") as file:
        file.write(b"header.." + whole.tobytes())
    return np.memmap(tmp_path / "data", np.int64, "r", offset=8, shape=(20, 3)), whole


@pytest.mark.parametrize("part", [slice(None), slice(5, 9), (slice(4, 5), slice(1, 3)), 7], ids=str)
def test_parts_are_found_in_the_file(mapped, part):
    array, whole = mapped
    packet = wire.dumps(array[part])
    assert len(packet.data) < 600
    found = wire.loads(packet)
    assert isinstance(found, np.memmap) and np.array_equal(found, whole[part])


def test_with_gaps_and_private_ones_are_copied(mapped):
    array, whole = mapped
    assert np.array_equal(wire.loads(wire.dumps(array[::2, ::2])), whole[::2, ::2])
    own = np.memmap(array.filename, np.int64, "c", offset=8, shape=(20, 3))
    own[0, 0] = -1
    assert wire.loads(wire.dumps(own))[0, 0] == -1
    assert np.array_equal(wire.loads(wire.dumps(array + 1)), whole + 1)


def test_what_arrived_is_sent_on_as_the_file_until_it_is_written(mapped):
    """As a rank hands its dataset to the processes that read for it."""
    array, whole = mapped
    here = wire.loads(wire.dumps(array))
    assert np.array_equal(here, whole)  # reading it does not make it this process's own
    packet = wire.dumps(here)
    assert len(packet.data) < 600 and np.array_equal(wire.loads(packet), whole)
    here[3, 1] = -5
    assert wire.loads(wire.dumps(here))[3, 1] == -5 and array[3, 1] == whole[3, 1]


def test_another_file_at_the_path_is_refused(mapped):
    """As where each host has a file of its own there: the ranks would read other data than the program has mapped."""
    array, whole = mapped
    packet = wire.dumps(array)
    path = Path(array.filename)
    same = path.with_suffix(".same")
    same.write_bytes(path.read_bytes())
    same.replace(path)
    assert np.array_equal(wire.loads(packet), whole)
    other = path.with_suffix(".other")
    other.write_bytes(b"header.." + (whole + 1).tobytes())
    other.replace(path)
    with pytest.raises(MeshError, match=r"data has other data here than where it was mapped.*on all hosts"):
        wire.loads(packet)


def test_a_file_that_is_written_in_place_is_the_same_file(mapped):
    array, _ = mapped
    packet = wire.dumps(array)
    own = np.memmap(array.filename, np.int64, "r+", offset=8, shape=(20, 3))
    own[0] = -1
    assert np.array_equal(wire.loads(packet), own) and np.array_equal(wire.loads(wire.dumps(own)), own)
    packet = wire.dumps(own)
    own[0] = -2
    assert np.array_equal(wire.loads(packet), own)


def test_captured_and_as_a_dataset(shared_mesh, mapped):
    array, whole = mapped
    mesh = shared_mesh({"data": 2})
    assert mesh.run(lambda: (type(array).__name__, int(array.sum()))) == [("memmap", whole.sum())] * 2
    for dataset in (array, {"x": array}):
        for step, batch in enumerate(Loader(dataset, 8, mesh=mesh, seed=3)):
            batch = batch["x"] if isinstance(batch, dict) else batch
            ids = Sampler(20, 8, seed=3).batch(0, step)
            parts = [torch.from_numpy(whole)[ids[rank::2]] for rank in range(2)]
            assert all(torch.equal(*pair) for pair in zip(batch.shards(), parts, strict=True))
