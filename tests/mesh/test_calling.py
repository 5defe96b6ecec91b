"""Calls like an earlier one are sent as a few names; they must mean the same, also after failures and changes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import os
import signal
import sys
import threading
import time
import warnings

import pytest
import torch
from internals import beside_next, note_what_is_told, tell_renewals_after
from patience import until

from spmd import (
    Loader,
    MeshError,
    P,
    Sharded,
    SpecError,
    axis_index,
    data_parallel,
    fetch,
    optimizer,
    psum,
    put,
    save,
    spmd,
    value_and_grad,
)


@pytest.fixture
def spied(make_mesh, monkeypatch):
    """A mesh, and the kinds of what was told to its ranks."""
    mesh, told = make_mesh({"data": 2}), []

    def note(message, packet):
        first = getattr(message, "check", 0) == 3  # whose types are followed
        brief = getattr(message, "values", None) is not None and not first
        told.append("first" if first else "brief" if brief else type(message).__name__)

    note_what_is_told(mesh, monkeypatch, note)
    return mesh, told


def test_like_calls_are_brief_and_mean_the_same(spied):
    mesh, told = spied

    @spmd(mesh=mesh)
    def scaled(tree, by, *, plus):
        return {name: leaf * by + plus for name, leaf in tree.items()}

    tree = put({"a": torch.ones(2), "b": torch.zeros(3)}, mesh=mesh)
    for turn in range(5):
        by = 1.0 + turn
        tree = scaled(tree, by, plus=0.5)
    assert told.count("brief") == 4
    expected = 1.0
    for turn in range(5):
        expected = expected * (1.0 + turn) + 0.5
    assert tree["a"].full().tolist() == [expected] * 2
    told.clear()
    tensor = scaled(tree, torch.tensor(0.0), plus=1.0)  # another kind of argument: sent whole
    assert tensor["b"].full().tolist() == [1.0] * 3 and told.count("brief") == 0


def test_a_number_that_counts_calls_does_not_make_each_a_first_call(spied):
    """Values may be flags: the first eight, the 9th and the 17th. Results may have other shapes with each of them."""
    mesh, told = spied

    @spmd(mesh=mesh)
    def ones(x, number, names):
        return x.new_ones(number % 5), names

    for number in range(20):
        found, names = ones(torch.zeros(2), number, [f"sample {number}"])
        assert found.full().tolist() == [1.0] * (number % 5) and names == [f"sample {number}"]
    assert told.count("first") == 10 and told.count("Ship") <= 4


def test_batches_of_other_lengths_are_no_first_calls(spied):
    """Each length had a first call, with all its checks."""
    mesh, told = spied

    @spmd(mesh=mesh)
    @data_parallel
    def step(w, batch):
        return value_and_grad(lambda w, batch: (batch * w).square().mean())(w, batch)

    for length in (7, 4, 1, 6, 5, 7, 2, 3, 8):
        batch = torch.arange(1.0, length + 1)
        expected = pytest.approx(float((4 * batch**2).mean()))  # of the value and of its slope
        assert [float(one) for one in step(torch.tensor(2.0), batch)] == [expected, expected]
    assert told.count("first") == 1


@pytest.mark.parametrize(
    "flags", [(-1, -2), (True, 1), (None, 0.5), (slice(0, -1), slice(0, -2))], ids=["minus", "one", "none", "slices"]
)
def test_flags_that_hash_alike_are_two(make_mesh, flags):
    first, second = flags

    @spmd(mesh=make_mesh({"data": 2}), in_specs=(P("data"), None))
    def forgetful(x, flag):
        return x.sum() if repr(flag) == repr(second) else x.new_zeros(())

    assert forgetful(torch.ones(4), first).item() == 0
    with pytest.raises(SpecError, match="may differ between ranks"):
        forgetful(torch.ones(4), second)  # the ranks' sums agree


def test_members_of_an_enumeration_are_flags(make_mesh):
    class Mode(enum.Enum):
        PAIR = 1
        ONE = 2

    step = spmd(lambda x, mode: (x, x) if mode is Mode.PAIR else x + 1, mesh=make_mesh({"data": 2}))
    for _ in range(3):
        assert len(fetch(step(torch.ones(1), Mode.PAIR))) == 2
        assert fetch(step(torch.ones(1), Mode.ONE)).tolist() == [2.0]


def test_structures_that_no_call_needs_are_forgotten(spied):
    mesh, _ = spied
    step = spmd(lambda tree: len(tree), mesh=mesh)
    for number in range(300):  # more than are remembered for a function
        assert step({f"user {number}": 1.0}) == 1
    assert len(mesh.driver.shipped.keys()) < 2 * 260


def test_cut_and_dealt_arguments(spied):
    mesh, told = spied

    @spmd(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def shifted(x):
        return x + axis_index("data")

    x = torch.zeros(4)
    for _ in range(3):
        x = shifted(x)
    assert x.full().tolist() == [0.0, 0.0, 3.0, 3.0] and told.count("brief") == 1


def test_other_results_from_like_arguments(spied):
    mesh, _ = spied

    @spmd(mesh=mesh)
    def first_of(x, count):
        return Sharded(x[: int(count)].clone(), P("data"))

    x, counts = put(torch.arange(4.0), mesh=mesh), [put(torch.tensor(n), mesh=mesh) for n in (1, 2, 2, 3, 1)]
    found = [first_of(x, count) for count in counts]
    assert [one.full().tolist() for one in found] == [[*range(n)] * 2 for n in (1, 2, 2, 3, 1)]
    assert [tuple(one.shape) for one in found] == [(2,), (4,), (4,), (6,), (2,)]


def test_after_a_failure_and_a_lost_rank(spied, tmp_path):
    (mesh, _), begun = spied, tmp_path / "begun"

    @spmd(mesh=mesh)
    def halved(x):
        if float(x.sum()) < 0.25:
            raise ValueError("too small")
        return x / 2

    start = put(torch.ones(1), mesh=mesh)
    for _ in range(2):
        x = start
        with pytest.raises(ValueError, match="too small"):
            for _ in range(9):
                x = halved(x)
            x.full()
        assert float(halved(halved(start)).full()) == 0.25

    def kill():
        assert until(begun.exists)
        os.kill(mesh.driver.pids[1], signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(Exception, match="rank 1"):
        mesh.run(lambda: (begun.touch(), time.sleep(30)))
    killing.join()
    for _ in range(3):
        assert float(halved(start).full()) == 0.5


def test_a_function_that_is_made_again_and_again(spied):
    mesh, _ = spied
    x = put(torch.ones(1), mesh=mesh)
    for _ in range(4):  # of one content, so that the ranks know it by one name

        def same(x):
            return x + 1

        step = spmd(same, mesh=mesh)
        assert [float(step(x).full()) for _ in range(3)] == [2.0] * 3
        del step, same


def test_trees_that_change_after_they_came_alike(shared_mesh):
    """What is known of the structure of arguments and results is not taken for that of others."""
    mesh = shared_mesh({"data": 2})
    Pair = collections.namedtuple("Pair", "x y")

    @spmd(mesh=mesh)
    def echoed(tree, kind):
        return [tree] if kind == "list" else {"y": tree, "x": 0 * tree["a"]} if kind == "dict" else tree

    one, two = (put(torch.full((2,), value), mesh=mesh) for value in (1.0, 2.0))
    trees = [
        {"a": one, "b": two},
        {"b": one, "a": two},
        collections.OrderedDict(a=one, b=two),
        (one, two),
        [one, two],
        Pair(one, two),
        {"a": one, "b": {"c": two}},
        {"a": one, "b": 3},
        {"a": one, "b": None},
    ]
    for _ in range(4):
        for tree in trees:
            for _ in range(3):
                found = echoed(tree, "same")
                assert type(found) is type(tree) and numbers_in(found) == numbers_in(tree)
    for kind in ("list", "dict", "same", "dict", "dict", "list"):
        found = echoed({"a": one, "b": two}, kind)
        assert (
            numbers_in(found)
            == {
                "list": [{"a": [1.0, 1.0], "b": [2.0, 2.0]}],
                "dict": {"y": {"a": [1.0, 1.0], "b": [2.0, 2.0]}, "x": [0.0, 0.0]},
                "same": {"a": [1.0, 1.0], "b": [2.0, 2.0]},
            }[kind]
        )


def numbers_in(tree):
    """A tree with lists of numbers for its Arrays; the order of a dictionary counts."""
    if isinstance(tree, dict):
        return {name: numbers_in(part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(*map(numbers_in, tree)) if hasattr(tree, "_fields") else type(tree)(map(numbers_in, tree))
    return tree.tolist() if hasattr(tree, "tolist") else tree


def test_results_passed_on_in_any_order(shared_mesh):
    """Results of one call are told from each other wherever they are among later arguments, and when some are gone."""
    mesh = shared_mesh({"data": 2})
    count = 6
    made = spmd(lambda x: [x + index for index in range(count)], mesh=mesh)
    summed = spmd(lambda leaves: sum((10**place) * leaf for place, leaf in enumerate(leaves)), mesh=mesh)
    for turn in range(3):
        first, second = (made(put(torch.tensor(value), mesh=mesh)) for value in (0, 1))
        for order in (
            [0, 1, 2, 3, 4, 5],
            [0, 1, 2, 3, 4, 5],
            [5, 4, 3, 2, 1, 0],
            [0, 1, 2, 3, 4, 4],
            [1, 2, 3, 4, 5, 0],
        ):
            assert int(summed([first[index] for index in order])) == sum(n * 10**at for at, n in enumerate(order))
        mixed = [*first[:3], *second[3:]]
        assert int(summed(mixed)) == 654210
        del second[turn]  # its place in memory is taken by another
        others = made(put(torch.tensor(2), mesh=mesh))
        again = [*first[:turn], others[turn], *first[turn + 1 :]]
        assert int(summed(again)) == 543210 + 2 * 10**turn


def test_results_that_lie_otherwise_than_before(shared_mesh):
    """Results of the shapes of earlier ones, but in another order, of another dtype, or with a graph."""
    mesh = shared_mesh({"data": 2})

    @spmd(mesh=mesh)
    def made(x, kind):
        if kind == "turned":
            x = x.T.contiguous().T
        return {"x": x.double() if kind == "double" else x.requires_grad_() * 1 if kind == "graph" else x + 0}

    x = put(torch.arange(9.0).view(3, 3), mesh=mesh)
    for kind in ("", "", "", "turned", "", "", "double", "double", "graph", "graph", "", "turned", "turned"):
        found = made(x, kind)["x"].full()
        assert found.tolist() == torch.arange(9.0).view(3, 3).tolist()
        assert found.dtype is (torch.float64 if kind == "double" else torch.float32) and not found.requires_grad


def test_numbers_among_results_that_change_after_they_came_alike(shared_mesh):
    """Beside tensors that lie as before: by their values, types and signs."""
    numbers = [
        0.0,
        0.0,
        0.0,
        -0.0,
        -0.0,
        0,
        False,
        None,
        "a",
        "a",
        "b",
        1j,
        float("nan"),
        float("nan"),
        0.0,
        0.0,
        0.0,
        2,
    ]
    step = spmd(lambda x, number: {"n": number, "x": x + 1, "kept": 0.5}, mesh=shared_mesh({"data": 2}))
    x, found = torch.zeros(3), []
    for number in numbers:
        result = step(x, number)
        x = result["x"]
        found.append(result["n"])
        assert result["kept"] == 0.5
    assert list(map(repr, found)) == list(map(repr, numbers))
    assert x.full().tolist() == [len(numbers)] * 3


def test_a_state_that_counts_its_steps(spied, tmp_path):
    """Its class is sent once, and the count goes on after a rank has died, which knows nothing of earlier calls."""
    mesh, told = spied

    @dataclasses.dataclass
    class State:
        w: torch.Tensor
        steps: int
        name: str | None = None
        half: float = 0.0

    @spmd(mesh=mesh)
    def step(state):
        if state.steps == 12 and mesh.rank == 1 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        steps = state.steps + 1
        return State(state.w * 2, steps, None if steps % 3 else f"at {steps}", steps / 2), state.w.sum()

    state = State(torch.ones(2), 0)
    for turn in range(20):
        if turn == 3:
            told.clear()
        state, loss = step(state)
        assert (state.steps, state.half, float(loss)) == (turn + 1, (turn + 1) / 2, 2.0 * 2**turn)
        assert state.name == (None if (turn + 1) % 3 else f"at {turn + 1}")
        assert turn < 3 or turn > 11 or "Ship" not in told
    assert state.w.tolist() == [2.0**20] * 2 and (tmp_path / "died").exists()


def test_a_step_that_captures_the_loader_whose_batches_it_gets(spied):
    """As a method of what holds both: it was sent anew for each batch, since the Loader's position had changed."""
    mesh, told = spied

    class Holder:
        def __init__(self):
            self.loader = Loader(torch.ones(24), 4, mesh=mesh)
            self.step = spmd(data_parallel(self._step), mesh=mesh)

        def _step(self, total, batch):
            return psum(batch.sum(), "data") / len(self.loader) + total

    held, total = Holder(), torch.zeros(())
    for epoch in range(3):
        for batch in held.loader:
            total = held.step(total, batch)
        if not epoch:
            told.clear()
    assert float(total) == pytest.approx(3 * 4) and "Ship" not in told
    held.loader.dataset.mul_(2)
    assert [float(held.step(torch.zeros(()), batch)) for batch in held.loader] == pytest.approx([8 / 6] * 6)


