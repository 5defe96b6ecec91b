"""`Mesh`: making one, calling plain functions on its ranks, random numbers, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import random
import re
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from patience import HANGS, end_within, until

from spmd import Array, Mesh, MeshError, P, SpecError, axis_index, barrier, psum, put, spmd


@pytest.fixture
def mesh(shared_mesh):
    return shared_mesh({"data": 2})


def waits(path):
    """On a rank: until the test lets it go on."""
    while not path.exists():
        time.sleep(0.01)
    return "done"


# -- making one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_sizes(make_mesh, size):
    mesh = make_mesh({"data": size})
    assert mesh.run(lambda: int(psum(torch.tensor(axis_index("data")), "data"))) == [size * (size - 1) // 2] * size
    assert len(set(mesh.driver.pids)) == size and os.getpid() not in mesh.driver.pids
    value = torch.arange(2 * size)
    assert torch.equal(put(value, P("data"), mesh=mesh).full(), value)
    mesh.close()
    assert end_within(2, mesh.driver.pids)


def test_axes(make_mesh, monkeypatch):
    cores = len(os.sched_getaffinity(0))
    assert make_mesh().axes == {"data": cores}
    monkeypatch.setenv("SPMD_RANKS", "6")
    assert make_mesh({"a": -1, "b": 2}).axes == {"a": 3, "b": 2}
    assert make_mesh({"a": 2}).size == 2
    square = make_mesh({"a": 2, "b": 1})
    assert square.coords(1) == {"a": 1, "b": 0}
    assert square.describe() == "Mesh({'a': 2, 'b': 1}, backend='shm', device='cpu')"
    for rank in (-1, 2, None):
        with pytest.raises(MeshError, match=r"coords got a bad rank \(expected 0 to 1, got"):
            square.coords(rank)


@pytest.mark.parametrize(
    ("axes", "options", "words"),
    [
        ({}, {}, ["Mesh got no axes"]),
        ({"a": 0}, {}, ["axis 'a' got a bad size", "got 0"]),
        ({"a": True}, {}, ["axis 'a' got a bad size", "got True"]),
        ({"a": 2.0}, {}, ["axis 'a' got a bad size"]),
        ({"": 2}, {}, ["bad axis name"]),
        ({3: 2}, {}, ["bad axis name", "got 3"]),
        ({"a": 10**20}, {}, ["a mesh can't have so many ranks (expected at most 65536, got 100000000000000000000)"]),
        ({"a": -1, "b": 1}, {"SPMD_RANKS": "99999999"}, ["so many ranks", "got 99999999"]),
        ({"a": -1, "b": -1}, {}, ["only one axis may have size -1"]),
        ({"a": -1, "b": 4}, {"SPMD_RANKS": "6"}, ["axis 'a' cannot be filled in", "SPMD_RANKS is 6"]),
        ({"a": -1}, {"SPMD_RANKS": "many"}, ["SPMD_RANKS is not a number of ranks", "'many'"]),
        ({"a": 1}, {"backend": "smoke"}, ["Mesh got an unknown backend", "'smoke'", "gloo", "shm"]),
        ({"a": 1}, {"device": "tpu"}, ["device", "'tpu'"]),
        ({"a": 1}, {"threads": 0}, ["Mesh got a bad threads", "got 0"]),
        ({"a": 1}, {"timeout": 0}, ["Mesh got a bad timeout"]),
    ],
)
def test_what_cannot_be_made(axes, options, words, monkeypatch):
    if "SPMD_RANKS" in options:
        monkeypatch.setenv("SPMD_RANKS", options.pop("SPMD_RANKS"))
    with pytest.raises(MeshError) as caught:
        Mesh(axes, **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_threads(make_mesh):
    assert make_mesh({"data": 1}, threads=3).run(torch.get_num_threads) == [3]
    assert make_mesh({"data": 1}).run(torch.get_num_threads) == [len(os.sched_getaffinity(0))]
    assert make_mesh({"data": 16}).run(torch.get_num_threads, ranks=[7]) == [1]


def test_ranks_see_the_drivers_surroundings(mesh, monkeypatch):
    assert set(mesh.run(os.getcwd)) == {os.getcwd()}
    assert mesh.run(lambda: (os.environ.get("HOME"), __name__))[0] == (os.environ.get("HOME"), __name__)


# -- run and submit ----------------------------------------------------------------------------------------------------


def test_run(mesh):
    assert mesh.run(lambda a, b: (mesh.rank, a, b), 1, "b") == [(0, 1, "b"), (1, 1, "b")]
    results = mesh.run(lambda: {"none": None, "set": {1}, "tensor": torch.full((2,), mesh.rank), "type": torch.nn.ReLU})
    assert results[1]["tensor"].tolist() == [1, 1] and results[0]["set"] == {1} and results[0]["type"] is torch.nn.ReLU
    big = mesh.run(lambda: (torch.full((1 << 17,), mesh.rank), b"x" * (1 << 21)))
    assert [int(tensor.sum()) for tensor, _ in big] == [0, 1 << 17] and len(big[1][1]) == 1 << 21
    weight = torch.ones(2, requires_grad=True)
    assert mesh.run(lambda: (weight * 2).requires_grad) == [True, True]  # gradients are on, whatever the driver does
    array = put(torch.arange(4), P("data"), mesh=mesh)
    assert mesh.run(lambda x: x.local.tolist(), array) == [[0, 1], [2, 3]]
    assert mesh.run(lambda x: x, array)[1] is array
    assert mesh.run(gc.isenabled) == [True, True] and gc.isenabled()  # it is off only while modules are loaded


def test_ranks_and_their_order(shared_mesh):
    mesh = shared_mesh({"data": 2, "model": 2})
    rank = lambda: mesh.rank  # noqa: E731
    assert (
        mesh.run(rank, ranks=[3, 0]) == [3, 0] and mesh.run(rank, ranks=(2,)) == [2] and mesh.run(rank, ranks=[]) == []
    )
    assert mesh.run(rank, ranks=torch.tensor([2, 1])) == [2, 1]
    assert mesh.run(lambda: int(psum(torch.tensor(mesh.rank), "model")), ranks=[2, 3]) == [5, 5]
    for ranks, words in (([4], "no such rank .*got 4"), ([-1], "got -1"), ([1, 1], "named twice")):
        with pytest.raises(MeshError, match=words):
            mesh.run(rank, ranks=ranks)
    assert mesh.run(lambda: mesh.comm(("model", "data")).ranks) == [(0, 2, 1, 3)] * 4
    with pytest.raises(SpecError, match="comm names an axis twice"):
        mesh.run(lambda: mesh.comm(("model", "model")))
    with pytest.raises(SpecError, match="unknown"):
        mesh.run(lambda: mesh.comm("pipe"))


def test_submit(mesh, tmp_path):
    futures = [mesh.submit(lambda n=n: (mesh.rank, n), rank=n % 2) for n in range(20)]
    assert [future.result(HANGS) for future in futures] == [(n % 2, n) for n in range(20)]
    slow = mesh.submit(waits, tmp_path / "go on", rank=1)
    assert mesh.submit(lambda: "quick", rank=0).result(HANGS) == "quick" and not slow.done()
    (tmp_path / "go on").touch()
    assert slow.result(HANGS) == "done"
    with pytest.raises(MeshError, match="no such rank"):
        mesh.submit(len, "x", rank=2)
    with pytest.raises(MeshError, match=r"a future of mesh.submit cannot be pickled: .*future.result\(\)"):
        mesh.submit(abs, futures[0])


def test_submit_that_fails(mesh, tmp_path):
    future = mesh.submit(lambda: 1 / 0, rank=1)
    with pytest.raises(ZeroDivisionError):
        future.result(HANGS)
    assert mesh.run(lambda: 1) == [1, 1]  # the future has told of it, and nobody else does
    with pytest.raises(MeshError, match=r"given to mesh.submit cannot communicate: .*use mesh.run"):
        mesh.submit(lambda: barrier()).result(HANGS)
    total = spmd(torch.sum, mesh=mesh, in_specs=P("data"))
    with pytest.raises(MeshError, match=r"mesh\.submit cannot call sum, an @spmd function: its rank runs it alone"):
        mesh.submit(lambda: total(torch.ones(4))).result(HANGS)
    with pytest.raises(MeshError, match=r"on some ranks cannot call sum, an @spmd function .*leave ranks= out"):
        mesh.run(lambda: total(torch.ones(4)), ranks=[1])
    doubled = spmd(lambda x: 2 * x, mesh=mesh)
    assert mesh.run(lambda: float(doubled(torch.ones(()))), ranks=[1, 0]) == [2, 2]
    # It fails for itself: what else is under way goes on.
    first, second = tmp_path / "first", tmp_path / "second"
    busy, bad = mesh.submit(waits, first, rank=0), mesh.submit(lambda: 1 / 0, rank=1)
    with pytest.raises(ZeroDivisionError):
        bad.result(HANGS)
    assert not busy.done()
    first.touch()
    assert busy.result(HANGS) == "done"
    # A region that fails takes with it what was asked for after it, and spares what came before.
    before = mesh.submit(waits, second, rank=0)
    with pytest.raises(ZeroDivisionError):
        mesh.run(lambda: 1 / 0, ranks=[1])
    assert not before.done()
    second.touch()
    assert mesh.run(lambda: 1) == [1, 1] and before.result(0) == "done"


def test_a_callback_of_a_future_may_wait_and_use_the_mesh(mesh, tmp_path, caplog):
    """Not on a thread that the mesh needs: others go on, also those for which it waits."""
    told, lock, begun = [], threading.Lock(), threading.Event()

    def callback(future):
        begun.set()
        with lock:
            told.append((future.result(), mesh.run(len, "x")))

    future = mesh.submit(waits, tmp_path / "go on")
    for one in (callback, lambda _: 1 / 0, callback):
        future.add_done_callback(one)
    with lock:
        (tmp_path / "go on").touch()
        assert begun.wait(HANGS) and mesh.run(len, "xy") == [2, 2] and not told
    assert until(lambda: told == 2 * [("done", [1, 1])])
    assert "ZeroDivisionError" in caplog.text


def test_many_large_messages_both_ways(mesh):
    """More is under way than sockets hold, in both directions at once, and ranks print as well."""
    data = bytes(3 << 20)
    futures = [mesh.submit(lambda d: d + b"!", data, rank=n % 2) for n in range(12)]
    assert all(len(future.result(60)) == len(data) + 1 for future in futures)


def test_several_threads_may_call(mesh):
    results: list[list[int]] = []

    def work(n):
        results.extend(mesh.run(lambda: int(psum(torch.tensor(n), "data"))) for _ in range(5))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert sorted(results) == sorted([[2 * n] * 2 for n in range(4)] * 5)


def test_what_the_driver_is_not(mesh):
    with pytest.raises(MeshError, match=r"mesh.comm was called in the driver, which is not a rank: call it inside"):
        mesh.comm()
    with pytest.raises(MeshError, match="psum was called outside a region"):
        psum(torch.ones(1), "data")


# -- put ---------------------------------------------------------------------------------------------------------------


def test_put(shared_mesh, mesh):
    square = shared_mesh({"data": 2, "model": 2})
    tree = {"x": torch.arange(4), "n": 2.5, "b": True, "s": np.float32(3), "a": [np.arange(2)], "none": ()}
    placed = put(tree, {"x": P("data", None), "n": None, "b": P(), "s": P(), "a": P("model"), "none": ()}, mesh=square)
    assert list(placed) == list(tree) and all(isinstance(placed[name], Array) for name in "xnbs")
    assert (placed["n"].item(), placed["b"].item(), placed["s"].dtype) == (2.5, True, torch.float32)
    assert placed["x"].spec == P("data") and [s.tolist() for s in placed["a"][0].shards()] == [[0], [1], [0], [1]]
    assert put(placed["x"], P("data"), mesh=square) is placed["x"]  # it is there already
    again = put(placed["x"], P("model"), mesh=square)
    assert [s.tolist() for s in again.shards()] == [[0, 1], [2, 3]] * 2
    moved = put(placed["x"], P("data"), mesh=mesh)
    assert moved.mesh is mesh and moved.full().tolist() == [0, 1, 2, 3]
    assert put({}, mesh=mesh) == {}
    large = torch.randn(1 << 16, 2)
    assert torch.equal(put(large, P("data"), mesh=mesh).full(), large)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert put(image, mesh=mesh).full().is_contiguous(memory_format=torch.channels_last)


def test_put_within_a_region_takes_whole_values(mesh):
    x = torch.arange(4.0)
    for spec in (P("data"), P()):
        with pytest.raises(SpecError, match=r"put takes a whole value.*differ along data: .*comes of.*Sharded\(x, P"):
            spmd(lambda x, spec=spec: put(x * 2, spec), mesh=mesh, in_specs=P("data"))(x)
    whole = spmd(
        lambda x: put({"sum": psum(x, "data"), "new": torch.ones(2)}, P("data")), mesh=mesh, in_specs=P("data")
    )
    assert [whole(x)[name].full().tolist() for name in ("sum", "new")] == [[2.0, 4.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("tree", "spec", "words"),
    [
        ({"a": "text"}, P(), ["put got a leaf that is not a tensor", "got str", "[put, leaf ['a']]"]),
        (None, P(), ["got NoneType", "[put]"]),
        ({"w": torch.ones(3)}, P("data"), ["dimension 0 of size 3 is not divisible", "[put, leaf ['w']]"]),
        (1.0, P("data"), ["more entries than the tensor has dimensions"]),
        ([1.0], {"a": P()}, ["the specs given to put do not fit", "prefix"]),
        (torch.ones(2), P("model"), ["does not have", "'model'"]),
    ],
)
def test_what_cannot_be_put(mesh, tree, spec, words):
    with pytest.raises(SpecError) as caught:
        put(tree, spec, mesh=mesh)
    assert all(word in str(caught.value) for word in words), caught.value


# -- which mesh is meant -----------------------------------------------------------------------------------------------


def test_each_task_of_asyncio_means_its_own_mesh():
    async def task(mesh, mine, other):
        with mesh:
            mine.set()
            await other.wait()
            assert put(1.0).mesh is mesh
            assert (await asyncio.to_thread(put, 1.0)).mesh is mesh

    async def both():
        entered = asyncio.Event(), asyncio.Event()
        await asyncio.gather(task(Mesh({"a": 1}), *entered), task(Mesh({"b": 1}), *entered[::-1]))

    asyncio.run(asyncio.wait_for(both(), HANGS))


def test_which_mesh_is_meant(monkeypatch):
    monkeypatch.setenv("SPMD_RANKS", "1")
    put(1.0).mesh.close()  # an earlier test's, if there is one
    plain = spmd(lambda x: x + 1)
    first = plain(torch.tensor(1.0)).mesh
    assert first.axes == {"data": 1} and put(1.0).mesh is first
    first.close()
    second = put(1.0).mesh
    assert second is not first  # a closed default is replaced
    with Mesh({"a": 1}) as outer:
        assert put(1.0).mesh is outer and plain(torch.tensor(1.0)).mesh is outer
        with Mesh({"b": 1}) as inner:
            assert put(1.0).mesh is inner and put(1.0, mesh=outer).mesh is outer
            seen = []
            thread = threading.Thread(target=lambda: seen.append(put(1.0).mesh))
            thread.start()
            thread.join(HANGS)
            assert seen == [second]  # `with` counts for its own thread
            with outer:
                assert put(1.0).mesh is outer
            assert put(1.0).mesh is inner
        assert put(1.0).mesh is outer and inner.closed and not outer.closed
    assert outer.closed and put(1.0).mesh is second
    with pytest.raises(MeshError, match="this mesh is closed"), outer:
        pass
    elsewhere = contextlib.ExitStack()
    third = elsewhere.enter_context(Mesh({"a": 1}))
    thread = threading.Thread(target=elsewhere.close)  # as a server ends a generator
    thread.start()
    thread.join(HANGS)
    assert third.closed and put(1.0).mesh is second
    with pytest.raises(ZeroDivisionError), Mesh({"a": 1}) as broken:
        broken.run(lambda: 1)
        1 / 0  # noqa: B018
    assert broken.closed
    second.close()


def test_threads_that_use_the_default_mesh_first_get_one(monkeypatch):
    monkeypatch.setenv("SPMD_RANKS", "1")
    put(1.0).mesh.close()  # an earlier test's, if there is one
    with ThreadPoolExecutor(3) as pool:
        meshes = {value.mesh for value in pool.map(put, [1.0, 2.0, 3.0])}
    assert len(meshes) == 1
    meshes.pop().close()


def test_several_meshes_at_once(make_mesh, mesh):
    others = [make_mesh({"data": n}) for n in (1, 2, 3)]
    totals = [spmd(lambda x: psum(x.sum(), "data"), mesh=one, in_specs=P("data")) for one in (*others, mesh)]
    for _ in range(3):
        assert [float(total(torch.ones(6))) for total in totals] == [6.0] * 4
    values = [put(torch.arange(6), P("data"), mesh=one) for one in others]
    assert all(torch.equal(put(value, mesh=mesh).full(), torch.arange(6)) for value in values)
    others[1].close()
    assert others[2].run(lambda: 1) == [1] * 3


# -- random numbers ----------------------------------------------------------------------------------------------------


def drawn(mesh, calls=2):
    draw = spmd(lambda: torch.rand(1, 2), mesh=mesh, out_specs=P("data"))
    found = [draw().full() for _ in range(calls)]
    return torch.stack([*found, torch.stack(mesh.run(lambda: torch.rand(1, 2))).view(-1, 2)])


def test_random_numbers(make_mesh):
    first = drawn(make_mesh({"data": 3}, seed=1))
    assert torch.equal(first, drawn(make_mesh({"data": 3}, seed=1)))  # they repeat between runs
    assert len(set(first.flatten().tolist())) == first.numel()  # and differ between ranks and calls
    assert not torch.isin(first, drawn(make_mesh({"data": 3}, seed=2))).any()
    before = torch.get_rng_state()
    drawn(make_mesh({"data": 1}))
    assert torch.equal(torch.get_rng_state(), before)


def test_pythons_and_numpys_random_numbers_differ_between_ranks(mesh):
    assert len(set(mesh.run(lambda: random.random()))) == len(set(mesh.run(lambda: np.random.rand()))) == 2


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close(make_mesh):
    mesh = make_mesh({"data": 2})
    mesh.close()
    mesh.close()
    assert mesh.closed and end_within(2, mesh.driver.pids)
    for use in (lambda: mesh.run(len, "x"), lambda: mesh.submit(len, "x"), lambda: put(1.0, mesh=mesh)):
        with pytest.raises(MeshError, match=re.escape("this mesh is closed: Mesh.close() was called")):
            use()


def test_closing_waits_for_what_was_started(make_mesh, tmp_path):
    mesh = make_mesh({"data": 2})

    def slow(path):
        time.sleep(0.3)
        open(path, "w").close()

    future = mesh.submit(slow, str(tmp_path / "done"))
    mesh.close()
    assert future.done() and (tmp_path / "done").exists()


def test_a_mesh_that_nobody_needs_ends_its_ranks():
    mesh = Mesh({"data": 2})
    array, pids, alive = put(torch.ones(2), mesh=mesh), mesh.driver.pids, weakref.ref(mesh)
    mesh.run(lambda: mesh.rank)
    mesh = None
    gc.collect()
    assert alive() is array.mesh  # a value on it keeps it
    array = None
    gc.collect()
    assert alive() is None and end_within(2, pids)


def test_descriptors_are_given_back(make_mesh):
    def use():
        mesh = make_mesh({"data": 2}, backend="gloo")
        spmd(lambda x: psum(x, "data"), mesh=mesh)(torch.ones(1 << 16)).full()
        mesh.run(lambda: 1)
        mesh.close()

    use()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        use()
    gc.collect()
    assert until(lambda: len(os.listdir("/proc/self/fd")) <= before, 20)


# JAX, where another test has imported it, warns of every fork.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:os.fork:RuntimeWarning")
def test_a_forked_child_leaves_the_mesh_alone(make_mesh):
    mesh = make_mesh({"data": 1})
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "nothing"
        try:
            mesh.run(len, "x")
        except MeshError as error:
            text = str(error)
        mesh.close()
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"belongs to the process that this one was forked from" in os.read(read, 1000)
    assert mesh.run(lambda: 1) == [1]
    os.close(read)
    os.close(write)


def test_errors_of_a_mesh_show_the_users_frames_alone(make_mesh, monkeypatch):
    def gone():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    mesh = make_mesh({"data": 1})
    mesh.close()
    monkeypatch.setattr(os, "getcwd", gone)  # as after its folder was deleted
    calls = {
        "resize": lambda: mesh.resize({"data": 2}),
        "retire": lambda: mesh.retire(0),
        "remote": lambda: mesh.remote(list),
        "restart": lambda: mesh.restart(),
    }
    for name, call in calls.items():
        with pytest.raises(MeshError) as caught:
            call()
        shown = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        assert shown == ["test_errors_of_a_mesh_show_the_users_frames_alone", "<lambda>"], (name, caught.value)


def test_a_closed_mesh_writes_to_no_file_that_has_got_a_number_of_its_own(make_mesh):
    """As a thread that resizes a mesh has it listen to new ranks just when another thread closes it."""
    mesh = make_mesh({"data": 1})
    mesh.close()
    files = [os.memfd_create("a program's") for _ in range(64)]
    try:
        mesh.driver.receiving.soon(int)
        assert [os.fstat(file).st_size for file in files] == [0] * 64
    finally:
        for file in files:
            os.close(file)
