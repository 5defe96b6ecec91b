"""Checkpoints: whole or not there, whatever happens to the writer; read at any size, and without this library."""

from __future__ import annotations

import collections
import ctypes
import errno
import gc
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bodies import never_finish_writing
from internals import interrupt_restore_at_once
from patience import HANGS
from safetensors.torch import load_file
from scripts import launched, run, script

from spmd import (
    Loader,
    MeshError,
    P,
    Sampler,
    SpecError,
    SpmdError,
    optimizer,
    put,
    restore,
    save,
    spmd,
)

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


def test_a_folder_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save("~/run", {"w": 7}).result().parent == tmp_path / "run" and restore("~/run") == {"w": 7}


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
    for other, words in (
        (Loader(torch.arange(10), 4, seed=2), "seed: 1, now 2"),
        (Loader(torch.arange(9), 4), "length"),
    ):
        with pytest.raises(SpecError, match=f"within an epoch of another one.*{words}"):
            restore(tmp_path, like={"loader": other, "sampler": None})
        assert other.state_dict() == {"epoch": 0, "step": 0}
    smaller = Loader(torch.arange(10), 2, mesh=make_mesh({"data": 1}), seed=1)
    with pytest.warns(UserWarning, match="batch_size of the Loader"):
        restore(tmp_path, like={"loader": smaller, "sampler": None})
    assert sorted(torch.cat([batch.full() for batch in smaller]).tolist()) == sorted(i for ids in rest for i in ids)


def test_other_classes_and_other_structures(tmp_path: Path) -> None:
    save(tmp_path, Pair(torch.ones(2), 3))
    with pytest.raises(SpecError, match="pass like="):
        restore(tmp_path)
    written = {"name": np.str_("a"), "count": np.int64(2), "on": np.bool_(True)}
    save(tmp_path / "numpy", written)
    assert restore(tmp_path / "numpy", like=written) == {"name": "a", "count": 2, "on": True}
    back = restore(tmp_path, like=Pair(None, 0))
    assert isinstance(back, Pair) and same(tuple(back), (torch.ones(2), 3))
    with pytest.raises(SpecError, match=r"another structure.*\['x'\].*not in the checkpoint"):
        restore(tmp_path, like={"x": 1})
    with pytest.raises(SpecError, match=r"cannot write, \['x'\].*got object"):
        save(tmp_path, {"x": object()})
    with pytest.raises(SpecError, match="bad keep"):
        save(tmp_path, {}, keep=0)
    torch.save({"w": 1}, tmp_path / "w.pt")
    with pytest.raises(
        SpmdError, match=r"no checkpoint in .*, which is a file: .*torch.load reads what torch.save wrote"
    ):
        restore(tmp_path / "w.pt")
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
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    here = f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"  # two containers may have one host name
    init = f".step-00000001.tmp-1-abcd-{here}"  # the first process, which never ends
    gone = f".step-00000002.tmp-{2**22 + 1}-abcd-{here}"
    other = f".step-00000003.tmp-{2**22 + 1}-abcd-{boot}.1"  # of another namespace on this host: unknown is alive
    for name in (init, gone, other):
        (tmp_path / name).mkdir()
    save(tmp_path, {"w": 1}, step=4)
    assert sorted(os.listdir(tmp_path)) == [init, other, "step-00000004"]


# -- several writers --------------------------------------------------------------------------------------------------


def once(monkeypatch: pytest.MonkeyPatch, name: str, count: int, action: Any) -> None:
    """Do something before a function of the operating system's is called for the count-th time."""
    function, calls = getattr(os, name), []

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == count:
            monkeypatch.setattr(os, name, function)
            action()
        return function(*args, **options)

    monkeypatch.setattr(os, name, counting)


@pytest.mark.parametrize("exchange", [True, False])
def test_writers_at_once_take_numbers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    # From the first file until the last moment, when the folder is to get its name.
    for place in (("fsync", 1), ("fsync", 4), ("rename", 2)):
        path = tmp_path / f"{place}"
        names = []
        once(monkeypatch, *place, lambda path=path, names=names: names.append(save(path, {"w": 2}).result().name))
        assert save(path, {"w": 1}).result().name == "step-00000001" and names == ["step-00000000"], place
        assert restore(path / "step-00000000") == {"w": 2} and restore(path / "step-00000001") == {"w": 1}
        # With a number given, the last one counts.
        once(monkeypatch, *place, lambda path=path: save(path, {"w": 3}, step=5))
        assert save(path, {"w": 4}, step=5).result().name == "step-00000005" and restore(path) == {"w": 4}
        assert sorted(os.listdir(path)) == ["step-00000000", "step-00000001", "step-00000005"]


