"""Values that stay on the ranks: calls that do not wait, what is moved, what is freed, errors that are never lost."""

from __future__ import annotations

import gc
import io
import sys
import threading
import time

import pytest
import torch
from internals import arena_bytes, keep_no_free_results, note_what_is_told, values_held
from patience import until

from spmd import Loader, Mesh, MeshError, P, SpecError, axis_index, fetch, psum, put, spmd


def resident(mesh) -> list[int]:
    """How many values each rank holds."""
    gc.collect()
    return mesh.run(values_held)


@pytest.fixture(scope="module")
def mesh():
    """Of its own: what is counted here may not change as values of other tests are collected."""
    with Mesh({"data": 2}) as mesh:
        yield mesh


@pytest.fixture
def sent(mesh, monkeypatch):
    """The bytes of tensors sent to the ranks, one entry for each message."""
    sizes: list[int] = []

    def note(message, packet):
        if packet is not None:
            sizes.append(len(packet.inline) + (packet.fd is not None) * (1 << 30))

    note_what_is_told(mesh, monkeypatch, note)
    return sizes


# -- what is moved, and when -------------------------------------------------------------------------------------------


def test_passing_results_on_moves_nothing(mesh, sent):
    step = spmd(lambda w, x: w + x, mesh=mesh)
    w, x = put(torch.zeros(1 << 16), mesh=mesh), torch.ones(1 << 16)
    assert sent == [0]  # it lies where all ranks see it
    x = put(x, mesh=mesh)
    sent.clear()
    for _ in range(10):
        w = step(w, x)
    assert sum(sent) == 0 and w.full()[0] == 10


def test_another_spec_moves_what_it_must(mesh, sent):
    mean = spmd(lambda x: psum(x.sum(0), "data"), mesh=mesh, in_specs=P("data"))
    whole, cut, across = (put(torch.ones(4, 2), spec, mesh=mesh) for spec in (P(), P("data"), P(None, "data")))
    sent.clear()
    assert mean(whole).full().tolist() == mean(cut).full().tolist() == [4, 4] and sum(sent) == 0
    assert mean(across).full().tolist() == [4, 4] and sum(sent) > 0
    with pytest.raises(SpecError, match="dimension 0 of size 3 is not divisible"):
        mean(put(torch.ones(3, 2), P(None, "data"), mesh=mesh))


def test_small_values_are_fetched_together(mesh, sent):
    @spmd(mesh=mesh)
    def make(x):
        many = [x + number for number in range(300)]
        return {"many": many, "large": torch.ones(1 << 15), "twice": (x, x), "text": "a", "number": x.sum()}

    made, cut = make(torch.arange(4.0)), [put(torch.arange(4) + number, P("data"), mesh=mesh) for number in range(2)]
    found = fetch(made)  # so that the call is over
    sent.clear()
    again, (first, second) = fetch((made, cut))
    assert len(sent) < 10
    for tree in (found, again):
        assert all(value.tolist() == [number + i for i in range(4)] for number, value in enumerate(tree["many"]))
        assert tree["large"].sum() == 1 << 15 and tree["text"] == "a" and tree["number"] == 6
        tree["twice"][0].add_(1)
        assert tree["twice"][1].tolist() == [0, 1, 2, 3]
        assert tree["many"][0].untyped_storage().nbytes() == 16  # what saves it alone saves no others
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [1, 2, 3, 4]
    same, other = fetch([made["twice"][0]] * 2)
    same.add_(1)
    assert other.tolist() == [0, 1, 2, 3] == made["many"][0].tolist()


def test_calls_do_not_wait(mesh, tmp_path):
    """Until more than a few are under way: then for the first of them."""
    may_end = tmp_path / "may end"

    @spmd(mesh=mesh)
    def step(x):
        end = time.monotonic() + 300
        while not may_end.exists():
            if time.monotonic() > end:
                raise TimeoutError("the call is waited for")
            time.sleep(0.01)
        return x + 1

    may_end.touch()
    x = step(put(torch.tensor(0.0), mesh=mesh))  # the first call of a kind is waited for, to learn what it gives
    may_end.unlink()
    x = step(step(x))
    assert x.mesh is mesh
    timer = threading.Timer(0.3, may_end.touch)
    timer.start()
    for _ in range(8):
        x = step(x)
    assert may_end.exists()
    assert x.shape == () and float(x) == 11.0
    timer.join()


def test_what_is_no_tensor_is_waited_for(mesh):
    step = spmd(lambda x, n: {"x": x + n, "n": n + 1}, mesh=mesh)
    x, n = torch.tensor(0.0), 0
    for _ in range(4):
        out = step(x, n)
        x, n = out["x"], out["n"]
    assert n == 4 and float(x) == 6.0


