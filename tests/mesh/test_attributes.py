"""A step is sent with what it reads of an object: what else changes there sends nothing, and what it reads is seen."""

from __future__ import annotations

import collections
import dataclasses
import threading
import types
from typing import Any

import pytest
import torch
from internals import note_what_is_told
from torch import nn

from spmd import Mesh, MeshError, data_parallel, functional, optimizer, spmd, value_and_grad


@pytest.fixture
def mesh(shared_mesh) -> Mesh:
    return shared_mesh({"data": 2})


@pytest.fixture
def sent(mesh, monkeypatch) -> list[str]:
    """What is sent besides calls that are as others before them."""
    found: list[str] = []

    def note(message: Any, packet: Any) -> None:
        kind = type(message).__name__
        if kind == "Ship" or (kind == "CallProgram" and message.check == 3):
            found.append(kind)

    note_what_is_told(mesh, monkeypatch, note)
    return found


class Meter:
    total, count = 0.0, 0

    def add(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


class Trainer:
    """As programs have it, with all that they note."""

    def __init__(self, mesh: Mesh, how: str):
        torch.manual_seed(0)
        self.apply, self.params = functional(nn.Linear(4, 1))
        self.opt = optimizer(torch.optim.SGD, lr=0.1)
        self.opt_state, self.best, self.turn, self.scale = self.opt.init(self.params), 1e9, 0, 1.0
        self.losses, self.last = [], collections.deque(maxlen=2)
        self.by_name, self.noted, self.meter = collections.defaultdict(list), [], Meter()
        self.mean: Any = None
        self.lock, self.kept = threading.Lock(), torch.zeros(100)  # the lock can't be pickled

        def nested(params, opt_state, batch):
            loss, grads = value_and_grad(lambda params, batch: self.loss(params, batch))(params, batch)
            return *self.opt.step(params, grads, opt_state), loss

        ways = {
            "method": self.step,
            "lambda": lambda params, opt_state, batch: self.step(params, opt_state, batch),
            "nested": nested,
        }
        self.train_step = spmd(data_parallel(ways[how]), mesh=mesh)

    @property
    def factor(self) -> float:
        return 2.0 * self.scale

    def loss(self, params: Any, batch: Any) -> torch.Tensor:
        return self.factor * self.apply(params, batch["x"]).square().mean()

    def step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(self.loss)(params, batch)
        return *self.opt.step(params, grads, opt_state), loss

    def note(self, loss: Any) -> None:
        self.turn += 1
        self.losses.append(loss)
        self.last.append(loss)
        self.noted.append({"loss": loss, "turn": self.turn})
        self.mean = loss if self.mean is None else 0.9 * self.mean + 0.1 * loss
        with self.lock:
            self.by_name["loss"].append(float(loss))
        self.best = min(self.best, float(loss))
        self.meter.add(float(loss))
        self.kept[self.turn] = float(loss)

    def fit(self, x: torch.Tensor, turns: int) -> None:
        for _ in range(turns):
            self.params, self.opt_state, loss = self.train_step(self.params, self.opt_state, {"x": x})
            self.note(loss)


@pytest.mark.parametrize("how", ["method", "lambda", "nested"])
def test_what_a_trainer_notes_does_not_send_its_step_again(mesh, sent, how):
    """Each call sent the step anew, and many were first calls; a lock in the trainer was refused."""
    trainer, x = Trainer(mesh, how), torch.randn(8, 4)
    trainer.fit(x, 3)
    sent.clear()
    trainer.fit(x, 6)
    assert not sent and len({float(loss) for loss in trainer.losses}) == 9
    before = trainer.losses[-1].item()
    trainer.scale, params = 100.0, trainer.params
    trainer.fit(x, 1)
    expected = trainer.loss({name: value.full() for name, value in params.items()}, {"x": x})
    assert trainer.losses[-1].item() == pytest.approx(expected.item()) and expected > 50 * before
    assert "Ship" in sent


@dataclasses.dataclass
class Settings:
    rate: float = 0.5
    turn: int = 0


@pytest.mark.parametrize("make", [types.SimpleNamespace, Settings])
def test_settings_that_count_turns_beside_what_is_read(mesh, sent, make):
    settings, x = make(rate=0.5, turn=0), torch.ones(2)
    step = spmd(lambda x: settings.rate * x, mesh=mesh)
    for settings.turn in range(6):
        if settings.turn == 2:
            sent.clear()
        step(x)
    assert not sent
    for settings.rate in (0.25, 4.0):
        assert step(x).full().tolist() == [settings.rate] * 2


class Base:
    scale = 2.0

    def __init__(self) -> None:
        self.w, self.shift, self.call = 3.0, {"by": 1.0}, self.times
        self.lock = threading.Lock()

    def times(self, x):
        return self.w * x

    @staticmethod
    def doubled(x):
        return 2 * x

    def again(self, x, turns=2):
        return self.times(x) if not turns else self.again(x, turns - 1)


class Model(Base):
    def step(self, x):
        return self.doubled(self.again(self.call(x)) + sum(self.scale for _ in range(2))) + self.shift["by"]


def other_times(self, x):
    return self.v * x


def change_instance_default(model):
    model.scale = 7.0


def change_class(model):
    type(model).scale = 8.0


def change_method(model):
    type(model).times, model.v = other_times, 9.0


def change_code(model):
    type(model).times.__code__, model.v = other_times.__code__, 9.0


def change_method_of_one(model):
    model.again = lambda x: 5 * x + model.w


def change_deep(model):
    model.shift["by"] = 10.0


def change_value(model):
    model.w = torch.tensor(11.0)


def change_class_of(model):
    class Other(Model):
        scale = 12.0

    model.__class__ = Other


def change_class_to_ask(model):
    """Nothing that was found before is another one."""

    class Other(type(model)):
        @property
        def w(self):
            return 13.0

    model.__class__ = Other


CHANGES = [value for name, value in list(globals().items()) if name.startswith("change_")]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_read_is_seen_when_it_changes(mesh, change):
    namespace = types.FunctionType(Base.times.__code__, globals(), "times")
    cls = type("Made", (Model,), {"times": namespace, "scale": 2.0})
    model, x = cls(), torch.arange(2.0)
    step = spmd(model.step, mesh=mesh)
    assert torch.equal(step(x).full(), model.step(x))
    before = model.step(x)
    change(model)
    assert torch.equal(step(x).full(), model.step(x)) and not torch.equal(model.step(x), before)


def read_of(obj: Any, text: str = "") -> float:
    return obj.hidden


class Passing:
    """Its methods read `hidden` in ways that the names after `self` do not show."""

    def __init__(self) -> None:
        self.hidden, self.other = 1.0, 0.0

    def passed(self, x):
        return x + read_of(self)

    def passed_before_a_text(self, x):
        return x + read_of(self, "".join(["a", "b"]))

    def asked(self, x):
        return x + getattr(self, "hid" + "den")

    def listed(self, x):
        return x + vars(self)["hidden"]

    def in_dict(self, x):
        return x + self.__dict__["hidden"]

    def renamed(self, x):
        it = self
        return x + it.hidden

    def chosen(self, x):
        return x + (self if x.dim() else x).hidden

    def local(self, x):
        return x + locals()["self"].hidden

    def local_by_vars(self, x):
        return x + vars()["self"].hidden

    def called(self, x):
        return self(x)

    def __call__(self, x):
        return x + self.hidden

    def in_class(self, x):
        class Inner:
            value = self.hidden

        return x + Inner.value

    def by_name(self, x):
        return x + Passing.read(self)

    def read(self):
        return self.hidden

    def set_first(self, x):
        self.stash = self.hidden
        return x + self.stash


class Inheriting(Passing):
    def inherited(self, x):
        return super().passed(x)


class Asking:
    """Finds attributes in a way of its own."""

    def __init__(self) -> None:
        self.values = {"hidden": 1.0}

    def __getattr__(self, name):
        if name in self.__dict__.get("values", ()):
            return self.values[name]
        raise AttributeError(name)

    def step(self, x):
        return x + self.hidden


WAYS = [name for name, value in vars(Passing).items() if isinstance(value, types.FunctionType) and name[0] != "_"]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "read"] + ["inherited", "asking"])
def test_objects_of_which_more_may_be_read_are_whole(mesh, way):
    obj: Any = Asking() if way == "asking" else Inheriting()
    values = obj.values if way == "asking" else vars(obj)
    step = spmd(obj.step if way == "asking" else getattr(obj, way), mesh=mesh)
    for value in (1.0, 2.0, 3.0):
        values["hidden"] = value
        assert step(torch.zeros(2)).full().tolist() == [value] * 2


