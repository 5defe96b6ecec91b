"""Runs that are saved, stopped and taken up again: they draw on as if they had never stopped, and say what differs."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import cases
from scripts import launched, script

from spmd import Loader, Mesh, PeerLost, data_parallel, restore, save, spmd, value_and_grad


def step(x: Any, batch: Any) -> Any:
    return x + 1


def rewritten(path: Path, **changed: Any) -> None:
    """The only checkpoint of a directory with another fingerprint; None leaves a part out."""
    file = next(path.glob("*/checkpoint.json"))
    manifest = json.loads(file.read_text())["manifest"]
    whole = {**manifest["fingerprint"], **changed}
    manifest["fingerprint"] = {name: value for name, value in whole.items() if value is not None}
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    file.write_text(json.dumps({"sha256": digest, "manifest": manifest}))


def told(run: Any) -> list[str]:
    """What is said of fingerprints while something runs: the parts in brackets."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    texts = [str(one.message) for one in caught if one.category is not ResourceWarning]  # of what others left behind
    assert all("under another fingerprint" in text for text in texts), texts
    return [text.rpartition("(")[2].rstrip(")") for text in texts]


def told_of(run: Any, expected: list[str]) -> Any:
    """What something returns that says so much of fingerprints."""
    found = []
    assert told(lambda: found.append(run())) == expected
    return found[0]


def test_another_fingerprint_is_told(make_mesh: Any, tmp_path: Path) -> None:
    one, other = make_mesh({"data": 1}), make_mesh({"data": 2}, threads=2, backend="gloo")
    x = spmd(data_parallel(step, shards=4, wire_dtype=torch.bfloat16), mesh=one)(torch.ones(2), torch.ones(4))
    save(tmp_path, {"x": x})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore(tmp_path, mesh=one)
    with pytest.warns(UserWarning, match=r"another fingerprint.*\(threads: 1, now 2\)"):
        back = restore(tmp_path, mesh=other)
    with pytest.warns(UserWarning, match="shards of step: 4, now 2; wire dtype of step: torch.bfloat16, now None"):
        spmd(data_parallel(step, shards=2), mesh=other)(back["x"], torch.ones(4))
    manifest = json.loads(next(tmp_path.glob("*/checkpoint.json")).read_text())["manifest"]
    assert {"torch", "CPU capability", "seed", "threads", "backend class", "steps"} == {*manifest["fingerprint"]}
    assert manifest["fingerprint"]["steps"] == {"step": [{"shards": 4, "wire dtype": "torch.bfloat16"}]}
    rewritten(tmp_path, torch="1.0")
    with pytest.warns(UserWarning, match=r"torch: 1\.0, now"):
        restore(tmp_path)


def test_with_shards_the_backend_is_not_seen_in_the_bits(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 1})
    x = spmd(data_parallel(step, shards=4), mesh=mesh)(torch.ones(2), torch.ones(4))
    save(tmp_path, {"x": x})
    rewritten(tmp_path, **{"backend class": "hierarchical"})
    assert told(lambda: restore(tmp_path, mesh=mesh)) == []
    rewritten(tmp_path, steps={"step": [{"shards": 4}], "other": [{"shards": None}]})
    assert told(lambda: restore(tmp_path, mesh=mesh)) == ["backend class: hierarchical, now in order"]


def test_plain_values_are_compared_where_a_mesh_goes_on_with_them(make_mesh: Any, tmp_path: Path) -> None:
    def run(mesh: Any, x: Any, shards: int) -> Any:
        return spmd(data_parallel(step, shards=shards), mesh=mesh)(x, torch.ones(4))

    save(tmp_path, {"x": run(make_mesh({"data": 1}), torch.ones(2), 4)})
    for options, shards, expected in (
        ({}, 4, []),
        ({}, 2, ["shards of step: 4, now 2"]),
        ({"threads": 2, "seed": 1}, 4, ["seed: 0, now 1; threads: 1, now 2"]),
        ({"threads": 2}, 2, ["threads: 1, now 2", "shards of step: 4, now 2"]),
    ):
        mesh, x = make_mesh({"data": 2}, **options), restore(tmp_path)["x"]
        for wanted in (expected, []):  # told once
            assert told(lambda mesh=mesh, x=x, shards=shards: run(mesh, x, shards)) == wanted, (options, shards)
    other = make_mesh({"data": 1}, seed=9)
    assert told(lambda: run(other, torch.ones(2), 4)) == []  # what another mesh has taken up is its
    other.restart()
    x = restore(tmp_path)["x"]
    assert told(lambda: run(other, x, 4)) == ["seed: 0, now 9"]