def test_a_number_where_a_tensor_was_before(shared_mesh):
    @spmd(mesh=shared_mesh({"data": 2}))
    def step(x, is_number):
        return (2.0 if is_number else x.sum()), 2.0

    for is_number in (0, 0, 0, 1, 1, 1, 1, 0):  # no flag that the signature would tell
        assert [float(one) for one in step(torch.ones(2), is_number)] == [2.0, 2.0]


def warned(call, times):
    """What so many calls warn of, each of which is told its number."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for turn in range(times):
            call(turn)
    return [str(one.message) for one in found]


def test_a_function_that_is_defined_anew_for_each_call_gives_a_warning(make_mesh, monkeypatch):
    """Each of these calls is a first call, silently."""
    tell_renewals_after(monkeypatch, 20)
    mesh, x, captured = make_mesh({"data": 2}), torch.ones(2), {"rate": 0.0}

    def inline(turn):
        return spmd(lambda x: x + 1, mesh=mesh)(x)

    def defined(turn):
        @spmd(mesh=mesh)
        def step(x):
            return x * turn

        return step(x)

    @spmd(mesh=mesh)
    def changing(x):
        return x * captured["rate"]

    def changed(turn):
        captured["rate"] += 0.5
        return changing(x)

    for call, name in ((inline, "<lambda>"), (defined, "step"), (changed, "changing")):
        assert warned(call, 19) == []
        (text,) = warned(call, 21)
        assert text.startswith(f"each of the last 20 calls of {name} was a first call") and "before the loop" in text
        assert ("it captures 'captured', used in" in text) == (call is changed)


@pytest.mark.parametrize("change", ["losses", "turn", "settings"])
def test_what_has_changed_in_the_object_whose_method_a_step_is(make_mesh, monkeypatch, change):
    tell_renewals_after(monkeypatch, 4)

    class Trainer:
        def __init__(self):
            self.losses, self.turn, self.settings = [], 0, {"inner": {"rate": 0.5}}

        def step(self, x):
            return x + len(self.losses) + self.turn + self.settings["inner"]["rate"]

    trainer = Trainer()
    step = spmd(trainer.step, mesh=make_mesh({"data": 2}))

    def call(turn):
        if change == "losses":
            trainer.losses.append(turn)
        elif change == "turn":
            trainer.turn = turn + 1
        else:
            trainer.settings["inner"]["rate"] += 1
        return step(torch.ones(2))

    (text,) = warned(call, 6)
    assert f"it captures {change!r} of an object of Trainer, which changes" in text


def test_a_class_of_an_argument_that_changes(make_mesh, monkeypatch):
    tell_renewals_after(monkeypatch, 4)

    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        made = 0

        def __post_init__(self):
            Batch.made += 1

    Batch.__module__ = "__main__"  # as in a script
    step = spmd(lambda batch: batch.x + 1, mesh=make_mesh({"data": 2}))
    (text,) = warned(lambda turn: step(Batch(torch.ones(2))), 6)
    assert "a class of its arguments, or what that refers to, changes" in text


def test_what_is_defined_once_gives_none(make_mesh, monkeypatch):
    tell_renewals_after(monkeypatch, 20)
    mesh, x, captured = make_mesh({"data": 2}), torch.ones(2), {"rate": 0.0}
    step = spmd(lambda x, number: x + number, mesh=mesh)
    assert warned(lambda turn: step(x, turn), 30) == []  # a flag, perhaps
    assert warned(lambda turn: step(torch.ones(turn + 1), 1), 30) == []

    @spmd(mesh=mesh)
    def scaled(x):
        return x * captured["rate"]

    def epoch(turn):
        captured["rate"] += 0.5
        return [scaled(x) for _ in range(2)]

    def several(turn):  # of one text, each called several times
        again = spmd(lambda x: x + turn, mesh=mesh)
        return again(x), again(x)

    assert warned(epoch, 25) == [] == warned(several, 25)


# -- several threads ---------------------------------------------------------------------------------------------------


def test_calls_of_two_structures_at_one_moment(shared_mesh):
    """A call keeps the structure in which it has found its leaves, though one in another thread comes between."""
    step = spmd(lambda tree: {name: leaf + 1 for name, leaf in tree.items()}, mesh=shared_mesh({"data": 2}))
    one, other = {"a": torch.zeros(2)}, {"b": torch.ones(2)}
    for _ in range(3):  # a structure that comes twice in a row is kept
        step(one)
    with beside_next("leaves", lambda: [step(other) for _ in range(3)]):
        found = step(one)
    assert {name: value.full().tolist() for name, value in found.items()} == {"a": [1, 1]}


def test_results_of_two_shapes_at_one_moment(shared_mesh):
    """Each call has the shapes of its own results, though those of another are found meanwhile."""
    ones = spmd(lambda n: torch.ones(int(n)), mesh=shared_mesh({"data": 2}), check="never")
    ones(torch.tensor(2.0))
    first, second = ones(torch.tensor(2.0)), ones(torch.tensor(4.0))

    class Prints(dict):
        def values(self):
            assert second.shape == (4,)  # as in another thread, after it was seen that the first are as before
            return super().values()

    task = first._source.task
    assert until(task.settled.is_set)
    task.prints = Prints(task.prints)
    assert first.shape == (2,)
    assert first.full().tolist() == [1] * 2 and second.full().tolist() == [1] * 4


def test_steps_draw_the_same_beside_what_another_thread_computes(make_mesh, tmp_path):
    """Torch's functions on Arrays are no steps of the program, and steps that come meanwhile are."""
    undisturbed, mesh = make_mesh({"data": 2}), make_mesh({"data": 2})
    step, may_go_on = spmd(lambda: torch.rand(3), out_specs=P("data")), tmp_path / "may go on"
    with undisturbed:
        expected = [step().full().tolist() for _ in range(4)]
    with mesh:
        drawn, x = [step(), step()], put(torch.tensor([0.0, 1.0]))
        busy = [mesh.submit(until, may_go_on.exists, rank=rank) for rank in range(2)]
        thread = threading.Thread(target=lambda: torch.nonzero(x))  # it waits for the shape
        thread.start()
        assert until(lambda: len(mesh.driver.pending.tasks) > 2)
        drawn.append(step())
        may_go_on.touch()
        thread.join()
        assert all(future.result() for future in busy)
        assert [value.full().tolist() for value in [*drawn, step()]] == expected


