"""`Mesh(copies=)`: a whole host dies, and nothing is lost: its values have copies on a neighbour."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from host_processes import arena_held_by, host_process, parent_of
from patience import HANGS, end_within, until
from torch import nn

from spmd import (
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
    restore,
    save,
    spmd,
    value_and_grad,
)

pytestmark = pytest.mark.long

STEPS = 12


def pids_of(mesh: Mesh, host: int) -> list[int]:
    """The processes of a host of two ranks, without a word to any of them."""
    until(lambda: all(row.pid for row in mesh.status()))  # of one that has just been replaced it is yet to be told
    ranks = [row.pid for row in mesh.status()][2 * host : 2 * host + 2]
    return [parent_of(parent_of(ranks[0])), *ranks]


def kill_hosts(mesh: Mesh, hosts: list[int]) -> None:
    """Kill all ranks of hosts of two ranks, and the processes that hold them, as if machines were switched off."""
    pids = [pid for host in hosts for pid in pids_of(mesh, host)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # all at one moment
    kill_all(pids)


def kill_all(pids: list[int]) -> None:
    """Kill the process that holds a host's ranks, and these, which may be gone by then."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Training:
    """A run with dropout whose optimizer's state is cut over all ranks: a hash chain of parameters, losses and samples.

    Args:
        armed: a file; rank 3 removes it where it is first seen, at `moment` of a step, and kills its host's process.
    """

    def __init__(self, mesh: Mesh, *, shards: int | None = None, donate: Any = (), armed: Any = None, moment: str = ""):
        self.mesh, self.hash = mesh, hashlib.sha256()
        torch.manual_seed(0)
        x = torch.randn(200, 12)
        y = (x @ torch.randn(12, 3)).argmax(1)
        # The first weight is above what lies in a ledger.
        apply, self.params = functional(
            nn.Sequential(nn.Linear(12, 1500), nn.Dropout(0.2), nn.ReLU(), nn.Linear(1500, 3))
        )
        opt = optimizer(torch.optim.AdamW, lr=1e-2, shard="data")
        self.state = opt.init(self.params)

        def fault(now: str) -> None:
            if armed is not None and now == moment and mesh.rank == 3 and armed.exists():
                armed.unlink()
                os.kill(host_process(), signal.SIGKILL)

        def loss_of(params: Any, batch: Any) -> torch.Tensor:
            fault("forward")
            return F.cross_entropy(apply(params, batch["x"]), batch["y"])

        @spmd(mesh=mesh, donate=donate)
        @data_parallel(shards=shards)
        def step(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = value_and_grad(loss_of)(params, batch)
            fault("reduced")
            params, state = opt.step(params, grads, state)
            fault("updated")
            return params, state, loss

        self.step = step
        self.loader = Loader({"x": x, "y": y}, batch_size=32, seed=1, mesh=mesh, shards=shards)

    def saved(self, path: Path, step: int) -> Any:
        """Write a checkpoint; the hash chain up to it."""
        save(path, {"params": self.params, "state": self.state, "loader": self.loader}, step=step)
        return self.hash.copy()

    def resumed(self, path: Path, chain: Any) -> Training:
        """Go on from the newest checkpoint, with the hash chain that it had."""
        found = restore(path, like={"loader": self.loader}, mesh=self.mesh)
        self.params, self.state, self.hash = found["params"], found["state"], chain
        return self

    def steps(self, count: int, between: Callable[[int], None] = lambda done: None) -> str:
        """So many steps; `between` is called as soon as one has been, with how many there were."""
        done = 0
        while done < count:
            for batch in self.loader:
                self.params, self.state, loss = self.step(self.params, self.state, batch)
                done += 1
                between(done)
                self.hash.update(batch["y"].full().numpy().tobytes())
                for name in sorted(self.params):
                    self.hash.update(self.params[name].full().numpy().tobytes())
                self.hash.update(loss.full().numpy().tobytes())
                if done == count:
                    break
        return self.hash.hexdigest()


def cut(tree: Any) -> list[Any]:
    """The leaves of a tree that are not the same on all ranks."""
    import optree

    return [leaf for leaf in optree.tree_leaves(tree) if getattr(leaf, "spec", P()).entries]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh({"data": 4}, hosts="local:2x2", copies=1, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Callable[[int | None], str]]:
    """The hash of a run to which nothing happens, without copies, by `shards`."""
    found: dict[int | None, str] = {}

    def hash_of(shards: int | None) -> str:
        if shards not in found:
            with Mesh({"data": 4}, hosts="local:2x2", timeout=60) as plain:
                found[shards] = Training(plain, shards=shards).steps(STEPS)
        return found[shards]

    yield hash_of


@pytest.mark.parametrize("shards", [None, 4])
def test_the_same_bits_after_hosts_are_lost(mesh, undisturbed, shards, caplog):
    """Right after steps were called, one host after the other."""
    training = Training(mesh, shards=shards)
    deaths = {1: [1], 5: [0], 9: [1]}

    def between(done):
        if done + 1 in deaths:
            fetch(training.params)
            assert until(lambda: not mesh.driver.uncopied._waits)  # else the next host would be one too many
        if done in deaths:
            kill_hosts(mesh, deaths[done])

    with caplog.at_level(logging.WARNING, "spmd"):
        assert training.steps(STEPS, between) == undisturbed(shards)
    assert cut(training.state), "the optimizer's state is cut, or nothing is shown here"
    said = [record.getMessage() for record in caplog.records]
    assert sum("lost with host" in text and "replaced, with their values, in" in text for text in said) == 3


def test_the_same_bits_after_a_host_is_lost_while_nothing_runs(mesh, undisturbed):
    """No call waits for the values then; they are there for the next one all the same."""
    training = Training(mesh)

    def between(done):
        if done == 5:
            fetch(training.params)
            assert until(lambda: not mesh.driver.uncopied._waits)
            assert until(lambda: not mesh.driver.pending.tasks)
            before = mesh.driver.ranks.generation
            kill_hosts(mesh, [1])
            assert until(lambda: mesh.driver.ranks.generation > before)

    assert training.steps(STEPS, between) == undisturbed(None)


def test_what_is_said_of_ranks_while_their_host_is_lost(mesh):
    """The mesh goes on, so nobody is told to make a new one."""
    before, doing, stacks = mesh.driver.ranks.generation, set(), ""
    kill_hosts(mesh, [1])
    while mesh.driver.ranks.generation == before or mesh.driver._recovery.under_way:
        rows = mesh.status()
        assert [row.rank for row in rows] == [0, 1, 2, 3]
        doing.add((rows[2].doing, rows[3].doing))
        stacks = stacks or (text if "rank 2: lost with its host\n\nrank 3: lost" in (text := mesh.stacks()) else "")
    assert ("lost with its host",) * 2 in doing and stacks.startswith("rank 0: process")
    assert mesh.run(int) == [0] * 4


@pytest.mark.parametrize("moment", ["forward", "reduced", "updated"])
@pytest.mark.parametrize("donate", [(), ("params", "state")])
def test_the_same_bits_after_a_host_is_lost_in_a_step(mesh, undisturbed, tmp_path, moment, donate):
    """Of donated values, too: where they have copies they are not overwritten."""
    armed = tmp_path / "armed"
    training = Training(mesh, donate=donate, armed=armed, moment=moment)
    assert training.steps(STEPS, lambda done: armed.touch() if done == 4 else None) == undisturbed(None)
    assert not armed.exists()


def test_the_call_under_way_says_what_is_lost_and_how_to_go_on(make_mesh, tmp_path):
    """Without copies: which argument, on which host, and the newest checkpoint."""
    mesh = make_mesh({"data": 4}, hosts="local:2x2")
    armed = tmp_path / "armed"
    training = Training(mesh, armed=armed, moment="forward")
    training.steps(2)
    save(tmp_path / "run", {"params": training.params, "state": training.state}, step=2)
    folder = tmp_path / "run" / "step-00000002"
    armed.touch()
    with pytest.raises(PeerLost) as raised:
        training.steps(1)
    said = str(raised.value)
    assert "lost with host local1" in said and f"restore({str(folder)!r}); Mesh(copies=1)" in said
    assert re.search(r"argument 1\['state'\].* of step, which nobody else had, is lost", said), said
    with pytest.raises(PeerLost, match=rf"argument 1.* was lost with rank 2 on host local1.*{folder}"):
        training.steps(1)


def test_a_call_that_does_not_run_again_says_that_values_have_copies(mesh):
    cut = put(torch.arange(4.0), P("data"), mesh=mesh)

    def end_host():
        if mesh.rank == 3:
            os.kill(host_process(), signal.SIGKILL)
        mesh.comm().barrier()

    with pytest.raises(PeerLost, match=r"comes again the mesh goes on, with copies of the values that it alone had"):
        mesh.run(end_host)
    assert cut.full().tolist() == [0, 1, 2, 3]


def test_both_hosts_at_once_are_too_many(make_mesh, tmp_path):
    """One copy outlives one host: what is lost is named, and the run goes on from its checkpoint with the same bits."""
    mesh = make_mesh({"data": 4}, hosts="local:2x2", copies=1)
    training = Training(mesh)
    training.steps(3)
    before = training.saved(tmp_path / "run", 3)
    kill_hosts(mesh, [0, 1])
    with pytest.raises(PeerLost, match=rf"was lost with .*{tmp_path}/run/step-00000003") as raised:
        training.steps(1)
    assert "copies=1" not in str(raised.value)
    again = training.resumed(tmp_path / "run", before).steps(3)
    plain = Training(make_mesh({"data": 4}, hosts="local:2x2"))
    assert again == plain.steps(6)


def test_a_second_death_while_a_host_is_replaced(mesh, undisturbed, caplog):
    """A rank of the other host, whose own values lie in that host's memory."""
    training = Training(mesh)
    start = mesh.driver.ranks._start_again
    kills = iter(range(1))

    def start_and_kill(places):
        start(places)
        if next(kills, None) is not None:
            os.kill(mesh.driver.ranks.all[0].pid, signal.SIGKILL)

    mesh.driver.ranks._start_again = start_and_kill
    try:
        found = training.steps(STEPS, lambda done: kill_hosts(mesh, [1]) if done == 5 else None)
    finally:
        mesh.driver.ranks._start_again = start
    assert next(kills, None) is None, "the second one has died, or nothing is shown here"
    assert found == undisturbed(None)


def test_the_other_host_is_lost_while_one_is_replaced(make_mesh, tmp_path):
    """Too many for one copy: that is told, and the mesh goes on from the checkpoint with the same bits."""
    mesh = make_mesh({"data": 4}, hosts="local:2x2", copies=1)
    training = Training(mesh)
    training.steps(3)
    before = training.saved(tmp_path / "run", 3)
    start, pids = mesh.driver.ranks._start_again, pids_of(mesh, 0)
    began = []

    def start_and_kill(places):
        start(places)
        if not began:
            kill_all(pids)
        began.append(places)

    mesh.driver.ranks._start_again = start_and_kill
    kill_hosts(mesh, [1])
    with pytest.raises(PeerLost, match=rf"was lost with .*{tmp_path}/run/step-00000003"):
        training.steps(1)
    assert began == [[1], [0]]
    again = training.resumed(tmp_path / "run", before).steps(3)
    plain = Training(make_mesh({"data": 4}, hosts="local:2x2"))
    assert again == plain.steps(6)


def memory_of_hosts(mesh: Mesh) -> list[int]:
    """Bytes that the hosts take: the memory that their ranks share, and that of the processes that hold them."""

    def of_host() -> int:
        pid = host_process()
        own = int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
        return arena_held_by(pid) + 1024 * own

    return mesh.run(of_host)[::2]


def test_nothing_grows_with_the_steps(mesh):
    """Each step's results, of 4 MB on each rank, have copies; those of the steps before are given back."""
    step = spmd(lambda w: w + 1, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    w = put(torch.zeros(1 << 22), P("data"), mesh=mesh)
    sizes = []
    for _ in range(50):
        w = step(w)
        mesh.run(int)  # it is over, and its copies have begun: how many were on their way would else be chance
        assert until(lambda: not mesh.driver.uncopied._waits)
        sizes.append(memory_of_hosts(mesh))
    assert float(w.full()[-1]) == 50
    # A host keeps blocks of some steps, free ones as well; and it takes its messages.
    assert all(late < early + (24 << 20) for early, late in zip(sizes[24], sizes[-1], strict=True)), sizes


def test_what_is_deleted_has_no_copy_any_more(mesh):
    def copies() -> int:
        mesh.run(int)  # with the next message the ranks are told what is needed no more
        return len(mesh.driver.ranks.copies())

    kept = put(torch.arange(8.0), P("data"), mesh=mesh)
    gc.collect()
    assert until(lambda: copies() == 4)
    split = spmd(lambda: (torch.ones(1 << 16), torch.zeros(3)), mesh=mesh, out_specs=P("data"))
    large, small = split()
    assert until(lambda: copies() == 12)
    del large
    assert until(lambda: copies() == 8)
    kill_hosts(mesh, [0])
    assert small.full().tolist() == [0] * 12 and kept.full().tolist() == list(range(8))
    del small
    assert until(lambda: copies() == 4)


def test_a_value_that_ranks_of_one_host_share_is_copied_too(make_mesh):
    """And one that ranks of several hosts share needs no copy."""
    mesh = make_mesh({"data": 2, "model": 2}, hosts="local:2x2", copies=1)
    rows, columns = (put(torch.arange(8.0), P(axis), mesh=mesh) for axis in ("data", "model"))
    for host in (1, 0):
        # Of `rows` one rank of each host has sent its shard; the host that came again has got its copies again.
        assert until(lambda: sorted(rank for rank, _, _ in mesh.driver.ranks.copies()) == [0, 2])
        kill_hosts(mesh, [host])
        assert rows.full().tolist() == columns.full().tolist() == list(range(8))
        assert mesh.run(lambda: float(mesh.comm().all_reduced(torch.tensor(1.0)))) == [4.0] * 4


@pytest.mark.parametrize("copies", [-1, 1.0, True, "1", None])
def test_copies_that_are_no_number(copies):
    with pytest.raises(MeshError, match="Mesh got a bad copies"):
        Mesh({"data": 2}, copies=copies)


def test_more_copies_than_other_hosts():
    with pytest.raises(MeshError, match=r"too many copies \(expected less than the hosts, which are 2, got 2"):
        Mesh({"data": 4}, hosts="local:2x2", copies=2)
    with pytest.raises(MeshError, match="values on GPUs have no copies"):
        Mesh({"data": 2}, device="cuda", copies=1)


def test_on_one_host_it_changes_nothing(make_mesh):
    """Values lie in memory that outlives every rank; the mesh is resized as any."""
    mesh = make_mesh({"data": 2}, copies=1)
    w = put(torch.arange(6.0), P("data"), mesh=mesh)
    for pid in mesh.run(os.getpid):
        os.kill(pid, signal.SIGKILL)
    assert w.full().tolist() == list(range(6))
    mesh.resize({"data": 3})
    for pid in mesh.run(os.getpid):
        os.kill(pid, signal.SIGKILL)
    assert w.full().tolist() == list(range(6))


def test_who_was_taken_for_dead_changes_no_copies():
    """A process in a rank's place is heard, and the one before it no more, whenever that wakes up."""
    from spmd.mesh.hosts.coded import NotOfThisMesh
    from spmd.mesh.hosts.holder import Holder, secret_of
    from spmd.mesh.hosts.link import Link, greet_driver
    from spmd.mesh.hosts.protocol import CopiesSent, DropCopies, KeepCopies, SendCopies

    def greeted(key: bytes) -> Link:
        connection = socket.create_connection(("127.0.0.1", holder.port), timeout=HANGS)
        try:
            return greet_driver(connection, secret_of(key), 3)
        except BaseException:
            connection.close()
            raise

    holder = Holder("127.0.0.1", b"key" * 10)
    links = [greeted(b"key" * 10)]
    try:
        links[0].ask(KeepCopies(7, ((0, 2), (1, 3))), b"abcde")
        links.append(greeted(b"key" * 10))
        assert links[1].ask(SendCopies(3, ((7, 1), (7, 0), (8, 0)))) == (CopiesSent((3, 2, 0)), b"cdeab")
        for said in (DropCopies((7, 0, -1)), KeepCopies(7, ((0, 2),))):
            with pytest.raises(OSError):
                links[0].ask(said, b"xy")
        assert sorted(holder.names()) == [(3, 7, 0), (3, 7, 1)]
        links[1].ask(DropCopies((7, 0, 1)))
        assert links[1].ask(SendCopies(3, ((7, 0), (7, 1)))) == (CopiesSent((0, 3)), b"cde")
        with pytest.raises((OSError, NotOfThisMesh)):
            greeted(b"another key")
        assert holder.names() == ((3, 7, 1),)
    finally:
        for link in links:
            link.close()
        holder.close()


def test_ranks_that_were_stopped_die_with_their_host(mesh):
    """Stopped in a step, and woken again and again while their host is replaced: none of them is there afterwards."""
    step = spmd(lambda w: psum(w.sum(), "data") * w, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    w = put(torch.ones(4), P("data"), mesh=mesh)
    assert step(w).full().tolist() == [4] * 4
    process, *ranks = pids_of(mesh, 1)
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    found = step(w)
    os.kill(process, signal.SIGKILL)
    ended = threading.Event()

    def wake() -> None:
        while not ended.wait(0.001):
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        assert found.full().tolist() == [4] * 4
    finally:
        ended.set()
        thread.join()
    assert end_within(HANGS, ranks)
    assert step(found).full().tolist() == [64] * 4
