"""The net by value: what should be the same on all ranks is compared, numbers on every call, all else on some."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import torch
from internals import leave_numbers_on_the_gpu
from scripts import launched, script

from spmd import Mesh, P, Sharded, SpecError, axis_index, spmd


@pytest.fixture(scope="module")
def mesh(shared_mesh):
    return shared_mesh({"data": 2})


def calls(mesh: Mesh, apart: str, *, since: int, until: int = 20, fetch: bool = True, **options) -> tuple[int, str]:
    """Which call of a step was refused whose result `apart` differs from call `since` on, and how; 0 for none."""

    @spmd(mesh=mesh, **options)
    def step(x, turn):
        mine = mesh.rank * int(turn.item() >= since)
        found = {"loss": x.sum(), "w": x.clone(), "one": x[:1].clone()}
        if mine and apart in found:
            found[apart] = found[apart] + mine
        return found

    for turn in range(1, until):
        try:
            out = step(torch.ones(3), torch.tensor(turn))
            if fetch:
                out["loss"].item()
        except SpecError as error:
            if fetch:  # else there may be more of them under way
                assert step(torch.ones(3), torch.tensor(0))["loss"].item() == 3  # the mesh goes on
            return turn, str(error)
    return 0, ""


@pytest.mark.parametrize("apart", ["loss", "one"])
def test_numbers_are_compared_on_every_call(mesh, apart):
    for since in (2, 3, 7):
        turn, text = calls(mesh, apart, since=since)
        assert turn == since
        assert f"result ['{apart}'] of step should be the same on all ranks along data, and is not" in text
        first, second = (3.0, 4.0) if apart == "loss" else (1.0, 2.0)
        assert f"rank 0: {first}; rank 1: {second}" in text and 'out_specs=P("data")' in text


def test_other_tensors_are_compared_on_some_calls(mesh):
    assert [calls(mesh, "w", since=since)[0] for since in (2, 3, 5, 9)] == [2, 4, 8, 16]
    text = calls(mesh, "w", since=3)[1]
    assert "result ['w'] of step" in text
    assert "rank 0: float32[3] with other bytes (sum 3); rank 1: float32[3] with other bytes (sum 6)" in text


@pytest.mark.parametrize("since", [1, 2, 3, 4, 7])
def test_values_that_change_with_every_call_are_compared_on_every_call(mesh, since):
    step = spmd(lambda x, n: {"x": x + 1, "n": n.item() + 1 + mesh.rank * (n.item() + 1 >= since)}, mesh=mesh)
    for turn in range(1, since):
        assert step(torch.ones(3), torch.tensor(turn - 1))["n"] == turn
    text = rf"result \['n'\] of <lambda> should be the same .*\(got rank 0: {since}; rank 1: {since + 1}\)"
    with pytest.raises(SpecError, match=text):
        step(torch.ones(3), torch.tensor(since - 1))


def test_values_that_change_next_to_numbers_on_a_gpu(make_mesh, tmp_path):
    """A loss there is not sent with the answers, the count is; a rank that replaces one begins to tell it anew."""
    mesh = make_mesh({"data": 2})

    @spmd(mesh=mesh)
    def step(x, n):
        leave_numbers_on_the_gpu()
        if n.item() == 5 and mesh.rank == 1 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x.sum(), n.item()

    for turn in range(9):
        loss, n = step(torch.ones(3), torch.tensor(turn))
        assert (float(loss), n) == (3, turn)
    assert (tmp_path / "died").exists()


def test_always_and_never(mesh):
    assert [calls(mesh, "w", since=since, check="always")[0] for since in (2, 3, 5)] == [2, 3, 5]
    assert [calls(mesh, apart, since=since, check="never")[0] for apart in ("w", "loss") for since in (1, 3)] == [0] * 4


def test_an_error_that_nobody_fetches_comes_with_a_later_call(mesh):
    turn, text = calls(mesh, "loss", since=3, fetch=False)
    assert 3 <= turn <= 20 and "['loss']" in text
    for _ in range(16):  # as many as may have been under way
        with contextlib.suppress(SpecError):
            mesh.run(lambda: None)


def test_nan_is_nan(mesh):
    step = spmd(lambda x: x / x, mesh=mesh)
    for _ in range(4):
        assert step(torch.zeros(())).full().isnan()


def test_replicas_along_one_of_two_axes(shared_mesh):
    mesh = shared_mesh({"data": 2, "model": 2})

    @spmd(mesh=mesh, in_specs=(P("model"), None))
    def step(x, turn):
        mine = int(turn.item() >= 3) * mesh.coords(mesh.rank)["data"]
        each = Sharded(x * axis_index("data"), P(("data", "model")))
        return {"w": Sharded(x + mine, P("model")), "all": torch.zeros(()), "each": each}

    for turn in (1, 2, 3):
        step(torch.ones(4), torch.tensor(turn))["all"].item()
    with pytest.raises(
        SpecError, match=r"result \['w'\] of step should be the same on all ranks along data, and is not"
    ):
        step(torch.ones(4), torch.tensor(4))["all"].item()


LAUNCHED = """
import enum
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from spmd import (
    CollectiveMismatch, Loader, Mesh, P, SpecError, Stream, data_parallel, fetch, psum, put, save, spmd, value_and_grad
)