def test_steps_are_compared_with_those_of_the_same_name(make_mesh: Any, tmp_path: Path) -> None:
    def evaluate(x: Any, batch: Any) -> Any:
        return x * 2

    def report(x: Any, batch: Any) -> Any:
        return x * 3

    def call(f: Any, mesh: Any, shards: int | None) -> Any:
        return spmd(data_parallel(f, shards=shards), mesh=mesh)(torch.ones(2), torch.ones(4))

    one = make_mesh({"data": 1})
    x = call(step, one, 4)
    call(evaluate, one, None)
    save(tmp_path, {"x": x})
    for calls, expected in (
        ([(step, 4), (evaluate, None)], []),
        ([(evaluate, None), (step, 4)], []),
        ([(report, 3), (evaluate, None), (step, 2), (step, 2)], ["shards of step: 4, now 2"]),
        ([(step, 2), (evaluate, 4)], ["shards of step: 4, now 2", "shards of evaluate: None, now 4"]),
    ):
        mesh = make_mesh({"data": 1})
        restore(tmp_path, mesh=mesh)
        got = [text for f, shards in calls for text in told(lambda f=f, m=mesh, shards=shards: call(f, m, shards))]
        assert got == expected, calls


def test_other_seeds_and_another_loader_are_told(make_mesh: Any, tmp_path: Path) -> None:
    def loader(mesh: Any, **options: Any) -> Loader:
        return Loader(torch.arange(24), **{"batch_size": 4, "mesh": mesh, "seed": 1, "shards": 4, **options})

    one, other = make_mesh({"data": 1}, seed=5), make_mesh({"data": 2}, seed=6)
    save(tmp_path, {"loader": loader(one)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore(tmp_path, like={"loader": loader(one)})
        restore(tmp_path)
    with pytest.warns(UserWarning, match=r"another fingerprint.*\(seed: 5, now 6\)"):
        restore(tmp_path, like={"loader": loader(other)})
    for name, value in {"batch_size": 6, "seed": 2, "shuffle": False, "drop_last": True, "shards": None}.items():
        with pytest.warns(UserWarning, match=rf"\({name} of the Loader \['loader'\]: .*, now {value}\)"):
            restore(tmp_path, like={"loader": loader(one, **{name: value})})


@pytest.mark.parametrize("placed", [True, False])
def test_steps_that_have_not_run_since_are_told_on(make_mesh: Any, tmp_path: Path, placed: bool) -> None:
    """Taken up and saved before its first step: the next run that takes it up still hears of another V."""

    def evaluate(x: Any, batch: Any) -> Any:
        return x * 2

    def call(f: Any, mesh: Any, x: Any, shards: int) -> Any:
        return spmd(data_parallel(f, shards=shards), mesh=mesh)(x, torch.ones(4))

    first = make_mesh({"data": 1}, seed=3)
    x = call(evaluate, first, call(step, first, torch.ones(2), 4), 2)
    save(tmp_path / "0", {"x": x})
    for index in range(2):
        mesh = make_mesh({"data": 1}, seed=3)
        state = restore(tmp_path / str(index), mesh=mesh) if placed else restore(tmp_path / str(index))
        if index:
            state["x"] = call(evaluate, mesh, state["x"], 2)
        save(tmp_path / str(index + 1), state)
    mesh = make_mesh({"data": 2}, seed=3)
    x = restore(tmp_path / "2", mesh=mesh)["x"]
    assert told(lambda: call(step, mesh, x, 2)) == ["shards of step: 4, now 2"]
    assert told(lambda: call(evaluate, mesh, x, 3)) == ["shards of evaluate: 2, now 3"]
    assert mesh.run_state.position[0] == 5  # two calls, one, and two
    # A step that has run since is told of as it ran.
    save(tmp_path / "3", {"x": x})
    mesh = make_mesh({"data": 1}, seed=3)
    x = restore(tmp_path / "3", mesh=mesh)["x"]
    assert told(lambda: call(step, mesh, x, 2)) == []


def test_plain_values_saved_again_tell_of_their_mesh(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 1}, seed=3)
    save(tmp_path / "first", {"x": spmd(data_parallel(step, shards=4), mesh=mesh)(torch.ones(2), torch.ones(4))})
    save(tmp_path / "second", restore(tmp_path / "first"))
    other = make_mesh({"data": 1}, seed=4)
    x = told_of(lambda: restore(tmp_path / "second", mesh=other)["x"], ["seed: 3, now 4"])
    assert told(lambda: spmd(data_parallel(step, shards=2), mesh=other)(x, torch.ones(4))) == [
        "shards of step: 4, now 2"
    ]


def test_warnings_name_the_users_line(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 1})
    save(tmp_path, {"x": spmd(data_parallel(step, shards=4), mesh=mesh)(torch.ones(2), torch.ones(4))}, step=0)
    other, third = make_mesh({"data": 1}, seed=1), make_mesh({"data": 1}, seed=1)
    go = [spmd(data_parallel(step, shards=2), mesh=one) for one in (other, third)]
    lines = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines.append(inspect.currentframe().f_lineno + 1)  # type: ignore[union-attr]
        back = restore(tmp_path, mesh=other)
        lines.append(inspect.currentframe().f_lineno + 1)  # type: ignore[union-attr]
        go[0](back["x"], torch.ones(4))
        plain = restore(tmp_path)
        lines += 2 * [inspect.currentframe().f_lineno + 1]  # type: ignore[union-attr]
        go[1](plain["x"], torch.ones(4))
        (tmp_path / "step-00000001").mkdir()
        (tmp_path / "step-00000001" / "checkpoint.json").write_text("")
        lines.append(inspect.currentframe().f_lineno + 1)  # type: ignore[union-attr]
        restore(tmp_path)
    ours = [one for one in caught if one.category is not ResourceWarning]
    assert [one.filename for one in ours] == [__file__] * len(lines)
    assert [one.lineno for one in ours] == lines


