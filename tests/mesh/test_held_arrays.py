"""Arrays that a step captures: they may change from call to call, as arguments do, and the step is sent once."""

from __future__ import annotations

import os
import signal
import threading
import types
from typing import Any

import pytest
import torch
from internals import note_what_is_told
from torch import nn

from spmd import (
    Loader,
    Mesh,
    MeshError,
    P,
    SpecError,
    data_parallel,
    functional,
    optimizer,
    pmean,
    psum,
    put,
    spmd,
    value_and_grad,
)


@pytest.fixture
def mesh(make_mesh) -> Mesh:
    return make_mesh({"data": 2})


@pytest.fixture
def told(mesh, monkeypatch) -> list[str]:
    """What the ranks are told, by kind."""
    found: list[str] = []

    def note(message: Any, packet: Any) -> None:
        found.append(type(message).__name__ + (str(message.check) if hasattr(message, "check") else ""))

    note_what_is_told(mesh, monkeypatch, note)
    return found


def holder(**held: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**held)


class Trainer:
    """As programs have it: the state is in the object whose method the step is."""

    def __init__(self, mesh: Mesh):
        torch.manual_seed(0)
        self.apply, self.params = functional(nn.Linear(4, 1))
        self.opt = optimizer(torch.optim.AdamW, lr=0.1)
        self.opt_state = self.opt.init(self.params)
        self.train_step = spmd(data_parallel(self._step), mesh=mesh)
        self.settings: dict[str, Any] = {"scale": 1.0, "losses": []}

    def loss(self, params: Any, batch: Any) -> torch.Tensor:
        return self.settings["scale"] * self.apply(params, batch["x"]).square().mean()

    def _step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(self.loss)(params, batch)
        return *self.opt.step(params, grads, opt_state), loss

    def fit(self, loader: Any, note: Any) -> None:
        for batch in loader:
            self.params, self.opt_state, loss = self.train_step(self.params, self.opt_state, batch)
            note(self, float(loss))


def test_a_trainer_s_state_does_not_send_its_step_again(mesh, told):
    """Each of its calls was a first call, with all its checks."""
    x = torch.randn(96, 4)
    trainer, found = Trainer(mesh), []
    trainer.fit(Loader({"x": x}, 8, mesh=mesh), lambda _, loss: found.append(loss))
    once = told.count("Ship")
    assert sum(name.startswith("CallProgram3") for name in told) == 2  # plain tensors, then Arrays
    trainer.fit(Loader({"x": x}, 8, mesh=mesh, seed=1), lambda _, loss: found.append(loss))
    assert told.count("Ship") - once <= 1 and found[0] > 2 * found[-1]


@pytest.mark.parametrize("shard", ["auto", None])
def test_a_step_that_takes_all_from_its_trainer(mesh, told, shard):
    """Parameters and state are not even arguments, which opt.step refused; the results are the same."""

    class Wide(Trainer):
        def __init__(self, mesh: Mesh):
            super().__init__(mesh)
            self.apply, self.params = functional(nn.Linear(4, 3000))
            self.opt = optimizer(torch.optim.AdamW, lr=0.1, shard=shard)
            self.opt_state = self.opt.init(self.params)
            self.captures = spmd(data_parallel(self._captures), mesh=mesh)

        def _captures(self, batch: Any) -> Any:
            return self._step(self.params, self.opt_state, batch)

    x, found = torch.randn(64, 4), []
    plain, captures = Wide(mesh), Wide(mesh)
    captures.train_step = lambda params, opt_state, batch: captures.captures(batch)
    captures.params = {name: value.clone() for name, value in plain.params.items()}
    for trainer in (plain, captures):
        told.clear()
        trainer.fit(Loader({"x": x}, 8, mesh=mesh), lambda _, loss: found.append(loss))
    assert found[:8] == found[8:] and sum(name.startswith("CallProgram3") for name in told) <= 3
    for name in plain.params:
        assert torch.equal(plain.params[name].full(), captures.params[name].full())