class Depth:
    """Sets an attribute of another object for a while."""

    def __init__(self, owner: Any):
        self.owner = owner

    def __enter__(self):
        self.owner.depth = 3.0

    def __exit__(self, *_):
        self.owner.depth = 0.0


class Deep:
    def __init__(self) -> None:
        self.deeper, self.depth = Depth(self), 0.0

    def step(self, x):
        with self.deeper:
            return x * self.depth


class Counted:
    turns = 0

    def step(self, x):
        Counted.turns += 1
        try:
            return 3 * x * self.turns
        finally:
            Counted.turns -= 1


def noting_in_a_hook():
    noted, model = types.SimpleNamespace(), nn.Identity()

    def hook(module, inputs, output):
        noted.output = output

    model.register_forward_hook(hook)

    def step(x):
        model(3.0 * x)
        return noted.output

    return step


MAKE = {"context": lambda: Deep().step, "class": lambda: Counted().step, "hook": noting_in_a_hook}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_what_something_else_in_a_step_sets(mesh, make):
    """The step had a part of the object, while what it calls set the whole one's attributes."""
    step = spmd(make(), mesh=mesh)
    for value in (1.0, 2.0):
        assert step(torch.full((2,), value)).full().tolist() == [3 * value] * 2


def test_what_other_methods_refer_to(mesh, sent):
    """A class that travels by value took all of its methods along."""
    lock, history = threading.Lock(), []

    class Noting:
        def __init__(self):
            self.w = 2.0

        def step(self, x):
            return self.w * x

        def note(self, value):
            with lock:
                history.append(value)

    noting = Noting()
    step = spmd(noting.step, mesh=mesh)
    for turn in range(6):
        if turn == 2:
            sent.clear()
        noting.note(step(torch.ones(2)))
    assert not sent and history[-1].full().tolist() == [2.0, 2.0]


