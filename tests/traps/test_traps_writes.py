"""Steps that write to what they were given, or change what of Python's own they capture: before anything is lost."""

from __future__ import annotations

import argparse
import collections
import enum
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scripts import launched, run, script
from torch import Tensor, nn

from spmd import (
    Mesh,
    P,
    SpecError,
    SpmdError,
    data_parallel,
    ema,
    fetch,
    functional,
    optimizer,
    pmean,
    put,
    spmd,
    value_and_grad,
)
from spmd.mesh import trees
from spmd.mesh.purity.entries import GivenObjects

X = torch.arange(4.0)


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh]) -> Mesh:
    return shared_mesh({"data": 2})


# -- what a step is given ---------------------------------------------------------------------------------------------


def added(x):
    x += 1


def added_below(x):
    x.data.add_(1)


def added_to_a_view(x):
    x.view(2, 2)[0].mul_(2)


def added_to_each(x):
    torch._foreach_add_([x], 1.0)


def written_out(x):
    torch.add(x, 1, out=x)


def rectified(x):
    nn.functional.relu_(x.sub_(2))


def kept_as_a_mean(x):
    nn.functional.batch_norm(torch.ones(3, len(x)), x, torch.ones(len(x)), training=True)


WRITES = [added, added_below, added_to_a_view, added_to_each, written_out, rectified, kept_as_a_mean]


@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.parametrize("write", WRITES)
def test_arguments_stay_whole(mesh: Mesh, write: Callable, check: str) -> None:
    """A value that all ranks of a host see, and a cut one, are what they were after the step was refused."""
    for spec in (P(), P("data")):
        x = put(X, spec, mesh=mesh)
        if write is added_to_a_view and spec.entries:
            continue

        def step(x):
            write(x)
            return 0

        with pytest.raises(SpecError, match="step changed its input argument 0 in place"):
            spmd(step, mesh=mesh, check=check)(x)
        assert torch.equal(x.full(), X)


@pytest.mark.parametrize("flags", [("out of place", "in place"), (0, 1)])
def test_flags_that_a_step_has_not_had_yet(mesh: Mesh, flags: tuple) -> None:
    x = put(X, mesh=mesh)

    @spmd(mesh=mesh)
    def step(x, how, times):
        return (x.mul_(times) if how == flags[1] else x * times).sum()

    for times in (0.0, 1.0):
        assert float(step(x, flags[0], times)) == 6.0 * times
    for _ in range(2):
        with pytest.raises(SpecError, match="step changed its input argument 0 in place"):
            step(x, flags[1], 2.0)
        assert torch.equal(x.full(), X)


def test_flags_of_a_step_that_counts_its_calls(mesh: Mesh) -> None:
    x = put(X, mesh=mesh)

    @spmd(mesh=mesh)
    def step(x, count, in_place):
        return (x.mul_(2) if in_place else x * 2).sum()

    for count in range(20):
        assert float(step(x, count, False)) == 12.0
    with pytest.raises(SpecError, match="step changed its input argument 0 in place"):
        step(x, 20, True)
    assert torch.equal(x.full(), X)


def test_an_argument_that_another_stream_uses(mesh: Mesh) -> None:
    """Messages of GPUs, and the program's own streams, so keep memory from being reused; torch calls that a write."""

    def step(x):
        library = torch.library.Library("aten", "IMPL")
        library.impl("record_stream", lambda x, stream: None, "CPU")
        x.record_stream(torch.Stream(stream_id=0, device_index=0, device_type=1))
        return x.sum()

    assert float(spmd(step, mesh=mesh)(put(X, mesh=mesh))) == float(X.sum())


def test_an_argument_written_through_numpy(mesh: Mesh) -> None:
    """Torch knows nothing of that: it is found, though not prevented."""

    def step(x):
        x.numpy()[0] = 7
        return 0

    with pytest.raises(SpecError, match="step changed its input argument 0 in place"):
        spmd(step, mesh=mesh)(put(X, mesh=mesh))