def test_another_takes_the_name_of_what_was_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {"w": 1}, step=3)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    rename = os.rename

    def then_another(source: Any, target: Any) -> None:
        rename(source, target)
        if ".aside-" in str(target):
            monkeypatch.setattr(os, "rename", rename)
            save(tmp_path, {"w": 2}, step=3)

    monkeypatch.setattr(os, "rename", then_another)
    save(tmp_path, {"w": 3}, step=3)
    assert restore(tmp_path) == {"w": 3} and os.listdir(tmp_path) == ["step-00000003"]


def test_threads_leave_each_others_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "runs")

    def then_another_begins(self: Path, *args: Any, **options: Any) -> None:
        mkdir(self, *args, **options)
        if ".tmp-" in self.name:
            monkeypatch.setattr(Path, "mkdir", mkdir)
            save(tmp_path / "link", {"w": 2})  # by another name of the directory

    monkeypatch.setattr(Path, "mkdir", then_another_begins)
    assert save(tmp_path / "runs", {"w": 1}).result().name == "step-00000001"
    assert restore(tmp_path / "runs") == {"w": 1} and restore(tmp_path / "runs" / "step-00000000") == {"w": 2}


def test_many_threads(tmp_path: Path) -> None:
    def write(first: int) -> None:
        for number in range(first, first + 5):
            save(tmp_path, {"number": number}, background=number % 2 == 0)

    threads = [threading.Thread(target=write, args=(100 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    restore(tmp_path)  # waits for those in the background
    found = sorted(restore(folder)["number"] for folder in tmp_path.glob("step-*"))
    assert found == [100 * index + number for index in range(4) for number in range(5)]
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in range(20)]


def test_failures_in_the_background_are_raised_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads, neither of which has seen the other's."""
    mkdir, fsync, both = Path.mkdir, os.fsync, threading.Barrier(2)

    def together(self: Path, *args: Any, **options: Any) -> None:
        if ".tmp-" in self.name:
            both.wait(HANGS)
        mkdir(self, *args, **options)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", together)
    monkeypatch.setattr(os, "fsync", full)
    threads = [threading.Thread(target=save, args=(tmp_path, {"w": 1}), kwargs={"background": True}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(Path, "mkdir", mkdir)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, {"w": 1})
    monkeypatch.setattr(os, "fsync", fsync)
    assert save(tmp_path, {"w": 1}).result().name == "step-00000000"


def test_ctrl_c_while_one_begins_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written all the same, and what waits for it ends."""
    begin = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        signal.raise_signal(signal.SIGINT)
        begin(thread)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        save(tmp_path, {"w": 1}, background=True)
    assert restore(tmp_path) == {"w": 1}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("moment", ["the folder is there", "the ranks were told"])
def test_ctrl_c_while_one_begins(
    make_mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, moment: str
) -> None:
    """Nothing is left of it."""
    mesh = make_mesh({"data": 2})
    kind, name = (Path, "mkdir") if moment == "the folder is there" else (type(mesh), "run")
    does = getattr(kind, name)

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        result = does(self, *args, **options)
        if kind is not Path or ".tmp-" in self.name:
            signal.raise_signal(signal.SIGINT)
        return result

    value = put(torch.arange(4.0), mesh=mesh)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(kind, name, interrupted)
        save(tmp_path, {"w": value}, background=background)
    assert not [*tmp_path.iterdir()]
    assert save(tmp_path, {"w": value}).result().name == "step-00000000" and mesh.run(int) == [0, 0]


def open_in(folder: Path) -> list[str]:
    """What this process has open there; other files may be closed meanwhile, with other tests' garbage."""
    return [path for one in Path("/proc/self/fd").iterdir() if (path := os.path.realpath(one)).startswith(str(folder))]


def test_ctrl_c_when_one_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are closed."""
    save(tmp_path, {"w": torch.ones(2)})
    restore(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as raised:
        interrupt_restore_at_once(patched)
        restore(tmp_path)
    del raised
    gc.collect()
    assert not open_in(tmp_path)


def test_a_lack_of_descriptors_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older checkpoint is not taken instead of the last one."""
    for number in range(2):
        save(tmp_path, {"w": torch.tensor(number)})
    os_open = os.open

    def open_few(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(".safetensors"):
            monkeypatch.undo()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return os_open(path, *args, **options)

    monkeypatch.setattr(os, "open", open_few)
    with pytest.raises(OSError, match=r"Too many open files: '.*step-00000001/rank-00000.safetensors'"):
        restore(tmp_path)
    assert restore(tmp_path)["w"] == 1 and not open_in(tmp_path)


def test_a_file_system_that_fails_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {"w": 1})

    def fails(*_: Any) -> Any:
        monkeypatch.undo()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "fstat", fails)
    with pytest.raises(SpmdError, match=r"cannot be read .*Stale file handle"):
        restore(tmp_path)
    assert not open_in(tmp_path)


def test_what_is_written_in_the_background_is_not_cancelled(tmp_path: Path) -> None:
    future = save(tmp_path, {"w": 1}, background=True)
    assert not future.cancel() and future.result(HANGS).exists()


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
    for step, folder in enumerate(sorted(tmp_path.glob("step-*"))):
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


def test_what_was_removed_while_it_is_written_is_missed(make_mesh: Any, tmp_path: Path) -> None:
    """Also if its folder stays, since a rank wrote into it while it was removed."""
    mesh = make_mesh({"data": 2})
    mesh.run(never_finish_writing, ranks=[1])
    future = save(tmp_path, put({"w": torch.ones(1000)}, mesh=mesh), background=True)
    for file in tmp_path.glob(".step-*/*rank-00001.*"):
        file.unlink()
    assert "removed meanwhile" in str(future.exception(HANGS))  # which is asking for what went wrong
    mesh.close()


def test_what_went_wrong_in_the_background_is_told_at_the_end(
    make_mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    mesh = make_mesh({"data": 2})
    monkeypatch.setattr(os, "fsync", full)  # of the manifest: the ranks write the rest
    save(tmp_path, put({"w": torch.ones(1000)}, mesh=mesh), background=True)
    with pytest.raises(OSError, match="No space left"):
        mesh.close()
    mesh.close()


def test_in_the_background_without_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save` returns before anything is written, and what is written is what was there when it was called."""
    fsync, go_on = os.fsync, threading.Event()

    def late(number: int) -> None:
        assert go_on.wait(HANGS)
        fsync(number)

    monkeypatch.setattr(os, "fsync", late)
    w = torch.ones(4)
    future = save(tmp_path, {"w": w}, background=True)
    assert not future.done()
    w.zero_()
    go_on.set()
    assert restore(tmp_path)["w"].tolist() == [1, 1, 1, 1]  # waits for it
    assert future.done()


def test_what_went_wrong_in_the_background_is_no_obstacle_to_restore(tmp_path: Path, small_files: Any) -> None:
    folder = save(tmp_path, {"w": 1}).result()
    for read in (tmp_path, folder):
        save(tmp_path, {"w": torch.ones(1 << 16)}, background=True)
        with pytest.warns(UserWarning, match="could not be written in the background .*too large"):
            assert restore(read) == {"w": 1}
        assert restore(read) == {"w": 1}  # said once


FAILS_AT_THE_END = """
import sys
import torch
from spmd import save
for path in sys.argv[1:]:
    save(path, {"w": torch.ones(4)}, background=True)
"""


def test_what_went_wrong_in_the_background_is_printed_when_the_program_ends(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("last", "best")]
    for file in files:
        file.write_text("")
    _, _, err = run(script(tmp_path, FAILS_AT_THE_END), *map(str, files))
    assert all(f"NotADirectoryError: [Errno 20] Not a directory: '{file}'" in err for file in files)
    status, _, err = run(script(tmp_path, FAILS_AT_THE_END), str(tmp_path / "folder"))
    assert status == 0 and err == "" and restore(tmp_path / "folder")["w"].tolist() == [1, 1, 1, 1]


FAILS_LAUNCHED = r"""
import os, resource, signal, sys
import torch
from spmd import Mesh, P, put, restore, save
mesh = Mesh(backend=sys.argv[2])
state = {"w": put(torch.arange(3 << 17), P("data"), mesh=mesh)}
path, told = sys.argv[1], []
save(path, state, step=1)

def attempt(where=path, state=state, step=1, background=False):
    try:
        save(where, state, step=step, background=background).result()
        told.append("saved")
    except Exception as error:
        where = os.path.basename(getattr(error, "filename", None) or "")
        told.append(f"{type(error).__name__} {error.args[-1]} {where if 'rank' in where else ''}".strip())

fsync, number = os.fsync, resource.getrlimit(resource.RLIMIT_FSIZE)
for background in (False, True):
    # The first rank can't give the folder its name, that of one that is there already.
    def full(number):
        if os.path.isdir(f"/proc/self/fd/{number}"):
            raise OSError(28, "No space left on device")
        fsync(number)
    os.fsync = full if mesh.rank == 0 else fsync
    attempt(background=background)
    os.fsync = fsync
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
    status, out, err = launched(ranks, *arguments)
    assert status == 0, err
    once = "OSError No space left on device; OSError File too large"
    once += f" rank-{ranks - 1:05d}.safetensors; FileExistsError File exists; saved"
    for rank in range(ranks):
        assert f"{rank} {once}; {once}\n" in out
    folders = ["step-00000001", "step-00000002", "step-00000003"]
    assert f"there {folders} {sum(range(3 << 17))}\n" in out


def test_launched(tmp_path: Path) -> None:
    status, out, err = launched(2, script(tmp_path, LAUNCHED), str(tmp_path / "runs"))
    assert status == 0, err
    for rank in range(2):
        assert f"{rank} step-00000001 3 [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]" in out
    assert restore(tmp_path / "runs")["w"].tolist() == [0, 1, 2, 3, 4, 5]


DISAGREE = r"""
import sys
import torch
from spmd import Loader, Mesh, P, put, restore, save
mesh = Mesh()
path, rank, told = sys.argv[1], mesh.rank, []
w = put(torch.arange(6.0), P("data"), mesh=mesh)
bad = put(torch.arange(6.0).reshape(1, 6), P(None, "data"), mesh=mesh)
later = put(torch.ones(6), P("data"), mesh=mesh)
last = rank == mesh.size - 1
for tree, options in (
    ({"w": w, "n": 3, **({"more": 1} if last else {})}, {}),
    ({"w": w, "n": rank}, {}),
    ({"w": bad if last else w}, {}),
    ({"w": later if last else w}, {}),
    ({"w": torch.ones(rank + 1)}, {}),
    ({"w": w}, {"step": 1 if last else 0}),
    ({"w": w}, {"step": -1 if last else 0}),
    ({"w": w}, {"path": f"{path}-{rank}"}),
    ({"w": w}, {"keep": 1 if last else None}),
    ({"w": w}, {"background": last}),
    ({"w": w, "seconds": rank + 0.5}, {}),
    (dict(reversed(list({"w": w, "n": 1}.items()))) if last else {"w": w, "n": 1}, {}),
    ({"loader": Loader(torch.arange(4), 2), "w": w}, {}),
):
    if last and "loader" in tree:
        tree["loader"].load_state_dict({"epoch": 0, "step": 1})
    try:
        told.append(save(**{"path": path, "tree": tree, **options}).result().name)
    except Exception as error:
        told.append(f"{type(error).__name__} {str(error).partition('got ')[2].partition(') [')[0]}")
sys.stdout.write(f"rank {rank}: {' | '.join(told)}\n")
mesh.close()
"""


def test_launched_ranks_that_disagree_on_what_to_save(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    status, out, err = launched(3, script(tmp_path, DISAGREE), str(path))
    assert status == 0, err
    expected = [
        "SpmdError leaf ['more']: nothing on ranks 0-1, 1 on rank 2",
        "SpmdError leaf ['n']: 0 on rank 0, 1 on rank 1, 2 on rank 2",
        "SpmdError leaf ['w']: float32[6], P('data'), value 0 of call 1 on ranks 0-1, "
        "float32[1, 6], P(None, 'data'), value 0 of call 2 on rank 2",
        "SpmdError leaf ['w']: float32[6], P('data'), value 0 of call 1 on ranks 0-1, "
        "float32[6], P('data'), value 0 of call 3 on rank 2",  # whose part would be mixed with theirs
        "SpmdError leaf ['w']: " + ", ".join(f"float32[{n + 1}], a plain tensor on rank {n}" for n in range(3)),
        "SpmdError step: 0 on ranks 0-1, 1 on rank 2",
        "SpecError -1, expected",
        "SpmdError path: " + ", ".join(f"{path}-{n} on rank {n}" for n in range(3)),
        "SpmdError keep: None on ranks 0-1, 1 on rank 2",
        "SpmdError background: False on ranks 0-1, True on rank 2",
        "step-00000000",  # of seconds and such the first rank's are saved
        "SpmdError the same leaves in another order",
        "SpmdError leaf ['loader']: a Loader at {'epoch': 0, 'step': 0} on ranks 0-1, "
        "a Loader at {'epoch': 0, 'step': 1} on rank 2",
    ]
    lines = {
        line.partition(": ")[0]: line.partition(": ")[2].split(" | ") for line in out.splitlines() if " | " in line
    }
    assert lines["rank 0"] == lines["rank 1"] == lines["rank 2"]
    for got, wanted in zip(lines["rank 0"], expected, strict=True):
        assert got.startswith(wanted.partition(" -1")[0]) if " -1" in wanted else got == wanted
    assert os.listdir(path) == ["step-00000000"] and restore(path)["seconds"] == 0.5


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
import builtins, os, random, signal, sys, warnings
import torch
from spmd import restore, save
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

original = open

def limited_open(file, mode="r", *args, **options):
    opened = original(file, mode, *args, **options)
    return Limited(opened) if "x" in mode else opened

draw, survived = random.Random(0), 0
builtins.open, left = limited_open, 1 << 40
save(path + "-measured", values[1], step=1)
builtins.open, total = original, (1 << 40) - left
for left in [1, total - 1, total, *draw.sample(range(2, total - 1), 47)]:
    child = os.fork()
    if child == 0:
        builtins.open = limited_open
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
        with pytest.raises(OSError, match="too large") as raised:
            save(tmp_path, {"w": torch.ones(1 << 16)}, step=1, background=background).result()
        assert is_of(raised.value, tmp_path, 0)
    assert restore(tmp_path) == {"step": 0} and os.listdir(tmp_path) == ["step-00000000"]


def is_of(error: OSError, path: Path, rank: int) -> bool:
    """Whether an error of the disk names a rank's file."""
    file = Path(str(error.filename))
    return file.name == f"rank-{rank:05d}.safetensors" and file.parent.parent == path and str(file) in str(error)


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
        with pytest.raises(OSError, match="too large") as raised:
            save(tmp_path, {"value": value}, step=1, background=background).result()
        assert is_of(raised.value, tmp_path, 0)
        assert os.listdir(tmp_path) == ["step-00000000"] and restore(tmp_path)["value"].sum() == 1 << 16
    mesh.run(small, None)
    assert float(spmd(lambda x: x.sum(), mesh=mesh)(value)) == 1 << 16  # the run goes on
    save(tmp_path, {"value": value}, step=1)
    assert sorted(os.listdir(tmp_path)) == ["step-00000000", "step-00000001"]


def test_a_rank_killed_while_it_writes(make_mesh: Any, tmp_path: Path) -> None:
    mesh = make_mesh({"data": 2}, on_loss="raise")
    value = put(torch.ones(4), mesh=mesh)
    save(tmp_path, {"value": value}, step=0)
    mesh.run(never_finish_writing, ranks=[1])
    future = save(tmp_path, {"value": value}, step=1, background=True)
    os.kill(mesh.driver.pids[1], signal.SIGKILL)
    with pytest.raises(MeshError, match="a rank was lost before"):
        future.result(timeout=HANGS)
    assert os.listdir(tmp_path) == ["step-00000000"]
    assert save(tmp_path, {"value": value}, step=1).result().name == "step-00000001"
