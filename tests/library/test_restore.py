"""Restoring beside writers, on file systems that differ, and into another program; and what `save` leaves alone."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bodies import never_finish_writing
from patience import HANGS, until
from scripts import launched, run, script, started

from spmd import Loader, P, Sampler, SpecError, SpmdError, optimizer, put, restore, save, spmd

# -- a writer at the same time ----------------------------------------------------------------------------------------


def of(value: float) -> dict[str, Any]:
    return {"a": torch.full((2000,), value), "b": torch.full((2000,), value), "n": value}


def values(back: dict[str, Any]) -> set[float]:
    return {*back["a"].tolist(), *back["b"].tolist(), back["n"]}


WRITE_AGAIN = [{"step": 3}, {"step": 4, "keep": 1}]


@pytest.mark.parametrize("how", WRITE_AGAIN)
def test_written_again_after_it_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    save(tmp_path, of(1), step=3)
    read = os.preadv

    def then_written_again(*args: Any) -> Any:
        monkeypatch.setattr(os, "preadv", read)
        save(tmp_path, of(2), **how)
        return read(*args)

    monkeypatch.setattr(os, "preadv", then_written_again)
    assert values(restore(tmp_path)) == {1}


@pytest.mark.parametrize("how", WRITE_AGAIN)
@pytest.mark.parametrize("after", [1, 2])
def test_written_again_while_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any, after: int
) -> None:
    save(tmp_path, of(1), step=3)
    sha256, calls = hashlib.sha256, []

    def counting(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == after:  # of the manifest, and of the file
            save(tmp_path, of(2), **how)
        return sha256(*args)

    monkeypatch.setattr(hashlib, "sha256", counting)
    found = values(restore(tmp_path))
    assert found in ({1}, {2})


def test_removed_after_the_directory_was_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, of(1), step=3)
    iterdir, calls = Path.iterdir, []

    def then_removed(path: Path) -> Any:
        found = [*iterdir(path)]
        calls.append(path)
        if len(calls) == 1:
            save(tmp_path, of(2), step=4, keep=1)
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", then_removed)
    assert values(restore(tmp_path)) == {2}


WRITER = """
import ctypes, itertools, sys
import torch
from spmd import save
if sys.argv[2] == "same, in two steps":  # where names can't be exchanged
    ctypes.CDLL = lambda *_, **__: object()
for i in itertools.count():
    value = {"a": torch.full((2000,), float(i)), "b": torch.full((2000,), float(i)), "n": float(i)}
    save(sys.argv[1], value, step=None if sys.argv[2] == "next" else 3, keep=1)
"""


@pytest.mark.parametrize("steps", ["same", "same, in two steps", "next"])
def test_beside_a_writer(tmp_path: Path, steps: str) -> None:
    path = tmp_path / "runs"
    seen: list[set[float]] = []
    with started(script(tmp_path, WRITER), str(path), steps):
        assert until(lambda: [*path.glob("step-*")])
        end = time.monotonic() + HANGS
        while len(seen) < 200 or len(set(map(min, seen))) == 1:  # until it has written meanwhile
            seen.append(values(restore(path)))
            assert time.monotonic() < end
    assert all(len(one) == 1 for one in seen)


def test_a_checkpoint_that_is_exchanged_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is open, and what is listed is the old one, whose files are gone already."""
    path, other = tmp_path / "runs", tmp_path / "other"
    old, new = save(path, of(1)).result(), save(other, of(2)).result()
    listdir, looked = os.listdir, []

    def exchanging(where: Any = ".") -> list[str]:
        if not looked and isinstance(where, int):
            looked.append(where)
            old.rename(tmp_path / "aside")
            new.rename(old)
            for file in (tmp_path / "aside").iterdir():
                file.unlink()
        return listdir(where)

    monkeypatch.setattr(os, "listdir", exchanging)
    assert values(restore(path)) == {2.0} and looked


def test_what_was_restored_outlives_its_files(tmp_path: Path) -> None:
    save(tmp_path, of(1), step=3)
    back = restore(tmp_path)
    shutil.rmtree(tmp_path / "step-00000003")
    assert values(back) == {1}
    with pytest.raises(SpmdError, match=r"there is no checkpoint .*step-00000003"):
        restore(tmp_path / "step-00000003")