def test_a_captured_tensor_written_below_torch_s_count(mesh: Mesh) -> None:
    weight = torch.ones(4)

    @spmd(mesh=mesh)
    def step(x):
        weight.data.add_(x)
        return x

    with pytest.raises(SpecError, match=r"step changes what it captures in place.*a tensor of shape \[4\]"):
        step(X)


def test_what_a_step_makes_itself_may_be_written(mesh: Mesh) -> None:
    @spmd(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def step(x):
        y = x.clone()
        y[0] = 5
        y.data.mul_(2)
        return torch.relu_(y.sub_(1))

    assert step(X).full().tolist() == [9, 1, 9, 5]


PROGRAM = """
import torch
from spmd import Mesh, SpecError, spmd

mesh, x = Mesh({"data": 2}), torch.ones(3)


@spmd(mesh=mesh)
def step(x):
    return x.add_(1)


try:
    step(x)
except SpecError as error:
    print("in place" in str(error), x.tolist())
calls = []  # launched ranks run the script, and show it
spmd(lambda x: (calls.append(1), x)[1], mesh=mesh)(x)
print(len(calls))
"""


def test_launched_ranks_keep_their_tensors(tmp_path: Any) -> None:
    status, out, err = launched(2, script(tmp_path, PROGRAM))
    assert status == 0, err
    assert sorted(out.split("\n")) == ["", "1", "1", "True [1.0, 1.0, 1.0]", "True [1.0, 1.0, 1.0]"]


# -- what of Python's own a step captures -----------------------------------------------------------------------------

total = 0


class Phase(enum.Enum):
    WARMUP = 1
    MAIN = 2


class Trainer:
    rate = 0.5

    def __init__(self) -> None:
        self.steps = 0

    def step(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x

    def halve(self, x: Tensor) -> Tensor:
        self.rate = self.rate / 2  # the class has it
        return x


def appends() -> Callable:
    losses: list[Tensor] = []
    return lambda x: (losses.append(x.sum()), x)[1]


def appends_deeper() -> Callable:
    history = {"loss": [1.0]}
    return lambda x: (history["loss"].append(2.0), x)[1]


def appends_in_order() -> Callable:
    history = collections.OrderedDict(loss=[1.0])
    return lambda x: (history["loss"].append(2.0), x)[1]


def begins_another_phase() -> Callable:
    state = {"phase": Phase.WARMUP}
    return lambda x: (state.update(phase=Phase.MAIN), x)[1]


def exchanges() -> Callable:
    best = [3.0]

    def step(x):
        best[0] = 2.0
        return x

    return step


def counts() -> Callable:
    seen: collections.Counter[str] = collections.Counter()
    return lambda x: (seen.update(["x"]), x)[1]


def queues() -> Callable:
    recent: collections.deque[float] = collections.deque([1.0, 2.0], maxlen=2)
    return lambda x: (recent.append(3.0), x)[1]


def rebinds() -> Callable:
    weight = torch.ones(4)

    def step(x):
        nonlocal weight
        weight = weight - x
        return weight

    return step


def counts_globally() -> Callable:
    def step(x):
        global total
        total += 1
        return x

    return step


def keeps_in_a_default() -> Callable:
    def step(x, memory=[0]):  # noqa: B006
        memory.append(1)
        return x

    return step


def writes_numpy() -> Callable:
    table = np.zeros(4)

    def step(x):
        table[0] += 1
        return x

    return step


def writes_a_large_array() -> Callable:
    table = np.zeros(1 << 17)
    return lambda x: (table.__iadd__(1.0), x)[1]


def fills_in_a_long_list() -> Callable:
    losses = [0.0] * 1000
    return lambda x: (losses.__setitem__(300, 1.0), x)[1]


def counts_in(state: Any) -> Callable[[], Callable]:
    def step(x):
        state.steps += 1
        return x

    return lambda: step


def appends_to_a_list_of_a_class() -> Callable:
    losses = collections.UserList([1.0])
    return lambda x: (losses.append(2.0), x)[1]


def draws(generator: Any, draw: Callable[[Any], Any]) -> Callable[[], Callable]:
    return lambda: lambda x: x + float(draw(generator))


def iterates() -> Callable:
    batches = iter([1.0, 2.0])
    return lambda x: x + next(batches)


def schedules() -> Callable:
    opt = torch.optim.SGD([torch.ones(1)], lr=0.5)

    def step(x):
        opt.param_groups[0]["lr"] *= 0.5
        return x

    return step


CHANGES = {
    "a list": (appends, "losses with 0 entries before, and 1 after"),
    "a list in a dictionary": (appends_deeper, r"history\['loss'\] with 1 entries before, and 2 after"),
    "a list in an OrderedDict": (appends_in_order, r"history\['loss'\] with 1 entries before, and 2 after"),
    "a member of an Enum": (begins_another_phase, r"another state\['phase'\]"),
    "an entry": (exchanges, r"another best\[0\]"),
    "a counter": (counts, "a count of seen"),
    "a deque": (queues, r"another recent\[0\]"),
    "a variable": (rebinds, "another weight"),
    "a global": (counts_globally, "another total"),
    "a default": (keeps_in_a_default, "a default argument of"),
    "an attribute": (lambda: Trainer().step, "another self.steps"),
    "a class's attribute": (lambda: Trainer().halve, "another self.rate"),
    "an array": (writes_numpy, "an element of table"),
    "a large array": (writes_a_large_array, "an element of table"),
    "a long list": (fills_in_a_long_list, r"another losses\[300\]"),
    "a namespace": (counts_in(types.SimpleNamespace(steps=0)), r"another state\.steps"),
    "a namespace of argparse": (counts_in(argparse.Namespace(steps=0)), r"another state\.steps"),
    "a list of a class": (appends_to_a_list_of_a_class, r"losses\.data with 1 entries before, and 2 after"),
    "a generator of torch": (draws(torch.Generator(), lambda g: torch.rand((), generator=g)), "drawn from generator"),
    "a generator of NumPy": (draws(np.random.default_rng(0), lambda g: g.random()), "drawn from generator"),
    "an old generator of NumPy": (draws(np.random.RandomState(0), lambda g: g.rand()), "drawn from generator"),
    "a generator of Python": (draws(random.Random(0), lambda g: g.random()), "drawn from generator"),
    "an iterator": (iterates, "items taken from batches"),
    "a learning rate": (schedules, r"another opt.param_groups\[0\]\['lr'\]"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_would_stay_on_a_rank(mesh: Mesh, name: str) -> None:
    make, words = CHANGES[name]
    kept = "changes what it captures: the change stays on its rank"
    with pytest.warns(UserWarning, match=f"{kept}.*{words}.*return its|{kept}.*{words}.*torch.rand"):
        spmd(make(), mesh=mesh)(X)


@pytest.mark.parametrize("shards", [None, 2])
def test_changes_in_a_loss(mesh: Mesh, shards: int | None) -> None:
    losses: list[float] = []

    def loss(params, batch):
        losses.append(1.0)
        return loss_fn(params, batch)

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params, batch):
        return value_and_grad(loss)(params, batch)

    with pytest.warns(UserWarning, match=r"step changes what it captures.*got losses with 0 entries before"):
        step({"w": torch.ones(1)}, X)


def memoizes() -> Callable:
    masks: dict[int, Tensor] = {}
    lazy: Any = None
    warned = False
    seen: set[str] = set()
    flags = [None, False]

    def step(x):
        nonlocal lazy, warned
        if len(x) not in masks:
            masks[len(x)] = torch.ones(len(x))
        if lazy is None:
            lazy = torch.ones(1)
        if not warned:
            warned = True
        seen.add("x")
        flags[:] = [1, True]
        return x * masks[len(x)] * lazy

    return step


def test_memos_are_no_mistake(mesh: Mesh, recwarn: pytest.WarningsRecorder) -> None:
    assert torch.equal(spmd(memoizes(), mesh=mesh)(X).full(), X)
    apply, params = functional(nn.Linear(4, 1))
    spmd(lambda params, x: apply(params, x), mesh=mesh)(params, X)
    assert not recwarn.list


SCRIPT = """
import functools, torch
from spmd import Mesh, spmd


@functools.lru_cache(maxsize=8)
def mask(length):
    return torch.full((length,), 2.0)


mesh = Mesh({"data": 2})
print(spmd(lambda x: x * mask(len(x)), mesh=mesh)(torch.ones(3)).tolist())
print(mesh.run(lambda: mask.cache_parameters()["maxsize"]))
"""


def test_a_cached_function_of_the_script(tmp_path: Any) -> None:
    """Pickled as Python pickles it, it would be looked for in the rank's own `__main__`."""
    status, out, err = run(script(tmp_path, SCRIPT))
    assert (status, out) == (0, "[2.0, 2.0, 2.0]\n[8, 8]\n"), err


# -- what a step returns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda x: lambda: x, "function"),
        (lambda x: (i for i in range(3)), "generator"),
        (lambda x: map(int, [1]), "map"),
        (lambda x: nn.Linear(1, 1), "Linear"),
    ],
)
def test_results_that_are_no_values(mesh: Mesh, make: Callable, kind: str) -> None:
    with pytest.raises(SpecError, match=rf"result \['of'\]\[1\] of <lambda> is no value.*got {kind}"):
        spmd(lambda x: {"of": [x, make(x)]}, mesh=mesh)(X)


def loss_fn(params, batch):
    return (params["w"] * batch).square().mean()


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_new_parameters_that_are_dropped(mesh: Mesh, cls: Any) -> None:
    opt = optimizer(cls, lr=0.1)
    params = {"w": torch.ones(1)}

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, state, batch, keep):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        new, state = opt.step(params, grads, state)
        return params, state, loss, *((new,) if keep else ())

    with pytest.raises(SpecError, match=r"step returns parameters as it was given them, and drops those that opt.step"):
        step(params, opt.init(params), X, False)
    assert step(params, opt.init(params), X, True)[3]["w"].item() < 1