def test_torch_takes_captured_values_that_are_whole(mesh):
    apply, params = functional(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)))
    held, x = holder(params=put(params, mesh=mesh)), torch.randn(8, 4)
    evaluated = spmd(data_parallel(lambda batch: psum(apply(held.params, batch).square().sum(), "data")), mesh=mesh)
    halved = spmd(lambda: {name: 0.5 * value for name, value in held.params.items()}, mesh=mesh)
    for _ in range(3):
        plain = {name: value.full() for name, value in held.params.items()}
        torch.testing.assert_close(evaluated(x).full(), apply(plain, x).square().sum())
        held.params = halved()
        assert all(torch.equal(held.params[name].full(), 0.5 * plain[name]) for name in plain)
    total = spmd(lambda y: (psum(held.params["1.bias"], "data"), torch.stack([held.params["1.bias"], y])), mesh=mesh)
    assert [one.shape for one in total(torch.ones(3))] == [(3,), (2, 3)]
    held.cut = put(torch.ones(4), P("data"), mesh=mesh)
    with pytest.raises(MeshError, match=r"torch's mul was given an Array that is cut, in a region .*\.local"):
        spmd(lambda y: held.cut * y, mesh=mesh)(torch.ones(()))
    for change in (lambda y: held.params["1.bias"].add_(y), lambda y: torch.add(y, y, out=held.params["1.bias"])):
        with pytest.raises(SpecError, match="would change an Array"):
            spmd(change, mesh=mesh)(torch.ones(3))


def test_other_data_that_change_in_every_call_make_few_first_calls(mesh, told):
    """Also of what changes with each step in a dictionary that it reads, 8 calls are first calls, and then the 16th and
    so on."""
    x = torch.randn(160, 4)
    plain, noting = Trainer(mesh), Trainer(mesh)
    found: list[float] = []
    plain.fit(Loader({"x": x}, 8, mesh=mesh), lambda _, loss: found.append(loss))
    told.clear()
    noting.fit(Loader({"x": x}, 8, mesh=mesh), lambda trainer, loss: trainer.settings["losses"].append(loss))
    assert noting.settings["losses"] == found and len(found) == 20
    assert sum(name.startswith("CallProgram3") for name in told) == 2 + 8 - 1 + 1


def test_values_shapes_specs_and_dtypes_that_change(mesh):
    held = holder(w=None)

    @spmd(mesh=mesh)
    def step(x):
        whole = held.w.full()
        return whole * x, held.w.local.sum() * 0 + 1 if held.w.spec == P() else x

    values = [torch.arange(8.0) + turn for turn in range(4)]
    values += [torch.arange(6.0), torch.arange(6), torch.ones(2, 2), torch.zeros(0), torch.tensor(2.0)]
    for turn, value in enumerate(values):
        for spec in [P(), P("data")] if value.dim() else [P()]:
            held.w = put(value, spec, mesh=mesh)
            found, one = step(torch.tensor(2.0))
            assert torch.equal(found.full(), value * 2.0), (turn, spec)
            assert float(one) == (2.0 if spec.entries else 1.0)


def test_a_result_whose_shape_is_not_known_as_yet(mesh):
    """The driver takes it to be like the last one; the rank, which has it, knows better, unless it has only a part."""
    held = holder(w=None)

    def first(count):
        return torch.arange(8.0)[: int(count.item())]

    first_of, parts_of = spmd(first, mesh=mesh), spmd(first, mesh=mesh, out_specs=P("data"))
    total = spmd(lambda x: held.w.full().sum() + x, mesh=mesh)
    for count in (3, 3, 5, 2):
        held.w = first_of(torch.tensor(count))
        assert float(total(torch.zeros(()))) == sum(range(count))
    for count in (3, 3, 5):
        held.w = parts_of(torch.tensor(count))
        if count == 5:
            with pytest.raises(MeshError, match=r"another shape than the last result .* ask for its \.shape before"):
                float(total(torch.zeros(())))
            assert held.w.shape == (10,)
        assert float(total(torch.zeros(()))) == 2 * sum(range(count))


@pytest.mark.parametrize("deep", [False, True], ids=["long", "deep"])
def test_a_value_that_also_lies_where_changes_are_not_looked_for(mesh, deep):
    """What lies there stays as it is, though the value beside it is exchanged for another."""
    kept = [put(torch.tensor(float(at)), mesh=mesh) for at in range(8 if deep else 300)]
    held = holder(w=kept[7], kept={"a": {"a": {"a": {"a": {"a": kept}}}}} if deep else kept)

    @spmd(mesh=mesh)
    def step(x):
        inside = held.kept
        while isinstance(inside, dict):
            inside = inside["a"]
        return 100 * inside[7].local + held.w.local + x

    found = []
    for value in (None, 1.0, 2.0):
        held.w = held.w if value is None else put(torch.tensor(value), mesh=mesh)
        found.append(float(step(torch.tensor(0.0))))
    assert found == [707.0, 701.0, 702.0]


