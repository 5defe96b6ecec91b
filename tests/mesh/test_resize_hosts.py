"""A mesh over several hosts gets another size while its program goes on, as one on a single host does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_processes import Changed, host_process, parent_of
from internals import at_the_switch, newcomers_of
from patience import HANGS, end_within, until
from test_copies import Training, cut, kill_hosts, undisturbed
from test_resize import shards_of, trained
from torch import nn

from spmd import Loader, Mesh, MeshError, P, PeerLost, fetch, psum, put, spmd

pytestmark = pytest.mark.long

__all__ = ["undisturbed"]  # a fixture


@pytest.fixture(scope="module")
def made() -> Iterator[Mesh]:
    with Mesh({"data": 4}, hosts="local:2x2", timeout=HANGS) as mesh:
        yield mesh


@pytest.fixture
def mesh(made: Mesh) -> Mesh:
    """Of the size that it was made with, which is what `hosts=` gave."""
    made.resize({"data": 4})
    return made


@pytest.fixture(scope="module")
def copied() -> Iterator[Mesh]:
    with Mesh({"data": 4}, hosts="local:2x2", copies=1, timeout=HANGS) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def alone() -> Any:
    """The run of `trained` on a mesh of one host, to which nothing happens."""
    with Mesh({"data": 2}) as mesh:
        return trained(mesh)


def counts(mesh: Mesh) -> list[int]:
    """How many ranks each host has, as they see it themselves."""
    hosts = mesh.run(host_process)
    return [hosts.count(host) for host in dict.fromkeys(hosts)]


def test_closed_while_hosts_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_INTERFACE", "127.0.0.1")
    monkeypatch.setattr("spmd.mesh.hosts.ranks.START_SECONDS", 2 * HANGS)
    twice = ["sleep", "infinity"]  # what never comes
    launcher = Changed(["a:1", "b:1"], lambda name, command, started: twice if name in started else command)
    with Mesh({"data": 2}, hosts=launcher, timeout=HANGS) as mesh:
        mesh.resize({"data": 4}, wait=False)
        assert until(lambda: len(launcher.started) == 4)


def to(mesh: Mesh, size: int) -> Callable[[], None]:
    return lambda: mesh.resize({"data": size})


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def host_of(pid: int) -> int:
    """The process that holds a rank."""
    return parent_of(parent_of(pid))


def processes(mesh: Mesh) -> list[int]:
    """Those of the ranks, and of who holds them."""
    return [*mesh.run(os.getpid), *dict.fromkeys(mesh.run(host_process))]


def test_up_and_down_the_same_bits_and_samples(mesh: Mesh, alone: Any) -> None:
    sizes = {1: to(mesh, 3), 3: to(mesh, 1), 4: to(mesh, 5), 7: lambda: mesh.retire(0)}
    assert trained(mesh, before=sizes) == alone
    assert mesh.axes == {"data": 4} and counts(mesh) == [2, 2]


def test_ranks_are_spread_over_the_hosts(mesh: Mesh) -> None:
    """In proportion to what each was given; one that has none left comes again; and all that was has ended."""
    for size, expected in ((7, [4, 3]), (1, [1]), (4, [2, 2])):
        before = processes(mesh)
        mesh.resize({"data": size})
        assert counts(mesh) == expected and f"rank {size - 1} on local{len(expected) - 1}" in repr(mesh)
        assert end_within(HANGS, before)
        assert [row.host for row in mesh.status()] == [
            f"local{n}" for n, count in enumerate(expected) for _ in range(count)
        ]


def test_a_rank_retires_from_its_host(mesh: Mesh) -> None:
    x = put(torch.arange(12.0), P("data"), mesh=mesh)
    mesh.retire(1)
    assert mesh.axes == {"data": 3} and counts(mesh) == [1, 2]
    assert [row.host for row in mesh.status()] == ["local0", "local1", "local1"]
    mesh.retire(0)
    assert [row.host for row in mesh.status()] == ["local1", "local1"] and x.full().tolist() == [*range(12)]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_values_of_every_kind(mesh: Mesh) -> None:
    whole = torch.arange(24.0).reshape(12, 2)
    last = torch.randn(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    large = torch.randn(1 << 17)
    values = {
        "cut": put(whole, P("data"), mesh=mesh),
        "small": put(torch.tensor(3), mesh=mesh),
        "empty": put(torch.empty(0, 3), P("data"), mesh=mesh),
        "large": put(large, P("data"), mesh=mesh),
        "strides": put(last, mesh=mesh),
        "made": spmd(lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(large),
        "complex": put(torch.complex(large, large), P("data"), mesh=mesh),
        "flags": put(large > 0, P("data"), mesh=mesh),
    }
    sparse = [put(torch.eye(500).to_sparse(), mesh=mesh), put(torch.eye(500).to_sparse_csr(), mesh=mesh)]
    gone, left = spmd(lambda x: (x + 1, x + 2), mesh=mesh)(put(large, mesh=mesh))
    del gone
    captured = put(torch.tensor(5.0), mesh=mesh)
    add = spmd(lambda x: x + captured.local, mesh=mesh)
    assert float(add(torch.tensor(1.0))) == 6
    mesh.resize({"data": 3})
    assert [shard.tolist() for shard in values["cut"].shards()] == whole.reshape(3, 4, 2).tolist()
    assert values["cut"].spec == P("data") and values["large"].spec == P()  # which three do not divide
    assert torch.equal(values["large"].full(), large) and torch.equal(values["made"].full(), large * 2)
    assert values["strides"].full().stride() == last.stride() and torch.equal(values["strides"].full(), last)
    assert values["small"].item() == 3 and values["empty"].shape == values["empty"].full().shape == (0, 3)
    assert torch.equal(values["complex"].full(), torch.complex(large, large))
    assert torch.equal(values["flags"].full(), large > 0) and torch.equal(left.full(), large + 2)
    assert float(add(torch.tensor(1.0))) == 6
    assert [value.full().layout for value in sparse] == [torch.sparse_coo, torch.sparse_csr]
    assert all(torch.equal(value.full().to_dense(), torch.eye(500)) for value in sparse)


def test_large_values_are_cut_as_if_they_were_put() -> None:
    """Whatever the shapes, and how elements lie in memory: the same shards as of a value that is put there."""
    images = torch.randn(12, 8, 24, 36)
    wholes: list[tuple[torch.Tensor, P]] = [
        (torch.randn(24, 5000), P("data")),
        (torch.randn(5000, 24), P(None, "data")),
        (torch.randn(240, 480).double(), P("data", "model")),
        (torch.randn(5000, 24).T, P("data")),
        (images.contiguous(memory_format=torch.channels_last), P("data", "model")),
        (nn.Parameter(torch.randn(24, 5000), requires_grad=False), P("data")),
        (torch.randn(1 << 16), P("data")),
        (torch.randn(48, 4000), P(None, "model")),
        (torch.randn(0, 4000), P("data")),
        (torch.randn(12, 1 << 20), P("data")),  # more than is fetched at once
    ]
    with Mesh({"data": 2, "model": 2}, hosts="local:2x2", timeout=HANGS) as mesh:
        assert [row.host for row in mesh.status()] == ["local0"] * 2 + ["local1"] * 2
        values = [put(whole, spec, mesh=mesh) for whole, spec in wholes]
        for size in (1, 3):
            mesh.resize({"data": size})
            for (whole, spec), value in zip(wholes, values, strict=True):
                expected = shards_of(put(whole, value.spec, mesh=mesh))
                assert value.spec in (spec, P())
                for (found, *how), (shard, *same) in zip(shards_of(value), expected, strict=True):
                    assert torch.equal(found, shard) and how == same
        mesh.retire(4)  # and rank 5, which differs from it in the model axis only
        assert mesh.axes == {"data": 2, "model": 2} and counts(mesh) == [3, 1]


def test_the_program_goes_on_until_new_ranks_are_ready(mesh: Mesh) -> None:
    count = spmd(lambda x: psum(x, "data"), mesh=mesh)
    one = put(torch.ones(()), mesh=mesh)
    assert float(count(one)) == 4
    mesh.resize({"data": 3}, wait=False)
    assert mesh.size == 4
    assert until(lambda: float(count(one)) == 3.0) and mesh.size == 3
    mesh.resize({"data": 1}, wait=False)
    mesh.resize({"data": 2})  # the last word
    assert mesh.size == 2 and float(count(one)) == 2


def test_batches_read_ahead(mesh: Mesh) -> None:
    """Each sample once, whoever had read it before; the batch in hand is that of the new size."""
    seen = []
    for batch in Loader(torch.arange(48), 12, shuffle=False, mesh=mesh):
        mesh.resize({"data": 7 - mesh.size})
        shards = batch.shards()
        assert len(shards) == mesh.size
        seen += sorted(int(row) for shard in shards for row in shard)
    assert seen == [*range(48)]


def test_state_that_is_cut_over_all_ranks(mesh: Mesh, undisturbed: Any) -> None:
    training = Training(mesh, shards=4)

    def between(done: int) -> None:
        if done in (3, 6, 8):
            before = fetch(training.state)
            mesh.resize({"data": {3: 2, 6: 3, 8: 4}[done]})
            assert torch.equal(
                *(torch.cat([leaf.flatten() for leaf in leaves_of(tree)]) for tree in (before, fetch(training.state)))
            )

    assert training.steps(12, between) == undisturbed(4)
    assert cut(training.state), "the optimizer's state is cut, or nothing is shown here"


def leaves_of(tree: Any) -> list[torch.Tensor]:
    import optree

    return [leaf.double() for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def test_ranks_and_hosts_die_on_the_way(mesh: Mesh, alone: Any) -> None:
    """Old ranks while new ones get ready, new ranks, and the process of a new host, before they are."""

    def while_they_get_ready() -> None:
        old = mesh.driver.pids
        mesh.resize({"data": 3}, wait=False)
        assert until(lambda: newcomers_of(mesh))
        kill(newcomers_of(mesh)[:1])
        kill(old[1:2])

    def host_while_they_get_ready() -> None:
        mesh.resize({"data": 4}, wait=False)
        assert until(lambda: newcomers_of(mesh))
        kill([host_of(newcomers_of(mesh)[0])])

    def at_once() -> None:
        mesh.resize({"data": 2})
        kill(mesh.driver.pids)

    faults = {2: while_they_get_ready, 3: to(mesh, 3), 4: host_while_they_get_ready, 5: to(mesh, 4), 6: at_once}
    assert trained(mesh, before=faults) == alone
    assert mesh.size == 2


@pytest.mark.parametrize("who", ["new rank", "new host", "old rank", "old host"])
def test_someone_dies_at_the_switch(copied: Mesh, undisturbed: Any, monkeypatch: Any, who: str) -> None:
    """Others are started, or the one that is lost comes again, and then values move: the bits are the same."""
    mesh = copied
    mesh.resize({"data": 4})
    training = Training(mesh, shards=4)
    done: list[str] = []

    def die(new: list[int]) -> None:
        if not done:
            one = (new if who.startswith("new") else mesh.driver.pids)[-1]
            kill([host_of(one) if who.endswith("host") else one])
            done.append(who)

    def between(step: int) -> None:
        if step == 5:
            fetch(training.params)
            assert until(lambda: not mesh.driver.uncopied._waits)
            mesh.resize({"data": 2})

    at_the_switch(monkeypatch, die)
    assert training.steps(12, between) == undisturbed(4)
    assert done and mesh.size == 2


def test_new_ranks_that_die_each_time(mesh: Mesh, monkeypatch: Any) -> None:
    """The mesh is as it was, and says so."""
    x = put(torch.arange(12.0), P("data"), mesh=mesh)
    pids = mesh.run(os.getpid)
    with monkeypatch.context() as patch:
        started: list[int] = []

        def die(new: list[int]) -> None:
            kill(new[:1])
            started.extend([*new, *map(host_of, new[1:])])

        at_the_switch(patch, die)
        with pytest.raises(MeshError, match=r"cannot be resized.*3 times in a row.*goes on as it was"):
            mesh.resize({"data": 3})
    assert mesh.size == 4 and mesh.run(os.getpid) == pids and x.full().tolist() == [*range(12)]
    assert end_within(HANGS, started)
    mesh.resize({"data": 3})
    assert x.full().tolist() == [*range(12)]


def test_what_was_lost_before_is_named_afterwards(mesh: Mesh) -> None:
    """And what others had is there."""
    whole, parts = put(torch.ones(3), mesh=mesh), put(torch.arange(12.0), P("data"), mesh=mesh)
    assert parts.full().tolist() == [*range(12)]  # it is there, not only on its way
    generation = mesh.driver.ranks.generation
    kill([host_of(mesh.driver.pids[3])])
    assert until(lambda: mesh.driver.ranks.generation > generation)
    mesh.resize({"data": 3})
    assert whole.full().tolist() == [1, 1, 1]
    with pytest.raises(PeerLost, match="a value on this mesh was lost"):
        parts.full()


def test_copies_are_there_as_soon_as_it_has_its_size(copied: Mesh, undisturbed: Any) -> None:
    """A whole host dies right after it; and again after the next."""
    mesh = copied
    mesh.resize({"data": 4})
    training = Training(mesh, shards=4)

    def between(done: int) -> None:
        if done in (4, 8):
            mesh.resize({"data": 2 if done == 4 else 4})
            pids = mesh.driver.pids[len(mesh.driver.pids) // 2 :]
            kill([host_of(pids[0]), *pids])

    assert training.steps(12, between) == undisturbed(4)
    kill_hosts(mesh, [0])
    assert fetch(training.state) is not None and mesh.size == 4


def test_what_is_refused(copied: Mesh) -> None:
    mesh = copied
    mesh.resize({"data": 4})
    pids = mesh.run(os.getpid)
    with pytest.raises(MeshError, match=r"copies on 1 other hosts.*got 1 ranks on 1 hosts"):
        mesh.resize({"data": 1})
    mesh.retire(0)
    with pytest.raises(MeshError, match="copies on 1 other hosts"):
        mesh.retire(0)
    assert mesh.size == 3 and not {*mesh.run(os.getpid)} & {*pids}


def test_no_more_than_an_engine_has_granted() -> None:
    from spmd.mesh.hosts.host_list import HostList
    from spmd.mesh.hosts.launchers import SlurmLauncher

    launcher = object.__new__(SlurmLauncher)
    hosts = HostList(("a", "b"), (4, 2), launcher, False)
    assert hosts.spread(3).spread(6).counts == (4, 2)
    with pytest.raises(MeshError, match=r"no more ranks to give.*got 7 ranks, and 6 that were asked for"):
        hosts.spread(3).spread(7)


def test_a_mesh_is_closed_while_new_ranks_get_ready(tmp_path: Path) -> None:
    with Mesh({"data": 2}, hosts="local:2x1", timeout=HANGS) as mesh:
        before = processes(mesh)
        mesh.resize({"data": 4}, wait=False)
        assert until(lambda: newcomers_of(mesh))
        before += [*newcomers_of(mesh), *map(host_of, newcomers_of(mesh))]
    assert end_within(HANGS, before)
