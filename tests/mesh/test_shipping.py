"""Functions on their way to the ranks: sent once, again when what they refer to has changed, forgotten when unused."""

from __future__ import annotations

import array
import asyncio
import collections
import ctypes
import dataclasses
import decimal
import enum
import functools
import gc
import linecache
import logging
import os
import sys
import threading
import types
import weakref
from typing import Any

import numpy as np
import optree
import pytest
import torch
from internals import note_what_is_told
from scripts import run, script
from torch import nn

from spmd import Mesh, MeshError, SpmdError, functional, functional_with_buffers, optimizer, put, spmd
from spmd.mesh.driver import snapshot as shipping
from spmd.mesh.driver.snapshot import Snapshot
from spmd.mesh.pickling import references
from spmd.mesh.pickling.beside import typed_sources
from spmd.mesh.pickling.unpicklable import unpicklable_part

RATE = 1.0
NESTED = {"inner": {"rate": 1.0}}
LIST = [1, 2]


def changed(function, change) -> bool:
    """Whether a snapshot notices what `change()` does; nothing changing must not look like a change."""
    before = Snapshot(function)
    assert before.arrays(function) is not None
    change()
    return before.arrays(function) is None


class Empty:
    """An object without attributes as yet."""


class Phase(enum.Enum):
    TRAIN = "train"
    TEST = "test"


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Rate:
    now: float


class Settings:
    def __init__(self):
        self.rate, self.table = 1.0, {"a": {"b": [1, 2]}}

    def step(self, x):
        return x * self.rate


def test_rebinding_a_global(monkeypatch):
    # A function of a module is sent by name; one made here by value, with the globals it names.
    function = lambda x: x * RATE  # noqa: E731
    assert changed(function, lambda: monkeypatch.setitem(globals(), "RATE", 2.0))
    assert not changed(function, lambda: monkeypatch.setitem(globals(), "RATE", 2.0))
    nested = lambda x: (lambda y: y * RATE)(x)  # noqa: E731
    assert changed(nested, lambda: monkeypatch.setitem(globals(), "RATE", 3.0))
    assert not changed(lambda x: x, lambda: monkeypatch.setitem(globals(), "RATE", 4.0))


def test_globals_some_levels_deep(monkeypatch):
    function = lambda: (NESTED, LIST)  # noqa: E731
    assert changed(function, lambda: monkeypatch.setitem(NESTED["inner"], "rate", 2.0))
    assert changed(function, lambda: monkeypatch.setitem(NESTED, "other", 1))
    assert changed(function, lambda: monkeypatch.setattr(f"{__name__}.LIST", [1, 3]))
    assert not changed(function, lambda: monkeypatch.setattr(f"{__name__}.LIST", [1, 3]))


def test_closures_and_defaults():
    cell, items = 1, [1]

    def function(x, k=2, *, scale=3):
        return x * cell * k * scale + len(items)

    def rebind():
        nonlocal cell
        cell = 5

    assert changed(function, rebind)
    assert changed(function, lambda: items.append(2))
    assert changed(function, lambda: setattr(function, "__defaults__", (9,)))
    assert changed(function, lambda: function.__kwdefaults__.update(scale=8))
    assert changed(function, lambda: setattr(function, "rates", [1.0]))
    assert changed(function, lambda: function.rates.append(2.0))
    same_but_code = function.__code__.replace(co_firstlineno=1)
    assert changed(function, lambda: setattr(function, "__code__", same_but_code))


class Slotted:
    __slots__ = ("empty", "rate")

    def __init__(self):
        self.rate = 1.0


class SlottedBelow(Slotted):
    __slots__ = ("__weakref__", "momentum")


@pytest.mark.parametrize("kind", [Slotted, SlottedBelow])
def test_attributes_in_slots(kind):
    settings = kind()

    def step(x):
        return settings.rate * x

    assert changed(step, lambda: setattr(settings, "rate", 2.0))
    assert changed(step, lambda: setattr(settings, "rate", 3.0))
    assert changed(step, lambda: setattr(settings, "empty", 0))


class Price(decimal.Decimal):
    __slots__ = ("unit",)


def test_other_objects_in_slots():
    """One of a class derived from a built-in one has a value besides them."""
    one, other = Price(1), Price(2)
    one.unit = other.unit = "EUR"
    settings, price = Slotted(), one

    def step(x):
        return settings.rate * float(price) * x

    def exchange():
        nonlocal price
        price = other

    def move():
        nonlocal settings
        settings = Slotted()
        settings.empty = settings.rate
        del settings.rate

    assert changed(step, exchange)
    assert changed(step, move)


def test_deques():
    last = collections.deque([1, 2])

    def step(x):
        return sum(last) * x

    assert changed(step, lambda: last.append(3))
    assert changed(step, lambda: last.__setitem__(0, 4))


def test_what_objects_that_python_has_itself_refer_to():
    one, rate, table = Empty(), 1, {"a": 1}
    some, of, made = frozenset([one]), table.get, collections.defaultdict(lambda: rate)
    shown, module, looped = types.MappingProxyType(table), types.ModuleType("of_no_file"), [1]
    looped.append(looped)

    def use_another_rate():
        nonlocal rate
        rate = 2

    assert changed(lambda x: [each.rate for each in some], lambda: setattr(one, "rate", 2))
    assert changed(lambda x: x * of("a"), lambda: table.update(a=2))
    assert changed(lambda x: x * shown["a"], lambda: table.update(a=3))
    assert changed(lambda x: x * module.rate, lambda: setattr(module, "rate", 2))
    assert changed(lambda x: x * looped[1][0], lambda: looped.__setitem__(0, 2))
    assert changed(lambda x: x * made["a"], use_another_rate)
    assert changed(lambda x: x * made["a"], lambda: setattr(made, "default_factory", int))


@pytest.mark.parametrize("base", [enum.IntEnum, float])
def test_classes_of_the_main_script_derived_from_numbers(base):
    notebook = {"__name__": "__main__", "base": base, "table": [1]}
    exec("class Number(base):\n    ONE = 1\n    def scale(self): return table[0]", notebook)
    number = notebook["Number"](1)
    assert changed(lambda x: x * number.scale(), lambda: notebook["table"].append(2))


