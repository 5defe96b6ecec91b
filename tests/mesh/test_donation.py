"""Donated memory: taken over where nothing else shows it, and never read again."""

import contextlib
import sys
import threading
import time

import cloudpickle
import pytest
import torch
from patience import until
from torch import nn, optim

from spmd import MeshError, SpecError, data_parallel, fetch, functional, optimizer, put, spmd, value_and_grad

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CASES = [
    (optim.AdamW, {"lr": 0.01}),
    (optim.AdamW, {"lr": 0.01, "fused": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
]
SHAPES = {"first": (400, 300), "second": (200_001,), "third": (7,)}


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def params_of(seed=0):
    return {name: drawn(shape, seed + index) for index, (name, shape) in enumerate(SHAPES.items())}


def place_of(tree):
    return {name: array._source.value(0).data_ptr() for name, array in tree.items()}


def trained(mesh, cls, hyper, shard, donate, steps=4):
    """Parameters after each step, and on every rank where they lay."""
    opt = optimizer(cls, shard=shard, **hyper)

    @spmd(mesh=mesh, donate=donate)
    def step(params, state, grads):
        return opt.step(params, grads, state)

    params, state = put(params_of(), mesh=mesh), opt.init(params_of())
    found, places = [], []
    for turn in range(steps):
        params, state = step(params, state, put(params_of(100 * turn + 10), mesh=mesh))
        found.append({name: value.full() for name, value in params.items()})
        places.append(mesh.run(place_of, params))
    return found, places


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("shard", [None, "data"])
@pytest.mark.parametrize(("cls", "hyper"), CASES)
def test_the_same_bits_in_the_same_place(shared_mesh, backend, shard, cls, hyper):
    mesh = shared_mesh({"data": 2}, backend=backend)
    expected, fresh = trained(mesh, cls, hyper, shard, ())
    found, places = trained(mesh, cls, hyper, shard, ("params", "state"))
    for turn, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert all(torch.equal(a[name], b[name]) for name in SHAPES), turn
    # The first call's arguments were put there and own nothing; from then on everything stays where it is.
    assert places[1] == places[0] == places[3]
    assert fresh[1] != fresh[0]


def test_another_thread_may_not_use_what_a_call_under_way_was_given(shared_mesh, tmp_path):
    """The call goes on."""
    mesh = shared_mesh({"data": 2})
    opt, begun, found = optimizer(optim.SGD, lr=1.0), tmp_path / "begun", []

    @spmd(mesh=mesh, donate=("params", "state"))
    def step(params, state):
        params, state = opt.step(params, params, state)
        begun.touch()
        time.sleep(0.5)
        return params, state

    params = {"w": put(torch.ones(9), mesh=mesh)}
    thread = threading.Thread(target=lambda: found.append(step(params, opt.init(params))))
    thread.start()
    assert until(begun.exists)
    with pytest.raises(SpecError, match="this Array was donated to step"):
        fetch(spmd(lambda w: w + 1, mesh=mesh)(params["w"]))
    thread.join(10)
    assert torch.equal(found[0][0]["w"].full(), torch.zeros(9))


def test_a_tensor_is_refused_after_its_memory_was_taken(shared_mesh):
    mesh = shared_mesh({"data": 2})
    opt = optimizer(optim.SGD, lr=1.0)

    @spmd(mesh=mesh, donate=("params", "late"))
    def step(params, late):
        new, _ = opt.step(params, {"w": torch.ones(3)}, opt.init(params))
        return new, (new["w"] - params["w"] if late else torch.zeros(3))

    params, _ = step(put({"w": torch.zeros(3)}, mesh=mesh), False)
    params, _ = step(params, False)
    with pytest.raises(SpecError, match=r"a donated tensor was used after opt\.step had taken over its memory"):
        step(params, True)
    with pytest.raises(SpecError, match="this Array was donated to step"):  # the call had begun to overwrite it
        params["w"].full()


class Breaking(optim.SGD):
    def step(self, closure=None):
        super().step()
        raise ValueError("on purpose")


def test_a_step_that_fails_has_taken_what_it_had_begun_to_overwrite(shared_mesh):
    broken, opt = optimizer(Breaking, lr=1.0), optimizer(optim.SGD, lr=1.0)
    ones = {"w": torch.ones(3)}

    @spmd(mesh=shared_mesh({"data": 2}), donate="params")
    def step(params, fails):
        if fails:
            with contextlib.suppress(ValueError):
                broken.step(params, ones, broken.init(params))
        return opt.step(params, ones, opt.init(params))[0]

    params = step(step(put({"w": torch.zeros(3)}, mesh=shared_mesh({"data": 2})), False), False)
    with pytest.raises(SpecError, match=r"a donated tensor was used after opt\.step had taken over its memory"):
        step(params, True)


class Unsendable:
    def __reduce__(self):
        raise TypeError("it stays here")


def test_a_call_that_could_not_be_sent_has_taken_nothing(shared_mesh):
    mesh = shared_mesh({"data": 2})

    @spmd(mesh=mesh, donate=("w",))
    def step(w, why):
        return w + 1

    w = put(torch.zeros(3), mesh=mesh)
    with pytest.raises(MeshError, match="it stays here"):
        step(w, Unsendable())
    assert step(w, "").full().tolist() == [1, 1, 1]
    with pytest.raises(SpecError, match="was donated to step"):
        step(w, "")


def test_what_something_else_shows_is_left_alone(shared_mesh):
    """A view returned beside, a result passed through, an Array passed twice, memory handed out by `.local`."""
    mesh = shared_mesh({"data": 2})
    opt = optimizer(optim.SGD, lr=1.0)

    @spmd(mesh=mesh, donate="params")
    def step(params, other=None):
        new, _ = opt.step(params, {"w": torch.ones(4)}, opt.init(params))
        return new

    @spmd(mesh=mesh)
    def same(params):
        return params

    @spmd(mesh=mesh)
    def part(params):
        return params["w"][1:3]

    @spmd(mesh=mesh, donate="params")
    def with_view(params):
        new, _ = opt.step(params, {"w": torch.ones(4)}, opt.init(params))
        return new, new["w"][:2]

    def fresh():
        return step(put({"w": torch.zeros(4)}, mesh=mesh))

    passed = fresh()
    kept = same(passed)
    assert step(passed)["w"].full().tolist() == [-2.0] * 4 and kept["w"].full().tolist() == [-1.0] * 4
    viewed = fresh()
    view = part(viewed)
    assert step(viewed)["w"].full().tolist() == [-2.0] * 4 and view.full().tolist() == [-1.0] * 2
    twice = fresh()
    assert step(twice, twice["w"])["w"].full().tolist() == [-2.0] * 4
    params, beside = with_view(fresh())
    assert step(params)["w"].full().tolist() == [-3.0] * 4 and beside.full().tolist() == [-2.0] * 2

    shown = fresh()

    def held(params):
        held.tensor = params["w"].local
        return

    mesh.run(held, shown)
    assert step(shown)["w"].full().tolist() == [-2.0] * 4


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_what_a_step_captures_and_returns_is_left_alone(shared_mesh, kind):
    """A step that begins anew with the first parameters: the next ones are not written into their memory."""
    mesh = shared_mesh({"data": 2})
    opt, first = optimizer(optim.SGD, lr=0.1, shard=None), {"w": drawn((64, 64), 0)}
    again = put(first, mesh=mesh) if kind == "array" else {"w": first["w"].clone()}

    @spmd(mesh=mesh, donate=("params", "state"))
    def step(params, state, grads, anew):
        params, state = opt.step(params, grads, state)
        return (dict(again) if anew else params), state

    params, state = first, opt.init(first)
    for turn in range(6):
        params, state = step(params, state, {"w": torch.ones(64, 64)}, turn % 3 == 2)
        if turn % 3 == 2:
            assert torch.equal(params["w"].full(), first["w"]), turn


def test_a_donated_value_that_the_step_captures_is_not_read_after_it_was_overwritten(shared_mesh):
    """It read the new parameters for the old ones. Before opt.step it is what it was."""
    mesh = shared_mesh({"data": 2})
    opt, first = optimizer(optim.SGD, lr=0.1, shard=None), {"w": drawn((64, 64), 0)}
    best = {}

    @spmd(mesh=mesh, donate=("params", "state"))
    def step(params, state, grads, late):
        before = 0.0 if late or not best else best["w"].full().sum()
        params, state = opt.step(params, grads, state)
        return params, state, best["w"].full().sum() if late else before

    params, state, _ = step(first, opt.init(first), {"w": torch.ones(64, 64)}, False)
    best["w"] = params["w"]
    expected = params["w"].full().sum()
    params, state, found = step(params, state, {"w": torch.ones(64, 64)}, False)
    torch.testing.assert_close(found.full(), expected)
    best["w"] = params["w"]
    with pytest.raises(SpecError, match=r"donated tensor was used after opt\.step had taken.*leave its argument out"):
        fetch(step(params, state, {"w": torch.ones(64, 64)}, True)[2])


def test_a_launched_rank_that_looks_at_its_parameters_disagrees_with_nobody(shared_mesh):
    """What only one rank has handed out, no rank overwrites."""
    mesh = shared_mesh({"data": 2})
    opt = optimizer(optim.SGD, shard="data", lr=1.0)

    @spmd(mesh=mesh, donate=("params", "state"))
    def step(params, state):
        return opt.step(params, {"w": torch.ones(20_000)}, state)

    params, state = step(put({"w": torch.zeros(20_000)}, mesh=mesh), opt.init({"w": torch.zeros(20_000)}))
    mesh.run(lambda params: params["w"].local.sum() if mesh.rank == 1 else None, params)
    before = mesh.run(place_of, params)
    params, state = step(params, state)
    assert params["w"].full().unique().tolist() == [-2.0]
    assert mesh.run(place_of, params) != before


def test_sharded_over_one_of_two_axes(shared_mesh):
    mesh = shared_mesh({"data": 2, "model": 2})
    opt = optimizer(optim.AdamW, shard="data", lr=0.1)

    @spmd(mesh=mesh, donate=("params", "state"))
    def step(params, state, grads):
        return opt.step(params, grads, state)

    params = put(params_of(), mesh=mesh)
    state = opt.init(params_of())
    plain = {name: nn.Parameter(value) for name, value in params_of().items()}
    reference = optim.AdamW(plain.values(), lr=0.1)
    for turn in range(3):
        grads = params_of(7 * turn)
        params, state = step(params, state, put(grads, mesh=mesh))
        for name, value in plain.items():
            value.grad = grads[name]
        reference.step()
    for name, value in plain.items():
        assert torch.allclose(params[name].full(), value.detach(), atol=1e-6)


def test_a_module_trained_with_donation(shared_mesh):
    mesh = shared_mesh({"data": 2})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 5))
    apply, start = functional(model)
    x, y = drawn((16, 20), 1), drawn((16, 5), 2)

    def losses(donate):
        from spmd import data_parallel, value_and_grad

        opt = optimizer(optim.AdamW, lr=0.01, shard="data")

        @spmd(mesh=mesh, donate=donate)
        @data_parallel
        def step(params, state, batch):
            loss, grads = value_and_grad(lambda p: ((apply(p, batch["x"]) - batch["y"]) ** 2).mean())(params)
            params, state = opt.step(params, grads, state)
            return params, state, loss

        params, state, found = put(start, mesh=mesh), opt.init(start), []
        for _ in range(5):
            params, state, loss = step(params, state, {"x": x, "y": y})
            found.append(float(loss))
        return found

    assert losses(()) == losses(("params", "state"))