check, what, backend = sys.argv[1:]
mesh = Mesh({"data": 2}, backend=backend)
data = TensorDataset(torch.arange(64.0), torch.arange(64.0) * 2)

@spmd(mesh=mesh, check=check)
@data_parallel
def step(w, batch, scale=1.0):
    return value_and_grad(lambda w, batch: ((w * batch["x"] - batch["y"]) ** 2).mean())(w, batch)

w = torch.tensor(1.0)
try:
    if what == "loader":
        torch.manual_seed(mesh.rank)  # as where nobody has given a seed
        for x, y in DataLoader(data, batch_size=16, shuffle=True):
            step(w, {"x": x, "y": y})
    elif what == "seeded":
        for x, y in DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0)):
            step(w, {"x": x, "y": y})
    elif what in ("length", "seed", "epoch", "stream"):
        mine = {"length": 8, "seed": 0, "epoch": 0, what: 8 + mesh.rank}
        data = torch.arange(mine["length"]) if what != "stream" else Stream([0, 4], lambda n: iter(range(n, n + 4)))
        loader = Loader(data, 4, seed=mine.get("stream", mine["seed"]), mesh=mesh)
        loader.load_state_dict({"epoch": mine["epoch"], "step": 0})
        for batch in loader:
            step(w, {"x": batch, "y": batch})
    elif what == "weight":  # a number, on the third call
        for turn in range(5):
            step(w + (mesh.rank if turn == 2 else 0), {"x": torch.ones(4), "y": torch.ones(4)})
    elif what in ("order", "gradients"):  # keys in another order, of values that are the same
        pairs = [(key, torch.zeros(3)) for key in ("ab" if mesh.rank == 0 else "ba")]
        f = lambda params: value_and_grad(lambda p: (p["a"] * 2 + p["b"]).sum())(params)[1] if what != "order" else 0.0
        spmd(f, mesh=mesh, check=check)(dict(pairs))
    elif what == "number":
        step(w, {"x": torch.ones(4), "y": torch.ones(4)}, scale=0.5 + mesh.rank)
    elif what in ("dtype", "member"):  # of which one rank has seen another before
        flags = (torch.float32, torch.float64) if what == "dtype" else enum.Enum("Mode", "A B")
        first, second = flags
        f = spmd(lambda x, flag: x + 1, mesh=mesh, check=check)
        for turn in range(5):
            f(torch.ones(3), second if turn > 2 and mesh.rank == 1 else first)
    elif what == "late":  # a result that differs from the third call on
        differs = spmd(lambda x, turn: x + mesh.rank * (turn.item() > 2), mesh=mesh, check=check)
        for turn in range(1, 5):
            differs(w, torch.tensor(turn))
    elif what == "count":  # a result that is no tensor, and differs from the sixth call on
        counts = spmd(lambda x, n: (x + 1, n.item() + mesh.rank * (n.item() > 4) + 1), mesh=mesh, check=check)
        n = 0
        for turn in range(1, 9):
            x, n = counts(w, torch.tensor(n))
    elif what == "put":
        put({"w": w, "x": torch.arange(3) + mesh.rank}, mesh=mesh)
    elif what == "put a part":
        put(torch.ones(2 + 2 * mesh.rank), P("data"), mesh=mesh)
    elif what == "put in another order":
        put({"a": w, "b": w} if mesh.rank == 0 else {"b": w, "a": w}, mesh=mesh)
    elif what == "fetch":
        values = [put(torch.full((4,), number), P("data"), mesh=mesh) for number in range(2)]
        fetch(values if mesh.rank == 0 else values[::-1])
    elif what == "result":
        of_calls = [put(torch.full((4,), number), P("data"), mesh=mesh) for number in range(2)]
        total = spmd(lambda x: psum(x.sum(), "data"), mesh=mesh, check=check)
        for value in (of_calls[0], of_calls[mesh.rank]):
            total(value)
    elif what == "result on one":
        spmd(lambda x, y: x + y, mesh=mesh, check=check)((w, put(w, mesh=mesh))[mesh.rank], w)
    elif what in ("fetch on one", "save on one"):
        value = put(torch.arange(4.0), P("data"), mesh=mesh)
        if mesh.rank == 0:
            fetch(value) if what == "fetch on one" else save(__file__ + ".saved", {"value": value})
        step(w, {"x": torch.ones(4), "y": torch.ones(4)})
    elif what == "functions":  # which make the same collectives, and return the same
        def train(x): return psum(x.sum(), "data")
        def evaluate(x): return psum(x.sum(), "data")
        for turn in range(3):
            for f in (train, evaluate) if mesh.rank == 0 or turn < 2 else (evaluate, train):
                spmd(f, mesh=mesh, in_specs=P("data"))(torch.ones(4))
    print("accepted")
except (SpecError, CollectiveMismatch) as error:
    print(turn + 1 if what == "weight" else turn if what in ("late", "count") else "", " ".join(str(error).split()))
