"""Checkpoints: whole or not there, whatever happens to the writer; read at any size, and without this library."""

from __future__ import annotations

import collections
import os
import resource
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import manifest
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scripts import run, script

from spmd import (
    Loader,
    Mesh,
    MeshError,
    P,
    Sampler,
    SpecError,
    SpmdError,
    data_parallel,
    optimizer,
    put,
    restore,
    save,
    spmd,
    value_and_grad,
)
from spmd import _checkpoint_files as files

Pair = collections.namedtuple("Pair", ["left", "right"])


def tree() -> dict[str, Any]:
    return {
        "w": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(2).bfloat16(),
        "z": torch.complex(torch.ones(2), torch.zeros(2)),
        "frozen": torch.nn.Parameter(torch.ones(1), requires_grad=False),
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(2),
        "numbers": [1, 2.5, float("inf"), True, None, "text", (np.float64(0.1), np.arange(2))],
        3: {},
    }


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return list(got) == list(expected) and all(same(got[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return type(got) is type(expected) and all(map(same, got, expected)) and len(got) == len(expected)
    if isinstance(expected, torch.Tensor | np.ndarray):
        got = got.full() if hasattr(got, "full") else got
        return torch.equal(got, torch.as_tensor(expected)) and got.dtype is torch.as_tensor(expected).dtype
    return got == expected


# -- what goes in comes out -------------------------------------------------------------------------------------------


def test_without_a_mesh(tmp_path: Path) -> None:
    folder = save(tmp_path, tree()).result()
    assert folder == tmp_path / "step-00000000" and same(restore(tmp_path), tree()) and same(restore(folder), tree())
    assert isinstance(restore(tmp_path)["frozen"], torch.nn.Parameter)
    assert save(tmp_path, tree()).result().name == "step-00000001"
    assert save(tmp_path, {"w": 7}, step=40).result().name == "step-00000040"
    assert restore(tmp_path) == {"w": 7} and same(restore(folder), tree())
    save(tmp_path, {"w": 8}, step=40)
    assert restore(tmp_path) == {"w": 8}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000000", "step-00000001", "step-00000040"]


def test_at_any_size_and_from_a_mesh_to_none(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 2})
    values = {"cut": torch.arange(12.0).reshape(4, 3), "other": torch.arange(8).reshape(2, 4), "whole": torch.ones(5)}
    specs = {"cut": P("data"), "other": P(None, "data"), "whole": P()}
    save(tmp_path, {name: put(value, specs[name], mesh=mesh) for name, value in values.items()})
    assert same(restore(tmp_path), values)
    for size in (1, 2, 3):
        back = restore(tmp_path, mesh=make_mesh({"data": size}))
        assert same(back, values)
        assert back["cut"].spec == (P("data") if size == 2 else P())
    back = restore(tmp_path, like={name: put(value, mesh=mesh) for name, value in values.items()})
    assert back["cut"].mesh is mesh


def test_plain_readers_need_no_spmd(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 2})
    state = {"params": {"w": put(torch.ones(3), mesh=mesh)}, "m": put(torch.arange(4), P("data"), mesh=mesh)}
    folder = save(tmp_path, state).result()
    first, second = (load_file(folder / f"rank-0000{rank}.safetensors") for rank in range(2))
    assert torch.cat([first["m"], second["m"]]).tolist() == [0, 1, 2, 3]
    assert {**first, **second}["params.w"].tolist() == [1, 1, 1]
    assert ("params.w" in first) != ("params.w" in second)  # one rank writes what all have


def test_positions_travel(make_mesh: Any, tmp_path: Path) -> None:
    def loader(size: int) -> Loader:
        return Loader(torch.arange(10), 4, mesh=make_mesh({"data": size}), seed=1)

    going, rest = loader(2), []
    for number, batch in enumerate(going):
        if number == 0:
            save(tmp_path, {"loader": going, "sampler": Sampler(10, 4, seed=2)})
        else:
            rest.append(batch.full().sort().values.tolist())
    fresh = loader(3)
    back = restore(tmp_path, like={"loader": fresh, "sampler": None})
    assert back["loader"] is fresh and back["sampler"] == Sampler(10, 4, seed=2)
    assert [batch.full().sort().values.tolist() for batch in fresh] == rest
    assert restore(tmp_path)["loader"] == {"epoch": 0, "step": 1}


def test_other_classes_and_other_structures(tmp_path: Path) -> None:
    save(tmp_path, Pair(torch.ones(2), 3))
    with pytest.raises(SpecError, match="pass like="):
        restore(tmp_path)
    back = restore(tmp_path, like=Pair(None, 0))
    assert isinstance(back, Pair) and same(tuple(back), (torch.ones(2), 3))
    with pytest.raises(SpecError, match=r"another structure.*\['x'\].*not in the checkpoint"):
        restore(tmp_path, like={"x": 1})
    with pytest.raises(SpecError, match=r"cannot write, \['x'\].*got object"):
        save(tmp_path, {"x": object()})
    with pytest.raises(SpecError, match="bad keep"):
        save(tmp_path, {}, keep=0)
    with pytest.raises(SpmdError, match="there is no checkpoint in"):
        restore(tmp_path / "nowhere")


def test_keep(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, {"step": step}, step=step, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]


def test_what_was_just_written_is_kept(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, {"step": step}, step=step)
    damaged(tmp_path / "step-00000020" / "checkpoint.json", "flipped")
    save(tmp_path, {"step": 15}, step=15, keep=2)  # an earlier step, after going back
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000015"]
    save(tmp_path, {"step": 5}, step=5, keep=1)
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_one_written_again_takes_the_place_of_the_other(tmp_path: Path) -> None:
    save(tmp_path, {"w": 1}, step=3)
    save(tmp_path, {"w": 2}, step=3)
    assert restore(tmp_path)["w"] == 2 and os.listdir(tmp_path) == ["step-00000003"]


def test_a_writer_that_is_at_work_keeps_its_folder(tmp_path: Path) -> None:
    init = f".step-00000001.tmp-1-abcd-{files.socket.gethostname()}"  # the first process, which never ends
    gone = f".step-00000002.tmp-{2**22 + 1}-abcd-{files.socket.gethostname()}"
    for name in (init, gone, ".step-00000003.tmp-1-abcd-another-host"):
        (tmp_path / name).mkdir()
    save(tmp_path, {"w": 1}, step=4)
    assert sorted(os.listdir(tmp_path)) == [init, ".step-00000003.tmp-1-abcd-another-host", "step-00000004"]


@pytest.mark.parametrize("step", [-1, 1.5, "2"])
def test_bad_steps(tmp_path: Path, step: Any) -> None:
    with pytest.raises(SpecError, match="save got a bad step"):
        save(tmp_path, {"w": 1}, step=step)


def test_in_the_background(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 2})
    double = spmd(lambda x: x * 2, mesh=mesh)
    value, futures = put(torch.ones(1 << 16), mesh=mesh), []
    for step in range(4):
        futures.append(save(tmp_path, {"value": value}, step=step, background=True))
        value = double(value)
    assert [future.result().name for future in futures] == [f"step-{step:08d}" for step in range(4)]
    for step, (_, folder) in enumerate(reversed(files.steps(tmp_path))):
        assert restore(folder)["value"].unique().item() == 2**step
    with pytest.raises(MeshError, match="inside a region"):
        mesh.run(lambda: save(tmp_path, {}))