def test_no_file_stays_open(tmp_path: Path) -> None:
    save(tmp_path, of(1))
    back = [restore(tmp_path) for _ in range(5)]
    with pytest.raises(SpecError):
        restore(tmp_path, like={"x": 1})
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [link for link in links if link.startswith(str(tmp_path))] and len(back) == 5


# -- what save did not write ------------------------------------------------------------------------------------------


def test_no_file_stays_open_where_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as a file has just been opened."""
    save(tmp_path, {"a": torch.ones(3)})
    restore(tmp_path)
    opened, opens, stop_at = os.open, [], [0]

    def interrupted(*args: Any, **options: Any) -> int:
        number = opened(*args, **options)
        opens.append(number)
        if len(opens) == stop_at[0]:
            signal.raise_signal(signal.SIGINT)
        return number

    monkeypatch.setattr(os, "open", interrupted)
    restore(tmp_path)
    count, times = len(os.listdir("/proc/self/fd")), len(opens)
    assert times >= 3
    for stop_at[0] in range(1, times + 1):
        opens.clear()
        with pytest.raises(KeyboardInterrupt):
            restore(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == count


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("step-100", "step-00000003", "step-00000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "samples.png").write_text("mine")
    (tmp_path / "step-00000005").write_text("a file")
    there = {*os.listdir(tmp_path)}
    for step in (200, 201, 202):
        save(tmp_path, {"step": step}, step=step, keep=2)
    assert {*os.listdir(tmp_path)} == there | {"step-00000201", "step-00000202"}
    for step, what in ((3, "a folder"), (5, "a file")):
        with pytest.raises(SpecError, match=rf"step-{step:08d}: something .*got {what}\): move it elsewhere"):
            save(tmp_path, {"step": step}, step=step)
    assert {*os.listdir(tmp_path)} == there | {"step-00000201", "step-00000202"}
    assert (tmp_path / "step-00000003" / "samples.png").read_text() == "mine"


def test_a_folder_made_while_a_checkpoint_is_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def meanwhile(number: int) -> None:
        (tmp_path / "step-00000003").mkdir(exist_ok=True)
        (tmp_path / "step-00000003" / "samples.png").write_text("mine")
        fsync(number)

    monkeypatch.setattr(os, "fsync", meanwhile)
    with pytest.raises(SpecError, match="something that is no checkpoint"):
        save(tmp_path, {"w": 1}, step=3)
    assert os.listdir(tmp_path) == ["step-00000003"]
    assert os.listdir(tmp_path / "step-00000003") == ["samples.png"]


def test_folders_of_others_are_no_damaged_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, {"w": 1}, step=3)
    (tmp_path / "step-100").mkdir()
    (tmp_path / "step-00000200").write_text("a file")
    assert restore(tmp_path) == {"w": 1}  # without a warning


def test_a_directory_of_checkpoints_named_as_one(tmp_path: Path) -> None:
    save(tmp_path / "step-5", {"w": 1})
    assert restore(tmp_path / "step-5") == {"w": 1}
    with pytest.raises(SpecError, match=r"the folder of one checkpoint as the path .*step-00000000\): pass"):
        save(tmp_path / "step-5" / "step-00000000", {"w": 2})  # `restore` would give the old one for ever


# -- where two folders can't exchange names ---------------------------------------------------------------------------

KILLED_BETWEEN = """
import ctypes, os, signal, sys
from spmd import save
rename = os.rename

def killed(source, target):
    rename(source, target)
    if str(source).endswith("step-00000003"):
        os.kill(os.getpid(), signal.SIGKILL)