@pytest.mark.parametrize("kind", [bytearray, functools.partial(array.array, "B")])
def test_arrays_of_python(kind):
    lookup = kind([1, 2, 3])

    def step(x):
        return x * lookup[1]

    assert changed(step, lambda: lookup.__setitem__(1, 5))
    assert changed(step, lambda: lookup.append(4))
    assert not changed(step, lambda: lookup.__setitem__(1, 5))


def test_helpers_are_followed():
    factor = 1

    def helper():
        return factor

    def function():
        return helper()

    def rebind():
        nonlocal factor
        factor = 2

    assert changed(function, rebind)
    assert changed(functools.partial(function, 1), rebind) is False
    partial = functools.partial(lambda a, b: a, [1], b=2)
    assert changed(partial, lambda: partial.args[0].append(3)) and changed(
        partial, lambda: partial.keywords.update(b=4)
    )
    assert changed(partial, lambda: setattr(partial, "rate", 2.0))
    settings = Settings()
    assert changed(settings.step, lambda: setattr(settings, "rate", 3.0))
    assert changed(settings.step, lambda: settings.table["a"]["b"].append(3))


def test_what_the_parts_of_a_module_have_besides_tensors():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Dropout(0.5)))
    function, dropout = lambda x: net(x), net[1][0]
    assert changed(function, lambda: setattr(dropout, "p", 0.1))
    assert changed(function, lambda: setattr(dropout, "name", "of the last"))
    assert changed(function, lambda: setattr(dropout, "name", "of no other"))
    assert changed(function, lambda: delattr(dropout, "name"))
    assert not changed(function, lambda: setattr(dropout, "p", 0.1))
    for value in (None, torch.ones(2), np.ones(2)):
        dropout.p = 0.5
        assert changed(function, lambda value=value: setattr(dropout, "p", value))
    later = [
        (np.float32(1), np.float32(2)),
        (np.int64(1), np.int64(2)),
        ((1, (2, "a")), (1, (2, "b"))),
        ((1, 2), (1, torch.ones(2))),
    ]
    for value, other in later:
        dropout.p = value
        assert not changed(function, lambda: setattr(dropout, "p", dropout.p))
        assert changed(function, lambda other=other: setattr(dropout, "p", other))
    record = types.SimpleNamespace(rate=1.0)
    held = {
        "append": [1, 2],
        "update": {"rate": 1.0},
        "add": {1},
        "add_": torch.ones(2),
        "fill": np.ones(2),
        "__setattr__": record,
    }
    given = {"update": {"rate": 2.0}, "add": 2, "__setattr__": ("rate", 2.0)}
    for name, value in held.items():
        dropout.p = value
        args = given.get(name, 3)
        assert changed(function, lambda v=value, n=name, a=args: getattr(v, n)(*(a if type(a) is tuple else (a,))))
        assert changed(function, lambda: setattr(dropout, "p", None))
    empty = {"append": [], "update": {}, "add": set(), "appendleft": collections.deque(), "__setattr__": Empty()}
    for name, value in empty.items():
        dropout.p = value
        args = given.get(name, 3)
        assert changed(function, lambda v=value, n=name, a=args: getattr(v, n)(*(a if type(a) is tuple else (a,))))
    for value in (Phase.TEST, torch.float32):
        dropout.p = Phase.TRAIN
        assert changed(function, lambda value=value: setattr(dropout, "p", value))
    settings = {"phase": Phase.TRAIN, "rates": collections.OrderedDict(a={"b": [1]}), "now": 1.0}
    for dropout.p in (settings, types.SimpleNamespace(**settings), [settings], (settings,)):
        assert not changed(function, lambda: None)
        assert changed(function, lambda: settings["rates"]["a"]["b"].append(2))
    nested = types.SimpleNamespace(inner=types.SimpleNamespace(rate=1.0, history=[]), hooks=[threading.Lock()])
    for name, value in {"p": nested, "history": [], "rates": {}, "layers": [types.SimpleNamespace(net=net)]}.items():
        setattr(dropout, name, value)
    assert not changed(function, lambda: None)
    assert changed(function, lambda: setattr(nested.inner, "rate", 2.0))
    assert changed(function, lambda: nested.inner.history.append(1))
    assert changed(function, lambda: dropout.history.append(1))
    assert changed(function, lambda: dropout.rates.update(a=1))
    assert changed(function, lambda: setattr(dropout.layers[0], "net", None))
    assert changed(function, lambda: setattr(dropout, "layers", [*dropout.layers, nested]))
    for name in ("history", "rates", "layers"):
        delattr(dropout, name)
    dropout.noise = torch.Generator()
    assert changed(function, lambda: dropout.noise.manual_seed(5))
    lonely = torch.nn.Identity()
    lonely.rate = float("nan")
    assert not changed(lambda x: lonely(x), lambda: None)
    assert changed(lambda x: lonely(x), lambda: setattr(lonely, "rate", 2.0))
    assert changed(function, lambda: net[1].__setitem__(0, torch.nn.Dropout(0.1)))
    for inside in ([torch.ones(2)], {"bank": [np.ones(2)]}, types.SimpleNamespace(mean=torch.ones(2))):
        net[0].state = inside
        (held,) = optree.tree_leaves(inside if isinstance(inside, list | dict) else inside.mean)
        assert not changed(function, lambda: None)
        assert changed(function, lambda held=held: held.__imul__(2))