LAUNCHED = r"""
import sys
import torch
from spmd import Mesh, P, put, restore, save
mesh = Mesh()
state = {"w": put(torch.arange(6.0), P("data"), mesh=mesh), "n": 3}
for step, background in enumerate((False, True)):
    folder = save(sys.argv[1], state, step=step, background=background).result()
back = restore(sys.argv[1], mesh=mesh)
sys.stdout.write(f"{mesh.rank} {folder.name} {back['n']} {back['w'].full().tolist()}\n")
mesh.close()
"""


def test_a_donated_step_leaves_alone_what_is_being_saved(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 2})
    opt = optimizer(torch.optim.SGD, lr=1.0)

    @spmd(mesh=mesh, donate="params")
    def step(params: Any) -> Any:
        return opt.step(params, {"w": torch.ones(2_000_000)}, opt.init(params))[0]

    params = step(put({"w": torch.zeros(2_000_000)}, mesh=mesh))  # from here on it owns its memory
    saving = save(tmp_path, {"params": params}, background=True)
    for _ in range(20):
        params = step(params)
    saving.result()
    assert restore(tmp_path)["params"]["w"].unique().tolist() == [-1.0]
    assert float(params["w"].full()[-1]) == -21.0


def test_a_mesh_waits_for_it_before_it_closes(make_mesh: Any, tmp_path: Path) -> None:
    with make_mesh({"data": 2}) as mesh:
        future = save(tmp_path, {"value": put(torch.ones(1 << 20), mesh=mesh)}, background=True)
    assert future.done() and restore(tmp_path)["value"].sum() == 1 << 20