def test_results_that_overlap_are_not_taken(shared_mesh):
    """Of a call's results those that share an element with another own nothing; the others do."""
    mesh = shared_mesh({"data": 2})
    opt = optimizer(optim.SGD, lr=1.0, shard=None)
    names = ("first", "second", "third", "last")

    @spmd(mesh=mesh, donate=())
    def cut(whole):
        whole = whole.clone()
        return dict(zip(names, (whole[:10], whole[10:20], whole[15:30], whole[40:]), strict=True))

    @spmd(mesh=mesh, donate="params")
    def step(params):
        return opt.step(params, {name: torch.ones_like(value) for name, value in params.items()}, opt.init(params))[0]

    for _ in range(2):
        params = step(step(cut(torch.zeros(100))))
        assert all(value.full().unique().tolist() == [-2.0] for value in params.values())


def test_sparse_values_beside_donated_ones(shared_mesh):
    """Memory that a sparse result shows is not taken, though its indices and values are not in order."""
    mesh = shared_mesh({"data": 2})
    opt = optimizer(optim.SGD, lr=1.0, shard=None)

    @spmd(mesh=mesh, donate="params")
    def step(params, table):
        new, _ = opt.step(params, {"w": torch.ones(4)}, opt.init(params))
        indices = torch.tensor([[3, 1, 1, 0]])
        return new, torch.sparse_coo_tensor(indices, new["w"], (5,), check_invariants=False), table

    params, table = put({"w": torch.zeros(4)}, mesh=mesh), put(torch.eye(2).to_sparse(), mesh=mesh)
    found = []
    for _ in range(3):
        params, sparse, table = step(params, table)
        found.append(sparse)
    assert [one.full().to_dense().tolist() for one in found] == [[-n, -2 * n, 0, -n, 0] for n in (1.0, 2.0, 3.0)]
    assert torch.equal(table.full().to_dense(), torch.eye(2))


