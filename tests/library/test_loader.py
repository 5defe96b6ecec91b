import json
import os
import random
import re
import sys
from collections import namedtuple

import cloudpickle
import numpy as np
import pytest
import torch
from cases import on_both
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from spmd import Array, Loader, P, Sampler, SpecError, Stream, data_parallel, psum, put, spmd

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Pair = namedtuple("Pair", "x y")


def dealt(ids, parts):
    """A minibatch as the ranks hold it: dealt out one by one."""
    return [ids[rank::parts] for rank in range(parts)]


class Squares(Dataset):
    """Sample i is {"x": [i, i * i], "y": i}; notes who read what if told where."""

    def __init__(self, length, notes=None, fails_at=None):
        self.length, self.notes, self.fails_at = length, notes, fails_at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.notes is not None:
            with open(os.path.join(self.notes, str(os.getpid())), "a") as file:
                file.write(f"{index}\n")
        if index == self.fails_at:
            raise LookupError(f"no such square: {index}")
        return {"x": torch.tensor([index, index**2]), "y": index}


# -- what a dataset may be --------------------------------------------------------------------------------------------


@on_both
def test_trees_of_tensors_and_arrays(shared_mesh, backend):
    mesh = shared_mesh({"data": 3}, backend)
    x, y = torch.randn(20, 2), np.arange(20)
    sampler = Sampler(20, 6, seed=1)
    datasets = {
        "dict": {"x": x, "y": {"z": y}},
        "tuple": (x, y),
        "pair": Pair(x, y),
        "tensor": x,
        "array": y,
        "half": x.bfloat16(),
        "flags": x > 0,
        "tokens": y.astype(np.uint16),
        "unsigned": torch.arange(20).to(torch.uint64),
    }
    for name, dataset in datasets.items():
        loader = Loader(dataset, 6, mesh=mesh, seed=1)
        assert len(loader) == 4
        for step, batch in enumerate(loader):
            ids = sampler.batch(0, step)
            if name == "dict":
                assert list(batch) == ["x", "y"]
                found, wanted = (batch["x"], batch["y"]["z"]), (x, torch.from_numpy(y))
            elif name in ("tuple", "pair"):
                assert type(batch) is type(dataset)
                found, wanted = tuple(batch), (x, torch.from_numpy(y))
            else:
                found, wanted = (batch,), (torch.as_tensor(dataset),)
            for array, whole in zip(found, wanted, strict=True):
                assert isinstance(array, Array) and array.spec == P("data") and array.dtype is whole.dtype
                assert array.shape == (len(ids), *whole.shape[1:])
                for shard, part in zip(array.shards(), dealt(ids, 3), strict=True):
                    assert torch.equal(shard, whole[part])


@on_both
def test_map_style_datasets_are_collated(shared_mesh, backend):
    mesh = shared_mesh({"data": 2}, backend)
    sampler = Sampler(11, 4, seed=2)
    for dataset in (Squares(11), [Squares(11)[i] for i in range(11)]):
        for step, batch in enumerate(Loader(dataset, 4, mesh=mesh, seed=2)):
            for shard, ids in zip(batch["x"].shards(), dealt(sampler.batch(0, step), 2), strict=True):
                assert torch.equal(shard, torch.stack([ids, ids**2], 1))
            assert batch["y"].dtype is torch.int64
            assert sorted(batch["y"].full().tolist()) == sorted(sampler.batch(0, step).tolist())
    pairs = TensorDataset(torch.arange(8.0), torch.arange(8))
    x, y = next(iter(Loader(pairs, 8, mesh=mesh, shuffle=False)))
    assert x.full().tolist() == y.full().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert next(iter(Loader([1.5, 2.5], 2, mesh=mesh, shuffle=False))).full().tolist() == [1.5, 2.5]


