"""A mesh gets another size while its program goes on: the same bits under `shards=`, each sample once."""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from internals import (
    arena_bytes,
    arenas_mapped,
    newcomers_bytes,
    newcomers_class,
    newcomers_of,
    pretend_memory_is_short,
)
from patience import HANGS, end_within, until
from torch import nn

from spmd import (
    Loader,
    Mesh,
    MeshError,
    P,
    SpecError,
    axis_size,
    data_parallel,
    functional,
    optimizer,
    psum,
    put,
    restore,
    save,
    spmd,
    value_and_grad,
)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """One of its own for each test: what is resized is not shared."""
    with Mesh({"data": 2}, timeout=HANGS) as made:
        yield made


def trained(mesh: Mesh, *, shards: int | None = 4, steps: int = 8, before: Any = None) -> tuple[list[str], list[int]]:
    """After each step a hash of the parameters and the loss of a run with dropout, and the samples that it took.

    Args:
        before: step -> what is done before it, with its batch read already.
    """
    torch.manual_seed(0)
    x = torch.randn(200, 12)
    data = {"x": x, "y": (x @ torch.randn(12, 3)).argmax(1), "id": torch.arange(200)}
    # Above and below what a ledger takes; state that no number of ranks here divides.
    apply, params = functional(nn.Sequential(nn.Linear(12, 1501), nn.Dropout(0.2), nn.ReLU(), nn.Linear(1501, 3)))
    opt = optimizer(torch.optim.AdamW, lr=1e-2)
    state = opt.init(params)

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params, state, batch):
        loss, grads = value_and_grad(lambda p, b: F.cross_entropy(apply(p, b["x"]), b["y"]))(params, batch)
        params, state = opt.step(params, grads, state)
        return params, state, loss

    hashes: list[str] = []
    samples: list[int] = []
    loader = Loader(data, batch_size=32, seed=1, mesh=mesh, shards=shards)
    while True:
        for batch in loader:
            if before and len(hashes) in before:
                before[len(hashes)]()
            params, state, loss = step(params, state, batch)
            found = hashlib.sha256(loss.full().numpy().tobytes())
            for name in sorted(params):
                found.update(params[name].full().numpy().tobytes())
            hashes.append(found.hexdigest())
            samples += sorted(batch["id"].full().tolist())
            if len(hashes) == steps:
                return hashes, samples


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[str], list[int]]:
    with Mesh({"data": 2}) as mesh:
        return trained(mesh)


def to(mesh: Mesh, size: int) -> Callable[[], None]:
    return lambda: mesh.resize({"data": size})


def test_up_and_down_the_same_bits_and_samples(mesh: Mesh, undisturbed: Any) -> None:
    sizes = {1: to(mesh, 3), 3: to(mesh, 1), 4: to(mesh, 2), 7: lambda: mesh.retire(0)}
    assert trained(mesh, before=sizes) == undisturbed
    assert mesh.axes == {"data": 1} and mesh.run(lambda: axis_size("data")) == [1]