def test_runs_draw_the_same_beside_what_another_thread_saves(make_mesh, tmp_path):
    def draw(mesh):
        return mesh.run(lambda: torch.rand(2).tolist())

    undisturbed, mesh = make_mesh({"data": 2}), make_mesh({"data": 2})
    found = [draw(mesh)]
    with beside_next("next_run", lambda: found.append(draw(mesh))):
        save(tmp_path, {"w": put(torch.ones(2), mesh=mesh)})
    assert len(found) == 2  # one of them while it was saved
    assert [*found, draw(mesh)] == [draw(undisturbed) for _ in range(3)]


def test_what_is_not_counted_within_what_is_not(make_mesh):
    """As where a signal's handler saves while the program does: the outer block goes on after the inner one."""
    state = make_mesh({"data": 1}).run_state
    for block in (state.uncounted, state.aside):
        first = state.next_run()
        with block():
            with block():
                state.next_run()
            state.next_run()
        assert state.next_run() == first + 1


def test_an_error_is_raised_in_the_thread_whose_call_failed(make_mesh):
    """Another thread's next call, made before this one has seen the error, is as if nothing had been."""
    mesh = make_mesh({"data": 2})
    step = spmd(lambda x: 1 / x if x.item() else 1 // int(x), mesh=mesh)
    one, zero, found = torch.tensor(1.0), torch.tensor(0.0), []
    float(step(one))

    def call():
        failed = step(zero)
        assert until(failed._source.task.settled.is_set)
        failing.set()
        assert on.wait(10)
        try:
            step(one)
        except ZeroDivisionError as error:
            found.append(error)

    failing, on, thread = threading.Event(), threading.Event(), threading.Thread(target=call)
    thread.start()
    assert failing.wait(10)
    assert float(step(one)) == 1
    on.set()
    thread.join(10)
    assert len(found) == 1
    assert float(step(one)) == 1

    thread = threading.Thread(target=lambda: found.append(step(zero)))
    thread.start()
    thread.join(10)
    assert until(found.pop()._source.task.settled.is_set)
    with pytest.raises(ZeroDivisionError):  # its thread has ended, and will not see it
        step(one)


@pytest.mark.parametrize("on_loss", ["rerun", "raise"])
def test_calls_that_another_threads_failure_stops(make_mesh, on_loss):
    """Steps run again; what may have had effects, or reads what is gone, says what has stopped it."""
    mesh = make_mesh({"data": 2}, on_loss=on_loss)
    opt = optimizer(torch.optim.SGD, lr=1.0, shard=None)

    def fail(x):
        if x and mesh.rank == 1:
            time.sleep(0.2)
            raise ValueError(f"no {int(x)}")
        return x

    @spmd(mesh=mesh, donate="params")
    def overwrite(params):
        return opt.step(params, {"w": torch.ones(5000)}, opt.init(params))[0]

    failing, step = spmd(fail, mesh=mesh), spmd(lambda x: psum(x, "data"), mesh=mesh)
    one, own, large = torch.ones(()), [], put(torch.ones(1 << 16), P("data"), mesh=mesh)
    assert float(step(put(one, mesh=mesh))) == 2
    for _ in range(2):  # later calls do not wait
        failing(torch.zeros(()))

    def call(begun, given):
        given.append(failing(one))
        begun.set()
        with pytest.raises(ValueError, match="no 1"):
            float(given[0])
        own.append(True)

    @contextlib.contextmanager
    def failing_meanwhile():
        begun, given = threading.Event(), []
        thread = threading.Thread(target=call, args=(begun, given))
        thread.start()
        assert begun.wait(10)
        yield given
        thread.join(10)
        assert own.pop()

    says = r"a call that another thread made has failed \(got ValueError: no 1\).*make it again"
    reruns = on_loss == "rerun"
    with failing_meanwhile(), pytest.raises(MeshError, match=says):
        mesh.run(lambda: 1)
    with failing_meanwhile() as given, pytest.raises(MeshError, match="another thread made has failed"):
        float(step(*given))
    with failing_meanwhile(), contextlib.nullcontext() if reruns else pytest.raises(MeshError, match=says):
        assert large.full().sum() == 1 << 16
    with failing_meanwhile(), contextlib.nullcontext() if reruns else pytest.raises(MeshError, match=says):
        assert float(step(one)) == 2
    params = put({"w": torch.ones(5000)}, mesh=mesh)
    for _ in range(2):
        params = overwrite(params)
    lost = "argument 0 was donated to it, and is lost: restore a" if reruns else says
    with failing_meanwhile(), pytest.raises(MeshError, match=lost):
        overwrite(params)["w"].full()
    assert float(step(put(one, mesh=mesh))) == 2


def test_a_long_step_that_another_threads_failure_stops_runs_again(make_mesh, tmp_path):
    """Its ranks are still in it when the other thread is told of the failure."""
    mesh, failed = make_mesh({"data": 2}), []
    sent, begun = tmp_path / "sent", tmp_path / "begun"

    def fail():
        sent.touch()
        until(begun.exists)
        raise ValueError("mine")

    @spmd(mesh=mesh)
    def step(x):
        if mesh.rank == 0 and not begun.exists():
            begun.touch()
            time.sleep(30)
        return psum(x, "data")

    def call():
        with pytest.raises(ValueError, match="mine"):
            mesh.run(fail, ranks=[1])
        failed.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    assert until(sent.exists)
    assert float(step(torch.ones(()))) == 2
    thread.join(10)
    assert failed


def test_a_call_that_waits_for_another_threads_does_not_raise_its_error(make_mesh):
    """Of calls under way there are few: a call waits for the oldest, whoever made it."""
    mesh = make_mesh({"data": 2})

    def run(x):
        time.sleep(0.3)
        return 1 / x if x.item() else 1 // int(x)

    step, one, failed = spmd(run, mesh=mesh), torch.ones(()), []
    for _ in range(2):  # later calls do not wait
        float(step(one))

    def call():
        failed.append(step(torch.zeros(())))
        begun.set()
        assert on.wait(20)
        with pytest.raises(ZeroDivisionError):
            step(one)

    begun, on, thread = threading.Event(), threading.Event(), threading.Thread(target=call)
    thread.start()
    assert begun.wait(10)
    results = [step(one) for _ in range(3)]
    on.set()
    thread.join(10)
    assert failed and [*map(float, results)] == [1, 1, 1]


def test_a_call_waits_for_another_thread_that_restarts_the_mesh(make_mesh, monkeypatch):
    mesh = make_mesh({"data": 2}, timeout=20)
    step, found, threads = spmd(lambda x: psum(x, "data"), mesh=mesh), [], []
    start = type(mesh.driver).start

    def started(driver):
        threads.append(threading.Thread(target=lambda: found.append(float(step(torch.ones(()))))))
        threads[0].start()
        threads[0].join(0.3)
        start(driver)

    monkeypatch.setattr(type(mesh.driver), "start", started)
    mesh.restart()
    threads[0].join(30)
    assert found == [2] and float(step(torch.ones(()))) == 2


def test_threads_restart_a_mesh_at_once(make_mesh):
    mesh, ended = make_mesh({"data": 2}), []

    def restart():
        for _ in range(3):
            mesh.restart()
        ended.append(True)

    threads = [threading.Thread(target=restart) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ended == [True, True] and mesh.run(lambda: 1) == [1, 1]


def test_threads_make_calls_that_failed_again_at_once(make_mesh):
    """Each is made again by one of them, with its own number."""
    state, ended = make_mesh({"data": 1}).run_state, []

    def call():
        for _ in range(300):
            state.fail_call(state.begin_call("step", counted=True))
        ended.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert len(ended) == 4
