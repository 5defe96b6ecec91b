"""Steps that change what they capture, or train what is none of their arguments: each with the message that it gets."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spmd import (
    Mesh,
    SpecError,
    data_parallel,
    functional,
    functional_with_buffers,
    optimizer,
    pmean,
    spmd,
    value_and_grad,
)

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh]) -> Mesh:
    mesh = shared_mesh({"data": 2})
    # Torch's optimizers import it when they are first used: a rank whose peer fails meanwhile is interrupted within.
    mesh.run(lambda: importlib.import_module("torch._dynamo") and None)
    return mesh


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_an_ordinary_training_loop_in_a_step(mesh: Mesh, cls: Any, shards: int | None) -> None:
    module = linear()
    opt = cls(module.parameters(), lr=0.1)

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params, batch):
        opt.zero_grad()
        loss = sum(p.square().sum() for p in module.parameters())
        loss.backward()
        opt.step()
        return loss.detach()

    for _ in range(2):  # not the first time only
        with pytest.raises(
            SpecError, match=rf"{cls.__name__}.step\(\) was called in a step on parameters.*functional\("
        ):
            step({}, X)


def test_an_optimizer_that_steps_at_a_later_call(mesh: Mesh) -> None:
    """What is looked at before and after the first call only is found by torch's hook then."""
    module = linear()
    opt = torch.optim.SGD(module.parameters(), lr=0.1)

    @spmd(mesh=mesh)
    def step(x, turn):
        if turn.item() > 2:
            opt.step()
        return x

    step(X, torch.tensor(1))
    step(X, torch.tensor(2))
    with pytest.raises(SpecError, match=r"SGD.step\(\) was called in a step on parameters that the step captures"):
        step(X, torch.tensor(3)).full()


@pytest.mark.parametrize("captured", [True, False])
def test_an_optimizer_whose_parameters_have_no_gradients(mesh: Mesh, captured: bool) -> None:
    """`optimizer.step()` beside gradients that are values: it would return, and have changed nothing."""
    apply, params = functional(linear())
    theirs = torch.optim.Adam(params.values())
    ours = optimizer(torch.optim.SGD, lr=0.1, schedule=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1))

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, opt_state, batch):
        loss, grads = value_and_grad(lambda p: apply(p, batch).square().mean())(params)
        if captured:
            theirs.step()
        else:
            type(theirs)(params.values()).step()
        return *ours.step(params, grads, opt_state), loss

    with pytest.raises(SpecError, match=r"Adam.step\(\) was called in a step on parameters that have no gradients"):
        step(params, ours.init(params), X)

    @spmd(mesh=mesh)
    @data_parallel
    def right(params, opt_state, batch):
        assert theirs.param_groups
        grads = value_and_grad(lambda p: apply(p, batch).square().mean())(params)[1]
        return ours.step(params, grads, opt_state)

    state = ours.init(params)
    for _ in range(3):
        params, state = right(params, state, X)
    assert state["count"].item() == 3


def test_an_optimizer_that_is_given_a_closure_fills_in_gradients_itself(mesh: Mesh) -> None:
    target = torch.tensor([1.0, 2.0], requires_grad=True)

    @spmd(mesh=mesh)
    def fitted() -> torch.Tensor:
        weight = torch.zeros(2, requires_grad=True)
        search = torch.optim.LBFGS([weight])

        def closure() -> torch.Tensor:
            search.zero_grad()
            loss = (weight - target.detach()).square().sum()
            loss.backward()
            return loss

        for number in range(4):
            search.step(closure) if number % 2 else search.step(closure=closure)
        return weight.detach()

    assert torch.allclose(fitted().full(), target, atol=1e-3)


def test_backward_alone(mesh: Mesh) -> None:
    module = linear()

    @spmd(mesh=mesh)
    @data_parallel
    def step(batch):
        loss = module(batch).mean()
        loss.backward()
        return pmean(loss.detach(), "data")

    with pytest.raises(SpecError, match=r"step calls backward\(\) on what it captures.*got a gradient of 'weight'"):
        step(X)


class Trainer:
    def __init__(self) -> None:
        self.models = {"net": linear()}

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.models["net"].weight.mul_(0.9)
        return batch


def test_a_module_of_an_object(mesh: Mesh) -> None:
    with pytest.raises(SpecError, match=r"step changes what it captures in place.*a change of 'weight' of the mod"):
        spmd(Trainer().step, mesh=mesh)(X)


