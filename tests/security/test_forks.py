"""Programs fork: what a child drops, closes or ends is its copy, and its parent's stays as it was."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import until
from scripts import run, script, two_ranks

from spmd import Mesh, MeshError, P, SpmdError, put

NUMBERS = 1 << 20


def in_child(do: Callable[[], Any]) -> int:
    """Run something in a fork of this process: its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            do()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def undisturbed(mesh: Mesh, body: Callable[..., Any], *args: Any) -> list[Any]:
    """What ranks give for something in which children come to their end, and abort nothing of their parents'."""
    try:
        return mesh.run(body, *args)
    except KeyboardInterrupt:  # what ranks raise that were aborted, and none of which has failed
        pytest.fail("a child has aborted a region of its parent")


def test_results_that_a_child_drops(shared_mesh: Any) -> None:
    mesh = shared_mesh({"data": 2})

    def body() -> tuple[int, bool, bool]:
        comm = mesh.comm()
        held = [comm.all_reduced(torch.full((NUMBERS,), 1.0 + number)) for number in range(4)]
        own = [comm.empty((NUMBERS,), dtype=torch.float32).fill_(7.0)]
        code = in_child(lambda: (held.clear(), own.clear(), gc.collect()))
        for _ in range(8):
            comm.all_reduced(torch.full((NUMBERS,), -1.0))
            comm.empty((NUMBERS,), dtype=torch.float32).fill_(-1.0)
        right = all(bool((tensor == 2.0 + 2 * number).all()) for number, tensor in enumerate(held))
        return code, right, bool((own[0] == 7.0).all())

    assert mesh.run(body) == [(0, True, True)] * 2


def test_memory_that_a_child_gives_back(shared_mesh: Any) -> None:
    """More than is kept for the next: it would go back to the system, and read as zeros in the parent."""
    mesh = shared_mesh({"data": 2})

    def body() -> tuple[int, bool]:
        comm = mesh.comm()
        if comm.rank:
            return 0, True
        held = [comm.empty((16 << 20,), dtype=torch.uint8).fill_(7) for _ in range(20)]
        code = in_child(lambda: (held.clear(), gc.collect()))
        return code, all(bool((tensor == 7).all()) for tensor in held)

    assert mesh.run(body) == [(0, True)] * 2


def test_child_of_a_rank_is_no_rank(shared_mesh: Any) -> None:
    """It can't communicate, and where it comes to the end of the task, by whatever way, the rank answers once."""
    mesh = shared_mesh({"data": 2})

    def refused() -> None:
        with pytest.raises(MeshError, match="forked cannot communicate"):
            mesh.comm()

    assert mesh.run(lambda: in_child(refused)) == [0, 0]

    def comes_back(fails: bool) -> str:
        pid = os.fork()
        if pid == 0:
            if fails:
                raise ValueError("of a child")
            return "child"
        return f"parent of {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"

    assert undisturbed(mesh, comes_back, False) == ["parent of 0"] * 2
    assert undisturbed(mesh, comes_back, True) == ["parent of 1"] * 2
    assert undisturbed(mesh, lambda: float(mesh.comm().all_reduced(torch.ones(())))) == [2.0, 2.0]


@pytest.mark.parametrize("fails", [False, True])
def test_region_that_a_child_leaves(shared_mesh: Any, fails: bool) -> None:
    """The other rank, which waits in it, neither takes the rank for gone nor gives up."""
    mesh = shared_mesh({"data": 2})

    def body() -> float:
        comm = mesh.comm()
        if comm.rank == 0:
            pid = os.fork()
            if pid == 0:
                if fails:
                    raise ValueError("of a child")
                return 0.0
            os.waitpid(pid, 0)
            time.sleep(0.5)
        return float(comm.all_reduced(torch.ones(())))

    assert undisturbed(mesh, body) == [2.0, 2.0]


AT_A_BREAKPOINT = """
import os
from spmd import Mesh

def body():
    pid = os.fork()
    if pid == 0:
        breakpoint()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

with Mesh({"data": 2}) as mesh:
    print(mesh.run(body, ranks=[0]), mesh.run(lambda: mesh.rank))
"""


def test_breakpoint_of_a_child(tmp_path: Path) -> None:
    """What comes from the driver is for the rank to read: its child finds no terminal."""
    code, out, err = run(script(tmp_path, AT_A_BREAKPOINT))
    assert (code, out) == (0, "[1] [0, 1]\n") and "came to the end of its input" in err, out + err