class Imported:
    """Has on the ranks what their module has, as it always did."""

    lock, seen = threading.Lock(), list[int]()

    def __init__(self) -> None:
        self.turn, self.w = 0, 2.0

    @classmethod
    def twice(cls, x):
        return x * len([cls, cls])

    def step(self, x):
        with self.lock:
            return self.twice(x) * self.w + len(self.seen)


def test_a_class_that_the_ranks_import(mesh, sent):
    imported = Imported()
    step = spmd(imported.step, mesh=mesh)
    for turn in range(6):
        if turn == 2:
            sent.clear()
        imported.turn += 1
        Imported.seen.append(turn)
        assert step(torch.ones(2)).full().tolist() == [4.0, 4.0]
    assert not sent


def test_a_part_is_not_closed_as_the_whole_is(mesh):
    """The ranks' objects are none of the program's class, whose `__del__` would find attributes missing."""

    class Closing:
        def __init__(self):
            self.w, self.file = 2.0, threading.Lock()

        def __del__(self):
            self.file.release()

        def step(self, x):
            return self.w * x

    closing = Closing()
    closing.file.acquire()
    assert spmd(closing.step, mesh=mesh)(torch.ones(1)).item() == 2.0


def test_what_cannot_be_sent_is_named_if_it_is_read(mesh):
    class Locked:
        def __init__(self):
            self.unused, self.used = threading.Lock(), types.SimpleNamespace(lock=threading.Lock())

        def step(self, batch):
            return batch if self.used.lock.locked() else 2 * batch

    locked = Locked()
    for function in (locked.step, data_parallel(lambda batch: locked.step(batch)), data_parallel(locked.step)):
        with pytest.raises(MeshError, match=r"cannot be sent to the ranks, because .*lock") as caught:
            spmd(function, mesh=mesh)(torch.ones(2))
        assert "unused" not in str(caught.value)
