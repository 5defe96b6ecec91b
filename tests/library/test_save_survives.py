"""Ranks that are killed while they write a checkpoint: it is written all the same, and the program notices nothing."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from bodies import never_finish_writing
from internals import end_of_program
from patience import HANGS, until

from spmd import Mesh, MeshError, P, SpmdError, put, restore, save, spmd
from spmd.checkpoint import background

LARGE = 1 << 21  # elements: written in no moment


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with Mesh({"data": 2}, timeout=HANGS) as made:
        yield made


def tree(mesh: Mesh) -> dict[str, object]:
    cut = put(torch.arange(LARGE), P("data"), mesh=mesh)
    return {"cut": cut, "whole": put(torch.arange(7.0), mesh=mesh), "plain": torch.ones(3)}


def check(path: Path) -> None:
    found = restore(path)
    assert torch.equal(found["cut"], torch.arange(LARGE))
    assert found["whole"].tolist() == [*range(7)] and found["plain"].tolist() == [1, 1, 1]
    assert not [*path.glob(".step-*")]


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_in_the_background(mesh: Mesh, tmp_path: Path, ranks: list[int]) -> None:
    mesh.run(never_finish_writing, ranks=ranks)
    future = save(tmp_path, tree(mesh), background=True)
    for rank in ranks:
        os.kill(mesh.driver.pids[rank], signal.SIGKILL)
    assert future.result(HANGS) == tmp_path / "step-00000000"
    check(tmp_path)


def test_of_values_that_a_step_was_given_since(mesh: Mesh, tmp_path: Path) -> None:
    values = tree(mesh)
    save(tmp_path, values)
    mesh.run(never_finish_writing, ranks=[1])
    future = save(tmp_path, values, background=True)
    spmd(lambda x: x + 1, mesh=mesh, donate=("x",), in_specs=P("data"), out_specs=P("data"))(values["cut"])
    os.kill(mesh.driver.pids[1], signal.SIGKILL)
    with pytest.raises(MeshError, match=r"rank 1 was lost .* a step was given the values' memory: go on"):
        future.result(HANGS)
    check(tmp_path)


def test_a_fork_does_not_wait(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run(never_finish_writing, ranks=[1])
    future = save(tmp_path, tree(mesh), background=True)
    child = os.fork()
    if child == 0:
        end_of_program()
        os._exit(0)
    try:
        assert until(lambda: os.waitpid(child, os.WNOHANG) == (child, 0))
    finally:
        os.kill(mesh.driver.pids[1], signal.SIGKILL)
    assert future.result(HANGS) == tmp_path / "step-00000000"


@pytest.mark.parametrize("on_loss", ["rerun", "raise"])
def test_a_rank_that_is_stopped(make_mesh: Callable[..., Mesh], tmp_path: Path, on_loss: str) -> None:
    """Nobody waits for it but who waits for the checkpoint."""
    mesh = make_mesh({"data": 2}, grace=2.0, on_loss=on_loss)
    mesh.run(never_finish_writing, ranks=[1])
    future = save(tmp_path, tree(mesh), background=True)
    os.kill(mesh.driver.pids[1], signal.SIGSTOP)
    if on_loss == "rerun":
        assert future.result(HANGS) == tmp_path / "step-00000000"
        check(tmp_path)
        return
    with pytest.raises(SpmdError, match="rank"):
        future.result(HANGS)


def test_while_the_program_waits(mesh: Mesh, tmp_path: Path) -> None:
    value = tree(mesh)
    mesh.run(never_finish_writing, ranks=[1])
    begun = ".step-*/rank-00001.*"
    thread = threading.Thread(target=kill_when, args=(lambda: [*tmp_path.glob(begun)], mesh.driver.pids[1]))
    thread.start()
    save(tmp_path, value)
    thread.join()
    check(tmp_path)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("on_loss", ["rerun", "raise"])
def test_while_another_threads_call_fails(
    make_mesh: Callable[..., Mesh], tmp_path: Path, on_loss: str, background: bool
) -> None:
    mesh, failed = make_mesh({"data": 2}, on_loss=on_loss, timeout=HANGS), []
    value = tree(mesh)

    def fail() -> None:
        assert until(lambda: [*tmp_path.glob(".step-*")])
        time.sleep(0.1)  # until the ranks are asked to write
        raise ValueError("mine")

    def call() -> None:
        with pytest.raises(ValueError, match="mine"):
            mesh.run(fail, ranks=[1])
        failed.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    assert until(lambda: "in call" in str(mesh.status()))
    assert save(tmp_path, value, background=background).result(HANGS) == tmp_path / "step-00000000"
    thread.join(HANGS)
    assert failed
    check(tmp_path)


def test_an_interrupt_when_the_ranks_were_told(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder stays until they have written into it: else their error would be that of what is called next."""
    told = []

    def run(self: Mesh, fn: Callable[..., object], *args: object) -> None:
        mesh.submit(time.sleep, 0.3, rank=1)
        told.extend(mesh.submit(fn, *args, rank=rank) for rank in range(mesh.size))
        raise KeyboardInterrupt

    monkeypatch.setattr(type(mesh), "run", run)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, tree(mesh))
    assert [future.exception(HANGS) for future in told] == [None, None]
    assert not [*tmp_path.iterdir()]