# -- random numbers go on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_random_numbers_of_whole_batches_go_on(make_mesh: Any, tmp_path: Path, placed: bool) -> None:
    """Without a Loader they are keyed by the number of the call, which is that of a run that never stopped."""

    def step(w: Any, batch: Any) -> Any:
        value, gradient = value_and_grad(lambda w, x: F.dropout(x * w, 0.5).square().mean())(w, batch)
        return w - gradient, value

    def steps(mesh: Any, w: Any, first: int, path: Path) -> list[float]:
        values = []
        go = spmd(data_parallel(step, shards=4), mesh=mesh)
        for number in range(first, 5):
            w, value = go(w, torch.ones(8, 4) + number)
            values.append(value.item())
            save(path, {"w": w}, step=number)
        return [*values, *w.full().tolist(), *mesh.run(lambda: torch.rand(()).item())[:1]]

    whole = steps(make_mesh({"data": 1}), torch.ones(4), 0, tmp_path / "whole")
    for stop, ranks in ((0, 2), (2, 3), (3, 1)):
        mesh = make_mesh({"data": ranks})
        folder = tmp_path / "whole" / f"step-{stop:08d}"
        state = restore(folder, mesh=mesh) if placed else restore(folder)
        assert steps(mesh, state["w"], stop + 1, tmp_path / f"{stop}") == whole[stop + 1 :], (stop, ranks)