def test_what_went_wrong_in_the_background_is_told_once(tmp_path: Path, small_files: Any) -> None:
    large, small_one = {"w": torch.ones(1 << 16)}, {"w": torch.ones(4)}
    future = save(tmp_path, large, background=True)
    with pytest.raises(OSError, match="too large"):
        save(tmp_path, small_one)
    with pytest.raises(OSError, match="too large"):
        future.result()
    save(tmp_path, small_one)
    assert restore(tmp_path)["w"].tolist() == [1, 1, 1, 1]


def test_what_went_wrong_in_the_background_is_told_at_the_end(
    make_mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    mesh = make_mesh({"data": 2})
    monkeypatch.setattr(files, "commit", full)
    save(tmp_path, put({"w": torch.ones(1000)}, mesh=mesh), background=True)
    with pytest.raises(OSError, match="No space left"):
        mesh.close()
    mesh.close()


def test_in_the_background_without_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save` returns before anything is written, and what is written is what was there when it was called."""
    written, go_on = files.write, threading.Event()

    def late(*args: Any) -> Any:
        assert go_on.wait(30)
        return written(*args)

    monkeypatch.setattr(files, "write", late)
    w = torch.ones(4)
    future = save(tmp_path, {"w": w}, background=True)
    assert not future.done()
    w.zero_()
    go_on.set()
    assert restore(tmp_path)["w"].tolist() == [1, 1, 1, 1]  # waits for it
    assert future.done()


def test_what_went_wrong_in_the_background_is_told_by_restore(tmp_path: Path, small_files: Any) -> None:
    folder = save(tmp_path, {"w": 1}).result()
    for read in (tmp_path, folder):
        save(tmp_path, {"w": torch.ones(1 << 16)}, background=True)
        with pytest.raises(OSError, match="too large"):
            restore(read)
        assert restore(read) == {"w": 1}


FAILS_AT_THE_END = """
import sys
import torch
from spmd import save
save(sys.argv[1], {"w": torch.ones(4)}, background=True)
"""


def test_what_went_wrong_in_the_background_is_printed_when_the_program_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, _, err = run(script(tmp_path, FAILS_AT_THE_END), str(tmp_path / "file"))
    assert "NotADirectoryError" in err
    status, _, err = run(script(tmp_path, FAILS_AT_THE_END), str(tmp_path / "folder"))
    assert status == 0 and err == "" and restore(tmp_path / "folder")["w"].tolist() == [1, 1, 1, 1]


FAILS_LAUNCHED = r"""
import os, resource, signal, sys
import torch
from spmd import Mesh, P, put, restore, save
from spmd import _checkpoint_files as files
mesh = Mesh(backend=sys.argv[2])
state = {"w": put(torch.arange(3 << 17), P("data"), mesh=mesh)}
path, told = sys.argv[1], []
save(path, state, step=1)

def attempt(where=path, state=state, step=1, background=False):
    try:
        save(where, state, step=step, background=background).result()
        told.append("saved")
    except Exception as error:
        told.append(f"{type(error).__name__} {error.args[-1]}"[:40])

commit, number = files.commit, resource.getrlimit(resource.RLIMIT_FSIZE)
for background in (False, True):
    # The first rank can't give the folder its name, that of one that is there already.
    def full(*_):
        raise OSError(28, "No space left on device")
    files.commit = full if mesh.rank == 0 else commit
    attempt(background=background)
    files.commit = commit
    # A rank can't write its file.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if mesh.rank == mesh.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, number[1]))
    attempt(background=background)
    resource.setrlimit(resource.RLIMIT_FSIZE, number)
    # There can be no folder.
    attempt(where=__file__, background=background)
    attempt(state={"n": 3}, step=None, background=background)
sys.stdout.write(f"{mesh.rank} {'; '.join(told)}\n")
mesh.run(lambda: None)
if mesh.rank == 0:
    sys.stdout.write(f"there {sorted(os.listdir(path))} {restore(path + '/step-00000001')['w'].sum().item()}\n")
mesh.close()
"""


@pytest.mark.parametrize(("backend", "ranks"), [("shm", 2), ("gloo", 3)])
def test_launched_ranks_all_hear_what_went_wrong(tmp_path: Path, backend: str, ranks: int) -> None:
    arguments = (script(tmp_path, FAILS_LAUNCHED), str(tmp_path / "runs"), backend)
    status, out, err = run("-m", "spmd", "run", "-n", str(ranks), *arguments)
    assert status == 0, err
    once = "OSError No space left on device; OSError File too large; FileExistsError File exists; saved"
    for rank in range(ranks):
        assert f"{rank} {once}; {once}\n" in out
    folders = ["step-00000001", "step-00000002", "step-00000003"]
    assert f"there {folders} {sum(range(3 << 17))}\n" in out


def test_launched(tmp_path: Path) -> None:
    status, out, err = run("-m", "spmd", "run", "-n", "2", script(tmp_path, LAUNCHED), str(tmp_path / "runs"))
    assert status == 0, err
    for rank in range(2):
        assert f"{rank} step-00000001 3 [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]" in out
    assert restore(tmp_path / "runs")["w"].tolist() == [0, 1, 2, 3, 4, 5]


# -- damage -----------------------------------------------------------------------------------------------------------


def damaged(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "flipped":
        data[len(data) // 2] ^= 4
    elif how == "emptied":
        data = bytearray()
    else:
        file.unlink()
        return
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "emptied", "removed"])
def test_a_damaged_one_is_named_and_the_one_before_it_used(tmp_path: Path, name: str, how: str) -> None:
    for step in range(2):
        save(tmp_path, {"w": torch.full((100,), step), "step": step}, step=step)
    bad = tmp_path / "step-00000001" / name
    damaged(bad, how)
    with pytest.warns(UserWarning, match=rf"{bad}.*going on from .*step-00000000"):
        assert restore(tmp_path)["step"] == 0
    with pytest.raises(SpmdError, match=str(bad)):
        restore(tmp_path / "step-00000001")
    damaged(tmp_path / "step-00000000" / name, "flipped")
    with pytest.raises(SpmdError, match=r"no checkpoint in .* is whole"):
        restore(tmp_path)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path, {"w": 1.5}).result()
    file = folder / "checkpoint.json"
    data = file.read_bytes()
    for place in range(0, len(data), 7):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(SpmdError, match=str(file)):
            restore(folder)


# Forks before torch has computed anything: a fresh interpreter for each of fifty writers would take minutes.
KILLED = """
import os, random, signal, sys, warnings
import torch
from spmd import restore, save
from spmd import _checkpoint_files as files
torch.set_num_threads(1)
path = sys.argv[1]
values = [{"w": torch.full((5000,), float(step)), "step": step} for step in range(2)]
save(path, values[0], step=0)

class Limited:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.file.close()
    def fileno(self):
        return self.file.fileno()
    def write(self, data):
        global left
        done = self.file.write(data[:left])
        left -= done
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

def limited_open(file, mode, buffering=-1):
    opened = open(file, mode, buffering=buffering)
    return Limited(opened) if "x" in mode else opened

draw, survived = random.Random(0), 0
written = []
original = files.write
files.write = lambda file, data: (written.append(len(data)), original(file, data))[1]
save(path + "-measured", values[1], step=1)
files.write = original
total = sum(written)
for left in [1, total - 1, total, *draw.sample(range(2, total - 1), 47)]:
    child = os.fork()
    if child == 0:
        files.open = limited_open
        save(path, values[1], step=survived % 2)  # beside the older one, or in its place
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (left, total, status)
    back = restore(path)
    assert back["step"] == 0 and torch.equal(back["w"], values[0]["w"]), left
    survived += 1
child = os.fork()
if child == 0:
    save(path, values[1], step=1)
    os._exit(0)
os.waitpid(child, 0)
back = restore(path)
assert back["step"] == 1 and sorted(os.listdir(path)) == ["step-00000000", "step-00000001"], os.listdir(path)
print("survived", survived, "of", total, "bytes")
"""


def test_killed_at_any_byte(tmp_path: Path) -> None:
    status, out, err = run("-W", "error", script(tmp_path, KILLED), str(tmp_path / "runs"))
    assert status == 0, err
    assert out.startswith("survived 50 of")


@pytest.fixture
def small_files() -> Any:
    """No file of this process may grow past 64 KiB: what a full disk looks like to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk(tmp_path: Path, small_files: Any) -> None:
    save(tmp_path, {"step": 0}, step=0)
    for background in (False, True):
        with pytest.raises(OSError, match="too large"):
            save(tmp_path, {"w": torch.ones(1 << 16)}, step=1, background=background).result()
    assert restore(tmp_path) == {"step": 0} and os.listdir(tmp_path) == ["step-00000000"]


def small(path: str | None) -> None:
    """On a rank."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit if path is None else 1 << 16, limit))


def test_a_full_disk_on_a_rank(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 2})
    value = put(torch.ones(1 << 16), mesh=mesh)
    save(tmp_path, {"value": value}, step=0)
    mesh.run(small, "on", ranks=[0])
    for background in (False, True):
        with pytest.raises(OSError, match="too large"):
            save(tmp_path, {"value": value}, step=1, background=background).result()
        assert os.listdir(tmp_path) == ["step-00000000"] and restore(tmp_path)["value"].sum() == 1 << 16
    mesh.run(small, None)
    assert float(spmd(lambda x: x.sum(), mesh=mesh)(value)) == 1 << 16  # the run goes on
    save(tmp_path, {"value": value}, step=1)
    assert sorted(os.listdir(tmp_path)) == ["step-00000000", "step-00000001"]


def stuck() -> None:
    """On a rank: never finish writing."""
    files.write_tensors = lambda *_: time.sleep(60)  # type: ignore[assignment, return-value]


def test_a_rank_killed_while_it_writes(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 2})
    value = put(torch.ones(4), mesh=mesh)
    save(tmp_path, {"value": value}, step=0)
    mesh.run(stuck, ranks=[1])
    future = save(tmp_path, {"value": value}, step=1, background=True)
    os.kill(mesh.driver.pids[1], signal.SIGKILL)
    with pytest.raises(MeshError, match="a rank was lost before"):
        future.result(timeout=20)
    assert os.listdir(tmp_path) == ["step-00000000"]
    assert save(tmp_path, {"value": value}, step=1).result().name == "step-00000001"


# -- fingerprints -----------------------------------------------------------------------------------------------------


def step(x: Any, batch: Any) -> Any:
    return x + 1


def rewritten(path: Path, **changed: Any) -> None:
    """The only checkpoint of a directory with another fingerprint; None leaves a part out."""

    def change(said: dict[str, Any]) -> None:
        whole = {**said["fingerprint"], **changed}
        said["fingerprint"] = {name: value for name, value in whole.items() if value is not None}

    manifest.edit(path, change)


def told(run: Any) -> list[str]:
    """What is said of fingerprints while something runs: the parts in brackets."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    texts = [str(one.message) for one in caught]
    assert all("under another fingerprint" in text for text in texts), texts
    return [text.rpartition("(")[2].rstrip(")") for text in texts]


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
    said = manifest.read(tmp_path)["fingerprint"]
    assert {"torch", "CPU capability", "seed", "threads", "backend class", "steps"} == {*said}
    assert said["steps"] == {"step": [{"shards": 4, "wire dtype": "torch.bfloat16"}]}
    rewritten(tmp_path, torch="1.0")
    with pytest.warns(UserWarning, match=r"torch: 1\.0, now"):
        restore(tmp_path)


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
    # Older checkpoints tell of the last step only, of whatever name.
    rewritten(tmp_path, **{"steps": None, "shards": 4, "wire dtype": "torch.float16"})
    mesh = make_mesh({"data": 1})
    assert torch.equal(restore(tmp_path, mesh=mesh)["x"].full(), x.full())
    assert told(lambda: call(report, mesh, 4)) == ["wire dtype of report: torch.float16, now None"]
    assert told(lambda: call(step, mesh, 2)) == []


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


@pytest.mark.parametrize("order", ["teacher first", "teacher last"])
@pytest.mark.parametrize("placed", [(True, True), (False, False), (True, False), (False, True)])
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


def test_going_back_to_a_checkpoint_draws_the_same_again(make_mesh: Any, tmp_path: Path) -> None:
    def draw(x: Any, batch: Any) -> Any:
        return x + torch.rand(2)

    mesh = make_mesh({"data": 2})
    go = spmd(data_parallel(draw, shards=2), mesh=mesh)

    def on(x: Any) -> list[float]:
        return go(go(x, torch.ones(4)), torch.ones(4)).full().tolist()

    save(tmp_path, {"x": go(torch.zeros(2), torch.ones(4))}, step=0)
    save(tmp_path, {"x": go(torch.zeros(2), torch.ones(4))}, step=1)
    first = on(restore(tmp_path / "step-00000000", mesh=mesh)["x"])
    restore(tmp_path / "step-00000001", mesh=mesh)  # only looked at: the last one of a directory counts
    assert on(restore(tmp_path / "step-00000000", mesh=mesh)["x"]) == first


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