def test_a_collate_function_of_ones_own(shared_mesh):
    def pad(samples):
        longest = 5
        out = torch.zeros(len(samples), longest, dtype=torch.int64)
        for row, sample in zip(out, samples, strict=True):
            row[: len(sample)] = torch.tensor(sample)
        return {"ids": out, "kind": "padded", "limit": longest, "scale": torch.tensor(0.5), "np": np.ones(len(samples))}

    sentences = [[1], [1, 2], [1, 2, 3], [4], [5, 6]]
    batches = list(Loader(sentences, 3, mesh=shared_mesh({"data": 2}), shuffle=False, collate_fn=pad))
    assert batches[0]["ids"].full().tolist() == [[1, 0, 0, 0, 0], [1, 2, 3, 0, 0], [1, 2, 0, 0, 0]]
    assert batches[1]["ids"].shards()[1].tolist() == [[5, 6, 0, 0, 0]]
    assert batches[0]["kind"] == "padded" and batches[0]["limit"] == 5
    assert batches[0]["scale"].spec == P() and batches[0]["scale"].item() == 0.5
    assert batches[0]["np"].spec == P("data") and batches[0]["np"].dtype is torch.float64
    # What has no row for each sample is the same on all ranks, and in all virtual shards, or refused.
    for counted in (len, lambda samples: torch.tensor(sum(map(len, samples)))):
        for ranks, shards in ((2, None), (2, 2), (1, 4)):
            collate = lambda samples, counted=counted: (torch.ones(len(samples), 1), counted(samples))  # noqa: E731
            with pytest.raises(SpecError, match=r"(on all ranks|virtual shards).*a row for each sample"):
                list(Loader(sentences, 5, collate_fn=collate, mesh=shared_mesh({"data": ranks}), shards=shards))
    # Of tensors too: the tree is then a map-style dataset.
    swapped = Loader(
        torch.arange(4), 2, mesh=shared_mesh({"data": 2}), shuffle=False, collate_fn=lambda s: -torch.stack(s)
    )
    assert [batch.full().tolist() for batch in swapped] == [[0, -1], [-2, -3]]


def test_strings_are_refused_with_a_way_out(shared_mesh):
    mesh = shared_mesh({"data": 2})
    samples = [{"x": torch.tensor(i), "name": f"sample {i}"} for i in range(4)]
    with pytest.raises(SpecError, match=r"str in the batch's \['name'\]\[0\].*collate_fn"):
        next(iter(Loader(samples, 4, mesh=mesh)))
    with pytest.raises(SpecError):  # strings of one's own making have to agree
        next(iter(Loader(samples, 4, mesh=mesh, collate_fn=lambda batch: [sample["name"] for sample in batch])))
    kept = Loader(samples, 4, mesh=mesh, shuffle=False, collate_fn=lambda batch: torch.stack([s["x"] for s in batch]))
    assert next(iter(kept)).shards()[1].tolist() == [1, 3]