ctypes.CDLL = lambda *_, **__: object()
os.rename = killed
save(sys.argv[1], {"w": 2}, step=3)
"""


def test_killed_between_two_names(tmp_path: Path) -> None:
    paths = [tmp_path / "restored", tmp_path / "saved", tmp_path / "named"]
    program = script(tmp_path, KILLED_BETWEEN)
    for path in paths:
        save(path, {"w": 1}, step=3)
        status, _, err = run(program, str(path))
        assert status == -signal.SIGKILL, err
        assert "step-00000003" not in os.listdir(path)
    assert restore(paths[0]) == {"w": 1} and "step-00000003" in os.listdir(paths[0])
    save(paths[1], {"w": 0}, step=1)
    assert sorted(os.listdir(paths[1])) == ["step-00000001", "step-00000003"] and restore(paths[1]) == {"w": 1}
    assert restore(paths[2] / "step-00000003") == {"w": 1}


def test_set_aside_on_another_host(tmp_path: Path) -> None:
    """Whether its writer is at work can't be told from here: it is read where it is."""
    save(tmp_path, {"w": 1}, step=3)
    aside = tmp_path / ".step-00000003.aside-1-abcd-another-host"
    os.rename(tmp_path / "step-00000003", aside)
    assert restore(tmp_path) == {"w": 1} == restore(tmp_path / "step-00000003")
    assert os.listdir(tmp_path) == [aside.name]
    assert save(tmp_path, {"w": 2}).result().name == "step-00000004"
    save(tmp_path, {"w": 3}, step=3)
    assert restore(tmp_path / "step-00000003") == {"w": 3} and restore(tmp_path) == {"w": 2}


def test_a_renaming_that_fails_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {"w": 1}, step=3)
    rename = os.rename

    def failing(source: Any, target: Any) -> None:
        if Path(target).name == "step-00000003" and ".tmp-" in str(source):
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="no"):
        save(tmp_path, {"w": 2}, step=3)
    assert restore(tmp_path) == {"w": 1} and os.listdir(tmp_path) == ["step-00000003"]
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path, {"w": 2}, step=3)
    assert restore(tmp_path) == {"w": 2} and os.listdir(tmp_path) == ["step-00000003"]


# -- launched ranks ---------------------------------------------------------------------------------------------------

SEEN = r"""
import sys, warnings
import torch
from spmd import Mesh, put, restore
mesh = Mesh()
for name in sys.argv[2:]:
    # Each rank has a directory of its own, as it would with a network file system that is behind.
    position = mesh.run_state.position
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            back = restore(f"{sys.argv[1]}/{name}{mesh.rank}", mesh=mesh)
        told = f"{back['n']} {back['w'].local.tolist()} {mesh.run_state.position == position} {len(warned)}"
    except Exception as error:
        told = f"{type(error).__name__} {error}"
    sys.stdout.write(f"{name} {mesh.rank}: {told}\n")
mesh.close()
"""


def test_launched_ranks_take_up_the_same_one(tmp_path: Path) -> None:
    def directory(name: str, *steps: int) -> None:
        for step in steps:
            save(tmp_path / name, {"w": torch.full((2,), float(step)), "n": abs(step)}, step=abs(step))

    directory("behind0", 0, 1)
    directory("other0", 0, 1)
    directory("other1", 0, -1)
    directory("ahead0", 0, 1)
    for source, target, last in (("behind0", "behind1", False), ("ahead0", "ahead1", True)):
        shutil.copytree(tmp_path / source, tmp_path / target)
        if last:
            directory(target, 2)
        else:
            shutil.rmtree(tmp_path / target / "step-00000001")
    (tmp_path / "none1").mkdir()
    directory("damaged0", 0, 1)
    (tmp_path / "damaged0" / "step-00000001" / "checkpoint.json").write_text("")
    (tmp_path / "damaged1").symlink_to(tmp_path / "damaged0")
    arguments = (script(tmp_path, SEEN), str(tmp_path), "behind", "other", "none", "ahead", "damaged")
    status, out, err = launched(2, *arguments)
    assert status == 0, err
    told = {line.partition(": ")[0]: line.partition(": ")[2] for line in out.splitlines() if ": " in line}
    for name, what in (("behind", "there is no checkpoint"), ("other", "is another checkpoint")):
        assert told[f"{name} 0"] == told[f"{name} 1"]
        assert "Damaged the ranks do not see the same checkpoint" in told[f"{name} 0"]
        assert "on rank 1: " in told[f"{name} 0"] and what in told[f"{name} 0"]
    assert told["none 0"] == told["none 1"] and "SpmdError there is no checkpoint in" in told["none 0"]
    assert told["ahead 0"] == told["ahead 1"] == "1 [1.0, 1.0] True 0"
    assert told["damaged 0"] == told["damaged 1"] == "0 [0.0, 0.0] True 1"  # all are warned


