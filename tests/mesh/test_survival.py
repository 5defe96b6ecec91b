"""Ranks die and nothing is lost: values, calls, batches and random numbers are those of the undisturbed run."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from internals import (
    arena_bytes,
    asked_by_a_rank_that_ended,
    asked_of_a_lost_zygote,
    die_in_next_connection,
    interrupt_again_after,
    lose_value,
    zygote_of,
    zygote_that_stands_by,
)
from patience import HANGS, end_within, until
from scripts import run
from torch import nn

from spmd import (
    Loader,
    MeshError,
    P,
    PeerLost,
    all_gather,
    axis_index,
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


def kill(mesh, ranks) -> None:
    """Kill ranks, and wait until they are gone."""
    pids = [mesh.driver.pids[rank] for rank in ranks]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert end_within(HANGS, pids)


def trained(mesh, *, shards=None, donate=(), deaths=None, steps=9) -> str:
    """A hash of the parameters after every step, the losses and the samples, of a run with dropout.

    Args:
        deaths: step -> the ranks that are killed as soon as that step has been called.
    """
    torch.manual_seed(0)
    x = torch.randn(200, 12)
    y = (x @ torch.randn(12, 3)).argmax(1)
    # The first weight is above what lies in a ledger; steps take as long as a death takes to be noticed.
    apply, params = functional(nn.Sequential(nn.Linear(12, 1500), nn.Dropout(0.2), nn.ReLU(), nn.Linear(1500, 3)))
    opt = optimizer(torch.optim.AdamW, lr=1e-2)
    state = opt.init(params)

    @spmd(mesh=mesh, donate=donate)
    @data_parallel(shards=shards)
    def step(params, state, batch):
        loss, grads = value_and_grad(lambda p, b: F.cross_entropy(apply(p, b["x"]), b["y"]))(params, batch)
        params, state = opt.step(params, grads, state)
        return params, state, loss

    found, done = hashlib.sha256(), 0
    loader = Loader({"x": x, "y": y}, batch_size=32, seed=1, mesh=mesh, shards=shards)
    while done < steps:
        for batch in loader:
            params, state, loss = step(params, state, batch)
            if deaths and done in deaths:
                kill(mesh, deaths[done])
            found.update(batch["y"].full().numpy().tobytes())
            for name in sorted(params):
                found.update(params[name].full().numpy().tobytes())
            found.update(loss.full().numpy().tobytes())
            done += 1
            if done == steps:
                break
    return found.hexdigest()


@pytest.mark.parametrize("shards", [None, 4])
def test_the_same_bits_after_any_deaths(make_mesh, shards, caplog):
    undisturbed = trained(make_mesh({"data": 2}), shards=shards)
    mesh = make_mesh({"data": 2})
    with caplog.at_level(logging.WARNING, "spmd"):
        assert trained(mesh, shards=shards, deaths={0: [0], 2: [1], 5: [0, 1], 7: [1]}) == undisturbed
    said = [record.getMessage() for record in caplog.records]
    # Of two that die together one line tells, or each has its own.
    told = re.compile("killed by SIGKILL .*replaced, with (its|their) values, in")
    assert sum(told.search(text) is not None for text in said) >= 4


def test_a_second_death_before_the_call_has_begun_again(make_mesh):
    undisturbed = trained(make_mesh({"data": 2}), steps=4)
    mesh = make_mesh({"data": 2})
    start = mesh.driver.ranks._start
    kills = iter(range(2))

    def start_and_kill(number):
        rank = start(number)
        if next(kills, None) is not None:
            os.kill(rank.pid, signal.SIGKILL)
        return rank

    mesh.driver.ranks._start = start_and_kill
    assert trained(mesh, steps=4, deaths={1: [1]}) == undisturbed


def test_the_process_that_ranks_are_forked_from_dies_in_a_call(make_mesh):
    mesh, *others = (make_mesh({"data": 2}) for _ in range(3))
    w = put(torch.arange(3.0), mesh=mesh)
    kept = [put(torch.arange(4.0), P("data"), mesh=other) for other in others]  # their ranks die, too

    @spmd(mesh=mesh)
    def slow(w):
        time.sleep(0.3)
        return psum(w, "data")

    assert slow(w).full().tolist() == [0, 2, 4]
    depth = mesh.stacks().count("zygote.py")
    for _ in range(2):
        standing_by = zygote_that_stands_by(mesh)
        doubled = slow(w)
        os.kill(zygote_of(mesh), signal.SIGKILL)
        assert doubled.full().tolist() == [0, 2, 4]
        # Which has torch, so that nobody has waited for it.
        assert until(lambda: zygote_of(mesh) == standing_by)  # noqa: B023 (it is called in this turn of the loop)
        assert [value.full().tolist() for value in kept] == [[0, 1, 2, 3]] * 2
    assert mesh.stacks().count("zygote.py") == depth > 0  # else Python's limit would be reached some day
    for each in (zygote_that_stands_by(mesh), zygote_of(mesh)):  # both: a new one is begun
        os.kill(each, signal.SIGKILL)
    assert slow(w).full().tolist() == [0, 2, 4]
    assert mesh.submit(os._exit, 3, rank=0).exception() is not None
    assert slow(w).full().tolist() == [0, 2, 4]


def test_who_is_forked_by_a_process_that_has_ended_since_ends():
    """As a rank whose zygote is killed before the rank has come to anything."""
    program = """