@pytest.mark.parametrize(
    ("order", "placed"),
    cases(
        lambda order, placed: placed == ((True, False) if order == "teacher first" else (False, True)),
        ("teacher first", "teacher last"),
        itertools.product((True, False), repeat=2),
    ),
)
def test_a_teacher_does_not_move_the_run(make_mesh: Any, tmp_path: Path, order: str, placed: tuple[bool, bool]) -> None:
    """Restored beside the run's own state, before it or after it: the run draws as if it had never stopped."""

    def noisy(w: Any, batch: Any) -> Any:
        value, gradient = value_and_grad(lambda w, x: F.dropout(x * w, 0.5).square().mean())(w, batch)
        return w - gradient, value

    def steps(mesh: Any, w: Any, numbers: range, path: Path | None = None) -> list[float]:
        values, go = [], spmd(data_parallel(noisy, shards=4), mesh=mesh)
        for number in numbers:
            w, value = go(w, torch.ones(8, 4) + number)
            values.append(value.item())
            if path is not None:
                save(path, {"w": w}, step=number)
        return values

    def begun(ranks: int, resumed: bool) -> tuple[Any, Any]:
        mesh, w = make_mesh({"data": ranks}), torch.ones(4)
        for which in ("teacher", "run") if order == "teacher first" else ("run", "teacher"):
            if which == "run" and resumed:
                folder = tmp_path / "run" / "step-00000002"
                w = restore(folder, mesh=mesh)["w"] if placed[0] else restore(folder)["w"]
            if which == "teacher":
                _ = restore(tmp_path / "teacher", mesh=mesh) if placed[1] else restore(tmp_path / "teacher")
        return mesh, w

    steps(make_mesh({"data": 1}), torch.ones(4), range(2), tmp_path / "teacher")
    whole = steps(*begun(1, False), range(5), tmp_path / "run")
    assert steps(*begun(2, True), range(3, 5)) == whole[3:]


class Program:
    """Whole batches, dropout, and a checkpoint after every step."""

    def __init__(self, mesh: Any, path: Path):
        self.mesh, self.path = mesh, path
        self.train = spmd(data_parallel(self._train, shards=4), mesh=mesh)
        self.evaluate = spmd(data_parallel(self._evaluate, shards=4), mesh=mesh)
        self.w: Any = torch.ones(4)

    @staticmethod
    def _train(w: Any, batch: Any) -> Any:
        value, gradient = value_and_grad(lambda w, x: F.dropout(x * w, 0.5).square().mean())(w, batch)
        if bool(w.isnan().any()):
            raise ValueError("not a number")
        return w - 0.1 * gradient, value

    @staticmethod
    def _evaluate(w: Any, batch: Any) -> Any:
        return w.sum()

    def step(self, number: int) -> float:
        self.w, value = self.train(self.w, torch.ones(8, 4) + number)
        save(self.path, {"w": self.w}, step=number)
        return value.item()

    def restored(self, number: int, placed: bool) -> Any:
        folder = self.path / f"step-{number:08d}"
        return (restore(folder, mesh=self.mesh) if placed else restore(folder))["w"]