def test_functions_among_the_attributes_of_a_module():
    net, gain = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Identity())), 1.0

    def rebind():
        nonlocal gain
        gain += 1

    function, inner = lambda x: net(x), net[0][0]
    scaled, teacher = lambda x: gain * x, torch.nn.Linear(2, 2)
    inner.act, inner.bound = torch.relu, types.MethodType(scaled, inner)
    inner.table, inner.hidden, inner.lock = {"scaled": scaled}, [teacher], threading.Lock()
    assert not changed(function, lambda: None)
    assert changed(function, lambda: setattr(inner, "act", torch.tanh))
    assert changed(function, rebind)
    assert changed(function, lambda: inner.table.update(scaled=torch.tanh))
    assert changed(function, lambda: setattr(inner, "act", scaled))
    assert changed(function, lambda: setattr(inner, "bound", types.MethodType(torch.tanh, inner)))
    assert changed(function, rebind)  # which `act` still uses
    assert changed(function, lambda: teacher.weight.data.mul_(2))
    assert changed(function, lambda: setattr(inner, "lock", threading.Lock()))  # it is not looked into
    assert not changed(function, lambda: None)


def test_hooks_of_a_module_and_of_its_parts():
    net, gain = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Identity())), 1.0

    def rebind():
        nonlocal gain
        gain += 1

    handles = []
    ways = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")
    for one in (net, net[0][0]):
        for way in ways:
            assert changed(
                lambda: net, lambda o=one, w=way: handles.append(getattr(o, w)(lambda *args: args[-1] * gain))
            )
            assert changed(lambda: net, rebind)
    assert not changed(lambda: net, lambda: None)
    for handle in handles:
        assert changed(lambda: net, handle.remove)
    assert not changed(lambda: net, lambda: None)


def test_what_the_methods_of_a_module_s_parts_refer_to():
    gain = 1.0

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return gain * x

    def rebind():
        nonlocal gain
        gain = 2.0

    net = torch.nn.Sequential(torch.nn.Sequential(Scaled()))
    assert not changed(lambda x: net(x), rebind)  # of a class that is imported there
    Scaled.__module__, gain = "__main__", 1.0
    assert changed(lambda x: net(x), rebind)


def test_a_function_may_refer_to_itself():
    def countdown(n):
        return n and countdown(n - 1)

    even = lambda n: n == 0 or odd(n - 1)  # noqa: E731
    odd = lambda n: n != 0 and even(n - 1)  # noqa: E731
    for function in (countdown, even):
        assert not changed(function, lambda: None)


def test_tensors_and_modules_in_place():
    tensor, module = torch.zeros(3), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with torch.no_grad():
        assert changed(lambda: tensor, lambda: tensor.add_(1))
        assert changed(lambda: {"t": [tensor]}["t"], lambda: tensor.zero_())
        assert changed(lambda: module, lambda: module[0].weight.mul_(2))
        assert changed(lambda: module, lambda: module[1].running_mean.add_(1))
    assert changed(lambda: module, lambda: module.eval())
    assert changed(lambda: module, lambda: module[1].train())
    assert changed(lambda: module, lambda: setattr(module[0], "bias", None))
    assert changed(lambda: module, lambda: module.double())  # neither counts as a change to torch
    assert changed(lambda: tensor, lambda: setattr(tensor, "data", torch.ones(3)))
    assert changed(lambda: module, lambda: module[0].weight.data.mul_(0.9))
    assert changed(lambda: module, lambda: module[0].weight.requires_grad_(False))
    assert changed(lambda: tensor, lambda: tensor.requires_grad_())
    tensor = torch.zeros(3)
    assert changed(lambda: tensor, lambda: tensor.numpy().fill(4.0))
    for one in (torch.zeros(1), torch.zeros(3, dtype=torch.bool), torch.zeros((), dtype=torch.bfloat16)):
        assert changed(lambda one=one: one, lambda one=one: one.data[..., None].fill_(1))  # of few bytes
    long = torch.zeros(9)
    for one in (long, torch.zeros(3, 4).t(), torch.zeros(8, 8)[::2, 1:4], torch.zeros(1).expand(9)):
        assert changed(lambda one=one: one, lambda one=one: one.data.view_as(one)[-1].add_(1))
    assert not changed(lambda: long, lambda: long.data[4:5].add_(1))  # the documented limit
    others = torch.zeros(0), torch.zeros((), dtype=torch.bool), long.to_sparse(), torch.empty(3, device="meta")
    assert not changed(lambda: others, lambda: None)
    assert not changed(lambda: (tensor, module), lambda: None)


def test_arrays_in_place():
    small, large, larger = np.zeros(3), np.zeros(1 << 20), np.zeros(1 << 22)

    def change(array):
        array[0] += 1

    assert changed(lambda: small, lambda: change(small))
    square = large.reshape(1024, 1024)
    for one in (large, larger, larger[::2], square.T, square, np.zeros(1 << 20, dtype="M8[D]"), large[:-5]):
        assert changed(lambda one=one: one, lambda one=one: change(one))
        assert changed(lambda one=one: one, lambda one=one: change(one[-1:]))
        if one.nbytes <= 1 << 24 and one.flags.forc:
            assert changed(lambda one=one: one, lambda one=one: change(one[2:3]))
        else:
            assert not changed(lambda one=one: one, lambda one=one: change(one[2:3]))  # the documented limit
    ordered, buffer = np.arange(1 << 17), bytearray(1 << 20)
    assert changed(lambda: ordered, lambda: np.random.shuffle(ordered))
    assert changed(lambda: ordered, lambda: ordered.__setitem__([0, 512], ordered[[512, 0]]))
    assert changed(lambda: buffer, lambda: buffer.__setitem__(12345, 1))
    assert changed(lambda: buffer, lambda: buffer.append(1))
    texts = np.array(["x" * 2000] * 20)  # large, and of few values
    assert changed(lambda: texts, lambda: texts.__setitem__(7, "y"))
    mixed = np.array([1, [2]], dtype=object)
    assert changed(lambda: mixed, lambda: mixed.__setitem__(0, 3))
    assert changed(lambda: mixed, lambda: mixed[1].append(3))


