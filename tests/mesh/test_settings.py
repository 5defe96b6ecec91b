"""Settings of the program's own modules that it changes; ranks import these for themselves, and don't see it."""

import functools
import importlib

import pytest
import torch

import spmd
from spmd import SpecError

SOURCE = """
import os, torch, types
rate = 0.5
args = types.SimpleNamespace(rate=0.5, inner=types.SimpleNamespace(count=3), process=os.getpid())
names = {"first": 1}
seen, calls, process = {}, 0, os.getpid()
if rate:
    twice = 1.0
twice = 2.0

class Config:
    rate: float = 0.5

    class Inner:
        count = 3

class Options:
    rate = 0.5
    turn = 0

options = Options()

def optional(x):
    options.turn += 1
    return x * options.rate

def scaled(x):
    global calls
    calls += 1
    seen["x"] = calls
    return x * gain + process * 0

gain = 1.0

def configure(new):
    global gain
    gain = new

class Net(torch.nn.Module):
    def forward(self, x):
        return inner(x)

def inner(x):
    return scaled(x)

size = 2

class Images:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(size)

epochs = 3
tallies = {"scaled": 0, "kept": 0}

class Runner:
    made = 0

    def __init__(self):
        type(self).made += 1
        self.name = f"runner {Runner.made}"
        self.rate = Config.rate

    def step(self, x):
        tallies["scaled"] += 1
        tallies.update(kept=1)
        return x * 2

    def fit(self, step, x):
        return [step(x) for _ in range(epochs)]

import config_of_test as this
ready = False

def prepared(x):
    if not this.ready:
        this.ready = True
    return x
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    (tmp_path / "config_of_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("config_of_test")


class Trainer:
    def __init__(self, net):
        self.net = net

    def step(self, x):
        return self.net(x)


def test_a_setting_that_only_the_driver_has_changed_is_refused(shared_mesh, config):
    mesh, x, net = shared_mesh({"data": 2}), torch.ones(2), config.Net()
    Config = config.Config
    apply, params = spmd.functional(net)

    def loss(x):
        return x * config.rate

    def inside(x):
        return torch.stack([config.inner(one) for one in x])

    steps = {
        "rate": [loss, lambda x: loss(x), functools.partial(lambda by, x: x * config.rate, 2)],
        "names": [lambda x: x * config.names["first"]],
        "Config.rate": [lambda x: x * Config.rate, lambda x: x * config.Config.rate],
        "Config.Inner.count": [lambda x: x * Config.Inner.count],
        "args.rate": [lambda x: x * config.args.rate],
        "args.inner.count": [lambda x: x * config.args.inner.count],
        "options.rate": [config.optional, lambda x: config.optional(x) * config.options.rate],
        "gain": [config.scaled, inside, lambda x: net(x), lambda x: apply(params, x), Trainer(net).step],
    }
    values = {"rate": 1.0, "names": {"first": 2}, "Config.rate": 1, "Config.Inner.count": 4, "gain": 3.0}
    values |= {"args.rate": 2.0, "args.inner.count": 1, "options.rate": 2}
    for name, bodies in steps.items():
        owner, last = functools.reduce(getattr, name.split(".")[:-1], config), name.rpartition(".")[2]
        for step in [spmd.spmd(body, mesh=mesh) for body in bodies]:
            before, first = getattr(owner, last), step(x).tolist()
            config.configure(3.0) if last == "gain" else setattr(owner, last, values[name])
            told = rf"^config_of_test\.{name} is not the same .*{last} = config_of"
            for _ in range(2):
                with pytest.raises(SpecError, match=told) as e:
                    step(x).full()
                assert f"got {values[name]!r} in the program, {before!r} on the rank" in str(e.value)
            setattr(owner, last, before)
            assert step(x).tolist() == first


def test_what_a_dataset_reads(shared_mesh, config, monkeypatch):
    monkeypatch.setattr(config, "size", 3)
    with pytest.raises(SpecError, match=r"^config_of_test\.size"):
        next(iter(spmd.Loader(config.Images(), 4, mesh=shared_mesh({"data": 2}))))


def test_what_an_object_on_a_rank_reads(shared_mesh, config, monkeypatch):
    mesh = shared_mesh({"data": 2})
    assert mesh.remote(config.Net)(torch.ones(1)).get() == 1
    monkeypatch.setattr(config, "gain", 3.0)
    for cls in (config.Net, functools.partial(config.Net)):
        with pytest.raises(SpecError, match=r"^config_of_test\.gain"):
            mesh.remote(cls)
    for owner, name in [(config, "epochs"), (config.Config, "rate")]:
        with (
            monkeypatch.context() as changed,
            pytest.raises(SpecError, match=rf"^config_of_test\.\w*\.?{name}"),
        ):
            changed.setattr(owner, name, 5)
            mesh.remote(config.Runner)


def test_what_the_step_does_not_call_and_what_it_counts(shared_mesh, config, monkeypatch):
    """What the rest of a trainer reads, what its objects are counted with, and tables of counters."""
    mesh, x = shared_mesh({"data": 2}), torch.ones(2)
    runner = config.Runner()
    monkeypatch.setattr(config, "epochs", 5)
    runner.step(x)
    assert config.Runner.made == 1 and config.tallies == {"scaled": 1, "kept": 1}
    results = runner.fit(spmd.spmd(runner.step, mesh=mesh), x)
    assert [result.tolist() for result in results] == [[2.0, 2.0]] * 5
    assert spmd.spmd(lambda x: config.Runner().step(x), mesh=mesh)(x).tolist() == [2.0, 2.0]
    with pytest.raises(SpecError, match=r"^config_of_test\.epochs"):
        spmd.spmd(lambda x: sum(runner.fit(lambda x: x, x)), mesh=mesh)(x)


def test_a_tensor_put_into_a_table(shared_mesh, config, monkeypatch):
    """It was compared like a number, after the first call or before."""
    step = spmd.spmd(lambda x: x * config.names["first"], mesh=shared_mesh({"data": 2}))
    for _ in range(2):
        step(torch.ones(2))
        monkeypatch.setitem(config.names, "first", torch.ones(2))


def test_what_may_differ_between_processes(shared_mesh, config):
    """What a module computes, counts, notes and collects; and a setting that was changed on the ranks as well."""
    mesh, x = shared_mesh({"data": 2}), torch.ones(2)
    config.prepared(config.scaled(config.optional(x)))
    assert config.ready and spmd.spmd(lambda x: config.prepared(x) * config.ready, mesh=mesh)(x).tolist() == [1, 1]
    config.twice = 3.0
    assert config.options.turn == 1 and spmd.spmd(lambda x: config.optional(x), mesh=mesh)(x).tolist() == [0.5, 0.5]
    step = spmd.spmd(lambda x: config.scaled(x) * config.twice + len(config.seen) * config.calls * 0, mesh=mesh)
    assert config.calls == 1 and config.seen and step(x).tolist() == [2.0, 2.0]  # it is assigned twice

    def double(rate):
        config.rate = rate

    config.rate = 2.0
    mesh.run(double, 2.0)
    try:
        assert spmd.spmd(lambda x: x * config.rate, mesh=mesh)(x).tolist() == [2.0, 2.0]
    finally:
        mesh.run(double, 0.5)