assert step(w, {"x": torch.ones(4), "y": torch.ones(4)})[0].item() == 0
"""


def said(tmp_path, what: str, check: str = "first", backend: str = "shm") -> str:
    """What both launched ranks printed, which is the same."""
    code, out, err = launched(2, script(tmp_path, LAUNCHED), check, what, backend)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 2 and lines[0] == lines[1], out + err
    return lines[0].strip()


def test_launched_ranks_are_given_the_same(tmp_path):
    text = said(tmp_path, "loader")
    assert "argument 1['x'] of step should be the same on all ranks, and is not" in text
    assert "rank 0: float32[16] with other bytes (sum " in text and "rank 1: float32[16]" in text
    assert "generator=torch.Generator().manual_seed(0)" in text and "spmd.Loader" in text
    assert said(tmp_path, "seeded") == "accepted"
    assert said(tmp_path, "loader", "never") == "accepted"


@pytest.mark.parametrize("what", ["length", "seed", "epoch", "stream"])
def test_loaders_of_launched_ranks_are_alike(tmp_path, what):
    text = said(tmp_path, what)
    assert text.startswith("the batch of step should be the same on all ranks, and is not (got rank 0: epoch ")
    named = "seed" if what == "stream" else what
    assert all(f"{named}={number}" in text.replace("epoch ", "epoch=") for number in (8, 9)), text


def test_numbers_and_shapes_that_launched_ranks_are_given(tmp_path):
    text = said(tmp_path, "weight")
    assert text.startswith("3 argument 0 of step") and "rank 0: 1.0; rank 1: 2.0" in text
    assert "argument 2 of step" in (text := said(tmp_path, "number")) and "rank 0: 0.5; rank 1: 1.5" in text


@pytest.mark.parametrize(
    ("what", "got"), [("dtype", "rank 0: torch.float32; rank 1: torch.float64"), ("member", "rank 0: 'A'; rank 1: 'B'")]
)
def test_flags_that_launched_ranks_are_given(tmp_path, what, got):
    text = said(tmp_path, what)
    assert text.startswith("argument 1 of <lambda> should be the same on all ranks, and is not") and got in text


def test_the_order_of_keys_that_launched_ranks_are_given(tmp_path):
    text = said(tmp_path, "order")
    assert text.startswith("the keys of the arguments of <lambda> should be the same on all ranks, and is not")
    assert "rank 0: [0][0]['a'], [0][0]['b']; rank 1: [0][0]['b'], [0][0]['a']" in text and "sorted(...)" in text
    text = said(tmp_path, "gradients", "never")
    assert "rank 0: all_reduce float32[192] (sum) of ['a'], ['b']" in text and "rank 1: all_reduce" in text


def test_launched_ranks_put_the_same(tmp_path):
    text = said(tmp_path, "put")
    assert text.startswith("what put got['x'] should be the same on all ranks, and is not")
    assert "rank 0: int64[3] with other bytes (sum 3); rank 1: int64[3] with other bytes (sum 6)" in text
    text = said(tmp_path, "put a part")
    assert "rank 0: float32[2] with" in text and "rank 1: float32[4] with" in text and "same whole value" in text
    assert said(tmp_path, "put in another order").startswith("the keys of what put got should be the same")


def test_launched_ranks_fetch_the_same(tmp_path):
    text = said(tmp_path, "fetch")
    assert "rank 0: all_gather int64[2] of value 0 of call 1" in text
    assert "rank 1: all_gather int64[2] of value 0 of call 2" in text


@pytest.mark.parametrize("check", ["first", "never"])
def test_launched_ranks_pass_results_of_the_same_call(tmp_path, check):
    """What a rank has of cut ones would be mixed with what others have of other ones."""
    got = "argument 0 of <lambda> should be the same on all ranks, and is not (got rank 0: "
    assert said(tmp_path, "result", check).startswith(f"{got}value 0 of call 1; rank 1: value 0 of call 2)")
    assert said(tmp_path, "result on one").startswith(f"{got}1.0; rank 1: value 0 of call 1)")


@pytest.mark.parametrize(("what", "call"), [("fetch on one", "the value of an Array"), ("save on one", "mesh.run")])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_takes_all_launched_ranks_is_done_on_one(tmp_path, what, call, backend):
    """Long before the timeout of five minutes."""
    text = said(tmp_path, what, backend=backend)
    assert text.startswith("ranks make different calls, and wait for each other:")
    assert f"rank 0: {call}" in text and " rank 1: step" in text and ", waiting" in text
    assert "(the value of an Array that is cut, put, save) on all" in text


def test_launched_ranks_call_different_functions(tmp_path):
    text = said(tmp_path, "functions")
    assert text.startswith("ranks make different calls") and "rank 0: train" in text and "rank 1: evaluate" in text


def test_results_of_launched_ranks(tmp_path):
    text = said(tmp_path, "count")
    assert text.startswith("6 result [1] of <lambda> should be the same") and "(got rank 0: 6; rank 1: 7)" in text
    text = said(tmp_path, "late")
    assert text.startswith("3 result (the whole of it) of <lambda> should be the same") and "rank 1: 2" in text