def test_how_deep_and_how_far_it_looks():
    inner: dict[str, Any] = {"number": 0, "object": types.SimpleNamespace(rate=1)}
    deep: dict[str, Any] = inner
    for level in range(references.DEPTH - 1):
        deep = {str(level): deep}
    assert changed(lambda: deep, lambda: inner.update(number=1))
    further = {"0": deep}
    assert not changed(lambda: further, lambda: inner.update(number=2))  # the documented limit
    long = [types.SimpleNamespace(rate=1) for _ in range(references.LOOKED_INTO + 1)]
    assert not changed(lambda: long, lambda: setattr(long[0], "rate", 2))
    wide = [[list(range(200)) for _ in range(200)] for _ in range(200)]
    assert Snapshot(lambda: wide).size < 3 * shipping._LOOKED_AT


def test_loggers_are_not_looked_into():
    """Each leads to all others, and goes by its name."""
    for number in range(50):
        logging.getLogger(f"{__name__}.{number}")
    logger = logging.getLogger(__name__)
    assert Snapshot(lambda: logger).size < 10
    assert changed(lambda: logger, lambda: None) is False


def test_handles_are_not_looked_into(shared_mesh):
    """They lead to all that the library does, which changes with every call: the function was sent each time."""
    holder = shared_mesh({"data": 2}).remote(list, [1], rank=1)
    assert Snapshot(lambda: holder).size < 20
    assert not changed(lambda: holder, lambda: holder.append(2).get())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_made_functional_is_its_skeleton(compiled):
    """A call of it in the driver, as to see a shape, leaves traces in it, and the step was sent again."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if compiled:
        module.compile(backend="eager")
    apply, params, buffers = functional_with_buffers(module)
    size = Snapshot(lambda: apply).size
    assert not changed(lambda: apply, lambda: apply(params, buffers, torch.ones(3, 2)))
    assert Snapshot(lambda: apply).size == size
    assert changed(lambda: apply, lambda: setattr(apply.skeleton[0], "bias", None))


def test_objects_that_hide_their_attributes():
    async def nothing():
        pass

    loop = asyncio.new_event_loop()
    task = loop.create_task(nothing())
    assert not changed(lambda: [task], lambda: None)
    loop.run_until_complete(task)
    loop.close()


def test_data_alone_is_seen_at_any_depth():
    """And in longer containers, which keep their length."""
    deep = {"1": {"2": {"3": {"4": {"5": [0, {"6": "a"}]}}}}}
    assert changed(lambda: deep, lambda: deep["1"]["2"]["3"]["4"]["5"][1].update({"6": "b"}))
    many = references.LOOKED_INTO + 1
    long, table, members = [0.5] * many, dict.fromkeys(range(many), 0.5), set(range(many))
    assert changed(lambda: long, lambda: long.insert(0, long.pop() + 1))
    assert changed(lambda: table, lambda: table.update({many - 1: 1.0}))
    assert changed(lambda: members, lambda: (members.remove(0), members.add(-1)))
    long[0] = np.float64(3)
    assert changed(lambda: long, lambda: long.insert(0, np.float64(long.pop(0) + 1)))
    assert not changed(lambda: (deep, long, table, members), lambda: None)
    average, bank = torch.ones(2), np.ones(2)
    long[0], table[0], deep["1"]["2"]["3"]["4"]["5"][0] = average, [bank], {"average": average, "bank": bank}
    for captured in (long, deep):
        assert changed(lambda captured=captured: captured, lambda: average.mul_(2))
    for captured in (table, deep):
        assert changed(lambda captured=captured: captured, lambda: bank.fill(bank[0] + 1))
    assert changed(lambda: long, lambda: long.__setitem__(0, average.clone()))
    assert not changed(lambda: (deep, long, table, members), lambda: None)
    longest = [0.5] * (shipping._LOOKED_AT + 1)
    assert changed(lambda: longest, lambda: longest.append(0.5))
    assert changed(lambda: longest, lambda: longest.insert(0, longest.pop() + 1))
    assert not changed(lambda: longest, lambda: longest.__setitem__(1, 2.0))  # the documented limit
    widest, most = dict.fromkeys(longest := range(len(longest))), set(longest)
    assert changed(lambda: (widest, most), lambda: widest.update({longest[-1]: 1}))
    assert changed(lambda: (widest, most), lambda: most.add(-1))
    long, rate, ordered = [0.5] * many, Rate(0.1), collections.OrderedDict(a=[1])
    for other in (Phase.TRAIN, Number.ONE, torch.float32, ordered, rate, (1, frozenset({2}))):
        deep["1"]["2"]["3"]["4"]["kind"] = other
        long[0] = other
        assert not changed(lambda: (deep, long), lambda: None)
        assert changed(lambda: deep, lambda: deep["1"]["2"]["3"]["4"]["5"].append(1))
        assert changed(lambda: deep, lambda: deep["1"]["2"]["3"]["4"].update(kind=2))
        assert changed(lambda: long, lambda: long.insert(1, long.pop() + 1))
    deep["1"]["2"]["3"]["4"]["kind"] = [ordered, rate, Phase.TRAIN]
    assert changed(lambda: deep, lambda: ordered["a"].append(2))
    assert changed(lambda: deep, lambda: setattr(rate, "now", 0.2))
    assert changed(lambda: deep, lambda: deep["1"]["2"]["3"]["4"]["kind"].__setitem__(2, Phase.TEST))


def test_numbers_that_are_not_equal_to_themselves():
    nan = float("nan")
    assert not changed(lambda: nan, lambda: None)
    held = {"best": nan}
    assert not changed(lambda: held, lambda: held.update(best=float("nan")))


def test_zeros_have_a_sign():
    zero, held = 0.0, {"slope": 0.0}

    def change():
        nonlocal zero
        zero = -0.0

    assert changed(lambda: zero, change)
    assert changed(lambda: held, lambda: held.update(slope=-0.0))
    assert not changed(lambda: (zero, held), change)


def test_attributes_that_exchange_their_names():
    settings = types.SimpleNamespace(rate=1.0, decay=2.0)

    def change():
        vars(settings).clear()
        vars(settings).update(decay=1.0, rate=2.0)

    assert changed(lambda: settings, change)
    assert changed(lambda: settings, lambda: (vars(settings).pop("decay"), setattr(settings, "momentum", 1.0)))


class Table(dict):
    pass


def test_attributes_of_a_container_s_own_class():
    table = Table(rate=1.0)
    table.scale = 2.0
    assert changed(lambda: table, lambda: setattr(table, "scale", 3.0))
    assert changed(lambda: table, lambda: table.update(rate=2.0))


def test_what_is_found_twice_is_compared_twice():
    both = [1, 2]
    for name in ("first", "second"):
        held = types.SimpleNamespace(first=both, second=both)
        assert changed(lambda held=held: held, lambda held=held, name=name: setattr(held, name, [5, 6]))
        held = types.SimpleNamespace(first=(), second=())  # one object
        assert changed(lambda held=held: held, lambda held=held, name=name: setattr(held, name, (7,)))


def test_a_parameter_in_the_place_of_another_that_is_none():
    layer = torch.nn.Linear(2, 2)
    layer.register_parameter("more", None)

    def change():
        layer.more, layer.bias = layer.bias, None

    assert changed(lambda: layer, change)


def test_a_snapshot_keeps_no_class_alive():
    class Local:
        pass

    held, its = Local(), weakref.ref(Local)
    function = lambda: held  # noqa: E731
    found = Snapshot(function)
    function = held = Local = None
    gc.collect()
    assert its() is None and found


def test_a_snapshot_keeps_nothing_alive():
    class Big:
        def __init__(self):
            self.tensor = torch.zeros(3)

    big = Big()
    function = lambda: big  # noqa: E731
    found = Snapshot(function)
    alive = [weakref.ref(x) for x in (big, big.tensor, function)]
    big = function = None
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3 and found


def test_instances_of_whole_types_are_not_looked_into():
    settings = Settings()
    function = lambda: settings  # noqa: E731
    before = Snapshot(function, (Settings,))
    settings.rate = 7.0
    assert before.arrays(function) is not None


def test_classes_of_the_main_script_are_looked_into():
    module = types.ModuleType("__main__")
    source = """
