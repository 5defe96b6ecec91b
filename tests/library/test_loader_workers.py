"""`Loader(workers=n)`: processes beside each rank that read for it; the same batches, in the same order."""

import functools
import os
import random
import signal
import socket
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from host_processes import parent_of
from patience import running, until
from scripts import launched, script
from torch.utils.data import Dataset

from spmd import Loader, MeshError, SpecError, Stream
from spmd.mesh import protocol, wire
from spmd.mesh.readers import process

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Noisy(Dataset):
    """Sample i with random numbers, and who has made it; fails, or ends its process, at one of them if told so."""

    def __init__(self, length, fails_at=None, dies_at=None):
        self.length, self.fails_at, self.dies_at = length, fails_at, dies_at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.fails_at:
            raise LookupError(f"no such sample: {index}")
        if index == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        noise = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])
        return {"id": index, "noise": noise, "large": torch.full((40_000,), index), "pid": os.getpid()}


def contents(loader):
    """Its batches, but for who has read them."""
    return [
        {name: [shard.tolist() for shard in leaf.shards()] for name, leaf in batch.items() if name in ("id", "noise")}
        for batch in loader
    ]


@pytest.mark.parametrize("shards", [None, 4])
def test_workers_give_the_same_batches(shared_mesh, shards):
    mesh, data = shared_mesh({"data": 2}), Noisy(23)
    alone = Loader(data, 4, mesh=mesh, seed=1, shards=shards)
    helped = Loader(data, 4, mesh=mesh, seed=1, shards=shards, workers=2)
    for _ in range(2):
        assert contents(helped) == contents(alone)
    for loader in (alone, helped):
        loader.load_state_dict({"epoch": 1, "step": 3})
    assert contents(helped) == contents(alone)


@pytest.mark.parametrize("shards", [None, 4])
@pytest.mark.parametrize(
    "of", [list, lambda samples: Stream(range(len(samples)), lambda index: iter([samples[index]]))]
)
def test_large_samples_are_stacked_as_without_workers(shared_mesh, of, shards):
    mesh = shared_mesh({"data": 2})
    samples = [
        {"x": torch.rand(64, 80, 3).permute(2, 0, 1), "y": np.random.rand(90, 100), "z": (torch.rand(20_000).half(), i)}
        for i in range(9)
    ]
    kinds = []
    for workers in (0, 2):
        batches = list(Loader(of(samples), 4, mesh=mesh, shards=shards, workers=workers))
        shards_of = [[leaf.shards() for leaf in (batch["x"], batch["y"], *batch["z"])] for batch in batches]
        kinds.append(
            [[(x.dtype, x.shape, x.stride(), x.tolist()) for x in each] for leaves in shards_of for each in leaves]
        )
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) == 3 * 4 and kinds[0][-1][1][1] == (0,)  # of the last batch one rank has nothing


def test_workers_are_processes_of_their_own_and_go_with_the_loader(shared_mesh):
    mesh = shared_mesh({"data": 2})
    loader = Loader(Noisy(16), 4, mesh=mesh, workers=2)
    pids = {pid for batch in loader for pid in batch["pid"].full().tolist()}
    assert len(pids) == 4 and not pids & {os.getpid(), *mesh.run(os.getpid)}
    again = {pid for batch in loader for pid in batch["pid"].full().tolist()}
    assert again == pids
    (first, second) = next(iter(Loader(Noisy(2), 2, mesh=mesh, shuffle=False, workers=1)))["large"].shards()
    first += 1  # a rank's own copy, which it may write to
    assert first.tolist() == [[1] * 40_000] and second.tolist() == [[1] * 40_000]
    del loader
    mesh.run(lambda: None)
    assert until(lambda: not any(map(running, pids)))


class Surroundings(Noisy):
    """Where a sample was read."""

    def __getitem__(self, index):
        found = os.getcwd(), os.environ.get("READ_FOR"), sys.path[0], os.getppid(), os.getpid()
        return {"id": index, "found": torch.tensor(list(repr(found).encode().ljust(1000)))}