class Script:
    """Trains its own model, as scripts do."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"weight": torch.zeros(3)}
        self.steps = [0]

    def train(self, batch: Tensor) -> Tensor:
        loss = self.model(batch).square().mean()
        loss.backward()
        self.opt.step()
        return pmean(loss.detach(), "data")

    def rebind(self, batch: Tensor) -> Tensor:
        self.state = {"weight": self.state["weight"] + 1}
        return self.state["weight"]

    def rebind_entry(self, batch: Tensor) -> Tensor:
        self.state["weight"] = self.state["weight"] + 1
        return self.state["weight"]

    def compute(self, batch: Tensor) -> Tensor:
        self.steps = [1]  # which has no tensor
        return self.state["weight"] + 1


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train", r"parameters that the step captures"),
        ("rebind", "another 'state'"),
        ("rebind_entry", "another 'weight'"),
    ],
)
def test_an_object_that_trains(mesh: Mesh, name: str, words: str, given: bool) -> None:
    """As what a method is bound to, and as an argument."""
    trainer = Script()
    with pytest.raises(SpecError, match=words):
        if given:
            spmd(data_parallel(getattr(Script, name)), mesh=mesh)(trainer, X)
        else:
            spmd(data_parallel(getattr(trainer, name)), mesh=mesh)(X)


def test_an_object_that_computes(mesh: Mesh) -> None:
    trainer = Script()
    assert spmd(data_parallel(trainer.compute), mesh=mesh)(X).full().tolist() == [1, 1, 1]


def test_a_model_and_its_optimizer_as_arguments(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    @data_parallel
    def step(model, opt, batch):
        loss = model(batch).square().mean()
        loss.backward()
        opt.step()
        return pmean(loss.detach(), "data")

    trainer = Script()
    with pytest.raises(SpecError, match="parameters that the step captures"):
        step(trainer.model, trainer.opt, X)


def test_a_captured_tensor(mesh: Mesh) -> None:
    count = torch.zeros(3)

    @spmd(mesh=mesh)
    def step(x):
        count.add_(1)
        return x + count

    with pytest.raises(SpecError, match=r"a change of a tensor of shape \[3\].*pass it as an argument, and return its"):
        step(torch.ones(3))


def test_a_captured_tensor_in_a_long_or_deep_container(mesh: Mesh) -> None:
    """Where other objects are not looked for any more."""
    long, deep = [torch.zeros(3) for _ in range(300)], {"a": {"b": {"c": {"d": [{"e": torch.zeros(3)}]}}}}

    def first(x):
        long[200].add_(1)
        return x

    def last(x):
        deep["a"]["b"]["c"]["d"][0]["e"].add_(1)
        return x

    for step in (first, last):
        with pytest.raises(SpecError, match=r"a change of a tensor of shape \[3\].*pass it as an argument, and return"):
            spmd(step, mesh=mesh)(torch.ones(3))


@pytest.mark.parametrize("shards", [None, 2])
def test_running_statistics(mesh: Mesh, shards: int | None) -> None:
    norm = nn.BatchNorm1d(3).requires_grad_(False)
    apply, params = functional(linear())

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params, batch):
        return value_and_grad(lambda params, batch: apply(params, norm(batch)).square().mean())(params, batch)

    with pytest.raises(SpecError, match=r"'num_batches_tracked' of the module BatchNorm1d.*functional_with_buff"):
        step(params, X)
    norm.eval()
    step(params, X)


class Keeps(nn.Module):
    """Does something with what it keeps from call to call."""

    def __init__(self, change: Callable[[Any, Tensor], Any], **kept: Any):
        super().__init__()
        self.layer, self.change = linear(), change
        for name, value in kept.items():
            if name == "statistic":
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.layer(x)


def counts(net: Any, x: Tensor) -> None:
    net.calls += 1


def averages(net: Any, x: Tensor) -> None:
    net.running = 0.9 * net.running + 0.05


def averages_a_tensor(net: Any, x: Tensor) -> None:
    net.mean = 0.9 * net.mean + 0.1 * x.mean().detach()


def averages_in_place(net: Any, x: Tensor) -> None:
    net.mean.mul_(0.9).add_(0.1)


def averages_what_is_in_a_list(net: Any, x: Tensor) -> None:
    net.means[0].mul_(0.9)


def averages_what_is_in_a_dict(net: Any, x: Tensor) -> None:
    net.means["first"].mul_(0.9)


def assigns_a_buffer(net: Any, x: Tensor) -> None:
    net.statistic = 0.9 * net.statistic + 0.1


def appends(net: Any, x: Tensor) -> None:
    net.history.append(1)


def draws(net: Any, x: Tensor) -> None:
    torch.rand((), generator=net.generator)


KEPT: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "a count": (counts, {"calls": 0}, r"got another \S+\.calls\): return it.*functional_with_buffers"),
    "an average": (averages, {"running": 1.0}, r"another \S+\.running"),
    "a number of NumPy": (averages, {"running": np.float32(1)}, r"another \S+\.running"),
    "a tensor": (averages_a_tensor, {"mean": torch.zeros(())}, r"another \S+\.mean"),
    "a tensor in place": (averages_in_place, {"mean": torch.zeros(())}, r"another \S+\.mean"),
    "a tensor in a list": (averages_what_is_in_a_list, {"means": [torch.ones(())]}, r"another \S+\.means\[0\]"),
    "one in a dict": (
        averages_what_is_in_a_dict,
        {"means": {"first": torch.ones(())}},
        r"another \S+\.means\['first'\]",
    ),
    "a buffer": (assigns_a_buffer, {"statistic": torch.zeros(())}, r"\bstatistic\b|\.statistic\b"),
    "a list": (appends, {"history": []}, r"\S+\.history with 0 entries before"),
    "a generator": (draws, {"generator": torch.Generator()}, r"numbers drawn from \S+\.generator"),
}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kept", KEPT)
def test_what_a_module_keeps_besides_parameters(mesh: Mesh, kept: str, deep: bool) -> None:
    """Captured, a rank's copy of it changes; made functional, it forgets the change after each call."""
    change, state, words = KEPT[kept]
    net: nn.Module = Keeps(change, **copy.copy(state))
    for _ in range(6 if deep else 0):
        net = nn.Sequential(net)
    apply, params = functional(net)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, batch):
        return value_and_grad(lambda params, batch: apply(params, batch).square().mean())(params, batch)

    with pytest.warns(UserWarning, match=f"(changes what it keeps, which its apply drops|drops what).*({words})"):
        step(params, X)
    net.requires_grad_(False)
    with pytest.warns(UserWarning, match=f"changes what it captures: the change stays on its rank.*({words})"):
        spmd(lambda x: net(x).sum(), mesh=mesh)(X)