COMES_BACK = """
import os, time
import torch
from spmd import Mesh
mesh = Mesh(backend=os.environ["BACKEND"], timeout=60)

def forks():
    pid = os.fork()
    if pid == 0:
        raise ValueError("of a child")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

try:
    print(mesh.run(forks))
except ValueError:
    os._exit(3)

def fails():
    comm = mesh.comm()
    if comm.rank == 0:
        raise ArithmeticError("of a rank")
    time.sleep(0.5)
    comm.all_reduced(torch.ones(()))

try:
    mesh.run(fails)
except ArithmeticError:
    print(mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(())))))
"""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_region_that_a_child_of_a_launched_rank_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """It does not meet the other ranks in its parent's place: the next failure is all ranks' as ever."""
    monkeypatch.setenv("BACKEND", backend)
    outs = two_ranks(tmp_path, COMES_BACK)
    assert [out for out, _ in outs] == ["[3, 3]\n[2.0, 2.0]\n"] * 2, outs


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_communicator_that_a_child_has_from_before(make_mesh: Any, backend: str) -> None:
    """Whatever is asked of it, or of what was under way: the child is told, and the parent's sums stay right."""
    mesh = make_mesh({"data": 2}, backend=backend)
    asked: dict[str, Callable[[Any, torch.Tensor], Any]] = {
        "all_reduced": lambda comm, x: comm.all_reduced(x),
        "all_reduce": lambda comm, x: comm.all_reduce(x),
        "asynchronous": lambda comm, x: comm.all_reduce(x, async_op=True),
        "barrier": lambda comm, x: comm.barrier(),
        "broadcast": lambda comm, x: comm.broadcast(x),
        "all_gather": lambda comm, x: comm.all_gather([x, x], x),
        "all_gather_bytes": lambda comm, x: comm.all_gather_bytes(b"x"),
        "send": lambda comm, x: comm.send(x, 1 - comm.rank),
        "recv": lambda comm, x: comm.recv(x),
        "progress": lambda comm, x: comm.progress(),
        "renew": lambda comm, x: comm.renew(),
        "empty": lambda comm, x: comm.empty(8),
        "abort": lambda comm, x: comm.abort("in a child"),
    }

    def body() -> tuple[list[int], list[float]]:
        comm = mesh.comm()
        sums = [float(comm.all_reduced(torch.ones(4))[0])]
        under_way = comm.all_reduce(torch.ones(4), async_op=True)
        taken = comm.all_reduced  # a method that was looked up before

        def child() -> None:
            for ask in (*asked.values(), lambda comm, x: taken(x), lambda comm, x: under_way.wait()):
                with pytest.raises(SpmdError, match="forked cannot communicate"):
                    ask(comm, torch.full((4,), 100.0))
            comm.close()
            assert comm.rank == taken.__self__.rank

        codes = [in_child(child)]
        under_way.wait()
        for number in range(4):
            sums.append(float(comm.all_reduced(torch.full((4,), float(number)))[0]))
        return codes, sums

    assert mesh.run(body) == [([0], [2.0, 0.0, 2.0, 4.0, 6.0])] * 2


class Slow:
    """Answers as soon as it may."""

    def __init__(self, go: Path):
        self.go = go

    def answer(self) -> int:
        return 42 if until(self.go.exists) else 0


def test_remote_calls_of_a_child(make_mesh: Any, tmp_path: Path) -> None:
    """Answers go to the process that has called: a fork is told so, and does not wait for one."""
    mesh = make_mesh({"data": 2})
    ref = mesh.remote(Slow, tmp_path / "go", rank=1).answer()

    def child() -> None:
        with pytest.raises(MeshError, match="belongs to the process that this one was forked from"):
            ref.get()
        with pytest.raises(MeshError, match="belongs to the process that this one was forked from"):
            asyncio.run(awaited())

    async def awaited() -> Any:
        return await ref

    assert in_child(child) == 0
    (tmp_path / "go").touch()
    assert ref.get() == 42
    assert in_child(lambda: ref.get()) == 0  # what is known already


@pytest.mark.parametrize("hosts", [None, "local:2x1"])
def test_child_of_the_driver(hosts: str | None) -> None:
    """It neither stops nor kills the ranks, nor waits for its parent's answers, nor says a word in its place."""
    with Mesh({"data": 2}, hosts=hosts) as mesh:
        value = put(torch.arange(4.0), P("data"), mesh=mesh)
        value.full()
        pids = mesh.run(os.getpid)

        def child() -> None:
            of_hosts = [] if hosts is None else [mesh.status, mesh.stacks]  # here they look, and ask nobody
            for use in (mesh.restart, value.full, lambda: mesh.run(os.getpid), value.shards, *of_hosts):
                with pytest.raises(MeshError, match="belongs to the process that this one was forked from"):
                    use()
            mesh.close()
            for link in (one.link for one in getattr(mesh.driver.ranks, "_hosts", ())):
                link.close()

        assert in_child(child) == 0
        assert mesh.run(os.getpid) == pids
        assert value.full().tolist() == [0.0, 1.0, 2.0, 3.0]


LEFT = """
import os, time
from pathlib import Path
from spmd import Mesh

def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z"]

def forked_by(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in children if state(child)[0] != "Z"]

with Mesh({"data": 2}) as mesh:
    zygote, = {state(pid)[1] for pid in mesh.run(os.getpid)}
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    before = len(forked_by(zygote))
print(before, len(forked_by(zygote)))
os.kill(child, 9)
"""


def test_a_child_does_not_hold_up_the_end_of_its_parents_mesh(tmp_path: Path) -> None:
    """It has the sockets of the mesh, too, so that closing these alone does not end what stands by to fork ranks."""
    assert run(script(tmp_path, LEFT))[:2] == (0, "3 0\n")


ENDS = """
import os, sys
from spmd import Mesh
mesh = Mesh(backend="gloo", timeout=60)
mesh.run(lambda: mesh.comm().barrier())
pid = os.fork()
if pid == 0:
    sys.exit(0)  # through all that Python does at an exit
os.waitpid(pid, 0)
mesh.run(lambda: mesh.comm().barrier())
print(os.path.exists(sys.argv[1]))
mesh.run(lambda: mesh.comm().barrier())
"""


def test_meeting_place_when_children_end(tmp_path: Path) -> None:
    outs = two_ranks(tmp_path, ENDS, f"{tmp_path}/meet")
    assert [out for out, _ in outs] == ["True\n"] * 2, outs