# -- like -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "leaf", "expected"),
    [
        (
            "w",
            torch.ones(5, 3),
            r"another shape .*for \['w'\] \(expected \(5, 3\), got \(4, 3\) in the checkpoint\): ",
        ),
        ("w", torch.ones(4, 3).bfloat16(), r"another dtype .*for \['w'\] \(expected bfloat16, got float32 in"),
        ("w", np.ones((4, 3)), r"another dtype .*expected float64, got float32"),
        ("w", 3, r"another kind .*expected number, got tensor of shape \(4, 3\)"),
        ("n", torch.ones(2), r"another kind .*for \['n'\] \(expected tensor of shape \(2,\), got number"),
        ("n", "one", r"another kind .*expected string, got number"),
        ("n", "loader", r"another kind .*expected Loader, got number"),
        ("loader", torch.ones(2), r"another kind .*expected tensor of shape \(2,\), got Loader"),
        ("sampler", 3, r"another kind .*expected number, got Sampler"),
        ("none", torch.ones(2), r"another kind .*expected tensor of shape \(2,\), got None"),
        ("long", torch.ones(128), r"another shape .*expected \(128,\), got \(64,\)"),
    ],
)
def test_like_of_another_kind(tmp_path: Path, name: str, leaf: Any, expected: str) -> None:
    loader = Loader(torch.arange(10), 2)
    tree = {"w": torch.ones(4, 3), "n": 1, "loader": loader, "sampler": Sampler(10, 4), "none": None}
    tree["long"] = torch.ones(64)
    save(tmp_path, tree)
    with pytest.raises(SpecError, match=expected):
        restore(tmp_path, like={name: loader if isinstance(leaf, str) and leaf == "loader" else leaf})
    assert restore(tmp_path, like={**tree, name: None})["n"] == 1  # None stands for anything


def test_like_before_the_first_step(tmp_path: Path) -> None:
    """Numbers and tensors of one number take each other's place, and a number that of None."""
    save(tmp_path, {"loss": torch.tensor(2.5), "count": 3, "best": None})
    back = restore(tmp_path, like={"loss": 0.0, "count": torch.tensor(0), "best": 1.5})
    assert back == {"loss": torch.tensor(2.5), "count": 3, "best": None}


def test_like_of_an_optimizer_whose_state_was_split(make_mesh: Any, tmp_path: Path) -> None:
    """One parameter was frozen for a step, and an optimizer that begins with a state has one of other parts."""
    mesh, opt = make_mesh({"data": 1}), optimizer(torch.optim.Adagrad, lr=0.1)
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    step = spmd(lambda p, state: opt.step(p, {**p, "a": None}, state), mesh=mesh)
    _, state = step(params, opt.init(params))
    save(tmp_path, {"state": state})
    with pytest.raises(SpecError, match=r"another structure .*or None, which stands for anything"):
        restore(tmp_path, like={"state": opt.init(params)})
    again = restore(tmp_path, like={"state": None}, mesh=mesh)["state"]
    found = [step(params, its)[0]["b"].full() for its in (state, again)]
    assert torch.equal(*found)