STEP = 1
class Model:
    def __call__(self, x): return x + STEP
model = Model()
def f(x): return model(x)
"""
    exec(source, vars(module))
    assert changed(module.f, lambda: setattr(module, "STEP", 2))
    assert changed(module.f, lambda: setattr(module.Model, "extra", lambda self: 0))


@pytest.mark.parametrize("kind", ["property", "staticmethod", "classmethod", "of the base"])
def test_what_classes_of_the_main_script_refer_to_by_the_way(kind):
    """Other than by plain methods of their own: this is sent with the class, too."""
    module = types.ModuleType("__main__")
    source = f"""
STEP = 1
class Base:
    rate = 1.0
    {"" if kind == "of the base" else "@" + kind}
    def by(*_): return STEP
class Model({"Base" if kind == "of the base" else "object"}):
    {"pass" if kind == "of the base" else "by = vars(Base)['by']"}
model = Model()
def f(x): return model.by
"""
    exec(source, vars(module))
    assert changed(module.f, lambda: setattr(module, "STEP", 2))
    assert changed(module.f, lambda: setattr(module.Base, "rate", 2.0)) is (kind == "of the base")


def test_which_part_cannot_be_pickled():
    lock = threading.Lock()

    def inner():
        return lock

    def outer():
        return inner()

    assert unpicklable_part(outer).startswith(
        "'lock', used in test_which_part_cannot_be_pickled.<locals>.inner (lock): "
    )
    assert unpicklable_part(functools.partial(len, lock)).startswith("argument 0 of the partial (lock)")
    assert unpicklable_part(functools.partial(dict, a=lock)).startswith("argument 'a' of the partial (lock)")
    assert "a default argument of" in unpicklable_part(lambda x=lock: x)
    holder = types.SimpleNamespace(lock=lock)
    assert "the object of the method" in unpicklable_part(types.MethodType(lambda self: 0, holder))
    assert unpicklable_part(lambda: RATE) == ""


class Trainer:
    def __init__(self):
        self.writer = types.SimpleNamespace(files={"events": [threading.Lock()]})
        self.head = torch.nn.Sequential(torch.nn.ReLU())
        self.head[0].seen = threading.Lock()

    def step(self, x):
        return x


def test_objects_of_ctypes(shared_mesh):
    """Arrays travel; a library and what it has would arrive as something else."""
    mesh = shared_mesh({"data": 2})
    three = (ctypes.c_int * 3)(1, 2, 3)
    assert mesh.run(lambda: [*three, type(three) is ctypes.c_int * 3]) == [[1, 2, 3, True]] * 2
    library = ctypes.CDLL(None)

    class Point(ctypes.Structure):
        _fields_ = (("x", ctypes.c_int),)

    for name, what in {"library": library, "Point": Point, "point": Point(1), "kind": ctypes.CFUNCTYPE(None)}.items():
        function = eval(f"lambda: {name}", {name: what})
        with pytest.raises(MeshError, match=f"'{name}', used in .*ctypes that can't be imported.*mesh.remote"):
            mesh.run(function)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch, which copies the module
def test_a_module_of_torch_export(shared_mesh):
    """Nor can torch pickle one: what it has of the compiler ends in an error that names a ContextVar."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    apply, params = functional(torch.export.export(model, (torch.ones(5, 3),)).module())
    torch.testing.assert_close(apply(params, torch.ones(5, 3)), model(torch.ones(5, 3)))
    with pytest.raises(MeshError, match=r"module that torch\.export made.*export the model after it"):
        shared_mesh({"data": 2}).run(apply, params, torch.ones(5, 3))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_what_else_torch_export_makes(shared_mesh):
    """A program, and modules with the names of the original, which hold tensors that torch can't copy."""
    program = torch.export.export(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), (torch.ones(5, 3),))
    unflattened = torch.export.unflatten(program)
    for made, what in ((program, "program"), (unflattened, "module")):
        with pytest.raises(SpmdError, match=r"functional .*: pass the module from before torch\.export"):
            functional(made)
        for function, args in ((lambda made: None, (made,)), (lambda held=made: None, ())):
            with pytest.raises(MeshError, match=rf"a {what} that torch\.export made.*export the model after it"):
                shared_mesh({"data": 2}).run(function, *args)