def test_an_optimizer_s_arguments_and_results_mixed_up(mesh: Mesh) -> None:
    opt = ema(optimizer(torch.optim.AdamW, lr=0.1))
    params = {"w": torch.ones(1)}

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, state, batch, way):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        if way == "swapped":
            return *opt.step(grads, params, state), loss
        new, made = opt.step(params, grads, state)
        return new, state if way == "old" else {**made, "old": state} if way == "both" else (), loss

    with pytest.raises(
        SpecError, match=r"step gives opt.step as gradients what it takes gradients by.*opt.step\(params, gr"
    ):
        step(params, opt.init(params), X, "swapped")
    with pytest.raises(SpecError, match=r"step returns its optimizer's state as it was given it, and drops"):
        step(params, opt.init(params), X, "old")
    for way in ("both", "neither"):
        step(params, opt.init(params), X, way)


def test_new_parameters_that_are_assigned(mesh: Mesh, recwarn: pytest.WarningsRecorder) -> None:
    """To the dictionary of an argument, which is the rank's own; they are looked for among the results."""

    def step(params, batch, returns):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        for name in grads:
            params[name] = params[name] - 0.1 * grads[name]
        return (loss, {name: value * 1 for name, value in params.items()}) if returns else loss

    def divided(params, batch):
        batch["x"] = batch["x"] / 2
        return value_and_grad(loss_fn)(params, batch["x"])[0]

    params = {"w": torch.ones(2)}
    assert spmd(data_parallel(step), mesh=mesh)(params, X, True)[1]["w"].full()[0] < 1
    spmd(data_parallel(divided), mesh=mesh)(params, {"x": X})
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"step gives its argument 0\['w'\] another value.*return \{\*\*params"):
        spmd(data_parallel(step), mesh=mesh)(params, X, False)


