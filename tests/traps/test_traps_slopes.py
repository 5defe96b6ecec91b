"""Losses whose value is a mean over samples and whose gradient is none, each with its warning; and ordinary ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from spmd import Mesh, data_parallel, fetch, functional, mean_of, spmd, value_and_grad

torch.manual_seed(0)
NET, PARAMS = functional(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)))
BATCH = {
    "x": torch.randn(20, 6),
    "y": torch.randint(0, 5, (20,)),
    "other": torch.randn(20, 5),
    "weight": torch.rand(20),
}


def hooked(module: nn.Module, hook: Callable) -> Any:
    module.register_full_backward_hook(lambda module, given, by: hook(given))
    return functional(nn.Sequential(nn.Linear(6, 16), module, nn.Linear(16, 5)))[0]


OF_MODULE = hooked(nn.Tanh(), lambda given: (given[0] / given[0].norm(),))
ONLY_READS = hooked(nn.Sigmoid(), lambda given: None)


class Backward(Function):
    """The identity, with another backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable) -> Tensor:
        ctx.its = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        return ctx.its(given), None


def out_with(hook: Callable, p: Any, b: Any) -> Tensor:
    out = NET(p, b["x"])
    out.register_hook(hook)
    return out


def entropy(out: Tensor, b: Any) -> Tensor:
    return F.cross_entropy(out, b["y"])


def weighed(p: Any, b: Any) -> Tensor:
    """Two losses, each divided by its own value."""
    first, second = entropy(NET(p, b["x"]), b), F.mse_loss(NET(p, b["x"]), b["other"])
    return first / first.detach() + second / second.detach()


def policy(p: Any, b: Any) -> Tensor:
    """Of PPO: while the policy is the old one all ratios are 1, and the mean is that of the advantages, which is 0."""
    chosen = NET(p, b["x"]).log_softmax(1).gather(1, b["y"][:, None])[:, 0]
    advantages = (b["weight"] - b["weight"].mean()) / b["weight"].std()
    return -((chosen - chosen.detach()).exp() * advantages).mean()


def hardest(p: Any, b: Any) -> Tensor:
    each = F.cross_entropy(NET(p, b["x"]), b["y"], reduction="none")
    return each.mean() + each.max() - each.max().detach()


def counted(p: Any, b: Any) -> Any:
    each = F.cross_entropy(out_with(lambda g: g / g.norm(), p, b), b["y"], reduction="none")
    return mean_of((each * b["weight"]).sum(), b["weight"].sum())


WRONG: dict[str, Callable] = {
    "hook": lambda p, b: entropy(out_with(lambda g: g / g.norm(), p, b), b),
    "hook of a module": lambda p, b: entropy(OF_MODULE(p, b["x"]), b),
    "function": lambda p, b: entropy(Backward.apply(NET(p, b["x"]), lambda g: g / g.norm()), b),
    "losses by their values": weighed,
    "policy": policy,
    "maximum": hardest,
    "hook in mean_of": counted,
}
RIGHT: dict[str, Callable] = {
    "hook that reads": lambda p, b: entropy(out_with(lambda g: None, p, b), b),
    "hook that scales": lambda p, b: entropy(out_with(lambda g: 3 * g.nan_to_num(), p, b), b),
    "hook that clips numbers": lambda p, b: entropy(out_with(lambda g: g.clamp(-1e-2, 1e-2), p, b), b),
    "hook that clips samples": lambda p, b: entropy(out_with(lambda g: g / g.norm(dim=1, keepdim=True), p, b), b),
    "hook of a module that reads": lambda p, b: entropy(ONLY_READS(p, b["x"]), b),
    "reversal": lambda p, b: entropy(Backward.apply(NET(p, b["x"]), lambda g: -g), b),
    "straight through": lambda p, b: entropy((out := NET(p, b["x"])) + (out.round() - out).detach(), b),
    "weights by detached losses": lambda p, b: (
        (each := F.cross_entropy(NET(p, b["x"]), b["y"], reduction="none")) * each.detach()
    ).mean(),
    "value of zero": lambda p, b: ((out := NET(p, b["x"])) * b["other"] - out.detach() * b["other"]).mean(),
    "mean_of": lambda p, b: mean_of(
        (F.cross_entropy(NET(p, b["x"]), b["y"], reduction="none") * b["weight"]).sum(), b["weight"].sum()
    ),
}


def run(mesh: Mesh, loss_fn: Callable, params: Any = PARAMS, **options: Any) -> tuple[list[str], float]:
    """What is warned of, and by how much the gradients differ from those of one process."""
    step = spmd(data_parallel(lambda p, batch: value_and_grad(loss_fn)(p, batch), **options), mesh=mesh)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        gradients = fetch(step(params, BATCH)[1])
        alone = value_and_grad(loss_fn)(params, BATCH)[1]
    sizes = {name: float(own.abs().max()) or 1.0 for name, own in alone.items()}
    away = max(float((gradients[name] - own).abs().max()) / sizes[name] for name, own in alone.items())
    return [str(one.message) for one in found], away


@pytest.mark.parametrize("name", WRONG)
def test_gradients_that_are_no_mean(shared_mesh: Callable[..., Mesh], name: str) -> None:
    (text,), away = run(shared_mesh({"data": 2}), WRONG[name])
    assert text.startswith("the gradient of ") and "is not a mean over samples" in text and "a rank's samples" in text
    assert away > 1e-2


@pytest.mark.parametrize("name", RIGHT)
def test_gradients_that_are_a_mean(shared_mesh: Callable[..., Mesh], name: str) -> None:
    texts, away = run(shared_mesh({"data": 2}), RIGHT[name])
    assert texts == [] and away < 1e-4


def test_a_shard_begins_with_a_gradient_of_full_size(shared_mesh: Callable[..., Mesh]) -> None:
    """So numbers that ranks would clip rightly are clipped otherwise; scaling is right."""
    mesh = shared_mesh({"data": 2})
    (text,), away = run(mesh, lambda p, b: entropy(out_with(lambda g: g.clamp(-1e-2, 1e-2), p, b), b), shards=4)
    assert "the gradient of " in text and "a virtual shard's samples" in text and away > 1e-2
    texts, away = run(mesh, lambda p, b: entropy(out_with(lambda g: 2 * g, p, b), b), shards=4)
    assert texts == [] and away < 1e-4


def test_a_gradient_by_complex_parameters(shared_mesh: Callable[..., Mesh]) -> None:
    """It is a sum of parts whose sizes, without their angles, do not add up."""
    params = {"bias": torch.randn(5, dtype=torch.complex64), "unused": torch.zeros(3, dtype=torch.complex64)}

    def loss_fn(p: Any, b: Any) -> Tensor:
        return entropy(b["other"] * p["bias"].real + p["bias"].imag, b)

    texts, away = run(shared_mesh({"data": 2}), loss_fn, params)
    assert texts == [] and away < 1e-4