def test_like_of_another_number_of_ranks(make_mesh: Any, tmp_path: Path) -> None:
    """Slices of a sharded optimizer are padded for the ranks that there are, or were when they were made."""
    opt = optimizer(torch.optim.AdamW, lr=0.1, shard="data")
    params = {"w": torch.linspace(0, 1, 150)}
    meshes = [make_mesh({"data": size}) for size in (1, 2, 3)]

    def step(p: Any, state: Any) -> Any:
        return opt.step(p, p, state)

    states = [spmd(step, mesh=mesh)(params, opt.init(params)) for mesh in meshes]

    def moments(state: Any) -> torch.Tensor:
        (own,) = state["state"].values()
        return own["exp_avg"].full()

    lengths = {len(moments(state)) for _, state in states}
    assert lengths == {192, 256}  # of 150
    for number, (new, state) in enumerate(states):
        path = tmp_path / str(number)
        save(path, {"params": new, "state": state})
        for mesh, (like, its_state) in zip(meshes, states, strict=True):
            for wanted in (its_state, opt.init(params)):
                back = restore(path, like={"params": like, "state": wanted}, mesh=mesh)
                after = spmd(step, mesh=mesh)(back["params"], back["state"])[0]["w"].full()
                assert torch.equal(after, spmd(step, mesh=meshes[number])(new, state)[0]["w"].full())
    meshes[2].resize({"data": 1})  # the state is as long as it was for three
    back = restore(tmp_path / "0", like={"state": states[2][1]}, mesh=meshes[2])["state"]
    assert torch.equal(*(moments(one)[:150] for one in (back, states[0][1])))
    meshes[1].resize({"data": 1})
    for number, tree in enumerate((states[1][1], back)):  # as it is saved now, too, and as it was restored
        save(tmp_path / f"resized-{number}", {"state": tree})
        for like in (states[0][1], states[2][1]):
            again = restore(tmp_path / f"resized-{number}", like={"state": like})["state"]
            found = (moments(one)[:150] for one in (again, tree))
            assert torch.equal(*found)
    other = {"w": torch.linspace(0, 1, 700)}
    with pytest.raises(SpecError, match=r"another structure .*exp_avg"):
        restore(tmp_path / "1", like={"state": spmd(step, mesh=meshes[0])(other, opt.init(other))[1]})


def test_nothing_is_touched_if_like_does_not_suit(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 1})
    loader = Loader(torch.arange(10), 2, mesh=mesh)
    next(iter(loader))
    save(tmp_path, {"loader": loader, "w": put(torch.ones(4), P("data"), mesh=mesh)})
    fresh = Loader(torch.arange(10), 2, mesh=mesh)
    mesh.run(int)
    position = mesh.run_state.position
    with pytest.raises(SpecError, match="another shape"):
        restore(tmp_path, like={"loader": fresh, "w": torch.ones(3)}, mesh=mesh)
    assert fresh.state_dict() == {"epoch": 0, "step": 0} and mesh.run_state.position == position


# -- leaves and steps -------------------------------------------------------------------------------------------------


def test_names_that_mean_something_else(tmp_path: Path) -> None:
    tree = {"__metadata__": torch.ones(2), "a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a.b#2": torch.ones(3)}
    save(tmp_path, tree)
    back = restore(tmp_path)
    assert back["__metadata__"].tolist() == [1, 1] and back["a"]["b"].tolist() == [0]
    assert back["a.b"].tolist() == [1] and back["a.b#2"].tolist() == [1, 1, 1]