@pytest.mark.parametrize("placed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_older_one_restored_in_the_middle_changes_nothing(make_mesh: Any, tmp_path: Path, placed: bool) -> None:
    """The best one is looked at after every step: by a run that never stops, and by one that is taken up."""
    plain = Program(make_mesh({"data": 1}), tmp_path / "plain")
    expected = [plain.step(number) for number in range(5)]

    def run(one: Program, numbers: range) -> list[float]:
        found = []
        for number in numbers:
            found.append(one.step(number))
            best = one.restored(min(number, 1), placed)
            if number % 2:
                one.evaluate(best, torch.ones(4))
        return found

    # The evaluations count, and so are part of both runs.
    mesh = make_mesh({"data": 1})
    whole = run(Program(mesh, tmp_path / "whole"), range(5))
    assert whole[:2] == expected[:2]
    one = Program(make_mesh({"data": 2}), tmp_path / "whole")
    one.w = one.restored(2, placed)
    assert run(one, range(3, 5)) == whole[3:] and one.mesh.run_state.position == mesh.run_state.position


@pytest.mark.parametrize("placed", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_furthest_of_several_counts(make_mesh: Any, tmp_path: Path, placed: bool) -> None:
    """Two of one directory and a teacher, in any order, with an evaluation in between."""
    teacher, own = (Program(make_mesh({"data": 1}), tmp_path / name) for name in ("teacher", "own"))
    for number in range(2):
        teacher.step(number)
    for number in range(4):
        own.step(number)
    sources = [(teacher, 1), (own, 3), (own, 0)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)):
        one = Program(make_mesh({"data": 1}), tmp_path / "again")
        for index in order:
            source, number = sources[index]
            w = Program(one.mesh, source.path).restored(number, placed)
            if index == 0:
                one.evaluate(w, torch.ones(4))
            if index == 1:
                one.w = w
        if order[-1] == 0:
            continue
        value = one.step(0)
        # The evaluation is a call, too: before the run's own was restored it is one of those that this has made.
        assert one.mesh.run_state.position[0] == (5 if order.index(0) < order.index(1) else 6), (order, value)


FAILING = ["at the call", "at the fetch", "killed"]


def fail(one: Program, how: str) -> None:
    """Have a call of the training step fail."""
    bad, batch = torch.full((4,), float("nan")), torch.ones(8, 4)
    if how == "killed":
        # Stopped, it can't end the call; a rank that is dead before the call is replaced, and nothing fails.
        os.kill(pid := one.mesh.driver.pids[-1], signal.SIGSTOP)
        value = one.train(one.w, batch)[1]  # is not waited for
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerLost):
            value.item()
    elif how == "at the fetch":
        value = one.train(bad, batch)[1]
        with pytest.raises(ValueError, match="not a number"):
            value.item()
    else:
        fresh = spmd(data_parallel(one._train, shards=2), mesh=one.mesh)  # whose first call is waited for
        with pytest.raises(ValueError, match="not a number"):
            fresh(bad, batch)


@pytest.mark.filterwarnings("ignore:this run goes on")  # another V, where the function is another
@pytest.mark.parametrize(
    ("how", "placed"),
    [
        *((how, True) for how in FAILING),
        *(pytest.param(how, False, marks=pytest.mark.long) for how in FAILING),
    ],
)
def test_after_a_call_that_failed_it_goes_back(make_mesh: Any, tmp_path: Path, how: str, placed: bool) -> None:
    one = Program(make_mesh({"data": 2}, on_loss="raise"), tmp_path)
    values = [one.step(number) for number in range(4)]
    fail(one, how)
    one.w = one.restored(1, placed)
    one.restored(0, placed)  # the furthest of those restored since counts
    assert [one.step(number) for number in (2, 3)] == values[2:]
    at = one.mesh.run_state.position
    one.restored(0, placed)
    one.step(4)
    assert one.mesh.run_state.position == (at[0] + 1, at[1])  # forwards only, from here on


@pytest.mark.filterwarnings("ignore:this run goes on")
@pytest.mark.parametrize("how", FAILING)
def test_a_call_made_again_draws_what_it_would_have_drawn(make_mesh: Any, tmp_path: Path, how: str) -> None:
    """A call that failed has no number of its own; what else is called between has."""
    one = Program(make_mesh({"data": 2}, on_loss="raise"), tmp_path / "failing")
    whole = Program(make_mesh({"data": 2}), tmp_path / "whole")
    expected = [whole.step(number) for number in range(2)]
    whole.train(whole.w, torch.ones(8, 4))
    whole.evaluate(whole.w, torch.ones(4))
    expected += [whole.step(number) for number in (2, 3)]
    values = [one.step(number) for number in range(2)]
    fail(one, how)
    one.evaluate(one.w, torch.ones(4))
    one.train(one.w, torch.ones(8, 4))
    for number in (2, 3):
        fail(one, how)
        values.append(one.step(number))
    assert values == expected