def test_workers_have_the_surroundings_of_their_rank_and_end_with_it(make_mesh, tmp_path):
    """They are forked where the rank was, so that the rank that replaces a dead one has its own in milliseconds."""
    mesh = make_mesh({"data": 2})

    def changed(folder):
        os.chdir(folder)
        os.environ["READ_FOR"] = sys.path[0] = str(mesh.rank)

    def reads(loader):
        return [eval(bytes(shard[0].tolist())) for shard in next(iter(loader))["found"].shards()]

    mesh.run(changed, str(tmp_path))
    loader = Loader(Surroundings(8), 2, mesh=mesh, shuffle=False, workers=1)
    found = reads(loader)
    (forks,) = {parent_of(pid) for pid in mesh.run(os.getpid)}
    assert [one[:4] for one in found] == [(str(tmp_path), str(rank), str(rank), forks) for rank in range(2)]
    os.kill(mesh.run(os.getpid)[1], signal.SIGKILL)
    assert until(lambda: not running(found[1][4])) and running(found[0][4])
    again = reads(loader)
    assert again[0] == found[0] and again[1][3] == forks and again[1][4] != found[1][4]


def test_an_exception_names_the_sample_and_the_loader_goes_on(shared_mesh):
    mesh = shared_mesh({"data": 2})
    loader = Loader(Noisy(12, fails_at=9), 4, mesh=mesh, shuffle=False, workers=2, prefetch=0)
    with pytest.raises(LookupError, match="no such sample: 9") as caught:
        for _ in loader:
            pass
    assert loader.state_dict() == {"epoch": 0, "step": 2}
    assert "in __getitem__" in str(caught.value.__cause__)
    if sys.version_info >= (3, 11):
        assert "[reading sample 9 of the Loader's Noisy]" in "".join(caught.value.__notes__)
    with pytest.raises(LookupError):
        list(loader)
    assert len(list(Loader(Noisy(12), 4, mesh=mesh, workers=2))) == 3


class DiesOnce(Noisy):
    """Ends the process that reads sample 9, the first time."""

    def __init__(self, length, mark):
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, index):
        if index == 9 and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_is_killed_is_named_with_its_sample_and_loses_nothing(shared_mesh, tmp_path):
    mesh = shared_mesh({"data": 2})
    whole = contents(Loader(Noisy(20), 4, mesh=mesh, seed=3, shuffle=False))
    loader = Loader(DiesOnce(20, str(tmp_path / "mark")), 4, mesh=mesh, seed=3, shuffle=False, workers=2, prefetch=0)
    seen = []
    with pytest.raises(MeshError, match=r"was killed by SIGKILL \(got sample 9 of the DiesOnce\).*state_dict"):
        for batch in loader:
            seen += contents([batch])
    assert seen == whole[:2] and loader.state_dict() == {"epoch": 0, "step": 2}
    loader.load_state_dict(loader.state_dict())
    assert contents(loader) == whole[2:]


def kill_the_next_at_once():
    """On a rank: the next worker is killed before it has been sent anything."""
    from patience import HANGS, end_within

    from spmd.mesh.driver import spawn

    fork = spawn.Zygote.fork

    def forked(self, *request):
        spawn.Zygote.fork = fork
        pid, pidfd = fork(self, *request)
        os.kill(pid, signal.SIGKILL)
        assert end_within(HANGS, [pid])
        return pid, pidfd

    spawn.Zygote.fork = forked