import os, time
from spmd.kernels.processes import end_with_parent
here = os.getpid()
if os.fork() == 0:
    while os.getppid() == here:
        time.sleep(0.01)
    end_with_parent(here)
    print("it lives on")
"""
    assert run("-c", program)[:2] == (0, "")


def test_a_zygote_that_another_mesh_has_found_lost_first(make_mesh):
    mesh = make_mesh({"data": 1})
    w = put(torch.arange(3.0), mesh=mesh)
    assert asked_of_a_lost_zygote(mesh) == ("ZygoteLost", None)  # which has the rank forked from the next
    assert w.full().tolist() == [0, 1, 2]


def test_a_rank_that_ends_while_it_asks_for_a_process():
    """The zygote, which would end with all its ranks, takes it for the end of the stream."""
    assert asked_by_a_rank_that_ended() == (None, [])


# -- values ------------------------------------------------------------------------------------------------------------


def kinds() -> dict[str, torch.Tensor]:
    """Tensors of all kinds, small and large."""
    large = torch.randn(300, 200)
    return {
        "large": large,
        "transposed": large.mT,
        "a column": large[:, 3],
        "a part": large[10:250],
        "expanded": torch.arange(200.0).expand(300, 200),
        "channels last": torch.randn(4, 32, 20, 20).to(memory_format=torch.channels_last),
        "complex": torch.randn(200, 200, dtype=torch.complex64).conj(),
        "small complex": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(200, 200, dtype=torch.complex64).conj().imag,
        "small negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "bfloat16": torch.randn(200, 200).bfloat16(),
        "bool": torch.randn(300, 300) > 0,
        "number": torch.tensor(3),
        "small": torch.arange(7),
        "nothing": torch.empty(3, 0),
        "frozen": nn.Parameter(torch.randn(200, 200), requires_grad=False),
    }


def test_values_of_every_kind(make_mesh):
    mesh = make_mesh({"data": 2})
    here = kinds()
    made = spmd(lambda: (torch.manual_seed(3), kinds())[1], mesh=mesh)
    placed = put(here, mesh=mesh)
    cut = put(torch.arange(60_000), P("data"), mesh=mesh)
    results = made()
    summed = spmd(lambda w: psum(w, "data"), mesh=mesh)(put(torch.randn(400, 400), mesh=mesh))

    def looks() -> list:
        def local(tree):
            def look(array):
                return array.local.clone(), array.local.stride(), type(array.local).__name__

            return {name: look(array) for name, array in tree.items()}

        return mesh.run(local, {**placed, **{f"made {name}": value for name, value in results.items()}, "sum": summed})

    before = looks()
    assert torch.equal(placed["large"].full(), here["large"])
    for ranks in ([0], [1], [0, 1], [0, 1]):
        kill(mesh, ranks)
        for now, then in zip(looks(), before, strict=True):
            for name, (value, stride, kind) in then.items():
                assert torch.equal(now[name][0], value), name
                assert now[name][1:] == (stride, kind), name
        assert torch.equal(cut.full(), torch.arange(60_000))


def test_what_memory_holds_is_what_a_value_is(make_mesh):
    """Of one call in a row of alike ones the result is conjugated, or negative, only by a flag of the tensor."""
    mesh = make_mesh({"data": 2})
    turned = spmd(lambda z, turn: (z.conj() if turn else z * 1, (z.conj() if turn else z * 1).imag), mesh=mesh)
    z = torch.randn(5, dtype=torch.complex64)
    turns = [torch.tensor(number == 4) for number in range(6)]
    results = [turned(z, turn) for turn in turns]
    mesh.run(int)  # calls that are not over would run again
    kill(mesh, [0, 1])
    for turn, (whole, part) in zip(turns, results, strict=True):
        wanted = (z.conj() if turn else z).resolve_conj()
        assert torch.equal(whole.full(), wanted) and torch.equal(part.full(), wanted.imag), turn


@pytest.mark.parametrize("size", [1, 30_000])
def test_zeros_without_memory_are_zeros(make_mesh, tmp_path, size):
    """Tangents of forward mode, such as `jacfwd(jacfwd(linear))`: as arguments, as results, and between ranks."""
    mesh = make_mesh({"data": 2})
    tangent = torch._efficientzerotensor((size,), dtype=torch.float32)
    assert not tangent.data_ptr()

    def step(given, turn):
        made = given.new_zeros(size) if turn else torch._efficientzerotensor((size,), dtype=torch.float32)
        return made, all_gather(made, "data"), given

    run = spmd(step, mesh=mesh)
    results = [run(tangent, torch.tensor(number != 4)) for number in range(6)]
    mesh.run(int)
    kill(mesh, [0, 1])
    for made, gathered, given in results:
        assert made.shape == given.shape == (size,) and gathered.shape == (2, size)
        assert not any(one.full().any() for one in (made, gathered, given))
    assert not mesh.run(lambda: tangent * 1)[1].any()
    save(tmp_path, {"tangent": tangent})
    assert not restore(tmp_path)["tangent"].any()


def test_some_values_of_a_call_are_gone(make_mesh):
    mesh = make_mesh({"data": 2})
    step = spmd(lambda n: {"large": torch.full((300, 300), n), "small": torch.tensor(n)}, mesh=mesh)
    kept = []
    for n in range(6):
        made = step(float(n))
        kept.append(made["small" if n % 2 else "large"])
        del made
    mesh.run(int)  # tells the ranks what is gone
    kill(mesh, [0, 1])
    more = [step(float(n))["large"] for n in range(6, 9)]
    kill(mesh, [1])
    assert [array.full().view(-1)[-1].item() for array in kept + more] == list(range(9))


def test_what_a_program_writes_to_a_value_goes_with_the_rank(make_mesh):
    mesh = make_mesh({"data": 2})
    made = spmd(lambda w: {"sum": psum(w, "data"), "other": w + 1}, mesh=mesh)(put(torch.ones(300, 300), mesh=mesh))
    total = made["sum"]
    mesh.run(lambda: total.local.zero_())
    del made  # of what the call has left some goes, and the rest is noted anew
    assert mesh.run(lambda: float(total.local[0, 0])) == [0, 0]
    kill(mesh, [0, 1])
    assert mesh.run(lambda: float(total.local[0, 0])) == [2, 2]


def test_batches_are_read_again(make_mesh):
    mesh = make_mesh({"data": 2})
    batches = list(Loader({"x": torch.arange(24)}, batch_size=8, mesh=mesh, seed=3))
    before = [batch["x"].full() for batch in batches]
    kill(mesh, [0, 1])
    doubled = spmd(lambda x: 2 * x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for batch, expected in zip(batches, before, strict=True):
        assert torch.equal(doubled(batch["x"]).full(), 2 * expected)
        assert torch.equal(batch["x"].full(), expected)


def test_a_rank_that_has_forked_is_replaced(make_mesh):
    """What it leaves behind holds nothing that the next rank in its place needs."""
    mesh = make_mesh({"data": 2})

    def fork():
        child = os.fork()
        if child == 0:
            os.setsid()
            time.sleep(HANGS)
            os._exit(0)
        return child

    children = mesh.run(fork)
    try:
        for _ in range(2):
            kill(mesh, [1])
            assert until(lambda: answers(mesh))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_fork_of_a_rank_ends_as_a_program_does(shared_mesh, capfd):
    mesh = shared_mesh({"data": 2})

    def status(code):
        child = os.fork()
        if child == 0:
            if isinstance(code, float):
                raise ValueError("in the child")
            sys.exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    for code, expected in ((None, 0), (0, 0), (3, 3), ("no luck", 1), (1.0, 1)):
        assert mesh.run(status, code) == [expected, expected]
    shown = []
    assert until(lambda: shown.append(capfd.readouterr().err) or "in the child" in "".join(shown))
    assert "no luck" in (text := "".join(shown)) and "SystemExit" not in text and "worker.py" not in text


def answers(mesh) -> bool:
    try:
        return mesh.run(lambda: 1) == [1, 1]
    except PeerLost:
        return False


def test_memory_of_dead_ranks_is_given_back(make_mesh):
    mesh = make_mesh({"data": 2})
    step = spmd(lambda w: psum(w, "data") / 2, mesh=mesh)
    w = step(put(torch.randn(1 << 20), mesh=mesh))
    expected = w.full()
    sizes = []
    for _ in range(8):
        w = step(w)
        assert torch.equal(w.full(), expected)
        kill(mesh, [0, 1])
        assert torch.equal(w.full(), expected)
        sizes.append(arena_bytes(mesh))
    # What is in a rank's place may be yet to give back what the one before it had.
    assert until(lambda: arena_bytes(mesh) <= sizes[1] + (8 << 20)), [*sizes, arena_bytes(mesh)]


def test_what_is_written_down_of_values_goes_with_them(shared_mesh) -> None:
    """Also how to rebuild them, in a program whose values have another shape each time."""
    mesh = shared_mesh({"data": 2})
    many = spmd(lambda x: [x + index for index in range(100)], in_specs=P(), out_specs=P(), mesh=mesh)

    def run_with(sizes: range) -> int:
        for size in sizes:
            many(torch.ones(size, 0))[0].full()  # all of no bytes
        return arena_bytes(mesh)

    before = run_with(range(1, 10))
    assert run_with(range(10, 200)) - before < 200_000


def test_more_values_than_descriptors(tmp_path: Path):
    script = tmp_path / "many.py"
    script.write_text(
        """