SCRIPT = """
import contextlib
import functools
import weakref
from spmd import Mesh

made = []

class Table:
    @functools.cached_property
    def rows(self):
        made.append(1)
        return [1, 2]

@functools.singledispatch
def depth(x):
    return 0

@depth.register
def _(x: list):
    return 1 + max(map(depth, x))

class Kinds:
    @functools.singledispatchmethod
    def of(self, x):
        return "any"

    @of.register
    def _(self, x: int):
        return "a number in " + self.of([x])

class Key:
    pass

key = Key()
notes = weakref.WeakKeyDictionary({key: 5})

@contextlib.contextmanager
def noted(number):
    made.append(number)
    yield

@noted(3)
def counted(x):
    return made[-1] + notes[key]

logged = functools.wraps(depth)(lambda x: depth(x) + 1)
mesh, table = Mesh({"data": 2}), Table()
print(mesh.run(lambda: (counted(1), counted(1), logged([1])))[1], made)
print(mesh.run(lambda: (table.rows is table.rows, len(made), depth([[1], [[2]]]), Kinds().of(1)))[1])
table.rows.append(3)
depth.register(set, lambda x: 7)
print(mesh.run(lambda: (table.rows, len(made), depth(set())))[1])
"""


def test_what_functools_makes_in_classes_of_the_script(tmp_path):
    """A cached property has a lock, before Python 3.12, a function for several types weak references, and a decorator
    made of a context manager a generator."""
    status, out, err = run(script(tmp_path, SCRIPT))
    assert (status, out) == (0, "(8, 8, 2) []\n(True, 1, 3, 'a number in any')\n([1, 2, 3], 1, 7)\n"), err


def test_where_the_part_lies_that_cannot_be_pickled():
    trainer = Trainer()
    assert unpicklable_part(trainer.step).endswith("'_thread.lock' object, which is self.writer.files['events'][0]")
    assert unpicklable_part(lambda: trainer.writer).endswith("which is trainer.writer.files['events'][0]")
    del trainer.writer
    step = trainer.step
    assert unpicklable_part(lambda: step).endswith("which is step.__self__.head.0.seen")
    looped = types.SimpleNamespace(lock=threading.Lock())
    looped.again = looped
    assert unpicklable_part(lambda: looped).endswith("which is looped.lock")


def test_sources_of_typed_functions():
    lines = ["def typed(x):\n", "    return x\n"]
    linecache.cache["<typed-1>"] = (29, None, lines, "<typed-1>")
    space: dict = {}
    exec(compile("".join(lines), "<typed-1>", "exec"), space)
    typed = space["typed"]
    assert typed_sources(lambda x: typed(x)) == {"<typed-1>": lines}
    assert typed_sources(len) == {}


# -- with ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def spied(make_mesh, monkeypatch):
    """A mesh, and what was told to its ranks, by kind."""
    mesh, told = make_mesh({"data": 2}), []
    note_what_is_told(mesh, monkeypatch, lambda message, _: told.append(type(message).__name__))
    return mesh, told


def test_a_function_is_sent_once(spied):
    mesh, told = spied
    scale = 2

    @spmd(mesh=mesh)
    def double(x):
        return x * scale

    x = put(torch.ones(2), mesh=mesh)
    for _ in range(4):
        x = double(x)
    # The function, the structure of its arguments, and what the calls have in common.
    assert float(x.full()[0]) == 16.0 and told.count("Ship") == 3
    told.clear()

    scale = 3
    # The function anew, and what calls of it have in common.
    assert float(double(x).full()[0]) == 48.0 and told.count("Ship") == 2
    scale = 2
    told.clear()
    assert float(double(x).full()[0]) == 32.0

    told.clear()
    for _ in range(3):
        assert mesh.run(identity, 5) == [5, 5]
    assert told.count("Ship") == 1
    other = lambda: 1  # noqa: E731
    for _ in range(3):
        mesh.run(other)
    assert told.count("Ship") == 2


def identity(x):
    return x


def test_what_nobody_needs_is_forgotten(spied):
    mesh, _ = spied

    def shipped_now() -> int:
        return mesh.run(shipped_on_rank)[0]

    before = shipped_now()
    for number in range(5):
        mesh.run(lambda number=number: number)
    assert shipped_now() <= before + 1
    table = torch.zeros(1 << 16)
    holder = lambda: table.sum()  # noqa: E731
    mesh.run(identity, 0)
    mesh.run(holder)
    with_table = shipped_now()
    del holder
    gc.collect()
    assert shipped_now() == with_table - 1
    assert len(mesh.driver.shipped._packets) <= before + 3


@dataclasses.dataclass(slots=True)
class Owned:
    owner: object


def test_a_dropped_trainer_is_freed_though_its_step_refers_to_it(make_mesh):
    """What ranks know of the step was kept, and kept its trainer, through objects that can't be referred to weakly."""
    mesh = make_mesh({"data": 1})

    class Trainer:
        def __init__(self):
            self.opt = optimizer(torch.optim.SGD, schedule=self.rate)
            self.owned = Owned(self)
            self.step = spmd(self._step, mesh=mesh)

        def rate(self, step):
            return 1.0

        def _step(self, x):
            return x + 1

    trainer = Trainer()
    for _ in range(3):
        assert float(trainer.step(torch.tensor(1.0))) == 2.0
    alive = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert alive() is None


def test_what_calls_have_noted_is_forgotten_with_their_function(make_mesh):
    """A program may define functions without end."""
    mesh, x, captured = make_mesh({"data": 2}), torch.ones(2), {"turn": 0}
    changing = spmd(lambda x: x + captured["turn"], mesh=mesh)
    for captured["turn"] in range(12):
        spmd(lambda x: x + 1, mesh=mesh)(x).full()
        assert float(changing(x).full()[0]) == captured["turn"] + 1
    gc.collect()
    assert max(mesh.run(noted_on_rank)) <= 3
    del changing
    gc.collect()
    mesh.run(bool)
    assert mesh.run(noted_on_rank) == [0, 0]