def append(x: torch.Tensor, log: list) -> torch.Tensor:
    log.append(x.sum())
    return log[-1]


def count(x: torch.Tensor, state: dict) -> torch.Tensor:
    state["step"] += 1
    return x


def note(x: torch.Tensor, stats: dict) -> torch.Tensor:
    stats["sum"] = x.sum()
    return x


def cache(x: torch.Tensor, found: dict) -> torch.Tensor:
    found["x"] = 2 * x
    return x


@pytest.mark.parametrize(
    ("body", "argument", "problem"),
    [
        (append, [], "append adds to its argument 1,"),
        (append, [torch.ones(())], "append adds to its argument 1,"),
        (count, {"step": 0}, r"count gives its argument 1\['step'\] another value,"),
        (note, {"n": 1}, "note adds to its argument 1,"),
        (cache, {}, "cache adds to its argument 1,"),
    ],
    ids=["append", "append another", "count", "note", "cache"],
)
def test_entries_that_are_added_to_an_argument(mesh: Mesh, body: Any, argument: Any, problem: str) -> None:
    with pytest.warns(UserWarning, match=problem + " and does not return it: the caller never sees it"):
        spmd(body, mesh=mesh)(X, argument)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spmd(lambda x, its: (body(x, its), its), mesh=mesh)(X, argument)
        spmd(lambda x, its: (body(x, its), copied(its)), mesh=mesh)(X, argument)
    assert not caught


