"""`Mesh(hosts=)`: a driver whose ranks are on several hosts, as far as one machine can be several."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from counting import Counter
from fork_server import shared_server
from host_processes import Changed, arena_held_by, host_process
from internals import ask_while_ranks_start, silent_hosts_are_lost_after
from patience import HANGS, end_within, quick, running, until
from torch import nn

from spmd import (
    CollectiveMismatch,
    Loader,
    Mesh,
    MeshError,
    P,
    PeerLost,
    data_parallel,
    fetch,
    functional,
    optimizer,
    psum,
    put,
    spmd,
    value_and_grad,
)

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import namespaces

REASON = namespaces.unavailable() if os.environ.get("TEST_NAMESPACES") else "it takes long: make test-hosts"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh({"data": 4}, hosts="local:2x2", timeout=60) as made:
        yield made


def works(mesh: Mesh) -> bool:
    return mesh.run(lambda: float(mesh.comm().all_reduced(torch.tensor(1.0)))) == [mesh.size] * mesh.size


def trained(
    mesh: Mesh,
    shards: int | None,
    *,
    armed: Path | None = None,
    kill: Callable[[], int] = os.getpid,
    number: int = signal.SIGKILL,
) -> tuple[list[float], str]:
    """The losses of a few steps, and a digest of what they have made of the parameters.

    Args:
        armed: a file that is made before the second step; rank 3 removes it in there, and kills a process of `kill`'s.
        number: of the signal that it sends.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(36, 6, generator=generator), torch.randint(0, 3, (36,), generator=generator)
    torch.manual_seed(0)
    apply, params = functional(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    opt = optimizer(torch.optim.AdamW, lr=1e-2)
    state = opt.init(params)

    def loss_of(params: Any, batch: Any) -> torch.Tensor:
        if armed is not None and mesh.rank == 3 and armed.exists():
            armed.unlink()
            os.kill(kill(), number)
        return nn.functional.cross_entropy(apply(params, batch["x"]), batch["y"])

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(loss_of)(params, batch)
        params, state = opt.step(params, grads, state)
        return params, state, loss

    losses = []
    for batch in Loader({"x": x, "y": y}, 12, seed=0, mesh=mesh, shards=shards):
        if armed is not None and len(losses) == 1:
            armed.touch()
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    leaves: Any = optree.tree_leaves(fetch(params))  # type: ignore[arg-type]
    return losses, hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in leaves)).hexdigest()


def test_training_is_that_of_one_host(mesh: Mesh, shared_mesh: Callable[..., Mesh]) -> None:
    one = shared_mesh({"data": 2})
    losses, digest = trained(mesh, 4)
    assert (losses, digest) == trained(one, 4)
    assert trained(mesh, None)[0] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0, 1, 2], [0, 2, 1, 3], [2, 3, 0, 1], [1, 2, 3]])
@pytest.mark.parametrize("numel", [5, 50_000])
def test_sums_in_tree_order_have_the_bits_of_one_host(mesh: Mesh, ranks: list[int], numel: int) -> None:
    """Hosts that are nodes of the tree, and hosts that are not."""
    from spmd.kernels.reduction import Pairwise, reduce_in_order

    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in ranks]
    expected = reduce_in_order(parts, Pairwise(0.3), torch.empty(numel))

    def reduced() -> torch.Tensor:
        mine = torch.randn(numel, generator=torch.Generator().manual_seed(mesh.rank or 0))
        return mesh.comm(ranks=ranks).all_reduced(mine, op=Pairwise(0.3)).clone()

    assert all(torch.equal(found, expected) for found in mesh.run(reduced, ranks=ranks))


def test_values_large_and_small(mesh: Mesh) -> None:
    large = torch.randn(1 << 18)  # more than travels within a message
    assert torch.equal(put(large, mesh=mesh).full(), large)
    assert torch.equal(put(large, P("data"), mesh=mesh).full(), large)
    assert all(torch.equal(one, large) for one in mesh.run(lambda value: value, large))
    total = spmd(lambda a: psum(a, "data"), mesh=mesh)
    assert total(put(torch.arange(8.0), P("data"), mesh=mesh)).full().tolist() == [12, 16]