def noted_on_rank() -> int:
    """Of how many kinds of calls this rank remembers something."""
    return len(state_of_rank()._noted)


def shipped_on_rank() -> int:
    """How many objects this rank has been sent and not told to forget."""
    return len(state_of_rank()._shipped)


def state_of_rank():
    import gc

    from spmd.mesh.rank.state import RankState

    (state,) = [obj for obj in gc.get_objects() if issubclass(type(obj), RankState)]
    return state


@dataclasses.dataclass
class Added:
    """One that can't be hashed, since it is compared by value."""

    by: int

    def __call__(self, x):
        return x + self.by


def test_a_function_that_is_sent_for_one_call_is_there_for_that_call(shared_mesh):
    mesh, added = shared_mesh({"data": 2}), Added(1)
    assert mesh.run(added, 1) == [2, 2] and mesh.run(Added(2), 1) == [3, 3] and mesh.submit(Added(3), 1).result() == 4
    added.by = 4
    assert mesh.run(added, 1) == [5, 5]


def test_a_dropped_function_frees_its_mesh():
    """Neither the functions sent to a mesh nor their snapshots keep it alive."""
    mesh = Mesh({"data": 1})
    alive = weakref.ref(mesh)

    @spmd(mesh=mesh)
    def step(x):
        return x + len(mesh.axes)

    assert float(step(torch.tensor(1.0))) == 2.0
    mesh.run(lambda: mesh.rank)
    driver = mesh.driver
    mesh = step = None
    gc.collect()
    assert alive() is None and driver.closed == "nothing refers to it any more"


def test_a_function_that_cannot_be_sent(shared_mesh):
    mesh, lock = shared_mesh({"data": 2}), threading.Lock()
    with pytest.raises(
        MeshError, match=r"cannot be sent to the ranks, because 'lock', used in .*<lambda> .lock.: "
    ) as e:
        mesh.run(lambda: lock)
    assert "pass what it needs as an argument" in str(e.value) and "Mesh({'data': 2}" in str(e.value)
    for call, part in (
        (lambda: mesh.run(identity, lock), "argument 0"),
        (lambda: mesh.submit(identity, lock), "argument 0"),
        (lambda: spmd(identity, mesh=mesh)({"a": [lock]}), r"argument 0\['a'\]\[0\] of identity"),
    ):
        with pytest.raises(MeshError, match=rf"a call cannot be sent to the ranks, because of {part} \(lock\): cannot"):
            call()
    assert mesh.run(lambda: 1) == [1, 1]