def copied(entries: Any) -> Any:
    return [*entries] if isinstance(entries, list) else {**entries, "also": 1.0}


class Steps:
    """One that counts; the program's own."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self) -> int:
        self.taken += 1
        return self.taken


class Slotted:
    """The same as an iterator, without a dictionary of its attributes."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0

    def __next__(self) -> int:
        self.taken += 1
        return self.taken


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "torch's": (torch.Generator, lambda its: torch.rand((), generator=its), "drawn from argument 1.*torch.rand"),
    "NumPy's": (lambda: np.random.default_rng(0), lambda its: its.random(), "drawn from argument 1.*torch.rand"),
    "Python's": (lambda: random.Random(0), lambda its: its.random(), "drawn from argument 1.*torch.rand"),
    "in a dict": (lambda: {"g": torch.Generator()}, lambda its: torch.rand((), generator=its["g"]), r"argument 1\['g'"),
    "map": (
        lambda: map(float, [1, 2]),
        map.__next__,
        "items taken from argument 1.*return it, and pass what comes back",
    ),
    "with slots": (Slotted, Slotted.__next__, "another argument 1.taken.*return it, and pass what comes back"),
    "iterator": (lambda: iter([1.0, 2.0]), next, "items taken from argument 1.*return it, and pass what comes back"),
    "object": (Steps, Steps.take, "another argument 1.taken.*return it, and pass what comes back"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_among_the_arguments_that_is_changed(mesh: Mesh, name: str) -> None:
    """Each call would begin with a copy of the caller's: the same random numbers in every step."""
    made, use, problem = OBJECTS[name]
    with pytest.warns(UserWarning, match="does not return it: the caller never sees it.*" + problem):
        spmd(lambda x, its: x + use(its), mesh=mesh)(X, made())


def test_objects_among_the_arguments_that_may_change(mesh: Mesh, recwarn: pytest.WarningsRecorder) -> None:
    """One that is returned, one that is seeded in the step, and one that belongs to the batch."""

    def seeded(x, generator):
        return x + torch.rand((), generator=generator.manual_seed(3))

    _, steps = spmd(lambda x, steps: (x + steps.take(), steps), mesh=mesh)(X, Steps())
    spmd(seeded, mesh=mesh)(X, torch.Generator())
    spmd(data_parallel(lambda batch: pmean(batch["steps"].take() * batch["x"].mean(), "data")), mesh=mesh)(
        {"x": X, "steps": Steps()}
    )
    assert steps.taken == 1
    assert not recwarn.list


def drawn_and_returned(x: Any, its: Any, how: str) -> Any:
    generator = its.generator if isinstance(its, Drawing) else its
    if isinstance(generator, torch.Generator):
        return x + torch.rand((), generator=generator), generator.get_state()
    y = x + generator.random()
    if how == "state":
        return y, generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state
    return y, Drawing(generator)


class Drawing:
    """What holds a generator; the program's own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator


RETURNED: dict[str, tuple[Callable[[], Any], str]] = {
    "state of torch's": (torch.Generator, "state"),
    "state of NumPy's": (lambda: np.random.default_rng(0), "state"),
    "state of Python's": (lambda: random.Random(0), "state"),
    "in an object": (lambda: random.Random(0), "object"),
    "from one object into another": (lambda: Drawing(random.Random(0)), "object"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_generator_whose_state_is_returned(mesh: Mesh, recwarn: pytest.WarningsRecorder, name: str) -> None:
    """As itself, inside an object, or as its state alone: the caller can go on with it."""
    made, how = RETURNED[name]
    fetch(spmd(drawn_and_returned, mesh=mesh)(X, made(), how))
    assert not recwarn.list


def test_arguments_with_many_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their places are found once, not for each object: that took half a minute for two thousand."""
    treedef = trees.flatten([Steps() for _ in range(50)])[1]
    found: list[Any] = []

    class Counted:
        def accessors(self) -> list[Any]:
            found.append(treedef)
            return treedef.accessors()

    monkeypatch.setattr(trees, "places", lambda _: [""] * 50)
    GivenObjects([Steps() for _ in range(50)], Counted(), (), str)  # type: ignore[arg-type]
    assert len(found) == 1


def test_entries_that_a_body_adds_for_itself(mesh: Mesh, recwarn: pytest.WarningsRecorder) -> None:
    """To its batch, of what it was given, or not for long."""

    def body(params, batch, stack):
        batch["positive"], batch["count"] = batch["x"] > 0, batch["x"].sum()
        params["head"] = params["w"]
        params["double"] = 2 * params["w"]
        stack.append(batch.pop("y"))
        return params["double"].sum() + len(stack.pop())

    spmd(data_parallel(body), mesh=mesh)({"w": torch.ones(2)}, {"x": X, "y": X.clone()}, [torch.ones(2)])
    assert not recwarn.list


def test_an_update_that_is_skipped(mesh: Mesh) -> None:
    opt = optimizer(torch.optim.AdamW, lr=0.1)
    params = {"w": torch.ones(1)}

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, state, batch):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        new = opt.step(params, grads, state)
        return new if loss < 0 else (params, state)

    assert step(params, opt.init(params), X)[0]["w"].item() == 1


