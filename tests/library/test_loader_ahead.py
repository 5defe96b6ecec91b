"""Several batches in one message of the driver's: each is as if it had been asked for alone."""

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from patience import until
from torch.utils.data import Dataset

from spmd import Loader, P, PeerLost, Sampler, SpecError, Stream, data_parallel, psum, spmd

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Numbers(Dataset):
    """Sample i is i, as often as `lengths[i]` says; when some are read something happens before."""

    def __init__(self, length, before=None, lengths=None):
        self.length, self.before, self.lengths = length, before or {}, lengths

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.before:
            self.before[index]()
        return torch.full((1 if self.lengths is None else self.lengths[index],), index)


def die_once(file: Path):
    """What kills the process that calls it, the first time."""

    def die():
        if not file.exists():
            file.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def fail(what):
    def failing():
        raise LookupError(what)

    return failing


def truth(loader, epoch=0, ranks=2):
    """The batches of an epoch, as they are over two ranks."""
    ids = [loader.sampler.batch(epoch, step) for step in range(len(loader))]
    return [torch.cat([each[rank::ranks] for rank in range(ranks)]).tolist() for each in ids]


def of(batch):
    return batch.full().flatten().tolist()


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Batches count as read in no time, however busy the machine is; call it to have that measured."""
    from spmd.mesh.readers import asking

    measured = asking.BRIEF_SECONDS
    monkeypatch.setattr(asking, "BRIEF_SECONDS", 1e9)
    return lambda: monkeypatch.setattr(asking, "BRIEF_SECONDS", measured)


@pytest.fixture
def requests(monkeypatch):
    """By mesh how many batches each message has asked for."""
    from spmd.mesh import protocol
    from spmd.mesh.driver.session import DriverSession

    found, tell = [], DriverSession.tell

    def noted(self, message, *args, **options):
        if isinstance(message, protocol.FillValues):
            found.append(len(message.batches))
        return tell(self, message, *args, **options)

    monkeypatch.setattr(DriverSession, "tell", noted)
    return found


# -- how many ---------------------------------------------------------------------------------------------------------


def test_a_message_asks_for_several(shared_mesh, requests):
    loader = Loader(torch.arange(80), 4, mesh=shared_mesh({"data": 2}), prefetch=8)
    assert [of(batch) for batch in loader] == truth(loader)
    assert requests == [1, 8, 7, 4]  # what the first one is like says how many may be asked for
    requests.clear()
    assert len(list(Loader(torch.arange(80), 4, mesh=shared_mesh({"data": 2})))) == 20
    assert requests == [1] + 9 * [2] + [1]
    requests.clear()
    assert len(list(Loader(torch.arange(80), 4, mesh=shared_mesh({"data": 2}), prefetch=0))) == 20
    assert requests == 20 * [1]


@pytest.mark.parametrize("of_stream", [False, True])
def test_batches_that_take_long_to_read_are_asked_for_one_by_one(shared_mesh, requests, brief, of_stream):
    brief()
    slow = dict.fromkeys(range(12), lambda: time.sleep(0.01))

    def numbers(shard):
        yield from (Numbers(40, slow)[index] for index in range(shard, 40, 2))

    source = Stream([0, 1], numbers) if of_stream else Numbers(40, slow)
    asked = []
    for _ in Loader(source, 4, mesh=shared_mesh({"data": 2}), shuffle=False, prefetch=4):
        asked.append(sum(requests))
    assert requests[:5] == [1] * 5  # of the first three batches nobody has been quick
    assert asked[:3] == [5, 6, 7]


def test_megabytes_leave_several_for_a_message(shared_mesh, requests):
    batches = Loader([torch.zeros(1 << 15)] * 80, 4, mesh=shared_mesh({"data": 2}), prefetch=64, prefetch_mb=2.2)
    assert len(list(batches)) == 20
    assert len(requests) == 4 and max(requests) == 8


@pytest.mark.parametrize("of_stream", [False, True])
def test_no_more_is_held_than_may_be(shared_mesh, requests, of_stream):
    """In numbers, and in megabytes: a batch has one on each rank."""
    mesh, size = shared_mesh({"data": 2}), 1 << 18

    def million(_):
        yield from (torch.zeros(size // 2) for _ in range(20))

    source = Stream([0, 1], million) if of_stream else [torch.zeros(size // 2)] * 40
    for prefetch, megabytes, most in ((3, 100, 3), (8, 2.2, 2), (8, 0.1, 1)):
        requests.clear()
        taken = 0
        for _ in Loader(source, 4, mesh=mesh, prefetch=prefetch, prefetch_mb=megabytes):
            taken += 1
            assert sum(requests) - taken <= (0 if megabytes < 1 else most)
        assert taken == 10 and max(requests) == most


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("fails", [[20], [21], [20, 21], [20, 25], [29, 20], [21, 24]])
def test_an_exception_is_raised_at_its_batch(shared_mesh, fails, workers):
    """Whichever rank reads it, and whatever fails behind it; those before it are delivered."""
    mesh = shared_mesh({"data": 2})
    data = Numbers(40, {index: fail(f"no {index}") for index in fails})
    loader = Loader(data, 4, mesh=mesh, shuffle=False, prefetch=8, workers=workers)
    found = []
    with pytest.raises(LookupError, match=r"no 2[01]") as caught:
        for batch in loader:
            found.append(of(batch))
    assert found == truth(loader)[:5] and loader.state_dict() == {"epoch": 0, "step": 5}
    assert "in failing" in str(caught.value.__cause__)
    if sys.version_info >= (3, 11):
        notes = "".join(caught.value.__notes__)
        assert "[reading sample 2" in notes and "of the Loader's Numbers]" in notes and "[raised on rank" in notes

    data.before.clear()
    loader = Loader(data, 4, mesh=mesh, shuffle=False, prefetch=8, workers=workers)
    loader.load_state_dict({"epoch": 0, "step": 5})
    assert [of(batch) for batch in loader] == truth(loader)[5:]


def test_a_stream_fails_at_its_batch(shared_mesh):
    def failing(shard):
        yield from (torch.tensor(shard + i) for i in range(5))
        raise LookupError("no more")

    loader, found = Loader(Stream([0, 10], failing), 2, shuffle=False, mesh=shared_mesh({"data": 2}), prefetch=8), []
    with pytest.raises(LookupError, match="no more"):
        for batch in loader:
            found.append(of(batch))
    assert found == [[i, 10 + i] for i in range(5)]


@pytest.mark.parametrize("fails", [[6], [6, 9], [0, 38], [*range(3, 38)]])
def test_who_goes_on_after_an_exception_gets_all_other_batches(shared_mesh, fails):
    """It is not told that the epoch is over: a launched rank would begin another one than its peers."""
    data = Numbers(40, {index: fail(f"no {index}") for index in fails})
    loader = Loader(data, 4, mesh=shared_mesh({"data": 2}), shuffle=False, prefetch=3)
    batches, found, failed = iter(loader), [], 0
    while True:
        try:
            found.append(of(next(batches)))
        except LookupError:
            failed += 1
        except StopIteration:
            break
    bad = {index // 4 for index in fails}
    assert found == [batch for step, batch in enumerate(truth(loader)) if step not in bad] and failed == len(bad)
    assert loader.state_dict() == {"epoch": 1, "step": 0} and next(batches, None) is None


def test_a_loop_can_be_closed(shared_mesh):
    with contextlib.closing(iter(Loader(Numbers(40, {}), 4, mesh=shared_mesh({"data": 2})))) as batches:
        next(batches)
    assert next(batches, None) is None


def test_who_goes_on_after_a_stream_has_failed(shared_mesh):
    def failing(shard):
        yield from map(torch.tensor, range(6))
        raise LookupError("no 6")

    batches = iter(Loader(Stream([0], failing), 4, mesh=shared_mesh({"data": 2}), shuffle=False))
    assert of(next(batches)) == [0, 1, 2, 3]
    with pytest.raises(LookupError, match="no 6"):
        next(batches)
    for _ in range(2):
        with pytest.raises(SpecError, match=r"Stream can't go on after an error.*got LookupError at .*'step': 1"):
            next(batches)


def test_a_batch_whose_rank_was_killed_is_read_by_who_goes_on(make_mesh, tmp_path):
    class Deadly:
        def __len__(self):
            return 12

        def __getitem__(self, index):
            if index == 5 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os._exit(3)
            return torch.tensor(index)

    loader = Loader(Deadly(), 4, mesh=make_mesh({"data": 2}, on_loss="raise"), shuffle=False, prefetch=0)
    batches = iter(loader)
    assert sorted(of(next(batches))) == [0, 1, 2, 3]
    with pytest.raises(PeerLost):
        next(batches)
    assert [sorted(of(batch)) for batch in batches] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_an_exception_that_nobody_comes_to_is_nobodys(shared_mesh):
    mesh = shared_mesh({"data": 2})
    for batch in Loader(Numbers(40, {9: fail("no")}), 4, mesh=mesh, shuffle=False, prefetch=8):
        if int(batch.full()[-1]) == 7:
            break
    assert mesh.run(lambda: 1) == [1, 1]


@pytest.mark.parametrize("dies", [6, 19, 21])
def test_a_rank_that_is_killed_between_batches_of_a_message_reads_them_again(make_mesh, tmp_path, dies):
    mesh = make_mesh({"data": 2})

    @spmd(mesh=mesh)
    @data_parallel
    def total(batch):
        return psum(batch.sum(), "data")

    data = Numbers(40, {dies: die_once(tmp_path / "dead")})
    loader = Loader(data, 4, mesh=mesh, shuffle=False, prefetch=8)
    found, totals = [], []
    for batch in loader:
        totals.append(total(batch))
        found.append(of(batch))
    assert (tmp_path / "dead").exists()
    assert found == truth(loader) and [int(each) for each in totals] == [sum(each) for each in found]
    assert [of(batch) for batch in loader] == found  # another epoch, on the rank that is there now


@pytest.mark.parametrize("seconds", [0, 0.15])
def test_no_process_reads_a_sample_twice(make_mesh, tmp_path, brief, seconds):
    """Whether a rank takes the place of one that dies within a message, or after its batches were taken."""
    if seconds:
        brief()

    class Noted(Numbers):
        def __getitem__(self, index):
            time.sleep(seconds)
            with open(tmp_path / f"read by {os.getpid()}", "a") as file:
                file.write(f"{index}\n")
            return super().__getitem__(index)

    mesh = make_mesh({"data": 2})
    loader = Loader(Noted(40, {21: die_once(tmp_path / "dead")}), 4, mesh=mesh, shuffle=False, prefetch=8)
    batches = list(loader)
    assert [of(batch) for batch in batches] == truth(loader)
    os.kill(mesh.driver.pids[1], signal.SIGKILL)
    assert [of(batch) for batch in batches] == truth(loader)
    read = [[int(line) for line in path.read_text().split()] for path in tmp_path.glob("read by *")]
    assert len(read) == 4 and all(len(each) == len({*each}) for each in read)


def test_a_stream_loses_nothing_with_a_rank(make_mesh, tmp_path):
    def numbers(shard):
        yield from (torch.tensor(shard + i) for i in range(10))

    die = die_once(tmp_path / "dead")

    def dies(x):
        if int(x) == 15:
            die()
        return x

    loader = Loader(Stream([0, 10], numbers).map(dies), 2, shuffle=False, mesh=make_mesh({"data": 2}), prefetch=8)
    assert [of(batch) for batch in loader] == [[i, 10 + i] for i in range(10)]
    assert (tmp_path / "dead").exists()


def test_ranks_that_are_killed_over_and_over_lose_and_repeat_nothing(make_mesh):
    """While batches of other shapes come in turns, so that ranks have something new to tell, or nothing."""
    mesh = make_mesh({"data": 2})
    lengths = [1 + (index // 16) % 2 for index in range(240)]
    lengths[100:140] = [3] * 40
    loader = Loader(Numbers(240, lengths=lengths), 4, mesh=mesh, shuffle=False, prefetch=5)
    found, expected = [], [(4, lengths[4 * step]) for step in range(60)]
    for step, batch in enumerate(loader):
        found.append((tuple(batch.shape), of(batch)))
        if step % 9 == 4:
            os.kill(mesh.driver.pids[step % 2], signal.SIGKILL)
    assert [shape for shape, _ in found] == expected
    samples = [ids for each in truth(loader) for ids in each]
    assert list(itertools.chain(*(ids for _, ids in found))) == [i for i in samples for _ in range(lengths[i])]


def test_what_is_not_new_is_that_of_the_task_that_the_request_names():
    """Whatever answers the driver has missed or not taken yet."""
    from spmd.mesh import trees
    from spmd.mesh.rank.state import RankState

    a, b = (trees.flatten([0] * length)[1] for length in (1, 2))
    steps = [  # batches, task, what the driver knows, whether that is all
        ([a], 5, 0, False),
        ([a, a], 6, 0, False),
        ([a, a], 7, 5, True),
        ([a, b], 8, 7, False),
        ([b], 9, 7, False),  # the answer to 8 is on its way, or was dropped
        ([b], 10, 8, True),
        ([b], 11, 9, True),
        ([a, b], 12, 11, False),
        ([b, a], 13, 12, False),
        ([a], 14, 12, False),
        ([a], 15, 13, True),
    ]
    rank = SimpleNamespace(_described={})
    for batches, task, known, nothing_new in steps:
        found = [RankState.description(rank, "reader", batch, [], task) for batch in batches]
        last, since = found[-1]
        assert (since <= known and all(one is last for one, _ in found)) == nothing_new, task
    assert RankState.description(rank, "another reader", a, [], 16)[1] == 16


def test_an_interrupt_while_batches_are_read_moves_no_position(make_mesh, tmp_path):
    mesh, go_on = make_mesh({"data": 2}), tmp_path / "go on"
    loader = Loader(Numbers(40, {21: lambda: until(go_on.exists)}), 4, mesh=mesh, shuffle=False, prefetch=8)
    batches = iter(loader)
    next(batches)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        next(batches)
    timer.join()
    go_on.touch()
    loader.load_state_dict(loader.state_dict())
    assert [of(batch) for batch in loader] == truth(loader)[1:]


# -- the loop ---------------------------------------------------------------------------------------------------------


def test_a_position_that_is_loaded_in_the_loop_is_the_next(shared_mesh):
    loader = Loader(torch.arange(40), 4, mesh=shared_mesh({"data": 2}), prefetch=8)
    found = []
    for batch in loader:
        found.append(of(batch))
        if len(found) in (3, 5):
            loader.load_state_dict({"epoch": 0, "step": 8 - len(found)})
    whole = truth(loader)
    assert found == whole[:3] + whole[5:7] + whole[3:]


def test_breaking_off_and_starting_again(shared_mesh):
    mesh = shared_mesh({"data": 2})
    loader = Loader(torch.arange(40), 4, mesh=mesh, prefetch=8)
    gc.collect()  # what other tests left on the mesh goes before it is counted
    before = len(mesh.driver.values)
    for leave in (1, 2, 9):
        for step, batch in enumerate(loader, 1):
            assert of(batch) == truth(loader)[step - 1]
            if step == leave:
                break
        assert loader.state_dict() == {"epoch": 0, "step": leave}
    del batch
    assert [of(batch) for batch in loader] == truth(loader)
    mesh.run(bool)  # its message tells the ranks what to free
    assert len(mesh.driver.values) <= before


def test_two_loaders_and_steps_between_them_stay_in_order(shared_mesh):
    mesh = shared_mesh({"data": 2})
    one, other = (Loader(torch.arange(43), 4, mesh=mesh, seed=seed, prefetch=6) for seed in (1, 2))

    @spmd(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(total, a, b):
        return total * 3 % 1009 + psum((a * a - 2 * b * b).sum(), "data")

    total, expected = torch.tensor(0), 0
    for a, b in zip(one, other, strict=True):
        total = step(total, a, b)
    for x, y in zip(truth(one), truth(other), strict=True):
        expected = expected * 3 % 1009 + sum(i * i for i in x) - 2 * sum(i * i for i in y)
    assert int(total) == expected


def test_a_resize_between_batches_of_a_message(make_mesh):
    mesh = make_mesh({"data": 2})
    loader = Loader(torch.arange(46), 4, mesh=mesh, prefetch=8, seed=5)
    found, sampler = [], Sampler(46, 4, seed=5)
    for step, batch in enumerate(loader):
        if step in (2, 6):
            mesh.resize({"data": 3 if step == 2 else 1})
        found.append(sorted(of(batch)))
    assert found == [sorted(sampler.batch(0, step).tolist()) for step in range(12)]
