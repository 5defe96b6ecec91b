"""`Loader(Stream(...))`: data read forwards. The same batches at any number of ranks, and from any position on."""

import contextlib
import io
import itertools
import json
import os
import signal
import struct
import sys
import tarfile
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from scripts import launched, script

from spmd import Loader, PeerLost, SpecError, Stream, data_parallel, psum, restore, save, spmd, value_and_grad

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def numbers(shard):
    """Shard s has numbers 100 s to 100 s + 3 + s."""
    yield from range(100 * shard, 100 * shard + 4 + shard)


def all_of(stream, mesh, **options):
    return [batch.full().tolist() for batch in Loader(stream, 8, mesh=mesh, **options)]


def flat(batches):
    return sorted(itertools.chain(*batches))


def noisy(x):
    return torch.tensor([float(x), torch.rand(()).item(), np.random.rand()])


def pipelines():
    base = Stream(range(10), numbers)
    tokens = Stream(range(9), numbers).map(lambda x: [x] * (x % 4))
    return {
        "plain": base,
        "shuffled": base.shuffle(5).map(noisy),
        "filtered": base.filter(lambda x: x % 3).shuffle(4).map(lambda x: -x).shuffle(3),
        "drawn": base.filter(lambda x: torch.rand(()) + np.random.rand() < 1).shuffle(3),
        "packed": tokens.shuffle(4).pack(3),
        "padded": tokens.pack(5, pad=-1),
        "mixed": Stream.mix([base.shuffle(3), Stream(range(50, 54), numbers).map(lambda x: x)], [3, 1]).shuffle(2),
        "few": Stream([1, 7, 3], numbers).shuffle(4),
    }


# -- order, and exactly once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [None, 4])
def test_every_sample_comes_once_and_the_order_is_that_of_any_number_of_ranks(shared_mesh, shards):
    for name, stream in pipelines().items():
        one, three = shared_mesh({"data": 1}), shared_mesh({"data": 3})
        found = all_of(stream, one, shards=shards, seed=5)
        assert found == all_of(stream, three, shards=shards, seed=5), name
        assert found != all_of(stream, one, shards=shards, seed=6) or name == "padded"
        every = list(itertools.chain(*found))
        if name in ("plain", "mixed", "few"):
            chosen = {"plain": range(10), "mixed": [*range(10), *range(50, 54)], "few": [1, 3, 7]}[name]
            assert sorted(every) == [x for shard in chosen for x in numbers(shard)]
        if name == "filtered":
            assert sorted(-x for x in every) == [x for shard in range(10) for x in numbers(shard) if x % 3]
        if name == "padded":
            assert sorted(x for row in every for x in row if x >= 0) == sorted(
                x for shard in range(9) for x in numbers(shard) for _ in range(x % 4)
            )


def test_epochs_differ_and_come_again(shared_mesh):
    loader = Loader(Stream(range(10), numbers).shuffle(5), 8, mesh=shared_mesh({"data": 2}))
    first, second = ([batch.full().tolist() for batch in loader] for _ in range(2))
    assert first != second and flat(first) == flat(second)
    loader.load_state_dict({"epoch": 1, "step": 0})
    assert [batch.full().tolist() for batch in loader] == second
    whole = Loader(Stream(range(10), numbers), 8, mesh=shared_mesh({"data": 2}), drop_last=True, seed=1)
    assert {batch.shape[0] for batch in whole} == {8}
    uneven = Stream([2, 5], range)
    whole = Loader(uneven, 2, mesh=shared_mesh({"data": 2}), drop_last=True, shuffle=False)
    assert [batch.full().tolist() for batch in whole] == [[0, 0], [1, 1]]


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_at_any_batch_with_another_number_of_ranks(shared_mesh, workers):
    """What was left off after any batch goes on with the same batches, whoever reads them."""
    for name, stream in pipelines().items():
        if workers and name != "mixed":
            continue
        loader = Loader(stream, 8, mesh=shared_mesh({"data": 2}), seed=2, workers=workers)
        states, batches = [loader.state_dict()], []
        for batch in loader:
            batches.append(batch.full().tolist())
            states.append(loader.state_dict())
        assert len(batches) > 1
        for at, state in enumerate(states):
            if at % (5 if workers else 3):
                continue
            other = Loader(stream, 8, mesh=shared_mesh({"data": 1 if at % 2 else 3}), seed=2, workers=workers)
            other.load_state_dict(json.loads(json.dumps(state)))
            assert other.state_dict() == state
            assert [batch.full().tolist() for batch in other] == batches[at:], (name, at)