def test_before_the_mesh_gets_another_size(mesh: Mesh, tmp_path: Path) -> None:
    """The ranks that leave end what they write."""
    future = save(tmp_path, tree(mesh), background=True)
    mesh.resize({"data": 1})
    assert future.result(HANGS).exists()
    check(tmp_path)


def test_where_the_program_wants_to_know(make_mesh: Callable[..., Mesh], tmp_path: Path) -> None:
    mesh = make_mesh({"data": 2}, on_loss="raise")
    mesh.run(never_finish_writing, ranks=[1])
    future = save(tmp_path, tree(mesh), background=True)
    os.kill(mesh.driver.pids[1], signal.SIGKILL)
    with pytest.raises(SpmdError, match="a rank was lost before"):
        future.result(HANGS)


def kill_when(condition: Callable[[], object], pid: int) -> None:
    assert until(condition)
    os.kill(pid, signal.SIGKILL)


def no_threads() -> None:
    """From now on no thread can be started to write, as where the limit on processes is reached."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    background.threading = types.SimpleNamespace(
        **{**vars(threading), "Thread": type("Thread", (threading.Thread,), {"start": refuse})}
    )


@pytest.mark.parametrize("where", ["driver", "rank"])
def test_where_no_thread_can_be_started(
    mesh: Mesh, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written before `save` returns."""
    monkeypatch.setattr(background, "threading", threading)
    no_threads() if where == "driver" else mesh.run(no_threads, ranks=[1])
    future = save(tmp_path, tree(mesh), background=True)
    assert future.result(HANGS) == tmp_path / "step-00000000"
    check(tmp_path)


def test_an_error_of_an_open_folder_names_it(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such system calls know no name; nothing is left under the checkpoint's own, or beside it."""
    save(tmp_path, tree(mesh), step=1)
    real = os.fsync

    def refuse(opened: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{opened}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(opened)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match=rf"Input/output error: '{tmp_path}/"):
            save(tmp_path, tree(mesh), step=1)
    assert os.listdir(tmp_path) == ["step-00000001"]
    check(tmp_path)


def test_older_checkpoints_that_cannot_be_removed(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one has been written: that is no error, and the next one removes them."""
    save(tmp_path, tree(mesh))

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr("spmd.checkpoint.folder.is_ours", refuse)
        assert save(tmp_path, tree(mesh), keep=1).result() == tmp_path / "step-00000001"
    save(tmp_path, tree(mesh), keep=1)
    assert os.listdir(tmp_path) == ["step-00000002"]