def caches(net: Any, x: Tensor) -> None:
    if len(x) > net.longest:
        net.longest, net.table = len(x), torch.ones(len(x), 1)
    if net.first is None:
        net.first, net.warned = 1, True
    net.size = np.int64(3)
    net.height, net.width, net.shape = *x.shape, [*x.shape]
    net.last, net.loss = x, x.mean()


def test_caches_of_modules_are_no_mistake(mesh: Mesh, recwarn: pytest.WarningsRecorder) -> None:
    """As of rotary embeddings and masks, and what a module leaves for its caller."""
    for table in (None, torch.ones(2, 1)):
        kept = {"longest": 0, "table": table, "first": None, "warned": False, "last": None, "loss": 0.0}
        kept |= {"height": -1, "width": -1, "shape": 0}
        net = Keeps(caches, size=np.int64(3), **kept)
        apply, params = functional(net)
        net.requires_grad_(False)

        def step(params, batch, apply=apply):
            return value_and_grad(lambda params, batch: apply(params, batch).square().mean())(params, batch)

        spmd(data_parallel(step), mesh=mesh)(params, X)
        spmd(lambda x, net=net: net(x).sum(), mesh=mesh)(X)
    assert not recwarn.list


def buffers_after_a_step(mesh: Mesh, model: nn.Module) -> Any:
    apply, params, buffers = functional_with_buffers(model)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, buffers, batch):
        def loss_fn(params, batch):
            out, new = apply(params, buffers, batch)
            return out.square().mean(), new

        return value_and_grad(loss_fn, has_aux=True)(params, batch)

    (_, new), _ = step(params, buffers, X)
    return new


def test_buffers_that_are_assigned_and_returned(mesh: Mesh, recwarn: pytest.WarningsRecorder) -> None:
    new = buffers_after_a_step(mesh, Keeps(assigns_a_buffer, statistic=torch.zeros(())))
    assert new["statistic"].item() == pytest.approx(0.1) and not recwarn.list