def test_a_resumed_run_reads_at_most_a_window_again(shared_mesh, tmp_path):
    def noted(shard, at=0):
        class Lines:
            def __init__(self):
                self.at = at

            def __iter__(self):
                return self

            def __next__(self):
                if self.at == 100:
                    raise StopIteration
                with open(tmp_path / "read", "a") as file:
                    file.write(f"{100 * shard + self.at}\n")
                self.at += 1
                return 100 * shard + self.at - 1

            def tell(self):
                return np.int64(self.at)  # as of an index of places in a file

        return Lines()

    mesh = shared_mesh({"data": 1})
    loader = Loader(Stream([0], noted).shuffle(7), 1, mesh=mesh, prefetch=0)
    batches = iter(loader)
    given = [next(batches).item() for _ in range(30)]
    (tmp_path / "read").unlink()
    other = Loader(Stream([0], noted).shuffle(7), 1, mesh=mesh, prefetch=0)
    other.load_state_dict(loader.state_dict())
    given.append(next(iter(other)).item())
    assert len(set(given)) == 31
    read = [int(line) for line in (tmp_path / "read").read_text().split()]
    assert min(read) == 28 and len(read) == 7


def test_positions_that_do_not_fit_are_refused(shared_mesh):
    loader = Loader(Stream(range(10), numbers), 8, mesh=shared_mesh({"data": 2}))
    for state in ({"epoch": 0, "step": 1}, {"epoch": 0, "step": 1, "streams": "[1]"}, {"epoch": -1, "step": 0}):
        with pytest.raises(SpecError, match="bad state"):
            loader.load_state_dict(state)
    with pytest.raises(SpecError, match="bad state"):
        Loader(torch.ones(8), 8, mesh=shared_mesh({"data": 2})).load_state_dict(
            {"epoch": 0, "step": 0, "streams": "[]"}
        )


# -- training ---------------------------------------------------------------------------------------------------------


def trained(mesh, stream, folder=None, stop=None):
    """The bits of parameters after an epoch over eight virtual shards, of which the last batches are uneven."""

    @spmd(mesh=mesh)
    @data_parallel(shards=8)
    def step(w, batch):
        loss, grad = value_and_grad(lambda w, x: (w * x).sin().square().mean())(w, batch)
        return w - 0.1 * grad, loss

    loader = Loader(stream, 8, mesh=mesh, seed=3, shards=8)
    w = torch.tensor([1.0, 0.5, 0.25])
    state = {"w": w, "loader": loader}
    if folder is not None and folder.exists():
        state = restore(folder, like=state, mesh=mesh)
    for count, batch in enumerate(loader):
        state["w"], _ = step(state["w"], batch)
        if count + 1 == stop:
            save(folder, state)
            break
    return state["w"].full().numpy().tobytes()


def test_the_same_bits_at_any_number_of_ranks_and_after_a_checkpoint(shared_mesh, tmp_path):
    stream = Stream(range(10), numbers).filter(lambda x: x % 5).shuffle(3).map(noisy)
    whole = trained(shared_mesh({"data": 1}), stream)
    assert whole == trained(shared_mesh({"data": 3}), stream)
    trained(shared_mesh({"data": 2}), stream, tmp_path / "saved", stop=4)
    assert whole == trained(shared_mesh({"data": 3}), stream, tmp_path / "saved")