def test_the_ranks_die_on_the_way(mesh: Mesh, undisturbed: Any) -> None:
    """Old ones while new ones get ready, new ones before they are, and all as soon as they are taken."""

    def kill(pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def while_they_get_ready() -> None:
        old = mesh.driver.pids
        mesh.resize({"data": 3}, wait=False)
        assert until(lambda: newcomers_of(mesh))
        kill(newcomers_of(mesh)[:1])
        kill(old[1:])

    def at_once() -> None:
        mesh.resize({"data": 2})
        kill(mesh.driver.pids)

    assert trained(mesh, before={2: while_they_get_ready, 3: to(mesh, 3), 5: at_once}) == undisturbed
    assert mesh.size == 2


def test_the_program_goes_on_until_new_ranks_are_ready(mesh: Mesh) -> None:
    count = spmd(lambda x: psum(x, "data"), mesh=mesh)
    one = put(torch.ones(()), mesh=mesh)
    assert float(count(one)) == 2
    mesh.resize({"data": 3}, wait=False)
    assert mesh.size == 2
    assert until(lambda: float(count(one)) == 3.0) and mesh.size == 3
    mesh.resize({"data": 1}, wait=False)
    mesh.resize({"data": 2})  # the last word
    assert mesh.size == 2 and float(count(one)) == 2


def test_values_of_every_kind(mesh: Mesh) -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    last = torch.randn(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    large = torch.randn(1 << 17)
    values = {
        "cut": put(whole, P("data"), mesh=mesh),
        "small": put(torch.tensor(3), mesh=mesh),
        "empty": put(torch.empty(0, 3), mesh=mesh),
        "large": put(large, P("data"), mesh=mesh),
        "strides": put(last, mesh=mesh),
        "made": spmd(lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(large),
    }
    # Of a rank's rows, as many as it has: three and one.
    chosen = spmd(lambda x: x[x[:, 0] > 2], mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    rows = torch.tensor([3.0, 4, 5, 6, 1, 2])[:, None].repeat(1, 1 << 12)
    values["chosen"] = chosen(rows)
    gone, left = spmd(lambda x: (x + 1, x + 2), mesh=mesh)(put(large, mesh=mesh))
    cut = put([whole, whole.repeat(1, 99)], P("data"), mesh=mesh)
    del gone, cut[1]
    captured = put(torch.tensor(5.0), mesh=mesh)
    add = spmd(lambda x: x + captured.local, mesh=mesh)
    assert float(add(torch.tensor(1.0))) == 6
    mesh.resize({"data": 3})
    assert [shard.tolist() for shard in values["cut"].shards()] == whole.reshape(3, 2, 2).tolist()
    assert values["cut"].spec == P("data") and values["large"].spec == P()  # which three do not divide
    assert torch.equal(values["large"].full(), large) and torch.equal(values["made"].full(), large * 2)
    assert values["strides"].full().stride() == last.stride() and torch.equal(values["strides"].full(), last)
    assert values["small"].item() == 3 and values["empty"].shape == (0, 3)
    assert torch.equal(values["chosen"].full(), rows[:4])
    assert torch.equal(left.full(), large + 2)
    assert float(add(torch.tensor(1.0))) == 6
    mesh.resize({"data": 1})
    assert torch.equal(values["cut"].full(), whole) and torch.equal(left.full(), large + 2)
    assert torch.equal(cut[0].full(), whole)


def shards_of(array: Any) -> list[Any]:
    """Of each rank its shard, how that lies in memory, and whether it is a frozen parameter."""

    def mine() -> tuple[torch.Tensor, tuple[int, ...], bool]:
        return array.local, array.local.stride(), isinstance(array.local, nn.Parameter)

    return array.mesh.run(mine)


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}])
def test_large_values_are_cut_as_if_they_were_put(axes: dict[str, int]) -> None:
    """Whatever the shapes, and how elements lie in memory: the same shards as of a value that is put there."""
    images = torch.randn(12, 8, 24, 36)
    model = "model" if "model" in axes else None
    wholes: list[tuple[torch.Tensor, P]] = [
        (torch.randn(24, 5000), P("data")),
        (torch.randn(5000, 24), P(None, "data")),
        (torch.randn(240, 480).double(), P("data", model)),
        (torch.randn(5000, 24).T, P("data")),
        (images.contiguous(memory_format=torch.channels_last), P("data", model)),
        (nn.Parameter(torch.randn(24, 5000), requires_grad=False), P("data")),
        (torch.randn(1 << 16), P("data")),  # as small as one that lies in the ledger, where it is cut further
        (torch.randn(48, 4000), P(None, model)),
        (torch.randn(0, 4000), P("data")),
    ]
    with Mesh(axes, timeout=HANGS) as mesh:
        values = [put(whole, spec, mesh=mesh) for whole, spec in wholes]
        for size in (1, 4, 2, 1, 3):
            mesh.resize({"data": size})
            for (whole, spec), value in zip(wholes, values, strict=True):
                if len(whole) == 1 << 16 and size == 3:
                    assert value.spec == P() and torch.equal(value.full(), whole)
                    continue
                expected = shards_of(put(whole, spec, mesh=mesh))
                for (found, *how), (shard, *same) in zip(shards_of(value), expected, strict=True):
                    assert torch.equal(found, shard) and how == same


def test_memory_is_at_hand_before_the_switch(mesh: Mesh) -> None:
    """What values take, and what a step makes of them, so that this need not be waited for when it is needed."""
    nbytes = 16 << 20
    cut = put(torch.ones(nbytes // 4), P("data"), mesh=mesh)
    whole = put(torch.ones(nbytes // 4), mesh=mesh)
    mesh.resize({"data": 1}, wait=False)
    assert until(lambda: newcomers_bytes(mesh) is not None)
    assert 4 * nbytes <= newcomers_bytes(mesh) <= 6 * nbytes
    mesh.resize({"data": 2})
    assert float(cut.full().sum()) == float(whole.full().sum()) == nbytes // 4


def test_where_memory_is_short_none_is_taken_before(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then what is cut takes memory once: on the rank that has it."""
    pretend_memory_is_short(monkeypatch)
    nbytes = 32 << 20
    cut = put(torch.ones(nbytes // 4), P("data"), mesh=mesh)
    mesh.resize({"data": 4}, wait=False)
    assert until(lambda: newcomers_bytes(mesh) is not None) and newcomers_bytes(mesh) < nbytes // 2
    mesh.resize({"data": 4})
    assert arena_bytes(mesh) < nbytes + nbytes // 2
    assert float(cut.full().sum()) == nbytes // 4


@pytest.mark.parametrize("taken", [False, True])
def test_new_ranks_die_before_they_have_values(mesh: Mesh, taken: bool) -> None:
    """When they were ready and nobody listened to them, or when they were to copy what is cut: others do, in time."""
    large = torch.arange(1 << 18)
    cut, whole = put(large, P("data"), mesh=mesh), put(large, mesh=mesh)
    add = spmd(lambda x, y: x + 1, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    mesh.resize({"data": 4}, wait=False)
    assert until(lambda: newcomers_bytes(mesh) is not None)
    newcomers = newcomers_of(mesh)[1:3]
    found: list[torch.Tensor] = []
    call = threading.Thread(target=lambda: found.append(add(cut, whole).full()))
    if taken:
        for pid in newcomers:
            os.kill(pid, signal.SIGSTOP)
        call.start()
        assert until(lambda: mesh.size == 4)
    for pid in newcomers:
        os.kill(pid, signal.SIGKILL)
    if not taken:
        call.start()
    call.join()
    assert mesh.size == 4 and torch.equal(found[0], large + 1)
    assert torch.equal(cut.full(), large) and torch.equal(whole.full(), large)


def test_types_are_followed_once_over_each_axis(mesh: Mesh) -> None:
    """After a resize only where there is an axis now over which they never were; a single rank has none."""

    def body(w: torch.Tensor) -> tuple[torch.Tensor, int]:
        modes = torch.overrides._get_current_function_mode_stack()
        return w + 1, sum(type(mode).__name__ == "_Numbers" for mode in modes)

    step, follows = spmd(body, mesh=mesh), []
    w = put(torch.zeros(3), mesh=mesh)
    mesh.resize({"data": 1})
    for size in (1, 2, 3, 1, 2):
        mesh.resize({"data": size})
        follows.append([step(w)[1] > 0, step(w)[1] > 0])
    assert follows == [[False, False], [True, False]] + [[False, False]] * 3
    forgotten = spmd(lambda x: x.sum(), mesh=mesh, in_specs=P("data"))
    mesh.resize({"data": 1})
    assert float(forgotten(torch.zeros(2))) == 0
    mesh.resize({"data": 2})
    with pytest.raises(SpecError, match="psum"):
        forgotten(torch.zeros(2))


def test_batches_read_ahead_and_padded(mesh: Mesh) -> None:
    """Each sample once, whoever had read it before; the batch in hand is that of the new size."""

    def padded(samples: list[int]) -> torch.Tensor:
        return torch.stack([torch.full((max(samples) + 1,), each) for each in samples])

    seen = []
    for batch in Loader([*range(16)], 4, shuffle=False, mesh=mesh, collate_fn=padded):
        mesh.resize({"data": 3 - mesh.size})
        shards = batch.shards()
        assert len(shards) == mesh.size
        seen += sorted(int(row[0]) for shard in shards for row in shard)
    assert seen == [*range(16)]


def test_another_thread_calls_meanwhile(mesh: Mesh) -> None:
    """It goes on with the new ranks, whatever it does."""
    count = spmd(lambda x: psum(x, "data"), mesh=mesh)
    one = put(torch.ones(()), mesh=mesh)
    found: list[float] = []
    seen: list[Any] = []
    wrong: list[BaseException] = []
    over = threading.Event()

    def calls() -> None:
        while not over.is_set():
            try:
                halves = put(torch.arange(6.0), P("data"), mesh=mesh)
                seen.append((float(halves[4]), halves.full().tolist(), mesh.submit(abs, -1).result()))
                seen.append(sorted(one for batch in Loader([*range(8)], 4, mesh=mesh) for one in batch.tolist()))
                found.append(float(count(one)))
                found.append(float(sum(mesh.run(lambda: 1))))
            except BaseException as error:
                wrong.append(error)

    thread = threading.Thread(target=calls)
    thread.start()
    try:
        for size in (3, 1, 2, 3):
            mesh.resize({"data": size})
            before = len(found)
            assert until(lambda before=before: len(found) > before + 2 or wrong)
    finally:
        over.set()
        thread.join()
    assert not wrong and set(found) <= {1.0, 2.0, 3.0} and found[-1] == 3.0
    assert all(one in ((4.0, [0, 1, 2, 3, 4, 5], 1), [*range(8)]) for one in seen)


def test_ctrl_c_at_the_switch_to_new_ranks(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised once the mesh has its new size: the new ranks are heard, have all, and the old ones end."""
    value, before, hand_over = put(torch.arange(2.0), mesh=mesh), mesh.driver.pids, mesh.driver.hand_over

    def names() -> float:
        return float(value.local.sum())

    assert mesh.run(names) == [1.0] * 2

    def interrupted(*what: Any) -> None:
        hand_over(*what)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(mesh.driver, "hand_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mesh.resize({"data": 1})
    assert mesh.run(names) == [1.0] and value.full().tolist() == [0, 1]
    assert end_within(HANGS, before)


def test_ctrl_c_when_the_old_ranks_are_to_leave(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end, and leave nothing open."""
    show, before, opened = mesh.driver.receiving.show, mesh.driver.pids, len(os.listdir("/proc/self/fd"))

    def interrupted(*what: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        show(*what)

    monkeypatch.setattr(mesh.driver.receiving, "show", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mesh.resize({"data": 1})
    assert mesh.run(int) == [0] and end_within(HANGS, before)
    assert until(lambda: len(os.listdir("/proc/self/fd")) < opened)


def test_ctrl_c_when_the_new_ranks_have_just_begun(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ended, although nothing waits for them yet."""
    newcomers, begin, made = newcomers_class(), threading.Thread.start, []
    populate = newcomers._populate

    def interrupted(thread: threading.Thread) -> None:
        begin(thread)
        if thread.name == "spmd-newcomers":
            assert until(lambda: made)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(newcomers, "_populate", lambda self: (made.append(self.ranks), populate(self)))
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mesh.resize({"data": 3})
    assert len(made[0].all) == 3 and end_within(HANGS, [rank.pid for rank in made[0].all])
    assert mesh.run(os.getpid) == list(mesh.driver.pids) and mesh.size == 2


def test_interrupted_while_the_new_ranks_start(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C: they are ended, once, and the mesh goes on as it was."""
    ended, awake, main = [], threading.Event(), threading.get_ident()
    newcomers = newcomers_class()
    populate, give_up = newcomers._populate, newcomers.give_up

    def slow(self: Any) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.5)  # in which the program takes note
        awake.set()
        populate(self)

    monkeypatch.setattr(newcomers, "_populate", slow)
    monkeypatch.setattr(newcomers, "give_up", lambda self: (ended.append(self), give_up(self)))
    with pytest.raises(KeyboardInterrupt):
        mesh.resize({"data": 3})
    assert awake.is_set() and len(ended) == 1
    assert mesh.run(os.getpid) == list(mesh.driver.pids) and mesh.size == 2
    monkeypatch.undo()
    mesh.resize({"data": 3})
    assert mesh.size == 3


def test_interrupted_as_it_switches(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C just where the mesh is held for the switch: it is let go, so that other threads can resize it."""
    lock = mesh.driver.resize_lock

    class Interrupting:
        def acquire(self, blocking: bool = True) -> bool:
            held = lock.acquire(blocking)
            signal.raise_signal(signal.SIGINT)
            return held

        release, __enter__, __exit__ = lock.release, lock.__enter__, lock.__exit__

    count = spmd(lambda x: psum(x, "data"), mesh=mesh)
    one = put(torch.ones(()), mesh=mesh)
    mesh.resize({"data": 3}, wait=False)
    monkeypatch.setattr(mesh.driver, "resize_lock", Interrupting())

    def interrupted() -> bool:
        try:
            return float(count(one)) == 3.0
        except KeyboardInterrupt:
            return True

    assert until(interrupted)
    monkeypatch.undo()
    thread = threading.Thread(target=mesh.resize, args=({"data": 1},), daemon=True)
    thread.start()
    thread.join(HANGS)
    assert mesh.size == 1 and float(count(one)) == 1


def test_closed_while_new_ranks_stand_by(mesh: Mesh) -> None:
    count = spmd(lambda x: psum(x, "data"), mesh=mesh)
    one = put(torch.ones(()), mesh=mesh)
    assert float(count(one)) == 2
    mesh.resize({"data": 3}, wait=False)
    assert until(lambda: newcomers_bytes(mesh) is not None)
    mesh.close()
    with pytest.raises(MeshError, match="this mesh is closed"):
        count(one)


def test_a_batch_that_cannot_be_read_again_at_once(mesh: Mesh, tmp_path: Path) -> None:
    """It is read when it is needed next; who asked for it before the failure was known is told to call again."""
    fails, failed = tmp_path / "fails", tmp_path / "failed"

    class Data:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            if fails.exists():
                failed.touch()
                raise OSError("the disk is away")
            return index

    for batch in Loader(Data(), 8, shuffle=False, mesh=mesh):
        fails.touch()
        mesh.resize({"data": 3})
        assert until(failed.exists)
        with pytest.raises((OSError, MeshError), match=r"the disk is away|run the call again"):
            batch.full()
        fails.unlink()
        assert sorted(batch.full().tolist()) == [*range(8)]


def test_an_error_that_nobody_has_seen_is_raised_by_a_resize_as_it_is(mesh: Mesh) -> None:
    """And not as what the operating system refuses to the mesh."""

    @spmd(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        if float(x) > 1:
            raise FileNotFoundError("no data.csv")
        return x

    for value in (0.0, 1.0, 2.0):  # the last one goes on while the program does
        step(torch.tensor(value))
    with pytest.raises(FileNotFoundError, match=r"no data\.csv"):
        mesh.resize({"data": 3})
    mesh.resize({"data": 3})
    assert mesh.size == 3


def test_two_threads_resize_at_once(mesh: Mesh) -> None:
    """Both have their ranks ready, and wait for the old ones to be idle."""
    x = put(torch.arange(12.0), P("data"), mesh=mesh)
    mesh.submit(time.sleep, 2)
    threads = [threading.Thread(target=mesh.resize, args=({"data": size},)) for size in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert mesh.size in (1, 3) and torch.equal(x.full(), torch.arange(12.0))
    assert mesh.run(lambda: mesh.size) == [mesh.size] * mesh.size


def test_another_thread_saves_meanwhile(mesh: Mesh, tmp_path: Path) -> None:
    """What is saved was written by the ranks of one size."""
    x = put(torch.arange(12.0), P("data"), mesh=mesh)
    over, found = threading.Event(), list[torch.Tensor]()

    def keep_saving() -> None:
        while not over.is_set():
            saved = save(tmp_path, {"x": x}, keep=2, background=len(found) % 2 == 0)
            found.append(restore(saved.result())["x"])

    saver = threading.Thread(target=keep_saving)
    saver.start()
    for turn in range(15):
        mesh.resize({"data": 1 + turn % 3})
    over.set()
    saver.join(HANGS)
    assert found and all(torch.equal(one, torch.arange(12.0)) for one in found)


@pytest.mark.parametrize("ranks", [None, [2]])
def test_ranks_that_there_were_when_a_call_began(mesh: Mesh, ranks: list[int] | None) -> None:
    """The mesh shrinks between the choice of ranks and the call to them; it is as good as before then."""
    mesh.resize({"data": 3})

    class Function:
        def __call__(self) -> int:
            return 1

        def __reduce__(self) -> Any:
            if mesh.size == 3:
                mesh.resize({"data": 1})
            return Function, ()

    if ranks is None:
        assert mesh.run(Function()) == [1]
    else:
        with pytest.raises(MeshError, match="ranks"):
            mesh.run(Function(), ranks=ranks)
    assert mesh.run(lambda: 1) == [1] and float(put(torch.ones(()), mesh=mesh)) == 1


@pytest.mark.usefixtures("operators_are_imported")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("operation", [torch.sum, lambda a: torch.sum(a + 0), lambda a: torch.sum(a[1:]), torch.mean])
def test_torch_functions_of_arrays_at_the_switch(mesh: Mesh, operation: Callable[[Any], Any]) -> None:
    """How such a function runs depends on how its Arrays are cut, which changes as the call itself switches."""
    whole = torch.arange(8.0)  # which three do not divide
    value, found = put(whole, P("data"), mesh=mesh), []
    mesh.resize({"data": 3}, wait=False)
    assert until(lambda: found.append(float(operation(value))) or mesh.size == 3)
    assert {*found} == {float(operation(whole))}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_values(mesh: Mesh) -> None:
    whole = torch.eye(500)
    values = [put(whole.to_sparse(), mesh=mesh), put(whole.to_sparse_csr(), mesh=mesh)]
    pids = mesh.driver.pids  # a little later, perhaps, those of the ranks that replace them
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert end_within(HANGS, pids)
    for size in (2, 3, 1):
        mesh.resize({"data": size})
        assert [value.full().layout for value in values] == [torch.sparse_coo, torch.sparse_csr]
        assert all(torch.equal(value.full().to_dense(), whole) for value in values)


def test_another_axis_and_what_is_cut_over_it() -> None:
    with Mesh({"data": 1, "model": 2}) as mesh:
        columns = put(torch.arange(8.0).reshape(2, 4), P(None, "model"), mesh=mesh)
        mesh.resize({"data": 2})
        assert mesh.axes == {"data": 2, "model": 2} and mesh.size == 4
        assert [shard[0].tolist() for shard in columns.shards()] == [[0, 1], [2, 3]] * 2
        both = put(torch.arange(8.0), P(("data", "model")), mesh=mesh)
        with pytest.raises(MeshError, match="cut over several axes in one dimension"):
            mesh.resize({"data": 1})
        assert mesh.size == 4 and both.full().tolist() == [*range(8)]  # it is as it was
        del both
        mesh.retire(3)
        assert mesh.axes == {"data": 1, "model": 2} and columns.full().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_stopped_rank_leaves_at_once(make_mesh: Any) -> None:
    """With no end to the grace time a stopped rank is waited for until it goes on, or until the timeout."""
    mesh = make_mesh({"data": 3}, grace=float("inf"))
    cut, pid = put(torch.arange(6), P("data"), mesh=mesh), mesh.driver.pids[2]
    os.kill(pid, signal.SIGSTOP)
    assert until(lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text())
    mesh.retire(2)
    assert mesh.axes == {"data": 2} and cut.full().tolist() == [*range(6)] and end_within(HANGS, [pid])


def test_what_is_given_back(mesh: Mesh) -> None:
    before = mesh.driver.pids
    value = put(torch.ones(1 << 18), mesh=mesh)
    arenas = arenas_mapped()  # without those that other tests have left to be collected
    files = len(os.listdir("/proc/self/fd"))
    for size in (3, 2):
        mesh.resize({"data": size})
    assert end_within(HANGS, before)
    assert until(lambda: len(os.listdir("/proc/self/fd")) <= files and arenas_mapped() <= arenas)
    assert float(value.full().sum()) == 1 << 18


def test_what_cannot_be(mesh: Mesh) -> None:
    with pytest.raises(MeshError, match=r"unknown axis.*'model'"):
        mesh.resize({"model": 2})
    with pytest.raises(MeshError, match=r"bad size.*0"):
        mesh.resize({"data": 0})
    with pytest.raises(MeshError, match=r"so many ranks .*got 1000000000"):
        mesh.resize({"data": 10**9})
    with pytest.raises(MeshError, match=r"no such rank .*got 2\) \[mesh\.retire\]: ranks count from 0"):
        mesh.retire(2)
    counter = mesh.remote(list)
    with pytest.raises(MeshError, match=r"objects of mesh\.remote"):
        mesh.resize({"data": 1})
    del counter
    gc.collect()
    mesh.resize({"data": 1})
    assert mesh.remote(list).count(0).get() == 0 and mesh.size == 1
    with Mesh({"data": 1}, timeout=2.0) as other:
        with pytest.raises(MeshError, match="nothing left without rank 0"):
            other.retire(0)
        with pytest.raises(MeshError, match=r"mesh\.resize is for the program"):
            other.run(lambda: other.resize({"data": 2}))
        with pytest.raises(MeshError, match=r"mesh\.retire is for the program"):
            other.run(lambda: other.retire(0))
        assert other.size == 1


def arrived(path: Path) -> int:
    if path.exists():
        raise LookupError(f"{path.name} is in the way")
    return 7


class Fragile:
    """What cannot be read where a file is there."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return arrived, (self.path,)


def test_a_function_that_new_ranks_cannot_read(mesh: Mesh, tmp_path: Path) -> None:
    """Who calls it is told why; what calls others does so; and it is read once it can be."""
    fragile, obstacle = Fragile(tmp_path / "obstacle"), tmp_path / "obstacle"
    step = spmd(lambda x: psum(x.sum() * int(fragile), "data"), mesh=mesh, in_specs=P("data"))  # type: ignore[call-overload]
    x = put(torch.ones(6), P("data"), mesh=mesh)

    def value() -> Any:
        return fragile

    assert mesh.run(value) == [7, 7] and float(step(x)) == 42.0
    obstacle.touch()
    mesh.resize({"data": 3})
    for _ in range(2):
        with pytest.raises(LookupError, match="obstacle is in the way"):
            mesh.run(value)
        with pytest.raises(LookupError, match="obstacle is in the way"):
            float(step(x))
        assert mesh.run(lambda: mesh.rank) == [0, 1, 2]
    obstacle.unlink()
    assert mesh.run(value) == [7] * 3 and float(step(x)) == 42.0


def test_the_output_of_new_ranks_has_their_labels(mesh: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    mesh.resize({"data": 3})
    mesh.run(lambda: print(f"here is {mesh.rank}"))
    assert until(lambda: "[rank 2] here is 2" in capfd.readouterr().out)


def test_what_new_ranks_print_while_they_get_ready(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is shown once they are taken, or have died."""
    monkeypatch.syspath_prepend(tmp_path)
    ends = tmp_path / "ends"
    text = f"import os\nprint('was imported', flush=True)\nif os.path.exists({str(ends)!r}):\n    os._exit(3)\n"
    (tmp_path / "told_of_ranks.py").write_text(f"{text}ONE = 1\n")
    module = importlib.import_module("told_of_ranks")
    step = spmd(lambda x: x + module.ONE, mesh=mesh)
    assert int(step(torch.tensor(1))) == 2
    capfd.readouterr()
    mesh.resize({"data": 3})
    assert capfd.readouterr().out == "was imported\n"
    ends.touch()
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        with pytest.raises(MeshError, match="new ranks die before they are ready"):
            mesh.resize({"data": 2})
        assert len(os.listdir("/proc/self/fd")) <= files  # nothing waits for the collector of garbage
    finally:
        gc.enable()
    assert "was imported" in capfd.readouterr().out and int(step(torch.tensor(1))) == 2


def test_calls_repeat_after_a_resize(mesh: Mesh) -> None:
    """What new ranks told before they were taken counts among what they have told."""
    x = put(torch.arange(4.0), mesh=mesh)
    number = spmd(lambda x: 1, mesh=mesh)
    mesh.resize({"data": 1})
    before = mesh.run(os.getpid)
    assert [number(x) for _ in range(3)] == [1, 1, 1]
    assert mesh.run(os.getpid) == before  # nobody was taken to be stuck, and replaced


def test_a_user_who_may_set_no_priorities_can_resize(mesh, monkeypatch):
    def refuse(*_):
        raise PermissionError("not for you")

    monkeypatch.setattr(os, "setpriority", refuse)
    x = put(torch.arange(6), P("data"), mesh=mesh)
    mesh.resize({"data": 3})
    assert [shard.tolist() for shard in x.shards()] == [[0, 1], [2, 3], [4, 5]]