def test_between_a_failure_and_what_is_restored(make_mesh: Any, tmp_path: Path) -> None:
    """Other functions leave it open whether the run goes back; the one that failed, called again, or `save` tell."""
    one = Program(make_mesh({"data": 1}), tmp_path)
    values = [one.step(number) for number in range(3)]
    fail(one, "at the fetch")
    one.evaluate(one.w, torch.ones(4))
    one.w = one.restored(1, True)
    assert one.step(2) == values[2]
    for go_on in (lambda: one.train(one.w, torch.ones(8, 4)), lambda: save(tmp_path / "other", {"w": one.w})):
        fail(one, "at the fetch")
        go_on()
        before = one.mesh.run_state.position
        one.restored(0, True)
        assert one.mesh.run_state.position == before
    one.restored(0, False)  # only looked at, before a call fails
    fail(one, "at the fetch")
    before = one.mesh.run_state.position
    one.train(one.w, torch.ones(8, 4))
    assert one.mesh.run_state.position == before  # the call that failed, made again
    with pytest.raises(OSError, match="Not a directory"):  # what the disk says is no failed step
        save(__file__, {"w": one.w})
    before = one.mesh.run_state.position
    one.restored(0, True)
    assert one.mesh.run_state.position == before


def test_regions_without_data_parallel_go_on(make_mesh: Any, tmp_path: Path) -> None:
    def draw(x: Any) -> Any:
        return x + torch.rand(())

    def drawn(mesh: Any, x: Any, count: int) -> list[float]:
        go, found = spmd(draw, mesh=mesh, check="never"), []
        for number in range(count):
            x = go(x)
            found.append(x.item())
            save(tmp_path / mesh.backend, {"x": x}, step=number)
        return found

    whole = drawn(make_mesh({"data": 1}, backend="shm"), torch.zeros(()), 4)
    for placed in (True, False):
        mesh, folder = make_mesh({"data": 1}, backend="gloo"), tmp_path / "shm" / "step-00000001"
        x = (restore(folder, mesh=mesh) if placed else restore(folder))["x"]
        assert drawn(mesh, x, 2) == whole[2:], placed


LAUNCHED = r"""
import sys
import torch
from spmd import Mesh, data_parallel, restore, save, spmd
mesh = Mesh()
path = sys.argv[1]

@spmd(mesh=mesh)
@data_parallel(shards=2)
def draw(x, batch):
    if bool(x.isnan().any()):
        raise ValueError("not a number")
    return x + torch.rand(2)

x, told = torch.zeros(2), []
for number in range(3):
    x = draw(x, torch.ones(4))
    save(path, {"x": x}, step=number)
before = mesh.run_state.position
restore(path + "/step-00000000", mesh=mesh)
told.append(mesh.run_state.position == before)
for placed in (True, False):
    try:
        draw(torch.full((2,), float("nan")), torch.ones(4))
    except ValueError:
        back = restore(path + "/step-00000001", **({"mesh": mesh} if placed else {}))["x"]
    told.append(torch.equal(draw(back, torch.ones(4)).full(), x.full()))
sys.stdout.write(f"{mesh.rank} {told}\n")
mesh.close()
"""


def test_launched_ranks_go_back_after_a_call_that_failed(tmp_path: Path) -> None:
    status, out, err = launched(2, script(tmp_path, LAUNCHED), str(tmp_path / "runs"))
    assert status == 0, err
    assert "0 [True, True, True]\n" in out and "1 [True, True, True]\n" in out


def test_a_look_at_a_checkpoint_does_not_move_a_later_mesh(make_mesh: Any, tmp_path: Path) -> None:
    def step(w: Any, batch: Any) -> Any:
        loss, g = value_and_grad(lambda w, x: (F.dropout(x * w, 0.5) ** 2).mean())(w, batch)
        return w - 0.01 * g, loss

    def trained(folder: Path, look: bool) -> list[float]:
        found, w = [], torch.ones(4)
        for begin, end, ranks in ((0, 4, 2), (4, 6, 1)):
            with Mesh({"data": ranks}) as mesh:
                go = spmd(data_parallel(step, shards=4), mesh=mesh)
                w = restore(folder, mesh=mesh)["w"] if begin else w
                for index in range(begin, end):
                    w, loss = go(w, torch.ones(8, 4) + index)
                    found.append(float(loss))
                    save(folder, {"w": w}, step=index)
                    if look and index == 1:
                        restore(folder)
        return found

    assert trained(tmp_path / "looked", True) == trained(tmp_path / "not", False)