def test_the_same_bits_where_a_rank_s_first_virtual_stream_has_ended(shared_mesh):
    """On three ranks each has one of the shards that are left, and they add up as a + (b + c) all the same."""
    found = []
    for size in (1, 2, 3, 4):
        mesh = shared_mesh({"data": size})

        @spmd(mesh=mesh)
        @data_parallel(shards=4)
        def slope(w, batch):
            return value_and_grad(lambda w, x: (w * x).mean())(w, batch)

        stream = Stream([[0.0], [0.0, 1.0], [0.0, 1e8], [0.0, -1e8]], iter).map(torch.tensor)
        *_, last = Loader(stream, 4, mesh=mesh, shuffle=False, shards=4)
        loss, grad = slope(torch.tensor(1.0), last)
        found.append((len(last.full()), loss.item(), grad.item()))
    assert found == [found[0]] * 4 and found[0] == pytest.approx((3, 1 / 3, 1 / 3))


def test_a_step_weighs_uneven_parts_by_their_samples(shared_mesh):
    mesh = shared_mesh({"data": 3})

    @spmd(mesh=mesh)
    @data_parallel
    def mean(batch):
        return value_and_grad(lambda w, x: (w * x).mean())(torch.tensor(1.0), batch.double())[0], psum(
            torch.tensor(len(batch)), "data"
        )

    for batch in Loader(Stream(range(10), numbers), 8, mesh=mesh, seed=1):
        found, count = mean(batch)
        assert float(found) == pytest.approx(batch.full().double().mean().item()) and int(count) == len(batch.full())


LAUNCHED = """
import json, sys, torch
from spmd import Loader, Mesh, Stream

def numbers(shard):
    yield from range(100 * shard, 100 * shard + 4 + shard)

mesh = Mesh({"data": -1})
loader = Loader(Stream(range(10), numbers).shuffle(5), 8, mesh=mesh, seed=5, workers=int(sys.argv[1]))
found = []
for batch in loader:
    found.append(batch.full().tolist())
    state = loader.state_dict()
    if len(found) == 3:
        break
loader.load_state_dict(state)
found += [batch.full().tolist() for batch in loader]
if mesh.rank == 0:
    print(json.dumps(found))
mesh.close()
"""


def test_launched_ranks_have_the_same_batches(shared_mesh, tmp_path):
    status, out, err = launched(2, script(tmp_path, LAUNCHED), "0")
    assert status == 0, err
    stream = Stream(range(10), numbers).shuffle(5)
    assert json.loads(out) == all_of(stream, shared_mesh({"data": 1}), seed=5)


def goes_on(loader):
    """The batches behind its position; a first try may meet the rank's end."""
    state = loader.state_dict()
    for _ in range(2):
        loader.load_state_dict(state)
        with contextlib.suppress(PeerLost):
            return list(loader)
    raise AssertionError("it was lost again")


def test_a_rank_that_is_replaced_goes_on_where_its_streams_are(make_mesh):
    mesh = make_mesh({"data": 2})
    stream = Stream(range(10), numbers).shuffle(5)
    whole = all_of(stream, make_mesh({"data": 1}), seed=5)
    loader, found = Loader(stream, 8, mesh=mesh, seed=5, prefetch=1), []
    for batch in loader:
        found.append(batch.full().tolist())
        if len(found) == 2:
            os.kill(mesh.run(os.getpid)[1], signal.SIGKILL)
            break
    for batch in goes_on(loader):
        found.append(batch.full().tolist())
    assert found == whole


# -- files ------------------------------------------------------------------------------------------------------------