def test_a_tensor_that_is_stepped_twice_is_not_taken(shared_mesh):
    """Tied in the body, where nobody sees that it is one."""
    opt = optimizer(optim.SGD, lr=1.0)

    @spmd(mesh=shared_mesh({"data": 2}), donate="params")
    def step(params, opt_state):
        tied = {"w": params["w"], "tied": params["w"]}
        return opt.step(tied, {name: torch.ones(4) for name in tied}, opt_state)

    params = {"w": torch.zeros(4)}
    opt_state = opt.init(params)
    for turn in range(1, 5):
        params, opt_state = step({"w": params["w"]}, opt_state)
        assert all(value.full().tolist() == [-turn] * 4 for value in params.values())


def test_parameters_that_lie_together_are_not_all_taken(shared_mesh):
    """Of one storage, that an earlier step has made, a later step overwrites a part."""
    opt = optimizer(optim.SGD, lr=1.0, momentum=0.5, foreach=False)

    @spmd(mesh=shared_mesh({"data": 2}), donate=("params", "opt_state"))
    @data_parallel
    def step(params, opt_state, batch, changes):
        grads = value_and_grad(lambda p, b: (p["w"].sum() + p["v"].sum()) * b.mean())(params, batch)[1]
        if changes:  # then it is not known to be the same on all ranks, and its parameter is stepped by itself
            grads["w"] = grads["w"].clone()
        return opt.step(params, grads, opt_state)

    params = {"w": torch.zeros(1), "v": torch.zeros(5, 4)}
    opt_state = opt.init(params)
    for turn, expected in enumerate((-1.0, -2.5, -4.25, -6.125)):
        params, opt_state = step(params, opt_state, torch.ones(4), turn == 2)
        assert {name: value.full().unique().tolist() for name, value in params.items()} == {
            "w": [expected],
            "v": [expected],
        }