def train(step: Callable, params: Any, state: Any, batch: Tensor, way: str) -> tuple[Any, Any]:
    """One step; the parameters and state that the program goes on with."""
    if way == "alone":
        step(params, state, batch)
    elif way == "by name":
        step(batch=batch, params=params, opt_state=state)
    elif way == "only the loss":
        _, _, loss = step(params, state, batch)
        assert loss.ndim == 0
    else:
        params, state, _ = step(params, state, batch)
    return params, state


def new_step(mesh: Mesh, opt: Any = None) -> tuple[Callable, Any, Any]:
    """A training step, with parameters and the state of its optimizer."""
    opt = opt or optimizer(torch.optim.AdamW, lr=0.1)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, opt_state, batch):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        return *opt.step(params, grads, opt_state), loss

    params = {"w": torch.ones(2)}
    return step, params, opt.init(params)


@pytest.mark.parametrize("way", ["alone", "by name", "only the loss"])
def test_results_that_the_program_drops(mesh: Mesh, way: str) -> None:
    step, params, state = new_step(mesh)
    with pytest.warns(UserWarning, match=r"step returns new values of params, opt_state, and this program drops them"):
        for _ in range(4):
            train(step, params, state, X.clone(), way)


@pytest.mark.parametrize("which", ["opt_state", "params"])
def test_results_of_which_the_program_drops_some(mesh: Mesh, which: str) -> None:
    """What the other results are used for meanwhile changes nothing: the next call has the old values of these."""
    step, params, state = new_step(mesh)
    kept = "params" if which == "opt_state" else "opt_state"
    words = f"those of {kept} alone: each call begins with the same {which}: write params, opt_state, loss = step"
    with pytest.warns(UserWarning, match=words):
        for _ in range(5):
            if which == "opt_state":
                params, _, loss = step(params, state, X.clone())
            else:
                _, state, loss = step(params, state, X.clone())
            float(loss)