def written(folder: Path) -> dict[str, Stream]:
    """The numbers 0 to 39 in four files of each kind."""
    paths = {kind: [folder / f"{part}.{kind}" for part in range(4)] for kind in ("jsonl", "bin", "tar", "parquet")}
    for part in range(4):
        values = range(10 * part, 10 * part + 10)
        paths["jsonl"][part].write_text("".join(f'{{"x": {x}}}\n' for x in values))
        paths["bin"][part].write_bytes(b"".join(struct.pack("<q", x) for x in values))
        with tarfile.open(paths["tar"][part], "w") as tar:
            for x in values:
                for extension, data in (("x.txt", str(x).encode()), ("y.txt", b"y")):
                    about = tarfile.TarInfo(f"folder/{x:03}.{extension}")
                    about.size = len(data)
                    tar.addfile(about, io.BytesIO(data))
    streams = {
        "jsonl": Stream.jsonl(paths["jsonl"]).map(lambda row: row["x"]),
        "bin": Stream.records(paths["bin"], 8).map(lambda record: struct.unpack("<q", record)[0]),
        "tar": Stream.tar(paths["tar"]).map(lambda sample: int(sample["x.txt"])),
    }
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return streams
    for part, path in enumerate(paths["parquet"]):
        table = pyarrow.table({"x": list(range(10 * part, 10 * part + 10)), "y": [0] * 10})
        pyarrow.parquet.write_table(table, path, row_group_size=4)
        with (
            pyarrow.OSFile(str(path.with_suffix(".arrow")), "w") as file,
            pyarrow.ipc.new_file(file, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=3)
    arrow = [path.with_suffix(".arrow") for path in paths["parquet"]]
    streams["parquet"] = Stream.parquet(paths["parquet"], columns=["x"]).map(lambda row: row["x"])
    streams["arrow"] = Stream.parquet(arrow).map(lambda row: row["x"])
    return streams


def test_files_are_read_once_and_from_any_position(shared_mesh, tmp_path):
    mesh = shared_mesh({"data": 2})
    for name, stream in written(tmp_path).items():
        loader = Loader(stream, 4, mesh=mesh, seed=1)
        found, states = [], []
        for batch in loader:
            found.append(batch.full().tolist())
            states.append(loader.state_dict())
        assert flat(found) == list(range(40)), name
        for at in (0, 4, 8):
            other = Loader(stream, 4, mesh=shared_mesh({"data": 1}), seed=1)
            other.load_state_dict(states[at])
            assert [batch.full().tolist() for batch in other] == found[at + 1 :], (name, at)


def test_files_opened_by_python_itself(shared_mesh, tmp_path):
    """They have a `tell()`, which lines of text forbid, and `open` a second argument, which is no position."""
    paths = [tmp_path / str(i) for i in range(3)]
    for i, path in enumerate(paths):
        path.write_text("".join(f"{10 * i + j}\n" for j in range(6)))
    for opened in (open, Path.open):
        loader = Loader(Stream(paths, opened).map(int), 4, mesh=shared_mesh({"data": 2}), seed=1)
        batches, states = [], []
        for batch in loader:
            batches.append(batch.full().tolist())
            states.append(loader.state_dict())
        assert flat(batches) == [10 * i + j for i in range(3) for j in range(6)]
        other = Loader(Stream(paths, opened).map(int), 4, mesh=shared_mesh({"data": 1}), seed=1)
        other.load_state_dict(states[1])
        assert [batch.full().tolist() for batch in other] == batches[2:]


# -- when it goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_what_fails_names_the_record(shared_mesh, workers):
    def failing(shard):
        yield from range(5)
        raise LookupError("no more")

    mesh = shared_mesh({"data": 2})
    with pytest.raises(LookupError, match="no more") as caught:
        list(Loader(Stream(["a", "b"], failing), 2, mesh=mesh, workers=workers))
    if sys.version_info >= (3, 11):
        assert "[reading record 5 of 'a']" in "".join(caught.value.__notes__) or "of 'b'" in str(caught.value.__notes__)


def test_a_stop_iteration_of_a_users_function_is_not_the_end(shared_mesh):
    def stops(x):
        return x != 102 or next(iter(()))

    def opened(shard):
        return next(iter(())) if shard == 1 else numbers(shard)

    mesh = shared_mesh({"data": 2})
    for stream in (
        Stream(range(4), numbers).map(stops),
        Stream(range(4), numbers).filter(stops),
        Stream(range(4), opened).map(lambda x: x),
    ):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            all_of(stream, mesh)


def test_a_position_that_is_not_plain_is_refused(shared_mesh):
    class Records:
        def __init__(self, shard, at=None):
            self.records = numbers(shard)

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.records)

        def tell(self):
            return b"token"

    loader = Loader(Stream(range(4), Records), 4, mesh=shared_mesh({"data": 2}))
    next(iter(loader))
    with pytest.raises(SpecError, match=r"tell\(\) returned.*'bytes'.*leave out the second argument"):
        loader.state_dict()