def test_what_it_cannot_read_is_refused(shared_mesh, tmp_path):
    class Forwards(IterableDataset):
        def __iter__(self):
            return iter([1, 2])

    mesh = shared_mesh({"data": 2})
    with pytest.raises(SpecError, match=r"differ in length.*\['x'\]: 3.*\['y'\]: 4"):
        Loader({"x": torch.ones(3), "y": torch.ones(4)}, 2, mesh=mesh)
    with pytest.raises(SpecError, match="differ in length"):
        Loader((torch.ones(3), torch.tensor(1.0)), 2, mesh=mesh)
    for x, y in ((torch.ones(9, 2), torch.ones(9)), (np.ones((9, 2)), torch.ones(9, 3))):
        with pytest.raises(SpecError, match=r"list of tensors.*got \[9, 2\] and.*a tuple, Loader\(\(x, y\), batch"):
            Loader([x, y], 2, mesh=mesh)
    assert len(Loader([torch.ones(9, 2), torch.ones(9)], 2, mesh=mesh, collate_fn=lambda batch: batch[0])) == 1
    assert len(Loader([torch.ones(9, 2), torch.ones(9, 2)], 2, mesh=mesh)) == 1
    images = [torch.ones(9, length) for length in (2, 3, 4)]
    read = [[*shard.shape] for batch in Loader(images, 1, mesh=mesh) for shard in batch.shards() if len(shard)]
    assert sorted(read) == [[1, 9, 2], [1, 9, 3], [1, 9, 4]]
    assert len([*Loader(images[:2], 1, mesh=mesh)]) == 2
    assert len([*Loader(images, 2, mesh=mesh)]) == 2  # each rank has one of them
    with pytest.raises(SpecError, match=r"IterableDataset.*Stream\(\[dataset\], iter\)"):
        Loader(Forwards(), 2, mesh=mesh)
    assert [batch.full().tolist() for batch in Loader(Stream([Forwards()], iter), 2, mesh=mesh)] == [[1, 2]]
    with pytest.raises(SpecError, match=r"got DataLoader.*loader\.dataset"):
        Loader(DataLoader(torch.ones(3)), 2, mesh=mesh)
    for there in (put(torch.ones(4), P("data"), mesh=mesh), {"x": put(torch.ones(4), mesh=mesh)}):
        with pytest.raises(SpecError, match=r"on a mesh.*Loader\(fetch\(dataset\), batch_size\)"):
            Loader(there, 2, mesh=mesh)
    for nothing in ({"x": [1, 2]}, 3, None, {"x": "text"}, {}):
        with pytest.raises(SpecError, match="can't read"):
            Loader(nothing, 2, mesh=mesh)
    names = np.memmap(tmp_path / "names", "S4", "w+", shape=3)
    with pytest.raises(SpecError, match=r"got dict, with a memmap at \['names'\]"):
        Loader({"x": torch.ones(3), "names": names}, 2, mesh=mesh)
    with pytest.raises(SpecError, match=r"of tensors.*got bytes_.*give a collate_fn"):
        list(Loader(names, 2, mesh=mesh))
    with pytest.raises(SpecError, match=r"got dict, with a str at \['names'\]\[0\]"):
        Loader({"x": torch.ones(2), "names": ["a", "b"]}, 2, mesh=mesh)
    with pytest.raises(SpecError, match="prefetch"):
        Loader(torch.ones(3), 2, mesh=mesh, prefetch=-1)
    with pytest.raises(SpecError, match="batch_size"):
        Loader(torch.ones(3), 0, mesh=mesh)


# -- epochs and positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_follow_the_sampler_whatever_is_read_ahead(shared_mesh, prefetch, drop_last):
    mesh = shared_mesh({"data": 2})
    loader = Loader(torch.arange(10), 4, mesh=mesh, seed=3, prefetch=prefetch, drop_last=drop_last)
    sampler = Sampler(10, 4, seed=3, drop_last=drop_last)
    seen = []
    for epoch in range(3):
        assert loader.state_dict() == {"epoch": epoch, "step": 0}
        for step, batch in enumerate(loader):
            assert torch.equal(batch.full(), torch.cat(dealt(sampler.batch(epoch, step), 2)))
            last = step == len(loader) - 1
            assert loader.state_dict() == (
                {"epoch": epoch + 1, "step": 0} if last else {"epoch": epoch, "step": step + 1}
            )
            seen.append(tuple(batch.shape))
    assert seen == [(4,), (4,), (2,)] * 3 if not drop_last else [(4,), (4,)] * 3
    first, second = (torch.cat([sampler.batch(epoch, step) for step in range(len(sampler))]) for epoch in range(2))
    assert not torch.equal(first, second)
    assert "prefetch" not in repr(loader) and "length=10" in repr(loader)