def test_ranks_share_what_their_host_has_and_no_more(mesh: Mesh) -> None:
    """One process a host, none of whose descriptors are the other's or the driver's memory."""
    parents = mesh.run(lambda: os.getppid())
    assert parents[0] == parents[1] != parents[2] == parents[3]

    def arenas() -> set[int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {int(line.split()[4]) for line in maps if "spmd-arena" in line}

    first, second, third, fourth = mesh.run(arenas)
    assert first == second != third == fourth and not first & third
    assert not (first | third) & arenas()


def test_what_is_drawn_and_told(mesh: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    assert "rank 3 on local1" in repr(mesh) and "rank 0 on local0" in mesh._repr_html_()
    mesh.run(lambda: print("from", mesh.rank))
    others = [f"[rank {rank}] from {rank}" for rank in (1, 2, 3)]
    assert sorted(capfd.readouterr().out.splitlines()) == [*others, "from 0"]
    status = mesh.status()
    assert [(one.rank, one.host, one.doing) for one in status] == [
        (rank, f"local{rank // 2}", "idle") for rank in range(4)
    ]
    assert [one.pid for one in status] == mesh.run(os.getpid)
    assert mesh.stacks().count("thread") >= 4 and "rank 3: process" in mesh.stacks()


def test_an_exception_ends_the_region_everywhere(mesh: Mesh) -> None:
    def fail() -> None:
        if mesh.rank == 2:
            raise KeyError("two")
        mesh.comm().barrier()

    with pytest.raises(KeyError, match="two"):
        mesh.run(fail)
    assert works(mesh)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_collective_that_a_rank_leaves_out(mesh: Mesh, rank: int) -> None:
    @spmd(mesh=mesh, check="never")
    def step(x: torch.Tensor) -> torch.Tensor:
        return x if mesh.rank == rank else psum(x, "data")

    def send() -> None:
        if mesh.rank == 1:
            mesh.comm().recv(torch.ones(2), rank)

    assert works(mesh)
    x = put(torch.ones(3), mesh=mesh)
    with pytest.raises(CollectiveMismatch, match=rf"rank {rank} left the region without its part in all_reduce"):
        step(x).full()
    assert works(mesh)
    with pytest.raises(CollectiveMismatch, match=rf"rank {rank} left the region without its part in recv from {rank}"):
        mesh.run(lambda: (mesh.comm().barrier(), send()))
    assert works(mesh)


def test_ranks_that_are_late_or_early_leave_nothing_out(mesh: Mesh) -> None:
    """For longer than it takes until ranks publish that they have left, or that they wait."""

    def body() -> float:
        comm, found = mesh.comm(), torch.zeros(2)
        if mesh.rank == 2:
            time.sleep(3.0)
        total = float(comm.all_reduced(torch.tensor(1.0)))
        for number in (3.0, 5.0):  # the second message finds an open connection, so that its sender leaves at once
            if mesh.rank == 0:
                comm.send(torch.full((2,), number), 3)
            elif mesh.rank == 3:
                time.sleep(number - 3.0)
                comm.recv(found, 0)
        return total + float(found[0])

    assert mesh.run(body) == [4, 4, 4, 9]
    late = mesh.submit(time.sleep, 3.0, rank=1)
    assert works(mesh)
    late.result()


def test_what_is_refused(mesh: Mesh) -> None:
    for hosts in ("local:2", "local:0x2", "slurm:", "ray:0", ["a"], ["-oProxyCommand=x:2"], [], 4, ["a:0"]):
        with pytest.raises(MeshError, match="not understood"):
            Mesh({"data": 4}, hosts=hosts)
    for options, problem in (
        ({"hosts": "local:2x1"}, "does not fit its hosts"),
        ({"hosts": ["a:2", "a:2"]}, "a host is named twice"),
        ({"hosts": ["a..b:4"]}, "it is not known where the hosts reach this process"),
        ({"hosts": "local:2x2", "device": "cuda"}, "on CPUs only"),
        ({"hosts": "local:2x2", "backend": "shm"}, "can't be used with hosts"),
    ):
        with pytest.raises(MeshError, match=problem):
            Mesh({"data": 4}, **options)


def instead(command: Sequence[str], code: str) -> list[str]:
    """The command that starts a host, which runs this first."""
    begin, code = command[: command.index(sys.executable)], f"{code}from spmd.mesh.hosts.process import main; main()"
    return [*begin, sys.executable, "-c", code]


def test_a_host_with_other_versions_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_INTERFACE", "127.0.0.1")
    code = (
        "import spmd.mesh.hosts.process as process; real = process.versions\n"
        "process.versions = lambda: real() | {'torch': '0.1'}\n"
    )
    older = Changed(["a:1"], lambda _, command, __: instead(command, code))
    with pytest.raises(MeshError, match=r"host a runs another torch than this program \(got torch 0.1 there"):
        Mesh({"data": 1}, hosts=older)
    nothing = Changed(["a:1"], lambda *_: ["false"])
    with pytest.raises(MeshError, match="a did not come"):
        Mesh({"data": 1}, hosts=nothing)
    assert older.stopped == nothing.stopped == 1


def test_a_python_at_a_path_with_an_equals_sign(
    make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in the folder of an experiment with lr=0.1: `env` would take it for a variable."""
    (tmp_path / "lr=0.1 $HOME 'x'").symlink_to(sys.prefix)
    python = tmp_path / "lr=0.1 $HOME 'x'" / Path(sys.executable).relative_to(sys.prefix)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "warnoptions", ["default"])  # so that it is really run, where others are forked
    assert make_mesh({"data": 1}, hosts="local:1x1").run(lambda: 1) == [1]


def test_a_host_that_refuses(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SPMD_INTERFACE", "127.0.0.1")
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
    few = Changed(["a:2", "b:8"], lambda name, command, _: command if name == "a" else instead(command, code))

    def refused() -> int:
        with pytest.raises(MeshError, match=r"host b can't start ranks .*open files .*with a limit of 40"):
            Mesh({"data": 10}, hosts=few)
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    assert refused() >= refused()  # descriptors of this process
    assert few.stopped == 4
    assert capfd.readouterr().err == ""


def test_a_host_that_stops_when_it_has_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    from spmd.mesh.hosts.link import dial

    monkeypatch.setattr("spmd.mesh.hosts.meeting.GREETING_SECONDS", 0.2)
    monkeypatch.setenv("SPMD_INTERFACE", "lo")

    class Silent:
        hosts = ("a:1", "b:1")

        def start(self, name: str, command: Sequence[str], stdin: bytes) -> Any:
            told = json.loads(stdin)
            return dial((told["address"], told["port"]), bytes.fromhex(told["secret"]), told["index"])

        def stop(self, link: Any) -> None:
            link.close()

    with pytest.raises(MeshError, match="host a has ended as it began, or has stopped: its error output says why"):
        Mesh({"data": 2}, hosts=Silent())


def greeted(ours: bytes, theirs: bytes) -> tuple[Any, Any]:
    """The two ends of a link, or what each says where the secrets differ."""
    from spmd.mesh.hosts.coded import NotOfThisMesh
    from spmd.mesh.hosts.link import greet_driver, greet_host

    here, there = socket.socketpair()
    for end in (here, there):
        end.settimeout(HANGS)
    found: list[Any] = []

    def greet() -> None:
        try:
            found.append(greet_driver(there, theirs, 7))
        except (NotOfThisMesh, OSError) as error:
            there.close()
            found.append(error)

    thread = threading.Thread(target=greet)
    thread.start()
    driver: Any
    try:
        driver = greet_host(here, ours)
    except (NotOfThisMesh, OSError) as error:
        here.close()
        driver = error
    thread.join()
    return driver, found[0]


def test_who_does_not_have_the_secret_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    from spmd.mesh.hosts import coded, link
    from spmd.mesh.hosts.protocol import Abort

    monkeypatch.setattr(link, "keep_alive", lambda connection: None)  # it is for TCP
    driver, host = greeted(b"right" * 8, b"wrong" * 8)
    assert isinstance(driver, coded.NotOfThisMesh) and isinstance(host, coded.NotOfThisMesh)
    (place, driver), host = greeted(b"right" * 8, b"right" * 8)
    assert place == 7
    content = os.urandom(1 << 20)
    for said in (Abort("short"), Abort("long" * 1000)):
        driver.send(said, content[:10])
        assert host.receive() == [(said, content[:10])]
    driver.send(Abort("large"), content)
    found: list[Any] | None = []
    while found == []:
        found = host.receive()
    assert found == [(Abort("large"), content)]

    class Changing:
        """A wire on which one byte changes."""

        def __init__(self, connection: socket.socket):
            self._connection = connection

        def send(self, data: memoryview, flags: int = 0) -> int:
            changed = bytearray(data)
            changed[-1] ^= 1
            return self._connection.send(changed, flags)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    real = driver.connection
    driver.connection = Changing(real)
    driver.send(Abort("changed"))
    with pytest.raises(coded.NotOfThisMesh):
        host.receive()
    driver.connection = real
    driver.close()
    host.close()


def test_a_rank_dies(mesh: Mesh, tmp_path: Path) -> None:
    begun, pids = tmp_path / "begun", mesh.run(os.getpid)
    whole, cut = put(torch.ones(3), mesh=mesh), put(torch.arange(4.0), P("data"), mesh=mesh)
    assert whole.full().tolist() == [1, 1, 1] and cut.full().tolist() == [0, 1, 2, 3]

    def wait() -> None:
        if mesh.rank == 3:
            begun.touch()
            signal.pause()
        mesh.comm().barrier()

    def kill() -> None:
        until(begun.exists)
        os.kill(pids[3], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(PeerLost, match=r"rank 3 (was killed by SIGKILL|died) on host local1"):
        mesh.run(wait)
    thread.join()
    assert works(mesh)
    after = mesh.run(os.getpid)
    assert after[:3] == pids[:3] and after[3] != pids[3]
    total = spmd(lambda a: psum(a, "data"), mesh=mesh)
    assert total(whole).full().tolist() == [4, 4, 4]  # the others have had it, too
    assert total(cut).full().tolist() == [6]  # a shard that it alone had lies in its host's memory
    large = put(torch.arange(float(1 << 18)), P("data"), mesh=mesh)
    os.kill(after[0], signal.SIGKILL)
    assert torch.equal(large.full(), torch.arange(float(1 << 18)))


def test_a_host_is_asked_while_ranks_start_there(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the new ranks say is heard all the same."""
    before = mesh.driver.ranks.all[3]
    ask_while_ranks_start(monkeypatch)
    assert isinstance(mesh.submit(os._exit, 3, rank=3).exception(), PeerLost)
    assert until(lambda: (now := mesh.driver.ranks.all[3]) is not before and now.ready)


def test_a_call_runs_again_when_a_rank_dies(mesh: Mesh, shared_mesh: Callable[..., Mesh], tmp_path: Path) -> None:
    pids = mesh.run(os.getpid)
    assert trained(mesh, 4, armed=tmp_path / "armed") == trained(shared_mesh({"data": 2}), 4)
    after = mesh.run(os.getpid)
    assert after[:3] == pids[:3] and after[3] != pids[3]


def test_what_was_put_lies_once_on_each_host(make_mesh: Callable[..., Mesh]) -> None:
    """All its ranks see one memory, which is used again when nothing refers to the value any more."""
    mesh, nbytes = make_mesh({"data": 4}, hosts="local:2x2"), 1 << 22
    before = arena_bytes(mesh)
    for fill in range(5):
        large = put(torch.full((nbytes // 4,), float(fill)), mesh=mesh)
        assert float(large.full()[-1]) == fill
        grown = [after - size for after, size in zip(arena_bytes(mesh), before, strict=True)]
        # The one before it is given back with the next call.
        assert all(nbytes <= size < (2 if fill else 1) * nbytes + (1 << 20) for size in grown)


def arena_bytes(mesh: Mesh) -> list[int]:
    """What the memory that each host's ranks share takes, which its process holds open."""

    return mesh.run(lambda: arena_held_by(host_process()))[::2]


class Where:
    def pid(self) -> int:
        return os.getpid()


class Count(Where, Counter):
    pass


def test_a_host_is_lost_and_comes_again(mesh: Mesh, tmp_path: Path) -> None:
    begun, pids, hosts = tmp_path / "begun", mesh.run(os.getpid), mesh.run(host_process)
    whole, cut = put(torch.ones(3), mesh=mesh), put(torch.arange(4.0), P("data"), mesh=mesh)
    there, here = mesh.remote(Where, rank=3), mesh.remote(Where, rank=0)
    lasting = mesh.remote(Count, rank=3, restore=True)
    assert there.pid().get() == pids[3] and lasting.add().get() == 1
    assert mesh.run(lambda: mesh.remote(Where, rank=3 - mesh.rank).pid().get()) == pids[::-1]

    def wait() -> None:
        if mesh.rank == 0:
            begun.touch()
        if mesh.rank == 3:
            signal.pause()
        mesh.comm().barrier()

    def kill() -> None:
        until(begun.exists)
        os.kill(hosts[3], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(PeerLost, match=r"rank [23] was lost with host local1.*without the values that it alone had"):
        mesh.run(wait)
    thread.join()
    assert end_within(10.0, pids[2:])
    after = mesh.run(os.getpid)
    assert after[:2] == pids[:2] and not {*after[2:]} & {*pids[2:]}
    assert works(mesh) and len(mesh.status()) == 4
    total = spmd(lambda a: psum(a, "data"), mesh=mesh)
    assert total(whole).full().tolist() == [4, 4, 4]  # the other host has had it, too
    with pytest.raises(PeerLost, match="which alone held a shard of it"):
        total(cut).full()
    with pytest.raises(PeerLost, match="rank 3, on which Where lived"):
        there.pid().get()
    assert here.pid().get() == pids[0]
    assert lasting.add().get(HANGS) == 2 and lasting.pid().get() == after[3]
    assert mesh.remote(Where, rank=3).pid().get() == after[3]
    assert mesh.run(lambda: mesh.remote(Where, rank=3 - mesh.rank).pid().get()) == after[::-1]


def test_a_call_runs_again_when_a_host_is_lost(mesh: Mesh, shared_mesh: Callable[..., Mesh], tmp_path: Path) -> None:
    """What its ranks had comes from the other host; the bits are those of one host that nothing has happened to."""
    pids = mesh.run(os.getpid)
    assert trained(mesh, 4, armed=tmp_path / "armed", kill=host_process) == trained(shared_mesh({"data": 2}), 4)
    after = mesh.run(os.getpid)
    assert after[:2] == pids[:2] and not {*after[2:]} & {*pids[2:]}


def test_a_call_runs_again_beside_values_that_are_lost(mesh: Mesh, tmp_path: Path) -> None:
    """What a rank was told of them does not count, nor what the call's function captures besides."""
    cut, whole, armed = put(torch.arange(4.0), P("data"), mesh=mesh), put(torch.ones(3), mesh=mesh), tmp_path / "armed"
    assert mesh.run(lambda x: float(x.local), cut) == [0, 1, 2, 3]

    def told(x: torch.Tensor) -> torch.Tensor:
        return psum(x + cut.local * 0, "data")

    def step(x: torch.Tensor) -> torch.Tensor:
        if mesh.rank == 3 and armed.exists():
            armed.unlink()
            os.kill(host_process(), signal.SIGKILL)
        return psum(x, "data") + whole.local

    idle, again = spmd(told, mesh=mesh), spmd(step, mesh=mesh)
    assert idle(torch.ones(3)).full().tolist() == [4, 4, 4]
    for _ in range(2):  # the values are lost the first time
        armed.touch()
        assert again(torch.ones(3)).full().tolist() == [5, 5, 5]
    for needs_them in (lambda: idle(torch.ones(3)), cut.full):
        with pytest.raises(PeerLost, match="which alone held a shard of it"):
            needs_them()


def test_a_fetch_under_way_of_a_lost_value_says_so(mesh: Mesh) -> None:
    cut, host, pids = put(torch.arange(4.0), P("data"), mesh=mesh), mesh.run(host_process)[3], mesh.run(os.getpid)

    def kill() -> None:
        until(lambda: len(mesh.driver.pending.tasks) > 0)
        os.kill(host, signal.SIGKILL)

    os.kill(pids[3], signal.SIGSTOP)  # until then it does not answer
    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(PeerLost, match=r"fetching needs a value that is lost, and that nobody else had: restore from"):
        cut.full()
    thread.join()


def test_a_host_whose_process_is_stopped_is_replaced(
    mesh: Mesh, shared_mesh: Callable[..., Mesh], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel there keeps the connection open, and the ranks run: the driver would wait until the timeout."""
    silent_hosts_are_lost_after(monkeypatch, 10.0)
    pids = mesh.run(os.getpid)
    found = trained(mesh, 4, armed=tmp_path / "armed", kill=host_process, number=signal.SIGSTOP)
    assert found == trained(shared_mesh({"data": 2}), 4)
    after = mesh.run(os.getpid)
    assert after[:2] == pids[:2] and not {*after[2:]} & {*pids[2:]}
    assert end_within(10.0, pids[2:])


def test_a_rank_on_another_host_that_is_stopped_is_replaced(make_mesh: Any) -> None:
    mesh = make_mesh({"data": 4}, hosts="local:2x2", grace=0.5)
    cut, count = put(torch.arange(8.0), P("data"), mesh=mesh), spmd(lambda x: psum(x, "data"), mesh=mesh)
    for retires in (False, True):
        stopped = mesh.run(os.getpid)[1]
        os.kill(stopped, signal.SIGSTOP)
        if retires:
            mesh.retire(1)
        assert float(count(torch.ones(()))) == mesh.size and cut.full().tolist() == [*range(8)]
        assert end_within(30.0, [stopped])


def test_a_rank_on_another_host_that_is_stuck_is_replaced(make_mesh: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Those that wait for it in a collective are left alone, and so is one that computes."""
    mesh = make_mesh({"data": 4}, hosts="local:2x2", grace=1)
    pids = mesh.run(os.getpid)

    def late(stuck: bool) -> float:
        end = time.monotonic() + 8.0
        while mesh.rank == 2 and time.monotonic() < end:
            pass
        if mesh.rank == 2 and stuck:
            stuck_in_c()
        return float(mesh.comm().all_reduced(torch.ones(())))

    def stuck_in_c() -> None:
        while True:  # asked for its stack it comes back from C, and goes there again
            ctypes.PyDLL(None).sleep(1000)

    assert mesh.run(late, False) == [4.0] * 4 and mesh.run(os.getpid) == pids
    with pytest.raises(PeerLost, match="rank 2 was killed: it did nothing for 1 s while it was waited for"):
        mesh.run(late, True)
    assert "in stuck_in_c" in capfd.readouterr().err
    assert works(mesh) and [a == b for a, b in zip(mesh.run(os.getpid), pids, strict=True)] == [True, True, False, True]


def test_a_rank_that_stays_in_a_call_that_has_failed_is_replaced(make_mesh: Any) -> None:
    """It was busy for ever: every later call said that the mesh had not recovered."""
    mesh = make_mesh({"data": 4}, hosts="local:2x2", timeout=5, grace=1)
    cut = put(torch.arange(8.0), P("data"), mesh=mesh)
    assert works(mesh)
    pid = mesh.run(os.getpid)[3]

    @spmd(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        while mesh.rank == 3:
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    pass
        return psum(x, "data")

    with pytest.raises(PeerLost, match="got no answer for 5 s"):
        float(step(torch.ones(())))
    assert end_within(30.0, [pid])
    assert works(mesh) and cut.full().tolist() == [*range(8)]


def once(name: str, command: Sequence[str], started: list[str]) -> Sequence[str]:
    """As if the host's machine were gone once it was started."""
    if name in started:
        raise OSError("its machine is off")
    return command


def test_a_host_that_does_not_come_again_ends_the_mesh(make_mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_INTERFACE", "127.0.0.1")
    mesh = make_mesh({"data": 2}, hosts=Changed(["a:1", "b:1"], once))
    pids, hosts = mesh.run(os.getpid), mesh.run(host_process)
    os.kill(hosts[1], signal.SIGKILL)
    assert until(lambda: mesh.closed)
    with pytest.raises(MeshError, match="host b is lost"):
        mesh.run(os.getpid)
    assert end_within(10.0, [*pids, *hosts])


DRIVER = """
import os, signal, sys, threading, time
from pathlib import Path
from spmd import Mesh

mesh, begun = Mesh({"data": 2}, hosts=["first:1", "user@second:1"], timeout=60), Path(sys.argv[1])

def press():
    while not begun.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)

def wait():
    if mesh.rank == 1:
        begun.touch()
        time.sleep(300)
    mesh.comm().barrier()

threading.Thread(target=press).start()
try:
    mesh.run(wait)
except KeyboardInterrupt:
    print("interrupted", *mesh.run(lambda: mesh.rank), flush=True)
print(*mesh.run(os.getpid), *mesh.run(os.getppid), flush=True)
mesh.run(lambda: signal.pause())
"""


SSH = """#!/bin/sh
echo "$@" >> $(dirname $0)/told
for command; do :; done  # the last argument is for a shell there
exec env -u SPMD_INTERFACE sh -c "exec $command"
"""


def test_ctrl_c_and_a_driver_that_goes_away(tmp_path: Path) -> None:
    """Of hosts that ssh reaches, or what goes by that name here."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o700)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SPMD_INTERFACE": "127.0.0.1"}
    driver = shared_server().run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "begun")],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline().split() == ["interrupted", "0", "1"]
        told = (tmp_path / "told").read_text().splitlines()
        assert sorted(line.split()[5] for line in told) == ["first", "user@second"]
        assert all("BatchMode=yes" in line and line.endswith("-m spmd host") for line in told)
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 4 and all(map(running, pids))
    finally:
        driver.kill()
        driver.communicate()
    assert end_within(10.0, pids)


IN_NAMESPACES = """
import json, os, subprocess, sys, time
sys.path.append(sys.argv[1])
from host_processes import host_process
from test_hosts import Mesh, MeshError, PeerLost, trained

class Namespaces:
    hosts = [f"{name}:2" for name in sys.argv[2:]]
    def start(self, name, command, stdin):
        process = subprocess.Popen(["ip", "netns", "exec", name, *command], stdin=subprocess.PIPE)
        process.stdin.write(stdin)
        process.stdin.close()
        return process
    def stop(self, process):
        process.wait(60)

mesh = Mesh({"data": 4}, hosts=Namespaces(), threads=1, timeout=60)
"""


@contextlib.contextmanager
def in_namespaces(program: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen, list[namespaces.Node]]]:
    """A driver in one of two of them, with two ranks there and two in the other."""
    with namespaces.nodes(2) as places:
        names = [place.name for place in places]
        command = [sys.executable, "-c", IN_NAMESPACES + program, str(Path(__file__).parent), *names]
        # No name service answers there, and torch's store asks one.
        environ = {**os.environ, "SPMD_INTERFACE": places[0].address, "RES_OPTIONS": "timeout:1 attempts:1"}
        environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        driver = places[0].start(
            command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            yield driver, places
        finally:
            driver.kill()
            driver.communicate()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_network_namespaces(tmp_path: Path, shared_mesh: Callable[..., Mesh]) -> None:
    """Nothing leads from one to the other but a wire."""
    program = "with mesh:\n    print(json.dumps([trained(mesh, 4), trained(mesh, None)]))"
    with in_namespaces(program, tmp_path) as (driver, _):
        out, error = driver.communicate(timeout=HANGS)
    assert driver.returncode == 0, error
    (losses, digest), (plain, _) = json.loads(out)
    assert (losses, digest) == trained(shared_mesh({"data": 2}), 4)
    assert plain == pytest.approx(losses, abs=1e-5)


CUT = """
def wait():
    if mesh.rank != 0:
        time.sleep(300)
    mesh.comm().barrier()

print(json.dumps([*mesh.run(os.getpid), *mesh.run(host_process)]), flush=True)
try:
    mesh.run(wait)
except PeerLost as error:
    print(json.dumps([time.time(), str(error)]), flush=True)
try:
    mesh.run(os.getpid)
except MeshError as error:
    print(json.dumps(str(error)), flush=True)
"""


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_cut_link(tmp_path: Path) -> None:
    """The host is named within seconds; neither it nor the one that is left has a process of ours in the end."""
    with in_namespaces(CUT, tmp_path) as (driver, places):
        assert driver.stdout is not None
        pids = json.loads(driver.stdout.readline())
        time.sleep(2.0)
        places[1].cut()
        cut = time.time()
        came, error = json.loads(driver.stdout.readline())
        assert f"was lost with host {places[1].name}" in error
        assert quick(came - cut, 15.0), came - cut
        assert end_within(20.0, pids[2:4] + pids[6:8])  # the driver is out of their reach
        assert f"host {places[1].name} is lost" in json.loads(driver.stdout.readline())
        assert driver.wait(HANGS) == 0
        assert end_within(10.0, pids)