def test_the_module_path_of_now_is_used(shared_mesh, tmp_path, monkeypatch):
    mesh = shared_mesh({"data": 2})
    (tmp_path / "helper_made_late.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import helper_made_late

    assert mesh.run(helper_made_late.answer) == [42, 42]


def test_modules_of_a_class_of_their_own(shared_mesh):
    """As torch has them; cloudpickle takes them along where a function names them."""
    mesh, namespace = shared_mesh({"data": 2}), torch.ops.aten

    def step(x):
        assert torch.backends.cudnn.is_available() in (True, False)
        return torch.ops.aten.add(x, namespace.mul(x, x))

    assert spmd(step, mesh=mesh)(torch.full((), 3.0)).item() == 12


def test_a_module_that_the_ranks_cannot_import(shared_mesh):
    mesh, module = shared_mesh({"data": 2}), types.ModuleType("only_here")
    exec("def f():\n    return 1", vars(module))
    module.f.__module__ = "only_here"

    sys.modules["only_here"] = module
    try:
        for _ in range(2):
            for call in (lambda: mesh.run(module.f), lambda: mesh.run(len, [module.f])):
                with pytest.raises(ModuleNotFoundError, match="only_here") as caught:
                    call()
                if sys.version_info >= (3, 11):
                    assert any("same paths on all hosts, or install" in note for note in caught.value.__notes__)
        assert mesh.run(lambda: 1) == [1, 1]
    finally:
        del sys.modules["only_here"]


def test_a_module_that_fails_on_the_ranks(shared_mesh, tmp_path, monkeypatch):
    """Where in it is told each time that the function is called, and that it was being read."""
    mesh, here = shared_mesh({"data": 2}), os.getpid()
    source = f"import os\nif os.getpid() != {here}:\n    raise OSError('no disk')\ndef answer():\n    return 42\n"
    (tmp_path / "helper_that_fails.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    import helper_that_fails

    for _ in range(2):
        with pytest.raises(OSError, match="no disk") as caught:
            mesh.run(helper_that_fails.answer)
        remote = str(caught.value.__cause__)
        assert 'helper_that_fails.py", line 3, in <module>' in remote and remote.count('File "') == 1, remote
        assert sys.version_info < (3, 11) or "reading a function that was sent to it" in str(caught.value.__notes__)


def test_a_large_closure_is_named_with_its_size(shared_mesh):
    """Once, when it is sent; a large argument, which goes its own way, is not warned of."""
    mesh = shared_mesh({"data": 2})
    table = torch.zeros(27_000_000)
    step = spmd(lambda x: x + table[0], mesh=mesh)
    with pytest.warns(
        UserWarning, match=r"'table', used in .*lambda.* \(108 MB\), is sent to every rank: put\(\) it once"
    ):
        step(torch.ones(2))
    step(torch.ones(2))
    assert spmd(lambda x: x[:2], mesh=mesh)(table).tolist() == [0.0, 0.0]


def test_a_class_stays_as_the_program_has_made_it_when_results_of_it_arrive(shared_mesh):
    """Its methods were replaced by copies from a rank, which saw the globals of then."""
    mesh = shared_mesh({"data": 2})
    notebook = {"__name__": "__main__", "torch": torch, "spmd": spmd, "mesh": mesh, "dataclasses": dataclasses}
    exec(
        """
scale = 1

@dataclasses.dataclass
class CellState:
    steps: int
    times = 3
    def scaled(self):
        return self.steps * scale * self.times

step = spmd(lambda state: CellState(state.steps + 1), mesh=mesh)
state = step(step(CellState(0)))
scale = 10
found = [state.scaled(), step(state).scaled(), mesh.run(lambda: CellState(4))[1].scaled()]
CellState.times = 5
found += [step(state).scaled(), mesh.run(lambda: CellState(4).scaled())[1]]
""",
        notebook,
    )
    assert notebook["found"] == [60, 90, 120, 150, 200]


def test_a_class_that_a_rank_has_made_is_as_the_program_changes_it(shared_mesh):
    mesh = shared_mesh({"data": 2})
    made = mesh.run(lambda: type("MadeOnRank", (), {"size": 1}))[0]
    assert mesh.run(lambda: made.size) == [1, 1]
    made.size = 2
    assert mesh.run(lambda: made.size) == [2, 2]


def test_a_class_of_several_functions_is_what_each_call_finds_in_the_program(shared_mesh):
    """Also after a change back, of which the ranks had the other function last; and without what it lost meanwhile."""
    mesh = shared_mesh({"data": 2})
    notebook = {"__name__": "__main__", "torch": torch, "spmd": spmd, "mesh": mesh}
    exec(
        """
scale, one, found = 1, torch.ones(()), []

class CellBase:
    rate = 1

class CellRate(CellBase):
    rate = 2
    def scaled(self):
        return self.rate * scale

def both():
    found.append((float(first(one)), float(second(one))))

first = spmd(lambda x: x * CellRate().scaled(), mesh=mesh)
second = spmd(lambda x: x * CellRate().scaled() + hasattr(CellRate, "more"), mesh=mesh)
first(one)
scale = 10
second(one)
scale = 1
both()
CellRate.rate = 1  # as the class before it has
both()
CellRate.rate, CellRate.more = 5, True
both()
del CellRate.rate, CellRate.more
both()
""",
        notebook,
    )
    assert notebook["found"] == [(2, 2), (1, 1), (5, 6), (1, 1)]


def test_what_a_rank_sets_of_a_class_stays_while_calls_of_two_functions_alternate(shared_mesh):
    """A cache of a class would be filled anew in every call."""
    mesh = shared_mesh({"data": 2})
    notebook = {"__name__": "__main__", "abc": __import__("abc")}
    exec(
        """
class CellCache(abc.ABC):
    table, made, old = None, [], True
    @classmethod
    def get(cls):
        if cls.table is None:
            cls.table = {}
            cls.made.append(1)
            del cls.old
        return len(cls.made), hasattr(cls, "old")

CellCache.register(int)

def train():
    return *CellCache.get(), isinstance(1, CellCache)

def evaluate():
    return *CellCache.get(), isinstance(1, CellCache)
""",
        notebook,
    )
    train, evaluate = notebook["train"], notebook["evaluate"]
    assert [mesh.run(function)[1] for function in (train, evaluate) * 3] == [(1, False, True)] * 6


@pytest.mark.parametrize("kind", ["typing.NamedTuple", "dict"])
def test_a_class_of_arguments_is_as_the_program_changes_it(shared_mesh, kind):
    """And stays so when results of it come back."""
    mesh = shared_mesh({"data": 2})
    notebook = {"__name__": "__main__", "torch": torch, "spmd": spmd, "mesh": mesh}
    exec(
        f"""
import typing
scale = 1

class CellPoint({kind}):
    x: torch.Tensor
    def scaled(self):
        return (self["x"] if isinstance(self, dict) else self.x) * scale

point = CellPoint(x=torch.ones(()))
step = spmd(lambda point: point.scaled(), mesh=mesh)
same = spmd(lambda point: point, mesh=mesh)
found = [float(step(point)), float(same(point).scaled())]
scale = 10
found += [float(step(point)), float(same(point).scaled()), float(point.scaled())]
CellPoint.scaled = lambda self: torch.full((), 7.0)
found.append(float(step(point)))
""",
        notebook,
    )
    assert notebook["found"] == [1, 1, 10, 10, 10, 7]


def test_globals_in_the_body_of_a_class_within_a_function(shared_mesh):
    notebook = {"__name__": "__main__", "torch": torch}
    exec(
        """
rate, limits = 3, [2]

def step():
    class Settings:
        rate = rate
        @torch.no_grad()
        def of(self):
            class Inner:
                limit = limits[0]
            return self.rate + Inner.limit
    return Settings().of()
""",
        notebook,
    )
    assert shared_mesh({"data": 2}).run(notebook["step"]) == [5, 5]


def test_types_of_ones_own_in_annotations(shared_mesh):
    notebook = {"__name__": "__main__"}
    exec(
        """
import typing
Count = typing.NewType("Count", int)
Pages = typing.NewType("Pages", Count)
def step(x: Pages) -> Count:
    return Count(x + 1), Pages.__supertype__ is Count, Pages.__name__
""",
        notebook,
    )
    assert shared_mesh({"data": 2}).run(notebook["step"], 1)[0] == (2, True, "Pages")


def test_a_class_that_a_notebook_defines_anew_goes_with_the_old_cell(shared_mesh):
    """And with it the data that its methods refer to."""
    mesh = shared_mesh({"data": 2})
    cell = """
class CellConfig:
    def scale(self):
        return table[0]

table = torch.full((50_000,), 2.0)
step = spmd(lambda config, x: x * config.scale(), mesh=mesh)
assert float(step(CellConfig(), torch.ones(()))) == 2.0
"""

    def classes() -> int:
        gc.collect()
        return sum(issubclass(type(obj), type) and obj.__qualname__ == "CellConfig" for obj in gc.get_objects())

    notebook = {"__name__": "__main__", "torch": torch, "spmd": spmd, "mesh": mesh}
    for _ in range(5):
        exec(cell, notebook)
    assert max(mesh.run(classes)) <= 1 and classes() == 1
