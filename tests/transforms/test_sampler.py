"""The sampler: bijections at every length, the order of torch, shards that add up, and errors that say what to do."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, TensorDataset

from spmd import Sampler, SpecError


def epoch_ids(sampler: Sampler, epoch: int = 0) -> list[int]:
    return [i for step in range(len(sampler)) for i in sampler.batch(epoch, step).tolist()]


def chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the counts are further from uniform than chance makes them."""
    expected = counts.sum() / counts.size
    return (((counts - expected) ** 2).sum() / expected - (counts.size - 1)) / math.sqrt(2 * (counts.size - 1))


# The shuffle.

POWERS = sorted({2**k + d for k in range(1, 18) for d in (-1, 0, 1)} - {0})


@pytest.mark.parametrize("length", POWERS)
def test_every_id_comes_once(length):
    for seed, epoch in ((0, 0), (3, 5)):
        ids = epoch_ids(Sampler(length, max(1, length // 3), seed=seed), epoch)
        assert len(ids) == length and sorted(ids) == list(range(length))


def test_every_id_comes_once_at_small_lengths_for_many_keys():
    for length, seed in itertools.product(range(1, 35), range(12)):
        assert sorted(Sampler(length, length, seed=seed).batch(0, 0).tolist()) == list(range(length))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(-(2**80), 2**80), st.integers(0, 2**70))
def test_every_id_comes_once_for_any_seed_and_epoch(length, seed, epoch):
    ids = Sampler(length, length, seed=seed).batch(epoch, 0)
    assert torch.equal(ids.sort().values, torch.arange(length))


@pytest.mark.parametrize("length", [10**12, 2**40 + 1, 2**53 + 1, 2**62, 2**63 - 1])
def test_huge_lengths_cost_one_batch(length):
    sampler = Sampler(length, 1000, seed=7)
    assert len(sampler) == -(-length // 1000)
    sampler.batch(0, 0)
    tracemalloc.start()
    steps = [0, 1, 2, len(sampler) // 2, len(sampler) - 2, len(sampler) - 1]
    ids = torch.cat([sampler.batch(1, step) for step in steps])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4e6
    assert ids.unique().numel() == ids.numel() == 5000 + (length % 1000 or 1000)
    assert ids.min() >= 0 and ids.max() < length
    # Spread over the whole range: the mean of uniform ids, within five standard deviations.
    mean = ids.to(torch.float64).mean().item() / length
    assert abs(mean - 0.5) < 5 * math.sqrt(1 / 12 / ids.numel())


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_every_id_is_as_likely_at_every_position(length):
    orders = np.stack([Sampler(length, length, seed=seed).batch(0, 0).numpy() for seed in range(1500)])
    for position in range(length):
        assert chi_square(np.bincount(orders[:, position], minlength=length)) < 5
    # Differences of neighbours: all that are possible, equally often.
    steps = (orders[:, 1:] - orders[:, :-1]) % length
    if length > 2:
        assert chi_square(np.bincount(steps.ravel(), minlength=length)[1:]) < 6


@pytest.mark.parametrize("length", [4, 5])
def test_every_order_is_as_likely(length):
    kinds = {order: number for number, order in enumerate(itertools.permutations(range(length)))}
    orders = [tuple(Sampler(length, length, seed=seed).batch(0, 0).tolist()) for seed in range(3000)]
    assert chi_square(np.bincount([kinds[order] for order in orders], minlength=len(kinds))) < 5


def test_epochs_are_as_random_as_seeds():
    sampler = Sampler(6, 6)
    orders = np.stack([sampler.batch(epoch, 0).numpy() for epoch in range(2000)])
    for position in range(6):
        assert chi_square(np.bincount(orders[:, position], minlength=6)) < 5


@pytest.mark.parametrize("length", [1000, 4097, 10**6, 10**12])
def test_neighbours_are_not_correlated(length):
    ids = Sampler(length, 1000, seed=11).batch(0, 0).numpy() / length
    for lag in (1, 2, 4, 8, 16, 256):
        assert abs(np.corrcoef(ids[:-lag], ids[lag:])[0, 1]) < 5 / math.sqrt(1000 - lag)
    bits = (Sampler(2**20, 2**14, seed=1).batch(0, 0).numpy()[:, None] >> np.arange(20)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / 2**7


def test_seed_and_epoch_are_told_apart():
    pairs = [(seed, epoch) for seed in (-2, -1, 0, 1, 2, 3, 2**64, 2**64 + 1, -(2**64), 10**40) for epoch in range(5)]
    orders = {tuple(Sampler(50, 50, seed=seed).batch(epoch, 0).tolist()) for seed, epoch in pairs}
    assert len(orders) == len(pairs)
    # In particular, the shuffle of an epoch is not that of the next seed, as it is in torch.
    first, other = Sampler(50, 50, seed=0).batch(1, 0), Sampler(50, 50, seed=1).batch(0, 0)
    assert not torch.equal(first, other)
    assert (first == other).sum() < 10


def test_the_order_is_pinned():
    # A change of these numbers changes every run that resumes: make it on purpose.
    assert Sampler(10, 10).batch(0, 0).tolist() == [5, 2, 8, 0, 7, 4, 6, 3, 1, 9]
    assert Sampler(10**12, 3, seed=-5).batch(2, 4).tolist() == [756582303179, 202157711214, 516061339140]


@pytest.mark.parametrize("length", [200, 60_000, 70_001, 2**20 + 1])
def test_the_order_is_the_same_however_many_ids_are_asked_for(length):
    many, few = Sampler(length, 10_000, seed=3).batch(1, 0), Sampler(length, 7, seed=3)
    assert many[:700].tolist() == [one for step in range(min(100, len(few))) for one in few.batch(1, step).tolist()]


# Minibatches.


@pytest.mark.parametrize("order", ["feistel", "torch"])
def test_the_last_batch_is_short_unless_dropped(order):
    kept, dropped = Sampler(10, 4, order=order), Sampler(10, 4, order=order, drop_last=True)
    assert (len(kept), len(dropped)) == (3, 2)
    assert [kept.batch(0, step).numel() for step in range(3)] == [4, 4, 2]
    for step in range(2):
        assert torch.equal(kept.batch(0, step), dropped.batch(0, step))
    with pytest.raises(SpecError, match="0 <= step < 2"):
        dropped.batch(0, 2)


def test_batches_are_int64_and_the_callers_own():
    for order, shuffle in itertools.product(("feistel", "torch"), (True, False)):
        sampler = Sampler(8, 4, order=order, shuffle=shuffle)
        ids = sampler.batch(0, 0)
        assert ids.dtype == torch.int64 and ids.device.type == "cpu"
        before = ids.tolist()
        ids.fill_(-1)
        assert sampler.batch(0, 0).tolist() == before


def test_without_shuffle_ids_are_in_sequence_in_every_epoch():
    for order, epoch in itertools.product(("feistel", "torch"), (0, 9)):
        assert epoch_ids(Sampler(11, 4, shuffle=False, order=order), epoch) == list(range(11))


def test_no_state():
    sampler = Sampler(100, 7, seed=3)
    forwards = [sampler.batch(epoch, step).tolist() for epoch in range(2) for step in range(len(sampler))]
    backwards = [sampler.batch(e, s).tolist() for e in (1, 0) for s in reversed(range(len(sampler)))]
    assert forwards == backwards[::-1]
    before = torch.get_rng_state()
    Sampler(100, 7, order="torch").batch(0, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_data_set_has_no_steps():
    assert len(Sampler(0, 4)) == len(Sampler(3, 4, drop_last=True)) == 0
    with pytest.raises(SpecError, match="epoch is empty"):
        Sampler(0, 4).batch(0, 0)


def test_it_is_a_value():
    sampler = Sampler(np.int64(10), 4, seed=-3, shuffle=False, drop_last=True, order="torch")  # type: ignore[arg-type]
    assert (sampler.length, sampler.batch_size, sampler.seed) == (10, 4, -3)
    assert (sampler.shuffle, sampler.drop_last, sampler.order) == (False, True, "torch")
    assert repr(sampler) == "Sampler(length=10, batch_size=4, seed=-3, shuffle=False, drop_last=True, order='torch')"
    for twin in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler), eval(repr(sampler))):
        assert twin == sampler and hash(twin) == hash(sampler)
    assert Sampler(10, 4) != Sampler(10, 4, seed=1)
    with pytest.raises(AttributeError):
        sampler.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Sampler(10, 4, 0)  # type: ignore[call-arg]


# The order of torch.


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("length", "size", "each"), [(24, 1, 4), (24, 2, 3), (60, 3, 4), (64, 4, 16), (28, 4, 3)])
def test_the_order_of_torch(length, size, each, shuffle):
    for seed, epoch in ((0, 0), (5, 3), (-4, 1)):
        sampler = Sampler(length, each * size, seed=seed, shuffle=shuffle, order="torch")
        for rank in range(size):
            theirs: DistributedSampler = DistributedSampler(
                TensorDataset(torch.zeros(length)), size, rank, shuffle=shuffle, seed=seed
            )
            theirs.set_epoch(epoch)
            expected = torch.tensor(list(theirs)).split(each)
            assert len(expected) == len(sampler)
            for step, ids in enumerate(expected):
                assert torch.equal(sampler.shard(epoch, step, rank, size), ids)


def test_the_order_of_torch_with_dropped_samples():
    sampler = Sampler(23, 8, seed=2, drop_last=True, order="torch")
    for rank in range(4):
        theirs: DistributedSampler = DistributedSampler(TensorDataset(torch.zeros(23)), 4, rank, seed=2, drop_last=True)
        ours = torch.cat([sampler.shard(0, step, rank, 4) for step in range(len(sampler))])
        assert ours.tolist() == list(theirs)[: ours.numel()]


def test_the_order_of_torch_takes_every_seed():
    for seed in (-(2**63), 2**64 - 1, 2**64, 10**30, -(10**30)):
        sampler = Sampler(20, 20, seed=seed, order="torch")
        assert sorted(sampler.batch(0, 0).tolist()) == list(range(20))
        assert torch.equal(sampler.batch(0, 0), sampler.batch(0, 0))
    with torch.device("meta"):
        assert Sampler(20, 20, order="torch").batch(0, 0).device.type == "cpu"


# Shards.

draws = st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(1, 9), st.integers(1, 12), st.booleans())


@settings(max_examples=150, deadline=None)
@given(draws, st.sampled_from(["feistel", "torch"]), st.integers(0, 3))
def test_the_shards_are_the_batch(draw, order, epoch):
    length, batch_size, size, virtual, shuffle = draw
    sampler = Sampler(length, batch_size, shuffle=shuffle, order=order)
    for step in range(len(sampler)):
        batch = sampler.batch(epoch, step)
        plain = [sampler.shard(epoch, step, rank, size) for rank in range(size)]
        for rank, ids in enumerate(plain):
            assert torch.equal(ids, batch[rank::size])
        # Any number of ranks holds the same virtual shards, in the same order, in blocks: longer blocks first.
        dealt = [sampler.shard(epoch, step, rank, size, shards=virtual) for rank in range(size)]
        shards = [batch[v::virtual] for v in range(virtual)]
        assert torch.equal(torch.cat(dealt), torch.cat(shards))
        start = 0
        for ids, block in zip(dealt, [virtual // size + (rank < virtual % size) for rank in range(size)], strict=True):
            assert torch.equal(ids, torch.cat([batch[:0], *shards[start : start + block]]))
            start += block


def test_shards_of_any_number_of_ranks_and_parts():
    sampler = Sampler(10, 10, shuffle=False)
    assert [sampler.shard(0, 0, rank, 2, shards=3).tolist() for rank in range(2)] == [[0, 3, 6, 9, 1, 4, 7], [2, 5, 8]]
    assert sampler.shard(0, 0, 11, 12).shape == (0,)
    assert sampler.shard(0, 0, 2, 3, shards=2).shape == (0,)
    assert sampler.shard(0, 0, 2, 3, shards=2).dtype == torch.int64
    assert sampler.shard(0, 0, 0, 1, shards=10**15).tolist() == list(range(10))


def test_a_shard_of_a_huge_data_set():
    sampler = Sampler(10**12, 4096)
    step = 10**8
    parts = [sampler.shard(2, step, rank, 3, shards=8) for rank in range(3)]
    batch = sampler.batch(2, step)
    assert torch.equal(torch.cat(parts), torch.cat([batch[v::8] for v in range(8)]))


# Errors.


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((-1, 4), {}, ['"length"', "from 0 to", "got -1"]),
        ((2**63, 4), {}, ['"length"', str(2**63 - 1)]),
        ((10.0, 4), {}, ['"length"', "an integer", "10.0"]),
        ((10, 0), {}, ['"batch_size"', "at least 1", "got 0"]),
        ((10, "4"), {}, ['"batch_size"', "'4'"]),
        ((10, True), {}, ['"batch_size"', "got True"]),
        ((10, torch.tensor(True)), {}, ['"batch_size"', "tensor(True)"]),
        ((10, 4), {"seed": True}, ['"seed"', "got True"]),
        ((10, 4), {"shuffle": "no"}, ["bad shuffle", "True or False", "'no'"]),
        ((10, 4), {"drop_last": 2}, ["bad drop_last", "got 2"]),
        ((10, 4), {"seed": None}, ['"seed"', "an integer", "None"]),
        ((10, 4), {"order": "random"}, ['"order"', "'feistel', 'torch'", "'random'"]),
    ],
)
def test_bad_arguments(arguments, options, said):
    with pytest.raises(SpecError) as caught:
        Sampler(*arguments, **options)
    assert all(part in str(caught.value) for part in said), str(caught.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s: s.batch(0, 3), ["0 <= step < 3", "step=3", "Sampler(length=10"]),
        (lambda s: s.batch(0, -1), ["0 <= step < 3", "step=-1"]),
        (lambda s: s.shard(0, 3, 0, 2), ["0 <= step < 3"]),
        (lambda s: s.batch(-1, 0), ['"epoch"', "at least 0"]),
        (lambda s: s.batch(0, 1.0), ['"step"', "1.0"]),
        (lambda s: s.shard(0, 0, 0, 0), ['"size"', "at least 1"]),
        (lambda s: s.shard(0, 0, 2, 2), ['"rank"', "from 0 to 1", "got 2"]),
        (lambda s: s.shard(0, 0, -1, 2), ['"rank"', "got -1"]),
        (lambda s: s.shard(0, 0, 0, 2, shards=0), ['"shards"', "at least 1"]),
        (lambda s: s.shard(0, 0, 0, 2, shards=2.5), ['"shards"', "2.5"]),
    ],
)
def test_bad_calls(call, said):
    with pytest.raises(SpecError) as caught:
        call(Sampler(10, 4))
    assert all(part in str(caught.value) for part in said), str(caught.value)