# -- what is freed -----------------------------------------------------------------------------------------------------


def test_values_go_with_their_arrays(mesh):
    before = resident(mesh)
    arrays = put({"a": torch.ones(2), "b": torch.ones(2)}, mesh=mesh)
    out = spmd(lambda t: {k: v + 1 for k, v in t.items()}, mesh=mesh)(arrays)
    assert resident(mesh) == [n + 4 for n in before]
    del arrays["a"]
    out.pop("b")
    assert resident(mesh) == [n + 2 for n in before]
    step = spmd(lambda x: x + 1, mesh=mesh)
    x = out["a"]
    for _ in range(20):
        x = step(x)
    assert float(x.full()[0]) == 22 and resident(mesh) == [n + 3 for n in before]
    del arrays, out, x
    assert resident(mesh) == before


def test_the_memory_of_what_was_put_goes_too(mesh):
    """What is put over and over keeps that of the one before, which is used again."""
    total = spmd(torch.sum, mesh=mesh)
    nbytes, before = 32 << 20, arena_bytes(mesh)
    for _ in range(8):
        x = put(torch.ones(nbytes // 4), mesh=mesh)
        assert float(total(x)) == nbytes // 4
    assert nbytes <= arena_bytes(mesh) - before < 3 * nbytes
    del x
    for _ in range(20):
        float(total(torch.ones(2)))
    assert arena_bytes(mesh) - before < 1 << 20


def test_what_a_failed_call_left_goes_too(mesh):
    before = resident(mesh)

    @spmd(mesh=mesh)
    def f(x):
        if axis_index("data") == 1:
            raise ValueError("no")
        return x + 1

    for _ in range(3):
        with pytest.raises(ValueError):
            f(torch.ones(2))
    assert resident(mesh) == before
    differ = spmd(lambda: torch.tensor(float(axis_index("data"))), mesh=mesh)
    with pytest.raises(SpecError):
        differ()
    assert resident(mesh) == before


def test_batches_that_nobody_took_go_too(mesh):
    before = resident(mesh)
    for _ in range(3):
        for _batch in Loader({"x": torch.arange(32)}, batch_size=4, mesh=mesh, prefetch=3):
            break
    del _batch
    assert until(lambda: resident(mesh) == before)  # once they have been read


# -- errors of calls that nobody waited for ----------------------------------------------------------------------------


def faulty(mesh):
    @spmd(mesh=mesh)
    def step(x):
        if float(x[0]) == 3.0 and axis_index("data") == 1:
            raise FloatingPointError("three")
        return x + 1

    return step, step(torch.zeros(2))


def test_an_error_surfaces_at_the_next_call(mesh):
    step, x = faulty(mesh)
    with pytest.raises(FloatingPointError, match="three"):
        for _ in range(10):
            x = step(x)
    for _ in range(2):  # it was told once; what depends on it says so as often as it is asked
        with pytest.raises(FloatingPointError, match="three"):
            step(x)
    assert mesh.run(lambda: 1) == [1, 1]


def test_an_error_surfaces_at_a_fetch(mesh):
    step, x = faulty(mesh)
    x = step(step(x))
    bad = step(x)
    for use in (bad.full, lambda: bad.shape, lambda: repr(bad), lambda: step(bad), lambda: mesh.run(lambda: bad)):
        with pytest.raises(FloatingPointError, match="three"):
            use()
    assert x.full().tolist() == [3, 3] and mesh.run(lambda: 1) == [1, 1]


def test_a_failure_spares_the_calls_before_it(mesh):
    @spmd(mesh=mesh)
    def slow(x, wait):
        y = psum(x, "data")
        if bool(wait) and axis_index("data") == 0:
            time.sleep(1.1)  # the other rank is long done, and fails in the next call
        return y

    @spmd(mesh=mesh)
    def fails(x):
        if float(x[0]) == 8.0 and axis_index("data") == 1:
            raise FloatingPointError("eight")
        return psum(x, "data")

    no, yes = put(torch.tensor(False), mesh=mesh), put(torch.tensor(True), mesh=mesh)
    x = slow(put(torch.ones(2), mesh=mesh), no)
    fails(x)
    good = slow(slow(x, no), yes)
    bad = fails(good)
    with pytest.raises(FloatingPointError, match="eight"):
        bad.full()
    assert good.full().tolist() == [8, 8]


@pytest.mark.parametrize("ending", ["close", "with"])
def test_an_error_surfaces_at_the_end(make_mesh, ending):
    mesh = make_mesh({"data": 2})
    step, x = faulty(mesh)
    with pytest.raises(FloatingPointError, match="three"):
        if ending == "close":
            step(step(step(x)))
            mesh.close()
        else:
            with mesh:
                step(step(step(x)))
    assert mesh.closed


def test_an_error_of_a_mesh_that_nobody_needs_is_printed(make_mesh, monkeypatch):
    printed = io.StringIO()  # to be looked at while it is written to, which loses nothing
    monkeypatch.setattr(sys, "stderr", printed)

    def use():
        from spmd import Mesh

        step, x = faulty(Mesh({"data": 2}))
        step(step(step(x)))

    use()
    gc.collect()
    assert until(lambda: "FloatingPointError: three" in printed.getvalue())
    assert "on rank 1" in printed.getvalue()


def test_results_that_are_kept_and_not_read_hold_little(mesh):
    """Losses of many steps, of which a program may read a few at the end."""
    step = spmd(lambda x: psum(x.sum(), "data"), in_specs=P("data"), mesh=mesh)
    x = put(torch.ones(4), P("data"), mesh=mesh)

    def events() -> int:
        gc.collect()
        return sum(type(obj) is threading.Event for obj in gc.get_objects())

    before, losses = events(), [step(x) for _ in range(40)]
    assert float(losses[-1]) == 4 and events() < before + 20


def test_reduced_values_that_were_kept_for_a_while_give_their_memory_back(make_mesh):
    mesh = make_mesh({"data": 2})
    mesh.run(keep_no_free_results)
    step = spmd(lambda x: psum(x, "data"), mesh=mesh, check="never")
    x, small = (put(torch.ones(numel), mesh=mesh) for numel in (1 << 18, 1))
    before, kept = arena_bytes(mesh), [step(x) for _ in range(32)]
    assert kept[-1].full().sum() == 2 << 18 and arena_bytes(mesh) > before + (32 << 20)
    kept.clear()
    for _ in range(64):
        step(small)
    assert step(x).full().sum() == 2 << 18 and arena_bytes(mesh) < before + (8 << 20)


def test_a_finalizer_in_a_reference_cycle_is_told_that_its_arrays_are_gone(mesh):
    class Holder:
        def __init__(self, value):
            self.value, self.own = value, self

        def __del__(self):
            made.append(self.value + 1)

    made = [put(torch.ones(3), mesh=mesh) + 1 for _ in range(2)]  # from the second on, such calls do not wait
    Holder(put(torch.ones(3), mesh=mesh))
    gc.collect()
    with pytest.raises(MeshError, match=r"before an object's `__del__` used it: in a reference cycle"):
        made[2].full()
    assert made[1].tolist() == [2, 2, 2]


def test_results_may_change_from_call_to_call(mesh):
    @spmd(mesh=mesh)
    def f(x, how):
        how = int(how)
        return [x, (x, x), x[:1], x.double(), 5][how]

    x = torch.ones(4)
    assert f(x, torch.tensor(0)).full().tolist() == [1] * 4
    shorter = f(x, torch.tensor(2))
    assert shorter.shape == (1,) and shorter.full().tolist() == [1]
    assert f(x, torch.tensor(3)).dtype == torch.float64
    for how, expected in (
        (1, r"arguments \(expected "),
        (4, r"\(expected a tensor, got 5 for result \(the whole of it"),
    ):
        other = f(x, torch.tensor(how))
        for _ in range(2):
            with pytest.raises(SpecError, match=f"f returned another structure than before for .*{expected}"):
                other.full()
    assert f(x, torch.tensor(0)).full().tolist() == [1] * 4


def test_a_spec_may_change_from_call_to_call(mesh):
    from spmd import Sharded

    @spmd(mesh=mesh)
    def f(x, cut):
        return Sharded(x, P("data")) if bool(cut) else x

    total = spmd(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"))
    x = torch.ones(2)
    assert f(x, torch.tensor(False)).spec == P()
    whole = spmd(lambda x: x, mesh=mesh, in_specs=P())
    assert whole(f(x, torch.tensor(True))).full().tolist() == [1.0] * 4  # the first call waits for what it is given
    whole(f(x, torch.tensor(False)))
    cut = f(x, torch.tensor(True))
    with pytest.raises(SpecError, match="came back with another spec than before"):
        whole(cut).full()
    cut = f(x, torch.tensor(True))
    assert float(total(cut)) == 4.0 and cut.spec == P("data") and cut.shape == (4,)


def test_the_garbage_of_a_closed_mesh_is_no_error(make_mesh):
    mesh = make_mesh({"data": 1})
    x = put(torch.ones(2), mesh=mesh)
    y = spmd(lambda x: x, mesh=mesh)(x)
    mesh.close()
    del x, y
    gc.collect()
    with pytest.raises(MeshError):
        mesh.run(len, "x")