def test_loops_that_are_left_early_begin_with_the_same_samples(shared_mesh, recwarn):
    mesh = shared_mesh({"data": 2})

    def left_after(loader, *counts):
        for count in counts:
            for number, _ in enumerate(loader, 1):
                if number == count:
                    break

    shuffled = Loader(torch.arange(40), 4, mesh=mesh)
    left_after(shuffled, 1, 1, 1, 3, 3)  # next(iter(loader)) is asked for often
    left_after(Loader(torch.arange(40), 4, mesh=mesh, shuffle=False), 3, 3, 3, 3)
    assert [*shuffled] and not recwarn.list
    for epoch in range(1, 5):
        left_after(shuffled, 3)
        shuffled.load_state_dict({"epoch": epoch + 1, "step": 0})
    assert not recwarn.list
    left_after(shuffled, 3, 3, 3)
    with pytest.warns(UserWarning, match=r"begins epoch 5 again, after 3 left.*left after 3 batches.*another epoch"):
        left_after(shuffled, 3)
    looked_at = Loader(torch.arange(40), 4, mesh=mesh)
    left_after(looked_at, *[1] * 10)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"begins epoch 0 again, after 10 left early.*after 1 batch\).*one iterator"):
        left_after(looked_at, 1)


def test_breaking_off_and_starting_again(shared_mesh):
    mesh = shared_mesh({"data": 2})
    loader = Loader(torch.arange(10), 4, mesh=mesh)
    first = [next(iter(loader)).full().tolist() for _ in range(2)]
    for batch in loader:
        assert batch.full().tolist() == first[0] == first[1]
        break
    assert loader.state_dict() == {"epoch": 0, "step": 1}
    whole = [batch.full().tolist() for batch in loader]
    assert whole[0] == first[0] and len(whole) == 3 and loader.state_dict() == {"epoch": 1, "step": 0}
    assert next(iter(loader)).full().tolist() != first[0]


@on_both
def test_going_on_with_another_number_of_ranks(shared_mesh, backend):
    """The minibatches that remain are the same ones; only who holds what differs."""
    data = Squares(23)
    for reached in (1, 3, 5, 6):
        loader = Loader(data, 5, mesh=shared_mesh({"data": 2}, backend), seed=4)
        batches = iter(loader)
        for _ in range(min(reached, 5)):
            next(batches)
        if reached > 5:
            batches = iter(loader)
            next(batches)
        state = loader.state_dict()
        assert state == ({"epoch": 0, "step": reached} if reached < 5 else {"epoch": 1, "step": reached - 5})
        other = Loader(data, 5, mesh=shared_mesh({"data": 4}, backend), seed=4)
        other.load_state_dict(state)
        assert other.state_dict() == state
        rest = [sorted(batch["y"].full().tolist()) for batch in batches]
        if reached == 5:
            rest = [sorted(batch["y"].full().tolist()) for batch in loader]
        assert [sorted(batch["y"].full().tolist()) for batch in other] == rest != []
        again = [sorted(batch["y"].full().tolist()) for batch in other]
        assert again == [sorted(batch["y"].full().tolist()) for batch in loader] and len(again) == 5