def test_a_captured_tensor_that_requires_gradients(mesh: Mesh) -> None:
    scale = torch.ones(1, requires_grad=True)
    apply, params = functional(linear())

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, batch):
        return value_and_grad(lambda params, batch: (apply(params, batch) * scale).mean())(params, batch)

    with pytest.raises(SpecError, match=r"got a tensor with requires_grad=True of shape \[1\] that is none of its"):
        step(params, X)


@pytest.mark.parametrize("shards", [None, 2])
def test_all_leaves_are_frozen(mesh: Mesh, shards: int | None) -> None:
    apply, params = functional(linear().requires_grad_(False))

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params, batch):
        return value_and_grad(lambda params, batch: apply(params, batch).mean())(params, batch)

    with pytest.raises(SpecError, match=r"nothing that can be trained.*got 2 leaves, of which 2 are frozen.*requires"):
        step(params, X)
    _, params = functional(linear())
    with pytest.raises(SpecError, match=r"nothing that can be trained.*got 0 leaves.*choose parameters by name"):
        step({name: value for name, value in params.items() if value.requires_grad}, X)


@pytest.mark.parametrize("shards", [None, 2, 3])
def test_gradients_that_are_zero_for_every_leaf(mesh: Mesh, shards: int | None) -> None:
    module = linear().requires_grad_(False)
    _, params = functional(linear())

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params, batch):
        return value_and_grad(lambda params, batch: module(batch).square().mean())(params, batch)

    with pytest.raises(SpecError, match="got gradients that are zero for every leaf"):
        step(params, X)


# -- what is right ----------------------------------------------------------------------------------------------------


def test_an_optimizer_over_tensors_of_the_step(mesh: Mesh) -> None:
    """An inner loop that trains what it has made itself."""

    @spmd(mesh=mesh)
    def step(w):
        inner = w.clone().requires_grad_()
        opt = torch.optim.SGD([inner], lr=0.5)
        for _ in range(2):
            opt.zero_grad()
            inner.square().sum().backward()
            opt.step()
        return inner.detach()

    assert step(torch.ones(2)).full().tolist() == [0.0, 0.0]


def test_a_captured_model_that_stays(mesh: Mesh) -> None:
    """A teacher, whose outputs are learned; nothing of it changes."""
    teacher, student = linear(), copy.deepcopy(linear())
    apply, params = functional(student)
    opt = optimizer(torch.optim.SGD, lr=0.1)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, state, batch):
        with torch.no_grad():
            target = teacher(batch)
        loss, grads = value_and_grad(lambda params, batch: (apply(params, batch) - 2 * target).square().mean())(
            params, batch
        )
        return *opt.step(params, grads, state), loss

    state = opt.init(params)
    first = None
    for _ in range(3):
        params, state, loss = step(params, state, X)
        first = loss.item() if first is None else first
    assert loss.item() < first


def test_statistics_that_are_returned(mesh: Mesh) -> None:
    new = buffers_after_a_step(mesh, nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    assert int(new["0.num_batches_tracked"]) == 1


@pytest.mark.parametrize("shards", [None, 2])
def test_statistics_that_are_dropped(mesh: Mesh, shards: int | None, recwarn: pytest.WarningsRecorder) -> None:
    """By a model with batch norm that was made functional without its buffers."""

    def train(module: nn.Module) -> None:
        apply, params = functional(module)

        @spmd(mesh=mesh)
        @data_parallel(shards=shards)
        def step(params, batch):
            return value_and_grad(lambda params, batch: apply(params, batch).square().mean())(params, batch)

        step(params, X)

    norm = nn.BatchNorm1d(3)
    with pytest.warns(
        UserWarning, match=r"drops what.*got '0.running_mean', '0.running_var', .*functional_with_buffers"
    ):
        train(nn.Sequential(norm, nn.Linear(3, 1)))
    recwarn.clear()
    for kept in (norm.eval(), nn.BatchNorm1d(3, track_running_stats=False)):
        train(nn.Sequential(kept, nn.Linear(3, 1)))
    assert not recwarn.list


def test_a_function_given_to_run_may_change_what_it_captures(mesh: Mesh) -> None:
    module = linear()
    opt = torch.optim.SGD(module.parameters(), lr=0.1)

    def train(x):
        module(x).mean().backward()
        opt.step()
        return module.weight.detach().clone()

    first, second = mesh.run(train, X)
    assert torch.equal(first, second) and not torch.equal(first, module.weight)