def test_a_worker_that_is_killed_as_it_begins_is_told(make_mesh):
    mesh = make_mesh({"data": 1})
    mesh.run(kill_the_next_at_once)
    loader = Loader(torch.arange(8), 4, mesh=mesh, shuffle=False, workers=1)
    with pytest.raises(MeshError, match=r"a process that reads for the Loader was killed by SIGKILL"):
        next(iter(loader))
    assert [batch.full().tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


CHANGING = """
import torch
from spmd import Loader, Mesh, Stream

mesh = Mesh({"data": 1})
for workers in (0, 1):
    samples, tree = [0, 1], {"x": torch.arange(2)}
    for data in (samples, tree, Stream([0], lambda _: iter(samples))):
        loader = Loader(data, 2, mesh=mesh, shuffle=False, workers=workers)
        for batch in (batch for epoch in range(3) for batch in loader):
            print(batch["x"].full().tolist() if data is tree else batch.full().tolist(), end=" ")
            tree["x"] = tree["x"] + 1
            samples[0] += 1
"""


def test_workers_of_launched_ranks_see_what_has_changed_between_epochs(tmp_path):
    code, out, err = launched(1, script(tmp_path, CHANGING))
    seen = "[0, 1] [1, 1] [2, 1] [3, 4] [4, 5] [5, 6] [6, 1] [7, 1] [8, 1] "
    assert (code, out) == (0, 2 * seen), err


OPENED = """
import torch
from spmd import Loader, Mesh, MeshError

class Lines(torch.utils.data.Dataset):
    def __init__(self):
        self.file = None
    def __len__(self):
        return 2
    def __getitem__(self, index):
        self.file = self.file or open(__file__, "rb")
        return index

mesh, lines = Mesh({"data": 1}), Lines()
loader = Loader(lines, 2, mesh=mesh, shuffle=False, workers=1)
print(*[batch.full().tolist() for batch in loader])
lines[0]
try:
    next(iter(loader))
except MeshError as error:
    print(error)
"""


def test_an_open_file_in_a_dataset_of_launched_ranks_is_told(tmp_path):
    """As it is where a driver sends the dataset: read here between epochs, it would go to new workers."""
    code, out, err = launched(1, script(tmp_path, OPENED))
    assert code == 0, err
    seen, text = out.splitlines()
    assert seen == "[0, 1]" and text.startswith("a dataset cannot be sent to a process that reads for the Loader (got ")
    assert text.endswith("have __getstate__ leave it out")


def test_reading_ahead_is_bounded_in_bytes(shared_mesh, tmp_path):
    class Noted(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            (tmp_path / str(index)).touch()
            return torch.zeros(250_000)  # a megabyte

    mesh = shared_mesh({"data": 1})
    for workers, most, read in ((0, 2.5, 3), (1, 2.5, 5), (1, 0.0, 2), (0, 512.0, 5)):
        for file in tmp_path.iterdir():
            file.unlink()
        loader = Loader(Noted(), 1, mesh=mesh, shuffle=False, workers=workers, prefetch=4, prefetch_mb=most)
        batches = iter(loader)
        next(batches)
        mesh.run(lambda: None)  # behind what was asked for
        until(lambda wanted=read: len(list(tmp_path.iterdir())) >= wanted)
        assert len(list(tmp_path.iterdir())) == read, (workers, most)
        del batches, loader


def test_bad_numbers_are_refused(shared_mesh):
    for name in ("workers", "prefetch_mb"):
        with pytest.raises(SpecError, match=name):
            Loader(torch.ones(3), 2, mesh=shared_mesh({"data": 2}), **{name: -1})


def test_a_reader_whose_rank_ends_meanwhile_says_nothing(monkeypatch):
    """That of a mesh that is closed while it reads ahead, say."""
    ours, theirs = socket.socketpair()
    job = wire.dumps(functools.partial(os.close, ours.fileno()))
    asked = wire.dumps(())
    job.head = protocol.encode(protocol.Ship("job"))
    asked.head = protocol.encode(protocol.CallFunction(1, 0, (), (), "job", ()))
    for packet in (job, asked):
        wire.send(ours, packet)
    ours.detach()  # the job closes it
    board = os.memfd_create("notes")
    os.ftruncate(board, process.NOTE_BYTES)
    monkeypatch.setattr(process, "note", process.note)
    process.serve(theirs.detach(), board, 0)