def test_what_is_found_twice_and_sent_once(mesh):
    """What is sent a second time is sent from where changes are not looked for: values there stay as they are."""
    state = holder(params={"w": put(torch.tensor(1.0), mesh=mesh)})
    trainer = holder(state=state, log=[put(torch.tensor(0.0), mesh=mesh) for _ in range(300)])
    trainer.log[5] = state.params["w"]

    def forward():
        return state.params["w"].local

    def loss():
        return forward()

    def outer():
        return loss()

    @spmd(mesh=mesh)
    def step(x):
        return 100 * trainer.log[5].local + outer() + x

    found = []
    for value in (1.0, 2.0, 3.0):
        if value > 1:
            state.params = {"w": put(torch.tensor(value), mesh=mesh)}
        found.append(float(step(torch.tensor(0.0))))
    assert found == [101.0, 102.0, 103.0]


def test_a_variable_of_several_functions(mesh):
    w = put(torch.tensor(1.0), mesh=mesh)
    log = [w, *(put(torch.tensor(0.0), mesh=mesh) for _ in range(300))]

    def forward():
        return w.local

    @spmd(mesh=mesh)
    def step(x):
        return 100 * log[0].local + forward() + w.local + x

    found = []
    for value in (1.0, 2.0, 3.0):
        w = w if value == 1 else put(torch.tensor(value), mesh=mesh)
        found.append(float(step(torch.tensor(0.0))))
    assert found == [102.0, 104.0, 106.0]


class Changing:
    """An object that does something when it is pickled, as another thread may just then."""

    act = print

    def __getstate__(self) -> dict[str, Any]:
        Changing.act()
        return {}


def test_another_thread_changes_a_value_while_the_step_is_sent(mesh):
    held = holder(first=Changing(), w=put(torch.tensor(1.0), mesh=mesh))
    second = put(torch.tensor(2.0), mesh=mesh)

    def change() -> None:
        held.w, Changing.act = second, print

    Changing.act = change

    @spmd(mesh=mesh)
    def step(x):
        return vars(held)["w"].local + x  # all of it is sent

    found = [float(step(torch.tensor(0.0)))]
    for value in (3.0, 4.0):
        held.w = put(torch.tensor(value), mesh=mesh)
        found.append(float(step(torch.tensor(0.0))))
    assert found == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("where", ["list", "dict", "object"])
def test_values_in_attributes_of_a_module(mesh, where):
    """Of a trainer that is a module, as with other libraries."""
    trainer = nn.Sequential(nn.Linear(1, 1))
    of = trainer if where == "dict" else trainer[0]

    def hold(value: Any) -> None:
        of.state = {"list": [value], "dict": {"w": (value,)}, "object": holder(w=value)}[where]

    @spmd(mesh=mesh)
    def step(x):
        state = of.state
        w = {"list": lambda: state[0], "dict": lambda: state["w"][0], "object": lambda: state.w}[where]()
        return len(trainer) * w.local + x

    found = []
    for turn in range(3):
        hold(put(torch.tensor(float(turn)), mesh=mesh))
        found.append(float(step(torch.tensor(0.0))))
    assert found == [0.0, 1.0, 2.0]


def test_names_for_one_value_may_come_to_mean_several(mesh):
    held = holder()
    held.a = held.b = put(torch.ones(2), mesh=mesh)

    @spmd(mesh=mesh)
    def step(x):
        return x + 10 * held.a.local + held.b.local

    found = [float(step(torch.zeros(2)).full()[0])]
    for name, value in (("b", 2.0), ("a", 3.0), ("b", None)):
        setattr(held, name, held.a if value is None else put(torch.full((2,), value), mesh=mesh))
        found.append(float(step(torch.zeros(2)).full()[0]))
    assert found == [11.0, 12.0, 32.0, 33.0]