def test_an_optimizer_that_begins_anew(mesh: Mesh, recwarn: pytest.WarningsRecorder) -> None:
    """For each task of meta-learning; and one without state, of which nothing is lost."""
    step, params, state = new_step(mesh)
    for _ in range(5):
        adapted, _, _ = step(params, state, X.clone())
        params = {"w": params["w"] + 0.1 * (adapted["w"] - params["w"])}
    step, params, state = new_step(mesh, optimizer(torch.optim.SGD, lr=0.1))
    for _ in range(5):
        params, _, _ = step(params, state, X.clone())
    assert not recwarn.list


def test_results_that_are_dropped_around_a_call_that_fails(mesh: Mesh) -> None:
    """It uses none: neither another step's, nor one of this step."""
    step, params, state = new_step(mesh)
    fails = spmd(lambda: 1 // 0, mesh=mesh)
    with pytest.warns(UserWarning, match="this program drops them"):
        for _ in range(4):
            train(step, params, state, X.clone(), "alone")
            for wrong in (fails, lambda: step(params, state, torch.ones(()))):
                with pytest.raises((ZeroDivisionError, SpecError)):
                    wrong()


def test_results_that_another_call_uses(mesh: Mesh, recwarn: pytest.WarningsRecorder) -> None:
    """As of steps for a few samples each, from the same parameters."""
    step, params, state = new_step(mesh)
    evaluate = spmd(data_parallel(lambda params, batch: pmean(loss_fn(params, batch), "data")), mesh=mesh)
    for _ in range(5):
        evaluate(step(params, state, X.clone())[0], X)
    assert not recwarn.list


@pytest.mark.parametrize("ways", [["assigned"] * 5, ["alone"] * 2 + ["assigned"] * 3, ["the same batch"] * 5], ids=str)
def test_results_that_the_program_uses(mesh: Mesh, recwarn: pytest.WarningsRecorder, ways: list[str]) -> None:
    """Nor are they in the first two batches of a program that warms up, and in one that measures time."""
    step, params, state = new_step(mesh)
    for way in ways:
        if way == "the same batch":
            step(params, state, X)
        else:
            params, state = train(step, params, state, X.clone(), way)
    assert not recwarn.list


def test_an_evaluation_by_a_step_that_can_train(mesh: Mesh, recwarn: pytest.WarningsRecorder) -> None:
    """Its parameters are what they were, so nothing is dropped; when it trains, they are not."""
    opt = optimizer(torch.optim.AdamW, lr=0.1)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, opt_state, batch, train):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        return *(opt.step(params, grads, opt_state) if train else (params, opt_state)), loss

    params = {"w": torch.ones(2)}
    state = opt.init(params)
    for _ in range(12):
        step(params, state, X.clone(), False)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="this program drops them"):
        for _ in range(12):
            step(params, state, X.clone(), True)


def test_what_cannot_be_compared_is_dropped(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    @data_parallel
    def step(params, state, batch):
        return params, state, pmean(batch.mean(), "data")

    params, state = {"w": torch.ones(3).to_sparse()}, {"m": torch.ones(3)}
    with pytest.warns(UserWarning, match="this program drops them"):
        for _ in range(5):
            step(params, state, X.clone())


def test_a_module_given_to_an_optimizer_s_step() -> None:
    opt = optimizer(torch.optim.AdamW, lr=0.1)
    params = {"w": torch.ones(1)}
    with pytest.raises(SpmdError, match=r"opt.step takes the tree of parameters \(got a Linear\)"):
        opt.step(nn.Linear(1, 1), params, opt.init(params))