def test_a_name_that_another_leaf_was_given(tmp_path: Path) -> None:
    save(tmp_path, {"a.b#2": torch.ones(3), "a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    back = restore(tmp_path)
    assert back["a.b#2"].tolist() == [1, 1, 1] and back["a.b"].tolist() == [1] and back["a"]["b"].tolist() == [0]


def test_views_that_are_conjugated_or_negated(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    tree = {"conj": z.conj(), "neg": z.conj().imag, "both": z.conj().clone().conj()}
    save(tmp_path, tree)
    back = restore(tmp_path)
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j] and back["neg"].tolist() == [-2, 4]
    assert back["both"].tolist() == [1 + 2j, 3 - 4j]


@pytest.mark.filterwarnings("ignore:.*(sparse|Sparse|quantize|nested).*")
@pytest.mark.parametrize("kind", ["sparse", "csr", "quantized", "meta", "nested"])
def test_tensors_that_are_not_dense(tmp_path: Path, kind: str) -> None:
    leaf = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "csr": lambda: torch.eye(2).to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "meta": lambda: torch.ones(2, device="meta"),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }[kind]()
    with pytest.raises(SpecError, match=r"cannot write, \['x'\] \(expected a dense tensor, got a .*tensor.*\): "):
        save(tmp_path, {"x": leaf})
    assert os.listdir(tmp_path) == []


def test_long_numbers(tmp_path: Path) -> None:
    tree = {"long": 10**300, "minus": -(10**300), "flag": True}
    save(tmp_path, tree)
    for back in (restore(tmp_path), restore(tmp_path, like=tree)):
        assert back == tree and type(back["flag"]) is bool
    with pytest.raises(SpecError, match=r"cannot write, \['n'\] .*got a number of .* bits"):
        save(tmp_path, {"n": 10**5000})


def test_steps_of_numpy(tmp_path: Path) -> None:
    assert save(tmp_path, {"w": 1}, step=np.int64(3)).result().name == "step-00000003"  # type: ignore[arg-type]
    for step in (True, np.bool_(True), np.int64(-1)):
        with pytest.raises(SpecError, match="bad step"):
            save(tmp_path, {"w": 1}, step=step)  # type: ignore[arg-type]


# -- a program that goes back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "back_to"), [(5, 2), (9, 7), (9, 3), (6, 6), (13, 0), (27, 20)])
def test_a_loop_goes_on_from_what_is_restored_in_it(make_mesh: Any, tmp_path: Path, at: int, back_to: int) -> None:
    """Each sample of four epochs counts once, whether the step that was saved is of the loop's epoch or of another."""

    def run(path: Path, at: int | None) -> list[tuple[int, list[int]]]:
        mesh = make_mesh({"data": 2})
        loader, seen = Loader(torch.arange(28), 4, mesh=mesh, seed=3), []
        for epoch in range(4):
            for batch in loader:
                seen.append((epoch, sorted(batch.full().tolist())))
                save(path, {"loader": loader, "count": len(seen)}, step=len(seen) - 1)
                if len(seen) - 1 == at:
                    at = None
                    count = restore(path / f"step-{back_to:08d}", like={"loader": loader, "count": 0})["count"]
                    del seen[count:]
        return seen

    whole, again = run(tmp_path / "whole", None), run(tmp_path / "again", at)
    assert len(whole) == 28 and [ids for _, ids in again] == [ids for _, ids in whole]


def test_an_epoch_ends_if_a_later_one_is_restored(make_mesh: Any) -> None:
    loader = Loader(torch.arange(8), 2, mesh=make_mesh({"data": 1}), shuffle=False)
    first = []
    for batch in loader:
        first.append(batch.full().tolist())
        loader.load_state_dict({"epoch": 1, "step": 2})
    assert first == [[0, 1]] and [batch.full().tolist() for batch in loader] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("shard", [None, "data"])
def test_the_state_of_now_for_a_checkpoint_from_before_the_first_step(
    make_mesh: Any, tmp_path: Path, shard: str | None
) -> None:
    """Optimizers make their state in the first step: what was saved before it comes back as it was."""
    mesh, opt = make_mesh({"data": 2}), optimizer(torch.optim.AdamW, lr=0.1, shard=shard)
    start = {"w": torch.linspace(0, 1, 150)}
    module = torch.nn.Linear(2, 2)
    plain = torch.optim.AdamW(module.parameters())
    step = spmd(lambda params, state: opt.step(params, params, state), mesh=mesh)
    save(tmp_path, {"params": start, "state": opt.init(start), "plain": plain.state_dict(), "loss": 0.0})
    params, state = step(start, opt.init(start))
    module(torch.ones(2)).sum().backward()
    plain.step()
    now = {"params": params, "state": state, "plain": plain.state_dict(), "loss": torch.tensor(1.0)}
    back = restore(tmp_path, like=now, mesh=mesh)
    assert back["plain"]["state"] == {} and back["loss"] == 0.0
    again, _ = step(back["params"], back["state"])
    assert torch.equal(again["w"].full(), params["w"].full())
    with pytest.raises(SpecError, match=r"another structure .*\['more'\]"):
        restore(tmp_path, like={**now, "more": 1})


def test_restored_after_a_rank_was_killed_while_it_wrote_in_the_background(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 2}, on_loss="raise")
    value = put(torch.ones(4), mesh=mesh)
    save(tmp_path, {"value": value}, step=0)
    mesh.run(never_finish_writing, ranks=[1])
    save(tmp_path, {"value": value}, step=1, background=True)
    os.kill(mesh.driver.pids[1], signal.SIGKILL)
    with pytest.warns(UserWarning, match=r"could not be written in the background .*a rank was lost before"):
        back = restore(tmp_path, mesh=mesh)
    assert back["value"].full().tolist() == [1] * 4 and os.listdir(tmp_path) == ["step-00000000"]
    assert save(tmp_path, back, step=1).result().name == "step-00000001"  # it is said once