def test_calls_in_flight_and_other_threads(mesh):
    def counted(found: list[float]) -> None:
        held = holder(w=put(torch.zeros(2), mesh=mesh))

        @spmd(mesh=mesh)
        def step(x):
            return held.w.local + x

        for _ in range(30):
            held.w = step(torch.ones(2))
        found.append(float(held.w.full()[0]))

    found: list[float] = []
    counted(found)
    threads = [threading.Thread(target=counted, args=(found,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [30.0] * 3


def test_ranks_that_die_and_a_mesh_that_is_resized(mesh):
    """A rank that replaces another gets the step before it has the values, and each call gives them."""
    held = holder(w=put(torch.zeros(12), P("data"), mesh=mesh), all={"a": put(torch.zeros(2), mesh=mesh)})

    @spmd(mesh=mesh, out_specs=(P("data"), P()))
    def step(x):
        return held.w.local + x, held.all["a"].local + x

    for turn in range(12):
        held.w, held.all["a"] = step(torch.ones(()))
        if turn in (3, 7):
            os.kill(mesh.driver.pids[turn % 2], signal.SIGKILL)
        if turn in (5, 9):
            mesh.resize({"data": 3 if turn == 5 else 2})
    assert held.w.full().tolist() == [12.0] * 12 and held.all["a"].full().tolist() == [12.0] * 2


def test_what_was_donated_may_be_referred_to_and_not_read(mesh):
    held = holder(w=put(torch.zeros(1000), mesh=mesh))

    @spmd(mesh=mesh, donate=("w",))
    def step(w):
        return w + len(vars(held))

    @spmd(mesh=mesh)
    def read(x):
        return held.w.local + x

    for _ in range(5):
        held.w = step(held.w)
    old = held.w
    new = step(old)
    assert float(step(new).full()[0]) == 7.0 and float(new.full()[0] if new.donated_to is None else 0) == 0.0
    with pytest.raises(SpecError, match=r"this Array was donated to (step|an earlier call)"):
        read(torch.ones(1000)).full()


def test_a_part_that_the_step_captures_differs_between_ranks(mesh):
    """Though its sum is the same on both."""
    held = holder(w=put(torch.ones(4), P("data"), mesh=mesh))
    with pytest.raises(SpecError, match=r"may differ between ranks along data.* an Array that it captures"):
        spmd(lambda x: held.w.local.sum() + x, mesh=mesh)(torch.ones(()))
    assert float(spmd(lambda x: psum(held.w.local.sum(), "data") + x, mesh=mesh)(torch.ones(()))) == 5.0


def test_an_array_of_another_mesh(mesh, make_mesh):
    held = holder(w=put(torch.ones(4), mesh=mesh))

    @spmd(mesh=mesh)
    def step(x):
        return held.w.local + x

    step(torch.ones(4)).full()
    held.w = put(torch.ones(4), mesh=make_mesh({"data": 1}))
    with pytest.raises(MeshError, match="an Array of another mesh was passed"):
        step(torch.ones(4)).full()
    held.w = put(torch.ones(4), mesh=mesh)
    assert step(torch.ones(4)).full().tolist() == [2.0] * 4


def test_batches_and_parameters_of_an_evaluation(mesh):
    """A `Loader`'s batch is sent with the step that captures it, as it is no value of a known shape."""
    held = holder(batch=None, w=None)

    @spmd(mesh=mesh)
    def over_batch(x):
        return psum(held.batch["x"].local.sum(), "data") + x

    found = []
    for held.batch in Loader({"x": torch.arange(8.0)}, 4, mesh=mesh, shuffle=False):
        found.append(float(over_batch(torch.zeros(()))))
    assert found == [6.0, 22.0]

    @spmd(mesh=mesh)
    @data_parallel
    def evaluated(batch):
        return pmean(batch["x"].mean() * held.w.local, "data")

    for turn in range(4):
        held.w = put(torch.tensor(float(turn)), mesh=mesh)
        assert float(evaluated({"x": torch.ones(4)})) == turn


class Summed:
    """An object that reads its Array while it is unpickled."""

    def __init__(self, array: Any):
        self.array, self.sum = array, 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"array": self.array}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.array, self.sum = state["array"], float(state["array"].local.sum())


def test_values_are_there_when_the_step_is_read(mesh):
    summed = Summed(put(torch.ones(3), mesh=mesh))
    assert float(spmd(lambda x: x + summed.sum, mesh=mesh)(torch.zeros(()))) == 3.0