import resource
import torch
from spmd import Mesh, SpmdError, put, spmd

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
with Mesh({"data": 1}) as mesh:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512
    x = torch.zeros(1 << 15)
    made = spmd(lambda w, n: w + n, mesh=mesh)
    kept = [put(x + n, mesh=mesh) for n in range(600)]
    kept += [made(kept[n], 600) for n in range(600)]
    assert [float(kept[n][0]) for n in (0, 599, 600, 1199)] == [0, 599, 600, 1199]
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 512))
    try:
        made(x, 1)
    except SpmdError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
    assert float(made(kept[7], 1).full()[0]) == 8
"""
    )
    status, out, err = run(str(script), cwd=tmp_path)
    assert status == 0, err
    assert "limit on open files" in out


# -- what is not run again ---------------------------------------------------------------------------------------------


def test_a_rank_is_replaced_where_its_folder_was_removed(tmp_path: Path):
    folder = tmp_path / "gone"
    folder.mkdir()
    code = """
import os
from spmd import Mesh, put
mesh = Mesh({"data": 1})
w = put([1.0], mesh=mesh)
os.rmdir(os.getcwd())
os.kill(mesh.run(os.getpid)[0], 9)
print(w[0].item(), mesh.run(os.readlink, "/proc/self/cwd"))
"""
    assert run("-c", code, cwd=folder)[1] == f"1.0 ['{folder} (deleted)']\n"


def test_a_call_that_ends_its_ranks_is_given_up(make_mesh):
    mesh = make_mesh({"data": 2})

    @spmd(mesh=mesh)
    def deadly(w):
        if axis_index("data") == 1:
            os._exit(7)
        return psum(w, "data")

    w = put(torch.ones(2), mesh=mesh)
    with pytest.raises(PeerLost, match=r"rank 1 exited with code 7.*deadly has lost ranks 3 times in a row"):
        deadly(w)
    assert w.tolist() == [1, 1]
    assert mesh.run(lambda: axis_index("data")) == [0, 1]


def test_a_function_that_ends_ranks_as_they_read_it_is_given_up(make_mesh):
    """As one does whose import crashes on the ranks."""

    class Crashes:
        def __reduce__(self):
            return os._exit, (7,)

    mesh, crashes = make_mesh({"data": 2}), Crashes()
    w = put(torch.ones(2), mesh=mesh)
    total = spmd(lambda w: psum(w, "data"), mesh=mesh)
    assert total(w).tolist() == [2, 2]
    with pytest.raises(PeerLost, match=r"exited with code 7.*has lost ranks 3 times in a row"):
        spmd(lambda w: (crashes, w)[1], mesh=mesh)(w)
    assert total(w).tolist() == [2, 2]


def test_a_batch_that_ends_its_rank_is_given_up(make_mesh):
    """As a sample does on which a decoder crashes: whether or not steps were made before."""

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            if index == 9:
                os._exit(7)
            return torch.tensor(index)

    mesh = make_mesh({"data": 2})
    total = spmd(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"))
    for prefetch, sums in ((0, [6, 22]), (4, None)):
        found = []
        with pytest.raises(PeerLost, match=r"rank 1 exited with code 7.*a batch has lost ranks 3 times in a row"):
            for batch in Loader(Broken(), 4, mesh=mesh, shuffle=False, prefetch=prefetch):
                found.append(total(batch).item())
        assert sums is None or found == sums
    assert total(put(torch.arange(4), P("data"), mesh=mesh)).item() == 6


def test_an_exception_is_not_retried(make_mesh, tmp_path):
    mesh = make_mesh({"data": 2})

    @spmd(mesh=mesh)
    def fails(w):
        (tmp_path / f"{axis_index('data')} {time.monotonic_ns()}").touch()
        raise ValueError("once")

    @spmd(mesh=mesh)
    def fails_as_a_rank_dies(w):
        if mesh.rank:
            until(begun.exists)
            os.kill(os.getpid(), signal.SIGKILL)
        begun.touch()
        raise ValueError("twice")

    with pytest.raises(ValueError, match="once"):
        fails(put(torch.ones(2), mesh=mesh))
    begun = tmp_path.with_suffix(".begun")
    with pytest.raises(PeerLost, match="was not run again, since another rank has raised an exception") as caught:
        fails_as_a_rank_dies(put(torch.ones(2), mesh=mesh))
    assert "ValueError: twice" in str(caught.value.__cause__)
    assert len({path.name.split()[0] for path in tmp_path.iterdir()}) == len([*tmp_path.iterdir()])


def test_what_may_have_effects_is_not_run_again(make_mesh):
    mesh = make_mesh({"data": 2})
    w = put(torch.ones(2), mesh=mesh)
    with pytest.raises(PeerLost, match="rank 1 exited with code 3"):
        mesh.run(lambda: os._exit(3), ranks=[1])
    future = mesh.submit(lambda: os._exit(4), rank=0)
    with pytest.raises(PeerLost, match=r"rank 0 exited with code 4.*was not run again: make it again if"):
        future.result(HANGS)
    future = mesh.submit(time.sleep, 2 * HANGS, rank=0)  # another rank's
    os.kill(mesh.driver.pids[1], signal.SIGKILL)
    with pytest.raises(PeerLost, match=r"rank 1 was killed.*was not run again: make it again if"):
        future.result(HANGS)
    assert w.tolist() == [1, 1]


def test_a_value_is_fetched_again_where_the_program_wants_to_know(make_mesh, caplog):
    """The call that made it has not failed: a program that made it again would draw other random numbers."""
    mesh = make_mesh({"data": 2}, on_loss="raise", grace=0.5)
    value = spmd(lambda: torch.rand(4), mesh=mesh, out_specs=P("data"))()
    expected = value.full()
    os.kill(mesh.driver.pids[1], signal.SIGSTOP)
    assert torch.equal(value.full(), expected)
    assert "rank 1 was killed: it was stopped" in caplog.text


def test_a_failure_is_for_the_thread_that_waits(make_mesh, monkeypatch):
    """Another one, whose call runs again, hears nothing of it, however late the first comes to look.

    Nor where another rank has not come to pass through the failing call by then.
    """
    mesh = make_mesh({"data": 2})
    w = put(torch.ones(2), mesh=mesh)
    total = spmd(lambda w: psum(w, "data"), mesh=mesh)
    slow = spmd(lambda w: time.sleep(0.0 if axis_index("data") else 0.5) or w, mesh=mesh)
    total(w), slow(w)
    failures, wait, may_look = [], mesh.driver.wait, threading.Event()

    def wait_late(task):
        if threading.current_thread() is thread:
            may_look.wait(HANGS)
        return wait(task)

    def lose():
        with pytest.raises(PeerLost, match="exited with code 3") as caught:
            mesh.run(lambda: os._exit(3), ranks=[1])
        failures.append(caught.value)

    thread = threading.Thread(target=lose, daemon=True)
    monkeypatch.setattr(mesh.driver, "wait", wait_late)
    before = mesh.driver.pids
    under_way = slow(w)
    thread.start()
    assert until(lambda: total(w).tolist() == [2, 2] and mesh.driver.pids != before)
    assert under_way.tolist() == [1, 1]
    may_look.set()
    thread.join(HANGS)
    assert len(failures) == 1


class Dies(torch.optim.SGD):
    """Its process ends when it has written so many blocks."""

    left = -1

    def step(self, closure=None):
        super().step(closure)
        Dies.left -= 1
        if Dies.left == 0:
            os._exit(5)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("when", ["before", "reduced", "after"])
def test_donated_values(make_mesh, tmp_path, when, saved):
    """A call that dies before it overwrites is run again; after that what was donated is lost, and said to be."""
    mesh, marker = make_mesh({"data": 2}), tmp_path / "died"
    opt = optimizer(torch.optim.AdamW, lr=0.1)

    @spmd(mesh=mesh, donate=("params", "state"))
    def step(params, state, turn):
        def die(at):
            if turn == 3 and at == when and axis_index("data") == 1 and not marker.exists():
                marker.touch()
                os._exit(5)

        die("before")
        grads = {"w": psum(params["w"] + 1, "data")}
        die("reduced")  # another rank may write by now
        params, state = opt.step(params, grads, state)
        die("after")
        return params, state

    def after(steps, saves=False):
        params, state = {"w": torch.arange(50_000.0)}, opt.init({"w": torch.arange(50_000.0)})
        for turn in range(steps):
            params, state = step(params, state, turn)
            if saves:
                save(tmp_path / "runs", params, keep=1).result()
        return params["w"].full()

    newest = (
        f"the newest checkpoint, {tmp_path / 'runs'}/step-00000002" if saved else "a checkpoint .this run has none yet"
    )
    lost = f"step can't run again: ranks had begun to overwrite argument 0, argument 1 of it, .*restore {newest}"
    try:
        found = after(5, saved)
    except PeerLost as error:
        assert when != "before" and re.search(lost, str(error))
    else:
        assert when != "after" and torch.equal(found, after(5))
    assert marker.exists() and torch.isfinite(after(5)).all()


def test_a_rank_dies_in_the_middle_of_an_update_in_place(make_mesh, tmp_path):
    mesh, marker = make_mesh({"data": 2}), tmp_path / "died"
    opt = optimizer(Dies, lr=0.1, momentum=0.9)

    @spmd(mesh=mesh, donate=("params", "state"))
    def step(params, state, turn):
        if turn == 3 and axis_index("data") == 1 and not marker.exists():
            marker.touch()
            Dies.left = 2  # of ten
        return opt.step(params, {name: psum(value + 1, "data") for name, value in params.items()}, state)

    def after(steps):
        params = {name: torch.arange(500_000.0) for name in "ab"}
        state = opt.init(params)
        for turn in range(steps):
            params, state = step(params, state, turn)
        return params["b"].full()

    with pytest.raises(
        PeerLost, match="step can't run again: ranks had begun to overwrite argument 0, argument 1 of it"
    ):
        after(5)
    assert torch.equal(after(5), after(5))


def test_a_rank_that_is_ahead_has_overwritten_what_the_call_before_reads(make_mesh, tmp_path):
    """Without a collective nobody waits for the one that dies."""
    mesh, ahead = make_mesh({"data": 2}), tmp_path / "ahead"
    opt = optimizer(torch.optim.SGD, lr=1.0, shard=None)
    params = {"w": torch.ones(50_000)}
    state = opt.init(params)
    no, yes = torch.zeros(()), torch.ones(())

    @spmd(mesh=mesh, check="never")
    def look(params, last):
        if last.item() and axis_index("data") == 1:
            assert until(ahead.exists)
            os._exit(5)
        return params["w"] * 2

    @spmd(mesh=mesh, donate=("params", "state"), check="never")
    def step(params, state, last):
        params, state = opt.step(params, {"w": params["w"]}, state)
        if last.item():
            ahead.touch()
        return params, state

    for _ in range(2):
        params, state = step(params, state, no)
        look(params, no)
    expected = look(params, no).full()
    seen = look(params, yes)
    lost = "look can't run again: ranks had begun to overwrite what a later call was donated"
    with pytest.raises(PeerLost, match=lost):
        step(params, state, yes)
        assert torch.equal(seen.full(), expected)


def test_a_bad_on_loss(make_mesh):
    with pytest.raises(MeshError, match="unknown on_loss"):
        make_mesh({"data": 2}, on_loss="ignore")


def test_values_that_a_rank_lacks_come_from_others(shared_mesh) -> None:
    """Small and large ones, all at once, when a call needs one of them; a shard that nobody else had is named."""
    mesh = shared_mesh({"data": 2})
    small, large = put(torch.arange(3.0), mesh=mesh), put(torch.arange(1e5), mesh=mesh)
    cut = put(torch.arange(4.0), P("data"), mesh=mesh)
    total = spmd(lambda x: psum(x, "data"), mesh=mesh)
    for rank in (1, 0):
        lose_value(small, rank), lose_value(large, rank)
        assert total(small).full().tolist() == [0.0, 2.0, 4.0]
        assert all(torch.equal(shard, torch.arange(1e5)) for shard in large.shards())
    lose_value(cut, 1)
    with pytest.raises(PeerLost, match=r"argument 0 .*was lost with rank 1, which alone held a shard of it"):
        total(cut)
    assert total(small).full().tolist() == [0.0, 2.0, 4.0]


def test_who_asks_for_a_lost_value_does_not_end_the_move_of_others(make_mesh) -> None:
    """A move that is under way then, and fails since another rank dies, is made again."""
    mesh = make_mesh({"data": 3})
    small, cut = put(torch.arange(3.0), mesh=mesh), put(torch.arange(6.0), P("data"), mesh=mesh)
    total = spmd(lambda x: psum(x, "data"), mesh=mesh)
    lose_value(small, 0), lose_value(cut, 1)
    mesh.submit(time.sleep, HANGS, rank=1)  # which has the value, and sends it afterwards
    with ThreadPoolExecutor() as pool:
        moved = pool.submit(total, small)
        assert until(lambda: not small._source.missing)
        with pytest.raises(PeerLost, match="was lost with rank 1, which alone held"):
            total(cut)
        kill(mesh, [2])
        with pytest.raises(PeerLost, match="rank 2 was killed"):
            moved.result()
    assert total(small).full().tolist() == [0.0, 3.0, 6.0]


@pytest.mark.parametrize("left", [2, 7, 15])
def test_a_rank_is_killed_while_it_writes_to_the_store(make_mesh, left: int) -> None:
    """The ranks of a Gloo group meet in torch's FileStore: of a record there may be no more than the beginning."""

    def stores() -> set[Path]:
        return {fd for fd in Path("/proc/self/fd").iterdir() if "spmd-store" in os.path.realpath(fd)}

    before = stores()
    mesh = make_mesh({"data": 2}, backend="gloo", timeout=60)
    total = spmd(lambda x: psum(x, "data"), mesh=mesh)
    assert total(torch.ones(1)).item() == 2
    (store,) = stores() - before
    with open(store, "ab") as file:
        file.write(b"\x05\0\0\0a key\x07\0\0\0a value"[:left])
    kill(mesh, [0, 1])
    assert total(torch.ones(1)).item() == 2
    assert mesh.run(lambda: float(mesh.comm(ranks=[1, 0]).all_reduced(torch.ones(1)))) == [2, 2]


def test_a_death_while_a_group_opens_is_none_of_the_steps_errors(make_mesh):
    """What the other rank makes of its broken connection is not: the call runs again."""
    mesh = make_mesh({"data": 2}, backend="gloo", timeout=60)
    mesh.run(die_in_next_connection, mesh.run(os.getpid)[0], ranks=[1])
    assert spmd(lambda x: psum(x, "data"), mesh=mesh)(torch.ones(())).item() == 2


def test_an_interrupt_that_was_put_off_is_not_for_the_call_made_again(make_mesh, tmp_path: Path) -> None:
    """A rank that imports a module when another one dies is interrupted afterwards; its task has one number, too."""
    (tmp_path / "slowly_imported.py").write_text("import time; time.sleep(1.3)")
    mesh = make_mesh({"data": 2})
    mesh.run(interrupt_again_after, 0.8)

    def step(x: torch.Tensor) -> torch.Tensor:
        if mesh.rank == 0 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if mesh.rank == 1:
            sys.path.insert(0, str(tmp_path))
            import slowly_imported  # noqa: F401  # where an interrupt is put off

            for _ in range(100):
                time.sleep(0.01)
        return psum(x, "data")

    assert spmd(step, mesh=mesh, check="never")(torch.ones(())).item() == 2
