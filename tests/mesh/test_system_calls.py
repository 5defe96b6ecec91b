"""System calls fail, as they do for want of memory or of descriptors: nothing is lost, left over or waited for."""

from __future__ import annotations

import gc
import itertools
import logging
import mmap
import os
import selectors
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from internals import (
    close_control_of_zygote,
    interrupt_wait_for_end,
    lose_next_reply_of_zygote,
    refuse_next_message,
    zygote_of,
)
from patience import HANGS, end_within
from scripts import run

from spmd import Mesh, MeshError, P, PeerLost, psum, put, spmd


def total(x: torch.Tensor) -> torch.Tensor:
    return psum(x.sum(), "data")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_message_that_cannot_be_sent_to_one_rank(
    make_mesh: Callable[..., Mesh], caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    """It is replaced: without the message it would be out of step with the other."""
    mesh = make_mesh({"data": 2})
    x = put(torch.arange(4.0), P("data"), mesh=mesh)
    step = spmd(total, mesh=mesh, in_specs=(P("data"),), out_specs=P())
    pids = mesh.driver.pids
    for turn in range(2):  # the function is sent in the first
        refuse_next_message(mesh, rank)
        with caplog.at_level(logging.WARNING):
            assert float(step(x)) == 6, turn
        assert float(step(x)) == 6 and x.full().tolist() == [0, 1, 2, 3]
    assert caplog.text.count(f"rank {rank} was killed, because a message could not be sent to it: ") == 2
    assert [a == b for a, b in zip(pids, mesh.driver.pids, strict=True)] == [rank == 1, rank == 0]


def test_a_message_that_cannot_be_sent_to_a_rank_that_is_not_run_again(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh({"data": 2}, on_loss="raise")
    x = put(torch.arange(4.0), P("data"), mesh=mesh)
    step = spmd(total, mesh=mesh, in_specs=(P("data"),), out_specs=P())
    assert float(step(x)) == 6
    refuse_next_message(mesh, 1)
    with pytest.raises(PeerLost, match=r"rank 1 was killed, because a message could not be sent to it: .*buffer space"):
        float(step(x))
    assert float(step(x)) == 6


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (os, "memfd_create"),
        (os, "ftruncate"),
        (os, "pipe"),
        (mmap, "mmap"),
        (socket, "socketpair"),
        (selectors, "DefaultSelector"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_mesh_that_cannot_be_made_leaves_nothing_open(
    make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """Whichever call fails."""

    def failing(number: int) -> Callable[..., Any]:
        call, calls = getattr(module, name), itertools.count()

        def one(*args: Any, **options: Any) -> Any:
            if next(calls) == number:
                failed.append(number)
                raise OSError(24, os.strerror(24))
            return call(*args, **options)

        return one

    make_mesh({"data": 1})  # what the zygotes need stays open
    gc.collect()
    before, failed = len(os.listdir("/proc/self/fd")), list[int]()
    for number in itertools.count():
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing(number))
            try:
                Mesh({"data": 2}).close()
            except MeshError as error:
                assert "limit on open files" in str(error)
                del error
        if len(failed) == number:  # there is no such call
            break
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before, number
    assert failed


def test_a_mesh_that_cannot_open_enough_files_says_so(tmp_path: Path) -> None:
    """However many are free."""
    script = tmp_path / "few.py"
    script.write_text(
        """
import itertools
import os
import resource
import torch
from spmd import Mesh, SpmdError, spmd

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
first = Mesh({"data": 1})  # the zygotes stay
failed = 0
for free in itertools.count():
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for fd in [taken.pop() for _ in range(free)]:
        os.close(fd)
    try:
        with Mesh({"data": 1}) as mesh:
            assert float(spmd(lambda x: x + 1, mesh=mesh)(torch.tensor(1.0))) == 2
        break
    except SpmdError as error:
        assert "limit on open files" in str(error), error
        failed += 1
    finally:
        for fd in taken:
            os.close(fd)
first.close()
print("failed", failed)
"""
    )
    status, out, err = run(str(script), cwd=tmp_path)
    assert status == 0, err
    assert int(out.split()[-1]) > 9


def test_a_zygote_that_cannot_be_asked_any_more_and_does_not_end(
    make_mesh: Callable[..., Mesh], monkeypatch: Any
) -> None:
    mesh = make_mesh({"data": 1})
    x = put(torch.arange(3), mesh=mesh)
    os.kill(zygote_of(mesh), signal.SIGSTOP)
    close_control_of_zygote(mesh, monkeypatch)
    other = make_mesh({"data": 1})  # its rank is forked from the zygote that stood by
    assert put(torch.arange(3), mesh=other).full().tolist() == x.full().tolist() == [0, 1, 2]


def test_a_zygote_whose_reply_is_lost(make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says next is not taken for that reply: another one takes its place, with other ranks."""
    mesh = make_mesh({"data": 1})
    x = put(torch.arange(3), mesh=mesh)
    lose_next_reply_of_zygote(monkeypatch)
    with pytest.raises(MeshError, match="no memory left for a mesh"):
        mesh.resize({"data": 2})
    mesh.resize({"data": 2})
    os.kill(mesh.driver.pids[1], signal.SIGKILL)
    add = spmd(lambda x: psum(x, "data"), mesh=mesh)
    assert add(x).full().tolist() == [0, 2, 4] and x.full().tolist() == [0, 1, 2]


def test_a_mesh_that_is_interrupted_while_it_closes_is_closed(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh({"data": 2})
    x, pids = put(torch.arange(3), mesh=mesh), mesh.driver.pids
    interrupt_wait_for_end(mesh, 0)
    with pytest.raises(KeyboardInterrupt):
        mesh.close()
    assert mesh.closed and end_within(HANGS, pids)
    with pytest.raises(MeshError, match=r"this mesh is closed"):
        x.full()