@pytest.mark.parametrize("shuffle", [False, True])
def test_going_on_with_another_batch_size(shared_mesh, shuffle):
    """The samples that remain are the same ones; a sample that begins no batch is refused, and so is another order."""
    mesh, data = shared_mesh({"data": 2}), torch.arange(30)

    def loader(size=6, data=data, **options):
        return Loader(data, size, mesh=mesh, **{"seed": 4, "shuffle": shuffle, **options})

    going, seen = loader(), []
    for batch in going:
        seen += batch.full().tolist()
        state = json.loads(json.dumps({**going.state_dict(), "settings": going.settings}))
        if len(seen) == 12:
            break
    for size in (2, 3, 4, 12):
        other = loader(size, drop_last=True)
        other.load_state_dict(state)
        assert other.state_dict() == {"epoch": 0, "step": 12 // size}
        found = [batch.full().tolist() for batch in other]
        assert not set(seen) & {i for ids in found for i in ids} and [*map(len, found)] == [size] * (18 // size)
    with pytest.raises(SpecError, match=r"within one of its batches.*12 samples.*keep batch_size=6 .*\"step\": 2}"):
        loader(5).load_state_dict(state)
    others = {
        "length: 30, now 29": loader(data=data[:29]),
        "shuffle: ": loader(shuffle=not shuffle),
        **(
            {"seed: 4, now 5": loader(seed=5), "order: 'feistel', now 'torch'": loader(order="torch")}
            if shuffle
            else {}
        ),
    }
    for words, other in others.items():
        with pytest.raises(
            SpecError, match=rf'come in another order .*{words}.*load_state_dict\({{"epoch": 1, "step": 0}}'
        ):
            other.load_state_dict(state)
        assert other.state_dict() == {"epoch": 0, "step": 0}
        other.load_state_dict({**state, "step": 0})  # where an epoch begins, any Loader may
    if not shuffle:
        loader(seed=5).load_state_dict(state)
    with pytest.raises(SpecError, match="bad state"):
        going.load_state_dict({**state, "settings": 3})


def test_its_settings_do_not_change(shared_mesh):
    """As those of a DataLoader; it went on as before, silently."""
    loader = Loader(torch.arange(8), 4, mesh=shared_mesh({"data": 2}))
    with pytest.raises(SpecError, match=r"epoch of a Loader cannot be set: loader\.load_state_dict\("):
        loader.epoch = 3
    for name in ("batch_size", "dataset", "sampler", "shards"):
        with pytest.raises(SpecError, match=f"{name} of a Loader cannot be set: make another Loader"):
            setattr(loader, name, 2)
    scaled = spmd(lambda x: x * loader.scale, mesh=shared_mesh({"data": 2}))
    for loader.scale in (2, 3):  # the program's own
        assert float(scaled(torch.ones(()))) == loader.scale


@pytest.mark.parametrize("ask", [lambda loader: loader.state_dict()["step"], lambda loader: next(iter(loader))])
def test_a_step_cannot_ask_for_its_position(shared_mesh, ask):
    """It would be that of the moment when the step was sent to the ranks."""
    mesh = shared_mesh({"data": 2})
    loader = Loader(torch.arange(8.0), 4, mesh=mesh)
    with pytest.raises(SpecError, match=r"cannot be had in an @spmd step.*pass it as an argument"):
        spmd(lambda x: x + ask(loader), mesh=mesh)(torch.ones(()))
    assert mesh.run(lambda: loader.state_dict()["step"]) == [0, 0]
    for _ in loader:
        break
    assert mesh.run(lambda: loader.state_dict()["step"]) == [1, 1]


def test_positions_that_are_not_there(shared_mesh):
    loader = Loader(torch.arange(10), 4, mesh=shared_mesh({"data": 2}))
    for state in ({"epoch": -1, "step": 0}, {"epoch": 0, "step": 4}, {"epoch": 0, "step": -1}):
        with pytest.raises(SpecError, match="bad state"):
            loader.load_state_dict(state)
    loader.load_state_dict({"epoch": 2, "step": 3})
    assert loader.state_dict() == {"epoch": 3, "step": 0}
    sampler = Sampler(10, 4)
    assert torch.equal(next(iter(loader)).full(), torch.cat(dealt(sampler.batch(3, 0), 2)))


def test_no_batches_at_all(shared_mesh):
    with pytest.warns(UserWarning, match=r"a Loader has no batches.*got 3 samples, batch_size=4, drop_last=True"):
        loader = Loader(torch.arange(3), 4, mesh=shared_mesh({"data": 2}), drop_last=True)
    assert len(loader) == 0 and list(loader) == [] and loader.state_dict() == {"epoch": 0, "step": 0}


@on_both
def test_fewer_samples_than_ranks(shared_mesh, backend):
    mesh = shared_mesh({"data": 4}, backend)
    for dataset in (Squares(5), {"x": torch.stack([torch.arange(5), torch.arange(5) ** 2], 1), "y": torch.arange(5)}):
        batches = list(Loader(dataset, 3, mesh=mesh, shuffle=False))
        assert [tuple(batch["x"].shape) for batch in batches] == [(3, 2), (2, 2)]
        assert [shard.tolist() for shard in batches[0]["x"].shards()] == [[[0, 0]], [[1, 1]], [[2, 4]], []]
        assert [tuple(shard.shape) for shard in batches[1]["x"].shards()] == [(1, 2), (1, 2), (0, 2), (0, 2)]
        assert [shard.tolist() for shard in batches[1]["y"].shards()] == [[3], [4], [], []]


# -- who reads what ---------------------------------------------------------------------------------------------------


def test_each_rank_reads_its_own_samples_and_once(shared_mesh, tmp_path):
    mesh = shared_mesh({"data": 3})
    list(Loader(Squares(20, notes=str(tmp_path)), 6, mesh=mesh, seed=5, prefetch=3))
    sampler = Sampler(20, 6, seed=5)
    for rank, pid in enumerate(mesh.run(os.getpid)):
        read = [int(line) for line in (tmp_path / str(pid)).read_text().split()]
        assert read == torch.cat([sampler.shard(0, step, rank, 3) for step in range(4)]).tolist()
    assert not (tmp_path / str(os.getpid())).exists()


def test_reading_ahead_is_bounded(shared_mesh, tmp_path):
    mesh = shared_mesh({"data": 1})
    (pid,) = mesh.run(os.getpid)
    for prefetch in (0, 2):
        folder = tmp_path / str(prefetch)
        folder.mkdir()
        batches = iter(Loader(Squares(20, notes=str(folder)), 2, mesh=mesh, prefetch=prefetch))
        next(batches)
        mesh.run(lambda: None)  # behind what was asked for
        assert len((folder / str(pid)).read_text().split()) == 2 * (1 + prefetch)


def test_the_axis_is_data_or_the_first(shared_mesh):
    x = torch.arange(4)
    two = next(iter(Loader(x, 4, mesh=shared_mesh({"model": 2, "data": 2}), shuffle=False)))
    assert two.spec == P("data") and [s.tolist() for s in two.shards()] == [[0, 2], [1, 3]] * 2
    other = next(iter(Loader(x, 4, mesh=shared_mesh({"a": 2, "b": 2}), shuffle=False)))
    assert other.spec == P("a") and [s.tolist() for s in other.shards()] == [[0, 2], [0, 2], [1, 3], [1, 3]]


def test_two_loaders_at_once(shared_mesh):
    mesh = shared_mesh({"data": 2})
    train, test = Loader(torch.arange(8), 4, mesh=mesh, seed=1), Loader(torch.arange(100, 106), 3, mesh=mesh, seed=2)
    seen = [(a.full().sum().item(), b.full().sum().item()) for a, b in zip(train, test, strict=True)]
    assert sum(a for a, _ in seen) == 28 and sum(b for _, b in seen) == sum(range(100, 106))
    for _ in train:
        assert len(list(test)) == 2


def test_the_mesh_is_the_enclosing_one(make_mesh):
    loader = Loader(torch.arange(4), 2, shuffle=False)
    with make_mesh({"data": 2}) as mesh:
        assert [batch.mesh is mesh for batch in loader] == [True, True]


def test_random_numbers_of_a_sample_are_its_own(shared_mesh):
    """An augmentation depends on the seed, the epoch and the sample, not on the rank that reads it."""

    class Noisy(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return {"id": index, "noise": torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])}

    def epoch(axes, seed=0, skip=0):
        mesh = shared_mesh(axes)
        loader = Loader(Noisy(), 4, mesh=mesh, seed=seed)
        loader.load_state_dict({"epoch": skip, "step": 0})
        noise = {}
        for batch in loader:
            noise.update(zip(batch["id"].full().tolist(), map(tuple, batch["noise"].full().tolist()), strict=True))
        return noise

    one = epoch({"data": 1})
    assert len(set(one.values())) == 6 and one == epoch({"data": 3}) == epoch({"data": 3})
    assert one != epoch({"data": 1}, seed=1) and one != epoch({"data": 1}, skip=1)

    mesh = shared_mesh({"data": 1})
    mesh.run(lambda: (np.random.seed(1), random.seed(1)))
    before = mesh.run(lambda: (np.random.get_state()[1].tolist(), random.getstate()))
    list(Loader(Noisy(), 4, mesh=mesh))
    assert mesh.run(lambda: (np.random.get_state()[1].tolist(), random.getstate())) == before


SHARED = random.Random(0)


class Shifts:
    """A transform with a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, x):
        return x + torch.rand((), generator=self.generator)


class Drawing(Dataset):
    def __init__(self, draw=None):
        self.draw, self.rng = draw, np.random.default_rng(0)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.draw(torch.zeros(())) if self.draw else self.rng.random()


def drawn(x):
    return x + SHARED.random()


def noisy(samples):
    return torch.tensor(samples) * SHARED.random()


GENERATORS = {
    "its own": (Drawing(), {}, r"drawn from Drawing\.rng"),
    "a transform's": (Subset(Drawing(Shifts()), range(4)), {}, r"drawn from Subset\.dataset\.draw\.generator"),
    "a global one": (Drawing(drawn), {}, "drawn from SHARED"),
    "a stream's": (Stream([0, 1, 2, 3], lambda shard: iter([1.0])).map(drawn), {}, "drawn from SHARED"),
    "of the batch": ([1.0, 2.0, 3.0], {"collate_fn": noisy}, "drawn from SHARED"),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_random_numbers_that_are_no_samples_own(shared_mesh, name):
    """Every rank draws the same ones, for samples of its own; a rank alone draws as plain torch does."""
    dataset, options, told = GENERATORS[name]
    list(Loader(dataset, 4, mesh=shared_mesh({"data": 1}), **options))
    with pytest.warns(UserWarning, match=f"the same numbers, for other samples .*{told}.*of its own; or make"):
        list(Loader(dataset, 4, mesh=shared_mesh({"data": 2}), **options))


def test_generators_that_are_made_for_each_sample(shared_mesh):
    dataset = Drawing(lambda x: x + torch.rand((), generator=torch.Generator().manual_seed(1)))
    assert len(list(Loader(dataset, 4, mesh=shared_mesh({"data": 2})))) == 2


class Seeded(Dataset):
    """Seeds a generator of its own for each sample."""

    def __init__(self, rng, seed):
        self.rng, self.seed = rng, seed

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.seed(self.rng, index)
        draw = self.rng.normalvariate if isinstance(self.rng, random.Random) else self.rng.normal
        return torch.tensor([draw(0.0, 1.0) for _ in range(700)])


def seeds(kind):
    """Gives a generator of NumPy the state that a seed would."""
    return lambda rng, index: setattr(rng.bit_generator, "state", kind(index).state)


SEEDED = {
    "Python's": (random.Random(0), random.Random.seed),
    "NumPy's old one": (np.random.RandomState(0), np.random.RandomState.seed),
    **{
        kind.__name__: (np.random.Generator(kind(0)), seeds(kind))
        for kind in (np.random.PCG64, np.random.Philox, np.random.MT19937)
    },
}


@pytest.mark.parametrize("name", SEEDED)
def test_generators_that_are_seeded_for_each_sample(shared_mesh, name, recwarn):
    rng, seed = SEEDED[name]
    assert len(list(Loader(Seeded(rng, seed), 4, mesh=shared_mesh({"data": 2})))) == 2
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"drawn from Seeded\.rng"):
        list(Loader(Seeded(rng, lambda rng, index: None), 4, mesh=shared_mesh({"data": 2})))


# -- when it goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_dataset_that_raises_is_named_and_leaves_the_mesh_usable(shared_mesh, backend, prefetch):
    mesh = shared_mesh({"data": 2}, backend)
    loader = Loader(Squares(12, fails_at=5), 4, mesh=mesh, shuffle=False, prefetch=prefetch)
    seen = []
    with pytest.raises(LookupError, match="no such square: 5") as caught:
        for batch in loader:
            seen.append(sorted(batch["y"].full().tolist()))
    assert seen in ([[0, 1, 2, 3]], [])  # a failure ends what was asked for behind it, too
    assert "in __getitem__" in str(caught.value.__cause__)
    if sys.version_info >= (3, 11):
        assert "[reading sample 5 of the Loader's Squares]" in "".join(caught.value.__notes__)
    assert len(list(Loader(Squares(12), 4, mesh=mesh))) == 3
    assert loader.state_dict() in ({"epoch": 0, "step": len(seen)}, {"epoch": 0, "step": 1})


@pytest.mark.parametrize("of_stream", [False, True])
def test_a_stop_iteration_is_not_the_end_of_a_loop(shared_mesh, of_stream):
    class Stops(Squares):
        def __getitem__(self, index):
            return next(iter(()))

    def collate(samples):
        return next(iter(()))

    mesh = shared_mesh({"data": 2})
    data = Stream([0, 4], lambda shard: range(shard, shard + 4)) if of_stream else Squares(8)
    with pytest.raises(RuntimeError, match=r"collate at .* raised StopIteration"):
        next(iter(Loader(data, 4, mesh=mesh, collate_fn=collate)))
    with pytest.raises(RuntimeError, match="sample 0 of the Stops raised StopIteration"):
        next(iter(Loader(Stops(8), 4, mesh=mesh, shuffle=False, workers=int(of_stream))))


def test_samples_of_several_sizes(shared_mesh):
    loader = Loader([torch.ones(n) for n in (1, 1, 2, 2)], 4, shuffle=False, mesh=shared_mesh({"data": 2}))
    with pytest.raises(RuntimeError, match="equal size") as caught:
        next(iter(loader))
    if sys.version_info >= (3, 11):
        assert re.search(r"collating the Loader's samples.*give a collate_fn=", "".join(caught.value.__notes__))


def test_a_loader_shipped_to_no_one_costs_nothing_and_one_is_shipped_once(shared_mesh):
    """The dataset travels with the first batch only."""
    travelled = []

    class Counted(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return index

        def __reduce__(self):
            travelled.append(1)
            return Counted, ()

    mesh = shared_mesh({"data": 2})
    loader = Loader(Counted(), 2, mesh=mesh)
    assert not travelled
    for _ in range(2):
        assert len(list(loader)) == 4
    assert len(travelled) == 1


def test_a_dataset_that_changes_between_epochs(shared_mesh):
    mesh = shared_mesh({"data": 2})
    tree, samples, x = {"x": torch.arange(4)}, [0, 1, 2, 3], torch.arange(4)
    loaders = [Loader(data, 4, mesh=mesh, shuffle=False) for data in (tree, samples, x)]

    def values(loader):
        return [(batch["x"] if isinstance(batch, dict) else batch).full().tolist() for batch in loader]

    assert [*map(values, loaders)] == [[[0, 2, 1, 3]]] * 3
    tree["x"], samples[:] = torch.arange(4, 8), range(4, 8)
    x += 4
    assert [*map(values, loaders)] == [[[4, 6, 5, 7]]] * 3
    tree["x"] = torch.arange(5)
    samples.append(4)
    x.resize_(5)
    for loader in loaders:
        with pytest.raises(SpecError, match=r"has changed its length \(expected 4, as when .* got 5\): make a new"):
            next(iter(loader))


def test_a_step_takes_the_batches_as_they_are(shared_mesh):
    mesh = shared_mesh({"data": 4})

    @spmd(mesh=mesh)
    @data_parallel
    def count(batch):
        return psum(torch.tensor(len(batch["x"])), "data"), psum(batch["y"].sum(), "data")

    totals = [tuple(int(v) for v in count(batch)) for batch in Loader(Squares(11), 5, mesh=mesh)]
    assert [n for n, _ in totals] == [5, 5, 1] and sum(total for _, total in totals) == 55