def test_an_iterator_that_is_opened_twice_is_refused(shared_mesh):
    pairs = enumerate(range(12))
    loader = Loader(Stream([0], lambda shard: pairs), 4, mesh=shared_mesh({"data": 2}))
    with pytest.raises(
        SpecError, match=r"one iterator to two virtual streams.*got <enumerate.* for 0.*a new iterator in open"
    ):
        list(loader)


def test_a_type_error_of_an_iterator_is_the_programs_own(shared_mesh):
    class Fails:
        def __iter__(self):
            raise TypeError("of the program")

    with pytest.raises(TypeError, match="of the program"):
        all_of(Stream([0], lambda shard: Fails()), shared_mesh({"data": 2}))
    with pytest.raises(SpecError, match="returned nothing to iterate over"):
        all_of(Stream([0], lambda shard: None), shared_mesh({"data": 2}))


def test_a_shard_that_has_become_shorter_is_refused(shared_mesh):
    def some(count):
        return Stream([0], lambda shard: iter(range(count))).map(lambda x: x)

    loader = Loader(some(9), 4, mesh=shared_mesh({"data": 1}), prefetch=0)
    next(iter(loader))
    shorter = Loader(some(3), 4, mesh=shared_mesh({"data": 1}))
    shorter.load_state_dict(loader.state_dict())
    with pytest.raises(SpecError, match="go on at record 4 of 0, which has fewer"):
        list(shorter)


def test_a_seed_of_numpy_draws_as_python_s(shared_mesh):
    mesh = shared_mesh({"data": 2})
    drawn = Stream([0, 10, 20, 30], numbers).map(lambda x: x + torch.rand(()))
    orders = [
        [batch.tolist() for batch in Loader(drawn, 4, mesh=mesh, seed=seed)] for seed in (7, np.int64(7), np.int64(8))
    ]
    assert orders[0] == orders[1] != orders[2]


def test_bad_arguments_are_refused(shared_mesh):
    stream = Stream([1], numbers)
    for bad in (
        lambda: Stream([], numbers),
        lambda: Stream([1], 3),
        lambda: Stream([iter([1, 2])], list),  # which the first that opens it would use up
        lambda: Stream([(i for i in range(2))], iter),
        lambda: stream.shuffle(0),
        lambda: stream.pack(1.5),
        lambda: stream.map(3),
        lambda: Stream.mix([]),
        lambda: Stream.mix([stream], [0]),
        lambda: Stream.jsonl("one path"),
        lambda: Loader(stream, 6, shards=4),
        lambda: Loader(stream, True),
        lambda: Loader(stream, 2, seed="a"),
        lambda: Loader(stream, 2, shuffle="no"),
    ):
        with pytest.raises(SpecError):
            bad()
    with pytest.raises(SpecError, match="not a sequence"):
        list(Loader(stream.map(torch.tensor).pack(2), 2, mesh=shared_mesh({"data": 2})))
    with pytest.raises(TypeError, match="known only when it has been read"):
        len(Loader(stream, 2))
    assert "1 shards.shuffle(3)" in repr(Loader(stream.shuffle(3), 2))
